"""Checks of this machine (`rlfuse doctor`): the result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check: subject, state, measurement, and a remedy unless the state is ok."""

    what: str
    state: State
    found: str
    remedy: str = ""
