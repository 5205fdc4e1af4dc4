"""Decide whether a job may start, in which run folder, from which checkpoint and with which changes. Read-only.

Exception: it creates an empty folder to reserve a new name, which is removed if the job does not start.
"""

from __future__ import annotations

import atexit
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from rlfuse.config.custom_functions import absolute, map_functions, map_model_paths, with_values
from rlfuse.config.declare import LENGTH, Effect
from rlfuse.config.schema import Config
from rlfuse.errors import ConfigError, UserError
from rlfuse.parsing import parse_yaml
from rlfuse.run.resume import messages
from rlfuse.run.resume.changes import Change, all_changes, differences, input_digests, recorded_inputs, resolved
from rlfuse.run_folder import checkpoints, run_lock, status
from rlfuse.run_folder.reader import RunFolder, check_files, reading


class RunRefused(UserError):
    """The run folder is in use or has another run; the message lists commands to continue."""


class NothingToDo(Exception):
    """The run has completed all its steps; the message has a command to train longer."""

    def __init__(self, folder: Path, text: str):
        super().__init__(text)
        self.folder = folder


@dataclass(frozen=True, slots=True)
class Accepted:
    """A job that may start, compared with the run that it resumes."""

    config: Config
    checkpoint: Path | None
    before: dict[str, Any] | None
    """Settings of the resumed run; None if they can't be read."""
    changes: tuple[Change, ...]
    inputs: dict[str, str]
    step: int

    @property
    def message(self) -> str:
        """Table of the changes for the terminal, or why they are unknown; empty if nothing changed."""
        if self.checkpoint is None:
            return ""
        unknown = [] if self.before else [messages.not_compared(self.checkpoint)]
        return "\n".join([*messages.accepted(self.config, self.checkpoint, self.changes), *unknown])


def accept(config: Config) -> Accepted:
    """Accept a job. Raises RunRefused, ConfigError, or NothingToDo for a finished run."""
    if (count := config.trainer.nnodes) > 1 and config.cluster.ray_address is None:
        raise ConfigError(
            [
                f"trainer.nnodes={count}: Ray started by the run has only this machine. Start a cluster (ray start "
                "--head here, ray start --address=HEAD:6379 on the others, or jobs/several_nodes.*) and set "
                "cluster.ray_address=auto, or submit the job with rlfuse submit"
            ]
        )
    is_unnamed, config = config.trainer.experiment_name is None, with_run_name(with_local_paths(config), _reserve)
    folder = config.run_folder
    check_files(folder)
    if _is_running(folder):
        raise RunRefused(messages.in_use(folder))
    job = _compared(config)
    _refuse(job, is_unnamed)
    if is_unnamed and job.checkpoint and job.checkpoint.parent == folder:  # the job now has the name of the run
        print(
            f"Resuming {folder}, the last run of this configuration; start a new run with trainer.resume_mode=disable"
        )
    return job if job.checkpoint else replace(job, changes=())


def _compared(config: Config) -> Accepted:
    checkpoint = checkpoints.find(config.run_folder, config.trainer.resume_mode)
    folder = checkpoint.parent if checkpoint else config.run_folder
    check_files(folder)
    with reading(folder):
        step = int(checkpoints.read_state(checkpoint)["step"]) if checkpoint else None
        before, inputs = _config_of(folder), input_digests(config)
        if before and step is not None:  # later changes are abandoned with their steps
            before = RunFolder(folder, before).phases(step + 1)[-1][1]
        changes = all_changes(config, before or {}, recorded_inputs(folder, step), inputs)
        done = int(RunFolder(folder, {}).summary().get("steps", 0)) if step is None else step
    return Accepted(config, checkpoint, before, changes, inputs, done)


def _refuse(job: Accepted, is_unnamed: bool) -> None:
    """Raise RunRefused or NothingToDo if the job can't start in its folder."""
    config, checkpoint, folder, changes = job.config, job.checkpoint, job.config.run_folder, job.changes
    if config.trainer.resume_mode == "auto" and _is_finished(folder):
        if checkpoint is None or not _is_longer(job):
            if all(change.effect is Effect.IMMEDIATE or change.resume is LENGTH for change in changes):
                raise NothingToDo(folder, messages.finished(config, job.step, is_unnamed))
            raise RunRefused(messages.too_late(config, checkpoint, changes, job.step))
    elif (checkpoint is None or checkpoint.parent.resolve() != folder.resolve()) and _has_rows(folder):
        raise RunRefused(messages.used(config))
    if checkpoint is not None and any(change.effect is Effect.FIXED for change in changes):
        raise RunRefused(messages.differs(config, checkpoint, changes, job.before or {}))
    total = config.trainer.total_training_steps
    if checkpoint is not None and total is not None and job.step > total:
        raise NothingToDo(folder, messages.long_enough(config, job.step, total))


def _is_longer(job: Accepted) -> bool:
    was, trainer = {change.key: change.was for change in job.changes}, job.config.trainer
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps > job.step
    epochs = was.get("trainer.total_epochs", trainer.total_epochs)
    return "trainer.total_training_steps" in was or (trainer.total_epochs or 1) > (epochs or 1)


def with_run_name(config: Config, reserve: Callable[[Path], bool] = lambda folder: not folder.exists()) -> Config:
    """Return `config` with an experiment name. `reserve(folder)` returns False if another run has the folder."""
    if config.trainer.experiment_name is not None:
        return config

    def called(name: str) -> Config:
        return with_values(config, {"trainer.experiment_name": name})

    project = called("-").run_folder.parent
    if config.trainer.resume_mode == "auto" and (last := _last_run(project, config)):
        return called(last.name)
    estimator = config.algorithm.adv_estimator
    algorithm = "ppo" if estimator == "gae" else estimator.rpartition(":")[2]
    kind = config.trainer.task if config.trainer.is_offline else algorithm
    stem = re.sub(r"[^\w.+-]+", "_", config.trainer.job_name or "run")
    first = "-".join([*dict.fromkeys([stem, kind]), time.strftime("%Y%m%d-%H%M%S")])
    return called(next(name for name in messages.numbered(first) if reserve(project / name)))


def _last_run(project: Path, config: Config) -> Path | None:
    """Return the newest run of the same configuration; None if it can't resume."""
    settings = resolved(with_local_paths(config))
    written = sorted(project.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime, reverse=True)
    for folder in (path.parent for path in written):
        before = _config_of(folder)
        if before is None or before.get("trainer", {}).get("job_name") != config.trainer.job_name:
            continue
        if all(change.effect is Effect.IMMEDIATE for change in differences(before, settings)):
            can_resume = _is_finished(folder) or checkpoints.complete(folder) or not _has_rows(folder)
            return folder if can_resume and not _is_running(folder) else None
    return None


def _reserve(folder: Path) -> bool:
    """Create an empty folder, removed at exit if no run began in it; False if it exists."""

    def remove() -> None:
        with suppress(OSError):  # not empty: a run began
            folder.rmdir()

    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return False
    except OSError as error:
        raise ConfigError(
            [f"trainer.default_local_dir: {folder} can't be created ({error.strerror}); set it to a writable folder"]
        ) from error
    atexit.register(remove)
    return True


def _is_running(folder: Path) -> bool:
    if (locked := run_lock.is_locked(folder)) is not None:
        return locked
    state = status.read(folder)
    return state is not None and state.state == "running" and run_lock.is_written(folder)


def _is_finished(folder: Path) -> bool:
    state = status.read(folder)
    return state.state == "finished" if state else (folder / "summary.json").exists()


def _has_rows(folder: Path) -> bool:
    rows = folder / "metrics.jsonl"
    return rows.exists() and rows.stat().st_size > 0


def _config_of(folder: Path) -> dict[str, Any] | None:
    try:
        found = parse_yaml((folder / "config.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return found if isinstance(found, dict) else None


def with_local_paths(config: Config) -> Config:
    """Make paths of local models and custom files absolute, because workers have other working directories."""

    def local(path: str | None) -> str | None:
        return str(Path(path).expanduser().absolute()) if path and Path(path).expanduser().is_dir() else path

    return map_model_paths(map_functions(config, absolute), local)
