"""Render what was found as lines and tables for the terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich import box
from rich.table import Table

from rlfuse.health.alarms import alert_of
from rlfuse.health.detection import Alarm
from rlfuse.whatif.causes import percent
from rlfuse.whatif.operations import Operations
from rlfuse.whatif.questions import Answer
from rlfuse.whatif.run_slowdown import RunSlowdown
from rlfuse.whatif.slowdown import ATTRIBUTED, SLOWEST, Slowdown

SHOWN = 5  # workers and kinds, the slowest first


def told_of_run(
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
        lines.append(f"no significant slowdown (below {ATTRIBUTED:g})")
    else:
        lines += [f"likely cause: {found.cause.name}. {found.cause.evidence}", f"what helps: {found.cause.advice}"]
    lines += [_alarm(alarm) for alarm in alarms[-SHOWN:]]
    workers = [(worker, f"{value:.2f}", f"{found.rates[worker]:.2f}") for worker, value in found.workers.items()]
    kinds = [(name, f"{value:.2f}") for name, value in (found.S_t or {}).items()]
    tables = [
        _first_of(("worker", "slows the run", "its time over expected"), workers),
        _first_of(("kind of work", "slows the run"), kinds),
    ]
    return [*lines, *tables, _questions(asked)]


def _alarm(alarm: Alarm) -> str:
    until = "and stands" if alarm.ended is None else f"until {_clock(alarm.ended)}"
    return f"{alert_of(alarm, None).title}: began at {_clock(alarm.began)} (step {alarm.step}) {until}"


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _questions(asked: Sequence[Answer]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("what if", "a step", "", "by"):
        table.add_column(name, overflow="fold", justify="right" if name in ("a step", "") else "left")
    for answer in asked:
        table.add_row(answer.question, f"{answer.seconds:.2f} s", f"{answer.change:+.1%}", answer.by)
    return table


def told_of_job(found: Slowdown, operations: Operations, asked: Sequence[Answer]) -> list[str | Table]:
    """Of a table of a training job."""
    workers = operations.stages * operations.ranks
    lines: list[str | Table] = [
        f"{operations.steps} steps on {workers} workers ({operations.stages} stages x {operations.ranks} data ranks): "
        f"{found.seconds:.2f} s a step, {found.ideal_seconds:.2f} s if all workers were alike",
        f"slowdown {found.S:.2f}: {found.waste:.0%} of the workers' time is lost to uneven work "
        f"(the replay leaves out {found.launch_delay:.1%}, the error of these numbers)",
    ]
    if found.workers is None or found.S_t is None or found.cause is None:
        return [*lines, f"no significant slowdown (below {ATTRIBUTED:g})", _questions(asked)]
    lines += [f"likely cause: {found.cause.name}. {found.cause.evidence}", f"what helps: {found.cause.advice}"]
    lines.append(
        f"time saved, as a share of the time lost: with the slowest {SLOWEST:.0%} of the workers like the others "
        f"{percent(found.M_W)}, with micro-batches alike {percent(found.M_L)}, with the last stage like the others "
        f"{percent(found.M_S)} (parts overlap: shares need not add up to 100 %)"
    )
    places = [(value, stage, rank) for stage, row in enumerate(found.workers) for rank, value in enumerate(row)]
    slowest = sorted(places, key=lambda place: -place[0])
    named = [(f"stage {stage}, data rank {rank}", f"{value:.2f}") for value, stage, rank in slowest]
    kinds = [(name, f"{value:.2f}") for name, value in found.S_t.items()]
    tables = [_first_of(("worker", "slows the job"), named), _first_of(("kind of work", "slows the job"), kinds)]
    return [*lines, *tables, _questions(asked)]


def _first_of(names: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows[:SHOWN]:
        table.add_row(*row)
    return table
