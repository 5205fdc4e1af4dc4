"""Simulated steps with and without separate prefill engines, over lengths of prompts and responses.

    python tests/benchmarks/disaggregation.py [--quick]

Prints the table of tests/benchmarks/README.md. All numbers are simulated: decode steps of 20 ms, 10,000 prompt tokens
per second, KV caches of 28 kB per token over links of 20 GB/s, 16 samples per engine, log-normal response lengths
(sigma 0.8, at most five times the median), scoring and training at 200,000 and 50,000 tokens per second, `adaptive`
with its initial settings. Ratios are of whole steps, `on` (with its best share) over `off`; copied caches count as
stalls.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator

from rlfuse.fusion.decisions import Settings
from rlfuse.simulate.tuning import choose_prefill_share
from rlfuse.simulate.workload import Drawn, Engine, Lognormal, Scoring, Training, Workload

PROMPTS, RESPONSES, ENGINES = (500, 20_000, 80_000), (300, 2_000), (2, 8)
KINDS = {"each its own prompt": 1, "groups of 8": 8}
KNOWN = {"unknown": None, "known": 0.3}
"""Prediction of lengths -> `length_history_sigma`."""
PER_ENGINE = 16


def workload(engines: int, prompt: int, median: int, group: int, history: float | None) -> Workload:
    """Return the workload of a step with these prompts and responses."""
    return Workload(
        engines,
        Drawn(Lognormal(median, 0.8), engines * PER_ENGINE, 5 * median),
        prompt_tokens=prompt,
        group=group,
        length_history_sigma=history,
        engine=Engine(kv_tokens=1 << 21, prefill_tokens_per_s=10_000.0),
        scoring=Scoring(200_000.0, 0.1),
        training=Training(50_000.0, 1, 0.1),
        switch_s=0.5,
        move_s=0.05,
        kv_bytes_per_token=28e3,
        link_bytes_per_s=20e9,
    )


def ratio(engines: int, prompt: int, median: int, group: int, history: float | None) -> float:
    """Return `on` over `off`, parsed from the reason."""
    why = choose_prefill_share(workload(engines, prompt, median, group, history), "adaptive", Settings(), "on", 0.0).why
    return float(re.search(r"takes ([\d.]+) times", why)[1])


def rows(quick: bool) -> Iterator[str]:
    prompts = PROMPTS[::2] if quick else PROMPTS
    for prompt, median, engines in itertools.product(prompts, RESPONSES[:1] if quick else RESPONSES, ENGINES):
        cells = (ratio(engines, prompt, median, g, h) for g, h in itertools.product(KINDS.values(), KNOWN.values()))
        yield f"| {prompt:,} | {median:,} | {engines} | {' | '.join(f'{cell:.2f}' for cell in cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the ends of the ranges only")
    quick = parser.parse_args().quick
    heads = [f"{kind}, lengths {known}" for kind, known in itertools.product(KINDS, KNOWN)]
    print(f"| prompt tokens | response tokens | engines | {' | '.join(heads)} |\n|{'---|' * (3 + len(heads))}")
    for row in rows(quick):
        print(row, flush=True)


if __name__ == "__main__":
    main()
