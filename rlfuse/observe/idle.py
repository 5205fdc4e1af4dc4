"""Attribute every second of every slot to a kind of work or to an idle cause. Pure.

Intervals are claimed in a fixed order, each from what is left, so busy and idle time add up to the window.
The first cause that applies to a slot:
    start_up    the run is starting                   calls       its call, or the result, is in transit
    switch      it switches its role                  tail        others still generate, it has no sample left
    weights     new weights are being transferred     imbalance   others still score or train
    bubble      the pipeline schedule has a gap       reward      only reward functions are running
    drained     it is drained                         data        prompts are drawn or clips decoded
    controller  all other time: decisions, advantages, logging
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rlfuse.events import Intervals, Span, union

WORK = {
    "decode": "generate",
    "encode": "encode",
    "old_log_prob": "old_log_prob",
    "ref": "ref",
    "values": "values",
    "forward": "train",
    "backward": "train",
    "head": "train",
    "weight_gradients": "train",
    "optimizer": "optimizer",
    "update_weights": "update_weights",
}
"""Kind of span in which the engine or rank of a slot is busy -> kind of work."""
_KINDS = tuple(dict.fromkeys(WORK.values()))
WORK_LABELS = {
    "generate": "generating",
    "encode": "encoding clips",
    "old_log_prob": "computing old log-probs",
    "ref": "computing reference log-probs",
    "values": "computing values",
    "train": "forward and backward",
    "optimizer": "optimizer step",
    "update_weights": "loading new weights",
    "testing": "validating",
    "save_checkpoint": "saving a checkpoint",
    "reward": "scoring by reward functions",
}
CAUSES = {
    "tail": "waiting for the longest responses",
    "imbalance": "waiting for slots that still score or train",
    "reward": "waiting for reward functions",
    "bubble": "waiting for another pipeline stage",
    "drained": "drained (rlfuse slots)",
    "weights": "waiting for new weights",
    "switch": "switching between generation and training, or loading optimizer state",
    "calls": "waiting for its next call",
    "data": "waiting for prompts or clips",
    "controller": "waiting for the driver (advantages, decisions, logging)",
    "start_up": "starting up",
}
CALLS = ("gen", "old_log_prob", "ref", "values", "update_actor", "update_critic")
"""Spans of the driver around calls to slots."""


@dataclass(frozen=True, slots=True)
class TimeAccount:
    """Seconds of a window, as means over slots; busy and idle time add up to `seconds`."""

    seconds: float
    busy: dict[str, float]
    idle: dict[str, float]

    @property
    def idle_share(self) -> float:
        return sum(self.idle.values()) / self.seconds if self.seconds else 0.0

    def metrics(self) -> dict[str, float]:
        """Return busy/{work} and idle/{cause}: seconds per slot."""
        return {
            f"{side}/{name}": value
            for side, parts in (("busy", self.busy), ("idle", self.idle))
            for name, value in parts.items()
        }


def account(spans: Sequence[Span], start: float, end: float, slots: int, width: int = 1) -> TimeAccount:
    """Return the time account of a window, with the arguments of `intervals_by_slot`."""
    totals: dict[str, dict[str, float]] = {"busy": defaultdict(float), "idle": defaultdict(float)}
    for slot in intervals_by_slot(spans, start, end, slots, width):
        for name, intervals in slot.items():
            side, _, what = name.partition("/")
            totals[side][what] += sum(b - a for a, b in intervals) / slots
    return TimeAccount(end - start, dict(totals["busy"]), dict(totals["idle"]))


def intervals_by_slot(
    spans: Sequence[Span], start: float, end: float, slots: int, width: int = 1
) -> list[dict[str, Intervals]]:
    """Return for each slot `busy/{work}` and `idle/{cause}` -> intervals. `width`: ranks that share an engine."""
    driver: dict[str, list[Span]] = defaultdict(list)
    late: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.where == "driver":
            driver[span.kind].append(span)
        elif span.kind == "optimizer_wait":
            late[span.where].append(span)
    own = _by_slot(spans, slots, width)
    testing, saving = union(driver["testing"]), union(driver["save_checkpoint"])
    before = [
        ("idle/weights", union(driver["update_weights"])),
        ("idle/bubble", union(span for span in spans if span.where == "trainer" and span.kind == "schedule")),
    ]
    after = [
        ("idle/tail", union(driver["gen"])),
        ("idle/imbalance", union(span for work in own for span in work)),
        ("idle/reward", union(driver["reward"])),
        ("idle/data", union(driver["data"] + driver["encode_clips"])),
        ("idle/calls", union(span for kind in CALLS for span in driver[kind])),
        ("idle/controller", [(start, end)]),
    ]
    calls, switches, drained = (_by_engine(driver, kinds) for kinds in (CALLS, ("switch",), ("drained",)))
    start_up, divided = _start_up(spans, start), []
    for slot, work in enumerate(own):
        engine = slot // width
        claims = [("busy/testing", split_by(union(work), testing)[0])]
        claims += [(f"busy/{kind}", union(s for s in work if WORK[s.kind] == kind)) for kind in _KINDS]
        claims += [("busy/save_checkpoint", saving), ("idle/start_up", start_up)]
        claims += [("idle/switch", union([*switches[engine], *late[f"trainer/{slot}"]])), *before]
        claims += [("idle/drained", union(drained[engine])), ("idle/calls", union(calls[engine])), *after]
        divided.append(_claimed((start, end), claims))
    return divided


def _by_engine(driver: dict[str, list[Span]], kinds: Sequence[str]) -> dict[int, list[Span]]:
    found: dict[int, list[Span]] = defaultdict(list)
    for kind in kinds:
        for span in driver[kind]:
            if "slot" in span.attributes:
                found[span.attributes["slot"]].append(span)
    return found


def _by_slot(spans: Iterable[Span], slots: int, width: int) -> list[list[Span]]:
    own: list[list[Span]] = [[] for _ in range(slots)]
    for span in spans:
        process, _, number = span.where.partition("/")
        if span.kind in WORK and process in ("rollout", "trainer", "encoder") and number:
            first, count = (int(number) * width, width) if process == "rollout" else (int(number), 1)
            for slot in range(first, min(first + count, slots)):
                own[slot].append(span)
    return own


def _start_up(spans: Iterable[Span], start: float) -> Intervals:
    began = [span.end for span in spans if span.where == "driver" and span.kind == "start"]
    if not began:
        return []
    after = [span.start for span in spans if span.where == "driver" and span.start >= began[-1]]
    return [(start, min(after, default=began[-1]))]


def _claimed(window: tuple[float, float], claims: Iterable[tuple[str, Intervals]]) -> dict[str, Intervals]:
    """Return name -> the part of its claim that earlier claims left of the window."""
    left, given = [window] if window[1] > window[0] else [], defaultdict(list)
    for name, claim in claims:
        taken, left = split_by(left, claim)
        if taken:
            given[name] += taken
    return {name: sorted(intervals) for name, intervals in given.items()}


def split_by(intervals: Intervals, by: Intervals) -> tuple[Intervals, Intervals]:
    """Return the parts of `intervals` inside and outside of `by`."""
    inside: Intervals = []
    outside: Intervals = []
    for start, end in intervals:
        edges = [start]
        for place in range(bisect_right(by, start, key=lambda each: each[1]), len(by)):
            if by[place][0] >= end:
                break
            edges += [max(start, by[place][0]), min(end, by[place][1])]
        edges.append(end)
        for number, part in enumerate(pairwise(edges)):
            if part[1] > part[0]:
                (inside if number % 2 else outside).append(part)
    return inside, outside
