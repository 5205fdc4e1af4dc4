"""Algorithms' functions by name: built-in ones, registered where they stand, and a user's own, `path/file.py:name`.

Role: `advantages`, `losses` and `kl` each have a registry; the controller's process and trainer ranks look functions up
there. Every function is given by name what it asks for. Invariant: a file is executed once in a process, until
`clear_cache`, whatever becomes of it meanwhile.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import Tensor

from rlfuse.config.custom_modules import load, load_module
from rlfuse.config.declare import names_function
from rlfuse.config.estimators import Traits
from rlfuse.errors import ConfigError

Function = Callable[..., Any]
_module = cache(load_module)


def advantage_estimator(**traits: bool | str) -> Callable[[Function], Function]:
    """State the traits of a custom estimator (`config.estimators.Traits`); undecorated, it has the defaults."""
    Traits(**traits)  # type: ignore[arg-type]
    return lambda function: function


class Registry(dict[str, Function]):
    """The built-in functions that a key may name; `find` has a user's own, too."""

    def __init__(self, key: str):
        super().__init__()
        self.key = key

    def built_in(self, *names: str) -> Callable[[Function], Function]:
        """Register a function under these names, or its own."""

        def register(function: Function) -> Function:
            self.update(dict.fromkeys(names or (function.__name__,), function))
            return function

        return register

    def find(self, name: str, key: str | None = None) -> Function:
        """The function; ValueError for a name that is unknown, ConfigError for a user's own that can't be used.

        `key`: which names it, where several have the same functions.
        """
        key = key or self.key
        if name in self:
            return self[name]
        if not names_function(name):
            raise ValueError(f"{key}={name!r} is not known; use one of {', '.join(self)}, or path/file.py:name.")
        return load(key, name, _module)

    def check_result(self, name: str, found: Any, like: Tensor, key: str | None = None) -> Tensor:
        """What a function returned, if it is a matrix as `like`; ConfigError otherwise."""
        if isinstance(found, Tensor) and found.shape == like.shape:
            return found
        given = f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        wanted = f"a tensor of the shape of its matrices, {list(like.shape)}"
        raise ConfigError([f"{key or self.key}={name}: returned {given}; has to return {wanted}: correct the function"])


def call(function: Function, given: Mapping[str, Any]) -> Any:
    """What a function makes of those of `given` that it has parameters for."""
    return function(**{name: given[name] for name in parameters(function) if name in given})


@cache
def parameters(function: Function) -> tuple[str, ...]:
    """The names of a function's parameters."""
    return tuple(inspect.signature(function).parameters)


def clear_cache() -> None:
    """Files that were executed: what is in them now is what is found from now on."""
    _module.cache_clear()
