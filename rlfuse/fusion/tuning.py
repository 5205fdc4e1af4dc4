"""What policies learn during a run: costs, response lengths, slot rates and settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlfuse.costs.model import Costs
from rlfuse.costs.rates import Rates
from rlfuse.events import Span
from rlfuse.fusion.board import Board
from rlfuse.fusion.decisions import Settings
from rlfuse.fusion.lengths import Lengths


@dataclass
class Tuning:
    """Learned inputs of the policies. `relearn` refits costs and settings from the spans of a step."""

    costs: Costs
    lengths: Lengths
    fixed: Settings
    rates: Rates
    relearn: Callable[[Tuning, Sequence[Span]], None] | None = None

    def settings(self, samples: int) -> Settings:
        return replace(self.fixed, samples=samples)

    def learn(self, board: Board, spans: Sequence[Span]) -> None:
        """Learn the response lengths of a finished step, then call `relearn` with its spans."""
        self.lengths.learn(board.response_lengths())
        if self.relearn is not None:
            self.relearn(self, spans)
