"""M-RoPE positions of a prompt with clips, equal to those of vLLM's `get_mrope_input_positions`. Pure.

transformers 5 positions text after a clip by height and width only, which differs from vLLM for long clips. So
positions are always passed to the trained model explicitly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlfuse.samples import Visual
from rlfuse.video.plan import VideoPlan


@dataclass(frozen=True, slots=True)
class MRope:
    """M-RoPE settings of a model."""

    merge: int
    steps_per_second: float | None
    """Temporal positions per second (Qwen2.5-VL's `tokens_per_second`); None: one per temporal patch."""

    def positions(self, size: int, clips: Sequence[Visual]) -> np.ndarray:
        """Return the positions int64 [3, size] of a prompt of `size` tokens with clips in order.

        Raises ValueError if a clip does not match its grid. Example: merge 2, 4 steps per second; 2 text tokens, a clip
        of grid (2, 4, 2) with 0.5 s per patch, 1 text token: time 0 1 2 2 4 4 5, height 0 1 2 3 2 3 5, width
        0 1 2 2 2 2 5.
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
                f"a {what} of grid {plan.grid} has {cells.shape[1]} contiguous tokens, got {len(places)} at "
                f"positions {first} to {last}: plan it with the timestamps and geometry of this model"
            )
        if self.steps_per_second is not None:  # truncated float64 product, bit-equal to vLLM
            cells[0] = (cells[0] * (plan.seconds_per_temporal_patch * self.steps_per_second)).astype(np.int64)
        return cells


def following(before: np.ndarray, count: int) -> np.ndarray:
    """Return positions [..., count] of text after the positions [..., tokens], on one or three axes."""
    return np.broadcast_to(before.max() + 1 + np.arange(count), (*before.shape[:-1], count))


def _text(start: int, count: int) -> np.ndarray:
    return np.broadcast_to(np.arange(start, start + count), (3, count))
