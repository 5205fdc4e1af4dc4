"""Find the likely cause of lost time by rule, with evidence and advice (arXiv 2505.05713, section 5).

machine    M_W >= 0.5: the slowest few workers explain it
stages     M_S >= 0.5: the last stage of the pipeline does
tail       half of what balance would save is generation's: the longest responses
lengths    forward and backward durations of the same micro-batches correlate, >= 0.9 (of a job: and M_L >= 0.5)
gc         forwards alone take several times as long now and then, each time on another worker
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlfuse.tools.whatif.run_operations import Piece

MAIN_CAUSE_SHARE = 0.5  # of the time lost, from which on a part counts as its cause
MIN_CORRELATION = 0.9
MIN_PAIRS = 8  # micro-batches that tell a correlation
SLOW_RATE = 1.1  # a worker below so many times its expected time is like the others
MIN_VARIATION = 0.1  # standard deviation over mean of their durations, below which there is nothing to correlate
SPIKE_FACTOR = 3.0  # an operation that took so many times what its like take stood still meanwhile
MIN_SPIKES = 4


@dataclass(frozen=True, slots=True)
class Cause:
    """What it is, by which evidence, and what usually helps."""

    name: str
    """`machine`, `stages`, `tail`, `lengths`, `gc` or `undetermined`; of a training job neither `tail` nor `gc`."""
    evidence: str
    advice: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """What rules look at beside the shares."""

    pieces: Sequence[Piece]
    recorded: np.ndarray
    typical: np.ndarray
    balanced: np.ndarray
    slowest: Sequence[str]
    share: Callable[[np.ndarray, np.ndarray], float]  # of the lost time that a part's ideal durations save


def likely_cause(found: Mapping[str, Any], seen: Evidence) -> Cause:
    """The first rule that holds. `found`: the fields of a run's slowdown so far."""
    for rule in (_machine, _collection, _stages, _tail, _lengths):
        if (cause := rule(found, seen)) is not None:
            return cause
    return Cause(
        "undetermined",
        f"S = {found['S']:.2f}, and neither one worker, the last stage, the longest responses nor pauses explain half",
        "look at the kinds of work above and at the ideal timeline beside the real one (--timeline)",
    )


def _machine(found: Mapping[str, Any], seen: Evidence) -> Cause | None:
    share = found.get("M_W")
    rates = [found["rates"][worker] for worker in seen.slowest]
    if share is None or share < MAIN_CAUSE_SHARE or found["S_machine"] < found["S_skew"] or max(rates) < SLOW_RATE:
        return None
    slow = ", ".join(f"{worker} ({found['rates'][worker]:.2f} times its expected time)" for worker in seen.slowest)
    return Cause(
        "machine",
        f"{percent(share)} of the time lost to machines goes if {slow} worked like the others",
        "see what else runs there and how hot it is: rlfuse slots drain N takes the slot out of the run",
    )


def _collection(found: Mapping[str, Any], seen: Evidence) -> Cause | None:
    spikes = {kind: _spikes(seen, kind) for kind in ("forward", "backward")}
    forward, workers = spikes["forward"], Counter(seen.pieces[number].worker for number in spikes["forward"])
    alone = len(forward) >= MIN_SPIKES and len(spikes["backward"]) * MIN_SPIKES <= len(forward)
    if not alone or (found["steps"] > 1 and max(workers.values()) > MAIN_CAUSE_SHARE * len(forward) + 1):
        return None
    part = np.zeros(len(seen.pieces), bool)
    part[forward] = True
    if (share := seen.share(part, seen.typical)) < MAIN_CAUSE_SHARE:
        return None
    return Cause(
        "gc",
        f"{len(forward)} forwards on {len(workers)} workers took over {SPIKE_FACTOR:g} times as long as their like, and "
        f"{len(spikes['backward'])} backwards; without them {percent(share)} of the time lost to machines goes",
        "collect garbage on all workers at once: trainer.gc_freq",
    )


def _spikes(seen: Evidence, kind: str) -> list[int]:
    return [
        piece.number
        for piece in seen.pieces
        if piece.kind == kind and seen.recorded[piece.number] > SPIKE_FACTOR * seen.typical[piece.number]
    ]


def _stages(found: Mapping[str, Any], _: Evidence | None) -> Cause | None:
    share = found.get("M_S")
    if share is None or share < MAIN_CAUSE_SHARE:
        return None
    return Cause(
        "stages",
        f"{percent(share)} of the time lost is saved if the last stage has no more to do than the others",
        "give the last stage fewer layers: it also computes the head and the loss",
    )


def _tail(found: Mapping[str, Any], seen: Evidence) -> Cause | None:
    decoding = np.array([piece.kind in ("decode", "prefill") for piece in seen.pieces])
    share = seen.share(decoding, seen.balanced)
    if found["S_skew"] < found["S_machine"] or share < MAIN_CAUSE_SHARE:
        return None
    return Cause(
        "tail",
        f"{percent(share)} of the time lost goes if all engines generated for as long: the longest responses keep few "
        "slots busy while the others wait",
        "fusion=adaptive gives freed slots other work; a lower data.max_response_length cuts the tail",
    )


def _lengths(found: Mapping[str, Any], seen: Evidence) -> Cause | None:
    pairs = _pairs(seen)
    found_correlation = correlation(*pairs)
    if found_correlation is None or found_correlation < MIN_CORRELATION:
        return None
    return Cause(
        "lengths",
        f"{_correlated(found_correlation, len(pairs[0]))}: rows differ in length",
        "even out micro-batches by tokens: a larger actor.ppo_max_token_len_per_gpu packs more rows into each",
    )


def _correlated(value: float, pairs: int) -> str:
    return f"forward and backward durations of the same micro-batches correlate at {value:.2f} ({pairs} micro-batches)"


def correlation(of: np.ndarray, forward: np.ndarray, backward: np.ndarray) -> float | None:
    """Return the correlation of forward and backward seconds [P] of the same micro-batches, each relative to the mean
    of its `of` (a worker's part of the model); None for too few pairs or durations that hardly vary."""
    if len(of) < MIN_PAIRS:
        return None
    _, of, counts = np.unique(of, return_inverse=True, return_counts=True, axis=0)
    one, other = (each / (np.bincount(of, each) / counts)[of] for each in (forward, backward))
    return float(np.corrcoef(one, other)[0, 1]) if min(one.std(), other.std()) >= MIN_VARIATION else None


def _pairs(seen: Evidence) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    found: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    for piece in seen.pieces:
        if piece.kind in ("forward", "backward") and piece.span.kind == piece.kind:
            model = piece.span.attributes.get("model", "")
            key = piece.step, id(piece.call), piece.worker, model, piece.stage, piece.span.samples
            found[key][piece.kind] = float(seen.recorded[piece.number])
    parts: dict[tuple[Any, ...], int] = {}
    pairs = [
        (parts.setdefault((worker, model, stage), len(parts)), both["forward"], both["backward"])
        for (_, _, worker, model, stage, _), both in found.items()
        if len(both) > 1
    ]
    of, forward, backward = np.array(pairs).reshape(-1, 3).T
    return of.astype(int), forward, backward


def likely_job_cause(found: Mapping[str, Any], pairs: int) -> Cause:
    """Return the cause of a training job's slowdown. `found`: the fields of its `Slowdown` so far."""
    if found["M_W"] >= MAIN_CAUSE_SHARE:
        return Cause(
            "machine",
            f"{percent(found['M_W'])} of the time lost is saved if the slowest few workers work like the others",
            "look at the slowest workers: what else runs there, how hot they are",
        )
    related, share = found["correlation"], found["M_L"]
    if related is not None and related >= MIN_CORRELATION and share >= MAIN_CAUSE_SHARE:
        return Cause(
            "lengths",
            f"{_correlated(related, pairs)}, and {percent(share)} of the time lost is saved if all micro-batches are "
            "alike: sequences differ in length",
            "balance micro-batches over data ranks by what their sequence lengths cost, not by their number of tokens",
        )
    return _stages(found, None) or Cause(
        "undetermined",
        f"S = {found['S']:.2f}, and neither a few workers, sequence lengths nor the last stage explain half of it",
        "look at the kinds of work above and at the ideal timeline next to the recorded one (--timeline)",
    )


def percent(share: float) -> str:
    """For a person; a share of almost nothing has no sign."""
    return f"{round(100 * share)} %"
