"""Overhead of the pool of reward workers: 10,000 trivial rewards on one core.

    python tests/benchmarks/reward_overhead.py [--samples 10000] [--tokens 200] [--repetitions 5] [--core 0]

The driver, Ray and the reward worker are pinned to one core. Reports the time per sample of a whole `RewardPool.score`,
from samples to composed rewards; the first repetition starts without an estimate of the function's speed. The rewards
are compared bitwise with those computed in this process, in two orders. Target: below 0.2 ms per sample.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time

import numpy as np

from rlfuse.config.rewards import RewardConfig
from rlfuse.rewards.api.items import item_of_row
from rlfuse.rewards.workers.pool import RewardPool
from rlfuse.samples import Prompt, Response, Reward, Sample
from rlfuse.tools.evaluation.reward_table import score_items

TARGET_MS = 0.2


def share_of_vowels(data_source, solution_str, ground_truth, extra_info=None):
    """Return a trivial reward, with verl's signature."""
    return {"score": sum(map(solution_str.count, "aeiou")) / len(solution_str), "length": len(solution_str)}


def made(count: int, tokens: int) -> list[Sample]:
    """Return samples of a step: responses of `tokens` tokens, eight per prompt."""
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz     "))
    samples = []
    for number in range(count):
        row = {"prompt": "What is it?", "extra_info": {"index": number // 8}}
        messages = ({"role": "user", "content": "What is it?"},)
        prompt = Prompt(number // 8, np.arange(20, dtype=np.int32), "What is it?", messages, "words", "x", row)
        text = "".join(rng.choice(letters, size=4 * tokens))
        ids = rng.integers(0, 150_000, size=tokens).astype(np.int32)
        response = Response(ids, np.zeros(tokens, np.float32), "stop", 0, text)
        samples.append(Sample(prompt, 1, number % 8, number, response))
    return samples


async def timed(samples: list[Sample], repetitions: int) -> tuple[list[float], list[list[Reward]]]:
    """Return (milliseconds per sample, rewards) of each repetition, alternately in reverse order."""
    pool = RewardPool(RewardConfig([share_of_vowels]))
    await pool.start()
    times, found = [], []
    try:
        for repetition in range(repetitions):
            order = samples[::-1] if repetition % 2 else samples
            start = time.perf_counter()
            rewards = await pool.score(order)
            times.append(1000 * (time.perf_counter() - start) / len(samples))
            found.append(rewards[::-1] if repetition % 2 else rewards)
    finally:
        await pool.close()
    return times, found


def main() -> None:
    """Measure and compare; print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--core", type=int, default=0)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {arguments.core})  # inherited by Ray's processes

    import ray

    samples = made(arguments.samples, arguments.tokens)
    rows = [{"prompt": "What is it?", "response": sample.response.text} for sample in samples]
    start = time.perf_counter()
    alone = score_items(share_of_vowels, [item_of_row(row, number) for number, row in enumerate(rows)])
    in_process = 1000 * (time.perf_counter() - start) / len(samples)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    try:
        times, found = asyncio.run(timed(samples, arguments.repetitions))
    finally:
        ray.shutdown()
    for rewards in found:
        assert [reward.value for reward in rewards] == [reward.value for reward in alone], "the pool changed a reward"
        assert rewards == found[0], "the order changed a reward"
    shown = "  ".join(f"{value:.3f}" for value in times)
    print(f"{len(samples)} samples of {arguments.tokens} tokens, ms for each: {shown}")
    verdict = "met" if statistics.median(times) < TARGET_MS and times[0] < TARGET_MS else "missed"
    print(f"median {statistics.median(times):.3f}, first {times[0]:.3f}, in process {in_process:.3f}; "
          f"target {TARGET_MS} {verdict}; rewards identical")  # fmt: skip


if __name__ == "__main__":
    main()
