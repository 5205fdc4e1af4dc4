"""A slot at a half and at a third of its speed: work divided evenly, and by measured rates.

    python tests/benchmarks/slow_ranks.py [ranks] [pipeline] [step] [--programs 1 2] [--repeats 5] [--zero 1 3]

Two slots, each bound to one core; one, two ... compute-bound programs are bound to the second slot's core, so that all
processes of that slot get a half, a third ... of it.

- `ranks`: gradients and optimizer steps of an actor on ranks with whole models, ZeRO 1 and 3.
- `pipeline`: those of actor and critic in two stages; with rates, layers move and the schedule is searched again.
- `step`: a whole step of the quickstart's task with a model that saturates a core, rollout and rewards included: with
  `serial`, where only rates change the shares, and with `adaptive`, where idle slots take remaining work in any case.

In each repetition three plans alternate on the same rows or samples, from the same weights: `alone` is an even division
without the other programs, `even` the same with them, `by rates` with them and a rate of 2, 3 ... for the second slot.
*Ideal* is the time of `alone` if its work were divided over the remaining capacity: two slots, one at 1 / rate of its
speed. *Gained* is the fraction of the gap between `even` and ideal that is closed, *difference* the distance of the
weights of `by rates` from those of `even`, relative to their norm. Medians. Requires a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlfuse.cluster import placement
from rlfuse.config.compose import load
from rlfuse.config.schema import Config
from rlfuse.engines.pipeline.pipeline_trainer import PipelineTrainer
from rlfuse.engines.trainer.trainer_group import TrainerGroup
from rlfuse.fusion.policies import POLICIES
from rlfuse.run.build import run
from rlfuse.samples import Row
from rlfuse.step.colocation import hand_over_all, to_ranks
from rlfuse.step.controller import Controller

PARTS = ("ranks", "pipeline", "step")
VOCABULARY, ROWS = 512, 48
STEPS = 2
"""Timed steps after a warm-up step."""
TASK = ".cache/rlfuse/remainder/model"
BUSY = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
JOB = (
    "experiment=quickstart",
    "algorithm=grpo",
    "rollout.n=4",
    "rollout.max_num_seqs=256",
    "rollout.kv_cache_memory_mb=256",
    "data.max_response_length=160",
    "data.train_batch_size=32",
    "actor.ppo_mini_batch_size=32",
    "trainer.val_before_train=false",
    "trainer.save_freq=0",
    "trainer.logger=[]",
)


@dataclass(frozen=True)
class Turn:
    """Measurements of a plan."""

    seconds: float
    weights: dict[str, torch.Tensor]


Take = Callable[[Sequence[float]], Awaitable[Turn]]
"""Divides work by these rates of slots."""


@contextmanager
def busy_programs(core: int, count: int) -> Iterator[None]:
    """Run `count` busy programs on this core."""
    programs = [subprocess.Popen([sys.executable, "-c", BUSY, str(core)]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def relative_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference relative to the norm of `expected`."""
    one, other = (torch.cat([tensors[name].flatten().double() for name in expected]) for tensors in (found, expected))
    return float((one - other).norm() / other.norm())


async def compared(name: str, take: Take, options: argparse.Namespace) -> None:
    """Print the lines of the table; the three plans alternate."""
    core = sorted(os.sched_getaffinity(0))[1]
    await take([1.0, 1.0])
    for count in options.programs:
        measurements = []
        for _ in range(options.repeats):
            alone = await take([1.0, 1.0])
            with busy_programs(core, count):
                even = await take([1.0, 1.0])
                by_rates = await take([1.0, 1.0 + count])
            ideal = alone.seconds * 2 / (1 + 1 / (1 + count))
            gained = (even.seconds - by_rates.seconds) / (even.seconds - ideal)
            differ = relative_difference(by_rates.weights, even.weights)
            measurements.append((alone.seconds, even.seconds, by_rates.seconds, ideal, gained, differ))
        *seconds, gained, _ = [statistics.median(each) for each in zip(*measurements, strict=True)]
        least, most = min(each[4] for each in measurements), max(each[4] for each in measurements)
        times = " | ".join(f"{each:.2f} s" for each in seconds)
        differ = max(each[5] for each in measurements)
        print(f"| {name} | {count} | {times} | {gained:.0%} ({least:.0%} to {most:.0%}) | {differ:.0e} |", flush=True)


# Training ------------------------------------------------------------------------------------------------------------


def model_folder(layers: int) -> str:
    """Save a random policy."""
    folder = tempfile.mkdtemp(prefix="rlfuse-benchmark-")
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def make_rows() -> list[Row]:
    """Return ragged rows with the tensors that both losses read."""
    rng = np.random.default_rng(0)

    def row(i: int) -> Row:
        prompt, response = (rng.integers(3, VOCABULARY, rng.integers(10, 100)).astype(np.int32) for _ in range(2))
        names = ("old_log_probs", "advantages", "ref_log_probs", "values", "returns")
        tensors = {name: rng.normal(0, 0.3, len(response)).astype(np.float32) for name in names}
        return Row(prompt, response, tensors, id=str(i))

    return [row(i) for i in range(ROWS)]


def settings(layers: int, zero: int, stages: int) -> Config:
    """Return the settings of a job with two slots."""
    config = Config()
    config.model.path = config.critic.path = model_folder(layers)
    config.model.dtype, config.cluster.device, config.trainer.n_gpus_per_node = "float32", "cpu", 2
    config.actor.zero_stage, config.actor.ppo_max_token_len_per_gpu = zero, 1024
    config.training.pipeline_parallel_size = stages
    return config


async def weights_of(trainer: TrainerGroup | PipelineTrainer) -> dict[str, torch.Tensor]:
    """Return the actor's weights."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for i, names in enumerate(await trainer.bucket_plan()):
            await trainer.export_bucket(names, file := f"{folder}/{i}.safetensors")
            found |= load_file(file)
    return found


async def trained(trainer: TrainerGroup | PipelineTrainer, rows: list[Row]) -> float:
    """Return the seconds of a step of all trained models."""
    lengths, began = [len(row.response_ids) for row in rows], time.perf_counter()
    if isinstance(trainer, TrainerGroup):
        await trainer.accumulate(("actor",), rows)
        await trainer.step("actor", lengths)
        return time.perf_counter() - began
    metrics, _ = await trainer.train({"actor": rows, "critic": rows}, {})
    began = time.perf_counter()  # excluding the search
    for model in ("actor", "critic"):
        await trainer.step(model, lengths)
    return metrics["fusion/train_makespan_actual"] + time.perf_counter() - began


async def of_training(name: str, config: Config, slots: placement.Slots, options: argparse.Namespace) -> None:
    """Print the table of one kind of trainer."""
    kind = PipelineTrainer if config.training.pipeline_parallel_size > 1 else TrainerGroup
    trainer, _ = await kind.start(config, slots, cores=slots.cores)
    rows, saved = make_rows(), Path(tempfile.mkdtemp(prefix="rlfuse-benchmark-"))
    await trainer.save(saved)

    async def take(rates: Sequence[float]) -> Turn:
        await trainer.load(saved)
        await trainer.replan(rates, saved)
        await trained(trainer, rows)
        seconds = sum([await trained(trainer, rows) for _ in range(STEPS)])
        await trainer.drain()
        return Turn(seconds, await weights_of(trainer))

    await compared(name, take, options)
    for rank in trainer.ranks:
        ray.kill(rank)


async def training(options: argparse.Namespace) -> None:
    """Print the tables of `ranks` and `pipeline`."""
    slots = await placement.start(settings(1, 1, 1))
    try:
        for zero in options.zero if "ranks" in options.parts else ():
            await of_training(f"whole models, ZeRO {zero}", settings(4, zero, 1), slots, options)
        if "pipeline" in options.parts:
            await of_training("two stages", settings(12, 1, 2), slots, options)
    finally:
        placement.stop()


# A whole step --------------------------------------------------------------------------------------------------------


async def whole_steps(controller: Controller, options: argparse.Namespace) -> None:
    """Print the table of whole steps, with the same prompts, seeds and weights in every turn."""
    engines, tuning, saved = controller.engines, controller.tuning, Path(tempfile.mkdtemp(prefix="rlfuse-benchmark-"))
    await controller.update_weights(0)
    for number in (1, 2):  # learns lengths and costs
        with controller.journal.recorder.span("step", step=number):
            board = await controller.learn(number)
            await controller.update_weights(number)
        tuning.learn(board, await controller.journal.collect(number))
    await hand_over_all(to_ranks, engines.rollout, engines.trainer)
    await engines.trainer.save(saved)

    async def take(rates: Sequence[float]) -> Turn:
        await hand_over_all(to_ranks, engines.rollout, engines.trainer)
        await engines.trainer.load(saved)
        await controller.update_weights(2)
        tuning.rates.current = list(rates)
        tuning.rates.observe = lambda *_: None  # measurements of a turn must not affect its plan
        await engines.trainer.replan(rates)
        controller.groups.prompts.taken = 2
        await controller.journal.collect(3)
        began = time.perf_counter()
        with controller.journal.recorder.span("step", step=3):
            await controller.learn(3)
            await controller.update_weights(3)
        seconds = time.perf_counter() - began
        await controller.journal.collect(3)
        return Turn(seconds, await weights_of(engines.trainer))

    for policy in ("serial", "adaptive"):
        controller.policy = POLICIES[policy]
        await compared(f"a step, {policy}", take, options)


def prepare() -> None:
    """Write the quickstart's tokenizer and data."""
    subprocess.run([sys.executable, "-m", "rlfuse.cli", "prepare", "quickstart"], check=True)


def larger_policy() -> str:
    """Save the quickstart's tokenizer, and a random policy with widely varying response lengths."""
    folder = tempfile.mkdtemp(prefix="rlfuse-benchmark-")
    shutil.copytree(TASK, folder, dirs_exist_ok=True)
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "layer_types": 4 * ["full_attention"],
    }
    config = Qwen2Config.from_pretrained(TASK, **sizes)
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all")
    parser.add_argument("--programs", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--zero", type=int, nargs="+", default=[1, 3])
    options = parser.parse_args()
    options.parts = options.parts or PARTS
    print(
        "| work | programs | alone | even | by rates | ideal | gained | difference |\n" + "|---" * 8 + "|", flush=True
    )
    if {"ranks", "pipeline"} & set(options.parts):
        asyncio.run(training(options))
    if "step" in options.parts:
        prepare()
        with tempfile.TemporaryDirectory() as folder:
            where = (f"trainer.default_local_dir={folder}", "trainer.experiment_name=benchmark")
            job = load([*JOB, f"model.path={larger_policy()}", *where])
            run(job, lambda controller, _: whole_steps(controller, options))


if __name__ == "__main__":
    main()
