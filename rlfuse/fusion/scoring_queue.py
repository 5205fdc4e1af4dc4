"""The queue of samples to score, per kind. Deferred kinds wait for their mini-batch and fill pipeline bubbles."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from rlfuse.fusion.mini_batches import MiniBatchProgress
from rlfuse.fusion.states import SampleRecord


class ScoringQueue:
    """Samples that wait for scores. `kinds` in serial order; `deferred` kinds wait for `progress`, the actor's.

    Groups are prepared without `deferred` and `loss_only` kinds.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        now: float,
        deferred: Sequence[str] = (),
        progress: MiniBatchProgress | None = None,
        loss_only: Sequence[str] = (),
    ):
        self.unscored: dict[str, OrderedDict[str, int]] = {kind: OrderedDict() for kind in kinds}
        """Kind -> finished samples without that score and without a running call -> tokens."""
        self.tokens = dict.fromkeys(kinds, 0)
        self.waiting_since = dict.fromkeys(kinds, now)  # start of the current wait
        self.needed = frozenset(kinds).difference(deferred, loss_only)  # kinds needed to prepare a group
        self.deferred: dict[str, dict[int, dict[str, int]]] = {kind: {} for kind in deferred}
        """Kind -> later mini-batch -> finished samples without that score -> tokens."""
        self._progress = progress or MiniBatchProgress(0)
        self._calls = dict.fromkeys(kinds, 0)
        self._held: dict[int, dict[str, int]] = {}

    def finish(self, record: SampleRecord, tokens: int, now: float, awaited: bool) -> None:
        """Queue a finished sample. While samples of its prompt are `awaited`, queue it for its reward only.

        A baseline needs no other score.
        """
        if record.sample.is_baseline:
            return self.add("reward", {record.id: tokens}, now)
        group = record.group.number
        held = self._held.setdefault(group, {})
        held[record.id] = tokens
        for kind in record.missing.difference(self.deferred):
            if kind == "reward":
                self.add(kind, {record.id: tokens}, now)
            elif not awaited:
                self.add(kind, held, now)
        if not awaited:
            del self._held[group]
        for kind in record.missing.intersection(self.deferred):
            self.deferred[kind].setdefault(self._progress.mini_batch_of[group], {})[record.id] = tokens

    def add(self, kind: str, samples: Mapping[str, int], now: float) -> None:
        if not self.unscored[kind]:
            self.waiting_since[kind] = now
        self.unscored[kind].update(samples)
        self.tokens[kind] += sum(samples.values())

    def add_due(self, now: float) -> None:
        for kind, parts in self.deferred.items():
            for part in [part for part in parts if part <= self._progress.completed]:
                self.add(kind, parts.pop(part), now)

    def take(self, kind: str, name: str, group: int) -> int:
        """Remove a sample that is being scored, possibly before its mini-batch, and return its tokens."""
        if parts := self.deferred.get(kind):
            part = self._progress.mini_batch_of[group]
            if name in parts.get(part, ()):
                tokens = parts[part].pop(name)
                if not parts[part]:
                    del parts[part]
                return tokens
        tokens = self.unscored[kind].pop(name)
        self.tokens[kind] -= tokens
        return tokens

    def discard(self, kind: str, name: str, group: int) -> int:
        """Remove a finished sample that no longer needs the score; return its tokens, 0 if it is being scored."""
        parts = self.deferred.get(kind)
        waits = name in self.unscored[kind] or (parts and name in parts.get(self._progress.mini_batch_of[group], ()))
        return self.take(kind, name, group) if waits else 0

    def drop(self, kind: str, names: Iterable[str]) -> None:
        self.tokens[kind] -= sum(self.unscored[kind].pop(name, 0) for name in names)

    def begin(self, kind: str) -> None:
        self._calls[kind] += 1

    def end(self, kind: str, now: float) -> None:
        self._calls[kind] -= 1
        self.waiting_since[kind] = now

    def under_way(self, kinds: Iterable[str] | None = None) -> frozenset[str]:
        return frozenset(kind for kind in (self._calls if kinds is None else kinds) if self._calls[kind])
