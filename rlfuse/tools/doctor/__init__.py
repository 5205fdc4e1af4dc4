"""Whether this machine can run jobs (`rlfuse doctor`): what it says about one thing that it looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, what was found; what to do, unless all is well."""

    what: str
    state: State
    found: str
    remedy: str = ""
