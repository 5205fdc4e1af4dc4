"""Decide whether a job may start, in which run folder and from which checkpoint, and what changed since. Read-only.

An empty folder that reserves a new name is the exception; it is removed if the job never starts.
"""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from rlfuse.config.changes import Change, differences
from rlfuse.config.declare import Effect
from rlfuse.config.documentation import by_name
from rlfuse.config.facts import reward_file, reward_functions
from rlfuse.config.own_functions import absolute, functions_named_by, replaced, with_functions_at, with_models_at
from rlfuse.config.schema import Config
from rlfuse.config.secrets import hidden
from rlfuse.errors import ConfigError, UserError
from rlfuse.files import RowFile, read_rows
from rlfuse.parsing import parse_json, parse_yaml
from rlfuse.run import refusals
from rlfuse.run_folder import checkpoints, run_lock, status
from rlfuse.run_folder.reader import RunFolder, check_files, reading

WHERE = ("trainer.project_name", "trainer.experiment_name", "trainer.job_name", "trainer.default_local_dir",
         "trainer.resume_mode")  # fmt: skip
LENGTH = ("trainer.total_training_steps", "trainer.total_epochs")


class RunRefused(UserError):
    """The run folder is another run's, or one that goes on; the message has the commands for what can be done."""


class NothingToDo(Exception):
    """The run is as long as it is to be; the message says so, and how to go on all the same."""

    def __init__(self, folder: Path, text: str):
        super().__init__(text)
        self.folder = folder


@dataclass(frozen=True, slots=True)
class Accepted:
    """A job that may begin."""

    config: Config
    checkpoint: Path | None
    changes: tuple[Change, ...]
    told: str
    """A table of the changes, or why there is none, for a person; empty where nothing changed."""
    inputs: dict[str, str] = field(default_factory=dict)


def accept(config: Config) -> Accepted:
    """Accept a job. Raises RunRefused, ConfigError, or NothingToDo for a finished run."""
    if (count := config.trainer.nnodes) > 1 and config.cluster.ray_address is None:
        raise ConfigError(
            [
                f"trainer.nnodes={count}: a run's own Ray is of this machine alone. Start a cluster (ray start --head "
                "here, ray start --address=HEAD:6379 on the others, or jobs/several_nodes.*) and set "
                "cluster.ray_address=auto, or send the job there by rlfuse submit"
            ]
        )
    given, config = config.trainer.experiment_name, named(with_local_paths(config), _keep)
    folder, mode = config.run_folder, config.trainer.resume_mode
    check_files(folder)
    if _runs_elsewhere(folder):
        raise RunRefused(refusals.goes_on(folder))
    checkpoint = checkpoints.find(folder, mode)
    of = checkpoint.parent if checkpoint else folder
    check_files(of)
    with reading(of):
        step = int(checkpoints.read_state(checkpoint)["step"]) if checkpoint else None
        before, had, now = _config_after(of, step), known_inputs(of, step), input_digests(config)
        found = differences(before, _resolved(config)) if before else []
        changes = tuple(judged_by_content([change for change in found if change.key not in WHERE], had, now))
    all_changes = (*changes, *edited_files(config, had, now))
    if mode == "auto" and _finished(folder):
        _judge_finished(config, checkpoint, all_changes, given is None)
    elif (checkpoint is None or of.resolve() != folder.resolve()) and _has_rows(folder):
        raise RunRefused(refusals.used(config))
    if checkpoint is None:
        return Accepted(config, None, (), "", now)
    if any(change.effect is Effect.FIXED for change in changes):
        raise RunRefused(refusals.differs(config, checkpoint, all_changes, before))
    total = config.trainer.total_training_steps
    if total is not None and step > total:
        raise NothingToDo(folder, refusals.long_enough(config, step, total))
    if given is None and of == folder:  # said here, as the run has its name from now on
        print(
            f"{folder} is the last run of this configuration: it goes on (trainer.resume_mode=disable starts another)"
        )
    told = [refusals.accepted(config, checkpoint, all_changes), "" if before else refusals.not_compared(checkpoint)]
    return Accepted(config, checkpoint, changes, "\n".join(filter(None, told)), now)


def named(config: Config, keep: Callable[[Path], bool] = lambda folder: not folder.exists()) -> Config:
    """Return `config` with a name: of the last run of this configuration to resume, else a new one."""
    if config.trainer.experiment_name is not None:
        return config

    def called(name: str) -> Config:
        return replaced(config, {"trainer.experiment_name": name})

    project = called("-").run_folder.parent
    if config.trainer.resume_mode == "auto":
        wanted = _resolved(with_local_paths(config))
        for folder, before in _newest_first(project):
            if before.get("trainer", {}).get("job_name") == config.trainer.job_name and all(
                change.effect is Effect.IMMEDIATE for change in differences(before, wanted)
            ):
                can_go_on = _finished(folder) or checkpoints.complete(folder) or not _has_rows(folder)
                if not can_go_on or _runs_elsewhere(folder):
                    break
                return called(folder.name)
    estimator = config.algorithm.adv_estimator
    algorithm = "ppo" if estimator == "gae" else estimator.rpartition(":")[2]
    what = "reward_model" if config.trainer.task == "reward_model" else algorithm
    stem = re.sub(r"[^\w.+-]+", "_", config.trainer.job_name or "run")
    first = "-".join([*dict.fromkeys([stem, what]), time.strftime("%Y%m%d-%H%M%S")])
    return called(next(name for name in refusals.numbered(first) if keep(project / name)))


def _keep(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return False
    except OSError as error:
        raise ConfigError(
            [f"trainer.default_local_dir: {folder} can't be made ({error.strerror}); set it to a folder of yours"]
        ) from error
    atexit.register(_drop, folder)
    return True


def _drop(folder: Path) -> None:
    with suppress(OSError):  # not empty: a run came of it
        folder.rmdir()


def _newest_first(project: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    written = sorted(project.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in written:
        if before := _config_of(path.parent):
            yield path.parent, before


def _runs_elsewhere(folder: Path) -> bool:
    if (locked := run_lock.is_locked(folder)) is not None:
        return locked
    state = status.read(folder)
    return state is not None and state.state == "running" and run_lock.is_written(folder)


def _finished(folder: Path) -> bool:
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


def _config_after(folder: Path, step: int | None) -> dict[str, Any] | None:
    """Return the configuration after this step: later changes are abandoned with their steps."""
    found = _config_of(folder)
    return RunFolder(folder, found).phases(step + 1)[-1][1] if found and step is not None else found


def _resolved(config: Config) -> dict[str, Any]:
    return hidden(dataclasses.asdict(config))


def with_local_paths(config: Config) -> Config:
    """Make folders of models and custom files absolute: workers have other working directories."""

    def local(path: str | None) -> str | None:
        return str(Path(path).expanduser().absolute()) if path and Path(path).expanduser().is_dir() else path

    return with_models_at(with_functions_at(config, absolute), local)


def _judge_finished(config: Config, checkpoint: Path | None, changes: Sequence[Change], unnamed: bool) -> None:
    steps = checkpoints.read_state(checkpoint)["step"] if checkpoint else _steps(config.run_folder)
    if checkpoint is not None and _longer(config, {change.key: change.was for change in changes}, steps):
        return
    learned = [each for each in changes if each.effect is not Effect.IMMEDIATE and each.key not in LENGTH]
    if not learned:
        raise NothingToDo(config.run_folder, refusals.finished(config, steps, unnamed))
    raise RunRefused(refusals.too_late(config, checkpoint, changes, steps))


def _longer(config: Config, was: Mapping[str, Any], steps: int) -> bool:
    trainer = config.trainer
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps > steps
    return LENGTH[0] in was or (trainer.total_epochs or 1) > (was.get(LENGTH[1], trainer.total_epochs) or 1)


def _steps(folder: Path) -> int:
    try:
        return int(parse_json((folder / "summary.json").read_text())["steps"])
    except (OSError, ValueError, TypeError, KeyError):
        return 0


INPUTS = "inputs.jsonl"
MODELS = ("model.path", "critic.path", "ref.path")
MOVED = "moved, or copied: the same config.json and weights of the same sizes"
END_BYTES = 1 << 16
"""Bytes of each file of weights: models of one family, trained further, have the same sizes."""
SHOWN = 12


def input_digests(config: Config) -> dict[str, str]:
    """The digest of each input that is here: of a user's functions by their file as named, of models by key."""
    found = dict[str, str]()
    for file in _custom_files(config):
        with suppress(OSError):
            found[file] = hashlib.sha256(Path(file).expanduser().read_bytes()).hexdigest()
    paths = (config.model.path, config.critic.path, config.ref.path)
    models = zip(MODELS, map(model_digest, paths), strict=True)
    return found | {key: digest for key, digest in models if digest is not None}


def _custom_files(config: Config) -> dict[str, str]:
    """Return each custom file as named, with the first key that names it."""
    named = [("reward.functions", function) for function in reward_functions(config)]
    found = dict[str, str]()
    for key, function in [*named, *functions_named_by(config)]:
        if file := reward_file(function):
            found.setdefault(file, key)
    return found


def model_digest(path: str | None) -> str | None:
    """The digest of a model's folder; None of a hub name, and where there are no weights."""
    if not path:
        return None
    folder = Path(path)
    try:
        digest = hashlib.sha256((folder / "config.json").read_bytes())
        weights = sorted(folder.glob("*.safetensors"))
        for file in weights:
            with file.open("rb") as content:
                size = content.seek(0, os.SEEK_END)
                content.seek(max(0, size - END_BYTES))
                digest.update(f"{file.name} {size} ".encode() + content.read())
    except OSError:
        return None
    return digest.hexdigest() if weights else None


def known_inputs(folder: Path, step: int | None) -> dict[str, str]:
    """The digests of what the run of this folder had after this step; None: after its last."""
    rows = (row for row in read_rows(folder / INPUTS) if step is None or row["step"] <= step)
    return {row["input"]: row["sha256"] for row in rows}


def note_inputs(folder: Path, step: int, now: Mapping[str, str]) -> None:
    """Append what is new after this step; rows of steps behind it, which are abandoned, go."""
    if not now and not (folder / INPUTS).exists():
        return
    with closing(RowFile(folder / INPUTS, keep=lambda row: row["step"] <= step)) as file:
        before = known_inputs(folder, step)
        new = {name: digest for name, digest in now.items() if before.get(name) != digest}
        file.append({"step": step, "input": name, "sha256": digest} for name, digest in new.items())


def judged_by_content(changes: Sequence[Change], before: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    """Changes of settings; that of a model's path by what is there."""

    def same(change: Change) -> bool:
        was = before.get(change.key) or model_digest(change.was if isinstance(change.was, str) else None)
        return was is not None and was == now.get(change.key)

    moved = {change.key for change in changes if change.key in MODELS and same(change)}
    return [replace(c, effect=Effect.IMMEDIATE, reason=MOVED) if c.key in moved else c for c in changes]


def edited_files(config: Config, before: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    """Files of functions with the same name and another text, as changes that are told like those of settings."""
    found = []
    for file, key in _custom_files(config).items():
        if file in before and file in now and before[file] != now[file]:
            resume = by_name()[key].resume
            shown = before[file][:SHOWN], now[file][:SHOWN]
            found.append(Change(file, *shown, resume.effect, f"edited: {resume.reason}"))
    return found
