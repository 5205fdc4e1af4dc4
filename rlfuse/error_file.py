"""Pass the error of a job to the program that started it: pickled with its causes, in the file that VARIABLE names.

An error whose class the program can't import becomes a RuntimeError. Such errors have the traceback of the job as their
message, and others that are no `RlfuseError`s as a note.
"""

from __future__ import annotations

import os
import pickle
import traceback
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from rlfuse.config.secrets import hidden_text
from rlfuse.errors import RlfuseError

VARIABLE = "RLFUSE_ERROR_FILE"
MAX_CAUSES = 20


def write_error(error: Exception) -> bool:
    """Write the error and its causes to the file, if the environment names one; return whether it was written."""
    if file := os.environ.get(VARIABLE):
        with suppress(OSError):  # a full disk, or the program and its folder are gone
            Path(file).write_bytes(pickle.dumps([_packed(each) for each in _chain(error)]))
            return True
    return False


def read_error(file: Path) -> BaseException | None:
    """Return the error with its causes; None if the job wrote none."""
    try:
        errors = [_unpacked(*each) for each in pickle.loads(file.read_bytes())]
    except (OSError, EOFError, pickle.UnpicklingError):  # none, or an incomplete one
        return None
    for error, cause in pairwise(errors):
        error.__cause__ = cause
    return errors[0]


def _chain(error: BaseException) -> list[BaseException]:
    found, seen = [error], {id(error)}
    while len(found) <= MAX_CAUSES:
        last = found[-1]
        cause = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if cause is None or id(cause) in seen:
            break
        found.append(cause)
        seen.add(id(cause))
    return found


def _packed(error: BaseException) -> tuple[bytes, str]:
    """Return (the pickled error, or b"" if it can't be pickled; its traceback)."""
    shown = "".join(traceback.format_exception(error, chain=False)).rstrip()
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:
        packed = b""
    return packed, hidden_text(f"Traceback of the job:\n{shown}")


def _unpacked(packed: bytes, shown: str) -> BaseException:
    try:
        error = pickle.loads(packed)
    except Exception:  # no pickle, or a class of a module that is not importable here
        return RuntimeError(shown)
    if not isinstance(error, RlfuseError):
        error.add_note(shown)
    return error
