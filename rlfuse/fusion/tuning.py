"""What the run has taught policies so far: costs, response lengths, slots' rates, the threshold of `rlhfuse`.

Role: the controller keeps one `Tuning`, shows it every finished step, and gives boards and policies what it holds. It
is plain data; what fits costs to events and simulates thresholds is handed in (`rlfuse.simulate`), so that simulated
runs can do without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlfuse.events import Span
from rlfuse.fusion.board import Board
from rlfuse.fusion.costs import Costs
from rlfuse.fusion.decisions import Settings
from rlfuse.fusion.lengths import Lengths
from rlfuse.fusion.rates import Rates


@dataclass
class Tuning:
    """`fixed`: settings from the configuration; `relearn`: makes better costs and settings of a step's spans."""

    costs: Costs
    lengths: Lengths
    fixed: Settings
    rates: Rates
    relearn: Callable[[Tuning, Sequence[Span]], None] | None = None

    def settings(self, samples: int) -> Settings:
        """For a step of so many samples."""
        return replace(self.fixed, samples=samples)

    def learn(self, board: Board, spans: Sequence[Span]) -> None:
        """A step is over: remember its lengths, then whatever `relearn` makes of its spans."""
        self.lengths.learn(board.response_lengths())
        if self.relearn is not None:
            self.relearn(self, spans)
