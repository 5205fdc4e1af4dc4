"""Write `summary.json` and `learning_curve.png` of an offline task, and print the final lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlfuse.config.reward_labels import saved_labels
from rlfuse.config.rewards import MODEL_PART
from rlfuse.files import write_atomically
from rlfuse.observe.calibration_plot import PICTURE
from rlfuse.observe.offline_metrics import OFFLINE
from rlfuse.observe.summary import CURVE, draw_curve, duration, held_out_line, outcome
from rlfuse.observe.tracking import read_metrics


def summarise_offline(folder: Path, task: str, seconds: float) -> dict[str, Any]:
    """Write the files and print the summary of a finished run; return the summary."""
    names, rows = OFFLINE[task], read_metrics(folder / "metrics.jsonl")
    summary = outcome(rows, names.validation, seconds)
    write_atomically(folder / "summary.json", json.dumps(summary, indent=2))
    draw_curve(folder / CURVE, rows, names.score, names.validation, names.short(names.score))
    print("\n".join(_lines(summary, folder, task)))
    return summary


def _lines(summary: dict[str, Any], folder: Path, task: str) -> Iterator[str]:
    names, metrics = OFFLINE[task], summary["metrics"]
    yield duration(summary["steps"], summary)
    yield held_out_line(summary, names.short(names.score))
    if (ece := metrics.get(f"val-aux/{MODEL_PART}/ece")) is not None:
        yield f"  calibration   {ece:.3f}   (expected calibration error)"
    pictures = [CURVE, PICTURE] if task == MODEL_PART else [CURVE]
    yield f"  run folder    {folder}"
    yield f"  results       {', '.join(pictures)}, metrics.jsonl, summary.json"
    found = folder.glob(f"global_step_*/{names.model}/huggingface")
    weights = max(found, key=lambda path: path.stat().st_mtime, default=None)
    if weights is not None:
        yield f"  model         {weights}"
        yield f"  use it        rlfuse train ... {_setting(task, weights)}"


def _setting(task: str, weights: Path) -> str:
    """Return the setting with which a job starts from the trained model, or is rewarded by it."""
    if task != MODEL_PART:
        return f"model.path={weights}"
    labels, _ = saved_labels(weights)
    entries = ",".join(f"{MODEL_PART}:{label}" for label in labels) if len(labels) > 1 else ""
    return f"reward.model_path={weights}" + (f" 'reward.functions=[{entries}]'" if entries else "")
