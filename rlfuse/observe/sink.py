"""Define a sink: the destination of scalars, samples and pictures that an entry of `trainer.logger` names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rlfuse.observe.alerts import Alert

Row = dict[str, Any]
AXIS = "training/global_step"
SAMPLES, VALIDATION = "samples", "val/generations"
MAX_FAILURES = 32
"""Maximum failed rewards per call of a sink; the file in the run folder has all of them."""


class Sink(Protocol):
    """Destination of logs. Steps are passed in ascending order."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log the scalars of a step, which `metrics.jsonl` already has."""

    def samples(self, step: int, rows: Sequence[Row], name: str = SAMPLES) -> None:
        """Log samples with their rewards and reward parts. `name`: name of the table."""

    def picture(self, step: int, name: str, path: Path) -> None:
        """Log a PNG of the run folder."""

    def alert(self, step: int, alert: Alert) -> None:
        """Notify a person."""

    def reward_failures(self, step: int, rows: Sequence[Row]) -> None:
        """Log samples that newly have no reward, as rows of `tracking.failure_row`."""

    def failure(self, where: str, text: str) -> None:
        """Log the error that ended the run."""

    def close(self, exit_code: int) -> None: ...


def part_columns(rows: Sequence[Row], columns: Sequence[str]) -> dict[str, str]:
    """Return the reward parts of rows -> their columns in a table; a part named as one of `columns` gets a prefix."""
    parts = sorted({part for row in rows for part in row["parts"]})
    return {part: f"rewards/{part}" if part in columns else part for part in parts}


def as_text(value: Any) -> str:
    """Return a ground truth as text; empty for None."""
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
