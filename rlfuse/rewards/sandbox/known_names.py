"""Names of the star imports that APPS, TACO, LiveCodeBench and LeetCode prepend to answers, for untrusted code only."""

from __future__ import annotations

import builtins
import importlib
import sys
from typing import Any

MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json "
    "typing"
)
"""Later modules take precedence over earlier ones, and builtins over all."""


def known_names() -> dict[str, Any]:
    """Return the names with their values."""
    names: dict[str, Any] = {}
    for module in map(importlib.import_module, MODULES.split()):
        public = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        names |= {name: getattr(module, name) for name in public}
    names |= {name: sys.modules[name] for name in MODULES.split()} | {"exit": sys.exit, "quit": sys.exit}
    return {name: each for name, each in names.items() if not hasattr(builtins, name)}
