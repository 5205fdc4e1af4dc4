"""Watch all workers once per step: spans and samples in, `health/*` metrics and alarms out.

The first step, and that of a restarted worker, is warm-up. A failure here is logged once and never ends a run.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rlfuse import clock
from rlfuse.costs.model import Costs
from rlfuse.events import Span
from rlfuse.files import RowFile, read_rows
from rlfuse.health.detection import Alarm, Detector, describe_deviation
from rlfuse.health.series import ExpectedSeconds, Sample, Series, WarmUpFilter
from rlfuse.health.signals import LOGGED, SIGNALS, SLOWNESS
from rlfuse.observe.alerts import Alert

if TYPE_CHECKING:
    from rlfuse.health.agent import AgentHandle  # imports ray


FILE = "health.jsonl"
TUPLES = ("peers", "window", "related")
SHOWN = 4  # maximum peers named in an alert


def write_alarms(folder: Path, alarms: Iterable[Alarm]) -> None:
    """Append alarms to `health.jsonl` of the run folder."""
    with closing(RowFile(folder / FILE)) as file:
        file.append(asdict(alarm) for alarm in alarms)


def read_alarms(folder: Path) -> list[Alarm]:
    """Return the alarms of a run by their beginning. `ended` is None for alarms that were active at the end."""
    found: dict[tuple[str, str, float], Alarm] = {}
    for row in read_rows(folder / FILE):
        alarm = Alarm(**row | {name: tuple(row[name]) for name in TUPLES})
        found[alarm.worker, alarm.metric, alarm.began] = alarm
    return sorted(found.values(), key=lambda alarm: alarm.began)


def alert_of(alarm: Alarm, slot: int | None) -> Alert:
    """Return the alert of an alarm. `slot`: of the worker, if it has one."""
    signal = SIGNALS[alarm.metric]
    title = f"slow worker: {alarm.worker}" if alarm.metric == SLOWNESS else f"faulty worker: {alarm.worker}"
    away = "" if slot is None else f"drain it (rlfuse slots drain {slot}) "
    deviation = describe_deviation(alarm.worker, signal, signal.compared(alarm.value), alarm.distance)
    related = f"; also {'; '.join(alarm.related)}" if alarm.related else ""
    return Alert(
        title,
        f"{deviation} as {_peers(alarm)}; distance {alarm.distance:.2f}, "
        f"above {alarm.threshold:.2f} since {_clock(alarm.began)} (step {alarm.step}), last in the window "
        f"{_clock(alarm.window[0])} to {_clock(alarm.window[1])}{related}. Watch it, give it less work, {away}or "
        "replace the node; health.jsonl records when alarms began and ended",
    )


def _peers(alarm: Alarm) -> str:
    count, names = len(alarm.peers), ", ".join(alarm.peers[:SHOWN])
    if not count:
        return "at its start (it has no peers)"
    more = ", ..." if count > SHOWN else ""
    return f"its {count} peers ({names}{more})" if count > 1 else f"its only peer, {names}"


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


SLOTTED = ("rollout", "trainer")


class Monitor:
    """Health monitor of one attempt of a run. `width`: trainer ranks per slot; `alert` and `say` notify the user."""

    def __init__(
        self,
        folder: Path,
        agents: Sequence[AgentHandle],
        continuity_s: float,
        width: int,
        alert: Callable[[int, Alert], None],
        say: Callable[[str], None],
    ):
        self.agents, self._width = agents, width
        self.detector = Detector(continuity_s, self._machine)
        self._folder, self._alert, self._say = folder, alert, say
        self._expected, self._settled = ExpectedSeconds(), WarmUpFilter()
        self._since, self._warm = clock.now(), False
        self._homes: dict[str, str] = {}
        self._warned: set[str] = set()

    async def check_step(self, step: int, spans: Sequence[Span], costs: Costs) -> dict[str, float]:
        """Check all workers after a step, raise alarms, and return its `health/*` metrics."""
        try:
            return await self._look(step, spans, costs)
        except Exception as error:
            self._warn_once(f"Health check failed in step {step}: {type(error).__name__}: {error}")
            return {}

    def close(self) -> None:
        for agent in self.agents:
            agent.close()

    async def _look(self, step: int, spans: Sequence[Span], costs: Costs) -> dict[str, float]:
        samples, answered = await self._drain()
        series = Series(self._since, clock.now())
        self._since = series.end
        work, started = self._settled.work_of(spans)
        if not self._warm:
            self._warm = True
            return {}
        for worker in started:
            self.detector.forget(worker)
        self._expected.learn(work, costs)
        series.add_spans(work, self._expected)
        series.add_samples(samples)
        alarms = [alarm for window in series.windows(step) for alarm in self.detector.add_window(window, self._homes)]
        self._report(step, alarms)
        return self._metrics(series) | {"health/agents": float(answered)}

    async def _drain(self) -> tuple[list[Sample], int]:
        found: list[Sample] = []
        answered = 0
        for agent, (samples, failure) in zip(
            self.agents, await asyncio.gather(*(agent.drain() for agent in self.agents)), strict=True
        ):
            found += samples
            answered += bool(samples)
            self._homes |= {sample.worker: agent.node for sample in samples}
            if failure:
                self._warn_once(f"Health data of {agent.node} is incomplete: {failure}")
        return found, answered

    def _report(self, step: int, alarms: Sequence[Alarm]) -> None:
        for alarm in alarms:
            if alarm.ended is None:
                self._alert(step, alert_of(alarm, self._slot(alarm.worker)))
            else:
                self._say(f"step {step}: {alarm.worker} matches its peers again ({alarm.metric})")
        if alarms:  # after reporting, since the disk may be full
            write_alarms(self._folder, alarms)

    def _slot(self, worker: str) -> int | None:
        role, _, number = worker.partition("/")
        if role not in SLOTTED:
            return None
        return int(number) // (self._width if role == "trainer" else 1)

    def _machine(self, worker: str) -> str:
        slot = self._slot(worker)
        return worker if slot is None else f"slot/{slot}"

    def _metrics(self, series: Series) -> dict[str, float]:
        values = {"health/alarms": float(len({worker for worker, _ in self.detector.active_alarms}))}
        for role, distance in self.detector.max_distances(SLOWNESS).items():
            values[f"health/slowness/{role}/max"] = math.exp(distance)
        for name in (*SIGNALS, *LOGGED):
            means = [mean for worker in series.workers(name) if (mean := series.mean(name, worker)) is not None]
            if name != SLOWNESS and means:
                low = name in SIGNALS and SIGNALS[name].worse < 0
                values[f"health/{name}/{'min' if low else 'max'}"] = min(means) if low else max(means)
        return values

    def _warn_once(self, text: str) -> None:
        kind = text.partition(":")[0].partition(" in step")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            self._say(text)
