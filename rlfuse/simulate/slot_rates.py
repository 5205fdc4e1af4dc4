"""Measure how slow each worker of a recorded run was: seconds of its work over those of a typical worker.

What work costs and how slow workers are is fitted together, as a slow worker is often given less work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median_low
from typing import Any

import numpy as np

from rlfuse.engines.scoring import PASSES
from rlfuse.events import Span
from rlfuse.simulate.fitting import robust

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
