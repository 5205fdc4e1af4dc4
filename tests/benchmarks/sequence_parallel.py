"""Log-prob and gradient passes at each fixed sequence-parallel degree and at the chosen one: seconds and peak memory.

    python tests/benchmarks/sequence_parallel.py [--ranks 2] [--rows 1 2 3] [--lengths 256 512 ... 8192] [--repeats 3]

A random Qwen2 (4 layers, 8 heads, hidden 256, float32), each rank bound to a core if there are enough; the response is
the last eighth of a row. Degrees alternate on the same ranks; `chosen` is the planner's choice from measured costs,
`over` its time relative to the best fixed degree. Seconds are medians of wall time on the driver. Memory is the peak of
a rank's process above its level before the pass (the kernel's high-water mark on CPU hosts, the allocator's on GPUs),
the maximum over ranks. Then the responses to one prompt are scored, with and without a shared prompt. With fewer cores
than ranks, higher degrees only save memory.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlfuse.cluster import placement
from rlfuse.config.schema import Config
from rlfuse.engines.trainer.sequence_parallel_packing import degrees_up_to
from rlfuse.engines.trainer.trainer_group import TrainerGroup
from rlfuse.samples import Row

VOCABULARY = 512


class Forced(TrainerGroup):
    """Trainer group that runs every row at `degree` if it is set."""

    degree: int | None = None

    def _degrees(self, slot: int | None) -> Sequence[int]:
        return super()._degrees(slot) if self.degree is None else (self.degree,)


def reset(rank) -> None:
    """Release freed memory and reset the high-water mark."""
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
    """Return the peak MiB above the level at `reset`."""
    most = resident("VmHWM") if rank.device == "cpu" else torch.cuda.max_memory_allocated()
    return (most - rank.before) / 2**20


def resident(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def model_folder(folder: str, longest: int) -> str:
    """Save a random policy."""
    torch.manual_seed(0)
    shape = dict(hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8)
    config = Qwen2Config(
        vocab_size=VOCABULARY, num_key_value_heads=4, max_position_embeddings=longest, **shape, tie_word_embeddings=True
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def row(length: int, answer: int, seed: int = 0, prompt: int = 0) -> Row:
    """Return a row with the tensors of the actor loss; rows of one length and `prompt` share the prompt."""
    rng = np.random.default_rng(seed)
    prompt = np.random.default_rng([length, prompt]).integers(0, VOCABULARY, length - answer).astype(np.int32)
    tensors = {name: rng.normal(size=answer).astype(np.float32) for name in ("old_log_probs", "advantages")}
    return Row(prompt, rng.integers(0, VOCABULARY, answer).astype(np.int32), tensors)


Work = Callable[[], Awaitable[object]]


async def measured(group: Forced, work: Work) -> tuple[float, float]:
    """Return seconds, and the maximum MiB of a rank."""
    await asyncio.gather(*(rank.__ray_call__.remote(reset) for rank in group.ranks))
    start = time.perf_counter()
    await work()
    seconds = time.perf_counter() - start
    return seconds, max(await asyncio.gather(*(rank.__ray_call__.remote(peak) for rank in group.ranks)))


async def alternate(group: Forced, work: Work, degrees: Sequence[int | None], repeats: int) -> dict[int | None, list]:
    """Return median seconds and MiB by degree; the first round is warm-up."""
    found = {degree: [] for degree in degrees}
    for _ in range(repeats + 1):
        for group.degree in degrees:
            found[group.degree].append(await measured(group, work))
    return {degree: [statistics.median(each) for each in zip(*of[1:], strict=True)] for degree, of in found.items()}


async def main(options: argparse.Namespace) -> None:
    config, longest = Config(), max(options.lengths)
    config.trainer.n_gpus_per_node, config.algorithm.adv_estimator = options.ranks, "grpo"
    config.training.ulysses_sequence_parallel_size = options.ranks
    config.model.dtype, config.actor.ppo_max_token_len_per_gpu = "float32", longest
    config.data.max_response_length = longest
    slots = await placement.start(config)
    print(f"{slots.device}, {len(os.sched_getaffinity(0))} cores, {options.ranks} ranks, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        config.model.path = model_folder(folder, longest)
        group, facts = await Forced.start(config, slots, cores=slots.cores)
        facts |= await group.measure()
        parameters = sum(facts["parameters"]["actor"])
        print(f"{parameters / 1e6:.1f}M parameters, {facts['peak_flops'] / 1e9:.0f} GFLOP/s, {group.costs}\n")
        degrees = degrees_up_to(options.ranks)
        titles = ["rows", "tokens", "pass", *(f"degree {d}, s" for d in degrees), "chosen, s", "is", "over"]
        print("| " + " | ".join([*titles, *(f"MiB at {d}" for d in degrees)]) + " |")
        print("|---" * (len(titles) + len(degrees)) + "|")
        for count, length in itertools.product(options.rows, options.lengths):
            await one_batch(group, [row(length, length // 8, seed, seed) for seed in range(count)], options.repeats)
        await shared_prompt(group, longest // 2, options.repeats)


async def one_batch(group: Forced, rows: list[Row], repeats: int) -> None:
    """Print the rows of both passes at every degree."""
    passes = {"log-probs": (group.log_probs, 3), "gradients": (group.accumulate, 2)}
    degrees = degrees_up_to(len(group.ranks))
    for name, (work, stage) in passes.items():
        found = await alternate(group, lambda work=work: work("actor", rows), [*degrees, None], repeats)
        group.degree = None
        shares = [share for mine in group._plan(rows, None, stage) for share in mine if share.rows]
        chosen = sorted({share.rows: share.degree for share in shares}.values())
        fixed = [found[degree] for degree in degrees]
        cells = [f"{seconds:.3f}" for seconds, _ in (*fixed, found[None])] + ["+".join(map(str, chosen))]
        cells += [f"{found[None][0] / min(fixed)[0]:.2f}"] + [f"{mib:.0f}" for _, mib in fixed]
        print(f"| {len(rows)} | {rows[0].tokens} | {name} | " + " | ".join(cells) + " |", flush=True)


async def shared_prompt(group: Forced, length: int, repeats: int) -> None:
    """Print the rows of eight responses to one prompt, each a sixteenth of the tokens."""
    rows = [row(length, length // 16, seed) for seed in range(8)]
    print(f"\n8 answers of {length // 16} tokens to a prompt of {length - length // 16}\n")
    print("| prompt | log-probs, s | tokens run / unique |\n|---|---|---|")
    unique = len(rows[0].prompt_ids) + sum(len(each.response_ids) for each in rows)
    for name, degree, most in (("8 times", 1, 1), ("once", None, None)):
        group.config.actor.ppo_micro_batch_size_per_gpu = most
        [[seconds, _]] = (await alternate(group, lambda: group.score(("actor",), rows), [degree], repeats)).values()
        await group.drain()
        await group.score(("actor",), rows)
        run = sum(span.attributes["run"] for span in await group.drain() if span.samples)
        print(f"| {name} | {seconds:.2f} | {run / unique:.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--repeats", type=int, default=3)
    try:
        asyncio.run(main(parser.parse_args()))
    finally:
        placement.stop()
