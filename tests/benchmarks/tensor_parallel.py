"""Tensor-parallel ranks against ranks with whole models or pipeline stages, and whole models under each ZeRO stage.

    python tests/benchmarks/tensor_parallel.py [--parts whole zero stages] [--ranks 2] [--hidden 512] [--layers 6]
                                               [--rows 8] [--tokens 256] [--repeats 7]
                                               [--zero 0 2 3] [--dtype bfloat16]

Reports seconds and the plan's prediction.

whole: a random Qwen2 under ZeRO 1, on two groups of real ranks, each rank bound to a core if there are enough: one
    group has whole models and divides the rows, the other shares every layer. The plan's speed of a rank comes from the
    probe of `rlfuse calibrate --probe`, which all ranks run concurrently (in bfloat16 with layers of the model's
    widths), and its link speed from a measured all-reduce: nothing comes from the measured passes. The memory that
    sharing saves is measured by `memory_peaks.py "two ranks, shared layers"`.
zero: the same with whole models only, a group for each ZeRO stage, two at a time, and two micro-batches per rank.
stages: gradients in 1F1B, one row per micro-batch, on four real ranks: a pipeline of four stages, and one of two stages
    whose layers two ranks share. Operations sleep for the planned duration (more ranks than cores); all-reduces and
    transfers are real, and the plan uses the measured duration of an all-reduce in two concurrent pairs.

Variants alternate, and ratios are within a repetition; medians are reported.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import median

import ray
import torch
from sequence_parallel import VOCABULARY, row
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlfuse.cluster import placement
from rlfuse.config.schema import Config
from rlfuse.engines.memory.activations import stage_parts
from rlfuse.engines.memory.model_sizes import shapes_of
from rlfuse.engines.pipeline.layout import pipelines_of
from rlfuse.engines.pipeline.pipeline_group import PipelineGroup
from rlfuse.engines.trainer.rank_group import RankGroup
from rlfuse.engines.trainer.trainer_group import TrainerGroup
from rlfuse.fusion.schedules.baselines import serial_1f1b
from rlfuse.samples import Row
from rlfuse.tools.planning.calibration import fit_hardware
from rlfuse.tools.planning.costs import costs_of
from rlfuse.tools.planning.features import Work
from rlfuse.tools.planning.hardware import Hardware, Links
from rlfuse.tools.planning.probe import Probe
from rlfuse.tools.planning.step_time import StepTimes, stage_shares

sys.path.insert(0, str(Path(__file__).parent.parent / "end_to_end"))
import pipelines

ray.cloudpickle.register_pickle_by_value(pipelines)  # ranks can't import from tests/
LARGE = 1 << 24
"""Elements of the all-reduce that measures the bandwidth."""
SLEEPING_FLOPS = 5e10
"""FLOP/s of sleeping ranks."""
PAIRS = """
| | separate, s (planned) | shared, s (planned) | shared / separate | planned ratio | error |
|---|---|---|---|---|---|"""


def model(folder: str, options: argparse.Namespace) -> None:
    """Save a random model."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=options.hidden, intermediate_size=3 * options.hidden, vocab_size=VOCABULARY)
    heads = dict(num_attention_heads=options.hidden // 64, num_key_value_heads=options.hidden // 128)
    made = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, num_hidden_layers=options.layers))
    made.to(getattr(torch, options.dtype)).save_pretrained(folder)


def job(folder: str, options: argparse.Namespace, ranks: int, width: int, stages: int = 1) -> Config:
    """Return a job; `width`: tensor parallel size."""
    config, half = Config(), options.tokens // 2
    config.model.path, config.model.dtype, config.algorithm.adv_estimator = folder, options.dtype, "grpo"
    config.trainer.n_gpus_per_node, config.training.tensor_model_parallel_size = ranks, width
    config.training.pipeline_parallel_size = stages
    config.data.max_prompt_length, config.data.max_response_length = options.tokens - half, half
    config.actor.ppo_mini_batch_size, config.rollout.n = options.rows, 1
    config.data.train_batch_size = options.rows
    config.actor.ppo_max_token_len_per_gpu = options.tokens * (options.rows if stages == 1 else 1)
    return config


def sums(rank) -> tuple[float, float]:
    """Return the median seconds of a small and a large all-reduce in the tensor parallel group, or over all ranks."""
    import torch.distributed as dist

    def seconds(size: int) -> float:
        numbers, taken = torch.zeros(size), []
        for _ in range(11):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(numbers, group=rank.tensor and rank.tensor.group)
            taken.append(time.perf_counter() - began)
        return median(taken)

    return seconds(1), seconds(LARGE)


async def links_of(group: RankGroup, width: int) -> Links:
    """Return the links that `width` ranks measure, by the plan's model of a ring all-reduce."""
    found = await asyncio.gather(*(rank.__ray_call__.remote(sums) for rank in group.ranks))
    short, long = found[0]
    sent = 2 * (width - 1) / width * 4 * LARGE
    return Links(sent / (long - short), within_s=short / (2 * (width - 1)), per_node=len(group.ranks))


# Whole models -------------------------------------------------------------------------------------------------------


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    """Return the seconds of `work`."""
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def turn(group: TrainerGroup, rows: Sequence[Row]) -> list[float]:
    """Return the seconds of log-probs, gradients and an optimizer step."""
    lengths = [len(each.response_ids) for each in rows]
    return [
        await timed(lambda: group.score(("actor",), rows)),
        await timed(lambda: group.accumulate(("actor",), rows)),
        await timed(lambda: group.step("actor", lengths)),
    ]


def predicted(config: Config, hardware: Hardware, options: argparse.Namespace) -> list[float]:
    """Return the same seconds by the plan."""
    costs = costs_of(config, shapes_of(config), hardware, options.tokens)
    tokens = options.rows * options.tokens / config.slots
    scored = costs.score_call_s + tokens / costs.score_tokens_per_s
    return [scored, costs.train_call_s + tokens / costs.train_tokens_per_s, costs.optimizer_s]


def probe(rank, folder: str | None) -> list[Work]:
    """Run the probe on a rank."""
    found = Probe(lambda line: None)
    found.measure(folder)
    return found.works


async def device_of(group: RankGroup, folder: str | None) -> Hardware:
    """Return the measured speed of a rank while the others are equally busy."""
    works = await asyncio.gather(*(rank.__ray_call__.remote(probe, folder) for rank in group.ranks))
    return replace(
        fit_hardware([work for each in works for work in each]), links=await links_of(group, len(group.ranks))
    )


async def alternate(
    jobs: Sequence[Config], folder: str, slots: placement.Slots, options: argparse.Namespace
) -> list[tuple[str, list[tuple[float, ...]], list[float]]]:
    """Return, per kind of work, its name, the seconds of each turn in the order of the jobs, and planned seconds."""
    groups = [(await TrainerGroup.start(each, slots, slots.cores))[0] for each in jobs]
    rows = [row(options.tokens, options.tokens // 2, seed, seed) for seed in range(options.rows)]
    hardware = await device_of(groups[-1], None if options.dtype == "float32" else folder)
    turns = [[await turn(group, rows) for group in groups] for _ in range(options.repeats + 1)][1:]
    plans = [predicted(each, hardware, options) for each in jobs]
    for rank in (rank for group in groups for rank in group.ranks):
        ray.kill(rank)
    return [
        (what, [tuple(took[number] for took in each) for each in turns], [plan[number] for plan in plans])
        for number, what in enumerate(("log-probs", "gradients", "optimizer step"))
    ]


async def whole(folder: str, slots: placement.Slots, options: argparse.Namespace) -> None:
    """Print a line per kind of work."""
    jobs = [job(folder, options, options.ranks, width) for width in (1, options.ranks)]
    print(PAIRS)
    for what, took, planned in await alternate(jobs, folder, slots, options):
        line(f"{what}, {options.ranks} whole models", took, *planned)


async def zero(folder: str, slots: placement.Slots, options: argparse.Namespace) -> None:
    """Print a line per ZeRO stage and kind of work; a slot has room for the ranks of two stages at a time."""
    print("\n| | measured, s | planned | off by |\n|---|---|---|---|")
    for first in range(0, len(options.zero), 2):
        pair = options.zero[first : first + 2]
        jobs = [job(folder, options, options.ranks, 1) for _ in pair]
        for each, stage in zip(jobs, pair, strict=True):
            each.actor.zero_stage = stage
            each.actor.ppo_max_token_len_per_gpu = options.tokens * options.rows // options.ranks // 2
        for what, took, planned in await alternate(jobs, folder, slots, options):
            for stage, seconds, expected in zip(pair, map(median, zip(*took, strict=True)), planned, strict=True):
                print(
                    f"| {what}, ZeRO {stage} | {seconds:.3f} | {expected:.3f} | {expected / seconds - 1:+.0%} |",
                    flush=True,
                )


def line(what: str, took: Sequence[tuple[float, float]], *planned: float) -> None:
    """Print the median measured and planned durations with whole and with shared layers."""
    (whole_s, shared), ratio = (
        map(median, zip(*took, strict=True)),
        median(shared / whole_s for whole_s, shared in took),
    )
    planned_ratio = planned[1] / planned[0]
    cells = f"{whole_s:.3f} ({planned[0]:.3f}) | {shared:.3f} ({planned[1]:.3f}) | {ratio:.2f} | {planned_ratio:.2f}"
    print(f"| {what} | {cells} | {planned_ratio / ratio - 1:+.0%} |", flush=True)


# Stages -------------------------------------------------------------------------------------------------------------


class Summing(pipelines.Sleeping):
    """Sends tensors of the size of hidden states, with the all-reduces of tensor parallelism."""

    def __init__(self, layout, stage, seconds, shape, sharers):
        super().__init__(layout, stage, seconds | {"W": 0.0})
        self.size, self.sharers = shape, sharers

    def shape(self, micro_batch):
        return self.size

    def forward(self, *given):
        self._sum()
        return super().forward(*given)

    def backward(self, *given):
        self._sum()
        return super().backward(*given)

    def _sum(self):
        for _ in range(2 * self.pipelines.layers[self.stage] if self.sharers else 0):
            self.sharers.sum(torch.zeros(self.size))


class Planned:
    """Planned gradients of a mini-batch in a pipeline: seconds, compute per operation, and the 1F1B schedule."""

    def __init__(self, config: Config, hardware: Hardware, options: argparse.Namespace):
        shapes, self.shape = shapes_of(config), (options.tokens, options.hidden)
        held = shapes["actor"].share(config.training.tensor_model_parallel_size)
        times = StepTimes(shapes, [config.data.max_response_length] * options.rows, config.data.max_prompt_length)
        parts = tuple(len(part.layers) for part in stage_parts(config, held))
        self.layout = replace(pipelines_of(config, "actor"), layers=parts)

        def forward_s(links: Links) -> tuple[dict[str, int], float]:
            costs = costs_of(config, shapes, replace(hardware, links=links), options.tokens)
            return times.mini_batch(config, costs)

        counts, forward = forward_s(hardware.links)
        self.seconds = serial_1f1b(times.planner(config, counts, forward).problem(counts))
        _, computed = forward_s(Links())
        self.computed = [{"F": computed * each, "B": 2 * computed * each} for each in stage_shares(config, held)]
        self.rows = pipelines.serial((self.layout,), counts)


def play(rank, rows, layout, computed, shape) -> float:
    """Run the operations on a rank; return their total duration."""
    own = layout.stages_on(rank.executor.device)
    stages = {("actor", stage): Summing(layout, stage, computed[stage], shape, rank.tensor) for stage in own}
    return pipelines.play(rank, rows, stages)


async def stages(folder: str, slots: placement.Slots, options: argparse.Namespace) -> None:
    """Print one line."""
    jobs = [job(folder, options, 4, width, 4 // width) for width in (1, 2)]
    shared = (pipelines_of(jobs[1], "actor"),)
    print(PAIRS)
    group, _ = await PipelineGroup.start(jobs[1], pipelines.Anywhere(None, 4, slots.device), shared)
    hardware = Hardware(SLEEPING_FLOPS, SLEEPING_FLOPS, SLEEPING_FLOPS, inf, links=await links_of(group, 2))
    plans = [Planned(each, hardware, options) for each in jobs]
    turns = []
    for _ in range(options.repeats + 1):
        took = []
        for plan in plans:
            await group.setup((plan.layout,))
            given = plan.rows, plan.layout, plan.computed, plan.shape
            calls = [rank.__ray_call__.remote(play, *given) for rank in group.ranks]
            took.append(max(await asyncio.gather(*calls)))
        turns.append(tuple(took))
    line("gradients, 4 stages against 2 of 2 ranks", turns[1:], *(plan.seconds for plan in plans))
    for rank in group.ranks:
        ray.kill(rank)


PARTS = {"whole": whole, "zero": zero, "stages": stages}


async def main(options: argparse.Namespace) -> None:
    """Print a table per part."""
    print(f"{len(os.sched_getaffinity(0))} cores")
    with tempfile.TemporaryDirectory() as folder:
        model(folder, options)
        slots = await placement.start(job(folder, options, options.ranks, 1))
        for part in options.parts:
            await PARTS[part](folder, slots, options)
    placement.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    for name, value in (("ranks", 2), ("hidden", 512), ("layers", 6), ("rows", 8), ("tokens", 256), ("repeats", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--zero", nargs="+", type=int, choices=range(4), default=[0, 1, 2, 3])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    asyncio.run(main(parser.parse_args()))
