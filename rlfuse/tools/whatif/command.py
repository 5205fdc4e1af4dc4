"""`rlfuse whatif`: measure the time that stragglers and uneven work cost a run or training job, and find the cause."""

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

SHOWN = 5  # rows per table, slowest first


class WhatIfError(UserError):
    """Invalid combination of arguments."""


def main(argv: Sequence[str]) -> None:
    """Run `rlfuse whatif`. Raises WhatIfError for invalid arguments, TraceError or RunError for unreadable input."""
    arguments = _parser().parse_args(argv)
    if (arguments.run is None) == (arguments.trace is None):
        raise WhatIfError("rlfuse whatif needs either a run folder, or --trace with a table of another job")
    shown, found = _job(arguments) if arguments.run is None else _run(arguments)
    console = Console(highlight=False)
    for line in shown:
        console.print(line, soft_wrap=isinstance(line, str))
    if arguments.out is not None:
        write_atomically(arguments.out, json.dumps(found, indent=2))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlfuse whatif", description="Measure the time lost to stragglers and uneven work, and name their cause."
    )
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN_DIR", help="run folder")
    add_option(parser)
    parser.add_argument(
        "--steps", type=int, default=STEPS, metavar="N", help=f"analyse the last N steps; default: {STEPS}"
    )
    parser.add_argument(
        "--without", action="append", default=[], metavar="KIND", help="ask: if this kind of work took no time?"
    )
    parser.add_argument("--policy", action="append", default=[], metavar="P", help="ask: under this fusion policy?")
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help="write the recorded and ideal timeline for ui.perfetto.dev"
    )
    parser.add_argument(
        "--trace", type=Path, help="table of another training job, a row per operation (.parquet, .csv)"
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    return parser


def _run(arguments: argparse.Namespace) -> tuple[list[str | Table], dict[str, Any]]:
    if arguments.steps < 1:
        raise WhatIfError(f"--steps {arguments.steps}: must be at least 1")
    _check_kinds(arguments.without, KINDS)
    for policy in arguments.policy:
        loaded_policy(policy)  # fail before the run is read
    folder = open_run(arguments.run)
    run = analyse_run(folder, arguments.steps, arguments.run_code)
    answered = list(answers(run.analysis, run.simulated, arguments.without, arguments.policy))
    if arguments.timeline is not None:
        _write_json(arguments.timeline, of_run(run.analysis, run.steps, folder.width))
    report = run_report(run.slowdown, answered, [step.step for step, _ in run.steps], run.alarms)
    found = asdict(run.slowdown) | {"questions": [asdict(answer) for answer in answered]}
    return report, found | {"alarms": [asdict(alarm) for alarm in run.alarms]}


def _check_kinds(given: Sequence[str], valid: Sequence[str]) -> None:
    if unknown := [kind for kind in given if kind not in valid]:
        raise WhatIfError(f"--without {', '.join(unknown)}: unknown kind of work; valid: {', '.join(valid)}")


def _write_json(path: Path, timeline: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(timeline, separators=(",", ":")))


def _job(arguments: argparse.Namespace) -> tuple[list[str | Table], dict[str, Any]]:
    if arguments.policy:
        raise WhatIfError("--policy: requires a run folder; the job of --trace has no fusion policy")
    operations = operations_of(read(arguments.trace))
    present = [operations.kinds[kind] for kind in np.unique(operations.kind)]
    _check_kinds(arguments.without, present + [name for name, kinds in COMBINED_KINDS.items() if {*kinds} & {*present}])
    job = Job(operations)
    found = job.slowdown()
    answered = list(job_answers(job, found, arguments.without))
    if arguments.timeline is not None:
        _write_json(arguments.timeline, of_job(job))
    return job_report(found, operations, answered), asdict(found) | {
        "questions": [asdict(answer) for answer in answered]
    }


def run_report(
    found: RunSlowdown, answered: Sequence[Answer], numbers: Sequence[int], alarms: Sequence[Alarm]
) -> list[str | Table]:
    """Return the lines and tables of a run's report, with the alarms that it raised itself."""
    which = f"step {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} steps ({numbers[0]} to {numbers[-1]})"
    lines: list[str | Table] = [
        f"{which}: {found.measured:.2f} s per step measured, {found.seconds:.2f} s replayed "
        f"(results may be off by {found.launch_delay:.1%}, the time missing in the replay)",
        f"slowdown {found.S:.2f} = {found.S_machine:.2f} (slow machines) x {found.S_skew:.2f} (uneven work): "
        f"{found.waste:.0%} of worker time is lost",
        f"{found.no_slow_machine_seconds:.2f} s per step without slow machines, {found.ideal_seconds:.2f} s if also "
        "balanced",
    ]
    if found.cause is None or found.S_t is None:
        lines.append(f"no significant slowdown (below {MIN_SLOWDOWN:g})")
    else:
        lines += [f"likely cause: {found.cause.name}. {found.cause.evidence}", f"advice: {found.cause.advice}"]
    lines += [_alarm(alarm) for alarm in alarms[-SHOWN:]]
    workers = [(worker, f"{value:.2f}", f"{found.rates[worker]:.2f}") for worker, value in found.workers.items()]
    names = ("worker", "slowdown of the run", "its time / expected")
    return [*lines, _table(names, workers[:SHOWN]), _kinds("the run", found), _questions(answered)]


def _kinds(subject: str, found: Slowdown) -> Table:
    rows = [(name, f"{value:.2f}") for name, value in (found.S_t or {}).items()]
    return _table(("kind of work", f"slowdown of {subject}"), rows[:SHOWN])


def _alarm(alarm: Alarm) -> str:
    until = "still active" if alarm.ended is None else f"until {_clock(alarm.ended)}"
    return f"{alert_of(alarm, None).title}: started at {_clock(alarm.began)} (step {alarm.step}), {until}"


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _questions(answered: Sequence[Answer]) -> Table:
    rows = [(each.question, f"{each.seconds:.2f} s", f"{each.change:+.1%}", each.by) for each in answered]
    return _table(("what if", "step time", "change", "method"), rows, numbers=("step time", "change"))


def job_report(found: JobSlowdown, operations: Operations, answered: Sequence[Answer]) -> list[str | Table]:
    """Return the lines and tables of a training job's report."""
    workers = operations.stages * operations.ranks
    lines: list[str | Table] = [
        f"{operations.steps} steps on {workers} workers ({operations.stages} stages x {operations.ranks} data ranks): "
        f"{found.seconds:.2f} s per step, {found.ideal_seconds:.2f} s if all workers were equal",
        f"slowdown {found.S:.2f}: {found.waste:.0%} of worker time is lost to uneven work "
        f"(results may be off by {found.launch_delay:.1%}, the time missing in the replay)",
    ]
    if found.workers is None or found.S_t is None or found.cause is None:
        return [*lines, f"no significant slowdown (below {MIN_SLOWDOWN:g})", _questions(answered)]
    lines += [f"likely cause: {found.cause.name}. {found.cause.evidence}", f"advice: {found.cause.advice}"]
    lines.append(
        f"share of the lost time saved: {percent(found.M_W)} if the slowest {SLOWEST:.0%} of workers were like the "
        f"others, {percent(found.M_L)} with equal micro-batches, {percent(found.M_S)} if the last stage were like the "
        "others (these overlap and need not add up to 100 %)"
    )
    places = [(value, stage, rank) for stage, row in enumerate(found.workers) for rank, value in enumerate(row)]
    slowest = sorted(places, key=lambda place: -place[0])[:SHOWN]
    named = [(f"stage {stage}, data rank {rank}", f"{value:.2f}") for value, stage, rank in slowest]
    return [*lines, _table(("worker", "slowdown of the job"), named), _kinds("the job", found), _questions(answered)]


def _table(names: Sequence[str], rows: Sequence[tuple[str, ...]], numbers: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in names:
        table.add_column(name, overflow="fold", justify="right" if name in numbers else "left")
    for row in rows:
        table.add_row(*row)
    return table
