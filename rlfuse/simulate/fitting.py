"""Fit a cost model to a run's events by non-negative least squares, and measure how well it predicts them.

The slowest twentieth of each kind does not decide how costs relate; what no span measures stays as `before`.
Slots' rates: what work costs and how slow workers are is found together, as a slow worker gets less work, in smaller
pieces.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median_low
from typing import Any

import numpy as np

from rlfuse.events import Span, covered
from rlfuse.fusion.costs import Costs
from rlfuse.step.scoring import PASSES

KEPT_SHARE = 0.95  # share of the spans of a kind that decide how its costs relate
OUTLIER = 5.0  # a span that took so many times what the costs say is not one of its kind
ROUNDS = 4
MIN_SPANS = 4  # spans of a kind from which costs are fitted
INSTANT_TOKENS_PER_S = 1e12  # tokens per second where no cost of tokens can be seen


ALIKE: Mapping[str, float] = {}  # rates of workers of which none is slow


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How the fitted costs tell the spans of one kind that they were fitted to."""

    spans: int
    seconds: float  # measured, of all of them
    total: float  # (predicted - measured) / measured, over all of them
    typical: float  # median of |predicted - measured| / measured


@dataclass(frozen=True, slots=True)
class Fit:
    """Costs, and how good they are; kinds that no span told of are missing in `accuracy`."""

    costs: Costs
    accuracy: dict[str, Accuracy]


def fit(spans: Sequence[Span], before: Costs | None = None, rates: Sequence[float] = (), width: int = 1) -> Fit:
    """Return costs from the spans of one step or many, or as `before` (or the defaults) where there are no such spans.
    `rates`: of each slot, with `width` trainer ranks; the costs are then those of a slot of rate 1."""
    accuracy: dict[str, Accuracy] = {}
    slower = {f"rollout/{slot}": rate for slot, rate in enumerate(rates)}
    slower |= {f"trainer/{rank}": rates[rank // width] for rank in range(len(rates) * width)}
    costs = _fit_decoding(spans, before or Costs(), accuracy, slower)
    passes = calls(spans, PASSES, PASSES, slower)
    call_s, rate = _fit_calls("scoring", passes, accuracy) or (costs.score_call_s, costs.score_tokens_per_s)
    costs = replace(costs, score_call_s=call_s, score_tokens_per_s=rate)
    gradients = calls([span for span in spans if not is_optimizer_step(span)], updates(spans), ("backward",), slower)
    call_s, rate = _fit_calls("training", gradients, accuracy) or (costs.train_call_s, costs.train_tokens_per_s)
    costs = replace(costs, train_call_s=call_s, train_tokens_per_s=rate)
    single = {
        "optimizer_s": [span.seconds for span in spans if is_optimizer_step(span)],
        "switch_s": [span.seconds for span in _driver(spans, ("switch",))],
        "move_s": [span.seconds for span in _driver(spans, ("move",))],
    }
    means: dict[str, Any] = {}
    for name, seconds in single.items():
        if seconds:
            means[name] = mean = _mean(np.array(seconds))
            accuracy[name.removesuffix("_s")] = _accuracy(np.full(len(seconds), mean), np.array(seconds))
    costs, rest = replace(costs, **means), list(unexplained(spans))
    if rest:  # with the way back to generating, which the simulated ranks take for themselves
        costs = replace(costs, step_s=max(0.0, _mean(np.array(rest)) - costs.switch_s))
    return Fit(costs, accuracy)


def _fit_decoding(
    spans: Sequence[Span], costs: Costs, accuracy: dict[str, Accuracy], slower: Mapping[str, float]
) -> Costs:
    """Base, per sequence beyond a flat batch, per context token, per prefilled token."""
    stretches = [span for span in spans if span.kind == "decode" and span.seconds > 0]
    if len(stretches) < MIN_SPANS:
        return costs
    names = ("steps", "batch", "context", "prefill_tokens")
    steps, batch, context, prefill = np.array([[s.attributes[n] for n in names] for s in stretches], float).T
    rates = np.array([slower.get(span.where, 1.0) for span in stretches])
    seconds = np.array([span.seconds for span in stretches]) / rates
    fits = []
    for flat in (1 << power for power in range(int(max(1, batch.max())).bit_length())):
        columns = np.stack([steps, steps * np.maximum(0, batch - flat), steps * context, prefill], axis=1)
        factors, loss = robust(columns, seconds)
        fits.append((loss, flat, factors, columns @ factors))
    _, flat, factors, predicted = min(fits, key=lambda each: each[:2])
    base, sequence, token, prefilled = map(float, factors)
    accuracy["decoding"] = _accuracy(predicted * rates, seconds * rates)
    return replace(
        costs,
        step_base_s=max(base, 1e-6),
        step_per_sequence_s=sequence,
        step_per_context_token_s=token,
        flat_batch=flat,
        prefill_tokens_per_s=1 / prefilled if prefilled > 1 / INSTANT_TOKENS_PER_S else INSTANT_TOKENS_PER_S,
    )


def calls(
    spans: Sequence[Span], kinds: Iterable[str], inner: Iterable[str], slower: Mapping[str, float] = ALIKE
) -> list[tuple[float, float]]:
    """(seconds as the driver saw them, tokens of its busiest rank times its rate) of each call of these kinds."""
    found = busiest(spans, kinds, inner, slower)
    return [(call.seconds, slower.get(each[0].where, 1) * sum(span.tokens for span in each)) for call, each in found]


def busiest(
    spans: Sequence[Span], kinds: Iterable[str], inner: Iterable[str], slower: Mapping[str, float] = ALIKE
) -> list[tuple[Span, list[Span]]]:
    """Each of the driver's calls of these kinds, and what the rank did for it that had the most to do: by its tokens
    and its rate (`slower`).

    `inner`: kinds of the ranks' spans that tell the tokens; for a pass, those of the same name.
    """
    ranks: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind in inner and span.where.startswith("trainer/"):
            ranks[span.where, span.kind].append(span)
    for each in ranks.values():
        each.sort(key=lambda span: span.start)
    starts = {key: [span.start for span in each] for key, each in ranks.items()}
    found = []
    for call in _driver(spans, kinds):
        slot, most, done = call.attributes.get("slot"), 0.0, []
        for (where, kind), each in ranks.items():
            named = call.kind == kind or kind not in PASSES
            if named and (slot is None or where == f"trainer/{slot}"):
                first, last = bisect_left(starts[where, kind], call.start), bisect_left(starts[where, kind], call.end)
                work = sum(span.tokens for span in each[first:last]) * slower.get(where, 1)
                if work > most:
                    most, done = work, each[first:last]
        if done:
            found.append((call, done))
    return found


def _fit_calls(
    name: str, found: Sequence[tuple[float, float]], accuracy: dict[str, Accuracy]
) -> tuple[float, float] | None:
    if len(found) < MIN_SPANS:
        return None
    seconds, tokens = np.array(found, float).T
    columns = np.stack([np.ones_like(tokens), tokens], axis=1)
    (call_s, token_s), _ = robust(columns, seconds)
    accuracy[name] = _accuracy(columns @ np.array([call_s, token_s]), seconds)
    return float(call_s), float(1 / token_s) if token_s > 1 / INSTANT_TOKENS_PER_S else INSTANT_TOKENS_PER_S


def updates(spans: Iterable[Span]) -> set[str]:
    """Kinds of the driver's spans in which models learn."""
    return {span.kind for span in spans if span.kind.startswith("update_")} - {"update_weights"}


def is_optimizer_step(span: Span) -> bool:
    """Whether the driver waits in it for an optimizer step, not for gradients."""
    return span.where == "driver" and span.kind.startswith("update_") and bool(span.attributes.get("step"))


def _driver(spans: Iterable[Span], kinds: Iterable[str]) -> list[Span]:
    """The driver's spans of these kinds; validation doesn't count."""
    return [span for span in spans if span.where == "driver" and span.kind in kinds and span.cause != "testing"]


def unexplained(spans: Sequence[Span]) -> Iterable[float]:
    """For each step its seconds in which no slot did anything that is told of above."""
    work = [span for span in spans if span.kind == "decode"]
    work += _driver(spans, {*PASSES, "switch", *updates(spans)})
    for step in _driver(spans, ("step",)):
        inside = [
            Span(span.kind, span.where, max(span.start, step.start), min(span.end, step.end))
            for span in work
            if span.end > step.start and span.start < step.end
        ]
        yield step.seconds - covered(inside)


def robust(columns: np.ndarray, seconds: np.ndarray) -> tuple[np.ndarray, float]:
    """Non-negative factors that make `columns @ factors` the seconds; and the mean square left of those that count."""
    kept = np.ones(len(seconds), bool)
    for _ in range(ROUNDS):
        factors = non_negative(columns[kept], seconds[kept])
        predicted = columns @ factors
        slower = seconds / np.maximum(predicted, 1e-9)
        kept = slower <= np.quantile(slower, KEPT_SHARE)
    known = (slower <= OUTLIER) & (predicted > 0)
    scale = seconds[known].sum() / predicted[known].sum() if known.any() else 1.0
    return factors * scale, float(((seconds - predicted)[kept] ** 2).mean())


def _mean(seconds: np.ndarray) -> float:
    return float(seconds[seconds <= OUTLIER * np.median(seconds)].mean())


def non_negative(columns: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Least squares with factors of at least 0: the best of all subsets of the (few) columns."""
    count, best, least = columns.shape[1], np.zeros(columns.shape[1]), float((seconds**2).sum())
    scale = np.abs(columns).max(axis=0)
    scale[scale == 0] = 1.0
    few = np.asarray(np.linalg.qr(np.column_stack([columns / scale, seconds]), mode="r"))  # rows, of the same squares
    columns, seconds = few[:, :-1], few[:, -1]
    for chosen in (list(c) for size in range(1, count + 1) for c in combinations(range(count), size)):
        factors = np.linalg.lstsq(columns[:, chosen], seconds, rcond=None)[0]
        left = float(((seconds - columns[:, chosen] @ factors) ** 2).sum())
        if factors.min() >= 0 and left < least:
            best, least = np.zeros(count), left
            best[chosen] = factors / scale[chosen]
    return best


def _accuracy(predicted: np.ndarray, measured: np.ndarray) -> Accuracy:
    apart = np.abs(predicted - measured) / np.maximum(measured, 1e-9)
    total = float((predicted.sum() - measured.sum()) / max(measured.sum(), 1e-9))
    return Accuracy(len(measured), float(measured.sum()), total, float(np.median(apart)))


ROUNDS, SETTLED = 20, 1e-3  # of alternating fits, at most; until rates change by less
FEWEST = 4  # operations of a kind from which the dependence of their time on tokens is fitted
SLOW = 1.1  # rates below are within the noise: the worker counts as typical
OF_RANKS = (*PASSES, "forward", "backward")

Group = tuple[np.ndarray, np.ndarray]  # comparable operations, int [n], and what their time consists of


def slot_rates(spans: Sequence[Span], slots: int, width: int, together: bool) -> tuple[float, ...]:
    """Return the rate of each slot, or nothing where all are typical. `width`: trainer ranks of a slot; `together`:
    ranks wait for each other within their passes, so that only decoding shows how slow a slot is."""
    work: dict[tuple[Any, ...], list[tuple[int, float, tuple[float, ...]]]] = defaultdict(list)
    for span in spans:
        role, _, index = span.where.partition("/")
        if role == "rollout" and span.kind == "decode" and span.seconds > 0:
            work["decode",].append((int(index), span.seconds, decoding_work(span, flat_batch=1)))
        elif role == "trainer" and span.kind in OF_RANKS and not together and span.attributes.get("degree", 1) == 1:
            of = span.kind, span.attributes.get("model"), span.attributes.get("stage")
            work[of].append((int(index) // width, span.seconds, tokens_work(span)))
    rows = [row for each in work.values() for row in each]
    if not rows:
        return ()
    ends = np.cumsum([len(each) for each in work.values()])
    numbers = np.split(np.arange(len(rows)), ends[:-1])
    groups = [(mine, np.array([row[2] for row in each])) for mine, each in zip(numbers, work.values(), strict=True)]
    worker, own = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    typical = typical_seconds(groups, own, expected_seconds(groups, own, worker), worker)
    found = np.ones(slots)
    rates = relative(own, typical, worker)
    found[: len(rates)] = rates
    return tuple(found.tolist()) if max(found.max(), 1 / found.min()) >= SLOW else ()


def tokens_work(span: Span) -> tuple[float, float]:
    """Return a call and its tokens."""
    return 1.0, float(span.tokens)


def decoding_work(span: Span, flat_batch: int) -> tuple[float, ...]:
    """Return the steps, sequences beyond a flat batch in them, tokens that they held, and tokens prefilled."""
    steps, batch, context = (span.attributes[name] for name in ("steps", "batch", "context"))
    return steps, steps * max(0, batch - flat_batch), steps * context, span.attributes["prefill_tokens"]


def expected_seconds(groups: Iterable[Group], own: np.ndarray, worker: np.ndarray) -> np.ndarray:
    """float [N]: what the work of each operation takes, up to a factor that those of a group share.

    Workers that are given less because they are slow take as long as the others: that may look as if tokens cost
    nothing. So it is found twice, from rates of 1 and from rates by tokens alone; what tells the seconds better counts.
    """
    groups, by_tokens = list(groups), own.copy()
    for numbers, columns in groups:
        if (tokens := columns[:, -1].sum()) and columns.shape[1] == 2:
            by_tokens[numbers] = columns[:, -1] * own[numbers].sum() / tokens
    alike = np.ones(int(worker.max(initial=0)) + 1)
    found = [_expected(groups, own, worker, slower) for slower in (relative(own, by_tokens, worker), alike)]
    return min(found, key=lambda expected: np.abs(own - expected * relative(own, expected, worker)[worker]).sum())


def _expected(groups: Sequence[Group], own: np.ndarray, worker: np.ndarray, slower: np.ndarray) -> np.ndarray:
    expected = own.copy()
    for _ in range(ROUNDS):
        for numbers, columns in groups:
            seconds = own[numbers] / slower[worker[numbers]]
            few = len(numbers) < FEWEST
            expected[numbers] = seconds.mean() if few else columns @ robust(columns, seconds)[0]
        before, slower = slower, relative(own, expected, worker)
        if np.allclose(slower, before, rtol=SETTLED):
            break
    return expected


def typical_seconds(groups: Iterable[Group], own: np.ndarray, expected: np.ndarray, worker: np.ndarray) -> np.ndarray:
    """float [N]: the expected seconds at the speed that at least half of the workers reach; of two the faster one's.
    What is in no group stays as it was."""
    typical = own.copy()
    for numbers, _ in groups:
        _, of = np.unique(worker[numbers], return_inverse=True)
        usual = median_low(relative(own[numbers], expected[numbers], of).tolist())
        typical[numbers] = expected[numbers] * usual
    return typical


def relative(own: np.ndarray, expected: np.ndarray, of: np.ndarray) -> np.ndarray:
    """float [workers]: seconds over those expected, of the operations `of` each; 1 where nothing was expected."""
    foreseen = np.bincount(of, expected)
    return np.divide(np.bincount(of, own), foreseen, out=np.ones_like(foreseen), where=foreseen > 0)
