"""Registries of algorithm functions: built-in ones by name, custom ones as `path/file.py:name`.

`advantages`, `losses` and `kl` each have a registry. Functions are called with the arguments that match their parameter
names. A custom file is executed once per process, until `clear_cache`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from rlfuse.config.custom_errors import function_error
from rlfuse.config.custom_modules import load, load_module
from rlfuse.config.declare import names_function
from rlfuse.config.estimators import Traits
from rlfuse.config.policy_losses import LossTraits
from rlfuse.errors import ConfigError

Function = Callable[..., Any]
NO_KWARGS: Mapping[str, Any] = MappingProxyType({})
_module = cache(load_module)


def advantage_estimator(**traits: bool | str) -> Callable[[Function], Function]:
    """Declare the traits of a custom estimator (`config.estimators.Traits`); without it they are the defaults."""
    Traits(**traits)  # type: ignore[arg-type]
    return lambda function: function


def policy_loss(**traits: bool) -> Callable[[Function], Function]:
    """Declare the traits of a custom policy loss (`config.policy_losses.LossTraits`); without it they are the
    defaults."""
    LossTraits(**traits)
    return lambda function: function


class Registry(dict[str, Function]):
    """Built-in functions that a key may name; `find` also loads custom ones."""

    def __init__(self, key: str):
        super().__init__()
        self.key = key

    def built_in(self, *names: str) -> Callable[[Function], Function]:
        """Register a function under these names (default: the function's name)."""

        def register(function: Function) -> Function:
            self.update(dict.fromkeys(names or (function.__name__,), function))
            return function

        return register

    def find(self, name: str, key: str | None = None) -> Function:
        """Return the function. ValueError for an unknown name, ConfigError for a custom one that can't be loaded.

        `key`: the configuration key for messages, if several keys share this registry.
        """
        key = key or self.key
        if name in self:
            return self[name]
        if not names_function(name):
            raise ValueError(f"{key}={name!r} is not known; use one of {', '.join(self)}, or path/file.py:name.")
        return load(key, name, _module)

    def call(
        self, name: str, given: Mapping[str, Any], kwargs: Mapping[str, Any] = NO_KWARGS, key: str | None = None
    ) -> Any:
        """Call the function with the entries of `given` that match its parameter names, and with all of `kwargs`.

        A custom function gets a float32 `mask`. FunctionError if it raises an exception.
        """
        function = self.find(name, key)
        chosen = {each: given[each] for each in parameters(function) if each in given} | dict(kwargs)
        if name in self:
            return function(**chosen)
        if "mask" in chosen:
            chosen["mask"] = chosen["mask"].float()
        try:
            return function(**chosen)
        except torch.OutOfMemoryError:
            raise
        except (Exception, SystemExit) as error:
            raise function_error(f"{key or self.key}={name}", error, function) from error

    def check_result(self, name: str, found: Any, like: Tensor, key: str | None = None) -> Tensor:
        """Return `found`, a function's result; ConfigError unless it is a tensor of the shape of `like`."""
        if isinstance(found, Tensor) and found.shape == like.shape:
            return found
        given = f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        wanted = f"a tensor [responses, tokens], here {list(like.shape)}"
        raise ConfigError(
            [f"{key or self.key}={name}: returned {given}; it must return {wanted}. Correct the function"]
        )


@cache
def parameters(function: Function) -> tuple[str, ...]:
    """Return the names of a function's parameters."""
    return tuple(inspect.signature(function).parameters)


def clear_cache() -> None:
    """Forget loaded files, so that changed ones are executed again."""
    _module.cache_clear()
