"""Express the arguments of a Python call as the words of a command line, so that both compose the same job. Pure.

Later words win: the job, then overrides, then keyword settings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from rlfuse.config.documentation import by_name
from rlfuse.config.keys import PRESET_GROUPS
from rlfuse.errors import ConfigError

SPECIAL = re.compile(r"([\\()\[\]{}:=,\s])")
"""Characters that Hydra requires to be escaped in a key of a dictionary."""


def setting_words(settings: Mapping[str, Any], group: str = "") -> list[str]:
    """Return nested settings as overrides: {"trainer": {"save_freq": 5}} -> ["trainer.save_freq=5"]."""
    words: list[str] = []
    for key, value in settings.items():
        name = f"{group}{key}"
        if isinstance(value, Mapping) and name not in by_name():
            words += setting_words(value, f"{name}.")
        elif name in PRESET_GROUPS and isinstance(value, str):
            words.append(f"{name}={value}")
        else:
            words.append(f"{name}={as_hydra(value, name)}")
    return words


def as_hydra(value: Any, name: str) -> str:
    """Return a value in Hydra's syntax. Raises ConfigError for a type that a job can't have."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | os.PathLike):
        return QuotedString(text=os.fspath(value), quote=Quote.single).with_quotes()
    if isinstance(value, Mapping):
        pairs = [f"{_escaped(str(key))}: {as_hydra(each, name)}" for key, each in value.items()]
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, Sequence):
        return f"[{', '.join(as_hydra(each, name) for each in value)}]"
    valid = "a setting is a number, text, path, None, or a list or dict of these"
    more = "; write the function in a file and give path/file.py:name" if callable(value) else ""
    raise ConfigError([f"{name}: got {type(value).__name__}; {valid}{more}"])


def _escaped(key: str) -> str:
    return SPECIAL.sub(r"\\\1", key)
