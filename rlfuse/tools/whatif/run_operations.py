"""Turn the steps of a run folder into operations with dependencies.

    data --> gen --> decode, decode, ... --> reward, passes --> adv --> forward, backward --> optimizer --> weights

Each call of the driver becomes three operations: sending (`controller`), work on the ranks, returning. An operation
depends only on operations that had ended when it started; unexplained waiting is attributed to the controller.
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
INTERRUPTED = ("lost", "restart", "restart_engine")  # kinds of spans that mark interrupted steps, which are skipped
CALL_WORKERS = {
    **dict.fromkeys(PASSES, "trainer/"),
    **dict.fromkeys(("update_actor", "update_critic"), "trainer/"),
    **{"update_weights": "rollout/", REWARD: "reward/", "data": "encoder/", "step": "trainer/"},
}
"""Driver call -> prefix of the workers that execute it."""
CALLS = (*PASSES, "update_actor", "update_critic", "update_weights", REWARD, "data", "gen", "switch")
"""Driver calls of jobs that generate; in other jobs a step is one call."""
RENAMED = {"weight_gradients": "backward"}
MAX_UNEXPLAINED_S = 2e-3  # a start this soon after the dependencies needs no explanation
CLOCK_TOLERANCE_S = 1e-4  # tolerance of consecutive clock reads on one host


@dataclass(eq=False, repr=False, slots=True, kw_only=True)
class Piece:
    """An operation before conversion to arrays."""

    kind: str
    worker: str
    start: float
    end: float
    span: Span
    stage: int = 0
    rank: int = -1  # trainer rank; -1: none
    call: Call | None = None
    step: int = 0
    number: int = -1
    group: int = NO_GROUP
    waits: list[Piece] = field(default_factory=list)


@dataclass(eq=False, repr=False, slots=True)
class Call:
    """A driver call: sending, work, returning."""

    span: Span
    slots: tuple[int, ...] = ()  # slots that it occupies
    begin: Piece | None = None
    work: list[Piece] = field(default_factory=list)
    end: Piece | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOperations:
    """Operations of a run, with the data they were built from."""

    operations: Operations  # `rank`: index of the worker, `stage`: pipeline stage
    workers: tuple[str, ...]  # `slot 0`, `reward/0`, `encoder/0`, `driver`
    pieces: list[Piece]  # one for each operation
    steps: tuple[Span, ...]  # driver spans of the steps


def recorded_steps(run: RunFolder, at_most: int) -> list[tuple[Span, list[Span]]]:
    """Return the last uninterrupted steps of a run, with their spans. Raises RunError if there is none."""
    steps = sorted(run.steps().values(), key=lambda step: step.start)[-2 * at_most :]
    starts, inside = [step.start - CLOCK_TOLERANCE_S for step in steps], [list[Span]() for _ in steps]
    interesting = re.compile(rf'"step":(?:{"|".join(str(step.step) for step in steps) or "none"}),').search
    for span in run.spans(lambda line: interesting(line) is not None, [step.step for step in steps]):
        place = bisect_right(starts, span.start) - 1
        if place >= 0 and span.end <= steps[place].end + CLOCK_TOLERANCE_S:
            inside[place].append(span)
    kinds = [{span.kind for span in spans} for spans in inside]
    is_complete = ["optimizer" in each and not each & set(INTERRUPTED) for each in kinds]
    complete = [each for each, kept in zip(zip(steps, inside, strict=True), is_complete, strict=True) if kept]
    if not complete:
        raise RunError(f"{run.path / 'events.jsonl'}: no complete, uninterrupted step; let the run finish one")
    return complete[-at_most:]


def operations(
    steps: Sequence[tuple[Span, Sequence[Span]]], width: int = 1, lockstep: Collection[str] = ()
) -> RecordedOperations:
    """Return the operations of these steps with their dependencies. `width`: trainer ranks per slot; `lockstep`: kinds
    of passes whose n-th all ranks compute at the same time."""
    pieces: list[Piece] = []
    for number, (_, spans) in enumerate(steps):
        for piece in _Step(spans, width, lockstep).pieces():
            piece.step, piece.number = number, len(pieces)
            pieces.append(piece)
    workers = sorted({piece.worker for piece in pieces}, key=_worker_order)
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
    )
    return RecordedOperations(
        operations=found, workers=tuple(workers), pieces=pieces, steps=tuple(step for step, _ in steps)
    )


def _worker_order(worker: str) -> tuple[int, list[tuple[int, str]]]:
    role, *rest = worker.replace("/", " ").split(" ")
    return ROLES.index(role), [(int(word) if word.isdecimal() else -1, word) for word in rest]


class _Step:
    def __init__(self, spans: Iterable[Span], width: int, lockstep: Collection[str]):
        self.width, self.lockstep = width, lockstep
        self.spans = sorted(spans, key=lambda span: (span.start, -span.end))
        self.slots = tuple(sorted({self._slot(span) for span in self.spans if span.where.startswith("trainer/")}))
        self.generated: dict[str, Span] = {}
        for span in self.spans:
            if span.kind == "generate":
                for name in span.samples:
                    if name not in self.generated or self.generated[name].end < span.end:
                        self.generated[name] = span
        self.streams: dict[str, _Stream] = defaultdict(_Stream)
        self.scored: dict[str, list[Piece]] = defaultdict(list)  # prompt -> final operations of its scoring calls
        self.groups = 0

    def _slot(self, span: Span) -> int:
        role, _, index = span.where.partition("/")
        return int(index) // self.width if role == "trainer" else int(index)

    def pieces(self) -> list[Piece]:
        calls = self._calls()
        alone = [self._piece(span, _kind(span)) for span in self.spans if span.kind in ("decode", "move", "adv")]
        found = alone + [piece for call in calls for piece in (call.begin, *call.work, call.end) if piece is not None]
        found.sort(key=lambda piece: (piece.start, piece.end))
        all_pieces = _Stream()
        for piece in found:
            piece.waits = self._waits(piece)
            if piece.call is None or piece is piece.call.begin:
                self._add_unexplained_wait(piece, all_pieces)
            self._register(piece)
            all_pieces.add(piece)
        return found

    def _calls(self) -> list[Call]:
        work = defaultdict(list)
        for span in self.spans:
            work[span.where.partition("/")[0]].append(span)
        calls, update_calls = [], dict[int | None, Call]()
        call_kinds = CALLS if any(span.kind == "gen" for span in self.spans) else ("step",)
        for span in self.spans:
            if span.where != DRIVER or span.kind not in call_kinds:
                continue
            slot = span.attributes.get("slot")
            before = update_calls.get(slot)
            if span.kind.startswith("update_") and before is not None and before.span.end > span.start:
                continue  # models trained in one fused schedule share a call
            call = Call(span, () if span.kind in (REWARD, "data") else self.slots if slot is None else (slot,))
            if span.kind.startswith("update_"):
                update_calls[slot] = call
            self._split_call(call, work[CALL_WORKERS.get(span.kind, "none/").rstrip("/")])
            calls.append(call)
        return calls

    def _split_call(self, call: Call, candidates: Sequence[Span]) -> None:
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
        self._group_lockstep(call)
        start, end = span.start, span.end
        if span.kind == "gen":  # its work is in the `decode` spans of the engine
            engine = (each for each in self.spans if each.kind == "decode" and each.where == f"rollout/{call.slots[0]}")
            end = next((each.start for each in engine if each.start >= start), start)
            call.begin = self._driver_piece(call, CONTROLLER, start, end)
        elif not call.work:
            kind = span.kind if span.kind in KINDS else CONTROLLER
            call.begin = self._driver_piece(call, kind, start, end)
        else:
            kind = "data" if span.kind == "data" else CONTROLLER
            call.begin = self._driver_piece(call, kind, start, max(start, min(each.start for each in call.work)))
            call.end = self._driver_piece(call, kind, min(end, max(each.end for each in call.work)), end)

    def _belongs(self, span: Span, call: Call) -> bool:
        if call.span.kind == REWARD:
            return span.samples[:1] == () or span.samples[0] in call.span.samples
        if call.span.kind == "data":
            return span.kind == "encode"
        if call.span.kind == "update_weights":
            return span.kind == "update_weights"
        overlapping = ("switch", "optimizer_wait", "plan", "schedule", "start", "gc", "record")
        return span.kind not in overlapping and self._slot(span) in call.slots

    def _group_lockstep(self, call: Call) -> None:
        """Group operations in lockstep: optimizer steps, rows or heads split over ranks, ZeRO gathers."""
        members: dict[tuple[object, ...], list[Piece]] = defaultdict(list)
        counted: dict[tuple[str, str], int] = defaultdict(int)
        for piece in call.work:
            number = counted[piece.span.where, piece.kind] = counted[piece.span.where, piece.kind] + 1
            in_lockstep = piece.kind in self.lockstep
            if piece.kind == "optimizer" or (
                in_lockstep and "pipeline" not in piece.span.attributes and piece.rank >= 0
            ):
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

    def _driver_piece(self, call: Call, kind: str, start: float, end: float) -> Piece:
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
            return [call.begin, *self._latest(piece, piece.span.where), *self._stage_before(piece)]
        names = [f"slot {slot}" for slot in call.slots] + [f"rollout/{slot}" for slot in call.slots]
        found = self._latest(piece, *names, "data")
        kind, samples = piece.span.kind, piece.span.samples
        if kind == REWARD or kind in PASSES:
            found += self._decoded(piece, samples)
        elif samples and kind.startswith("update_"):
            found += self._scores(piece, samples)
        return found

    def _alone(self, piece: Piece) -> list[Piece]:
        if piece.kind == "move":
            return self._latest(piece, f"rollout/{piece.span.attributes['source']}")
        if piece.kind == "adv":
            return self._latest(piece, "scored")
        where = piece.span.where
        return self._latest(piece, where, f"slot {self._slot(piece.span)}", f"to {where}")

    def _latest(self, piece: Piece, *streams: str) -> list[Piece]:
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
        """Return the last decode operations of these samples, one per engine."""
        ends: dict[str, float] = {}
        for name in samples:
            if (span := self.generated.get(name)) is not None:
                ends[span.where] = max(ends.get(span.where, 0.0), span.end)
        found = [self.streams[where].before(min(end, piece.start)) for where, end in ends.items()]
        return [each for each in found if each is not None]

    def _scores(self, piece: Piece, samples: Iterable[str]) -> list[Piece]:
        """Return the scoring calls of the prompts of these samples, and their advantages."""
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

    def _add_unexplained_wait(self, piece: Piece, all_pieces: _Stream) -> None:
        """Add the operation that ended last as a dependency, if the others do not explain the start."""
        ready = max((each.end for each in piece.waits), default=-np.inf)
        last = all_pieces.before(piece.start)
        if last is not None and piece.start - ready > MAX_UNEXPLAINED_S and last.end > ready:
            piece.waits.append(last)

    def _register(self, piece: Piece) -> None:
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
