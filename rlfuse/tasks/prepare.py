"""Everything that the bundled tasks need on disk: rows to train and validate on, and the model to start from.

Role: `rlfuse prepare [TASK]`, also `python -m rlfuse.tasks.prepare [TASK] [--out FOLDER]`. The folder then holds
`train.parquet`, `val.parquet`, `model/` and `settings.json`, for `long_video` also `clips/` and `val_blind.parquet`,
under the names that the experiment of the same name reads (`preferences`: `reward_model`). `judge` needs
`quickstart` beside it, whose policy it judges.
Invariants:
- `settings.json` holds everything the contents depend on: with the same settings a second call returns at once, with
  others the folder is built again;
- the folder appears whole: it is built under another name beside its place and renamed when complete;
- a folder that was not written by this module is never replaced.
Callers: the command line; tests and notebooks call `prepare` and `prepare_clips`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlfuse.tasks.clips import Clips, write_blind, write_task
from rlfuse.tasks.remainder import write_parquet
from rlfuse.tasks.settings import CLIPS, VERSION, ClipWarmStart, JudgeTraining, Labeller, Rows, WarmStart

DEFAULT_ROOT = Path(".cache/rlfuse/remainder")
"""From the current directory; `conf/experiment/quickstart.yaml` names it too."""
CLIPS_ROOT = Path(".cache/rlfuse/clips")
"""The same for `conf/experiment/long_video.yaml`."""
PREFERENCES_ROOT = Path(".cache/rlfuse/preferences")
"""The same for `conf/experiment/reward_model.yaml`."""
JUDGE_ROOT = Path(".cache/rlfuse/judge")
"""Rows with a reference answer each, and as `model` the judge; the policy is the quickstart's."""
SETTINGS_FILE = "settings.json"


@dataclass(frozen=True, slots=True)
class PreparedTask:
    """Where things are, relative if the root was."""

    root: Path

    @property
    def train_file(self) -> Path:
        """Rows to train on."""
        return self.root / "train.parquet"

    @property
    def val_file(self) -> Path:
        """Rows to validate on."""
        return self.root / "val.parquet"

    @property
    def val_blind_file(self) -> Path:
        """The same with blanked clips; only of the long-video task."""
        return self.root / "val_blind.parquet"

    @property
    def model_path(self) -> Path:
        """What training starts from."""
        return self.root / "model"


def prepare(root: Path = DEFAULT_ROOT, settings: WarmStart | None = None, rows: Rows | None = None) -> PreparedTask:
    """Write the quickstart's task into `root`, unless it is there already from the same settings."""
    settings, rows = settings or WarmStart(), rows or Rows()

    def build(folder: Path) -> None:
        from rlfuse.tasks.warm_start import warm_start  # imports torch, which a prepared task need not wait for

        write_parquet(folder, rows.train, rows.val, rows.seed)
        warm_start(folder / "model", settings)

    return _kept(root, {"warm_start": asdict(settings), "rows": asdict(rows)}, build)


def prepare_clips(
    root: Path = CLIPS_ROOT, settings: ClipWarmStart | None = None, clips: Clips | None = None
) -> PreparedTask:
    """Write the long-video task into `root`, unless it is there already from the same settings."""
    settings, clips = settings or ClipWarmStart(), clips or CLIPS

    def build(folder: Path) -> None:
        from rlfuse.tasks.clip_warm_start import clip_warm_start

        print(f"writing {clips.train + 2 * clips.val} clips", flush=True)
        write_task(folder, clips)
        write_blind(folder, clips)
        clip_warm_start(folder / "model", folder, clips, settings)

    return _kept(root, {"warm_start": asdict(settings), "clips": asdict(clips)}, build)


def prepare_preferences(
    root: Path = PREFERENCES_ROOT, settings: WarmStart | None = None, labeller: Labeller | None = None
) -> PreparedTask:
    """Write pairs of the quickstart's task into `root`, and the policy that its reward model starts from.

    The policy is the quickstart's, made here only if it was not before.
    """
    settings, labeller = settings or WarmStart(), labeller or Labeller()

    def build(folder: Path) -> None:
        from rlfuse.tasks.preferences import write_preferences

        write_preferences(folder, labeller)
        policy = prepare(root.parent / DEFAULT_ROOT.name, settings)
        shutil.copytree(policy.model_path, folder / "model")

    return _kept(root, {"warm_start": asdict(settings), "labeller": asdict(labeller)}, build)


def prepare_judge(
    root: Path = JUDGE_ROOT, settings: JudgeTraining | None = None, rows: Rows | None = None
) -> PreparedTask:
    """Write rows of the quickstart's task with reference answers into `root`, and a judge that compares with them."""
    settings, rows = settings or JudgeTraining(), rows or Rows()

    def build(folder: Path) -> None:
        from rlfuse.tasks.judging import train_judge, write_rows

        write_rows(folder, rows)
        train_judge(folder / "model", settings)

    return _kept(root, {"judge": asdict(settings), "rows": asdict(rows)}, build)


TASKS = {
    "quickstart": (DEFAULT_ROOT, prepare),
    "preferences": (PREFERENCES_ROOT, prepare_preferences),
    "judge": (JUDGE_ROOT, prepare_judge),
    "long_video": (CLIPS_ROOT, prepare_clips),
}
"""What experiments read: its folder, and what writes it."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="rlfuse prepare", description="Write a bundled task's data and model.")
    parser.add_argument("task", nargs="?", choices=TASKS, default="quickstart", help="(default: %(default)s)")
    roots = ", ".join(f"{root} for {name}" for name, (root, _) in TASKS.items())
    parser.add_argument("--out", type=Path, help=f"folder to write (default: {roots})")
    arguments = parser.parse_args(argv)
    root, write = TASKS[arguments.task]
    started = time.monotonic()
    task = write(arguments.out or root)
    for name, path in (("train rows", task.train_file), ("val rows", task.val_file), ("model", task.model_path)):
        print(f"{name:<11} {path}")
    print(f"prepared in {time.monotonic() - started:.0f} s")
    return 0


def _kept(root: Path, contents: dict[str, Any], build: Callable[[Path], None]) -> PreparedTask:
    """The task at `root`, built there by `build` unless `contents` says that it is what stands there."""
    wanted = json.loads(json.dumps({"version": VERSION} | contents))
    task = PreparedTask(root)
    if _settings_of(root) == wanted:
        return task
    _refuse_foreign(root)
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=f".{root.name}-") as beside:
        built = Path(beside) / "built"
        built.mkdir()
        build(built)
        (built / SETTINGS_FILE).write_text(json.dumps(wanted, indent=2) + "\n")
        _put(built, root, Path(beside) / "replaced", wanted)
    return task


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
