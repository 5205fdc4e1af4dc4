"""Predict how long a piece of work should take: fitted costs, corrected per class of work by the first steps of the
run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import median

from rlfuse.events import Span
from rlfuse.fusion.costs import Costs

PASSES = ("old_log_prob", "ref", "values")
TRAINING = ("forward", "backward")
ROLES = {"rollout": ("decode",), "trainer": (*PASSES, *TRAINING), "reward": ("reward",), "encoder": ("encode",)}
"""Work that a worker does by itself. Collectives (optimizer steps, weights) are none: all wait there for the slowest,
so that everyone but that one looks slow."""
STARTED = ("start", "restart")  # spans after which a worker is another one
LEARNED = 128  # pieces of a class from each worker, the first ones, that its factor is made of
LEAST = 5  # pieces below which a class has no factor

Class = tuple[str, ...]


def role_of(worker: str) -> str:
    """`rollout` of `rollout/3`."""
    return worker.partition("/")[0]


def is_work(span: Span) -> bool:
    """Whether it is a piece of its worker's own work, done to its end."""
    return span.kind in ROLES.get(role_of(span.where), ()) and span.seconds > 0 and "error" not in span.attributes


def class_of(span: Span) -> Class:
    """Pieces of one class differ by no more than costs tell well."""
    told = span.attributes
    size = told["batch"] if span.kind == "decode" else max(1, span.tokens)
    shape = (bool(told.get("prefill_tokens")), *(told.get(name) for name in ("model", "stage", "degree", "function")))
    return (span.kind, str(int(size).bit_length()), *map(str, shape))


def predicted(span: Span, costs: Costs) -> float:
    """By the costs alone; of work that they don't tell, in units that a class's factor makes seconds of."""
    told = span.attributes
    if span.kind == "decode":
        decoding = told["steps"] * costs.decode_step(told["batch"], told["context"])
        return decoding + told["prefill_tokens"] / costs.prefill_tokens_per_s
    if span.kind in PASSES:
        return costs.score_call_s + span.tokens / costs.score_tokens_per_s
    if span.kind in TRAINING:
        return span.tokens / costs.train_tokens_per_s
    return float(max(1, len(span.samples)))


class Settled:
    """Workers whose first step is over: in it they compile, fill caches, and are slower than they will be."""

    def __init__(self) -> None:
        self._workers: set[str] = set()

    def work_of(self, spans: Iterable[Span]) -> tuple[list[Span], set[str]]:
        """The pieces of work in a step of those that had one before, and who was started anew in it."""
        spans = list(spans)
        started = {span.where for span in spans if span.kind in STARTED}
        self._workers -= started
        work = [span for span in spans if is_work(span)]
        settled = [span for span in work if span.where in self._workers]
        self._workers |= {span.where for span in work}
        return settled, started


class Expected:
    """Of one run, from its warm-up on."""

    def __init__(self) -> None:
        self._costs: Costs | None = None
        self._ratios: dict[Class, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._factors: dict[Class, float | None] = {}

    def learn(self, spans: Iterable[Span], costs: Costs) -> None:
        """Take in pieces of work; `costs` count the first time only."""
        self._costs = costs if self._costs is None else self._costs
        for span in spans:
            if is_work(span) and (by_costs := predicted(span, self._costs)) > 0:
                kept = self._ratios[group := class_of(span)][span.where]
                if len(kept) < LEARNED:
                    kept.append(span.seconds / by_costs)
                    self._factors.pop(group, None)

    def seconds(self, span: Span) -> float | None:
        """Of a piece of work as it should be; None where nothing tells."""
        if self._costs is None or (factor := self._factor(class_of(span))) is None:
            return None
        return factor * predicted(span, self._costs)

    def _factor(self, group: Class) -> float | None:
        if group not in self._factors:
            ratios = self._ratios.get(group, {})
            enough = sum(map(len, ratios.values())) >= LEAST
            self._factors[group] = median(map(median, ratios.values())) if enough else None
        return self._factors[group]
