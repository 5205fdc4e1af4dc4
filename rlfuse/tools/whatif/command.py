"""`rlfuse whatif`: what uneven workers cost a run or a training job, in which kind of work, and who they are."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from rlfuse.errors import UserError
from rlfuse.files import write_atomically
from rlfuse.fusion.custom_policies import loaded_policy
from rlfuse.health.detection import Alarm
from rlfuse.health.monitor import alert_of
from rlfuse.progress import Console
from rlfuse.run_folder.reader import open_run
from rlfuse.tools.run_code import add_option
from rlfuse.tools.whatif.causes import percent
from rlfuse.tools.whatif.operations import Operations
from rlfuse.tools.whatif.questions import STEPS, Answer, analyse_run, answers, job_answers
from rlfuse.tools.whatif.run_operations import KINDS
from rlfuse.tools.whatif.slowdown import COMBINED_KINDS, MIN_SLOWDOWN, SLOWEST, Job, JobSlowdown, RunSlowdown, Slowdown
from rlfuse.tools.whatif.study_trace import operations_of, read
from rlfuse.tools.whatif.timeline import of_job, of_run

SHOWN = 5  # workers and kinds, the slowest first


class WhatIfError(UserError):
    """Arguments that don't go together."""


def main(argv: Sequence[str]) -> None:
    """Do what the arguments say. TraceError, RunError where what is to be read can't be."""
    arguments = _parser().parse_args(argv)
    if (arguments.run is None) == (arguments.trace is None):
        raise WhatIfError("give a run's folder, or --trace with a table of another job: one of the two")
    shown, found = _job(arguments) if arguments.run is None else _run(arguments)
    console = Console(highlight=False)
    for line in shown:
        console.print(line, soft_wrap=isinstance(line, str))
    if arguments.out is not None:
        write_atomically(arguments.out, json.dumps(found, indent=2))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlfuse whatif", description="What uneven workers cost a run or a training job, and who they are."
    )
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN_DIR", help="a run's folder")
    add_option(parser)
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"its last N steps; default {STEPS}")
    parser.add_argument("--without", action="append", default=[], metavar="KIND", help="asks: if this took no time?")
    parser.add_argument("--policy", action="append", default=[], metavar="P", help="asks: under this fusion policy?")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="ideal and recorded, for ui.perfetto.dev")
    parser.add_argument("--trace", type=Path, help="of another job: operations, .parquet or .csv, a row each")
    parser.add_argument("--out", type=Path, help="what is found, as JSON")
    return parser


def _run(arguments: argparse.Namespace) -> tuple[list[str | Table], dict[str, Any]]:
    if arguments.steps < 1:
        raise WhatIfError(f"--steps {arguments.steps}: give 1 or more")
    _check_kinds(arguments.without, KINDS)
    for policy in arguments.policy:
        loaded_policy(policy)  # an unusable one is an error before the run is read
    folder = open_run(arguments.run)
    run = analyse_run(folder, arguments.steps, arguments.run_code)
    asked = list(answers(run.analysis, run.simulated, arguments.without, arguments.policy))
    if arguments.timeline is not None:
        _write_json(arguments.timeline, of_run(run.analysis, run.steps, folder.width))
    told = run_report(run.found, asked, [step.step for step, _ in run.steps], run.alarms)
    found = asdict(run.found) | {"questions": [asdict(answer) for answer in asked]}
    return told, found | {"alarms": [asdict(alarm) for alarm in run.alarms]}


def _check_kinds(given: Sequence[str], valid: Sequence[str]) -> None:
    if unknown := [kind for kind in given if kind not in valid]:
        raise WhatIfError(f"--without {', '.join(unknown)}: unknown kind of work; valid: {', '.join(valid)}")


def _write_json(path: Path, timeline: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(timeline, separators=(",", ":")))


def _job(arguments: argparse.Namespace) -> tuple[list[str | Table], dict[str, Any]]:
    if arguments.policy:
        raise WhatIfError("--policy: only for a run's folder; the job of --trace has no fusion policy")
    operations = operations_of(read(arguments.trace))
    present = [operations.kinds[kind] for kind in np.unique(operations.kind)]
    _check_kinds(arguments.without, present + [name for name, kinds in COMBINED_KINDS.items() if {*kinds} & {*present}])
    job = Job(operations)
    found = job.found()
    asked = list(job_answers(job, found, arguments.without))
    if arguments.timeline is not None:
        _write_json(arguments.timeline, of_job(job))
    return job_report(found, operations, asked), asdict(found) | {"questions": [asdict(answer) for answer in asked]}


def run_report(
    found: RunSlowdown, asked: Sequence[Answer], numbers: Sequence[int], alarms: Sequence[Alarm]
) -> list[str | Table]:
    """Of these steps of a run, with what it told itself while it went on."""
    which = f"step {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} steps ({numbers[0]} to {numbers[-1]})"
    lines: list[str | Table] = [
        f"{which}: {found.measured:.2f} s each, replayed {found.seconds:.2f} s "
        f"(the replay leaves out {found.launch_delay:.1%}: so wrong what follows may be)",
        f"slowdown {found.S:.2f} = {found.S_machine:.2f} by slow machines x {found.S_skew:.2f} by uneven work: "
        f"{found.waste:.0%} of the workers' time is lost",
        f"the same work without slow machines {found.no_slow_machine_seconds:.2f} s, and shared out evenly "
        f"{found.ideal_seconds:.2f} s",
    ]
    if found.cause is None or found.S_t is None:
        lines.append(f"no significant slowdown (below {MIN_SLOWDOWN:g})")
    else:
        lines += [f"likely cause: {found.cause.name}. {found.cause.evidence}", f"what helps: {found.cause.advice}"]
    lines += [_alarm(alarm) for alarm in alarms[-SHOWN:]]
    workers = [(worker, f"{value:.2f}", f"{found.rates[worker]:.2f}") for worker, value in found.workers.items()]
    names = ("worker", "slows the run", "its time over expected")
    return [*lines, _table(names, workers[:SHOWN]), _kinds("the run", found), _questions(asked)]


def _kinds(what: str, found: Slowdown) -> Table:
    rows = [(name, f"{value:.2f}") for name, value in (found.S_t or {}).items()]
    return _table(("kind of work", f"slows {what}"), rows[:SHOWN])


def _alarm(alarm: Alarm) -> str:
    until = "and stands" if alarm.ended is None else f"until {_clock(alarm.ended)}"
    return f"{alert_of(alarm, None).title}: began at {_clock(alarm.began)} (step {alarm.step}) {until}"


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _questions(asked: Sequence[Answer]) -> Table:
    rows = [(each.question, f"{each.seconds:.2f} s", f"{each.change:+.1%}", each.by) for each in asked]
    return _table(("what if", "a step", "", "by"), rows, numbers=("a step", ""))


def job_report(found: JobSlowdown, operations: Operations, asked: Sequence[Answer]) -> list[str | Table]:
    """Of a table of a training job."""
    workers = operations.stages * operations.ranks
    lines: list[str | Table] = [
        f"{operations.steps} steps on {workers} workers ({operations.stages} stages x {operations.ranks} data ranks): "
        f"{found.seconds:.2f} s a step, {found.ideal_seconds:.2f} s if all workers were alike",
        f"slowdown {found.S:.2f}: {found.waste:.0%} of the workers' time is lost to uneven work "
        f"(the replay leaves out {found.launch_delay:.1%}, the error of these numbers)",
    ]
    if found.workers is None or found.S_t is None or found.cause is None:
        return [*lines, f"no significant slowdown (below {MIN_SLOWDOWN:g})", _questions(asked)]
    lines += [f"likely cause: {found.cause.name}. {found.cause.evidence}", f"what helps: {found.cause.advice}"]
    lines.append(
        f"time saved, as a share of the time lost: with the slowest {SLOWEST:.0%} of the workers like the others "
        f"{percent(found.M_W)}, with micro-batches alike {percent(found.M_L)}, with the last stage like the others "
        f"{percent(found.M_S)} (parts overlap: shares need not add up to 100 %)"
    )
    places = [(value, stage, rank) for stage, row in enumerate(found.workers) for rank, value in enumerate(row)]
    slowest = sorted(places, key=lambda place: -place[0])[:SHOWN]
    named = [(f"stage {stage}, data rank {rank}", f"{value:.2f}") for value, stage, rank in slowest]
    return [*lines, _table(("worker", "slows the job"), named), _kinds("the job", found), _questions(asked)]


def _table(names: Sequence[str], rows: Sequence[tuple[str, ...]], numbers: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in names:
        table.add_column(name, overflow="fold", justify="right" if name in numbers else "left")
    for row in rows:
        table.add_row(*row)
    return table
