"""Reward functions whose calls fail in different ways, for tests of one process and of whole jobs.

`WAYS` lists exceptions and return values; the response `way N` selects the Nth, any other gets 1.
"""

import asyncio
import decimal
import math
import sys
import types
from collections import Counter

import numpy as np

HUGE = 10**309


class Wild(BaseException):
    """Custom subclass of BaseException."""


class Mute(Exception):
    def __str__(self):
        raise KeyboardInterrupt

    __repr__ = __str__


class Hidden(ValueError):
    """Object whose inspection raises."""

    __traceback__ = __cause__ = property(lambda self: 1 / 0)


class Nameless(type):
    __name__ = property(lambda cls: 1 / 0)


class Anonymous(Exception, metaclass=Nameless):
    pass


def in_circles():
    error = ValueError("round")
    error.__cause__ = TypeError("and round")
    error.__cause__.__cause__ = error
    return error


ERRORS = [
    KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, StopIteration, StopAsyncIteration, Wild, Mute,
    Hidden, Anonymous, in_circles, MemoryError, RecursionError, TimeoutError, AssertionError,
    lambda: SystemExit(b"7"), lambda: ValueError("a lone surrogate \ud800"), lambda: ValueError("x" * 10**5),
    lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), lambda: OSError(HUGE), lambda: KeyError(Mute()),
    lambda: ExceptionGroup("several", [ValueError("one"), Mute()]), lambda: ValueError("\n\nlate"),
    lambda: BaseExceptionGroup("more", [KeyboardInterrupt(), Wild()]), lambda: SyntaxError("s", ("f", -1, 9, None)),
]  # fmt: skip


def nested(depth=20_000):
    found = []
    for _ in range(depth):
        found = [found]
    return found


def circle():
    found = []
    found.append(found)
    return found


VALUES = [
    lambda: HUGE, lambda: -HUGE, lambda: 10**5000, lambda: math.nan, lambda: -math.inf, lambda: None, lambda: "",
    lambda: "\udfff", lambda: b"1", lambda: 1j, object, lambda: int, lambda: math, lambda: (x for x in ()), nested,
    circle, lambda: decimal.Decimal("sNaN"), lambda: np.zeros(2), lambda: np.float64("nan"), lambda: np.array("x"),
    lambda: np.array([None]), lambda: 10**400 * np.ones(1, object), dict, lambda: {"score": HUGE},
    lambda: {"score": None}, lambda: {"\ud800": 1}, lambda: {"score": {"score": 1}}, lambda: Counter(score=HUGE),
    lambda: Mute, Mute, Wild, lambda: Anonymous, lambda: range(HUGE), lambda: types.SimpleNamespace(item=3),
    lambda: np.longdouble("inf"),
]  # fmt: skip


def odd(method, error):
    """Return an object of which one method raises."""

    def fail(self, *arguments, **named):
        raise error() if callable(error) else error

    body = property(fail) if method in ("item", "tolist", "__class__", "shape") else fail
    return type("Odd", (), {method: body})()


def from_method(method, error):
    return lambda: odd(method, error)


def as_extra(made):
    return lambda: {"score": 1.0, "extra": made()}


def raised(error):
    def act():
        raise error()

    return act


WAYS = [raised(error) for error in ERRORS]
WAYS += VALUES
WAYS += [from_method(method, error) for method in ("__class__", "item", "__repr__") for error in ERRORS]
WAYS += [as_extra(from_method(method, error)) for method in ("__class__", "item", "__repr__") for error in ERRORS]
LATE = ERRORS
"""Errors that an async reward raises in a separate task."""


def act(response):
    if not response.startswith("way "):
        return 1.0
    return WAYS[int(response.removeprefix("way "))]()


def single(solution_str):
    return act(solution_str)


def several(samples):
    return [act(sample.response) for sample in samples]


async def later(solution_str):
    async def task():
        raise LATE[int(solution_str.removeprefix("late "))]()

    if solution_str.startswith("late "):
        return await asyncio.create_task(task())
    if solution_str == "break":
        sys.modules["rlfuse.rewards.api.shapes"].RewardFunction.score = None  # makes the process unusable
    return act(solution_str)
