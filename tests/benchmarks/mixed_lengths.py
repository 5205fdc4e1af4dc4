"""Passes over a few long rows among many short ones: a sequence-parallel degree per row against one for all.

    python tests/benchmarks/mixed_lengths.py [--ranks 2 4] [--mixtures 1+64 2+64 ...] [--long 4096] [--short 32 192]
        [--repeats 5] [--out FILE]

The random Qwen2 of `sequence_parallel.py`, each rank bound to a core if there are enough. Log-probs and gradients of
each mixture alternate within each repetition, with a rotating first variant: every fixed degree, the planner's choice,
and the terms of the bound. The bound is the larger of all work divided evenly (every rank runs the whole batch alone,
concurrently with the others, divided by the number of ranks, so that it includes contention on shared cores) and the
longest row alone at its best degree. `over bound` and `over fixed` (the fixed degree with the smallest median) are
medians of ratios within a repetition, with their range; `planned` is the planner's expectation of the former. `CPU, s`
is the CPU time of all ranks in the pass at each fixed degree and as chosen: with fewer cores than ranks no pass can be
faster than this time divided by the cores. The first passes are warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from sequence_parallel import Forced, model_folder, row

from rlfuse.cluster import placement
from rlfuse.config.schema import Config
from rlfuse.engines.trainer.sequence_parallel_packing import degrees_up_to
from rlfuse.observe.metrics import balance_metrics
from rlfuse.samples import Row

MIXTURES = ["1+64", "2+64", "1+16", "0+64"]
"""Long and short rows of a batch."""
CHOSEN, EVEN = "chosen", "even"


def mixture(long: int, short: int, options: argparse.Namespace) -> list[Row]:
    least, most = options.short
    lengths = [least + (most - least) * i // max(short - 1, 1) for i in range(short)]
    lengths += [options.long] * long
    return [row(length, max(length // 8, 1), seed, seed) for seed, length in enumerate(lengths)]


Pass = Callable[..., Awaitable[object]]
"""Runs a pass over rows; with `slot`, only on its rank."""


async def seconds(group: Forced, run: Pass, rows: Sequence[Row], way: int | str) -> tuple[float, float]:
    """Return the seconds of one variant: fixed degree, chosen degrees or even share; and the CPU time of all ranks."""
    group.degree = way if isinstance(way, int) else None
    slots, before = range(len(group.ranks)) if way == EVEN else [None], await computed(group)
    begin = time.perf_counter()
    await asyncio.gather(*(run(rows, slot=slot) for slot in slots))
    taken = time.perf_counter() - begin
    return taken / len(slots), await computed(group) - before


async def computed(group: Forced) -> float:
    """Return the CPU seconds of the ranks' processes so far."""
    return sum(await asyncio.gather(*(rank.__ray_call__.remote(lambda _: time.process_time()) for rank in group.ranks)))


Taken = dict[str, list[float]]
"""Way -> seconds of each repetition."""


async def measured(group: Forced, run: Pass, rows: Sequence[Row], repeats: int) -> tuple[Taken, Taken]:
    """Return wall seconds, including `bound`, and CPU seconds by variant."""
    degrees, longest = degrees_up_to(len(group.ranks)), max(rows, key=lambda each: each.tokens)
    found: Taken = {str(way): [] for way in (*degrees, CHOSEN, "bound")}
    computing: Taken = {str(way): [] for way in (*degrees, CHOSEN)}
    ways: list[int | str] = [*degrees, CHOSEN, EVEN]
    for _ in range(repeats):
        ways = [*ways[1:], ways[0]]
        both = {str(way): await seconds(group, run, rows, way) for way in ways}
        alone = [(await seconds(group, run, [longest], degree))[0] for degree in degrees]
        taken = {way: clock for way, (clock, _) in both.items()}
        taken["bound"] = max(taken[EVEN], min(alone))
        for way, times in found.items():
            times.append(taken[way])
        for way, times in computing.items():
            times.append(both[way][1])
    return found, computing


def ratio(over: Sequence[float], under: Sequence[float]) -> str:
    """Return the median and range of ratios."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


async def tables(ranks: int, options: argparse.Namespace) -> list[dict]:
    """Print a table; return the measurements."""
    config, measurements = Config(), []
    config.trainer.n_gpus_per_node, config.algorithm.adv_estimator = ranks, "grpo"
    config.training.ulysses_sequence_parallel_size = ranks
    config.model.dtype, config.actor.ppo_max_token_len_per_gpu = "float32", options.long
    config.data.max_response_length = options.long
    slots = await placement.start(config)
    with tempfile.TemporaryDirectory() as folder:
        config.model.path = model_folder(folder, options.long)
        group, _ = await Forced.start(config, slots, cores=slots.cores)
        await group.measure()
        degrees = list(map(str, degrees_up_to(ranks)))
        print(f"\n{ranks} ranks on {slots.device}, {group.costs}\n")
        titles = ["long", "short", "pass", *(f"degree {d}, s" for d in degrees), "chosen, s", "bound, s"]
        titles += ["over bound", "over fixed", "planned", "CPU, s"]
        print("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|", flush=True)
        passes = {"log-probs": partial(group.log_probs, "actor"), "gradients": partial(group.accumulate, "actor")}
        mixtures = [tuple(map(int, each.split("+"))) for each in options.mixtures]
        for run in passes.values():
            await measured(group, run, mixture(*mixtures[0], options), 1)
        for long, short in mixtures:
            rows = mixture(long, short, options)
            for name, run in passes.items():
                found, computing = await measured(group, run, rows, options.repeats)
                group.degree = None
                await group.drain()
                await run(rows)
                planned = balance_metrics(await group.drain())["balance/makespan_over_bound/mean"]
                fixed = found[min(degrees, key=lambda degree: statistics.median(found[degree]))]
                cells = [f"{statistics.median(found[way]):.3f}" for way in (*degrees, CHOSEN, "bound")]
                cells += [ratio(found[CHOSEN], found["bound"]), ratio(found[CHOSEN], fixed), f"{planned:.2f}"]
                cells.append(", ".join(f"{statistics.median(each):.2f}" for each in computing.values()))
                print(f"| {long} | {short} | {name} | " + " | ".join(cells) + " |", flush=True)
                of = {"ranks": ranks, "long": long, "short": short, "pass": name}
                measurements.append(of | {"seconds": found, "computing": computing})
    return measurements


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--long", type=int, default=4096, help="tokens of a long row")
    parser.add_argument("--short", type=int, nargs=2, default=[32, 192], help="tokens of short rows, from and to")
    parser.add_argument("--mixtures", nargs="+", default=MIXTURES, help="long and short rows of a batch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="measurements as JSON")
    chosen, everything = parser.parse_args(), []
    for number in chosen.ranks:
        try:
            everything += asyncio.run(tables(number, chosen))
        finally:
            placement.stop()
    if chosen.out:
        chosen.out.write_text(json.dumps(everything))
