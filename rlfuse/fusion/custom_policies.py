"""Load a policy by name: a built-in one, or a function `policy(snapshot) -> list[Decision]` in a user's file.

The decisions of a custom policy are checked against their snapshot (`decision_checks`) before any of them starts.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlfuse.config.custom_errors import function_error
from rlfuse.config.custom_functions import POLICY
from rlfuse.config.custom_modules import load
from rlfuse.config.declare import names_function
from rlfuse.errors import ConfigError, FunctionError
from rlfuse.fusion.decision_checks import InvalidDecision, check, listed
from rlfuse.fusion.decisions import Decision, Move, Policy, Snapshot, Switch
from rlfuse.fusion.policies import POLICIES

MAX_MOVES_WITHOUT_PROGRESS = 20  # maximum switches per slot and moves per sample without progress

_loaded: dict[str, CheckedPolicy] = {}


def load_policy(name: str, given_as: str = "", kwargs: Mapping[str, Any] | None = None) -> Policy:
    """Return the policy of that name, reading its file now. Raises FunctionError, naming the policy as `given_as`.

    `kwargs`: additional arguments of a custom policy; None: those with which it was last loaded.
    """
    given_as = given_as or f"{POLICY}={name}"
    if name in POLICIES:
        return POLICIES[name]
    if not names_function(name):
        near = difflib.get_close_matches(name, POLICIES, n=1, cutoff=0.5)
        valid = f"policies: {', '.join(POLICIES)}, or path/file.py:name for a custom policy"
        raise FunctionError(f"{given_as}: unknown policy; {f'did you mean {near[0]}?' if near else valid}")
    if kwargs is None:
        kwargs = _loaded[name].kwargs if name in _loaded else {}
    try:
        function = load(POLICY, name, arguments=kwargs)
    except ConfigError as error:
        raise FunctionError(error.problems[0].replace(f"{POLICY}={name}", given_as)) from error
    if not callable(function) or inspect.isclass(function):
        raise FunctionError(f"{given_as}: not a function; a policy is `def name(snapshot)` and returns a list")
    _loaded[name] = policy = CheckedPolicy(function, name, kwargs)
    return policy


def loaded_policy(name: str) -> Policy:
    """Return the policy as last loaded, so that editing its file during a run has no effect."""
    return _loaded[name] if name in _loaded else load_policy(name)


class CheckedPolicy:
    """Wrapper of a custom policy that raises FunctionError for invalid decisions."""

    def __init__(self, function: Callable[..., list[Decision]], name: str, kwargs: Mapping[str, Any]):
        self.function, self.__name__, self.kwargs = function, name, kwargs
        self._slots: Sequence | None = None  # slots of the current board
        self._unfinished = self._moves_without_progress = 0

    def __call__(self, view: Snapshot) -> list[Decision]:
        try:
            decisions = self.function(view, **self.kwargs)
        except (Exception, SystemExit) as error:
            raise function_error(f"the fusion policy {self.__name__}", error, self.function) from error
        if not isinstance(decisions, list | tuple):
            raise self._error(f"returned a {type(decisions).__name__}; a policy returns a list of decisions")
        try:
            check(view, decisions)
        except InvalidDecision as why:
            raise self._error(f"returned an invalid decision. {why}") from None
        if not decisions and not (view.in_flight or view.busy or view.scoring):
            raise self._error(f"returned no decision while nothing is running. Possible decisions: {_left_to_do(view)}")
        self._count(view, decisions)
        return list(decisions)

    def _count(self, view: Snapshot, decisions: Sequence[Decision]) -> None:
        """Raise FunctionError for endless switches and moves."""
        to_and_fro = [decision for decision in decisions if isinstance(decision, Switch | Move)]
        same = view.slots is self._slots and view.unfinished == self._unfinished
        if not same or len(to_and_fro) < len(decisions):
            self._slots, self._unfinished, self._moves_without_progress = view.slots, view.unfinished, 0
        self._moves_without_progress += sum(len(each.samples) if isinstance(each, Move) else 1 for each in to_and_fro)
        if self._moves_without_progress > MAX_MOVES_WITHOUT_PROGRESS * (len(view.slots) + view.unfinished):
            raise self._error(
                f"switched slots and moved samples {self._moves_without_progress} times without finishing a sample or "
                f"starting other work. Possible decisions: {_left_to_do(view)}"
            )

    def _error(self, what: str) -> FunctionError:
        return FunctionError(f"the fusion policy {self.__name__} {what}")


def _left_to_do(view: Snapshot) -> str:
    found = [f"Generate groups {listed(view.waiting)}"] if view.waiting else []
    found += [f"Score {kind} of {len(names)} samples" for kind, names in view.unscored.items() if names]
    gradients = "Train" if view.settings.pipelined else "Accumulate"
    found += [f"{gradients} {len(names)} samples of the {model}" for model, names in view.ready.items() if names]
    found += [f"OptimizerStep of the {model}" for model in view.ready_to_step]
    idle = f"idle engines {listed(view.idle_engines)}, idle trainers {listed(view.idle_trainers)}"
    return f"{'; '.join(found) or 'none yet'} ({idle})"
