"""Ranks that share layers beside ranks with whole models: seconds of each kind of work, and what a plan says of them.

    python tests/benchmarks/tensor_parallel.py [--ranks 2] [--hidden 512] [--layers 6] [--rows 8] [--tokens 256]

A random Qwen2 in float32 under ZeRO 1, on two groups of real ranks, each rank bound to a core if there are enough; one
group has whole models and cuts the rows up, in the other all ranks share every layer. The groups take turns with the
same rows, and a ratio is of one turn; told is the median. The plan knows this machine by a probe (`rlfuse calibrate
--probe`) and by what an all-reduce takes its ranks. What sharing saves, and whether the plan's bytes are a rank's, is
measured by `memory_peaks.py "two ranks, shared layers"`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from statistics import median

import torch
from sequence_parallel import VOCABULARY, row
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlfuse.cluster import placement
from rlfuse.config.schema import Config
from rlfuse.engines.trainer.trainer_group import TrainerGroup
from rlfuse.planning.calibration import fitted
from rlfuse.planning.costs import costs_of
from rlfuse.planning.hardware import Hardware, Links
from rlfuse.planning.model_sizes import shapes_of
from rlfuse.planning.probe import Probe
from rlfuse.samples import Row

LARGE = 1 << 22
"""Numbers of an all-reduce that is timed for its rate."""


def job(folder: str, width: int, options: argparse.Namespace) -> Config:
    """`width`: ranks that share layers."""
    config, half = Config(), options.tokens // 2
    config.model.path, config.model.dtype, config.algorithm.adv_estimator = folder, "float32", "grpo"
    config.trainer.n_gpus_per_node, config.training.tensor_model_parallel_size = options.ranks, width
    config.data.max_prompt_length, config.data.max_response_length = options.tokens - half, half
    config.actor.ppo_mini_batch_size, config.rollout.n = options.rows, 1
    config.data.train_batch_size = options.rows
    config.actor.ppo_max_token_len_per_gpu = options.tokens * options.rows
    return config


def all_reduces(rank) -> tuple[float, float]:
    """Seconds of one of a number and of one of many, among all ranks: medians."""
    import torch.distributed as dist

    def seconds(size: int) -> float:
        numbers, taken = torch.zeros(size), []
        for _ in range(11):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(numbers)
            taken.append(time.perf_counter() - began)
        return median(taken)

    return seconds(1), seconds(LARGE)


async def links_of(group: TrainerGroup) -> Links:
    """As two ranks find them, by the plan's own form of an all-reduce in a ring."""
    found = await asyncio.gather(*(rank.__ray_call__.remote(all_reduces) for rank in group.ranks))
    (short, long), ranks = found[0], len(group.ranks)
    sent = 2 * (ranks - 1) / ranks * 4 * LARGE
    return Links(sent / (long - short), within_s=short / (2 * (ranks - 1)), per_node=ranks)


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    """Seconds."""
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def turn(group: TrainerGroup, rows: Sequence[Row]) -> list[float]:
    """Seconds of log-probs, gradients and an optimizer step."""
    lengths = [len(each.response_ids) for each in rows]
    return [
        await timed(lambda: group.log_probs("actor", rows)),
        await timed(lambda: group.accumulate("actor", rows)),
        await timed(lambda: group.step("actor", lengths)),
    ]


def predicted(config: Config, hardware: Hardware, options: argparse.Namespace) -> list[float]:
    """The same, by the plan."""
    costs = costs_of(config, shapes_of(config), hardware, options.tokens)
    tokens = options.rows * options.tokens / config.slots
    scored = costs.score_call_s + tokens / costs.score_tokens_per_s
    return [scored, costs.train_call_s + tokens / costs.train_tokens_per_s, costs.optimizer_s]


async def main(options: argparse.Namespace) -> None:
    """Print a row for each kind of work."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        sizes = dict(hidden_size=options.hidden, intermediate_size=3 * options.hidden, vocab_size=VOCABULARY)
        heads = dict(num_attention_heads=options.hidden // 64, num_key_value_heads=options.hidden // 128)
        Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, num_hidden_layers=options.layers)).save_pretrained(folder)
        probe = Probe(lambda line: None)
        probe.measure(None)
        jobs = [job(folder, width, options) for width in (1, options.ranks)]
        slots = await placement.start(jobs[0])
        groups = [(await TrainerGroup.start(each, slots, 10, slots.cores))[0] for each in jobs]
        rows = [row(options.tokens, options.tokens // 2, seed, seed) for seed in range(options.rows)]
        hardware = replace(fitted(probe.works), links=await links_of(groups[1]))
        turns = [[await turn(group, rows) for group in groups] for _ in range(options.repeats + 1)][1:]
        plans = [predicted(each, hardware, options) for each in jobs]
    print(f"{slots.device}, {len(os.sched_getaffinity(0))} cores, {options.ranks} ranks, {hardware.links}\n")
    print("| | whole, s | shared, s | shared / whole | by the plan | off by |\n|---|---|---|---|---|---|")
    for number, what in enumerate(("log-probs", "gradients", "optimizer step")):
        whole, shared = (median(each[group][number] for each in turns) for group in (0, 1))
        ratio = median(each[1][number] / each[0][number] for each in turns)
        told = plans[1][number] / plans[0][number]
        print(f"| {what} | {whole:.3f} | {shared:.3f} | {ratio:.2f} | {told:.2f} | {told / ratio - 1:+.0%} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("ranks", 2), ("hidden", 512), ("layers", 6), ("rows", 8), ("tokens", 256), ("repeats", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    asyncio.run(main(parser.parse_args()))
