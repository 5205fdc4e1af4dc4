"""List how two configurations differ, and what each change means on resume. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlfuse.config.declare import LAYOUT, Effect, Resume, as_typed
from rlfuse.config.documentation import by_name
from rlfuse.config.own_functions import traits_of
from rlfuse.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Change:
    """One key that differs."""

    key: str
    was: Any
    now: Any
    effect: Effect
    reason: str


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """List differences between two `config.yaml`s in the schema's order; a missing key has its default."""
    before, after = _settings(was), _settings(now)
    return [
        Change(key, before[key], value, effect.effect, effect.reason)
        for key, value in after.items()
        if _comparable(key, before[key]) != _comparable(key, value)
        for effect in [_effect(key, before, after)]
    ]


def _effect(key: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Resume:
    declared = by_name()[key].resume
    if declared.sometimes is None:
        return declared
    if declared is LAYOUT:
        return declared.sometimes if _loads(before, after) else declared
    return declared.sometimes if _trains_critic(before[key]) != _trains_critic(after[key]) else declared


def _trains_critic(estimator: str) -> bool:
    try:
        return traits_of(estimator).needs_critic
    except ConfigError:
        return False


def _loads(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Return whether a trainer of one layout can load checkpoints of the other."""
    stages, width = "training.pipeline_parallel_size", "training.tensor_model_parallel_size"
    pipelines = min(before[stages], after[stages]) > 1
    if (before[width] != after[width] and not pipelines) or before["actor.strategy"] != after["actor.strategy"]:
        return False
    zero = {each["actor.zero_stage"] for each in (before, after)}
    if len(zero) > 1 and zero != {1, 2}:  # these two cut it up alike
        return False
    slots = {each["trainer.nnodes"] * each["trainer.n_gpus_per_node"] for each in (before, after)}
    return pipelines or (before[stages] == after[stages] and len(slots) == 1)


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, key in by_name().items():
        value: Any = config
        for part in name.split("."):
            value = value.get(part, key.default) if isinstance(value, Mapping) else key.default
        found[name] = value
    return found


def unfolded(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Full name -> value, down to what is no dictionary, or an empty one."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        inner = isinstance(value, Mapping) and value
        found |= unfolded(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return found


def _comparable(key: str, value: Any) -> Any:
    if not by_name()[key].is_path or not value:
        return value
    return [str(Path(path).absolute()) for path in value] if isinstance(value, list) else str(Path(value).absolute())


def abbreviated(value: Any) -> str:
    """A value for the table: as it is typed, without the middle of one that is longer than 60 characters."""
    text = " ".join(as_typed(value).split())
    return text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}"
