"""Turn the steps of a run folder into operations that wait for one another.

    data --> gen --> decode, decode, ... --> reward, passes --> adv --> forward, backward --> optimizer --> weights

Each call of the driver is three operations: on its way (`controller`), the work on the ranks, on its way back. An
operation waits only for what had ended when it began; what none of its reasons explains waited for the controller.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlfuse.errors import RunError
from rlfuse.events import Span
from rlfuse.run_folder.reader import RunFolder
from rlfuse.samples import PASSES, prompt_id
from rlfuse.tools.whatif.operations import NO_GROUP, Operations

CONTROLLER, REWARD, DRIVER = "controller", "reward", "driver"
ROLES = ("slot", "reward", "encoder", DRIVER)
KINDS = (
    *("data", "encode", "prefill", "decode", "move", "switch", REWARD, *PASSES),
    *("adv", "forward", "head", "backward", "optimizer", "update_weights", CONTROLLER),
)
COMMUNICATION = ("move", "update_weights")
INTERRUPTED = ("lost", "restart", "restart_engine")  # spans of interrupted steps, which are left out
CALL_WORKERS = {
    **dict.fromkeys(PASSES, "trainer/"),
    **dict.fromkeys(("update_actor", "update_critic"), "trainer/"),
    **{"update_weights": "rollout/", REWARD: "reward/", "data": "encoder/", "step": "trainer/"},
}
"""Where the work of the driver's calls is done."""
CALLS = (*PASSES, "update_actor", "update_critic", "update_weights", REWARD, "data", "gen", "switch")
"""Of jobs that generate; of others a step is one call."""
RENAMED = {"weight_gradients": "backward"}
MAX_UNEXPLAINED_S = 2e-3  # what began so soon after its own reasons had ended was not kept waiting
CLOCK_TOLERANCE_S = 1e-4  # clocks of one host, read one after the other


@dataclass(eq=False, repr=False, slots=True, kw_only=True)
class Piece:
    """An operation on its way into the arrays."""

    kind: str
    worker: str
    start: float
    end: float
    span: Span
    stage: int = 0
    rank: int = -1  # of the trainer
    call: Call | None = None
    step: int = 0
    number: int = -1
    group: int = NO_GROUP
    waits: list[Piece] = field(default_factory=list)


@dataclass(eq=False, repr=False, slots=True)
class Call:
    """What the driver asked for: on its way there, at work, on its way back."""

    span: Span
    slots: tuple[int, ...] = ()  # those that it keeps busy
    begin: Piece | None = None
    work: list[Piece] = field(default_factory=list)
    end: Piece | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOperations:
    """Operations of a run, and what they were made of."""

    operations: Operations  # `rank` is the number of the worker, `stage` that of the pipeline
    workers: tuple[str, ...]  # `slot 0`, `reward/0`, `encoder/0`, `driver`
    pieces: list[Piece]  # one for each operation
    steps: tuple[Span, ...]  # the driver's spans of them


def recorded_steps(run: RunFolder, at_most: int) -> list[tuple[Span, list[Span]]]:
    """The last steps of a run that went undisturbed, with their spans. RunError where there is none."""
    steps = sorted(run.steps().values(), key=lambda step: step.start)[-2 * at_most :]
    starts, inside = [step.start - CLOCK_TOLERANCE_S for step in steps], [list[Span]() for _ in steps]
    interesting = re.compile(rf'"step":(?:{"|".join(str(step.step) for step in steps) or "none"}),').search
    for span in run.spans(lambda line: interesting(line) is not None, [step.step for step in steps]):
        place = bisect_right(starts, span.start) - 1
        if place >= 0 and span.end <= steps[place].end + CLOCK_TOLERANCE_S:
            inside[place].append(span)
    kinds = [{span.kind for span in spans} for spans in inside]
    undisturbed = ["optimizer" in each and not each & set(INTERRUPTED) for each in kinds]
    whole = [each for each, kept in zip(zip(steps, inside, strict=True), undisturbed, strict=True) if kept]
    if not whole:
        raise RunError(f"{run.path / 'events.jsonl'}: no step that went undisturbed to its end; let the run finish one")
    return whole[-at_most:]


def operations(
    steps: Sequence[tuple[Span, Sequence[Span]]], width: int = 1, together: Collection[str] = ()
) -> RecordedOperations:
    """What ran in these steps and what it waited for. `width`: trainer ranks of a slot; `together`: kinds of passes of
    which all ranks compute their n-th at the same time."""
    pieces: list[Piece] = []
    for number, (_, spans) in enumerate(steps):
        for piece in _Step(spans, width, together).pieces():
            piece.step, piece.number = number, len(pieces)
            pieces.append(piece)
    workers = sorted({piece.worker for piece in pieces}, key=_place)
    of = {worker: number for number, worker in enumerate(workers)}
    waits = [(piece.number, before.number) for piece in pieces for before in piece.waits]
    groups = {key: number for number, key in enumerate({(p.step, p.group) for p in pieces if p.group != NO_GROUP})}
    found = Operations(
        kind=np.array([KINDS.index(piece.kind) for piece in pieces]),
        kinds=KINDS,
        step=np.array([piece.step for piece in pieces]),
        stage=np.array([piece.stage for piece in pieces]),
        rank=np.array([of[piece.worker] for piece in pieces]),
        start=np.array([piece.start for piece in pieces]),
        end=np.array([piece.end for piece in pieces]),
        waits=np.array(waits, dtype=np.int64).reshape(-1, 2),
        group=np.array([groups.get((piece.step, piece.group), NO_GROUP) for piece in pieces]),
        communicates=np.array([piece.kind in COMMUNICATION for piece in pieces]),
    )
    return RecordedOperations(
        operations=found, workers=tuple(workers), pieces=pieces, steps=tuple(step for step, _ in steps)
    )


def _place(worker: str) -> tuple[int, list[tuple[int, str]]]:
    role, *rest = worker.replace("/", " ").split(" ")
    return ROLES.index(role), [(int(word) if word.isdecimal() else -1, word) for word in rest]


class _Step:
    def __init__(self, spans: Iterable[Span], width: int, together: Collection[str]):
        self.width, self.together = width, together
        self.spans = sorted(spans, key=lambda span: (span.start, -span.end))
        self.slots = tuple(sorted({self._slot(span) for span in self.spans if span.where.startswith("trainer/")}))
        self.generated: dict[str, Span] = {}
        for span in self.spans:
            if span.kind == "generate":
                for name in span.samples:
                    if name not in self.generated or self.generated[name].end < span.end:
                        self.generated[name] = span
        self.streams: dict[str, _Stream] = defaultdict(_Stream)
        self.scored: dict[str, list[Piece]] = defaultdict(list)  # group -> ends of its scoring calls
        self.groups = 0

    def _slot(self, span: Span) -> int:
        role, _, index = span.where.partition("/")
        return int(index) // self.width if role == "trainer" else int(index)

    def pieces(self) -> list[Piece]:
        calls = self._calls()
        alone = [self._piece(span, _kind(span)) for span in self.spans if span.kind in ("decode", "move", "adv")]
        found = alone + [piece for call in calls for piece in (call.begin, *call.work, call.end) if piece is not None]
        found.sort(key=lambda piece: (piece.start, piece.end))
        woken = _Stream()
        for piece in found:
            piece.waits = self._waits(piece)
            if piece.call is None or piece is piece.call.begin:
                self._woken(piece, woken)
            self._note(piece)
            woken.add(piece)
        return found

    def _calls(self) -> list[Call]:
        work = defaultdict(list)
        for span in self.spans:
            work[span.where.partition("/")[0]].append(span)
        calls, whole = [], dict[int | None, Call]()
        asked = CALLS if any(span.kind == "gen" for span in self.spans) else ("step",)
        for span in self.spans:
            if span.where != DRIVER or span.kind not in asked:
                continue
            slot = span.attributes.get("slot")
            before = whole.get(slot)
            if span.kind.startswith("update_") and before is not None and before.span.end > span.start:
                continue  # models that train in one schedule: the call is the same
            call = Call(span, () if span.kind in (REWARD, "data") else self.slots if slot is None else (slot,))
            if span.kind.startswith("update_"):
                whole[slot] = call
            self._divide(call, work[CALL_WORKERS.get(span.kind, "none/").rstrip("/")])
            calls.append(call)
        return calls

    def _divide(self, call: Call, candidates: Sequence[Span]) -> None:
        span, first = (
            call.span,
            bisect_left(candidates, call.span.start - CLOCK_TOLERANCE_S, key=lambda each: each.start),
        )
        last = bisect_right(candidates, span.end, key=lambda each: each.start)
        call.work = [
            self._piece(each, _kind(each, span), call)
            for each in candidates[first:last]
            if each.end <= span.end + CLOCK_TOLERANCE_S and self._belongs(each, call)
        ]
        self._lock(call)
        start, end = span.start, span.end
        if span.kind == "gen":  # its work is what the engine does for all of its samples
            engine = (each for each in self.spans if each.kind == "decode" and each.where == f"rollout/{call.slots[0]}")
            end = next((each.start for each in engine if each.start >= start), start)
            call.begin = self._own(call, CONTROLLER, start, end)
        elif not call.work:
            kind = span.kind if span.kind in KINDS else CONTROLLER
            call.begin = self._own(call, kind, start, end)
        else:
            kind = "data" if span.kind == "data" else CONTROLLER
            call.begin = self._own(call, kind, start, max(start, min(each.start for each in call.work)))
            call.end = self._own(call, kind, min(end, max(each.end for each in call.work)), end)

    def _belongs(self, span: Span, call: Call) -> bool:
        if call.span.kind == REWARD:
            return span.samples[:1] == () or span.samples[0] in call.span.samples
        if call.span.kind == "data":
            return span.kind == "encode"
        if call.span.kind == "update_weights":
            return span.kind == "update_weights"
        beside = ("switch", "optimizer_wait", "plan", "schedule", "start", "gc", "record")
        return span.kind not in beside and self._slot(span) in call.slots

    def _lock(self, call: Call) -> None:
        """Group ranks that work in lockstep: optimizer steps, rows or heads split over ranks, ZeRO's gathers."""
        members: dict[tuple[object, ...], list[Piece]] = defaultdict(list)
        counted: dict[tuple[str, str], int] = defaultdict(int)
        for piece in call.work:
            number = counted[piece.span.where, piece.kind] = counted[piece.span.where, piece.kind] + 1
            together = piece.kind in self.together
            if piece.kind == "optimizer" or (together and "pipeline" not in piece.span.attributes and piece.rank >= 0):
                members[piece.kind, number].append(piece)
            elif piece.kind == "head" or piece.span.attributes.get("degree", 1) > 1:
                members[piece.kind, number, piece.span.samples].append(piece)
        for each in members.values():
            if len(each) > 1:
                self.groups += 1
                for piece in each:
                    piece.group = self.groups

    def _piece(self, span: Span, kind: str, call: Call | None = None) -> Piece:
        role, _, index = span.where.partition("/")
        worker = f"slot {self._slot(span)}" if role in ("trainer", "rollout") and index else span.where
        rank = int(index) if role == "trainer" and index else -1
        stage = span.attributes.get("stage", 0)
        return Piece(
            kind=kind, worker=worker, start=span.start, end=span.end, span=span, stage=stage, rank=rank, call=call
        )

    def _own(self, call: Call, kind: str, start: float, end: float) -> Piece:
        worker = f"slot {call.slots[0]}" if kind == "switch" else DRIVER
        return Piece(kind=kind, worker=worker, start=start, end=max(start, end), span=call.span, call=call)

    def _waits(self, piece: Piece) -> list[Piece]:
        call = piece.call
        if call is None:
            return self._alone(piece)
        if piece is call.end:
            return list(call.work)
        if piece is not call.begin:
            assert call.begin is not None
            return [call.begin, *self._last(piece, piece.span.where), *self._stage_before(piece)]
        names = [f"slot {slot}" for slot in call.slots] + [f"rollout/{slot}" for slot in call.slots]
        found = self._last(piece, *names, "data")
        kind, samples = piece.span.kind, piece.span.samples
        if kind == REWARD or kind in PASSES:
            found += self._decoded(piece, samples)
        elif samples and kind.startswith("update_"):
            found += self._scores(piece, samples)
        return found

    def _alone(self, piece: Piece) -> list[Piece]:
        if piece.kind == "move":
            return self._last(piece, f"rollout/{piece.span.attributes['source']}")
        if piece.kind == "adv":
            return self._last(piece, "scored")
        where = piece.span.where
        return self._last(piece, where, f"slot {self._slot(piece.span)}", f"to {where}")

    def _last(self, piece: Piece, *streams: str) -> list[Piece]:
        return [last for name in streams if (last := self.streams[name].before(piece.start)) is not None]

    def _stage_before(self, piece: Piece) -> list[Piece]:
        attributes = piece.span.attributes
        if "pipeline" not in attributes or piece.span.kind == "weight_gradients" or piece.call is None:
            return []
        same = ("model", "pipeline", "micro_batch")
        return [
            other
            for other in piece.call.work
            if other.span.kind == piece.span.kind
            and abs(other.stage - piece.stage) == 1
            and all(other.span.attributes.get(name) == attributes[name] for name in same)
            and other.end <= piece.start + CLOCK_TOLERANCE_S
        ]

    def _decoded(self, piece: Piece, samples: Iterable[str]) -> list[Piece]:
        """Return what ended the generation of these samples, one per engine."""
        ends: dict[str, float] = {}
        for name in samples:
            if (span := self.generated.get(name)) is not None:
                ends[span.where] = max(ends.get(span.where, 0.0), span.end)
        found = [self.streams[where].before(min(end, piece.start)) for where, end in ends.items()]
        return [each for each in found if each is not None]

    def _scores(self, piece: Piece, samples: Iterable[str]) -> list[Piece]:
        """Return the calls that scored these samples and their siblings, and their advantages."""
        groups = dict.fromkeys(prompt_id(name) for name in samples)
        ended = {
            id(each): each
            for group in groups
            for each in self.scored[group]
            if each.end <= piece.start + CLOCK_TOLERANCE_S
        }
        found = list(ended.values())
        after = max((each.end for each in found), default=piece.start)
        advantages = self.streams["adv"].after(after)
        return found + (
            [advantages] if advantages is not None and advantages.end <= piece.start + CLOCK_TOLERANCE_S else []
        )

    def _woken(self, piece: Piece, woken: _Stream) -> None:
        """If its own reasons do not explain its start, it waited for what ended last."""
        ready = max((each.end for each in piece.waits), default=-np.inf)
        last = woken.before(piece.start)
        if last is not None and piece.start - ready > MAX_UNEXPLAINED_S and last.end > ready:
            piece.waits.append(last)

    def _note(self, piece: Piece) -> None:
        span, call = piece.span, piece.call
        if call is None:
            names = [span.where] if piece.kind == "decode" or piece.kind == "prefill" else [piece.kind]
            names += [f"to rollout/{span.attributes['target']}"] if piece.kind == "move" else []
        elif piece is call.end or (piece is call.begin and call.end is None):
            names = [f"slot {slot}" for slot in call.slots]
            names += ["data"] if span.kind == "data" else []
            if span.kind == REWARD or span.kind in PASSES:
                names.append("scored")
                for group in dict.fromkeys(map(prompt_id, span.samples)):
                    self.scored[group].append(piece)
        else:
            names = [] if piece is call.begin else [span.where]
        for name in names:
            self.streams[name].add(piece)


class _Stream:
    def __init__(self) -> None:
        self._pieces: list[Piece] = []

    def add(self, piece: Piece) -> None:
        insort(self._pieces, piece, key=lambda each: each.end)

    def before(self, time: float) -> Piece | None:
        place = bisect_right(self._pieces, time + CLOCK_TOLERANCE_S, key=lambda each: each.end)
        return self._pieces[place - 1] if place else None

    def after(self, time: float) -> Piece | None:
        return next((piece for piece in self._pieces if piece.start >= time - CLOCK_TOLERANCE_S), None)


def _kind(span: Span, call: Span | None = None) -> str:
    if span.kind == "decode":
        return "prefill" if span.attributes.get("prefill_tokens", 0) > span.tokens else "decode"
    if call is not None and call.kind in PASSES:
        return call.kind
    return RENAMED.get(span.kind, span.kind)
