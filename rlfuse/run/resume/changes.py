"""List the differences of a job from the run that it resumes, by content, and their effects.

changes.jsonl  changed settings, with the step after which they changed
inputs.jsonl   digests of models and custom files, with the step
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
import os
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlfuse.config.custom_functions import custom_functions_of, traits_of
from rlfuse.config.declare import RESUME_FROM, RUN_NAME, Effect, Resume
from rlfuse.config.documentation import by_name
from rlfuse.config.facts import reward_file, reward_functions
from rlfuse.config.job_file import settings_of
from rlfuse.config.schema import Config
from rlfuse.config.secrets import hidden
from rlfuse.errors import ConfigError
from rlfuse.files import RowFile, read_rows

CHANGES, INPUTS = "changes.jsonl", "inputs.jsonl"
MOVED = Resume(Effect.IMMEDIATE, "moved or copied: same config.json, same sizes of weights")
END_BYTES = 1 << 16
"""Bytes hashed at the end of each weight file, since different models of one family have files of equal size."""
MODELS = ("model.path", "critic.path", "ref.path")
SHOWN = 12


@dataclass(frozen=True, slots=True)
class Change:
    """A changed key or custom file."""

    key: str
    was: Any
    now: Any
    resume: Resume

    @property
    def effect(self) -> Effect:
        return self.resume.effect


def all_changes(
    config: Config, was: Mapping[str, Any], inputs_before: Mapping[str, str], inputs: Mapping[str, str]
) -> tuple[Change, ...]:
    """Return changed settings (except the run name) and edited custom files. `was`: the run's `config.yaml`."""
    found = []
    for change in differences(was, resolved(config)) if was else []:
        if change.resume not in (RUN_NAME, RESUME_FROM):
            found.append(replace(change, resume=MOVED) if _is_moved(change, inputs_before, inputs) else change)
    for file, key in _custom_files(config).items():
        if file in inputs_before and file in inputs and inputs_before[file] != inputs[file]:
            resume = by_name()[key].resume
            effect = Effect.EXPERIMENT if resume.effect is Effect.FIXED else resume.effect  # the edited file is used
            edited = Resume(effect, f"edited: {resume.reason}")
            found.append(Change(file, inputs_before[file][:SHOWN], inputs[file][:SHOWN], edited))
    return tuple(found)


def _is_moved(change: Change, before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    if change.key not in MODELS:
        return False
    was = before.get(change.key) or _model_digest(change.was if isinstance(change.was, str) else None)
    return was is not None and was == now.get(change.key)


def resolved(config: Config) -> dict[str, Any]:
    """Return the content of config.yaml, secrets hidden."""
    return hidden(dataclasses.asdict(config))


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return the differences of two `config.yaml`s in the order of the schema; missing keys have their defaults."""
    before, after = _settings(was), _settings(now)
    return [
        Change(key, before[key], value, _effect(key, before, after))
        for key, value in after.items()
        if _comparable(key, before[key]) != _comparable(key, value)
    ]


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    given = dict(settings_of(config))
    return {name: given.get(name, key.default) for name, key in by_name().items()}


def _comparable(key: str, value: Any) -> Any:
    if not by_name()[key].is_path or not value:
        return value
    return [str(Path(path).absolute()) for path in value] if isinstance(value, list) else str(Path(value).absolute())


def _effect(key: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Resume:
    declared = by_name()[key].resume
    if declared.sometimes is None:
        return declared
    return declared.sometimes if _trains_critic(before[key]) != _trains_critic(after[key]) else declared


def _trains_critic(estimator: str) -> bool:
    try:
        return traits_of(estimator).needs_critic
    except ConfigError:
        return False


def input_digests(config: Config) -> dict[str, str]:
    """Return the digests of local inputs: of custom files by path, of models by key."""
    found = dict[str, str]()
    for file in _custom_files(config):
        with suppress(OSError):
            found[file] = hashlib.sha256(Path(file).expanduser().read_bytes()).hexdigest()
    models = {key: _model_digest(operator.attrgetter(key)(config)) for key in MODELS}
    return found | {key: digest for key, digest in models.items() if digest}


def _custom_files(config: Config) -> dict[str, str]:
    """Return each custom file as named, with the first key that names it."""
    named = [("reward.functions", function) for function in reward_functions(config)]
    found = dict[str, str]()
    for key, function in [*named, *custom_functions_of(config)]:
        if file := reward_file(function):
            found.setdefault(file, key)
    return found


def _model_digest(path: str | None) -> str | None:
    """Return the digest of a model's folder; None for hub names and folders without weights."""
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


def recorded_inputs(folder: Path, step: int | None) -> dict[str, str]:
    """Return the digests of a run's inputs after this step; None: after its last."""
    rows = (row for row in read_rows(folder / INPUTS) if step is None or row["step"] <= step)
    return {row["input"]: row["sha256"] for row in rows}


def record(folder: Path, step: int, changes: Sequence[Change], inputs: Mapping[str, str]) -> None:
    """Append changed settings and new digests after this step; remove rows of later, abandoned steps."""
    before, settings = recorded_inputs(folder, step), [each for each in changes if each.key in by_name()]
    new = [(name, digest) for name, digest in inputs.items() if before.get(name) != digest]
    for path, rows in (
        (folder / CHANGES, [{"key": each.key, "was": each.was, "is": each.now} for each in settings]),
        (folder / INPUTS, [{"input": name, "sha256": digest} for name, digest in new]),
    ):
        if rows or path.exists():
            with closing(RowFile(path, keep=lambda row: row["step"] <= step)) as file:
                file.append({"step": step, **row} for row in rows)
