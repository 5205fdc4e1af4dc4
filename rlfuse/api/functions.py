"""Write reward functions that exist only in this process as files that a job can name.

A function of an installed package or of a module's file is named as it is. Others (of a notebook or a script, lambdas,
closures, instances) are pickled by value into a file, with the cells that define them, so that tracebacks in the job
show their lines.
"""

from __future__ import annotations

import base64
import functools
import inspect
import io
import linecache
import os
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cloudpickle
from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_CLASS, _lookup_module_and_qualname

from rlfuse.api.inputs import write_input
from rlfuse.config.rewards import RewardEntry
from rlfuse.errors import RewardError
from rlfuse.rewards.api.functions import load_function

MAX_BYTES = 64 << 20
LINE = 100
UNNAMED = "<dynamic-code>"
"""File name that cloudpickle gives to code."""
SHIPPED = '''\
"""{name}, from a Python session; written by rlfuse for the processes of a job."""

import base64
import linecache
import pickle
import sys

sys.path.extend(folder for folder in {folders!r} if folder not in sys.path)
for cell, source in {cells!r}.items():
    linecache.cache[cell] = (len(source), None, source.splitlines(True), cell)
{name} = pickle.loads(base64.b64decode("""
{pickled}
"""))
'''


def reward_entries(reward: Any) -> list[Any]:
    """Return `reward.functions` for a function, an object, a path, an entry, or a list of these."""
    several = reward if isinstance(reward, Sequence) and not isinstance(reward, str) else [reward]
    return [_entry(each) for each in several]


def _entry(given: Any) -> Any:
    if isinstance(given, RewardEntry):
        given = asdict(given)
    if isinstance(given, Mapping):
        return {key: _entry(value) if key == "path" else value for key, value in given.items()}
    if isinstance(given, str | os.PathLike):
        return os.fspath(given)
    if callable(given) or hasattr(given, "score"):
        return function_reference(given)
    raise RewardError(
        f"reward: got {type(given).__name__}; pass a function, an object with a method score, a text such as "
        "path/file.py:function, or an entry {path: ..., weight: ...}"
    )


def function_reference(function: Callable[..., Any] | Any) -> str:
    """Return the text by which a job finds a function: `package.module:name`, or `path/file.py:name`.

    Raises RewardError for a function with a signature of no framework, or one that can't be pickled.
    """
    if not inspect.isclass(function):  # a class is called to create the function
        load_function(function)
    return _existing_reference(function) or _write(function)


def _existing_reference(function: Any) -> str | None:
    """Return the reference to a function of a module that the processes of a job can import; else None."""
    name, module = getattr(function, "__qualname__", ""), sys.modules.get(getattr(function, "__module__", "") or "")
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__ == "__main__" or getattr(module, name, None) is not function:
        return None
    if "site-packages" in Path(file).parts or module.__name__.partition(".")[0] == __name__.partition(".")[0]:
        return f"{module.__name__}:{name}"
    is_package = hasattr(module, "__path__")
    return None if "." in module.__name__ or is_package else f"{os.path.relpath(file)}:{name}"


def _write(function: Any) -> str:
    name = _name(function)
    pickled, cells = _pickled(function, name, _Pickler)
    identity, _ = _pickled(function, name, _IdentityPickler)
    text = base64.b64encode(pickled).decode()
    lines = "\n".join(text[at : at + LINE] for at in range(0, len(text), LINE))
    content = SHIPPED.format(name=name, folders=_module_folders(), cells=cells, pickled=lines)
    identity += repr((cells, _module_folders())).encode()
    return f"{write_input(f'{name}.py', content.encode(), identity)}:{name}"


def _name(function: Any) -> str:
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    name = getattr(function, "__name__", None) or type(function).__name__
    return name if name.isidentifier() else "reward"  # a lambda


def _module_folders() -> list[str]:
    """Return the folders of this process' path that the processes of a job may lack: the script's, those added."""
    installed = (sys.prefix, sys.base_prefix)
    folders = (os.path.abspath(each) for each in sys.path if not each.endswith(".zip"))
    return [each for each in dict.fromkeys(folders) if not each.startswith(installed)]


def _pickled(function: Any, name: str, kind: type[_Pickler]) -> tuple[bytes, dict[str, str]]:
    """Return (pickle, source of the notebook cells in it by name). Raises RewardError if it can't be pickled."""
    buffer = io.BytesIO()
    pickler = kind(buffer)
    try:
        pickler.dump(function)
    except Exception as error:
        raise RewardError(
            f"reward {name}: can't be sent to the processes of the job ({type(error).__name__}: {error}). Create such "
            "objects inside the function, or write the function in a file: reward='path/file.py:function'."
        ) from error
    if len(found := buffer.getvalue()) > MAX_BYTES:
        raise RewardError(
            f"reward {name}: refers to {len(found) >> 20} MiB of objects, above the limit of {MAX_BYTES >> 20} MiB. "
            "Load them inside the function."
        )
    return found, pickler.cells


class _Pickler(cloudpickle.Pickler):
    """A pickler that keeps the file names of code, and names notebook cells independently of the kernel's process.

    It also pickles functions with `functools.cache` by value, with an empty cache.
    """

    def __init__(self, file: io.BytesIO):
        self.cells: dict[str, str] = {}
        self.dispatch_table = ChainMap({types.CodeType: self._reduce_code}, cloudpickle.Pickler.dispatch_table)
        super().__init__(file)  # reads the table

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, functools._lru_cache_wrapper) and _lookup_module_and_qualname(value) is None:
            return _with_cache, (value.__wrapped__, value.cache_parameters())
        return super().reducer_override(value)

    def _reduce_code(self, code: types.CodeType) -> tuple[Any, ...]:
        file = code.co_filename
        if not os.path.exists(file) and (source := "".join(linecache.getlines(file))):
            file = f"<{Path(file).name}>"
            self.cells[file] = source
        build, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
        return build, tuple(file if each in (code.co_filename, UNNAMED) else each for each in arguments)


def _with_cache(function: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    return functools.lru_cache(**parameters)(function)


class _IdentityPickler(_Pickler):
    """A pickler whose output is equal in each process; it can't be loaded.

    Otherwise the order of sets depends on the hash seed, and cloudpickle gives a class a random number.
    """

    def persistent_id(self, value: Any) -> Any:
        return (type(value).__name__, sorted(value, key=repr)) if isinstance(value, set | frozenset) else None

    def reducer_override(self, value: Any) -> Any:
        reduced = super().reducer_override(value)
        number = _DYNAMIC_CLASS_TRACKER_BY_CLASS.get(value) if isinstance(value, type) else None
        if reduced is NotImplemented or number is None:
            return reduced
        build, arguments, *rest = reduced
        return build, tuple(None if each is number else each for each in arguments), *rest
