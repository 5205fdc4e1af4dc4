"""Detect workers that differ from their peers, by the method of Minder (arXiv 2411.01791, NSDI '25).

    value -> logarithm -> exponential average -> pairwise distances -> score relative to the peers
    -> above the threshold: candidate -> candidate for the continuity threshold, or repeatedly: alarm

Of two workers, the one that got worse is the outlier; a single worker is compared with its own first windows.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log, sqrt
from statistics import median, median_low

import numpy as np

from rlfuse.costs.spans import role_of
from rlfuse.health.series import Window
from rlfuse.health.signals import SIGNALS, SLOWNESS, Signal

SIMILARITY = 4.0  # threshold of a candidate, in units of scatter
TWO_WORKER_FACTOR = 1.5  # thresholds above which one of two workers is an outlier regardless of its past
CONTINUATION_SHARE = 0.5  # fraction of the threshold that a candidate must stay above
SMOOTHING = 0.15  # weight of a window with usual work in the exponential average
CONTINUITY_S = 240.0  # as in the paper: jitters of healthy machines are shorter
STEPS = 12  # steps in a row that replace CONTINUITY_S if steps are short
WINDOWS, FRESHLY = 12, 8
"""Minimum windows as a candidate within CONTINUITY_S, and minimum of these (and SHARE of them) whose unsmoothed value
differs, since the average retains one long jitter. Scaled down for a shorter continuity threshold."""
SHARE = 2 / 3
AGAIN_SHARE, REST = (
    0.3,
    8,
)  # intermittently slow machine: minimum share of deviating windows, and maximum windows between
MANY_WORKERS = 8  # number of workers above which thresholds grow
CHANCE_SIGMAS = 6.0  # standard deviations above the count expected by chance
BEGINNING = 6  # first windows of a worker, which define its initial level; it is not judged before
FRESH = 10  # windows for which a worker without work remains a peer
MAX_CHANGES = 512  # latest changes between windows that define the scatter of a role
MIN_WORKERS_FOR_SCATTER = 6  # minimum workers for using the scatter of scores
MAD = 1.4826  # factor from the median absolute deviation to a standard deviation


@dataclass(frozen=True, slots=True)
class Alarm:
    """A worker (or node) that has deviated from its peers for long, with the evidence."""

    worker: str
    metric: str
    value: float  # in the metric's unit
    usual: float  # value of its peers (or its initial value), in the metric's unit
    distance: float  # log ratio to its peers
    threshold: float
    peers: tuple[str, ...]  # workers it was compared with; empty: its own first windows
    began: float  # epoch seconds
    step: int  # step of `began`
    raised: float  # epoch seconds when it was raised
    window: tuple[float, float]  # latest window then, epoch seconds
    related: tuple[str, ...] = ()  # other deviations of the worker or its node
    ended: float | None = None  # epoch seconds when it matched its peers again

    @property
    def ratio(self) -> float:
        return exp(self.distance)


@dataclass(slots=True)
class _Worker:
    smooth: float = 0.0
    weight: float = 0.0
    last: float = 0.0
    seen: int = 0
    at: int = 0  # number of the latest window with a value
    beginning: list[float] = field(default_factory=list)
    began: float = 0.0  # median of these

    @property
    def ahead(self) -> float:
        return self.last - self.smooth


@dataclass(slots=True)
class _Streak:
    began: float
    step: int
    candidate: bool = False
    windows: int = 0  # in a row as a candidate
    freshly: int = 0  # of these, deviating by the window's own value


@dataclass(slots=True)
class _Intermittent:
    began: float
    step: int
    windows: int = 0
    far: int = 0
    rested: int = 0  # windows since the latest deviating one


@dataclass(frozen=True, slots=True)
class _Verdict:
    distance: float
    threshold: float
    now: float  # distance of this window's value alone
    far: bool  # `now` deviates, given the scatter of such values
    level: float  # smoothed value
    peers: tuple[str, ...]


class _Group:
    def __init__(self, signal: Signal):
        self.signal = signal
        self.workers: dict[str, _Worker] = {}
        self._changes: deque[float] = deque(maxlen=MAX_CHANGES)

    def judge(self, number: int, values: Mapping[str, tuple[float, float]]) -> dict[str, _Verdict]:
        """Add a window; return each worker's distance from its peers."""
        usual_weight = median(weight for _, weight in values.values()) if values else 0.0
        for name, (value, weight) in values.items():
            self._take(name, number, self.signal.compared(value), weight / usual_weight)
        known = {
            name: worker
            for name, worker in self.workers.items()
            if worker.seen > BEGINNING and number - worker.at < FRESH
        }
        judged = [name for name in values if name in known]
        resting = len(known) == 1 < len(self.workers)
        if not judged or resting or len(self._changes) < BEGINNING:
            return {}
        scatter = MAD * median(self._changes) / sqrt(2)
        names, levels = tuple(known), self._levels(known)
        distances, limit = _distances(levels, scatter * sqrt(SMOOTHING / (2 - SMOOTHING)), self.signal)
        far = _limit(len(levels), max(self.signal.min_distance, scatter))
        found = {}
        for name in judged:
            at, others = names.index(name), tuple(other for other in names if other != name)
            distance, worker = float(distances[at]), known[name]
            if not self.signal.from_start:  # a change of the peers is not a change of the worker
                distance = min(distance, float(levels[at]))
            elif len(names) == 2 and distance < TWO_WORKER_FACTOR * limit:
                distance = min(distance, worker.smooth - worker.began)
            together = [known[other].ahead for other in judged if other != name]
            now = distance + worker.ahead - (median(together) if together else 0.0)
            found[name] = _Verdict(
                distance, limit, now, self.signal.from_start and now >= max(far, limit), worker.smooth, others
            )
        return found

    def _take(self, name: str, number: int, value: float, weight: float) -> None:
        worker = self.workers.setdefault(name, _Worker())
        if worker.seen:
            self._changes.append(abs(value - worker.last))
        # A plain mean at first, then an exponential average, weighted by the work of each window.
        worker.weight = worker.weight * (1 - SMOOTHING) + min(1.0, weight)
        worker.smooth += (value - worker.smooth) * min(1.0, weight) / max(worker.weight, 1e-9)
        worker.last, worker.at, worker.seen = value, number, worker.seen + 1
        if len(worker.beginning) < BEGINNING:
            worker.beginning.append(value)
            worker.began = median(worker.beginning)

    def _levels(self, known: Mapping[str, _Worker]) -> np.ndarray:
        """Return the values, or their change since a beginning at most half a threshold worse than the peers'."""
        smooth = np.array([worker.smooth for worker in known.values()])
        if self.signal.from_start and len(self.workers) > 1:
            return smooth
        beginnings = [worker.began for worker in known.values()]
        return smooth - np.minimum(
            beginnings, median_low(beginnings) + CONTINUATION_SHARE * SIMILARITY * self.signal.min_distance
        )


def _distances(levels: np.ndarray, scatter: float, signal: Signal) -> tuple[np.ndarray, float]:
    count, least = len(levels), max(signal.min_distance, scatter)
    if count == 1:
        return levels, _limit(1, least)
    if count == 2:
        return levels - levels[::-1], _limit(2, least)
    # An outlier also adds its distance to the score of each peer; the scaling compensates for this.
    scores = np.abs(levels[:, None] - levels[None, :]).sum(axis=1) / (count - 2)
    above, worse = scores - median(scores), np.sign(levels - median(levels))
    spread = MAD * median(np.abs(above)) if count >= MIN_WORKERS_FOR_SCATTER else 0.0
    return above * worse, _limit(count, max(least, spread))


def _limit(count: int, scatter: float) -> float:
    """Return the threshold among `count` workers: means of few peers scatter, and of many some differ by chance."""
    by_chance = sqrt(max(1.0, log(count) / log(MANY_WORKERS)))  # growth of the maximum of so many normal variables
    return SIMILARITY * scatter * by_chance * (2 if count == 1 else sqrt(count / (count - 1)))


class Detector:
    """`continuity_s`: how long a worker must differ, unless STEPS pass first; `machine`: device of a worker."""

    def __init__(self, continuity_s: float = CONTINUITY_S, machine: Callable[[str], str] = lambda worker: worker):
        self.continuity_s, self._machine = continuity_s, machine
        self.active_alarms: dict[tuple[str, str], Alarm] = {}  # (worker, metric) -> its alarm
        share = min(1.0, continuity_s / CONTINUITY_S)
        self._windows, self._freshly = max(3, round(WINDOWS * share)), max(2, round(FRESHLY * share))
        self._groups: dict[tuple[str, str], _Group] = {}
        self._streaks: dict[tuple[str, str], _Streak] = {}
        self._intermittent: dict[str, _Intermittent] = {}
        self._far_counts: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        """Machine -> windows in which it was judged, and those in which it was far off."""
        self._number = 0
        self._latest: dict[tuple[str, str], _Verdict] = {}

    def add_window(self, window: Window, homes: Mapping[str, str] | None = None) -> list[Alarm]:
        """Return the alarms that begin and end with this window. `homes`: worker -> its node."""
        self._number += 1
        judged: dict[tuple[str, str], _Verdict] = {}
        for name, values in window.values.items():
            for role in {role_of(worker) for worker in values}:
                group = self._groups.setdefault((name, role), _Group(SIGNALS[name]))
                mine = {worker: value for worker, value in values.items() if role_of(worker) == role}
                judged |= {(worker, name): found for worker, found in group.judge(self._number, mine).items()}
        self._latest |= judged
        again = list(self._follow_intermittent(window, judged))
        ended = list(self._follow(window, judged))
        return ended + list(self._raised(window, homes or {}, again))

    def max_distances(self, metric: str) -> dict[str, float]:
        """Return role -> the largest distance of a worker from its peers in its latest window."""
        found: dict[str, float] = {}
        for (worker, name), judged in self._latest.items():
            if name == metric:
                found[role_of(worker)] = max(found.get(role_of(worker), 0.0), judged.distance)
        return found

    def forget(self, worker: str) -> None:
        for group in self._groups.values():
            group.workers.pop(worker, None)
        self._intermittent.pop(self._machine(worker), None)
        for key in [key for key in self._latest if key[0] == worker]:
            del self._latest[key]
            self._streaks.pop(key, None)

    def _follow(self, window: Window, judged: Mapping[tuple[str, str], _Verdict]) -> Iterator[Alarm]:
        for key, found in judged.items():
            streak = self._streaks.pop(key, None) or _Streak(window.start, window.step)
            streak.candidate = found.distance >= (CONTINUATION_SHARE if streak.candidate else 1.0) * found.threshold
            streak.windows = streak.windows + 1 if streak.candidate else 0
            fresh = found.now >= CONTINUATION_SHARE * found.threshold
            streak.freshly = streak.freshly + fresh if streak.candidate else 0
            if found.distance >= CONTINUATION_SHARE * found.threshold:
                self._streaks[key] = streak
            resting = self._machine(key[0]) not in self._intermittent or key[1] != SLOWNESS
            if key in self.active_alarms and not streak.candidate and resting:
                yield replace(self.active_alarms.pop(key), ended=window.start)

    def _follow_intermittent(
        self, window: Window, judged: Mapping[tuple[str, str], _Verdict]
    ) -> Iterator[tuple[str, str]]:
        """Follow machines that are slow repeatedly; yield the worker once it has lasted."""
        machines: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for key in judged:
            if key[1] == SLOWNESS:
                machines[self._machine(key[0])].append(key)
        for machine, keys in machines.items():
            far = [key for key in keys if judged[key].far]
            again = self._intermittent.pop(machine, None) or _Intermittent(window.start, window.step)
            again.windows, again.rested = again.windows + 1, 0 if far else again.rested + 1
            again.far += bool(far)
            self._far_counts[machine][0] += 1
            self._far_counts[machine][1] += bool(far)
            if again.far and again.rested < REST:
                self._intermittent[machine] = again
            least = max(self._freshly, AGAIN_SHARE * again.windows, self._by_chance(machine, again.windows))
            if far and again.far >= least and self._long(again, window):
                yield far[0]

    def _by_chance(self, machine: str, windows: int) -> float:
        """Return in how many of these windows the machine may differ by chance, given its peers' spikes."""
        others = [counts for other, counts in self._far_counts.items() if other != machine]
        share = sum(far for _, far in others) / max(1, sum(judged for judged, _ in others))
        return windows * share + CHANCE_SIGMAS * sqrt(windows * share * (1 - share))

    def _raised(self, window: Window, homes: Mapping[str, str], again: Sequence[tuple[str, str]]) -> Iterator[Alarm]:
        steady = [key for name in SIGNALS for key in self._streaks if key[1] == name and self._lasted(key, window)]
        for key in dict.fromkeys((*steady, *again)):
            worker, name = key
            if key in self.active_alarms or (
                name != SLOWNESS and any(other == worker for other, _ in self.active_alarms)
            ):
                continue
            since = self._streaks[key] if key in steady else self._intermittent[self._machine(worker)]
            self.active_alarms[key] = alarm = self._alarm(key, since, window, homes)
            yield alarm

    def _lasted(self, key: tuple[str, str], window: Window) -> bool:
        streak = self._streaks[key]
        enough = streak.windows >= self._windows and streak.freshly >= max(self._freshly, SHARE * streak.windows)
        return streak.candidate and enough and self._long(streak, window)

    def _long(self, since: _Streak | _Intermittent, window: Window) -> bool:
        return window.end - since.began >= self.continuity_s or window.step - since.step >= STEPS

    def _alarm(
        self, key: tuple[str, str], since: _Streak | _Intermittent, window: Window, homes: Mapping[str, str]
    ) -> Alarm:
        worker, name = key
        found, signal = self._latest[key], SIGNALS[name]
        more = max(0.0, found.now - found.distance) if isinstance(since, _Intermittent) else 0.0
        level, distance = found.level + more, found.distance + more
        places = (worker, homes.get(worker, worker))
        related = tuple(
            describe_deviation(other, SIGNALS[metric], each.level, each.distance)
            for (other, metric), each in self._latest.items()
            if other in places and (other, metric) != key and each.distance >= each.threshold
        )
        return Alarm(
            worker=worker,
            metric=name,
            value=signal.value(level),
            usual=signal.value(level - distance),
            distance=distance,
            threshold=found.threshold,
            peers=found.peers,
            began=since.began,
            step=since.step,
            raised=window.end,
            window=(window.start, window.end),
            related=related,
        )


def describe_deviation(worker: str, signal: Signal, level: float, distance: float) -> str:
    """Describe a deviation of a worker."""
    value, usual = signal.value(level), signal.value(level - distance)
    return f"{worker}: {signal.shown(value)} {signal.description}, not {signal.shown(usual)}"
