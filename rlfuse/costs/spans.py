"""Extract amounts of work from the events of a run, for fits, rates and health checks. Pure functions of spans."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from rlfuse.costs.model import Costs
from rlfuse.events import Span, covered
from rlfuse.samples import PASSES

TRAINING = ("forward", "backward")
ROLES = {"rollout": ("decode",), "trainer": (*PASSES, *TRAINING), "reward": ("reward",), "encoder": ("encode",)}
"""Role -> kinds of work that a worker does alone. Collectives (optimizer steps, weight updates) are excluded, because
all ranks wait for the slowest one there and would look slow."""
EQUAL_RATES: Mapping[str, float] = {}  # rates by worker, if none is slow


def role_of(worker: str) -> str:
    """Return `rollout` of `rollout/3`."""
    return worker.partition("/")[0]


def is_work(span: Span) -> bool:
    """Return whether the span is completed work that its worker did alone."""
    return span.kind in ROLES.get(role_of(span.where), ()) and span.seconds > 0 and "error" not in span.attributes


def predicted(span: Span, costs: Costs) -> float:
    """Return the predicted seconds of a span of work; for rewards and encoding, which `costs` does not cover, the
    number of samples."""
    attributes = span.attributes
    if span.kind == "decode":
        decoding = attributes["steps"] * costs.decode_step(attributes["batch"], attributes["context"])
        return decoding + costs.prefill(attributes["prefill_tokens"])
    if span.kind in PASSES:
        return sum(costs.scoring(span.tokens))
    if span.kind in TRAINING:
        return costs.training(span.tokens)[1]
    return float(max(1, len(span.samples)))


def skipped_share(spans: Iterable[Span]) -> float:
    """Return the share of rows whose actor passes were skipped, from the driver's spans of its optimizer steps."""
    steps = [span.attributes for span in spans if span.kind == "update_actor" and "skipped_rows" in span.attributes]
    rows = sum(attributes["rows"] for attributes in steps)
    return sum(attributes["skipped_rows"] for attributes in steps) / rows if rows else 0.0


def decoding_amounts(spans: Sequence[Span]) -> np.ndarray:
    """Return float [N, 4]: decoding steps, their mean batch and cached tokens, and prefilled tokens."""
    names = ("steps", "batch", "context", "prefill_tokens")
    return np.array([[span.attributes[name] for name in names] for span in spans], float)


def decoding_terms(amounts: np.ndarray, flat_batch: int) -> np.ndarray:
    """Return float [N, 4], the terms that the decoding time is linear in: steps, and summed over steps the
    sequences above the flat batch, the cached tokens and the prefilled tokens."""
    steps, batch, context, prefill = amounts.T
    return np.stack([steps, steps * np.maximum(0, batch - flat_batch), steps * context, prefill], axis=1)


def call_terms(tokens: Sequence[float]) -> np.ndarray:
    """Return float [N, 2]: 1 and the tokens of each call."""
    return np.stack([np.ones(len(tokens)), np.array(tokens, float)], axis=1)


def driver_spans(spans: Iterable[Span], kinds: Iterable[str]) -> list[Span]:
    """Return the driver's spans of these kinds, without validation."""
    return [span for span in spans if span.where == "driver" and span.kind in kinds and span.cause != "testing"]


def updates(spans: Iterable[Span]) -> set[str]:
    """Return the kinds of the driver's spans in which models are trained."""
    return {span.kind for span in spans if span.kind.startswith("update_")} - {"update_weights"}


def is_optimizer_step(span: Span) -> bool:
    """Return whether the driver waits in this span for an optimizer step, not for gradients."""
    return span.where == "driver" and span.kind.startswith("update_") and bool(span.attributes.get("step"))


def spans_within(spans: Sequence[Span], step: Span) -> list[Span]:
    """Return the spans inside a step, or nothing if it generated nothing."""
    inside = [span for span in spans if span.start >= step.start and span.end <= step.end]
    return inside if any(span.kind == "generate" for span in inside) else []


def lengths_of(spans: Iterable[Span]) -> dict[str, tuple[int, int]]:
    """Return sample id -> (prompt, response) tokens. The last span of a migrated sample also counts the tokens that it
    arrived with."""
    return {
        span.samples[0]: (
            span.attributes.get("prompt_tokens", 1),
            span.tokens + span.attributes.get("carried_tokens", 0),
        )
        for span in sorted(spans, key=lambda span: span.end)
        if span.kind == "generate" and span.samples
    }


def busiest_ranks(
    spans: Sequence[Span], kinds: Iterable[str], inner: Iterable[str], rates: Mapping[str, float] = EQUAL_RATES
) -> list[tuple[Span, list[Span]]]:
    """Return each call of the driver of these kinds, with the spans of the rank that had the most work in it: tokens
    times its rate. `inner`: kinds of the ranks' spans that count; for a pass, those of the same kind."""
    ranks: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind in inner and span.where.startswith("trainer/"):
            ranks[span.where, span.kind].append(span)
    for each in ranks.values():
        each.sort(key=lambda span: span.start)
    starts = {key: [span.start for span in each] for key, each in ranks.items()}
    found = []
    for call in driver_spans(spans, kinds):
        slot, most, done = call.attributes.get("slot"), 0.0, []
        for (where, kind), each in ranks.items():
            named = call.kind == kind or kind not in PASSES
            if named and (slot is None or where == f"trainer/{slot}"):
                first, last = bisect_left(starts[where, kind], call.start), bisect_left(starts[where, kind], call.end)
                work = sum(span.tokens for span in each[first:last]) * rates.get(where, 1)
                if work > most:
                    most, done = work, each[first:last]
        if done:
            found.append((call, done))
    return found


def unexplained_seconds(spans: Sequence[Span]) -> Iterator[float]:
    """Yield for each step the seconds in which no slot did any of the work above."""
    work = [span for span in spans if span.kind == "decode"]
    work += driver_spans(spans, {*PASSES, "switch", *updates(spans)})
    for step in driver_spans(spans, ("step",)):
        inside = [
            Span(span.kind, span.where, max(span.start, step.start), min(span.end, step.end))
            for span in work
            if span.end > step.start and span.start < step.end
        ]
        yield step.seconds - covered(inside)
