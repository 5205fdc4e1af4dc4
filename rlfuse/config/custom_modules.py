"""Execute custom files as modules: one per file and process, importable by the same name in every process.

A module is named after its file. If another module has that name, its name is `..._HEX` with the encoded path, so that
new processes can unpickle its objects. A changed file is executed again. Its folder is appended to `sys.path`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from rlfuse.config.custom_functions import read, split_reference
from rlfuse.errors import ConfigError

__path__: list[str] = []

_executed: dict[Path, tuple[ModuleType, bytes]] = {}
_started = psutil.Process().create_time() - 1  # its clock has a resolution of up to one second
"""Files not written since then are the versions that this process, and its forks, have imported."""


def load(
    key: str, value: str, module: Callable[[Path], ModuleType] | None = None, arguments: Collection[str] | None = None
) -> Callable[..., Any]:
    """Return the function that a key names. Raises ConfigError for an invalid one.

    `module` executes its file. `arguments`: as in `custom_functions.read`.
    """
    read(key, value, arguments)
    path, name = split_reference(value)
    try:
        return getattr((module or load_module)(path), name)
    except (Exception, SystemExit) as error:
        wrong = f"its file can't be executed: {type(error).__name__}: {error}"
        raise ConfigError([f"{key}={value}: {wrong}; correct the file"]) from error


def load_module(path: Path) -> ModuleType:
    """Return the module of the file at a path. Raises the exceptions of its code."""
    path = path.expanduser().resolve()
    text = path.read_bytes()
    known, before = _executed.get(path), set(sys.modules)
    if known is None and (imported := _imported(path)) is not None:
        known = _executed[path] = imported, text
    if known is not None and known[1] == text:
        return known[0]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = spec_from_file_location(known[0].__name__ if known else _name(path), path)
    module, former = module_from_spec(spec), sys.modules.get(spec.name)
    sys.modules[spec.name] = module
    try:
        # importlib's cache would miss an edit within one second that keeps the length of the file.
        exec(compile(text, str(path), "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        if former is None:
            del sys.modules[spec.name]
        else:
            sys.modules[spec.name] = former
        raise
    _executed[path] = module, text
    _record_neighbours(path.parent, before)
    return module


def _imported(path: Path) -> ModuleType | None:
    """Return the module that an `import` statement loaded from the file, unless the file was edited since."""
    module = sys.modules.get(path.stem)
    file = getattr(module, "__file__", None)
    return module if file and Path(file).resolve() == path and os.stat(path).st_ctime < _started else None


def _record_neighbours(folder: Path, before: set[str]) -> None:
    """Record files of the folder that the new module imported, since a job may name them, too."""
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).parent == folder and Path(file).suffix == ".py":
            with suppress(OSError):  # removed after it was imported
                _executed.setdefault(Path(file), (sys.modules[name], Path(file).read_bytes()))


def _name(path: Path) -> str:
    found = find_spec(path.stem) if path.stem.isidentifier() and path.stem not in sys.modules else None
    if found is not None and found.origin is not None and Path(found.origin).resolve() == path:
        return path.stem
    return f"{__name__}.{path.stem.replace('.', '_')}_{str(path).encode().hex()}"


class Finder(MetaPathFinder):
    """Finder of the modules of this package, by the paths encoded in their names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        try:
            file = Path(bytes.fromhex(fullname.rpartition("_")[2]).decode())
        except ValueError:
            return None
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))
        return spec_from_file_location(fullname, file)


sys.meta_path.append(Finder())
