"""Log-prob and gradient passes of one long row at degree 1, 2 and 4: seconds, and peak memory of a rank.

    python tests/benchmarks/sequence_parallel.py [--lengths 1024 2048 4096 8192] [--degrees 1 2 4] [--repeats 3]

Four ranks of a random Qwen2 (4 layers, 8 heads, hidden 256, float32); the response is the last eighth of the row.
Every degree is forced in turn on the same ranks; `chosen` is what the planner takes by its measured costs. Seconds are
medians of wall time on the driver. Memory is what a rank's process holds at its peak above what it held before the pass
(the kernel's high-water mark on CPU hosts, the allocator's on GPUs), the most over ranks. Then a group of answers to
one prompt is scored, with and without a shared prompt. With fewer cores than ranks, higher degrees save memory alone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlfuse.cluster import placement
from rlfuse.config.schema import Config
from rlfuse.engines.degrees import alone, legal, plan
from rlfuse.engines.trainer import TrainerGroup
from rlfuse.samples import Row

RANKS, VOCABULARY = 4, 512


class Forced(TrainerGroup):
    """Every row at one degree, as long as one is set."""

    degree: int | None = None

    def _plan(self, rows, slot, least_stage):
        if self.degree is None:
            return super()._plan(rows, slot, least_stage)
        return plan(alone(rows), RANKS, self.config.actor.ppo_max_token_len_per_gpu, (self.degree,), most=1)


def reset(rank) -> None:
    """Give freed memory back and start the high-water mark anew."""
    import ctypes
    import gc

    gc.collect()
    if rank.device == "cpu":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        rank.before = resident("VmRSS")
    else:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        rank.before = torch.cuda.memory_allocated()


def peak(rank) -> float:
    """MiB above what `reset` found."""
    most = resident("VmHWM") if rank.device == "cpu" else torch.cuda.max_memory_allocated()
    return (most - rank.before) / 2**20


def resident(field: str) -> int:
    """Bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def model_folder(folder: str, longest: int) -> str:
    """A random policy."""
    torch.manual_seed(0)
    shape = dict(hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8)
    config = Qwen2Config(
        vocab_size=VOCABULARY, num_key_value_heads=4, max_position_embeddings=longest, **shape, tie_word_embeddings=True
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def row(length: int, answer: int, seed: int = 0) -> Row:
    """Everything that the actor's loss reads."""
    rng = np.random.default_rng(seed)
    prompt = np.random.default_rng(length).integers(0, VOCABULARY, length - answer).astype(np.int32)
    tensors = {name: rng.normal(size=answer).astype(np.float32) for name in ("old_log_probs", "advantages")}
    return Row(prompt, rng.integers(0, VOCABULARY, answer).astype(np.int32), tensors)


async def measured(group: Forced, work, repeats: int) -> tuple[float, float]:
    """Median seconds, and the most MiB of a rank."""
    await work()
    seconds, most = [], []
    for _ in range(repeats):
        await asyncio.gather(*(rank.__ray_call__.remote(reset) for rank in group.ranks))
        start = time.perf_counter()
        await work()
        seconds.append(time.perf_counter() - start)
        most.append(max(await asyncio.gather(*(rank.__ray_call__.remote(peak) for rank in group.ranks))))
    return statistics.median(seconds), statistics.median(most)


async def main(options: argparse.Namespace) -> None:
    config = Config()
    config.trainer.n_gpus_per_node, config.algorithm.adv_estimator = RANKS, "grpo"
    config.training.ulysses_sequence_parallel_size = RANKS
    config.model.dtype, config.actor.ppo_max_token_len_per_gpu = "float32", max(options.lengths)
    config.data.max_response_length = max(options.lengths)
    slots = placement.start(config)
    print(f"{slots.device}, {len(os.sched_getaffinity(0))} cores, {RANKS} ranks, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        config.model.path = model_folder(folder, max(options.lengths))
        group, facts = await Forced.start(config, slots, optimizer_steps=1)
        print(f"{facts['parameters'] / 1e6:.1f}M parameters, {facts['peak_flops'] / 1e9:.0f} GFLOP/s, {group.costs}")
        print("| tokens | degree | chosen | log-probs, s | MiB | gradients, s | MiB |\n" + "|---" * 7 + "|")
        for length in options.lengths:
            rows = [row(length, length // 8)]
            group.degree = None
            chosen = max(share.degree for shares in group._plan(rows, None, 3) for share in shares)
            for degree in options.degrees:
                group.degree = degree
                figures = []
                for work in (lambda: group.log_probs("actor", rows), lambda: group.accumulate("actor", rows)):  # noqa: B023
                    figures += await measured(group, work, options.repeats)
                mark = "x" if degree == chosen else ""
                print(f"| {length} | {degree} | {mark} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |")
        await shared_prompt(group, max(options.lengths) // 2, options.repeats)


async def shared_prompt(group: Forced, length: int, repeats: int) -> None:
    """Eight answers to one prompt, of which each is a sixteenth of the tokens."""
    rows = [row(length, length // 16, seed) for seed in range(8)]
    print(f"\n8 answers of {length // 16} tokens to a prompt of {length - length // 16}\n")
    print("| prompt | log-probs, s | tokens run / unique |\n|---|---|---|")
    unique = len(rows[0].prompt_ids) + sum(len(each.response_ids) for each in rows)
    for name, degree in (("8 times", 1), ("once", None)):
        group.degree = degree
        seconds, _ = await measured(group, lambda: group.log_probs("actor", rows), repeats)
        await group.drain()
        await group.log_probs("actor", rows)
        run = sum(span.attributes["run"] for span in await group.drain() if span.samples)
        print(f"| {name} | {seconds:.2f} | {run / unique:.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--degrees", type=int, nargs="+", default=list(legal(RANKS)))
    parser.add_argument("--repeats", type=int, default=3)
    try:
        asyncio.run(main(parser.parse_args()))
    finally:
        placement.stop()
