"""What policies learn during a run: costs, response lengths, slot rates and settings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from rlfuse.costs.model import Costs
from rlfuse.costs.rates import Rates
from rlfuse.events import Span
from rlfuse.fusion.board import Board
from rlfuse.fusion.decisions import Settings
from rlfuse.fusion.lengths import Lengths

RECENT_STEPS = 4
"""Steps over which the share of skipped samples is averaged."""


@dataclass
class Tuning:
    """Learned inputs of the policies. `relearn` refits costs and settings from the spans of a step."""

    costs: Costs
    lengths: Lengths
    fixed: Settings
    rates: Rates
    relearn: Callable[[Tuning, Sequence[Span]], None] | None = None
    _skipped_shares: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    @property
    def skipped_share(self) -> float:
        """Return the mean share of samples whose actor passes were skipped in recent steps; 0 before the first."""
        return fmean(self._skipped_shares or (0.0,))

    def expect_skipped(self, share: float) -> None:
        """Record the skipped share of a step."""
        self._skipped_shares.append(share)

    def settings(self, samples: int) -> Settings:
        return replace(self.fixed, samples=samples)

    def learn(self, board: Board, spans: Sequence[Span]) -> None:
        """Learn the response lengths and the skipped share of a finished step, then call `relearn` with its spans."""
        self.lengths.learn(board.response_lengths())
        if "actor" in board.mini_batches:
            self.expect_skipped(board.skipped_share)
        if self.relearn is not None:
            self.relearn(self, spans)
