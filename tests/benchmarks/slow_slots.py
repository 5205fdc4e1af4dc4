"""Cost of temporarily slow slots, with measured rates and under a fixed plan, next to the bound for those rates.

    python tests/benchmarks/slow_slots.py [--seeds 2] [--steps 3] [--policy adaptive] [--slow 1 8] [--out results.json]

64 slots; 0 to 8 of them are 1.5 to 5 times slower, each between two random moments of the run: within a step, or over
several. A step has 2,048 long-tailed samples in groups of eight, two passes and four mini-batches. Rates are estimated
as in a real run, within steps and from step to step. The fixed plan is the same policy without rates, which assigns
every slot the same amount.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import numpy as np

from rlfuse.costs.rates import Rates
from rlfuse.fusion.decisions import Settings
from rlfuse.simulate.bound import lower_bound
from rlfuse.simulate.runner import simulate
from rlfuse.simulate.workload import Workload, parse

SLOTS, MOST_SLOW, RATES = 64, 8, (1.5, 5.0)
SETTINGS = Settings(threshold=0.35)


def build(seed: int, slots: int = SLOTS, slowdowns: list[dict] | None = None, **more) -> Workload:
    """Return the workload of a step on slots with these slowdowns."""
    lengths = {"lognormal": {"median": 200, "sigma": 1.0}, "cap": 2048, "count": 32 * slots}
    fields = {"slots": slots, "seed": seed, "response_tokens": lengths, "group": 8, "prompt_tokens": 128}
    fields |= {"scoring": {"tokens_per_s": 40_000, "kinds": ["old_log_prob", "ref"]}, "switch_s": 0.5}
    fields |= {"training": {"tokens_per_s": 8_000, "mini_batches": 4}, "length_history_sigma": 0.3}
    fields |= {"kv_bytes_per_token": 800_000, "link_bytes_per_s": 2.5e10, "slowdowns": slowdowns or []}
    return parse(fields | more)


def episodes(rng: np.random.Generator, slots: int, slow: int, steps: int) -> list[tuple[int, float, float, float]]:
    """Return (slot, rate, from, until) of `slow` slots, in steps from the start of the run."""
    chosen = rng.choice(slots, size=slow, replace=False)
    spans = np.sort(rng.uniform(0.0, steps, size=(slow, 2)), axis=1)
    rates = rng.uniform(*RATES, size=slow)
    return [(int(slot), float(rate), *map(float, span)) for slot, rate, span in zip(chosen, rates, spans, strict=True)]


def slowdowns_of(found: list[tuple[int, float, float, float]], step: int, seconds: float) -> list[dict]:
    """Return the slow slots of one step of about this duration; the last state stays if the step takes longer."""
    return [
        {"slot": slot, "rate": rate, "from_s": max(0.0, begin - step) * seconds}
        | ({"until_s": (end - step) * seconds} if end < step + 1 else {})
        for slot, rate, begin, end in found
        if begin < step + 1 and end > step
    ]


def measure(seed: int, slow: int, steps: int, policy: str, slots: int = SLOTS, **more) -> dict:
    """Simulate one run; return the seconds of its steps with rates and under a fixed plan, and their bounds."""
    rng = np.random.default_rng(seed)
    found = episodes(rng, slots, slow, steps)
    known, fixed = Rates(slots), Rates(slots, measured=False)
    row: dict = {"seed": seed, "slow": slow, "episodes": found, "bound": [], "rates": [], "fixed": []}
    for step in range(steps):
        number = seed * steps + step
        usual = lower_bound(build(number, slots, **more)).seconds
        workload = build(number, slots, slowdowns_of(found, step, usual), **more)
        row["bound"].append(lower_bound(workload).seconds)
        row["rates"].append(simulate(workload, policy, SETTINGS, known).result.step_s)
        row["fixed"].append(simulate(workload, policy, SETTINGS, fixed).result.step_s)
    return row


def over_bound(row: dict, plan: str) -> float:
    """Return the time of the whole run over its bound."""
    return sum(row[plan]) / sum(row["bound"])


def table(rows: list[dict]) -> str:
    """Return a line per number of slow slots."""
    lines = ["| slow slots of 64 | with rates / bound | worst run | worst step | fixed plan / bound | worst run |"]
    lines.append("|---|---|---|---|---|---|")
    for slow in sorted({row["slow"] for row in rows}):
        mine = [row for row in rows if row["slow"] == slow]
        runs = [over_bound(row, "rates") for row in mine]
        steps = [took / least for row in mine for took, least in zip(row["rates"], row["bound"], strict=True)]
        fixed = [over_bound(row, "fixed") for row in mine]
        cells = [statistics.mean(runs), max(runs), max(steps), statistics.mean(fixed), max(fixed)]
        lines.append(f"| {slow} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run all cases; print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2, help="runs for each number of slow slots")
    parser.add_argument("--steps", type=int, default=3, help="of each run")
    parser.add_argument("--policy", default="adaptive")
    parser.add_argument("--slow", type=int, nargs="+", default=list(range(MOST_SLOW + 1)))
    parser.add_argument("--out", type=Path, help="all results as JSON")
    arguments = parser.parse_args()
    rows = []
    for slow in arguments.slow:
        for seed in range(arguments.seeds):
            rows.append(row := measure(100 * slow + seed, slow, arguments.steps, arguments.policy))
            far = f"rates {over_bound(row, 'rates'):.3f}, fixed plan {over_bound(row, 'fixed'):.3f} of the bound"
            print(f"{slow} slow, seed {seed}: {far}", flush=True)
    print(table(rows))
    far = [over_bound(row, "rates") for row in rows]
    print(f"all runs: mean {statistics.mean(far):.3f}, worst {max(far):.3f} of the bound")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
