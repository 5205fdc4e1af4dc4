"""Load a custom reward function: `path/file.py:function`, `package.module:function`, a URL, or an object in a notebook.

Functions of one file share the module and its globals until the file changes on disk. Every problem is a `RewardError`
with file, line and remedy. A URL names a remote reward model with OpenRLHF's payload:

    POST {"query": [prompt + response, ...], "prompts": [...], "labels": [...]}
    200  {"rewards": [...], "scores": [...], "extra_logs": {...}}

Any other response is a failure with the message of the service, never a number.
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
    """Load the reward function `spec`. `kwargs` are passed to each call, or to the class or factory (see `adapt`)."""
    if isinstance(spec, RewardFunction):
        return spec
    if is_url(spec):
        return remote_reward(spec)
    if spec == JUDGE:
        return replace(load_function("rlfuse.rewards.models.judge:Judge", kwargs), name=JUDGE)
    if not isinstance(spec, str) and (callable(spec) or hasattr(spec, "score")):
        return adapt(_name(spec), spec, spec, kwargs)
    if not isinstance(spec, str) or not all(spec.rpartition(":")[::2]):
        raise RewardError(
            f"reward.functions: got {spec!r}; an entry must be path/to/file.py:function, package.module:function or a "
            "URL. " + _functions_hint(spec)
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
        hint = f"Python files in {path.parent}: {near}" if near else f"{path.parent} has no Python files"
        raise RewardError(f"reward.functions: {spec!r}: file {path} does not exist. {hint}. Correct the path.")
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
            f"reward.functions: {spec!r}: module {error.name!r} is not on sys.path. Install it, add its folder to "
            "PYTHONPATH, or name the file: path/to/file.py:function"
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
            f"    {line}{mark}\nCorrect this line."
        )
    return RewardError(
        f"reward.functions: {spec!r} can't be imported: {headline(error)}. Correct the file, or install the missing "
        f"package.\n{user_traceback(error)}"
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
    return f"Append one of the functions in the file: {names}" if names else "Put the function's name after a colon."


MAX_RESPONSE_BYTES = 256 * 2**20
MAX_SHOWN_CHARS = 2000


class ServiceError(RuntimeError):
    """A remote reward service returned no rewards. The message has URL, status and response text."""


def remote_reward(url: str) -> RewardFunction:
    """Return a reward function that posts to `url`; its name is the last part of the path."""
    place = urlsplit(url)
    name = place.path.rstrip("/").rpartition("/")[2] or place.hostname or url

    async def post(queries, prompts, labels):
        return await _post(url, {"query": queries, "prompts": prompts, "labels": labels})

    return adapt(name, post, url)


async def _post(url: str, payload: dict[str, Any]) -> dict[str, Any]:
    try:
        async with aiohttp.ClientSession() as session, session.post(url, json=json_safe(payload)) as answer:
            body = bytearray()
            async for part in answer.content.iter_chunked(2**16):
                body += part
                if len(body) > MAX_RESPONSE_BYTES:
                    raise ServiceError(f"{url} returned more than {MAX_RESPONSE_BYTES >> 20} MiB")
    except aiohttp.ClientError as error:
        raise ServiceError(f"{url} could not be reached: {type(error).__name__}: {error}") from None
    text = body.decode(errors="replace")
    if answer.status != 200:
        raise ServiceError(f"{url} returned status {answer.status}: {_error_text(text)}")
    try:
        return parse_json(text)
    except ValueError:
        raise ServiceError(f"{url} returned no valid JSON: {_error_text(text)}") from None


def _error_text(text: str) -> str:
    with suppress(ValueError, TypeError, KeyError):
        text = parse_json(text)["error"]
    return str(text)[:MAX_SHOWN_CHARS]
