"""`rlfuse schedule`: search the best schedule of a problem, print its numbers, write it and draw it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from rlfuse.config.input_files import publish, schema_of, unwritable
from rlfuse.files import write_whole
from rlfuse.fusion.schedules.baselines import baseline, serial_1f1b_rows
from rlfuse.fusion.schedules.problem import EXAMPLE, Problem, ScheduleError, read_problem
from rlfuse.fusion.schedules.schedule import Schedule
from rlfuse.fusion.schedules.search import METHODS, search

COMPARED = 30_000  # operations up to which ZB-V is drawn for comparison


def main(argv: Sequence[str]) -> None:
    """Do what the arguments say. Raises ScheduleError."""
    arguments = _parser().parse_args(argv)
    if arguments.schema or arguments.example:
        data = schema_of(Problem) if arguments.schema else EXAMPLE
        then = 'name it as "$schema" in a problem' if arguments.schema else "rlfuse schedule {path}"
        publish(data, arguments.schema or arguments.example, then, ScheduleError)
        return
    if arguments.problem is None:
        raise ScheduleError("rlfuse schedule needs a PROBLEM.json; --example shows one")
    picture = arguments.picture
    if wrong := unwritable("--out", arguments.out) + unwritable("--picture", picture, ".png", ".html"):
        raise ScheduleError(*wrong)
    problem = read_problem(arguments.problem)
    found = search(problem, time_limit=arguments.time_limit, method=arguments.method, seed=arguments.seed)
    print(summary(problem, found, time.perf_counter() + arguments.time_limit / 10))
    if arguments.out is not None:
        write_whole(arguments.out, found.text + "\n")
    if picture is not None:
        from rlfuse.observe.schedule_picture import draw

        draw(problem, [("serial 1F1B", serial_1f1b_rows(problem)), ("fused", found.rows)], picture)
        print(f"picture    {picture}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rlfuse schedule", description="Search one pipeline schedule for all models.")
    parser.add_argument("problem", nargs="?", type=Path, metavar="PROBLEM.json", help="devices, models, times, memory")
    parser.add_argument("--time-limit", type=float, default=10.0, metavar="S", help="of the search, s; default: 10")
    parser.add_argument("--method", default="auto", metavar="M", help=f"{', '.join(METHODS)}; default: auto")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument("--out", type=Path, metavar="SCHEDULE.json", help="rows with times")
    parser.add_argument("--picture", type=Path, metavar="out.png|html", help="serial 1F1B above the schedule")
    parser.add_argument("--example", nargs="?", const="-", metavar="FILE", help="print a problem, or write it there")
    parser.add_argument("--schema", nargs="?", const="-", metavar="FILE", help="the same with the JSON schema of one")
    return parser


def summary(problem: Problem, found: Schedule, until: float = float("inf")) -> str:
    """A few lines: how short, how good, at what memory, after how long; `until`: when comparing has to end."""
    makespan, serial = found.makespan, found.serial_1f1b
    cap = "no cap" if problem.memory_limit == float("inf") else f"cap {problem.memory_limit / problem.memory_unit:.3g}"
    lines = [
        f"{problem.operations:,} operations on {problem.devices} devices",
        f"makespan   {makespan:.6g}, {makespan / found.lower_bound - 1:.2%} above the bound of {found.lower_bound:.6g}",
        f"serial     1F1B {serial:.6g}: {serial / makespan:.3f}x",
    ]
    few = problem.operations <= COMPARED
    zb_v = baseline(problem, "zb-v", barrier=False, over=lambda: time.perf_counter() > until) if few else None
    if zb_v is not None:
        lines[-1] += f"; ZB-V without a barrier {zb_v:.6g}: {zb_v / makespan:.3f}x"
    return "\n".join(
        [
            *lines,
            f"memory     {found.memory_peak:.3f} of serial 1F1B's worst device ({cap})",
            f"idle       {sum(found.bubbles) / len(found.bubbles):.1%} of device time",
            f"found by   {found.method} in {found.seconds:.2f} s",
        ]
    )
