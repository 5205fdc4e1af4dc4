"""The process that runs reward functions, so that a crash or a hang costs one sample and not the run.

Role: `RewardWorker` is the class of a Ray actor with no CPU of its own; `RewardPool` creates several and feeds each one
call at a time. It waits for nothing but the user's function, and is killed from outside when that takes too long.
Invariants:
- methods are ordinary ones: Ray then runs them on the main thread with no event loop around, so that a function may use
  `signal.alarm` or `asyncio.run`;
- nothing a user's code raises leaves as an exception, which Ray would wrap in its own: `start` gives a message, `score`
  gives failures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ray import cloudpickle

from rlfuse.cluster.children import heed_children
from rlfuse.rewards.functions import RewardFunction, load_function
from rlfuse.rewards.items import Item, Outcome, RewardError
from rlfuse.rewards.results import headline, user_traceback


class RewardWorker:
    """Loads the run's reward functions and calls them by name."""

    def __init__(self, sources: dict[str, str | bytes], timeout_s: float):
        self._sources = sources
        self._timeout_s = timeout_s
        self._functions: dict[str, RewardFunction] = {}
        heed_children()

    def start(self) -> str | None:
        """Load all functions; the reason in words if that failed."""
        try:
            for name, source in self._sources.items():
                self._functions[name] = replace(load_function(unpack(source)), name=name)
        except RewardError as error:
            return str(error)
        except (Exception, SystemExit) as error:
            return f"{headline(error)}\n{user_traceback(error)}"
        return None

    def score(self, name: str, items: Sequence[Item]) -> list[Outcome]:
        """One outcome for each item, in order."""
        return self._functions[name].score(items, self._timeout_s)


def pack(function: RewardFunction) -> str | bytes:
    """What another process loads the function from: its place in a file or module, or the callable by value."""
    return function.source if isinstance(function.source, str) else cloudpickle.dumps(function.source)


def unpack(source: str | bytes) -> object:
    """What `load_function` takes."""
    return cloudpickle.loads(source) if isinstance(source, bytes) else source
