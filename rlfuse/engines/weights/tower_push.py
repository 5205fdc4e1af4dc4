"""Push of the trained vision tower from the trainer to the encoder ranks, as part of every weight push.

Keys of embeddings contain the tower's version, so that older embeddings are not reused.
"""

from __future__ import annotations

from pathlib import Path

from rlfuse.engines.trainer.trainer_group import TrainerGroup
from rlfuse.video.encoding import SequenceParallelEncoder


class TowerPush:
    """Push of the tower through files in `folder`; the latest file is kept for encoder ranks that restart."""

    def __init__(self, trainer: TrainerGroup, encoder: SequenceParallelEncoder, folder: Path):
        self.trainer, self.encoder, self.folder = trainer, encoder, folder
        self._present: Path | None = None

    async def push(self, version: int) -> None:
        """Load the trainer's tower on the encoder ranks; `version`: that of the actor's weights, used in the file
        name."""
        path = self.folder / f"tower-{version}.safetensors"
        updates = await self.trainer.save_tower(path)
        await self.encoder.update_tower(path, updates)
        old, self._present = self._present, path
        if old is not None and old != path:
            old.unlink(missing_ok=True)
