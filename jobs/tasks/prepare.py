"""`rlfuse prepare [TASK] [--out FOLDER]`: write rows and starting models of the bundled tasks.

`settings.json` contains everything that the contents depend on: with equal settings an existing folder is reused,
otherwise it is rebuilt. Folders are written atomically, and folders of other origin are never replaced. One process at
a time writes a folder; others wait, and reuse it if the settings are equal.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlfuse.config.prepared import FOLDERS
from rlfuse.errors import UserError
from rlfuse.files import is_write_locked, write_lock
from rlfuse.progress import quiet_libraries
from rlfuse.tasks.clips import Clips, write_blind, write_task
from rlfuse.tasks.remainder import write_demonstrations, write_parquet
from rlfuse.tasks.settings import (
    CLIPS,
    IMAGES,
    VERSION,
    ClipWarmStart,
    Demonstrations,
    JudgeTraining,
    Labeller,
    Rows,
    WarmStart,
)

SETTINGS_FILE = "settings.json"
WAIT_S = 0.1


class PrepareError(UserError):
    """Invalid arguments of `rlfuse prepare`."""


@dataclass(frozen=True, slots=True)
class PreparedTask:
    """Paths of a prepared task, relative if the root is."""

    root: Path

    @property
    def train_file(self) -> Path:
        return self.root / "train.parquet"

    @property
    def val_file(self) -> Path:
        return self.root / "val.parquet"

    @property
    def val_blind_file(self) -> Path:
        """Validation rows with blank clips or images; only for tasks that have them."""
        return self.root / "val_blind.parquet"

    @property
    def model_path(self) -> Path:
        return self.root / "model"


def prepare(
    root: Path = FOLDERS["quickstart"], settings: WarmStart | None = None, rows: Rows | None = None
) -> PreparedTask:
    """Write the quickstart task to `root`, unless it exists with the same settings."""
    settings, rows = settings or WarmStart(), rows or Rows()

    def build(folder: Path) -> None:
        from rlfuse.tasks.warm_start import warm_start  # lazy: imports torch

        write_parquet(folder, rows.train, rows.val, rows.seed)
        warm_start(folder / "model", settings)

    return _kept(root, {"warm_start": asdict(settings), "rows": asdict(rows)}, build)


def prepare_clips(
    root: Path = FOLDERS["long_video"], settings: ClipWarmStart | None = None, clips: Clips | None = None
) -> PreparedTask:
    """Write a task of clips or images to `root`, unless it exists with the same settings."""
    settings, clips = settings or ClipWarmStart(), clips or CLIPS

    def build(folder: Path) -> None:
        from rlfuse.tasks.clip_warm_start import clip_warm_start

        print(f"Writing {clips.train + 2 * clips.val} {clips.kinds[0].folder}", flush=True)
        write_task(folder, clips)
        write_blind(folder, clips)
        clip_warm_start(folder / "model", folder, clips, settings)

    return _kept(root, {"warm_start": asdict(settings), "clips": asdict(clips)}, build)


def prepare_images(
    root: Path = FOLDERS["images"], settings: ClipWarmStart | None = None, images: Clips | None = None
) -> PreparedTask:
    """Write the images task to `root`, unless it exists with the same settings."""
    return prepare_clips(root, settings, images or IMAGES)


def prepare_demonstrations(
    root: Path = FOLDERS["demonstrations"], settings: WarmStart | None = None, rows: Demonstrations | None = None
) -> PreparedTask:
    """Write worked solutions of the quickstart task to `root`, and the quickstart's policy, which learns from them."""
    settings, rows = settings or WarmStart(), rows or Demonstrations()

    def build(folder: Path) -> None:
        write_demonstrations(folder, rows.train, rows.val, rows.seed)
        policy = prepare(root.parent / FOLDERS["quickstart"].name, settings)
        shutil.copytree(policy.model_path, folder / "model")

    return _kept(root, {"warm_start": asdict(settings), "demonstrations": asdict(rows)}, build)


def prepare_preferences(
    root: Path = FOLDERS["preferences"], settings: WarmStart | None = None, labeller: Labeller | None = None
) -> PreparedTask:
    """Write preference pairs of the quickstart task to `root`, and the policy that its reward model starts from.

    The policy is the quickstart's, which is prepared if necessary.
    """
    settings, labeller = settings or WarmStart(), labeller or Labeller()

    def build(folder: Path) -> None:
        from rlfuse.tasks.preferences import write_preferences

        write_preferences(folder, labeller)
        policy = prepare(root.parent / FOLDERS["quickstart"].name, settings)
        shutil.copytree(policy.model_path, folder / "model")

    return _kept(root, {"warm_start": asdict(settings), "labeller": asdict(labeller)}, build)


def prepare_pairs(root: Path = FOLDERS["pairs"], source: Path | None = None) -> PreparedTask:
    """Write preference pairs of the scored responses in the file `source` to `root`."""
    if source is None:
        raise PrepareError("rlfuse prepare pairs: --from RESPONSES is missing; `rlfuse generate --score` writes them")

    def build(folder: Path) -> None:
        from rlfuse.tasks.response_pairs import write_pairs

        write_pairs(folder, source)

    contents = source.read_bytes() if source.is_file() else b""  # the file is checked when it is read
    digest = hashlib.blake2b(contents, digest_size=8).hexdigest()
    return _kept(root, {"pairs": str(source.resolve()), "digest": digest}, build)


def prepare_judge(
    root: Path = FOLDERS["judge"], settings: JudgeTraining | None = None, rows: Rows | None = None
) -> PreparedTask:
    """Write rows of the quickstart task with reference answers to `root`, and a judge that compares answers."""
    settings, rows = settings or JudgeTraining(), rows or Rows()

    def build(folder: Path) -> None:
        from rlfuse.tasks.judging import train_judge, write_rows

        write_rows(folder, rows)
        train_judge(folder / "model", settings)

    return _kept(root, {"judge": asdict(settings), "rows": asdict(rows)}, build)


def prepare_gsm8k(root: Path = FOLDERS["gsm8k"], source: Path | None = None) -> PreparedTask:
    """Write GSM8K's rows to `root`: those of the copy `source`, else the hub's, else generated ones.

    Generated rows are replaced once the hub can be reached; without `source`, rows from an earlier copy are kept.
    """
    from rlfuse.tasks import gsm8k  # lazy: imports data readers

    def keep(origin: str, pairs: gsm8k.Pairs) -> PreparedTask:
        digest = hashlib.blake2b(json.dumps(pairs).encode(), digest_size=8).hexdigest()
        contents = {"gsm8k": origin, "digest": digest}
        return _kept(root, contents, lambda folder: gsm8k.write_rows(folder, pairs))

    if source is not None:
        return keep(str(source.expanduser().resolve()), gsm8k.read_copy(source))
    there = _settings_of(root)
    if isinstance(there, dict) and there.get("gsm8k", GENERATED) != GENERATED and there.get("version") == VERSION:
        return PreparedTask(root)
    try:
        return keep(gsm8k.REPOSITORY, gsm8k.download())
    except gsm8k.HubUnreachable as error:
        rows = gsm8k.generate_problems()
        counts = " and ".join(str(len(found)) for found in rows.values())
        print(f"{error}: writing {counts} generated problems instead, NOT GSM8K; use --from FOLDER for a copy of it")
        return keep(GENERATED, rows)


GENERATED = "made here, not GSM8K"


@dataclass(frozen=True, slots=True)
class Task:
    """Task of `rlfuse prepare`."""

    write: Callable[..., PreparedTask]
    what: str
    then: str


TASKS = {
    "quickstart": Task(
        prepare, "remainders by repeated subtraction: rows, a small model", "rlfuse train experiment=quickstart"
    ),
    "demonstrations": Task(
        prepare_demonstrations, "its worked solutions, for supervised fine-tuning", "rlfuse train experiment=sft"
    ),
    "preferences": Task(
        prepare_preferences, "pairs of its answers, for a reward model or DPO", "rlfuse train experiment=reward_model"
    ),
    "pairs": Task(
        prepare_pairs,
        "pairs of scored responses, --from `rlfuse generate`",
        "rlfuse train experiment=dpo model.path=MODEL data.train_files=[data/pairs/train.parquet] "
        "data.val_files=[data/pairs/val.parquet]",
    ),
    "judge": Task(prepare_judge, "a small judge of its answers; needs quickstart", "rlfuse train experiment=judge"),
    "long_video": Task(
        prepare_clips, "clips, questions about them, a small video model", "rlfuse train experiment=long_video"
    ),
    "images": Task(
        prepare_images, "images, questions about them, a small video model", "rlfuse train experiment=images"
    ),
    "gsm8k": Task(
        prepare_gsm8k,
        "GSM8K's rows, from the hub or --from a copy",
        "rlfuse plan algorithm=grpo model.path=MODEL data.train_files=[data/gsm8k/train.parquet] "
        "reward.functions=[rlfuse.rewards.verifiers.numeric:score]",
    ),
}


def main(argv: Sequence[str]) -> None:
    """Run `rlfuse prepare`. Raises PrepareError, DataError."""
    parser = argparse.ArgumentParser(prog="rlfuse prepare", description="Write a task's data and model.")
    parser.add_argument("task", nargs="?", metavar="TASK", help=f"{', '.join(TASKS)}; omit it to list them")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="output folder; default: as listed")
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FILE",
        help="gsm8k: folder or file with a copy of it; pairs: responses of `rlfuse generate --score`",
    )
    arguments = parser.parse_args(argv)
    if arguments.task is None:
        print(listing())
        return
    if arguments.task not in TASKS:
        near = difflib.get_close_matches(arguments.task, TASKS, n=1)
        meant = f"did you mean {near[0]}?" if near else f"tasks: {', '.join(TASKS)}"
        raise PrepareError(f"rlfuse prepare {arguments.task}: unknown task; {meant}")
    if arguments.source is not None and arguments.task not in ("gsm8k", "pairs"):
        raise PrepareError(
            f"--from {arguments.source}: only for gsm8k and pairs; {arguments.task} is generated: remove the option"
        )
    task, started = TASKS[arguments.task], time.monotonic()
    if arguments.task != "gsm8k":  # its download shows a progress bar
        quiet_libraries()
    more = [arguments.source] if arguments.source is not None else []
    root = task.write(arguments.out or FOLDERS[arguments.task], *more).root
    for path in sorted(path for path in root.iterdir() if path.name != SETTINGS_FILE):
        print(path)
    print(f"prepared in {time.monotonic() - started:.0f} s; next: {task.then}")


def listing() -> str:
    """Return the list of tasks, with their folders and next commands."""
    lines = ["rlfuse prepare TASK writes one of these:"]
    for name, task in TASKS.items():
        there = "ready" if (FOLDERS[name] / SETTINGS_FILE).is_file() else ""
        lines.append(f"  {name:<16}{task.what:<56}{there:<7}{FOLDERS[name]}")
        lines.append(f"  {'':<16}next: {task.then}")
    return "\n".join(lines)


def _kept(root: Path, contents: dict[str, Any], build: Callable[[Path], None]) -> PreparedTask:
    wanted = json.loads(json.dumps({"version": VERSION} | contents))
    task = PreparedTask(root)
    if is_write_locked(root):
        print(f"Waiting for another process that is writing {root}", flush=True)
        while is_write_locked(root):
            time.sleep(WAIT_S)
    if _settings_of(root) == wanted:
        return task
    _refuse_foreign(root)
    with write_lock(root), tempfile.TemporaryDirectory(dir=root.parent, prefix=f".{root.name}-") as temporary:
        built = Path(temporary) / "built"
        built.mkdir()
        build(built)
        (built / SETTINGS_FILE).write_text(json.dumps(wanted, indent=2) + "\n")
        _put(built, root, Path(temporary) / "replaced")
    return task


def _settings_of(root: Path) -> object:
    try:
        return json.loads((root / SETTINGS_FILE).read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None


def _refuse_foreign(root: Path) -> None:
    empty = root.is_dir() and not any(root.iterdir())
    if root.exists() and not empty and not (root / SETTINGS_FILE).is_file():
        raise PrepareError(
            f"--out: {root} exists and was not written by `rlfuse prepare`. Choose a new or empty folder, or remove "
            "this one."
        )


def _put(built: Path, root: Path, replaced: Path) -> None:
    """Move the complete folder into place; the old one is moved to `replaced`."""
    with contextlib.suppress(FileNotFoundError):
        os.rename(root, replaced)
    os.rename(built, root)
