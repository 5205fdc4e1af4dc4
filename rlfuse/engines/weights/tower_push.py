"""A vision tower that learns, from the trainer to the encoder ranks, as a part of every push of weights.

Role: called by `engines.weights.sync.WeightPush` while trainer ranks are on their devices, where
`video.freeze_vision_tower=false`. Keys of embeddings name the tower's version, so that what an older one made is never found
again. Waits for trainer and encoder ranks, each bounded by itself.
"""

from __future__ import annotations

from pathlib import Path

from rlfuse.engines.trainer.trainer_group import TrainerGroup
from rlfuse.video.encoding import SequenceParallelEncoder


class TowerPush:
    """`folder`: where the tower is handed over; its present file stays, for encoder ranks that start anew."""

    def __init__(self, trainer: TrainerGroup, encoder: SequenceParallelEncoder, folder: Path):
        self.trainer, self.encoder, self.folder = trainer, encoder, folder
        self._present: Path | None = None

    async def push(self, version: int) -> None:
        """Encoder ranks hold the trainer's present tower, under the step that is `version` of the actor's weights."""
        path = self.folder / f"tower-{version}.safetensors"
        updates = await self.trainer.save_tower(path)
        await self.encoder.update_tower(path, updates)
        old, self._present = self._present, path
        if old is not None and old != path:
            old.unlink(missing_ok=True)
