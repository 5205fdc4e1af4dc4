"""Load a custom reward: `path/file.py:function`, `package.module:function`, a URL, or an object in a notebook.

An unchanged file is one module whose globals its functions share; an edited one is loaded again. Every problem is a
`RewardError` with file, line and remedy. A URL is a service with OpenRLHF's payload:

    POST {"query": [prompt + response, ...], "prompts": [...], "labels": [...]}
    200  {"rewards": [...], "scores": [...], "extra_logs": {...}}

Any other answer is a failure with the service's message, never a number.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from rlfuse.config.custom_errors import headline, user_traceback
from rlfuse.config.custom_modules import load_module
from rlfuse.config.rewards import JUDGE, is_url
from rlfuse.errors import RewardError
from rlfuse.files import json_safe
from rlfuse.parsing import parse_json
from rlfuse.rewards.api import interrupts
from rlfuse.rewards.api.shapes import RewardFunction, adapt

Spec = str | Callable[..., Any] | RewardFunction


def load_function(spec: Spec, kwargs: dict[str, Any] | None = None) -> RewardFunction:
    """The reward function that `spec` names or is; `kwargs` are given to it at each call, or make it (see `adapt`)."""
    if isinstance(spec, RewardFunction):
        return spec
    if is_url(spec):
        return service(spec)
    if spec == JUDGE:
        return replace(load_function("rlfuse.rewards.models.judge:Judge", kwargs), name=JUDGE)
    if not isinstance(spec, str) and (callable(spec) or hasattr(spec, "score")):
        return adapt(_name(spec), spec, spec, kwargs)
    if not isinstance(spec, str) or not all(spec.rpartition(":")[::2]):
        raise RewardError(
            f"reward.functions: got {spec!r}; an entry has to be path/to/file.py:function, package.module:function or "
            "the URL of a service. " + _functions_hint(spec)
        )
    place, _, name = spec.rpartition(":")
    if place.endswith(".py") or "/" in place:
        path = Path(place).expanduser().resolve()
        module, source = _load_file(path, spec), f"{path}:{name}"
    else:
        module, source = _load_module(place, spec), spec
    return adapt(name, _pick(module, name, spec), source, kwargs)


def _name(call: Any) -> str:
    while isinstance(call, functools.partial):
        call = call.func
    return getattr(call, "__name__", None) or type(call).__name__


def _load_file(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        near = sorted(entry.name for entry in path.parent.glob("*.py")) if path.parent.is_dir() else []
        hint = f"Python files in {path.parent}: {near}" if near else f"{path.parent} has no Python file"
        raise RewardError(f"reward.functions: {spec!r}: there is no file {path}. {hint}. Correct the path.")
    try:
        return load_module(path)
    except BaseException as error:
        if interrupts.is_interrupted():
            raise
        raise _import_problem(spec, error) from error


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
    except BaseException as error:
        if interrupts.is_interrupted():
            raise
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


def _pick(module: ModuleType, name: str, spec: str) -> Any:
    found = getattr(module, name, None)
    if callable(found) or hasattr(found, "score"):
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
    if not isinstance(spec, str) or not Path(spec).is_file():
        return "Put the function's name after a colon."
    try:
        names = _functions_of(_load_file(Path(spec).resolve(), spec))
    except RewardError:
        names = []
    return f"Append one of its functions: {names}" if names else "Put the function's name after a colon."


MAX_RESPONSE_BYTES = 256 * 2**20
MAX_SHOWN_CHARS = 2000


class ServiceError(RuntimeError):
    """A reward service gave no rewards. The message has its address, its status and its words."""


def service(url: str) -> RewardFunction:
    """The reward function behind a URL, named after its path."""
    place = urlsplit(url)
    name = place.path.rstrip("/").rpartition("/")[2] or place.hostname or url

    async def post(queries, prompts, labels):
        return await _ask(url, {"query": queries, "prompts": prompts, "labels": labels})

    return adapt(name, post, url)


async def _ask(url: str, payload: dict[str, Any]) -> dict[str, Any]:
    try:
        async with aiohttp.ClientSession() as session, session.post(url, json=json_safe(payload)) as answer:
            body = bytearray()
            async for part in answer.content.iter_chunked(2**16):
                body += part
                if len(body) > MAX_RESPONSE_BYTES:
                    raise ServiceError(f"{url} answered more than {MAX_RESPONSE_BYTES >> 20} MiB")
    except aiohttp.ClientError as error:
        raise ServiceError(f"{url} could not be asked: {type(error).__name__}: {error}") from None
    text = body.decode(errors="replace")
    if answer.status != 200:
        raise ServiceError(f"{url} answered with status {answer.status}: {_words(text)}")
    try:
        return parse_json(text)
    except ValueError:
        raise ServiceError(f"{url} answered something else than JSON: {_words(text)}") from None


def _words(text: str) -> str:
    with suppress(ValueError, TypeError, KeyError):
        text = parse_json(text)["error"]
    return str(text)[:MAX_SHOWN_CHARS]
