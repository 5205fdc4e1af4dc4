"""Keep schedules that were searched before, in this process and in `$RLFUSE_CACHE` (or the user's cache folder)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from rlfuse.fusion.schedules.problem import Problem, ScheduleError
from rlfuse.fusion.schedules.schedule import Schedule, check, read_schedule
from rlfuse.user_folders import home

VERSION = 2  # of the search: raise it when results change
_seen: dict[str, Schedule] = {}


def folder() -> Path:
    """Where files lie."""
    if own := os.environ.get("RLFUSE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "rlfuse" / "schedules"


def key(problem: Problem, **settings: Any) -> str:
    """Of a problem and the settings of its search."""
    text = json.dumps([VERSION, problem.as_json(), settings], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def load(problem: Problem, name: str) -> Schedule | None:
    """A schedule kept under a key; one on disk has to pass the check."""
    if name not in _seen:
        with contextlib.suppress(ScheduleError):
            found = read_schedule(folder() / f"{name}.json")
            check(problem, found)
            _seen[name] = found
    return _seen.get(name)


def store(name: str, schedule: Schedule) -> None:
    """Keep a schedule. Written aside and renamed, so that a reader never sees half of it."""
    _seen[name] = schedule
    with contextlib.suppress(OSError):
        folder().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder(), suffix=".part", delete=False) as file:
            file.write(schedule.text)
        os.replace(file.name, folder() / f"{name}.json")
