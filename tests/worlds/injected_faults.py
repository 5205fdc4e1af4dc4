"""Synthetic runs, healthy or with a fault in one machine, as spans and agents' samples, to test fault detection.

A slot generates (its batch shrinks to a tail), scores as soon as it is done, then all train; the next step begins when
all have finished. The detector's costs are off by up to 30 % and ignore that time is not linear in the batch and in
tokens. Values drawn for each run, and the source of their range:

    slots            2, 3, 4, 8, 16, 32, 64, one per machine, or 8 per machine from 16 slots on
    steps            11 to 15 of 40 to 80 s, or 40 to 60 of 1.5 to 3.5 s (as the quickstart's)
    scatter          of spans 0.05 to 0.2 (recorded on two cores: 0.2, by `rlfuse.costs.fit`), of a step on a
                     slot 0.02 to 0.08, of machines 0.03; one span in a hundred takes 2x to 5x longer
    slow             1.3x to 3x (the What-if study, arXiv 2505.05713, slowed jobs by 1.16x to 2.03x), by other work
                     on its core or by a lower clock
    jittery          bursts of 3x to 8x that take 35 to 65 % of the time, each 2 to 30 s (0.3 to 3 steps)
    dying disk       latency 5x to 100x higher, stalls 5 to 60 % of the time; work takes 1x to 1.3x
    memory pressure  stalls 10 to 60 % of the time, 20 to 500 page faults per second; work takes 1x to 1.6x
    network delay    1 to 50 ms more, up to 100 retransmissions per second; work is unaffected
    a fault lasts    5 to 12 minutes (most of Minder's last longer than 5), or 20 to 40 short steps

Each healthy run contains one of `NEAR_MISSES`, which look like a fault and are not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from rlfuse.costs.model import Costs
from rlfuse.events import Span
from rlfuse.health.detection import Alarm, Detector
from rlfuse.health.series import ExpectedSeconds, Sample, Series, WarmUpFilter

SLOTS = (2, 3, 4, 8, 16, 32, 64)
FAULTS = ("slow", "jittery", "dying disk", "memory pressure", "network delay")
NEAR_MISSES = (
    "long sequences",  # always on the same slot
    "tail",  # the same slot always finishes last
    "checkpoint",  # written by the first machine every few steps
    "staggered starts",  # some start steps later, with their own warm-up
    "hiccups",  # one machine occasionally stops for up to 40 s (3 short steps)
    "missing samples",  # an agent sends nothing for a long time
    "restart",  # a worker is replaced
    "slower together",  # the whole cluster slows down from the middle on
)


@dataclass
class Fault:
    """A fault of a machine (`slow` and `jittery`: of one slot) from second `begins` to `ends`."""

    kind: str
    slot: int
    begins: float
    ends: float
    slowdown: float = 1.0
    bursts: list[tuple[float, float]] = field(default_factory=list)
    """Times in seconds since the start of the fault."""
    steps: range | None = None
    """For short steps, it begins and ends with a step."""
    strength: float = 0.0
    """Visibility in the node's signals, 0 to 1."""

    def factor(self, at: float) -> float:
        """Slowdown: measured over normal duration."""
        if not self.begins <= at < self.ends:
            return 1.0
        if self.kind == "jittery":
            return self.slowdown if any(begin <= at - self.begins < end for begin, end in self.bursts) else 1.0
        return self.slowdown


class MadeRun:
    """A synthetic run; `steps` yields the data that a driver has at the end of each step."""

    def __init__(self, seed: int, slots: int, fault: str | None = None, near_miss: str | None = None):
        self.rng = rng = np.random.default_rng(seed)
        self.slots, self.near_miss = slots, near_miss
        self.per_node = 8 if slots >= 16 else 1
        self.short = bool(rng.random() < 0.4)
        self.step_s = float(rng.uniform(1.5, 3.5) if self.short else rng.uniform(40, 80))
        self.count = int(rng.integers(40, 61) if self.short else rng.integers(11, 16))
        self.scatter, self.step_scatter = rng.uniform(0.05, 0.2), rng.uniform(0.02, 0.08)
        self.machines = rng.lognormal(0, 0.03, slots)
        self.odd = int(rng.integers(slots))
        self.batch, self.base = int(rng.integers(8, 65)), float(rng.uniform(0.5, 2))
        self.curve, self.hiccups = float(rng.uniform(0, 0.3)), self._hiccups()
        self.costs = Costs(
            step_base_s=rng.uniform(0.7, 1.3), step_per_sequence_s=rng.uniform(0.005, 0.02), flat_batch=8,
            score_tokens_per_s=rng.uniform(7e3, 13e3), train_tokens_per_s=rng.uniform(2e3, 4e3),
        )  # fmt: skip
        self.fault = self._fault(fault) if fault else None
        self.now = 0.0

    @property
    def homes(self) -> dict[str, str]:
        """Worker -> its machine."""
        return {
            f"{role}/{i}": f"node/{i // self.per_node}" for i in range(self.slots) for role in ("rollout", "trainer")
        }

    @property
    def guilty(self) -> set[str]:
        """All workers on the faulty machine, and the machine."""
        if self.fault is None:
            return set()
        node = f"node/{self.fault.slot // self.per_node}"
        return {node} | {worker for worker, home in self.homes.items() if home == node}

    def _fault(self, kind: str) -> Fault:
        rng, whole = self.rng, self.step_s * self.count
        begins, lasts = rng.uniform(0.1, 0.3) * whole, float(rng.uniform(300, 720))
        most = {"slow": (1.3, 3), "jittery": (3, 8), "dying disk": (1, 1.3), "memory pressure": (1, 1.6)}
        slowdown = float(np.exp(rng.uniform(*np.log(most.get(kind, (1, 1))))))
        fault = Fault(kind, self.odd, begins, begins + lasts, slowdown, strength=float(rng.uniform(0, 1)))
        if self.short:
            first, many = int(rng.integers(self.count // 10, self.count // 3)), int(rng.integers(20, 41))
            fault.begins, fault.steps = np.inf, range(first, first + many)
        at, share = 0.0, rng.uniform(0.35, 0.65)
        while kind == "jittery" and at < 720:
            burst = rng.uniform(0.3, 3) * self.step_s if self.short else rng.uniform(2, 30)
            fault.bursts.append((at, at + burst))
            at += burst / share
        return fault

    def _hiccups(self) -> list[tuple[float, float]]:
        if self.near_miss != "hiccups":
            return []
        longest = 3 * self.step_s if self.short else 40.0
        gap, rng = 12 * longest, self.rng
        starts = np.arange(rng.uniform(0, gap), self.step_s * self.count, gap)
        return [(float(at), float(at + rng.uniform(0.3, 1) * longest)) for at in starts]

    def steps(self) -> Iterator[tuple[int, float, float, list[Span], list[Sample]]]:
        """Yield (number, start, end, spans, samples) of each step."""
        for number in range(1, self.count + 1):
            start, spans = self.now, []
            if self.fault is not None and self.fault.steps is not None:
                self.fault.begins = start if number == self.fault.steps.start else self.fault.begins
                self.fault.ends = np.inf if number < self.fault.steps.stop else min(start, self.fault.ends)
            ends = [self._generate(slot, number, spans) for slot in range(self.slots) if not self._absent(slot, number)]
            ready = [self._score(slot, at, number, spans) for slot, at in ends]
            begin = max(at for _, at in ready)
            trained = [self._train(slot, begin, number, spans) for slot, _ in ready]
            self.now = max(trained) + 0.03 * self.step_s
            if self.near_miss == "restart" and number == self.count // 2:
                spans.append(Span("restart", f"rollout/{self.odd}", start, self.now, step=number))
            yield number, start, self.now, spans, self._samples(start, self.now, number, spans)

    # Work ------------------------------------------------------------------------------------------------------------

    def _absent(self, slot: int, number: int) -> bool:
        return self.near_miss == "staggered starts" and slot % 3 == 1 and number <= 4

    def _lasts(self, slot: int, at: float, seconds: float, number: int) -> float:
        """Return the duration of work that takes `seconds` on a healthy machine."""
        rng, factor = self.rng, float(self.machines[slot])
        if self.fault is not None and self._hit(slot):
            factor *= self.fault.factor(at)
        if slot == self.odd and any(begin <= at < end for begin, end in self.hiccups):
            factor *= 4
        if self.near_miss == "slower together" and number > self.count // 2:
            factor *= 1.6
        if number == 1 or (number == 5 and self._absent(slot, 4)):
            factor *= 1.7  # warm-up
        spike = rng.uniform(2, 5) if rng.random() < 0.01 else 1.0
        return seconds * factor * spike * float(rng.lognormal(0, self.scatter)) * float(self.luck[slot])

    def _hit(self, slot: int) -> bool:
        """Return the affected slots: all of a faulty machine, or a single one."""
        fault = self.fault
        own = fault.kind in ("slow", "jittery")
        return slot == fault.slot if own else slot // self.per_node == fault.slot // self.per_node

    def _generate(self, slot: int, number: int, spans: list[Span]) -> tuple[int, float]:
        if slot == 0 or number == 1:
            self.luck = self.rng.lognormal(0, self.step_scatter, self.slots)
        rng, at, many = self.rng, self.now, 10 if self.short or self.slots > 16 else 20
        pieces = max(3, int(many * rng.uniform(0.8, 1.15)))
        if slot == self.odd and self.near_miss in ("tail", "long sequences"):
            pieces = int(pieces * 1.6)
        each = 0.55 * self.step_s / many / self.base
        for i in range(pieces):
            batch = max(1, int(self.batch * (1 - (i / pieces) ** 2)))
            context = batch * (40 + 60 * i) * (2 if slot == self.odd and self.near_miss == "long sequences" else 1)
            work = self.base * (1 + 0.012 * max(0, batch - 8) + self.curve * np.log(batch) / 4 + 2e-6 * context)
            end = at + self._lasts(slot, at, each * work / (1 + 0.012 * self.batch / 2), number)
            attributes = {"steps": 64, "batch": batch, "context": context, "prefill_tokens": 50 if i == 0 else 0}
            spans.append(Span("decode", f"rollout/{slot}", at, end, number, tokens=64 * batch, attributes=attributes))
            at = end
        return slot, at

    def _score(self, slot: int, at: float, number: int, spans: list[Span]) -> tuple[int, float]:
        return slot, self._passes(slot, at, number, spans, ("old_log_prob", "ref"), 0.1)

    def _train(self, slot: int, at: float, number: int, spans: list[Span]) -> float:
        return self._passes(slot, at, number, spans, ("forward", "backward"), 0.25)

    def _passes(
        self, slot: int, at: float, number: int, spans: list[Span], kinds: tuple[str, ...], share: float
    ) -> float:
        rng, pieces = self.rng, 3 if self.short else 6
        for _ in range(pieces):
            tokens = int(rng.lognormal(7, 0.5)) * (2 if slot == self.odd and self.near_miss == "long sequences" else 1)
            for kind in kinds:
                work = share * self.step_s / pieces / len(kinds) * tokens / 1100 * (1 + tokens / 20000)
                end = at + self._lasts(slot, at, work * (1.5 if kind == "backward" else 0.8), number)
                spans.append(Span(kind, f"trainer/{slot}", at, end, number, tokens=tokens, attributes={"degree": 1}))
                at = end
        return at

    # What agents see -------------------------------------------------------------------------------------------------

    def _samples(self, start: float, end: float, number: int, spans: list[Span]) -> list[Sample]:
        period = 1.0 if self.short or self.slots <= 4 else 4.0
        moments = np.arange(start + period, end, period)
        busy = defaultdict(lambda: np.zeros(len(moments)))
        for span in spans:
            first, last = np.searchsorted(moments, (span.start, span.end))
            for i in range(first, min(last + 1, len(moments))):
                busy[span.where][i] += max(0.0, min(span.end, moments[i]) - max(span.start, moments[i] - period))
        found = []
        for i, at in enumerate(moments):
            for node in range(-(-self.slots // self.per_node)):
                if not self._silent(node, at):
                    found.append(Sample(f"node/{node}", float(at), period, self._node(node, float(at), number)))
                    slots = range(node * self.per_node, min(self.slots, (node + 1) * self.per_node))
                    for where in (f"{role}/{slot}" for slot in slots for role in ("rollout", "trainer")):
                        if where in busy:
                            found.append(Sample(where, float(at), period, self._process(where, at, busy[where][i])))
        return found

    def _silent(self, node: int, at: float) -> bool:
        away = self.near_miss == "missing samples" and node == self.odd // self.per_node
        return bool(self.rng.random() < 0.02) or (away and 0.3 < at / (self.step_s * self.count) < 0.6)

    def _process(self, where: str, at: float, busy: float) -> dict[str, float]:
        rng, slot, fault = self.rng, int(where.partition("/")[2]), self.fault
        waits, faults, factor = rng.exponential(0.03) * busy, float(rng.poisson(0.2)), 1.0
        if fault is not None and self._hit(slot) and (factor := fault.factor(at)) > 1:
            if fault.kind == "memory pressure":
                faults += float(rng.poisson(20 + 480 * fault.strength))
            elif fault.strength < 0.5:  # a core shared with others: it waits, its own work takes as long as before
                waits += busy * (1 - 1 / factor)
                busy /= factor
        return {"cpu": busy * rng.uniform(0.9, 1.0) + 0.01, "core_wait": waits, "page_faults": faults}

    def _node(self, node: int, at: float, number: int) -> dict[str, float]:
        rng, fault = self.rng, self.fault
        driver = 2.0 if node == 0 else 1.0
        seen = {
            "memory_pressure": rng.exponential(0.002),
            "io_pressure": rng.exponential(0.01) * driver,
            "retransmits": float(rng.poisson(1.0 * driver)),
            "round_trip": rng.lognormal(np.log(1e-4 if node == 0 else 3e-4), 0.4) * (30 if rng.random() < 0.01 else 1),
        }
        latency = rng.lognormal(np.log(1e-3), 0.6)
        if self.near_miss == "checkpoint" and node == 0 and number % 4 == 0:
            seen["io_pressure"], latency = seen["io_pressure"] + rng.uniform(0.2, 0.6), latency * 5
        if fault is not None and node == fault.slot // self.per_node and fault.begins <= at < fault.ends:
            strength = fault.strength
            if fault.kind == "dying disk":
                seen["io_pressure"] += rng.uniform(0.5, 1.5) * (0.05 + 0.55 * strength)
                latency *= 5 * 20**strength
            elif fault.kind == "memory pressure":
                seen["memory_pressure"] += rng.uniform(0.5, 1.5) * (0.1 + 0.5 * strength)
            elif fault.kind == "network delay":
                seen["round_trip"] += 1e-3 * 50**strength * rng.uniform(0.5, 1.5)
                seen["retransmits"] += float(rng.poisson(100 * strength * rng.random()))
        return seen | ({"disk_latency": latency} if rng.random() < 0.5 else {})


def alarms_of(run: MadeRun, continuity_s: float = 240.0) -> list[Alarm]:
    """Return the detector's findings; the first step is warm-up, as in a run."""
    detector = Detector(continuity_s, lambda worker: worker.partition("/")[2] if "node" not in worker else worker)
    expected, settled, found = ExpectedSeconds(), WarmUpFilter(), []
    for number, start, end, spans, samples in run.steps():
        work, started = settled.work_of(spans)
        if number == 1:
            continue
        for worker in started:
            detector.forget(worker)
        expected.learn(work, run.costs)
        series = Series(start, end)
        series.add_spans(work, expected)
        series.add_samples(samples)
        for window in series.windows(number):
            found += [alarm for alarm in detector.add_window(window, run.homes) if alarm.ended is None]
    return found
