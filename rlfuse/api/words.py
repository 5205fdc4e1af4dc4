"""Express the arguments of a Python call as the words of a command line, so that both compose the same job. Pure.

Later words win: the job, then overrides, then keyword settings.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from rlfuse.config.declare import as_typed, did_you_mean
from rlfuse.config.documentation import by_name, groups, keys
from rlfuse.config.keys import PRESET_GROUPS, explain_name
from rlfuse.config.other_frameworks import OPENRLHF, TRL, VERL_TOP_GROUPS
from rlfuse.errors import ConfigError

ARGUMENTS = ("model", "reward", "dataset", "eval_dataset", "prompts")
"""Arguments of the functions in `commands` that take objects."""
MEANT = {
    "train_dataset": "dataset",
    "eval_dataset": "dataset",
    "prompts": "dataset",
    "dataset": "prompts",
    "reward_funcs": "reward",
}
"""Argument of TRL, or of another function in `commands` -> its counterpart where it is not an argument."""
HINTS = {
    "model.path": "save it with save_pretrained and give its folder",
    "reward.functions": "pass functions as the argument `reward`, with other objects in a closure",
    "data.train_files": "pass it as the argument `dataset`",
    "data.val_files": "pass it as the argument `eval_dataset`",
}
"""Key -> how to pass an object instead."""
PRESET = re.compile(rf"\+{{0,2}}({'|'.join(PRESET_GROUPS)})=(['\"]?)(?!null\b)([\w./-]+)\2")
"""An override that selects a preset."""
SPECIAL = re.compile(r"([\\()\[\]{}:=,\s])")
"""Characters that Hydra requires to be escaped in a key of a dictionary."""
KEY = re.compile(r"[^\x00-\x1f!\"#&';<>^`~\x7f-\U0010ffff]+")
"""Keys that Hydra can parse."""


def setting_words(settings: Mapping[str, Any], group: str = "") -> list[str]:
    """Return nested settings as overrides: {"trainer": {"save_freq": 5}} -> ["trainer.save_freq=5"].

    Raises ConfigError for a misspelt argument.
    """
    words: list[str] = []
    for key, value in settings.items():
        name = f"{group}{key}"
        known = (*groups(), *PRESET_GROUPS, *(VERL_TOP_GROUPS if isinstance(value, Mapping) else ()))
        if name.isidentifier() and not group and name not in known:
            raise ConfigError([_explain_argument(name, value)])
        if isinstance(value, Mapping) and name not in by_name():
            words += setting_words(value, f"{name}.")
        elif name in PRESET_GROUPS and isinstance(value, str):
            words.append(f"{name}={value}")
        else:
            words.append(f"{name}={as_hydra(value, name)}")
    return words


def _explain_argument(name: str, value: Any) -> str:
    """Return one line about a keyword argument that is neither an argument nor a group of keys."""
    is_name = name in (*TRL, *OPENRLHF, *(key.leaf for key in keys()))
    if is_name and name not in MEANT:
        return explain_name(name, as_typed(value) if isinstance(value, int | float | str) else None) or name
    meant = did_you_mean(MEANT.get(name, name), [*ARGUMENTS, *groups(), *PRESET_GROUPS], cutoff=0.65)
    return f"{name}: is not an argument or a group of keys{meant}"


def split_presets(
    overrides: Sequence[str], settings: Mapping[str, Any]
) -> tuple[dict[str, str], list[str], dict[str, Any]]:
    """Return the presets that these arguments select, and the arguments without them."""
    given = {name: each for name, each in settings.items() if name in PRESET_GROUPS and isinstance(each, str)}
    words = [*overrides, *(f"{name}={each}" for name, each in given.items())]
    selected = {word: match for word in words if (match := PRESET.fullmatch(word.strip()))}
    presets = {match[1]: match[3] for match in selected.values()}
    rest = {name: each for name, each in settings.items() if name not in given}
    return presets, [word for word in words if word not in selected], rest


def plain_value(value: Any, name: str) -> Any:
    """Return a value as None, bool, int, float, str, list or dict; arrays, numbers and enum members by their values.

    Raises ConfigError for a type that a job can't have.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    value = value.value if isinstance(value, Enum) else value
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, str | os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, Mapping):
        is_key = name in by_name()
        return {
            str(key): plain_value(each, name if is_key else f"{name}.{key}".lstrip(".")) for key, each in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [plain_value(each, name) for each in value]
    valid = "a setting is a number, text, path, None, or a list or dict of these"
    more = "; write the function in a file and give path/file.py:name" if inspect.isroutine(value) else ""
    more = f"; {HINTS[name]}" if name in HINTS else more
    raise ConfigError([f"{name}: got {type(value).__name__}; {valid}{more}"])


def as_hydra(value: Any, name: str) -> str:
    """Return a value in Hydra's syntax. Raises ConfigError for a type that a job can't have."""
    return _spelled(plain_value(value, name), name)


def _spelled(value: Any, name: str) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return QuotedString(text=value, quote=Quote.single).with_quotes()
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_escaped(key, name)}: {_spelled(each, name)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(_spelled(each, name) for each in value)}]"
    return repr(value)


def _escaped(key: str, name: str) -> str:
    if not KEY.fullmatch(key):
        raise ConfigError(
            [f"{name}: the key {key!r} has characters that an override can't have; write it in a job file"]
        )
    return SPECIAL.sub(r"\\\1", key)
