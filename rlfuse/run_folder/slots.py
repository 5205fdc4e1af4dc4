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
"""A run looks once a second, but between steps it may compute for a while."""
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class SlotState:
    """One slot of a run."""

    index: int
    node: str
    device: str
    state: str
    """working | drained | lost (its engine is being replaced)."""
    rate: float = 1.0
    """Seconds its work takes for each that a typical slot's takes: as planned with, or as a drained one was probed."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a person wants of a slot. `until`: after that nobody waits for it any more, epoch seconds."""

    id: str
    do: str
    slot: int
    until: float
    until_recovered: bool = False
    """Of `drain`: the slot is to work again once it is as fast as the others."""


def ask(folder: Path, do: str, slot: int, until_recovered: bool = False, patience: float = ANSWER_S) -> str:
    """Have the run do it; its answer. SlotRefused if it doesn't, or doesn't say."""
    desk, name = folder / FOLDER, uuid.uuid4().hex[:12]
    request, answer = desk / f"{name}{REQUEST}", desk / f"{name}{ANSWER}"
    try:
        desk.mkdir(exist_ok=True)
        write_atomically(request, json.dumps(asdict(Request(name, do, slot, time.time() + patience, until_recovered))))
    except OSError as error:
        raise RunError(f"{desk}: nothing can be asked of the run there ({error}); give it room, or rights") from error
    try:
        if not _wait_for(answer, patience, request):
            raise SlotRefused(
                f"the run did not look into {desk} for {patience:g} s, and the request is withdrawn: nothing was done. "
                f"It looks once its engines stand, and not while it computes between two steps: rlfuse watch {folder}"
            )
        if not answer.exists() and not _wait_for(answer, patience):
            raise SlotRefused(
                f"the run took the request, but for {patience:g} s did not say what became of it: rlfuse slots {folder}"
            )
        given = parse_json(answer.read_text())
    finally:
        for file in (request, answer):
            file.unlink(missing_ok=True)
    if not given["done"]:
        raise SlotRefused(given["told"])
    return str(given["told"])


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
    """How the slots are, as the run said last. RunError where it has said nothing."""
    path = folder / FOLDER / STATE
    try:
        return [SlotState(**each) for each in parse_json(path.read_text())]
    except FileNotFoundError:
        raise RunError(
            f"{path}: there is none; a run has it once its engines stand. One that trains a reward model has no slots"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{path} can't be read ({error}); the run writes it anew when something changes") from error


def begin(folder: Path) -> None:
    """The desk opens; answers that nobody took are removed."""
    desk = folder / FOLDER
    desk.mkdir(exist_ok=True)
    for file in desk.glob(f"*{ANSWER}"):
        file.unlink(missing_ok=True)


def publish(folder: Path, states: Sequence[SlotState]) -> None:
    """How the slots are from now on. OSError where there is no room."""
    write_atomically(folder / FOLDER / STATE, json.dumps([asdict(each) for each in states], indent=1))


def take(folder: Path) -> list[Request]:
    """Requests that came since the last call, the oldest first; each of them has to be answered."""
    taken = []
    for file in (folder / FOLDER).glob(f"*{REQUEST}"):
        with suppress(OSError, ValueError, TypeError):  # withdrawn meanwhile, or another program's
            request = Request(**parse_json(file.read_text()))
            if _removed(file):
                taken.append(request)
    return sorted(taken, key=lambda each: each.until)


def answer(folder: Path, request: Request, told: str, done: bool) -> None:
    """OSError where there is no room; then the command says that it heard nothing."""
    content: dict[str, Any] = {"done": done, "told": told}
    write_atomically(folder / FOLDER / f"{request.id}{ANSWER}", json.dumps(content))
