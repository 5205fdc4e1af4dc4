"""What waits to be scored now, by kind: samples, their tokens, since when, and calls under way. Part of the board."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence


class ScoringQueue:
    """`kinds` in serial order."""

    def __init__(self, kinds: Sequence[str], now: float):
        self.unscored: dict[str, OrderedDict[str, int]] = {kind: OrderedDict() for kind in kinds}
        """Kind -> finished samples that lack it, none of them under way -> tokens."""
        self.tokens = dict.fromkeys(kinds, 0)
        self.oldest = dict.fromkeys(kinds, now)
        """When the wait began that now stands."""
        self._calls = dict.fromkeys(kinds, 0)
        self._held: dict[int, dict[str, int]] = {}

    def finish(self, kinds: Iterable[str], name: str, tokens: int, now: float, group: int, awaited: bool) -> None:
        """A sample was generated. While siblings are `awaited`, only its reward is not held back for them."""
        held = self._held.setdefault(group, {})
        held[name] = tokens
        for kind in kinds:
            if kind == "reward":
                self.add(kind, {name: tokens}, now)
            elif not awaited:
                self.add(kind, held, now)
        if not awaited:
            del self._held[group]

    def add(self, kind: str, samples: Mapping[str, int], now: float) -> None:
        """Finished samples, with their tokens, are to be scored now."""
        if not self.unscored[kind]:
            self.oldest[kind] = now
        self.unscored[kind].update(samples)
        self.tokens[kind] += sum(samples.values())

    def take(self, kind: str, name: str) -> int:
        """A call has the sample; its tokens."""
        tokens = self.unscored[kind].pop(name)
        self.tokens[kind] -= tokens
        return tokens

    def drop(self, kind: str, names: Iterable[str]) -> None:
        """These samples need not be scored, whether they wait or not."""
        self.tokens[kind] -= sum(self.unscored[kind].pop(name, 0) for name in names)

    def begin(self, kind: str) -> None:
        """A call is under way."""
        self._calls[kind] += 1

    def end(self, kind: str, now: float) -> None:
        """A call is over."""
        self._calls[kind] -= 1
        self.oldest[kind] = now

    def under_way(self, kinds: Iterable[str] | None = None) -> frozenset[str]:
        """Kinds (of these) with a call under way."""
        return frozenset(kind for kind in (self._calls if kinds is None else kinds) if self._calls[kind])
