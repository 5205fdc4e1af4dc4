"""Alarms in words, and as rows of the run folder's `health.jsonl` (one row when raised, one when over)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from rlfuse.files import RowFile, read_rows
from rlfuse.health.detection import Alarm, told
from rlfuse.health.signals import SIGNALS, SLOWNESS
from rlfuse.observe.alerts import Alert

FILE = "health.jsonl"
TUPLES = ("peers", "window", "beside")
SHOWN = 4  # peers that are named


def write_alarms(folder: Path, alarms: Iterable[Alarm]) -> None:
    """Append them to the run folder's file."""
    with closing(RowFile(folder / FILE)) as file:
        file.append(asdict(alarm) for alarm in alarms)


def read_alarms(folder: Path) -> list[Alarm]:
    """Of a run, in the order in which they began; none where none was told. `ended` is None of what stood last."""
    found: dict[tuple[str, str, float], Alarm] = {}
    for row in read_rows(folder / FILE):
        alarm = Alarm(**row | {name: tuple(row[name]) for name in TUPLES})
        found[alarm.worker, alarm.metric, alarm.began] = alarm
    return sorted(found.values(), key=lambda alarm: alarm.began)


def alert_of(alarm: Alarm, slot: int | None) -> Alert:
    """What a person is told. `slot`: of the worker, where it has one."""
    signal = SIGNALS[alarm.metric]
    title = f"slow worker: {alarm.worker}" if alarm.metric == SLOWNESS else f"faulty worker: {alarm.worker}"
    away = "" if slot is None else f"take it out (rlfuse slots drain {slot}), "
    seen = told(alarm.worker, signal, signal.compared(alarm.value), alarm.distance)
    beside = f"; beside it {'; '.join(alarm.beside)}" if alarm.beside else ""
    return Alert(
        title,
        f"{seen} as {_peers(alarm)}; distance {alarm.distance:.2f}, "
        f"above {alarm.threshold:.2f} since {_clock(alarm.began)} (step {alarm.step}), last in the window "
        f"{_clock(alarm.window[0])} to {_clock(alarm.window[1])}{beside}. Watch it, give it less work, {away}or "
        "replace the node; health.jsonl says when it began and ended",
    )


def _peers(alarm: Alarm) -> str:
    count, names = len(alarm.peers), ", ".join(alarm.peers[:SHOWN])
    if not count:
        return "it began (no peer to compare it with)"
    more = ", ..." if count > SHOWN else ""
    return f"its {count} peers ({names}{more})" if count > 1 else f"its only peer, {names}"


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
