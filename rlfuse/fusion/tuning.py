"""What a run has learned for its policies: costs, response lengths, rates of slots, settings."""

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
    """`fixed`: settings from the configuration; `relearn`: makes better costs and settings of a step's spans."""

    costs: Costs
    lengths: Lengths
    fixed: Settings
    rates: Rates
    relearn: Callable[[Tuning, Sequence[Span]], None] | None = None

    def settings(self, samples: int) -> Settings:
        return replace(self.fixed, samples=samples)

    def learn(self, board: Board, spans: Sequence[Span]) -> None:
        """Learn the lengths of a finished step, then what `relearn` makes of its spans."""
        self.lengths.learn(board.response_lengths())
        if self.relearn is not None:
            self.relearn(self, spans)
