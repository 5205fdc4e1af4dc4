"""Distance of the proven bound and of each policy from the optimum, on workloads small enough for CP-SAT.

    python tests/benchmarks/optimum.py [--quick] [--seconds 60] [--out optimum.json]

2 to 4 slots and 12 to 24 samples of known lengths. The duration of a decode step does not depend on the batch, up to
the engine's maximum number of sequences; prefill takes no time. A schedule is then a packing: lanes of engines until
each slot's change of role, then scoring and training of the first mini-batch, then the other mini-batches. The optimum
is over all schedules in which every slot changes its role once and every sample moves at most once. Times are rounded
down to ticks, so that the solver's proof holds. `found` is the best schedule of the solver or a policy.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from ortools.sat.python import cp_model

from rlfuse.simulate.bound import lower_bound
from rlfuse.simulate.runner import simulate
from rlfuse.simulate.tuning import tune
from rlfuse.simulate.workload import Workload, parse

POLICIES = ("serial", "stream", "rlhfuse", "adaptive")
TICKS = 200
"""Ticks per second."""
SIZES, LANES, SCORING, TRAINING = ((2, 12), (3, 18), (4, 24)), (2, 4), (0.2, 0.6), (0.2, 1.0)
"""(slots, samples), sequences per engine, and minimum ratio of other work to generation time."""
STEP_S = 0.02


def build(shape: tuple, seed: int, mini_batches: int = 2) -> Workload:
    """Return the workload of (slots, samples), lanes, scoring, training."""
    (slots, samples), lanes, scoring, training = shape
    fields = {
        "slots": slots,
        "seed": seed,
        "response_tokens": {"lognormal": {"median": 100, "sigma": 0.9}, "cap": 600, "count": samples},
        "prompt_tokens": 1,
        "engine": {"step_base_s": STEP_S, "step_per_context_token_s": 0.0, "prefill_tokens_per_s": 1e9},
        "switch_s": 0.2,
        "length_history_sigma": 0.0,
    }
    fields["engine"] |= {"flat_batch": lanes, "max_sequences": lanes}
    lengths = parse(fields).lengths()
    tokens, generation = float(lengths.sum()) + samples, float(lengths.sum()) * STEP_S / lanes
    fields["scoring"] = {"tokens_per_s": tokens / (scoring * generation)}
    fields["training"] = {"tokens_per_s": tokens / (training * generation), "mini_batches": mini_batches}
    return parse(fields)


@dataclass(frozen=True, slots=True)
class Optimum:
    """Seconds of a step: proven lower bound `least`, best schedule `found`."""

    least: float
    found: float


def optimum(workload: Workload, seconds: float, workers: int = 2) -> Optimum:
    """Solve a workload of `build`, with optimizer steps of time 0. Raises RuntimeError if no schedule is found."""
    packing, later = _Packing(workload), _later(workload, seconds, workers)
    packing.model.minimize(packing.end)
    least, found = _solved(packing.model, seconds, workers)
    after = workload.switch_s + workload.step_s  # every slot becomes an engine again
    return Optimum((least + later[0]) / TICKS + after, (found + later[1]) / TICKS + after)


def _solved(model: cp_model.CpModel, seconds: float, workers: int) -> tuple[float, float]:
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers = seconds, workers
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise RuntimeError(f"CP-SAT found no schedule in {seconds:g} s ({solver.status_name()}): raise --seconds")
    return solver.best_objective_bound, solver.objective_value


def _ticks(seconds: float) -> int:
    return int(seconds * TICKS + 1e-6)


class _Packing:
    """Work until the first optimizer step, which is at `end`."""

    def __init__(self, workload: Workload):
        self.model, self.workload = cp_model.CpModel(), workload
        lengths = workload.lengths().tolist()
        tokens = [length + workload.prompt_tokens for length in lengths]
        passes = [_ticks(each / workload.scoring.tokens_per_s) for each in tokens]
        trainings = [_ticks(each / workload.training.tokens_per_s) for each in tokens]
        self.horizon = 2 * sum(map(_ticks, (each * STEP_S for each in lengths))) + sum(passes) + sum(trainings)
        self.horizon += 4 * _ticks(workload.switch_s + workload.move_s)
        self.end, slots = self._time("end"), range(workload.slots)
        self.changes = [self._time(f"change {slot}") for slot in slots]
        self.work: list[list] = [[] for _ in slots]
        lanes: list[list] = [[] for _ in slots]
        first = workload.mini_batch_prompts * workload.group
        for sample, length in enumerate(lengths):
            whole = self._generate(_ticks(length * STEP_S), lanes)
            scored = self._work(passes[sample], whole)
            self.model.add(self.end >= scored)  # its old log-probs use the weights before the first step
            if sample < first:
                self.model.add(self.end >= self._work(trainings[sample], scored))
        for slot in slots:
            held, most = lanes[slot], workload.engine.max_sequences
            self.model.add_cumulative(held, [1] * len(held), most)
            self.model.add_no_overlap(self.work[slot])
            self.model.add(self.end >= self.changes[slot] + _ticks(workload.switch_s))

    def _time(self, name: str) -> cp_model.IntVar:
        return self.model.new_int_var(0, self.horizon, name)

    def _generate(self, ticks: int, lanes: list[list]) -> cp_model.IntVar:
        """Add generation of a sample on one or two slots; return the time when it is finished."""
        model, parts = self.model, []
        moves = model.new_bool_var("")
        before, after = model.new_int_var(0, ticks, ""), model.new_int_var(0, ticks, "")
        model.add(before + after == ticks)
        model.add(after == 0).only_enforce_if(~moves)
        for size in (before, after):
            start, end, here = self._time(""), self._time(""), [model.new_bool_var("") for _ in lanes]
            model.add(end == start + size)
            for slot, held in enumerate(lanes):
                held.append(model.new_optional_interval_var(start, size, end, here[slot], ""))
                model.add(self.changes[slot] >= end).only_enforce_if(here[slot])
            parts.append((start, end, here))
        (_, left, source), (arrived, whole, target) = parts
        model.add_exactly_one(source)
        model.add(sum(target) == moves)
        for slot in range(len(lanes)):
            model.add_at_most_one(source[slot], target[slot])
        model.add(arrived >= left + _ticks(self.workload.move_s)).only_enforce_if(moves)
        model.add(whole == left).only_enforce_if(~moves)
        return whole

    def _work(self, ticks: int, earliest: cp_model.IntVar) -> cp_model.IntVar:
        """Add work on one slot after its change of role; return its end."""
        start, here = self._time(""), [self.model.new_bool_var("") for _ in self.work]
        self.model.add(start >= earliest)
        self.model.add_exactly_one(here)
        end = self._time("")
        self.model.add(end == start + ticks)
        for slot, work in enumerate(self.work):
            work.append(self.model.new_optional_interval_var(start, ticks, end, here[slot], ""))
            self.model.add(start >= self.changes[slot] + _ticks(self.workload.switch_s)).only_enforce_if(here[slot])
        return end


def _later(workload: Workload, seconds: float, workers: int) -> tuple[float, float]:
    """Return (lower bound, found) ticks of the later mini-batches, each divided over the slots."""
    tokens = workload.lengths() + workload.prompt_tokens
    size = workload.mini_batch_prompts * workload.group
    least = found = 0.0
    for begin in range(size, workload.samples, size):
        jobs = [_ticks(each / workload.training.tokens_per_s) for each in tokens[begin : begin + size].tolist()]
        model = cp_model.CpModel()
        longest = model.new_int_var(max(jobs), sum(jobs), "")
        here = [[model.new_bool_var("") for _ in jobs] for _ in range(workload.slots)]
        for slot in here:
            model.add(sum(job * each for job, each in zip(jobs, slot, strict=True)) <= longest)
        for each in zip(*here, strict=True):
            model.add_exactly_one(each)
        model.minimize(longest)
        bounds = _solved(model, seconds, workers)
        least, found = least + bounds[0], found + bounds[1]
    return least, found


# The report ----------------------------------------------------------------------------------------------------------


def measure(shape: tuple, seed: int, seconds: float) -> dict:
    """Return one row; `least` and `found` as in `Optimum`, unless a policy is better."""
    workload, others = build(shape, seed), build(shape, seed + 1000)
    solved = optimum(workload, seconds)
    steps = {policy: simulate(workload, policy, tune(others, policy)).result.step_s for policy in POLICIES}
    bound = lower_bound(workload).seconds
    (slots, samples), lanes, scoring, training = shape
    row = {"slots": slots, "samples": samples, "lanes": lanes, "scoring": scoring, "training": training}
    return (
        row | {"bound": bound, "least": max(bound, solved.least), "found": min(solved.found, *steps.values())} | steps
    )


def table(rows: list[dict]) -> str:
    """Return ratios to the best schedule: the bounds are below 1, policies above."""
    head = ["slots", "samples", "lanes", "scoring", "training", "found, s"]
    over = ["bound", "least", *POLICIES]
    lines = ["| " + " | ".join(head + over) + " |", "|" + "---|" * (len(head) + len(over))]
    for row in rows:
        cells = [str(row[key]) for key in head[:-1]] + [f"{row['found']:.2f}"]
        lines.append("| " + " | ".join(cells + [f"{row[each] / row['found']:.3f}" for each in over]) + " |")
    for each in over:
        ratios = [row[each] / row["found"] for row in rows]
        spread = f"least {min(ratios):.3f}, median {statistics.median(ratios):.3f}, most {max(ratios):.3f}"
        lines.append(f"{each:<9} over the best schedule found: {spread}")
    return "\n".join(lines)


def main() -> None:
    """Run all workloads; print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one workload of each size")
    parser.add_argument("--seconds", type=float, default=60, help="of the solver, for each workload")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, help="all results as JSON")
    arguments = parser.parse_args()
    shapes = list(itertools.product(SIZES, LANES, SCORING, TRAINING))[:: 8 if arguments.quick else 1]
    rows, began = [], time.monotonic()
    for number, shape in enumerate(shapes, 1):
        rows.append(measure(shape, arguments.seed, arguments.seconds))
        print(f"\r{number}/{len(shapes)} workloads, {time.monotonic() - began:.0f} s", end="", flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(rows, indent=1))
    print("\n" + table(rows))


if __name__ == "__main__":
    main()
