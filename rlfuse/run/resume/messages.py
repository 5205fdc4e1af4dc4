"""Messages for jobs that can't start or that resume with changes, with commands to copy."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlfuse.config.declare import Effect, as_typed
from rlfuse.config.documentation import by_name
from rlfuse.config.job_file import settings_of
from rlfuse.config.other_frameworks import key_for_verl_name
from rlfuse.config.presets import contents
from rlfuse.config.schema import Config
from rlfuse.run.resume.changes import Change
from rlfuse.run_folder import checkpoints, status

GROUP, ESTIMATOR = "algorithm", "algorithm.adv_estimator"
"""Preset group and key of the estimator, which can't always be changed in a run."""


def in_use(folder: Path) -> str:
    """Return the message for the folder of a run in progress."""
    state = status.read(folder)
    who = f"process {state.pid} on {state.host}, started {_date(state.started)}" if state else "another process"
    text = (
        f"{folder} is in use by a running job: {who}. Nothing was changed. "
        f"Watch it with `rlfuse watch {shlex.quote(str(folder))}`; wait until it ends, or stop it."
    )
    return _with_commands(text, another_run=_new(folder))


def finished(config: Config, steps: int, is_unnamed: bool = False) -> str:
    """Return the message for a job whose run has finished. `is_unnamed`: the run was found by its configuration."""
    folder, trainer, state = config.run_folder, config.trainer, status.read(config.run_folder)
    ended = (state and state.ended) or (folder / "summary.json").stat().st_mtime
    by_epochs = [f"trainer.total_epochs={(trainer.total_epochs or 1) + 1}"]
    more = by_epochs if trainer.total_training_steps is None else _steps(config, 2 * steps)
    return _with_commands(
        f"{folder} finished after {steps} steps on {_date(ended)}: nothing to do.",
        train_longer=_command(*_same(folder), *more) if checkpoints.complete(folder) else None,
        another_run=_command("trainer.resume_mode=disable") if is_unnamed else _new(folder),
    )


def long_enough(config: Config, step: int, total: int) -> str:
    """Return the message for a run that has already completed more steps than the job has."""
    return _with_commands(
        f"{config.run_folder} has already completed {step} steps, and the job has {total}: nothing to do.",
        train_longer=_command(*_same(config.run_folder), *_steps(config, 2 * step)),
        another_run=_new(config.run_folder),
    )


def used(config: Config) -> str:
    """Return the message for a folder with a run that is not or can't be resumed."""
    folder, mode = config.run_folder, config.trainer.resume_mode
    why = {"auto": "finds no checkpoint in it", "disable": "does not resume it"}.get(
        mode, "names a checkpoint of another run"
    )
    auto = _command(*_same(folder), "trainer.resume_mode=auto")
    return _with_commands(
        f"{folder} already has a run, and trainer.resume_mode={mode} {why}. Nothing was changed.",
        resume_it=auto if checkpoints.complete(folder) else None,
        another_run=_new(folder),
    )


def differs(config: Config, checkpoint: Path, changes: Sequence[Change], before: Mapping[str, Any]) -> str:
    """Return the message for changed settings that are fixed. `before`: the settings of the checkpoint's run."""
    folder, fixed = checkpoint.parent, [change for change in changes if change.effect is Effect.FIXED]
    return _with_commands(
        f"{folder} has a run whose fixed settings differ from this job, so it can't resume. Nothing was changed.",
        *table(changes),
        resume_it=_with_settings_of(before, fixed, *(_same(folder) if folder == config.run_folder else [])),
        another_run=_as_new(config),
    )


def too_late(config: Config, checkpoint: Path | None, changes: Sequence[Change], steps: int) -> str:
    """Return the message for changed settings of a finished run."""
    folder = checkpoint.parent if checkpoint else config.run_folder
    can_resume = checkpoint and not any(change.effect is Effect.FIXED for change in changes)
    return _with_commands(
        f"{folder} finished after {steps} steps, so these changes would have no effect. Nothing was changed.",
        *table(changes),
        train_longer_with_them=_command(*_same(folder), *_steps(config, 2 * steps)) if can_resume else None,
        another_run=_as_new(config),
    )


def accepted(config: Config, checkpoint: Path, changes: Sequence[Change]) -> list[str]:
    """Return the lines for a run that resumes with changed settings; empty without changes."""
    if not changes:
        return []
    lines = [f"The run resumes from {checkpoint} with changed settings.", *table(changes)]
    if any(change.effect is Effect.EXPERIMENT for change in changes):
        lines.append(f"To keep the results comparable, start a new run: {_new(config.run_folder)}")
    return lines


def not_compared(checkpoint: Path) -> str:
    """Return the message for a checkpoint of a run with unknown settings."""
    return (
        f"The run resumes from {checkpoint}. Its previous settings could not be compared: "
        f"{checkpoint.parent} has no readable config.yaml."
    )


def table(changes: Sequence[Change]) -> list[str]:
    """Return a table of changes as lines, most severe first: key, before, now, reason."""
    lines = []
    for effect in reversed(Effect):
        rows = [(c.key, _short(c.was), _short(c.now), c.resume.reason) for c in changes if c.effect is effect]
        if rows:
            widths = [max(len(row[column]) for row in rows) for column in range(3)]
            lines.append(f"  {effect.value}:")
            lines += [
                f"    {key:<{widths[0]}}  {was:>{widths[1]}} -> {now:<{widths[2]}}  {why}"
                for key, was, now, why in rows
            ]
    return lines


def _short(value: Any) -> str:
    """Return a value as typed; the middle of values longer than 60 characters is omitted."""
    text = " ".join(as_typed(value).split())
    return text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}"


def _with_commands(*lines: str, **commands: str | None) -> str:
    given = {label.replace("_", " "): command for label, command in commands.items() if command}
    return "\n".join([*lines, *(f"  {label:<{max(map(len, given))}}  {command}" for label, command in given.items())])


def numbered(name: str) -> Iterator[str]:
    """Yield the name, then NAME-2, NAME-3, ..."""
    yield name
    yield from (f"{name}-{count}" for count in itertools.count(2))


def _new(folder: Path, *settings: str) -> str:
    """Return the command that starts a new run."""
    name = next(name for name in numbered(folder.name) if not (folder.parent / name).exists())
    return _command(_name(name), *settings)


def _as_new(config: Config) -> str:
    is_path = config.trainer.resume_mode not in ("auto", "disable")
    return _new(config.run_folder, *["trainer.resume_mode=auto"] * is_path)


def _with_settings_of(before: Mapping[str, Any], refused: Sequence[Change], *settings: str) -> str:
    """Return the command with the refused settings reset to the run's values."""
    without: tuple[str, ...] = ()
    if any(change.key == ESTIMATOR for change in refused):
        without = (GROUP, ESTIMATOR)  # the typed preset could contradict the setting
        if (preset := _preset_of(before)) is not None:
            settings = (*settings, f"{GROUP}={preset}")
            refused = [change for change in refused if change.key != ESTIMATOR]
    return _command(*settings, *(_setting(change.key, change.was) for change in refused), without=without)


def _preset_of(before: Mapping[str, Any]) -> str | None:
    """Return the preset of conf/algorithm with the same estimator and the most (over half) equal settings, or None."""
    from rlfuse.config.compose import conf_folder

    typed, had, found = {_key(word) for word in _typed()}, dict(settings_of(before)), dict[str, int]()
    for path in sorted((conf_folder() / GROUP).glob("*.yaml")):
        settings = contents(GROUP, path.stem, [path.parents[1]])
        settings = {
            key: value for key, value in settings.items() if key == ESTIMATOR or value != by_name()[key].default
        }
        agree = [had.get(key) == value for key, value in settings.items() if key not in typed or key == ESTIMATOR]
        if settings.get(ESTIMATOR) == had.get(ESTIMATOR) and 2 * sum(agree) > len(agree):
            found[path.stem] = 2 * sum(agree) - len(agree)
    return max(found, key=found.__getitem__) if found else None


def _name(name: str) -> str:
    return _setting("trainer.experiment_name", name)


def _same(folder: Path) -> list[str]:
    return [] if {"-m", "--multirun"} & {*_typed()} else [_name(folder.name)]


def _setting(key: str, value: Any) -> str:
    plain = not isinstance(value, str) or re.fullmatch(r"[\w./:+@%-]*", value)
    return f"{key}={as_typed(value)}" if plain else f"{key}={json.dumps(value, ensure_ascii=False)}"


def _typed() -> list[str]:
    return shlex.split(status.typed_command())


def _steps(config: Config, steps: int) -> list[str]:
    unlimited = [] if config.trainer.total_epochs is None else ["trainer.total_epochs=null"]
    return [f"trainer.total_training_steps={steps}", *unlimited]


def _command(*settings: str, without: Sequence[str] = ()) -> str:
    """Return the command of this process with these settings."""
    others = {*without, *(setting.partition("=")[0] for setting in settings)}
    typed = _typed() or ["rlfuse", "train", "..."]
    return shlex.join([*(word for word in typed if _key(word) not in others), *settings])


def _key(word: str) -> str:
    name, _, value = word.lstrip("+").partition("=")
    return key_for_verl_name(name, value, frozenset(by_name())) or name


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
