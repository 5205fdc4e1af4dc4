"""VideoLLaMA3's token compression: drop visual tokens that repeat the previous frame, as in its processor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from rlfuse.video.plan import VideoPlan
from rlfuse.video.towers import Pixels

THRESHOLD = 0.1
"""Mean change of a token's normalised pixels, in 255ths, above which it is kept."""


def compress_tokens(plan: VideoPlan, blocks: Iterable[np.ndarray], pixels: Pixels) -> VideoPlan:
    """Return the plan without repeated tokens. `blocks`: uint8 [frames, height, width, 3], in order."""
    before, kept, cell = None, [], plan.geometry.cell
    for block in blocks:
        frames = pixels.normalise(torch.from_numpy(block))
        seen = frames if before is None else torch.cat([before, frames])
        cells = seen.diff(dim=0).abs_().unflatten(3, (-1, cell)).unflatten(2, (-1, cell))
        changed = cells.mean((1, 3, 5)).flatten(1) * 255 > THRESHOLD
        changed[~changed.any(dim=1), 0] = True
        kept += [changed.new_ones(1, plan.tokens_per_frame)] * (before is None) + [changed]
        before = frames[-1:]
    mask = torch.cat(kept)
    return plan if mask.all() else replace(plan, kept=mask.numpy().tobytes())
