"""Fit a device's `Hardware` to measured work, and measure the error on held-out work.

The fit is non-negative least squares on the amounts of `features`. The roofline of decoding (reading weights or
computing) and the contention between devices of a node are found by search. Held out are whole runs, or a fifth of a
run's steps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from rlfuse.costs.fit import MIN_SPANS, fit_robust
from rlfuse.tools.planning.features import Work, predicted_seconds
from rlfuse.tools.planning.hardware import KINDS, CalibrationError, Errors, Hardware

UNMEASURED_RATE = 1e18  # used for rates too high to measure
ROOFLINE_RATIOS = tuple(2.0**power for power in range(13))
"""Candidate FLOP per byte read at which decoding becomes compute-bound."""
MAX_CROWDING, CROWDING_ROUNDS = 1.0, 6  # search range of `Hardware.crowding`, and how often it is halved
FOLDS = 5
CROSS_DEVICE_ERROR = 0.1085  # error of CDMPP's forecasts on unseen devices (arXiv 2311.09690)

Fields = dict[str, float | bool]


def fit_hardware(works: Sequence[Work]) -> Hardware:
    """Return the hardware fitted to `works`. Raises CalibrationError for too little decoding or training work."""
    counts = {kind: sum(work.kind == kind for work in works) for kind in ("generating", "training")}
    if missing := [f"{kind} ({count})" for kind, count in counts.items() if count < MIN_SPANS]:
        raise CalibrationError(
            f"too few measurements after the first step: {', '.join(missing)}; at least {MIN_SPANS} of each kind are "
            "needed, use a run with more steps"
        )
    crowding = _crowding(works) if len({work.busy_peers for work in works}) > 1 else 0.0
    return _fitted(works, crowding)


def _crowding(works: Sequence[Work]) -> float:
    @functools.cache
    def off(crowding: float) -> float:
        return sum(total.error**2 for total in totals(works, _fitted(works, crowding)))

    low, high = 0.0, MAX_CROWDING
    for _ in range(CROWDING_ROUNDS):
        best = min(np.linspace(low, high, 5).tolist(), key=off)
        low, high = max(0.0, best - (high - low) / 4), min(MAX_CROWDING, best + (high - low) / 4)
    return best


def _fitted(works: Sequence[Work], crowding: float) -> Hardware:
    alone = [_alone(work, 1 + crowding * work.busy_peers) for work in works]
    of = {kind: [work for work in alone if work.kind == kind] for kind in KINDS}
    models = {round(work.read / work.steps) for work in of["generating"]}
    passes = [work for work in (*of["scoring"], *of["training"]) if not work.optimizer_steps]
    known = _fit_copying([work for work in alone if work.kind == "copying"])
    known |= _fit_optimizer([work for work in of["training"] if work.optimizer_steps], known)
    known |= _fit_passes(passes, len(models) > 1, known)
    known |= _fit_decoding(of["generating"], known["pass_flops"])
    hardware = Hardware(**known, crowding=crowding)
    left = [work.seconds - predicted_seconds(work, hardware) for work in works if work.kind == "step"]
    return replace(hardware, step_s=max(0.0, float(np.median(left))) if left else 0.0)


def _alone(work: Work, longer: float) -> Work:
    """Return the work without contention; communication stays as measured."""
    return replace(work, seconds=work.seconds / longer, sent=work.sent / longer, gathers=work.gathers / longer)


def _fit_passes(works: Sequence[Work], widths: bool, known: Fields) -> Fields:
    """Fit scoring and training jointly, since launching a layer costs the same in both. With models of one width, all
    time per token counts as compute; communication and copies use the rates of optimizer steps (`known`)."""
    weights = _weights(works)
    rows = []
    for work in works:
        scores = work.kind == "scoring"
        rows.append([scores * work.calls, (not scores) * work.calls, work.layers])
        rows[-1] += [widths * work.hidden, scores * work.flops, (not scores) * work.flops, work.gathers]
    update_rate, sending = (known.get(name, UNMEASURED_RATE) for name in ("update_bytes_per_s", "sent_bytes_per_s"))
    copy_rate = known.get("copied_bytes_per_s", update_rate)
    other_s = [work.moved / update_rate + work.copied / copy_rate + work.sent / sending for work in works]
    seconds = np.maximum(_seconds(works) - other_s, 0.0)
    columns = np.array(rows, float)[:, : None if any(work.gathers for work in works) else -1]
    factors, _ = fit_robust(columns * weights[:, None], seconds * weights)
    pass_call, train_call, layer, hidden, passed, trained = map(float, factors[:6])
    train_flops = _rate(trained)
    pass_flops = _rate(passed) if any(work.kind == "scoring" for work in works) else train_flops
    return {
        "pass_call_s": pass_call,
        "train_call_s": train_call,
        "layer_s": layer,
        "gather_s": float(sum(factors[6:])),
        "hidden_bytes_per_s": _rate(hidden),
        "pass_flops": pass_flops,
        "train_flops": train_flops,
    }


def _fit_copying(works: Sequence[Work]) -> Fields:
    """Fit the copy rate from pure copies; optimizer steps cannot separate copies from in-place updates."""
    copied = sum(work.copied for work in works)
    return {"copied_bytes_per_s": _rate(sum(work.seconds for work in works) / copied)} if works else {}


def _fit_optimizer(works: Sequence[Work], known: Fields) -> Fields:
    """Fit the update rate and, if the steps differ enough, the communication rate and a fixed time per step."""
    if not works:
        return {}
    moved, copied, sent = np.array([[work.moved, work.copied, work.sent] for work in works], float).T
    seconds, copy_rate = _seconds(works), known.get("copied_bytes_per_s")
    if copy_rate:
        seconds = np.maximum(seconds - copied / copy_rate, 0.0)
    amounts = np.stack([moved if copy_rate else moved + copied, sent, np.ones_like(sent)], axis=1)
    columns_used = [0]
    for column in (1, 2):
        if np.linalg.matrix_rank(_unit(amounts[:, [*columns_used, column]])) > len(columns_used):
            columns_used.append(column)
    weights = _weights(works)
    factors, _ = fit_robust(amounts[:, columns_used] * weights[:, None], seconds * weights)
    of = dict(zip(columns_used, map(float, factors), strict=True))
    sending = {"sent_bytes_per_s": _rate(of[1])} if of.get(1) else {}
    return sending | {"update_bytes_per_s": _rate(of[0]), "optimizer_s": of.get(2, 0.0)}


def _unit(columns: np.ndarray) -> np.ndarray:
    return columns / np.maximum(columns.max(axis=0), 1e-300)


def _fit_decoding(works: Sequence[Work], pass_flops: float) -> Fields:
    weights = _weights(works)
    steps, batch, attended, read, computed, cached, prefill = np.array(
        [[w.steps, w.batch, w.attended, w.read, w.computed, w.moved, w.flops] for w in works], float
    ).T
    seconds = np.maximum(_seconds(works) - prefill / pass_flops, 0.0)
    own = np.stack([steps, steps * batch, attended], axis=1)
    if np.linalg.matrix_rank(_unit(own)) < own.shape[1]:  # models of one depth
        own = own[:, :2]
    fits = []
    for overlaps, ratio in product((True, False), ROOFLINE_RATIOS):
        roof = (np.maximum(read, computed / ratio) if overlaps else read + computed / ratio) + cached
        factors, loss = fit_robust(np.column_stack([roof, own]) * weights[:, None], seconds * weights)
        fits.append((loss, not overlaps, -ratio, factors))
    _, not_overlapped, ratio, (byte, step, sequence, *attention) = min(fits, key=lambda each: each[:3])
    bytes_per_s = _rate(float(byte))
    # A lower value than observed would slow down work that was not compute-bound.
    observed_flops = bytes_per_s * (-ratio if not_overlapped else min(-ratio, float((computed / read).max())))
    return {
        "decode_step_s": float(step),
        "decode_sequence_s": float(sequence),
        "decode_attention_s": float(sum(attention)),
        "decode_overlaps": not not_overlapped,
        "bytes_per_s": bytes_per_s,
        "decode_flops": min(max(observed_flops, min(-ratio * bytes_per_s, pass_flops)), UNMEASURED_RATE),
    }


def _weights(works: Sequence[Work]) -> np.ndarray:
    total: dict[tuple[str, int, str], list[float]] = {}
    for work in works:
        total.setdefault((work.source, work.part, work.kind), []).append(work.seconds)
    return np.array([1 / np.mean(total[work.source, work.part, work.kind]) for work in works])


def _seconds(works: Iterable[Work]) -> np.ndarray:
    return np.array([work.seconds for work in works], float)


def _rate(factor: float) -> float:
    return min(1 / factor, UNMEASURED_RATE) if factor > 0 else UNMEASURED_RATE


@dataclass(frozen=True, slots=True)
class Total:
    """Measured and predicted seconds of one kind of work in a held-out step."""

    kind: str
    source: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return abs(self.predicted - self.measured) / self.measured


def held_out(works: Sequence[Work]) -> tuple[list[Total], str]:
    """Return the totals of all steps, each predicted by a fit to the other folds, and a description of the folds."""
    sources = list(dict.fromkeys(work.source for work in works))
    parts = list(dict.fromkeys((work.source, work.part) for work in works))
    if len(sources) > 1:
        places = {part: sources.index(part[0]) for part in parts}
        words = f"each of {len(sources)} runs predicted from the others"
    else:
        if len(parts) < 2:
            raise CalibrationError(
                "only one step after the first, none can be held out; use a run with three or more steps"
            )
        places = {part: place % FOLDS for place, part in enumerate(parts)}
        words = f"each of {min(FOLDS, len(parts))} folds of the steps predicted from the others"
    found = []
    for fold in sorted(set(places.values())):
        inside = [work for work in works if places[work.source, work.part] != fold]
        outside = [work for work in works if places[work.source, work.part] == fold]
        found += totals(outside, fit_hardware(inside))
    return found, words


def totals(works: Iterable[Work], hardware: Hardware) -> list[Total]:
    """Return the total of each kind of work in each step."""
    sums: dict[tuple[str, str, int], np.ndarray] = {}
    for work in works:
        if work.kind in KINDS:
            both = np.array([work.seconds, predicted_seconds(work, hardware)])
            sums[work.kind, work.source, work.part] = sums.get((work.kind, work.source, work.part), 0.0) + both
    return [Total(kind, source, *map(float, both)) for (kind, source, _), both in sums.items()]


def mean_errors(found: Sequence[Total]) -> Errors:
    """Return the mean relative error of each kind of work."""
    each = {kind: [total.error for total in found if total.kind == kind] for kind in KINDS}
    return Errors(**{kind: float(np.mean(shares)) for kind, shares in each.items() if shares})


def scaled(hardware: Hardware, flops_ratio: float, bandwidth_ratio: float) -> Hardware:
    """Return the hardware of another device, with FLOP/s and bandwidths scaled by these ratios. Host times are kept,
    link rates are dropped. CROSS_DEVICE_ERROR is added to the errors in quadrature."""
    for name, ratio in (("flops_ratio", flops_ratio), ("bandwidth_ratio", bandwidth_ratio)):
        if not (ratio > 0 and math.isfinite(ratio)):
            raise CalibrationError(
                f"{name}={ratio:g}: needs a number above 0: the ratio of the measured speeds of both devices"
            )
    faster = {name: getattr(hardware, name) * flops_ratio for name in ("pass_flops", "train_flops", "decode_flops")}
    errors = {kind: math.hypot(error, CROSS_DEVICE_ERROR) for kind, error in hardware.errors.items()}
    copies = ("bytes_per_s", "hidden_bytes_per_s", "update_bytes_per_s", "copied_bytes_per_s")
    reading = {name: getattr(hardware, name) for name in copies}
    faster |= {name: rate * bandwidth_ratio for name, rate in reading.items() if rate is not None}
    return replace(hardware, **faster, sent_bytes_per_s=None, errors=errors)
