"""Find a policy by name: a built-in one, or a function `policy(snapshot) -> list[Decision]` in a user's file.

Decisions of a user's policy are checked against their snapshot (`refusals`) before any of them starts.
"""

from __future__ import annotations

import difflib
import inspect
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from rlfuse.config.declare import names_function
from rlfuse.config.own_errors import headline, user_traceback
from rlfuse.config.own_modules import module_of
from rlfuse.errors import UserError
from rlfuse.fusion.decisions import Decision, Move, Policy, Snapshot, Switch
from rlfuse.fusion.policies import POLICIES
from rlfuse.fusion.refusals import Refused, check, listed

AIMLESS = 20  # switches per slot and moves per sample without any progress before it is an error

_loaded: dict[str, Policy] = {}


class PolicyError(UserError):
    """A fusion policy can't be used, or decided what can't be done. The message says which, why and what is valid."""


def load_policy(name: str, given_as: str = "") -> Policy:
    """The policy of that name, from a file as it is now. `given_as`: how the person gave it. Raises PolicyError."""
    given_as = given_as or f"fusion.policy={name}"
    if name in POLICIES:
        return POLICIES[name]
    if not names_function(name):
        near = difflib.get_close_matches(name, POLICIES, n=1, cutoff=0.5)
        valid = f"policies: {', '.join(POLICIES)}, or path/file.py:name for your own"
        raise PolicyError(f"{given_as}: unknown policy; {f'did you mean {near[0]}?' if near else valid}")
    _loaded[name] = policy = CheckedPolicy(_function_of(name, given_as), name)
    return policy


def loaded_policy(name: str) -> Policy:
    """The policy as `load_policy` last loaded it in this process: an edit of its file during a run changes nothing."""
    return _loaded[name] if name in _loaded else load_policy(name)


class CheckedPolicy:
    """A user's policy, each of whose decisions can be carried out."""

    def __init__(self, function: Callable[[Snapshot], list[Decision]], name: str):
        self.function, self.__name__ = function, name
        self._slots: Sequence | None = None  # of the board that it decides on
        self._unfinished = self._aimless = 0

    def __call__(self, view: Snapshot) -> list[Decision]:
        try:
            decisions = self.function(view)
        except (Exception, SystemExit) as error:
            led = "".join(traceback.format_tb(error.__traceback__)[1:]).rstrip()
            raise self._error(f"raised {headline(error)}\n{led}".rstrip()) from error
        if not isinstance(decisions, list | tuple):
            raise self._error(f"returned a {type(decisions).__name__}; a policy returns a list of decisions")
        try:
            check(view, decisions)
        except Refused as why:
            raise self._error(f"decided what is not possible. {why}") from None
        if not decisions and not (view.in_flight or view.busy or view.scoring):
            raise self._error(f"decided nothing and nothing runs; what there is to do: {_left_to_do(view)}")
        self._count(view, decisions)
        return list(decisions)

    def _count(self, view: Snapshot, decisions: Sequence[Decision]) -> None:
        """Raise PolicyError for slots that switch and samples that move to and fro without end."""
        to_and_fro = [decision for decision in decisions if isinstance(decision, Switch | Move)]
        same = view.slots is self._slots and view.unfinished == self._unfinished
        if not same or len(to_and_fro) < len(decisions):
            self._slots, self._unfinished, self._aimless = view.slots, view.unfinished, 0
        self._aimless += sum(len(each.samples) if isinstance(each, Move) else 1 for each in to_and_fro)
        if self._aimless > AIMLESS * (len(view.slots) + view.unfinished):
            raise self._error(
                f"switched slots and moved samples {self._aimless} times while no sample was finished and no other "
                f"work began; what there is to do: {_left_to_do(view)}"
            )

    def _error(self, what: str) -> PolicyError:
        return PolicyError(f"the fusion policy {self.__name__} {what}")


def _left_to_do(view: Snapshot) -> str:
    found = [f"Generate groups {listed(view.waiting)}"] if view.waiting else []
    found += [f"Score {kind} of {len(names)} samples" for kind, names in view.unscored.items() if names]
    gradients = "Train" if view.settings.pipelined else "Accumulate"
    found += [f"{gradients} {len(names)} samples of the {model}" for model, names in view.ready.items() if names]
    found += [f"OptimizerStep of the {model}" for model in view.steppable]
    idle = f"idle engines {listed(view.idle_engines)}, idle trainers {listed(view.idle_trainers)}"
    return f"{'; '.join(found) or 'nothing yet'} ({idle})"


def _function_of(name: str, given_as: str) -> Callable[[Snapshot], list[Decision]]:
    file, _, function = name.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        near = listed(sorted(entry.name for entry in path.parent.glob("*.py")) if path.parent.is_dir() else [])
        raise PolicyError(f"{given_as}: there is no file {path}; Python files in its folder: {near}. Correct the path")
    try:
        module = module_of(path)
    except (Exception, SystemExit) as error:
        why = f"{given_as}: {path} can't be imported: {headline(error)}. Correct the file"
        raise PolicyError(f"{why}\n{user_traceback(error)}") from error
    policy = getattr(module, function, None)
    if policy is None:
        raise PolicyError(f"{given_as}: {path} has no function {function}; its functions: {listed(_functions(module))}")
    if why := _is_no_policy(policy):
        raise PolicyError(f"{given_as}: {function} of {path} {why}; a policy is `def {function}(snapshot)` and returns "
                          "a list of decisions")  # fmt: skip
    return policy


def _is_no_policy(policy: object) -> str:
    if not callable(policy) or inspect.isclass(policy):
        return (
            f"is a {'class' if inspect.isclass(policy) else f'value of type {type(policy).__name__}'}, not a function"
        )
    if inspect.iscoroutinefunction(policy) or inspect.isgeneratorfunction(policy):
        return "is async or a generator"
    try:
        signature = inspect.signature(policy)
    except ValueError:  # of some that are compiled nothing is known
        return ""
    try:
        signature.bind(None)
    except TypeError:
        return f"takes {signature}, which is not one snapshot"
    return ""


def _functions(module: ModuleType) -> list[str]:
    return [
        name for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]  # fmt: skip
