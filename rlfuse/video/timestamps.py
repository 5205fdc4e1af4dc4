"""Write the time of frames into a prompt, before the visual tokens of each temporal patch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timestamps:
    """How a prompt says the time of a frame, before its tokens."""

    template: str
    """Of the time in seconds."""
    between: str = ""
    """Before every time but the first."""
    behind: str = ""
    """Behind the tokens of the last."""

    def texts(self, seconds: Sequence[float]) -> list[str]:
        return [(self.between if i else "") + self.template.format(each) for i, each in enumerate(seconds)]


SEED_TIMES = Timestamps("[{:.1f} second]")
"""Seed1.5-VL's."""
