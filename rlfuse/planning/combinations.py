"""Enumerate combinations of values that no check refuses, without trying the whole product.

A refusal is evaluated as soon as the keys that it reads have values, once for each combination of those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from inspect import getattr_static
from types import FunctionType, MethodType
from typing import Any

from rlfuse.config.schema import Config

Refusal = Callable[[Any], bool]
"""Whether something speaks against a configuration: a pure function, of what it reads."""


def combinations(
    config: Config, values: Mapping[str, Sequence[object]], refusals: Sequence[Refusal]
) -> Iterator[dict[str, object]]:
    """Of these values of each key; all other keys are as `config` has them."""
    keys = list(values)

    def grown(settings: dict[str, object], open_refusals: Sequence[_Remembered]) -> Iterator[dict[str, object]]:
        left = []
        for refusal in open_refusals:
            refused = refusal(settings)
            if refused:
                return
            if refused is None:
                left.append(refusal)
        if len(settings) == len(keys):
            yield settings
            return
        key = keys[len(settings)]
        for value in values[key]:
            yield from grown({**settings, key: value}, left)

    yield from grown({}, [_Remembered(refusal, config, frozenset(keys)) for refusal in refusals])


class _Remembered:
    """A refusal that is asked once for each combination of the values that it reads."""

    def __init__(self, refusal: Refusal, config: Config, keys: frozenset[str]):
        self._refusal, self._config, self._keys = refusal, config, keys
        self._answers: dict[tuple[tuple[str, object], ...], bool | str] = {}
        """By what it has read: what it says, or which key it reads next."""

    def __call__(self, settings: Mapping[str, object]) -> bool | None:
        """What it says of all configurations with these settings; None where that takes other keys' values, too."""
        read: tuple[tuple[str, object], ...] = ()
        while True:
            if read not in self._answers:
                self._answers[read] = self._asked(dict(read))
            answer = self._answers[read]
            if isinstance(answer, bool):
                return answer
            if answer not in settings:
                return None
            read += ((answer, settings[answer]),)

    def _asked(self, settings: Mapping[str, object]) -> bool | str:
        try:
            return self._refusal(_Partial(self._config, self._keys, settings))
        except _Open as still:
            return still.key


class _Open(Exception):
    def __init__(self, key: str):
        super().__init__(key)
        self.key = key


class _Partial:
    """A configuration, or a group of it, of which some keys have no value yet: `_Open` where one of these is read."""

    def __init__(self, node: object, keys: frozenset[str], settings: Mapping[str, object], prefix: str = ""):
        self._node, self._keys, self._settings, self._prefix = node, keys, settings, prefix

    def __getattr__(self, name: str) -> Any:
        key = self._prefix + name
        if key in self._settings:
            return self._settings[key]
        if key in self._keys:
            raise _Open(key)
        known = getattr_static(type(self._node), name, None)
        if isinstance(known, property):
            return known.fget(self)
        if isinstance(known, FunctionType):
            return MethodType(known, self)
        value = getattr(self._node, name)
        return _Partial(value, self._keys, self._settings, f"{key}.") if is_dataclass(value) else value
