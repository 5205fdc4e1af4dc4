"""Exchange slot states, requests and answers between a run and `rlfuse slots` through files of the run folder.

    slots/state.json          written by the run when a slot changes
    slots/ID.request.json     written by the command; removed by the run when it accepts the request
    slots/ID.answer.json      written by the run; removed by the command

A request is either accepted by the run or withdrawn by the command, never both.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlfuse.errors import RunError, SlotRefused
from rlfuse.files import write_atomically
from rlfuse.parsing import parse_json

FOLDER = "slots"
STATE, REQUEST, ANSWER = "state.json", ".request.json", ".answer.json"
ANSWER_S = 60.0
"""Timeout: a run checks for requests once a second, but it may be busy for a while between steps."""
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class SlotState:
    """One slot of a run."""

    index: int
    node: str
    device: str
    state: str
    """`working`, `drained` or `lost` (its engine is being replaced)."""
    rate: float = 1.0
    """Slowdown relative to a typical slot: as used for planning, or as probed if the slot is drained."""


@dataclass(frozen=True, slots=True)
class Request:
    """A user's request for a slot. `until`: expiry, in epoch seconds."""

    id: str
    do: str
    slot: int
    until: float
    until_recovered: bool = False
    """For `drain`: restore the slot once it is as fast as the others."""


def send_request(folder: Path, do: str, slot: int, until_recovered: bool = False, patience: float = ANSWER_S) -> str:
    """Send a request to the run and return its answer. Raises SlotRefused if the run rejects it or does not answer."""
    requests, name = folder / FOLDER, uuid.uuid4().hex[:12]
    request, answer = requests / f"{name}{REQUEST}", requests / f"{name}{ANSWER}"
    try:
        requests.mkdir(exist_ok=True)
        write_atomically(request, json.dumps(asdict(Request(name, do, slot, time.time() + patience, until_recovered))))
    except OSError as error:
        raise RunError(
            f"{requests}: the request can't be written ({error}); free disk space or fix the permissions"
        ) from error
    try:
        if not _wait_for(answer, patience, request):
            raise SlotRefused(
                f"the run did not accept the request within {patience:g} s, so it is withdrawn; nothing was changed. "
                f"Requests are accepted after startup, but not while it is busy between steps: rlfuse watch {folder}"
            )
        if not answer.exists() and not _wait_for(answer, patience):
            raise SlotRefused(
                f"the run accepted the request but did not answer within {patience:g} s; see rlfuse slots {folder}"
            )
        reply = parse_json(answer.read_text())
    finally:
        for file in (request, answer):
            file.unlink(missing_ok=True)
    if not reply["done"]:
        raise SlotRefused(reply["message"])
    return str(reply["message"])


def _wait_for(answer: Path, patience: float, request: Path | None = None) -> bool:
    until = time.monotonic() + patience
    while not answer.exists():
        if time.monotonic() > until:
            return request is not None and not _removed(request)
        time.sleep(LOOK_S)
    return True


def _removed(file: Path) -> bool:
    """Return whether this call removed the file."""
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    return True


def read(folder: Path) -> list[SlotState]:
    """Return the slot states that the run wrote last. Raises RunError if there are none."""
    path = folder / FOLDER / STATE
    try:
        return [SlotState(**each) for each in parse_json(path.read_text())]
    except FileNotFoundError:
        raise RunError(f"{path} does not exist; a run writes it after startup (only with trainer.task=rl)") from None
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{path} can't be read ({error}); the run rewrites it when a slot changes") from error


def open_requests(folder: Path) -> None:
    """Create the folder of requests and remove old answers."""
    requests = folder / FOLDER
    requests.mkdir(exist_ok=True)
    for file in requests.glob(f"*{ANSWER}"):
        file.unlink(missing_ok=True)


def publish_states(folder: Path, states: Sequence[SlotState]) -> None:
    """Write the slot states. Raises OSError if the disk is full."""
    write_atomically(folder / FOLDER / STATE, json.dumps([asdict(each) for each in states], indent=1))


def take_requests(folder: Path) -> list[Request]:
    """Accept and return the new requests, oldest first; the caller must answer each of them."""
    taken = []
    for file in (folder / FOLDER).glob(f"*{REQUEST}"):
        with suppress(OSError, ValueError, TypeError):  # withdrawn meanwhile, or not a request
            request = Request(**parse_json(file.read_text()))
            if _removed(file):
                taken.append(request)
    return sorted(taken, key=lambda each: each.until)


def answer(folder: Path, request: Request, message: str, done: bool) -> None:
    """Answer a request. Raises OSError if the disk is full; the command then reports a missing answer."""
    content: dict[str, Any] = {"done": done, "message": message}
    write_atomically(folder / FOLDER / f"{request.id}{ANSWER}", json.dumps(content))
