"""Log to TensorBoard event files in the run folder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlfuse.observe.alerts import Alert
from rlfuse.observe.sink import MAX_FAILURES, SAMPLES, Row, as_text


class TensorBoard:
    """TensorBoard event files. A resume starts a new file; TensorBoard shows the later of duplicate values."""

    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter  # needs the package tensorboard, which the checks require

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)

    def samples(self, step: int, rows: Sequence[Row], name: str = SAMPLES) -> None:
        """Log samples as text, in code blocks since TensorBoard renders Markdown."""
        for number, row in enumerate(rows):
            texts = row["prompt"], row["response"], as_text(row["ground_truth"])
            blocks = [f"{row['id']}, reward {row['reward']}", *map(_block, texts)]
            self._writer.add_text(f"{name}/{number}", "\n\n".join(blocks), step)

    def picture(self, step: int, name: str, path: Path) -> None:
        from PIL import Image

        self._writer.add_image(name, np.asarray(Image.open(path).convert("RGB")), step, dataformats="HWC")

    def alert(self, step: int, alert: Alert) -> None:
        self._writer.add_text("alerts", f"**{alert.title}** {alert.text}", step)

    def reward_failures(self, step: int, rows: Sequence[Row]) -> None:
        for row in rows[:MAX_FAILURES]:
            text = f"{row['function']}: {row['message']}\n{row['traceback']}"
            self._writer.add_text(f"reward_failures/{row['sample']}", _block(text), step)

    def failure(self, where: str, text: str) -> None:
        self._writer.add_text(f"errors/{where}", _block(text))

    def close(self, exit_code: int) -> None:
        self._writer.close()


def _block(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
