"""`rlfuse watch RUN_DIR`: show the live view of a run in another terminal or on another host. Reads files only."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.live import Live

from rlfuse.errors import RunError
from rlfuse.files import parse_non_finite
from rlfuse.observe.live import Stage, View, clock, log_line, render
from rlfuse.observe.summary import summary_text
from rlfuse.observe.terminal import FILE, REFRESH_S, step_line
from rlfuse.parsing import parse_json
from rlfuse.progress import SILENT_S, Console, is_live_terminal
from rlfuse.run_folder import status
from rlfuse.run_folder.reader import check_files, open_run, reading
from rlfuse.run_folder.status import Status

LATE_S = 10.0
STEPS = 5


def main(argv: Sequence[str]) -> None:
    """Show the live view until the run ends or Ctrl-C. RunError if there is no run."""
    parser = argparse.ArgumentParser(
        prog="rlfuse watch", description="Show the live view of a running job. Ctrl-C ends the view, not the job."
    )
    parser.add_argument("run", type=Path, help="run folder")
    folder = parser.parse_args(argv).run
    check_files(folder)
    if (now := status.read(folder)) is None:
        open_run(folder)  # raises the specific error
        raise RunError(f"{folder}: no {status.FILE}, so its state is unknown; use rlfuse report")
    console = Console()
    try:
        with reading(folder):
            watch(folder, now, console)
    except KeyboardInterrupt:
        console.print(f"View closed; the run continues. Reopen: rlfuse watch {folder}", highlight=False)


def watch(folder: Path, now: Status, console: Console) -> None:
    """Show step lines and the view until the run has ended, then its result."""
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    view, lines, spoke = _view(folder, now), _Rows(folder / "metrics.jsonl"), time.monotonic()
    total = view.total if view else 0
    for row in [row for row in lines.more() if row["step"] > 0][-STEPS:]:
        say(step_line(row["step"], total, row))
    live = Live(console=console, auto_refresh=False) if is_live_terminal(console) else None
    with live or nullcontext():
        while status.state_now(folder, now) == "running":
            if (view := _view(folder, now)) is not None:
                total = view.total
                if live:
                    live.update(render(view), refresh=True)
                elif time.monotonic() - spoke > SILENT_S:
                    say(log_line(view))
                    spoke = time.monotonic()
            time.sleep(REFRESH_S)
            for row in lines.more():
                if row["step"] > 0:
                    say(step_line(row["step"], total, row))
                    spoke = time.monotonic()
            now = status.read(folder) or now
    say(_end(folder, now))


def read_view(path: Path) -> tuple[float, View]:
    """Return (time of writing, view). OSError or ValueError if there is none."""
    content = parse_json(path.read_text())
    given = content["view"]
    given["stages"] = [Stage(**stage) for stage in given["stages"]]
    return content["at"], View(**given)


def _view(folder: Path, now: Status) -> View | None:
    try:
        at, view = read_view(folder / FILE)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    age = time.time() - at
    if age < LATE_S:
        return view
    return replace(view, phase=f"{view.phase}  ·  on {now.host}, last seen {clock(age)} ago")


def _end(folder: Path, now: Status) -> str:
    if (state := status.state_now(folder, now)) == "crashed":
        return f"{now.name} was killed: its process ended without an error. Rerun the same command to resume."
    if state == "finished":
        summary = open_run(folder).summary()
        return summary_text(summary, folder) if "reward_first" in summary else f"{now.name} finished"
    return f"{now.name} {state}: {now.error}"


class _Rows:
    """Reader of rows that are appended to a file."""

    def __init__(self, path: Path):
        self._path, self._read = path, 0

    def more(self) -> Iterator[dict[str, Any]]:
        """Yield the rows since the last call, from the beginning if the file became shorter."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                start = file.seek(self._read if self._read <= size else 0)
                text = file.read()
        except FileNotFoundError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._read = start + len(whole)
        for line in whole.splitlines():
            try:
                row = parse_json(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int):
                    yield parse_non_finite(row)
            except ValueError:
                if start:  # the file was shortened and has grown since, so this offset is within a row
                    self._read = 0
                    return
