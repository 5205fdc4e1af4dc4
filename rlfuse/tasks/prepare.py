"""Everything the quickstart needs on disk: rows to train and validate on, and the model to start from.

Role: `rlfuse prepare`, also `python -m rlfuse.tasks.prepare [--out FOLDER]`. The folder then holds `train.parquet`,
`val.parquet`, `model/` and `settings.json`, under the names that `experiment=quickstart` reads.
Invariants:
- `settings.json` holds everything the contents depend on: with the same settings a second call returns at once, with
  others the folder is built again;
- the folder appears whole: it is built under another name beside its place and renamed when complete;
- a folder that was not written by this module is never replaced.
Callers: the command line; tests and notebooks call `prepare`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlfuse.tasks.remainder import write_parquet
from rlfuse.tasks.settings import VERSION, Rows, WarmStart

DEFAULT_ROOT = Path(".cache/rlfuse/remainder")
"""From the current directory; `conf/experiment/quickstart.yaml` names it too."""
SETTINGS_FILE = "settings.json"


@dataclass(frozen=True, slots=True)
class PreparedTask:
    """Where things are, relative if the root was."""

    train_file: Path
    val_file: Path
    model_path: Path


def prepare(root: Path = DEFAULT_ROOT, settings: WarmStart | None = None, rows: Rows | None = None) -> PreparedTask:
    """Write the task into `root`, unless it is there already from the same settings."""
    settings, rows = settings or WarmStart(), rows or Rows()
    wanted = {"version": VERSION, "warm_start": asdict(settings), "rows": asdict(rows)}
    task = PreparedTask(root / "train.parquet", root / "val.parquet", root / "model")
    if _settings_of(root) == wanted:
        return task
    _refuse_foreign(root)
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=f".{root.name}-") as beside:
        built = Path(beside) / "built"
        built.mkdir()
        _build(built, settings, rows)
        (built / SETTINGS_FILE).write_text(json.dumps(wanted, indent=2) + "\n")
        _put(built, root, Path(beside) / "replaced", wanted)
    return task


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="rlfuse prepare", description="Write the quickstart's data and model.")
    parser.add_argument("--out", type=Path, default=DEFAULT_ROOT, help="folder to write (default: %(default)s)")
    root = parser.parse_args(argv).out
    started = time.monotonic()
    task = prepare(root)
    for name, path in (("train rows", task.train_file), ("val rows", task.val_file), ("model", task.model_path)):
        print(f"{name:<11} {path}")
    print(f"prepared in {time.monotonic() - started:.0f} s")
    return 0


def _settings_of(root: Path) -> object:
    """What `root` was built from; None where it was not."""
    try:
        return json.loads((root / SETTINGS_FILE).read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None


def _refuse_foreign(root: Path) -> None:
    empty = root.is_dir() and not any(root.iterdir())
    if root.exists() and not empty and not (root / SETTINGS_FILE).is_file():
        raise ValueError(
            f"--out: got {root}, which exists and was not written by `rlfuse prepare`; valid is a new or empty folder, "
            "or one that it wrote before. Choose another, or remove it."
        )


def _build(folder: Path, settings: WarmStart, rows: Rows) -> None:
    from rlfuse.tasks.warm_start import warm_start  # imports torch, which a prepared task need not wait for

    write_parquet(folder, rows.train, rows.val, rows.seed)
    warm_start(folder / "model", settings)


def _put(built: Path, root: Path, replaced: Path, wanted: object) -> None:
    """Move the complete folder to its place; what was there goes to `replaced`, and is removed with it."""
    with contextlib.suppress(FileNotFoundError):
        os.rename(root, replaced)
    try:
        os.rename(built, root)
    except OSError:
        # Another process put its own there in between: the same contents do as well.
        if _settings_of(root) != wanted:
            raise


if __name__ == "__main__":
    sys.exit(main())
