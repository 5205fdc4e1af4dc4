"""Format problems of a configuration."""

from __future__ import annotations

import operator

from rlfuse.config.documentation import as_typed
from rlfuse.config.schema import Config


def value_of(config: Config, name: str) -> object:
    """The value of a key by its full name."""
    return operator.attrgetter(name)(config)


def problem(config: Config, name: str, valid: str, remedy: str) -> str:
    """`name` with the value received, the valid range and what to change."""
    return f"{name}={as_typed(value_of(config, name))}: {valid}; {remedy}"
