"""Messages for jobs that cannot start or resume with changes, with commands that can be pasted."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlfuse.config.changes import Change, abbreviated, unfolded
from rlfuse.config.declare import Effect, as_typed
from rlfuse.config.documentation import by_name
from rlfuse.config.foreign import renamed
from rlfuse.config.presets import contents
from rlfuse.config.schema import Config
from rlfuse.run_folder import checkpoints, status

GROUP, ESTIMATOR = "algorithm", "algorithm.adv_estimator"
"""The presets that decide about a setting which can't change in a run, and that setting."""


def goes_on(folder: Path) -> str:
    """Of a run that another process has under way."""
    state = status.read(folder)
    who = f"process {state.pid} on {state.host}, since {_date(state.started)}" if state else "another process"
    return (
        f"{folder} is the folder of a run that goes on: {who}. Nothing was touched. "
        f"Look at it by `rlfuse watch {shlex.quote(str(folder))}`, "
        f"wait for its end or stop it; or start another:\n  {_command(_name(_free(folder)))}"
    )


def finished(config: Config, steps: int, unnamed: bool = False) -> str:
    """Of a run that has done what it is asked for; `unnamed`: found by its configuration."""
    folder, trainer = config.run_folder, config.trainer
    state = status.read(folder)
    ended = (state and state.ended) or (folder / "summary.json").stat().st_mtime
    lines = [f"{folder} finished after {steps} steps on {_date(ended)}: nothing to do."]
    if checkpoints.complete(folder):
        by_epochs = f"trainer.total_epochs={(trainer.total_epochs or 1) + 1}"
        more = [by_epochs] if trainer.total_training_steps is None else _steps(config, 2 * steps)
        lines.append(f"  train longer  {_command(*_same(folder), *more)}")
    lines.append(f"  another run   {_command('trainer.resume_mode=disable' if unnamed else _name(_free(folder)))}")
    return "\n".join(lines)


def long_enough(config: Config, step: int, total: int) -> str:
    """Of a run that is beyond what it is asked for."""
    folder = config.run_folder
    return (
        f"{folder} is after step {step} already, and {total} are asked for: nothing to do.\n"
        f"  train longer  {_command(*_same(folder), *_steps(config, 2 * step))}\n"
        f"  another run   {_command(_name(_free(folder)))}"
    )


def used(config: Config) -> str:
    """Of a folder with a run that is not to be resumed, or can't be."""
    folder, mode = config.run_folder, config.trainer.resume_mode
    why = "finds nothing to go on from" if mode in ("auto", "disable") else "is a checkpoint of another"
    lines = [f"{folder} holds a run already, and trainer.resume_mode={mode} {why}. Nothing was touched."]
    if checkpoints.complete(folder):
        lines.append(f"  go on with it  {_command(*_same(folder), 'trainer.resume_mode=auto')}")
    return "\n".join([*lines, f"  another run    {_command(_name(_free(folder)))}"])


def differs(config: Config, checkpoint: Path, changes: Sequence[Change], before: Mapping[str, Any]) -> str:
    """Why `changes` can't be, and what can. `before`: the configuration of the run that the checkpoint is of."""
    folder = checkpoint.parent
    refused = [change for change in changes if change.effect is Effect.FIXED]
    what = "holds a run with other settings, which it can't go on with"
    lines = [f"{folder} {what}. Nothing was touched.", *table(changes)]
    if folder == config.run_folder:
        lines.append(f"go on with it    {_with_those_of(before, refused, *_same(folder))}")
    else:
        lines.append(f"go on from it    {_with_those_of(before, refused)}")
    return "\n".join([*lines, _as_new(config)])


def too_late(config: Config, checkpoint: Path | None, changes: Sequence[Change], steps: int) -> str:
    """Of a run that finished after so many steps, where no change could take effect any more."""
    folder = checkpoint.parent if checkpoint else config.run_folder
    what = f"finished after {steps} steps, so that no change of its settings would take effect"
    lines = [f"{folder} {what}. Nothing was touched.", *table(changes)]
    if checkpoint and not any(change.effect is Effect.FIXED for change in changes):
        lines.append(f"train longer with them  {_command(*_same(folder), *_steps(config, 2 * steps))}")
    return "\n".join([*lines, _as_new(config)])


def accepted(config: Config, checkpoint: Path, changes: Sequence[Change]) -> str:
    """Of a run that goes on with changes; empty where there are none."""
    if not changes:
        return ""
    lines = [f"The run goes on from {checkpoint} with settings that differ from before.", *table(changes)]
    if any(change.effect is Effect.EXPERIMENT for change in changes):
        lines.append(f"To keep it one experiment, start another run: {_command(_name(_free(config.run_folder)))}")
    return "\n".join(lines)


def not_compared(checkpoint: Path) -> str:
    """Of a checkpoint whose run's settings are not known."""
    return (
        f"The run goes on from {checkpoint}. Its settings could not be compared with those of before: "
        f"{checkpoint.parent} has no config.yaml that can be read."
    )


def table(changes: Sequence[Change]) -> list[str]:
    """Lines of a table of changes, the gravest first: key, before, now, what that means."""
    lines = []
    for effect in reversed(Effect):
        rows = [(c.key, abbreviated(c.was), abbreviated(c.now), c.reason) for c in changes if c.effect is effect]
        if rows:
            widths = [max(len(row[column]) for row in rows) for column in range(3)]
            lines.append(f"  {effect.value}:")
            lines += [
                f"    {key:<{widths[0]}}  {was:>{widths[1]}} -> {now:<{widths[2]}}  {why}"
                for key, was, now, why in rows
            ]
    return lines


def numbered(name: str) -> Iterator[str]:
    """The name, and others that begin so."""
    yield name
    yield from (f"{name}-{count}" for count in itertools.count(2))


def _as_new(config: Config) -> str:
    start = [] if config.trainer.resume_mode in ("auto", "disable") else ["trainer.resume_mode=auto"]
    return f"as a new run     {_command(_name(_free(config.run_folder)), *start)}"


def _with_those_of(before: Mapping[str, Any], refused: Sequence[Change], *settings: str) -> str:
    without: tuple[str, ...] = ()
    if any(change.key == ESTIMATOR for change in refused):
        without = (GROUP, ESTIMATOR)  # one beside the other could contradict it
        if (preset := _preset_of(before)) is not None:
            settings = (*settings, f"{GROUP}={preset}")
            refused = [change for change in refused if change.key != ESTIMATOR]
    return _command(*settings, *(_setting(change.key, change.was) for change in refused), without=without)


def _preset_of(before: Mapping[str, Any]) -> str | None:
    """Return the preset of conf/algorithm with the same estimator that shares most settings (more than half)."""
    from rlfuse.config.compose import conf_folder

    typed, had, found = {_key(word) for word in _typed()}, unfolded(before), dict[str, int]()
    for path in sorted((conf_folder() / GROUP).glob("*.yaml")):
        settings = _preset(path)
        agree = [had.get(key) == value for key, value in settings.items() if key not in typed or key == ESTIMATOR]
        if settings.get(ESTIMATOR) == had.get(ESTIMATOR) and 2 * sum(agree) > len(agree):
            found[path.stem] = 2 * sum(agree) - len(agree)
    return max(found, key=found.__getitem__) if found else None


def _preset(path: Path) -> dict[str, Any]:
    settings = contents(GROUP, path.stem, [path.parents[1]])
    return {key: value for key, value in settings.items() if key == ESTIMATOR or value != by_name()[key].default}


def _name(name: str) -> str:
    return _setting("trainer.experiment_name", name)


def _same(folder: Path) -> list[str]:
    return [] if {"-m", "--multirun"} & {*_typed()} else [_name(folder.name)]


def _setting(key: str, value: Any) -> str:
    plain = not isinstance(value, str) or re.fullmatch(r"[\w./:+@%-]*", value)
    return f"{key}={as_typed(value)}" if plain else f"{key}={json.dumps(value, ensure_ascii=False)}"


def _free(folder: Path) -> str:
    return next(name for name in numbered(folder.name) if not (folder.parent / name).exists())


def _typed() -> list[str]:
    return shlex.split(status.typed_command())


def _steps(config: Config, steps: int) -> list[str]:
    unlimited = [] if config.trainer.total_epochs is None else ["trainer.total_epochs=null"]
    return [f"trainer.total_training_steps={steps}", *unlimited]


def _command(*settings: str, without: Sequence[str] = ()) -> str:
    others = {*without, *(setting.partition("=")[0] for setting in settings)}
    typed = _typed() or ["rlfuse", "train", "..."]
    return shlex.join([*(word for word in typed if _key(word) not in others), *settings])


def _key(word: str) -> str:
    name, _, value = word.lstrip("+").partition("=")
    return renamed(name, value, frozenset(by_name())) or name


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
