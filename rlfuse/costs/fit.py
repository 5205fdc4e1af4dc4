"""Fit `Costs` to a run's events by non-negative least squares, and measure how well they predict these events.

The slowest 5 % of the spans of each kind do not affect the proportions of its costs. Costs of kinds without spans are
not changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from rlfuse.costs.model import Costs
from rlfuse.costs.spans import (
    EQUAL_RATES,
    busiest_ranks,
    call_terms,
    decoding_amounts,
    decoding_terms,
    driver_spans,
    is_optimizer_step,
    unexplained_seconds,
    updates,
)
from rlfuse.events import Span
from rlfuse.samples import PASSES

KEPT_SHARE = 0.95  # fraction of the spans of a kind that determine the proportions of its costs
OUTLIER = 5.0  # spans that take more than this multiple of the predicted seconds are ignored
ROUNDS = 20  # maximum iterations of fitting and dropping the slowest spans
MIN_SPANS = 4  # minimum spans of a kind to fit its costs
INSTANT_TOKENS_PER_S = 1e12  # tokens per second if the cost per token is not measurable


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Prediction error of the fitted costs on the spans of one kind."""

    spans: int
    seconds: float  # measured, of all of them
    total: float  # (predicted - measured) / measured, over all of them
    typical: float  # median of |predicted - measured| / measured


@dataclass(frozen=True, slots=True)
class Fit:
    """Costs and their accuracy by kind; kinds without spans are missing in `accuracy`."""

    costs: Costs
    accuracy: dict[str, Accuracy]


def fit(spans: Sequence[Span], before: Costs | None = None, rates: Sequence[float] = (), width: int = 1) -> Fit:
    """Return costs fitted to the spans of one or more steps, and `before` (or the defaults) for kinds without spans.
    `rates`: of each slot, which has `width` trainer ranks; the costs are those of a slot with rate 1."""
    accuracy: dict[str, Accuracy] = {}
    of = {f"rollout/{slot}": rate for slot, rate in enumerate(rates)}
    of |= {f"trainer/{rank}": rates[rank // width] for rank in range(len(rates) * width)}
    costs = _fit_decoding(spans, before or Costs(), accuracy, of)
    costs = _fit_calls("scoring", calls(spans, PASSES, PASSES, of), costs, accuracy)
    gradients = [span for span in spans if not is_optimizer_step(span)]
    costs = _fit_calls("training", calls(gradients, updates(spans), ("backward",), of), costs, accuracy)
    single = {
        "optimizer_s": [span.seconds for span in spans if is_optimizer_step(span)],
        "switch_s": [span.seconds for span in driver_spans(spans, ("switch",))],
        "move_s": [span.seconds for span in driver_spans(spans, ("move",))],
    }
    means: dict[str, Any] = {}
    for name, seconds in single.items():
        if seconds:
            means[name] = mean = _mean(np.array(seconds))
            accuracy[name.removesuffix("_s")] = _accuracy(np.full(len(seconds), mean), np.array(seconds))
    costs, rest = replace(costs, **means), list(unexplained_seconds(spans))
    if rest:  # includes the switch back to generating, which the simulation counts separately
        costs = replace(costs, step_s=max(0.0, _mean(np.array(rest)) - costs.switch_s))
    return Fit(costs, accuracy)


def _fit_decoding(
    spans: Sequence[Span], costs: Costs, accuracy: dict[str, Accuracy], rates: Mapping[str, float]
) -> Costs:
    """Fit the costs per step, per sequence above the flat batch, per context token and per prefilled token."""
    stretches = [span for span in spans if span.kind == "decode" and span.seconds > 0]
    if len(stretches) < MIN_SPANS:
        return costs
    amounts = decoding_amounts(stretches)
    rate = np.array([rates.get(span.where, 1.0) for span in stretches])
    seconds = np.array([span.seconds for span in stretches]) / rate
    fits = []
    for flat in (1 << power for power in range(int(max(1, amounts[:, 1].max())).bit_length())):
        terms = decoding_terms(amounts, flat)
        factors, loss = fit_robust(terms, seconds)
        fits.append((loss, flat, factors, terms @ factors))
    _, flat, factors, predicted = min(fits, key=lambda each: each[:2])
    base, sequence, token, prefilled = map(float, factors)
    accuracy["decoding"] = _accuracy(predicted * rate, seconds * rate)
    return replace(
        costs,
        step_base_s=max(base, 1e-6),
        step_per_sequence_s=sequence,
        step_per_context_token_s=token,
        flat_batch=flat,
        prefill_tokens_per_s=_tokens_per_s(prefilled),
    )


def calls(
    spans: Sequence[Span], kinds: Iterable[str], inner: Iterable[str], rates: Mapping[str, float] = EQUAL_RATES
) -> list[tuple[float, float]]:
    """Return (seconds measured by the driver, tokens of its busiest rank times its rate) of each call of these
    kinds."""
    found = busiest_ranks(spans, kinds, inner, rates)
    return [(call.seconds, rates.get(each[0].where, 1) * sum(span.tokens for span in each)) for call, each in found]


def _fit_calls(name: str, found: Sequence[tuple[float, float]], costs: Costs, accuracy: dict[str, Accuracy]) -> Costs:
    if len(found) < MIN_SPANS:
        return costs
    seconds, tokens = np.array(found, float).T
    terms = call_terms(tokens)
    factors, _ = fit_robust(terms, seconds)
    accuracy[name] = _accuracy(terms @ factors, seconds)
    call_s, rate = float(factors[0]), _tokens_per_s(float(factors[1]))
    if name == "scoring":
        return replace(costs, score_call_s=call_s, score_tokens_per_s=rate)
    return replace(costs, train_call_s=call_s, train_tokens_per_s=rate)


def _tokens_per_s(token_s: float) -> float:
    return 1 / token_s if token_s > 1 / INSTANT_TOKENS_PER_S else INSTANT_TOKENS_PER_S


def fit_robust(columns: np.ndarray, seconds: np.ndarray) -> tuple[np.ndarray, float]:
    """Return non-negative factors such that `columns @ factors` approximates the seconds, and the mean squared error of
    the rows that are not outliers."""
    kept = np.ones(len(seconds), bool)
    for _ in range(ROUNDS):
        factors = fit_non_negative(columns[kept], seconds[kept])
        predicted = columns @ factors
        slower = seconds / np.maximum(predicted, 1e-9)
        before, kept = kept, slower <= np.quantile(slower, KEPT_SHARE)
        if (kept == before).all():
            break
    known = (slower <= OUTLIER) & (predicted > 0)
    scale = seconds[known].sum() / predicted[known].sum() if known.any() else 1.0
    return factors * scale, float(((seconds - predicted)[kept] ** 2).mean())


def _mean(seconds: np.ndarray) -> float:
    return float(seconds[seconds <= OUTLIER * np.median(seconds)].mean())


def fit_non_negative(columns: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the non-negative least-squares factors, by trying all subsets of the (few) columns."""
    count, best, least = columns.shape[1], np.zeros(columns.shape[1]), float((seconds**2).sum())
    scale = np.abs(columns).max(axis=0)
    scale[scale == 0] = 1.0
    few = np.asarray(
        np.linalg.qr(np.column_stack([columns / scale, seconds]), mode="r")
    )  # few rows with equal squared errors
    columns, seconds = few[:, :-1], few[:, -1]
    for chosen in (list(c) for size in range(1, count + 1) for c in combinations(range(count), size)):
        factors = np.linalg.lstsq(columns[:, chosen], seconds, rcond=None)[0]
        left = float(((seconds - columns[:, chosen] @ factors) ** 2).sum())
        if factors.min() >= 0 and left < least:
            best, least = np.zeros(count), left
            best[chosen] = factors / scale[chosen]
    return best


def _accuracy(predicted: np.ndarray, measured: np.ndarray) -> Accuracy:
    errors = np.abs(predicted - measured) / np.maximum(measured, 1e-9)
    total = float((predicted.sum() - measured.sum()) / max(measured.sum(), 1e-9))
    return Accuracy(len(measured), float(measured.sum()), total, float(np.median(errors)))
