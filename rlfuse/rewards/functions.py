"""Finding a user's reward function: `path/file.py:function`, `package.module:function`, or a callable in a notebook.

Role: the configuration checks load every function once in the driver, so that a typing error is seen before any process
starts; reward workers load them again in theirs; notebooks call `score_table` (in `table`) with no cluster.
Invariants:
- a file is read afresh at every load: what is in it now is what runs, also in a notebook after an edit;
- its folder is appended to `sys.path` (never put first), so that it may import its neighbours and shadows nothing;
- everything that can go wrong is a `RewardError` that names the file, the line and what to change.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from rlfuse.rewards.items import RewardError
from rlfuse.rewards.results import headline, user_traceback
from rlfuse.rewards.shapes import RewardFunction, adapt

Spec = str | Callable[..., Any] | RewardFunction
MODEL_PART = "reward_model"
"""The reward model's name among the parts, which no function may take."""


def load_function(spec: Spec) -> RewardFunction:
    """The reward function that `spec` names or is."""
    if isinstance(spec, RewardFunction):
        return spec
    if callable(spec):
        return adapt(getattr(spec, "__name__", None) or type(spec).__name__, spec, spec)
    if not isinstance(spec, str) or not all(spec.rpartition(":")[::2]):
        raise RewardError(
            f"reward.functions: got {spec!r}; an entry has to be path/to/file.py:function or package.module:function. "
            + _functions_hint(spec)
        )
    place, _, name = spec.rpartition(":")
    if place.endswith(".py") or "/" in place:
        path = Path(place).expanduser().resolve()
        module, source = _load_file(path, spec), f"{path}:{name}"
    else:
        module, source = _load_module(place, spec), spec
    return adapt(name, _pick(module, name, spec), source)


def check_functions(specs: Sequence[Spec]) -> list[RewardFunction]:
    """Load all, give them distinct names, and report everything that is wrong in one `RewardError`."""
    functions, problems = [], []
    for spec in specs:
        try:
            functions.append(load_function(spec))
        except RewardError as error:
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise RewardError("\n\n".join(str(problem) for problem in problems))
    return _distinct(functions)


def _distinct(functions: list[RewardFunction]) -> list[RewardFunction]:
    """Equal names get their file or module in front (`math.compute_score`), then a number."""
    once = Counter([MODEL_PART, *(function.name for function in functions)])
    longer = [replace(f, name=f"{_origin(f)}.{f.name}") if once[f.name] > 1 else f for f in functions]
    seen: Counter[str] = Counter()
    named = []
    for function in longer:
        seen[function.name] += 1
        count = seen[function.name]
        named.append(function if count == 1 else replace(function, name=f"{function.name}_{count}"))
    return named


def _origin(function: RewardFunction) -> str:
    if isinstance(function.source, str):
        place = function.source.rpartition(":")[0]
        return Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
    return getattr(function.call, "__module__", "notebook").rpartition(".")[2]


def _load_file(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        near = sorted(entry.name for entry in path.parent.glob("*.py")) if path.parent.is_dir() else []
        hint = f"Python files in {path.parent}: {near}" if near else f"{path.parent} has no Python file"
        raise RewardError(f"reward.functions: {spec!r}: there is no file {path}. {hint}. Correct the path.")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    digest = hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()
    module = ModuleType(f"rlfuse_reward_{path.stem}_{digest}")
    module.__file__ = str(path)
    # Registered because dataclasses and pickle look a module up by its name.
    sys.modules[module.__name__] = module
    try:
        # Compiled here, not by importlib: its cache takes an edit within a second that keeps the length for no edit.
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        raise _import_problem(spec, error) from error
    return module


def _load_module(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise _import_problem(spec, error) from error
        raise RewardError(
            f"reward.functions: {spec!r}: there is no module {error.name!r} on sys.path. Install it, add its folder to "
            "PYTHONPATH, or give the file: path/to/file.py:function"
        ) from error
    except (Exception, SystemExit) as error:
        raise _import_problem(spec, error) from error


def _import_problem(spec: str, error: BaseException) -> RewardError:
    if isinstance(error, SyntaxError) and error.filename:
        line = (error.text or "").rstrip()
        mark = f"\n    {' ' * max((error.offset or 1) - 1, 0)}^" if line else ""
        return RewardError(
            f"reward.functions: {spec!r}: syntax error in {error.filename}, line {error.lineno}: {error.msg}\n"
            f"    {line}{mark}\nCorrect that line."
        )
    return RewardError(
        f"reward.functions: {spec!r} can't be imported: {headline(error)}. Correct the file, or install what it "
        f"imports.\n{user_traceback(error)}"
    )


def _pick(module: ModuleType, name: str, spec: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if callable(found):
        return found
    what = f"has no function {name!r}" if found is None else f"has {name!r}, but it is a {type(found).__name__}"
    raise RewardError(
        f"reward.functions: {spec!r}: {module.__file__} {what}. Its functions: {_functions_of(module) or 'none'}"
    )


def _functions_of(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]


def _functions_hint(spec: Any) -> str:
    """What to append, where the file was given without its function."""
    if not isinstance(spec, str) or not Path(spec).is_file():
        return "Put the function's name after a colon."
    try:
        names = _functions_of(_load_file(Path(spec).resolve(), spec))
    except RewardError:
        names = []
    return f"Append one of its functions: {names}" if names else "Put the function's name after a colon."
