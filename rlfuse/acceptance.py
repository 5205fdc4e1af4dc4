"""Whether a job may begin, and where: the name of its run, the checkpoint to go on from, what differs from before.

Role: `accept` is asked by `rlfuse.train` before torch and Ray are imported, and by `rlfuse.job` for whoever calls a run
directly. A run folder's own `config.yaml` is compared with the job's; `config.changes` says what each difference means.
Invariants: only reads, but for an empty folder that keeps a new name, which goes with the process if nothing came of
the job; so a job that is refused has touched nothing. A run that goes on elsewhere is joined by nobody.
"""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import json
import os
import re
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlfuse import checkpoints
from rlfuse.config.changes import Change, Effect, differences, shown
from rlfuse.config.checks import ConfigError
from rlfuse.config.documentation import as_typed, by_name
from rlfuse.config.foreign import renamed
from rlfuse.config.rewards import with_judges_at
from rlfuse.config.schema import Config
from rlfuse.config.secrets import hidden
from rlfuse.observe import status

SILENT_S = 20.0
"""A run of another host that writes nothing for so long, where it would every second, is dead: its process can't be
looked for. A job that a scheduler starts again elsewhere waits this long at the most."""
WHERE = ("trainer.project_name", "trainer.experiment_name", "trainer.job_name", "trainer.default_local_dir",
         "trainer.resume_mode")  # fmt: skip
"""What says where a run is; a folder that was moved is the same run."""
LENGTH = ("trainer.total_training_steps", "trainer.total_epochs")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where libyaml is


class RunRefused(ValueError):
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
    """With a name; model folders are absolute paths."""
    checkpoint: Path | None
    changes: tuple[Change, ...]
    """Since the run that the checkpoint is of."""
    told: str
    """A table of the changes, for a person; empty where there are none."""


def accept(config: Config) -> Accepted:
    """Raises RunRefused for what can't go on so, NothingToDo for a run that is finished, ConfigError as it is named.

    ConfigError also for several nodes without a cluster, which `rlfuse plan` and `rlfuse submit` don't mind.
    """
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
    refuse_running(folder)
    checkpoint = checkpoints.find(folder, mode)
    of = checkpoint.parent if checkpoint else folder
    found = differences(before, _resolved(config)) if (before := _config_of(of)) else []
    changes = tuple(change for change in found if change.key not in WHERE)
    if mode == "auto" and _finished(folder):
        _judge_finished(config, checkpoint, changes, given is None)
    elif (checkpoint is None or of.resolve() != folder.resolve()) and _has_rows(folder):
        raise RunRefused(_used(config))
    if checkpoint is None:
        return Accepted(config, None, (), "")
    refused = [change for change in changes if change.effect is Effect.FIXED]
    if refused:
        raise RunRefused(_differs(config, checkpoint, changes, refused))
    step, total = checkpoints.read_state(checkpoint)["step"], config.trainer.total_training_steps
    if total is not None and step > total:
        raise NothingToDo(folder, long_enough(config, step, total))
    if given is None and of == folder:  # said here, as the run has its name from now on
        print(
            f"{folder} is the last run of this configuration: it goes on (trainer.resume_mode=disable starts another)"
        )
    return Accepted(config, checkpoint, changes, _told(config, checkpoint, changes))


# Names ---------------------------------------------------------------------------------------------------------------


def named(config: Config, keep: Callable[[Path], bool] = lambda folder: not folder.exists()) -> Config:
    """`config` with a name, if it has none: under resume_mode=auto of the last run of this configuration, else new.

    `keep`: takes a folder for a new run; False if somebody has it already.
    """
    if config.trainer.experiment_name is not None:
        return config

    def called(name: str) -> Config:
        return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, experiment_name=name))

    project = called("-").run_folder.parent
    if config.trainer.resume_mode == "auto":
        wanted = _resolved(with_local_paths(config))
        for folder, before in _newest_first(project):
            if all(change.effect is Effect.BESIDE for change in differences(before, wanted)):
                if _runs_elsewhere(folder) or (_has_rows(folder) and not _goes_on(folder)):
                    break
                return called(folder.name)
    algorithm = "ppo" if config.uses_critic else config.algorithm.adv_estimator
    what = "reward_model" if config.trainer.task == "reward_model" else algorithm
    stem = re.sub(r"[^\w.+-]+", "_", config.trainer.job_name or "run")
    first = "-".join([*dict.fromkeys([stem, what]), time.strftime("%Y%m%d-%H%M%S")])
    return called(next(name for name in _numbered(first) if keep(project / name)))


def _numbered(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}-{count}" for count in itertools.count(2))


def _keep(folder: Path) -> bool:
    """Make the folder, for which nobody else can then have the name."""
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
    """Runs of a project whose configuration can be read."""
    written = sorted(project.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in written:
        if before := _config_of(path.parent):
            yield path.parent, before


# What a folder holds -------------------------------------------------------------------------------------------------


def refuse_running(folder: Path) -> None:
    """RunRefused if another process has this run under way."""
    if _runs_elsewhere(folder):
        state = status.read(folder)
        raise RunRefused(
            f"{folder} is the folder of a run that goes on: process {state.pid} on {state.host}, since "
            f"{_date(state.started)}. Nothing was touched. Look at it by `rlfuse watch {shlex.quote(str(folder))}`, "
            f"wait for its end or stop it; or start another:\n  {_command(_name(_free(folder)))}"
        )


def _runs_elsewhere(folder: Path) -> bool:
    state = status.read(folder)
    if state is None or state.now != "running":
        return False
    if state.host == socket.gethostname():
        return state.pid != os.getpid()
    seen, until = _last_sign(folder), time.time() + SILENT_S
    while seen + SILENT_S > time.time() and time.time() < until:
        time.sleep(SILENT_S / 20)
        if _last_sign(folder) > seen:
            return True
    return False


def _last_sign(folder: Path) -> float:
    """When a run last wrote something, in seconds since the epoch."""
    signs = (folder / name for name in (status.FILE, "live.json", "events.jsonl", "metrics.jsonl"))
    return max(sign.stat().st_mtime for sign in signs if sign.exists())


def _finished(folder: Path) -> bool:
    """Whether its last start came to its end."""
    state = status.read(folder)
    return state.state == "finished" if state else (folder / "summary.json").exists()


def _goes_on(folder: Path) -> bool:
    return _finished(folder) or bool(checkpoints.complete(folder))


def _has_rows(folder: Path) -> bool:
    rows = folder / "metrics.jsonl"
    return rows.exists() and rows.stat().st_size > 0


def _config_of(folder: Path) -> dict[str, Any] | None:
    """Its `config.yaml`; None where there is none, or one that is damaged: nothing can be compared then."""
    try:
        found = yaml.load((folder / "config.yaml").read_text(), _LOADER)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    return found if isinstance(found, dict) else None


def _resolved(config: Config) -> dict[str, Any]:
    """As it stands in `config.yaml`."""
    return hidden(dataclasses.asdict(config))


def with_local_paths(config: Config) -> Config:
    """Model folders as absolute paths: workers may have another working directory. Hub names stay as they are."""

    def local(path: str | None) -> str | None:
        return str(Path(path).expanduser().absolute()) if path and Path(path).expanduser().is_dir() else path

    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, path=local(config.model.path)),
        critic=dataclasses.replace(config.critic, path=local(config.critic.path)),
        ref=dataclasses.replace(config.ref, path=local(config.ref.path)),
        reward=dataclasses.replace(
            config.reward,
            model_path=local(config.reward.model_path),
            functions=with_judges_at(config.reward.functions, local),
        ),
    )


def _judge_finished(config: Config, checkpoint: Path | None, changes: Sequence[Change], unnamed: bool) -> None:
    """Returns only if the finished run is to be longer from now on, and can be."""
    steps = checkpoints.read_state(checkpoint)["step"] if checkpoint else _steps(config.run_folder)
    if checkpoint is not None and _longer(config, {change.key: change.was for change in changes}, steps):
        return
    learned = [each for each in changes if each.effect is not Effect.BESIDE and each.key not in LENGTH]
    if not learned:
        raise NothingToDo(config.run_folder, finished(config, steps, unnamed))
    raise RunRefused(_differs(config, checkpoint, changes, learned, steps))


def _longer(config: Config, was: Mapping[str, Any], steps: int) -> bool:
    """Whether a finished run of so many steps has some left; by epochs the data alone can tell, so it may turn out."""
    trainer = config.trainer
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps > steps
    return LENGTH[0] in was or trainer.total_epochs > was.get(LENGTH[1], trainer.total_epochs)


def _steps(folder: Path) -> int:
    """That a finished run without a checkpoint took."""
    try:
        return int(json.loads((folder / "summary.json").read_text())["steps"])
    except (OSError, ValueError, TypeError, KeyError):
        return 0


# What is said --------------------------------------------------------------------------------------------------------


def finished(config: Config, steps: int, unnamed: bool = False) -> str:
    """Of a run that has done what it is asked for; `unnamed`: found by its configuration."""
    folder, trainer = config.run_folder, config.trainer
    state = status.read(folder)
    ended = (state and state.ended) or (folder / "summary.json").stat().st_mtime
    lines = [f"{folder} finished after {steps} steps on {_date(ended)}: nothing to do."]
    if checkpoints.complete(folder):
        whole = trainer.total_training_steps is not None
        more = f"training_steps={2 * steps}" if whole else f"epochs={trainer.total_epochs + 1}"
        lines.append(f"  train longer  {_command(*_same(folder), f'trainer.total_{more}')}")
    lines.append(f"  another run   {_command('trainer.resume_mode=disable' if unnamed else _name(_free(folder)))}")
    return "\n".join(lines)


def long_enough(config: Config, step: int, total: int) -> str:
    """Of a run that is beyond what it is asked for."""
    folder = config.run_folder
    return (
        f"{folder} is after step {step} already, and {total} are asked for: nothing to do.\n"
        f"  train longer  {_command(*_same(folder), f'trainer.total_training_steps={2 * step}')}\n"
        f"  another run   {_command(_name(_free(folder)))}"
    )


def _used(config: Config) -> str:
    """Of a folder with a run that is not to be resumed, or can't be."""
    folder, mode = config.run_folder, config.trainer.resume_mode
    why = "finds nothing to go on from" if mode in ("auto", "disable") else "is a checkpoint of another"
    lines = [f"{folder} holds a run already, and trainer.resume_mode={mode} {why}. Nothing was touched."]
    if checkpoints.complete(folder):
        lines.append(f"  go on with it  {_command(*_same(folder), 'trainer.resume_mode=auto')}")
    return "\n".join([*lines, f"  another run    {_command(_name(_free(folder)))}"])


def _differs(
    config: Config, checkpoint: Path | None, changes: Sequence[Change], against: Sequence[Change], steps: int = -1
) -> str:
    """Why `changes` can't be, and what can. `steps`: of a finished run, where nothing could take effect any more."""
    folder = checkpoint.parent if checkpoint else config.run_folder
    over = f" finished after {steps} steps, so that no change of its settings would take effect"
    what = over if steps >= 0 else " holds a run with other settings, which it can't go on with"
    lines = [f"{folder}{what}. Nothing was touched.", *table(changes)]
    kept = [_setting(change.key, change.was) for change in against]
    if steps >= 0:
        if checkpoint and not any(change.effect is Effect.FIXED for change in changes):
            more = f"trainer.total_training_steps={2 * steps}"
            lines.append(f"train longer with them  {_command(*_same(folder), more)}")
    elif folder == config.run_folder:
        lines.append(f"go on with it    {_command(*_same(folder), *kept)}")
    else:
        lines.append(f"go on from it    {_command(*kept)}")
    start = [] if config.trainer.resume_mode in ("auto", "disable") else ["trainer.resume_mode=auto"]
    lines.append(f"as a new run     {_command(_name(_free(config.run_folder)), *start)}")
    return "\n".join(lines)


def _told(config: Config, checkpoint: Path, changes: Sequence[Change]) -> str:
    """Of a run that goes on with changes."""
    if not changes:
        return ""
    lines = [f"The run goes on from {checkpoint} with settings that differ from before.", *table(changes)]
    if any(change.effect is Effect.EXPERIMENT for change in changes):
        lines.append(f"To keep it one experiment, start another run: {_command(_name(_free(config.run_folder)))}")
    return "\n".join(lines)


def table(changes: Sequence[Change]) -> list[str]:
    """Lines of a table of changes, the gravest first: key, before, now, what that means."""
    lines = []
    for effect in reversed(Effect):
        rows = [(c.key, shown(c.was), shown(c.now), c.reason) for c in changes if c.effect is effect]
        if rows:
            widths = [max(len(row[column]) for row in rows) for column in range(3)]
            lines.append(f"  {effect.value}:")
            lines += [
                f"    {key:<{widths[0]}}  {was:>{widths[1]}} -> {now:<{widths[2]}}  {why}"
                for key, was, now, why in rows
            ]
    return lines


def _name(name: str) -> str:
    return _setting("trainer.experiment_name", name)


def _same(folder: Path) -> list[str]:
    """What names the run of this folder; a sweep names its own."""
    return [] if {"-m", "--multirun"} & {*shlex.split(status.typed_command())} else [_name(folder.name)]


def _setting(key: str, value: Any) -> str:
    """As Hydra reads it: a sweep's names have an equals sign, for one."""
    plain = not isinstance(value, str) or re.fullmatch(r"[\w./:+@%-]*", value)
    return f"{key}={as_typed(value)}" if plain else f"{key}={json.dumps(value, ensure_ascii=False)}"


def _free(folder: Path) -> str:
    """A name beside it that nobody has."""
    return next(name for name in _numbered(folder.name) if not (folder.parent / name).exists())


def _command(*settings: str) -> str:
    """The command of this process with other settings, ready to paste."""
    keys, known = [setting.partition("=")[0] for setting in settings], frozenset(by_name())

    def key(word: str) -> str:
        name, _, value = word.lstrip("+").partition("=")
        return renamed(name, value, known) or name

    typed = shlex.split(status.typed_command()) or ["rlfuse", "train", "..."]
    return shlex.join([*(word for word in typed if key(word) not in keys), *settings])


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
