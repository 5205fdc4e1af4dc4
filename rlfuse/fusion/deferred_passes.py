"""Passes that can wait for the mini-batch whose loss reads them: they fill the bubbles of an earlier one's pipelines.

Role: kept by the board of a step whose ranks hold stages. A pass is deferred if only the actor's loss reads it; the
board shows it as unscored once its mini-batch is the present one, and as deferred before that.

    finished -> deferred --(its mini-batch's turn)--> unscored --Score--> scored -> ready, if prepared
                   +------- Train(.., passes), Score -------------------> scored

Invariant: a sample is ready for its gradient only with all of its deferred passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rlfuse.fusion.mini_batches import MiniBatchProgress


class DeferredPasses:
    """`kinds`: of scoring that are deferred; `progress`: the actor's, divided into mini-batches before anything
    ends."""

    def __init__(self, kinds: Sequence[str], progress: MiniBatchProgress | None):
        self.kinds, self._ledger = tuple(kinds) if progress else (), progress
        self.waiting: dict[str, dict[int, dict[str, int]]] = {kind: {} for kind in self.kinds}
        """Kind -> mini-batch -> finished samples that lack it -> tokens; of mini-batches after the present one."""
        self._lacking: dict[str, set[str]] = {}
        self._prepared: dict[str, tuple[int, int]] = {}

    def finish(self, name: str, group: int, tokens: int) -> None:
        """A sample is generated."""
        self._lacking[name] = set(self.kinds)
        for parts in self.waiting.values():
            parts.setdefault(self._ledger.of[group], {})[name] = tokens

    def due(self) -> Iterator[tuple[str, Mapping[str, int]]]:
        """(kind, samples) that the present mini-batch needs, since the last call."""
        for kind, parts in self.waiting.items():
            for part in [part for part in parts if part <= self._ledger.at]:
                yield kind, parts.pop(part)

    def take(self, kind: str, name: str, group: int) -> int | None:
        """Its pass begins before it is due; its tokens. None if it doesn't wait here."""
        parts = self.waiting.get(kind, {})
        part = self._ledger.of[group] if parts else None
        if name not in parts.get(part, {}):
            return None
        tokens = parts[part].pop(name)
        if not parts[part]:
            del parts[part]
        return tokens

    def scored(self, kind: str, name: str) -> None:
        """A deferred pass over a sample is through."""
        self._lacking[name].discard(kind)
        if not self._lacking[name] and name in self._prepared:
            self._ledger.prepare({name: self._prepared.pop(name)})

    def prepare(self, samples: Mapping[str, tuple[int, int]]) -> None:
        """Sample -> (group, tokens) of those that are ready but for what is deferred."""
        self._prepared |= {name: each for name, each in samples.items() if self._lacking.get(name)}
        self._ledger.prepare({name: each for name, each in samples.items() if name not in self._prepared})
