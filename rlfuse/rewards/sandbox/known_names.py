"""Names that untrusted code may use without defining them, beyond Python's own.

Role: `host` adds them to the built-in names of the processes that run code, not to those that judge it. APPS, TACO,
LiveCodeBench and LeetCode run answers behind star imports of these modules, so answers leave the imports out. `exit`
and `quit` are what `site` defines, which the sandbox does not load.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from typing import Any

MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json "
    "typing"
)
"""Later ones take precedence, and Python's own names over all."""


def known_names() -> dict[str, Any]:
    """Return the names with what they stand for."""
    names: dict[str, Any] = {}
    for module in map(importlib.import_module, MODULES.split()):
        public = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        names |= {name: getattr(module, name) for name in public}
    names |= {name: sys.modules[name] for name in MODULES.split()} | {"exit": sys.exit, "quit": sys.exit}
    return {name: each for name, each in names.items() if not hasattr(builtins, name)}
