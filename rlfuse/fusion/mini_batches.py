"""Progress of one model through its mini-batches, which it trains on strictly in order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf

from rlfuse.fusion.decisions import PASS_BEFORE_STEP, Snapshot


class MiniBatchProgress:
    """Training progress of one model. `passes`: PPO epochs over the samples; `skipped_share`: expected share of skipped
    samples."""

    def __init__(self, passes: int, skipped_share: float = 0.0):
        self._passes, self.completed = passes, 0  # completed mini-batches, over all passes
        self._kept_share = 1.0 - skipped_share
        self.mini_batch_of: Mapping[int, int] = {}  # group -> number of its mini-batch
        self._sizes: list[int] = []
        self._tokens: list[float] = []
        self._prepared: dict[int, dict[str, int]] = {}
        self._skipped: dict[int, dict[str, int]] = {}
        self._done: list[str] = []
        self.ready: OrderedDict[str, int] = OrderedDict()  # samples that can be accumulated now -> tokens
        self.remaining_tokens = 0.0  # tokens of the current mini-batch not yet started; estimated while unknown

    def set_mini_batches(self, mini_batch_of: Mapping[int, int], sizes: Sequence[int], tokens: Sequence[float]) -> None:
        """Set the mini-batch of each group, and the samples and expected tokens of each mini-batch."""
        self.mini_batch_of, self._sizes, self._tokens, self.completed = mini_batch_of, list(sizes), list(tokens), 0
        self._open()

    def drop(self, group: int) -> None:
        """Exclude one sample of the group whose reward failed."""
        if group in self.mini_batch_of:
            self._sizes[self.mini_batch_of[group]] -= 1
            if not self.done and self._sizes[self.completed % len(self._sizes)] == 0:
                self._open()

    def prepare(self, samples: Mapping[str, tuple[int, int]]) -> None:
        """Add samples whose loss can be computed: sample -> (group, tokens)."""
        for name, (group, tokens) in samples.items():
            part = self.mini_batch_of[group]
            self._prepared.setdefault(part, {})[name] = tokens
            if self._is_current(part):
                self.ready[name] = tokens
                self.remaining_tokens += tokens - self._kept_share * tokens

    def skip(self, name: str, group: int, tokens: int) -> None:
        """Count a sample as accumulated in every pass, because its loss and gradient are 0."""
        part = self.mini_batch_of[group]
        self._skipped.setdefault(part, {})[name] = tokens
        if self._is_current(part):
            self._done.append(name)
            self.remaining_tokens -= self._kept_share * tokens

    def start(self, names: Iterable[str]) -> int:
        tokens = sum(map(self.ready.pop, names))
        self.remaining_tokens -= tokens
        return tokens

    def finish(self, names: Sequence[str]) -> None:
        self._done += names

    def step(self) -> None:
        self.completed += 1
        self._open()

    @property
    def accumulated_samples(self) -> list[str]:
        """Return the samples of the current mini-batch that are accumulated, or skipped."""
        return self._done

    @property
    def skipped_samples(self) -> Collection[str]:
        """Return the skipped samples of the current mini-batch."""
        return self._skipped.get(self.completed % len(self._sizes), {}).keys() if self._sizes else ()

    @property
    def accumulated(self) -> bool:
        return not self.done and len(self._done) == self._sizes[self.completed % len(self._sizes)]

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps of this model in the step."""
        return self._passes * len(self._sizes)

    @property
    def done(self) -> bool:
        return self.completed >= self.steps

    def _open(self) -> None:
        self._done = []
        while not self.done and self._sizes[self.completed % len(self._sizes)] == 0:
            self.completed += 1  # all of its samples failed
        if self.done:
            self.ready, self.remaining_tokens = OrderedDict(), 0.0
            return
        part = self.completed % len(self._sizes)
        self.ready, skipped = OrderedDict(self._prepared.get(part, {})), self._skipped.get(part, {})
        self._done = [*skipped]
        tokens = float(sum(self.ready.values()))
        if len(self.ready) + len(skipped) < self._sizes[part]:
            tokens += self._kept_share * max(0.0, self._tokens[part] - tokens - sum(skipped.values()))
        self.remaining_tokens = tokens

    def _is_current(self, part: int) -> bool:
        return not self.done and part == self.completed % len(self._sizes)


COPY_MARGIN = 1.5  # slowdown of a copy while other work runs
FORECAST_SLACK_S = 0.5  # maximum seconds between two forecasts, plus the delay of the call


def optimizers_to_fetch(away: Mapping[int, float], seconds: float) -> list[int]:
    """Return the slots whose offloaded optimizer must be fetched now.

    away: slot -> seconds of its fetch. seconds: until the first optimizer step.
    """
    return [slot for slot, takes in away.items() if COPY_MARGIN * takes + FORECAST_SLACK_S >= seconds]


def seconds_until_step(view: Snapshot, models: Iterable[MiniBatchProgress]) -> float:
    """Return the minimum seconds until the next optimizer step of these models; infinity if there is none."""
    left = [progress.remaining_tokens for progress in models if not progress.done]
    if not left:
        return inf
    later = [parts for kind, parts in view.deferred.items() if kind not in PASS_BEFORE_STEP.values()]
    scored = view.tokens_to_score - sum(
        tokens for parts in later for part in parts.values() for tokens in part.values()
    )
    work = max(0.0, scored) / view.costs.score_tokens_per_s + min(left) / view.costs.train_tokens_per_s
    return max(view.deadline - view.now if view.unfinished else 0.0, work / max(1.0, view.effective_slots))
