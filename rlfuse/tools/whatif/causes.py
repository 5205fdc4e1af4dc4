"""Find the likely cause of lost time by rule, with evidence and advice (arXiv 2505.05713, section 5).

machine    M_W >= 0.5: the slowest few workers explain it
stages     M_S >= 0.5: the last pipeline stage explains it
tail       balanced generation alone would save half of the lost time: the longest responses
lengths    forward and backward durations of the same micro-batches correlate, >= 0.9 (of a job: and M_L >= 0.5)
gc         single forward passes are several times slower, on changing workers
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlfuse.tools.whatif.run_operations import Piece

MAIN_CAUSE_SHARE = 0.5  # share of the lost time from which a part counts as its cause
MIN_CORRELATION = 0.9
MIN_PAIRS = 8  # minimum micro-batches for a correlation
SLOW_RATE = 1.1  # time over expected time from which a worker counts as slow
MIN_VARIATION = 0.1  # minimum standard deviation over mean for a correlation
SPIKE_FACTOR = 3.0  # time over typical time from which an operation counts as paused
MIN_SPIKES = 4


@dataclass(frozen=True, slots=True)
class Cause:
    """Likely cause of lost time, with evidence and advice."""

    name: str
    """`machine`, `stages`, `tail`, `lengths`, `gc` or `undetermined`; of a training job neither `tail` nor `gc`."""
    evidence: str
    advice: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """Recorded data that the rules use in addition to the shares."""

    pieces: Sequence[Piece]
    recorded: np.ndarray
    typical: np.ndarray
    balanced: np.ndarray
    slowest: Sequence[str]
    share: Callable[[np.ndarray, np.ndarray], float]  # share of the lost time saved by ideal durations of a part


def likely_cause(found: Mapping[str, Any], context: Evidence) -> Cause:
    """Return the cause of the first rule that applies. `found`: the fields of a run's slowdown so far."""
    for rule in (_machine, _collection, _stages, _tail, _lengths):
        if (cause := rule(found, context)) is not None:
            return cause
    return Cause(
        "undetermined",
        f"S = {found['S']:.2f}, and no worker, last stage, long responses or pauses explain half of it",
        "see the kinds of work above, and compare the ideal with the recorded timeline (--timeline)",
    )


def _machine(found: Mapping[str, Any], context: Evidence) -> Cause | None:
    share = found.get("M_W")
    rates = [found["rates"][worker] for worker in context.slowest]
    if share is None or share < MAIN_CAUSE_SHARE or found["S_machine"] < found["S_skew"] or max(rates) < SLOW_RATE:
        return None
    slow = ", ".join(f"{worker} ({found['rates'][worker]:.2f}x its expected time)" for worker in context.slowest)
    return Cause(
        "machine",
        f"{percent(share)} of the time lost to machines would be saved if {slow} were like the others",
        "check for other processes and thermal throttling; rlfuse slots drain N removes the slot from the run",
    )


def _collection(found: Mapping[str, Any], context: Evidence) -> Cause | None:
    spikes = {kind: _spikes(context, kind) for kind in ("forward", "backward")}
    forward, workers = spikes["forward"], Counter(context.pieces[number].worker for number in spikes["forward"])
    alone = len(forward) >= MIN_SPIKES and len(spikes["backward"]) * MIN_SPIKES <= len(forward)
    if not alone or (found["steps"] > 1 and max(workers.values()) > MAIN_CAUSE_SHARE * len(forward) + 1):
        return None
    part = np.zeros(len(context.pieces), bool)
    part[forward] = True
    if (share := context.share(part, context.typical)) < MAIN_CAUSE_SHARE:
        return None
    return Cause(
        "gc",
        f"{len(forward)} forwards on {len(workers)} workers took over {SPIKE_FACTOR:g}x the typical time, and "
        f"{len(spikes['backward'])} backwards; they explain {percent(share)} of the time lost to machines",
        "run garbage collection on all workers at the same time: set trainer.gc_freq",
    )


def _spikes(context: Evidence, kind: str) -> list[int]:
    return [
        piece.number
        for piece in context.pieces
        if piece.kind == kind and context.recorded[piece.number] > SPIKE_FACTOR * context.typical[piece.number]
    ]


def _stages(found: Mapping[str, Any], _: Evidence | None) -> Cause | None:
    share = found.get("M_S")
    if share is None or share < MAIN_CAUSE_SHARE:
        return None
    return Cause(
        "stages",
        f"{percent(share)} of the lost time would be saved if the last stage had no more work than the others",
        "give the last stage fewer layers, since it also computes the LM head and the loss",
    )


def _tail(found: Mapping[str, Any], context: Evidence) -> Cause | None:
    decoding = np.array([piece.kind in ("decode", "prefill") for piece in context.pieces])
    share = context.share(decoding, context.balanced)
    if found["S_skew"] < found["S_machine"] or share < MAIN_CAUSE_SHARE:
        return None
    return Cause(
        "tail",
        f"{percent(share)} of the lost time would be saved if all engines generated equally long; the longest "
        "responses keep a few slots busy while the others wait",
        "fusion=adaptive gives idle slots other work; a lower data.max_response_length shortens the tail",
    )


def _lengths(found: Mapping[str, Any], context: Evidence) -> Cause | None:
    pairs = _pairs(context)
    found_correlation = correlation(*pairs)
    if found_correlation is None or found_correlation < MIN_CORRELATION:
        return None
    return Cause(
        "lengths",
        f"{_correlated(found_correlation, len(pairs[0]))}: rows differ in length",
        "balance micro-batches by tokens: a larger actor.ppo_max_token_len_per_gpu packs more rows into each",
    )


def _correlated(value: float, pairs: int) -> str:
    return f"forward and backward durations of the same micro-batches correlate at {value:.2f} ({pairs} micro-batches)"


def correlation(of: np.ndarray, forward: np.ndarray, backward: np.ndarray) -> float | None:
    """Return the correlation of forward and backward seconds [P] of the same micro-batches, each relative to the mean
    of its group `of` (a worker's part of the model); None for too few pairs or nearly constant durations."""
    if len(of) < MIN_PAIRS:
        return None
    _, of, counts = np.unique(of, return_inverse=True, return_counts=True, axis=0)
    one, other = (each / (np.bincount(of, each) / counts)[of] for each in (forward, backward))
    return float(np.corrcoef(one, other)[0, 1]) if min(one.std(), other.std()) >= MIN_VARIATION else None


def _pairs(context: Evidence) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    found: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    for piece in context.pieces:
        if piece.kind in ("forward", "backward") and piece.span.kind == piece.kind:
            model = piece.span.attributes.get("model", "")
            key = piece.step, id(piece.call), piece.worker, model, piece.stage, piece.span.samples
            found[key][piece.kind] = float(context.recorded[piece.number])
    parts: dict[tuple[Any, ...], int] = {}
    pairs = [
        (parts.setdefault((worker, model, stage), len(parts)), both["forward"], both["backward"])
        for (_, _, worker, model, stage, _), both in found.items()
        if len(both) > 1
    ]
    of, forward, backward = np.array(pairs).reshape(-1, 3).T
    return of.astype(int), forward, backward


def likely_job_cause(found: Mapping[str, Any], pairs: int) -> Cause:
    """Return the likely cause of a training job's slowdown. `found`: the fields of its `Slowdown` so far."""
    if found["M_W"] >= MAIN_CAUSE_SHARE:
        return Cause(
            "machine",
            f"{percent(found['M_W'])} of the lost time would be saved if the slowest few workers were like the others",
            "check the slowest workers for other processes and thermal throttling",
        )
    related, share = found["correlation"], found["M_L"]
    if related is not None and related >= MIN_CORRELATION and share >= MAIN_CAUSE_SHARE:
        return Cause(
            "lengths",
            f"{_correlated(related, pairs)}, and {percent(share)} of the lost time would be saved with equal "
            "micro-batches: sequences differ in length",
            "balance micro-batches over data ranks by the cost of their sequence lengths, not by token counts",
        )
    return _stages(found, None) or Cause(
        "undetermined",
        f"S = {found['S']:.2f}, and neither few workers, sequence lengths nor the last stage explain half of it",
        "see the kinds of work above, and compare the ideal with the recorded timeline (--timeline)",
    )


def percent(share: float) -> str:
    """Format a share as a percentage; shares that round to 0 have no sign."""
    return f"{round(100 * share)} %"
