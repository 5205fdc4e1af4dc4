"""New weights for everyone, where the vision tower learns too: engines get the actor's, encoder ranks the tower.

Role: `protocols.WeightSync` for `video.freeze_tower=false`, around the push of the actor's weights. Keys of embeddings
name the tower's version, so that what an older one made is never found again. Waits for both, each bounded by itself.
"""

from __future__ import annotations

from pathlib import Path

from rlfuse.engines.trainer import TrainerGroup
from rlfuse.engines.weights import WeightPush
from rlfuse.video.encoding import SequenceParallelEncoder


class TowerPush:
    """`folder`: where the tower is handed over; its present file stays, for encoder ranks that start anew."""

    def __init__(self, weights: WeightPush, trainer: TrainerGroup, encoder: SequenceParallelEncoder, folder: Path):
        self.weights, self.trainer, self.encoder, self.folder = weights, trainer, encoder, folder
        self._present: Path | None = None

    async def push(self, version: int) -> None:
        """Engines hold the actor's weights as `version`, encoder ranks the tower of the same step."""
        await self.weights.push(version)
        path = self.folder / f"tower-{version}.safetensors"
        updates = await self.trainer.save_tower(path)
        await self.encoder.update_tower(path, updates)
        old, self._present = self._present, path
        if old is not None and old != path:
            old.unlink(missing_ok=True)

    async def renew(self, slot: int) -> None:
        """Of the actor; towers are as they were."""
        await self.weights.renew(slot)
