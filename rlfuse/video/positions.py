"""M-RoPE positions of a prompt with clips, equal to those of vLLM's `get_mrope_input_positions`. Pure.

transformers 5 places text after a clip by height and width only, another model than vLLM's for long clips; so positions
are always passed to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlfuse.samples import Visual
from rlfuse.video.plan import VideoPlan


@dataclass(frozen=True, slots=True)
class MRope:
    """How a model counts positions on three axes."""

    merge: int
    steps_per_second: float | None
    """Positions in time per second (Qwen2.5-VL's `tokens_per_second`); None: one for a temporal patch."""

    def positions(self, size: int, clips: Sequence[Visual]) -> np.ndarray:
        """int64 [3, size] of a prompt of so many tokens, its clips in order. ValueError if one does not fit its grid.

        Example: merge 2, 4 steps a second; 2 tokens of text, a clip of grid (2, 4, 2) and half a second a patch, 1 of
        text: time 0 1 2 2 4 4 5, height 0 1 2 3 2 3 5, width 0 1 2 2 2 2 5.
        """
        parts, start, after = [], 0, 0
        for clip in clips:
            pieces = clip.plan.temporal_patches if clip.plan.timestamps else 1
            for places in np.array_split(clip.positions, pieces):
                first = int(places[0])
                parts += [_text(after, first - start), self._cells(clip.plan, pieces, places) + after + first - start]
                start, after = first + len(places), int(parts[-1].max()) + 1
        return np.concatenate([*parts, _text(after, size - start)], axis=1)

    def _cells(self, plan: VideoPlan, pieces: int, places: np.ndarray) -> np.ndarray:
        patches, height, width = plan.grid
        cells = np.indices((patches // pieces, height // self.merge, width // self.merge)).reshape(3, -1)
        first, last = int(places[0]), int(places[-1])
        if not cells.shape[1] == len(places) == last - first + 1:
            what = "clip" if pieces == 1 else "temporal patch"
            raise ValueError(
                f"a {what} of grid {plan.grid} is {cells.shape[1]} tokens in one piece, got {len(places)} of them at "
                f"places {first} to {last}: plan it with the timestamps and in the geometry of this model"
            )
        if self.steps_per_second is not None:  # one factor, in float64, cut off: to the bit as in vLLM
            cells[0] = (cells[0] * (plan.seconds_per_temporal_patch * self.steps_per_second)).astype(np.int64)
        return cells


def following(before: np.ndarray, count: int) -> np.ndarray:
    """[..., count] of text behind the positions [..., tokens], on one axis or three."""
    return np.broadcast_to(before.max() + 1 + np.arange(count), (*before.shape[:-1], count))


def _text(start: int, count: int) -> np.ndarray:
    return np.broadcast_to(np.arange(start, start + count), (3, count))
