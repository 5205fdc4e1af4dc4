"""rlfuse: RLHF post-training that overlaps generation, reward and training sample by sample.

`__init__.pyi` declares the public names for editors; each is imported at its first use.
"""

import sys
from typing import Any

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    del sys.path[0]  # the working folder, which would shadow installed modules; `application.run_command` appends it

PUBLIC = {
    "api.commands": ("train", "start", "evaluate", "generate", "plan"),
    "api.jobs": ("Job", "JobError"),
    "api.results": ("Run", "Evaluation", "Plan"),
    "config.schema": ("Config",),
    "errors": ("RlfuseError", "ConfigError", "DataError", "RewardError", "EngineError"),
}
"""Modules -> public names that they define."""
_MODULE_OF = {name: module for module, names in PUBLIC.items() for name in names}
__all__ = [*_MODULE_OF, "__version__", "version_of"]


def version_of(package: str) -> str | None:
    """Return the version of an installed package without importing it; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # slower to import than this whole module

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def __getattr__(name: str) -> Any:
    """Import a public name; look up `__version__` in the installed metadata."""
    if name == "__version__":
        return version_of(__name__) or "unknown"
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
