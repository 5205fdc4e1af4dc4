"""Watch all workers once per step: spans and samples in, `health/*` metrics and alarms out.

The first step, and that of a restarted worker, is warm-up. A failure here is logged once and never ends a run.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlfuse import clock
from rlfuse.events import Span
from rlfuse.fusion.costs import Costs
from rlfuse.health.alarms import alert_of, write_alarms
from rlfuse.health.detection import Alarm, Detector
from rlfuse.health.series import Expected, Sample, Series, Settled
from rlfuse.health.signals import LOGGED, SIGNALS, SLOWNESS
from rlfuse.observe.alerts import Alert

if TYPE_CHECKING:
    from rlfuse.health.agent import AgentHandle  # imports ray

SLOTTED = ("rollout", "trainer")


class Monitor:
    """Of one attempt of a run. `width`: trainer ranks of a slot; `alert` and `say` tell the person."""

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
        self._expected, self._settled = Expected(), Settled()
        self._since, self._warm = clock.now(), False
        self._homes: dict[str, str] = {}
        self._told: set[str] = set()

    async def look(self, step: int, spans: Sequence[Span], costs: Costs) -> dict[str, float]:
        """The step is over: tell what is wrong; its `health/*`."""
        try:
            return await self._look(step, spans, costs)
        except Exception as error:
            self._tell_once(f"workers were not looked at in step {step}: {type(error).__name__}: {error}")
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
        alarms = [alarm for window in series.windows(step) for alarm in self.detector.look(window, self._homes)]
        self._tell(step, alarms)
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
                self._tell_once(f"{agent.node} is not looked at as a whole: {failure}")
        return found, answered

    def _tell(self, step: int, alarms: Sequence[Alarm]) -> None:
        for alarm in alarms:
            if alarm.ended is None:
                self._alert(step, alert_of(alarm, self._slot(alarm.worker)))
            else:
                self._say(f"step {step}: {alarm.worker} is like its peers again ({alarm.metric})")
        if alarms:  # after they are told: the disk may be full
            write_alarms(self._folder, alarms)

    def _slot(self, worker: str) -> int | None:
        role, _, number = worker.partition("/")
        if role not in SLOTTED:
            return None
        return int(number) // (self._width if role == "trainer" else 1)

    def _machine(self, worker: str) -> str:
        """A slot's engine and ranks share its device."""
        slot = self._slot(worker)
        return worker if slot is None else f"slot/{slot}"

    def _metrics(self, series: Series) -> dict[str, float]:
        values = {"health/alarms": float(len({worker for worker, _ in self.detector.standing}))}
        for role, distance in self.detector.farthest(SLOWNESS).items():
            values[f"health/slowness/{role}/max"] = math.exp(distance)
        for name in (*SIGNALS, *LOGGED):
            means = [mean for worker in series.workers(name) if (mean := series.mean(name, worker)) is not None]
            if name != SLOWNESS and means:
                low = name in SIGNALS and SIGNALS[name].worse < 0
                values[f"health/{name}/{'min' if low else 'max'}"] = min(means) if low else max(means)
        return values

    def _tell_once(self, text: str) -> None:
        kind = text.partition(":")[0].partition(" in step")[0]
        if kind not in self._told:
            self._told.add(kind)
            self._say(text)
