"""`rlfuse runs [FOLDER ...]`: list all runs below a folder; `rlfuse runs clean` removes leftovers of crashed runs.

A damaged run folder affects its own row only. Nothing is removed without `--yes`.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.markup import escape
from rich.table import Table

from rlfuse.errors import NotWritable, RunError
from rlfuse.fusion.selection import STRENGTH
from rlfuse.observe.offline_metrics import SCORES
from rlfuse.parsing import parse_json
from rlfuse.progress import Console
from rlfuse.run_folder import status
from rlfuse.run_folder.reader import check_files
from rlfuse.run_folder.run_lock import RunLock, last_log_write

MARKS = (status.FILE, "metrics.jsonl")
MAX_DEPTH = 4
TAIL_BYTES = 4 << 20
"""Bytes of metrics.jsonl that are searched for the last validation."""
REWARDS = ("critic/score/mean", *SCORES)
COLUMNS = ("run", "state", "step", "reward", "held out", "label", "time", "started", "size", "checkpoints", "sweep")
NO_WRAP = ("step", "reward", "held out", "label", "time", "size")
NUMBERS = ("step", "reward", "held out", "time", "size", "checkpoints")
STATES = ("running", "finished", "stopped", "failed", "crashed", "unknown")


@dataclass(slots=True)
class Run:
    """Row of a run; None for missing values."""

    folder: str
    name: str
    state: str = "unknown"
    host: str = ""
    step: int | None = None
    total: int | None = None
    reward: float | None = None
    validation: float | None = None
    label: str = ""
    seconds: float | None = None
    """Total of all processes of the run, each until its end or its last sign of life."""
    started: float | None = None
    last_seen: float = 0.0
    size: int = 0
    checkpoints: int = 0
    """Bytes of checkpoints, not included in `size`."""
    sweep: str = ""
    error: str = ""
    problems: list[str] = field(default_factory=list)


ORDERS: dict[str, Callable[[Run], Any]] = {
    "started": lambda run: run.started or run.last_seen,
    "name": lambda run: run.name,
    "state": lambda run: STATES.index(run.state),
    "step": lambda run: run.step or 0,
    "reward": lambda run: -math.inf if run.reward is None else run.reward,
    "validation": lambda run: -math.inf if run.validation is None else run.validation,
    "time": lambda run: run.seconds or 0.0,
    "size": lambda run: run.size + run.checkpoints,
}


def main(argv: Sequence[str]) -> None:
    """List runs, or clean up. RunError for a missing folder."""
    if argv[:1] == ["clean"]:
        return clean(argv[1:])
    parser = argparse.ArgumentParser(
        prog="rlfuse runs",
        description="List the runs below folders. `rlfuse runs clean --help`: remove leftovers of crashed runs.",
    )
    parser.add_argument("folders", type=Path, nargs="*", metavar="FOLDER", help="default: runs")
    parser.add_argument("--state", choices=STATES, action="append", help="show only runs in this state; repeatable")
    parser.add_argument(
        "--sort", choices=ORDERS, default="started", help="default: started, newest last; best reward first"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list; sizes in bytes, times in epoch seconds")
    arguments = parser.parse_args(argv)
    folders = arguments.folders or [Path("runs")]
    searched = ", ".join(map(str, folders))
    runs = [read(path, top) for top in folders for path in find(top)]
    best_first = arguments.sort in ("reward", "validation")
    chosen = (run for run in runs if run.state in (arguments.state or STATES))
    shown = sorted(chosen, key=ORDERS[arguments.sort], reverse=best_first)
    if arguments.json:
        print(json.dumps([asdict(run) for run in shown], indent=2))
        return
    if not shown:
        print(f"no run{' of ' + ' or '.join(arguments.state) if arguments.state else ''} in {searched}")
        return
    _print(shown)
    for run in shown:
        for problem in run.problems:
            print(f"{run.folder}: {problem}")


def clean(argv: Sequence[str]) -> None:
    """List leftovers of crashed runs, and remove them with --yes. RunError for a missing folder."""
    from rlfuse.tools import leftovers

    parser = argparse.ArgumentParser(
        prog="rlfuse runs clean",
        description="List or remove leftovers of killed runs: incomplete checkpoints, copies that are recreated when "
        "needed, files of dead processes in shared memory and in the temporary folder. Running jobs, complete "
        "checkpoints and logs are kept.",
    )
    parser.add_argument("folders", type=Path, nargs="*", metavar="FOLDER", help="default: runs, if it exists")
    parser.add_argument("--yes", action="store_true", help="remove the listed files")
    arguments = parser.parse_args(argv)
    folders = arguments.folders or [path for path in (Path("runs"),) if path.is_dir()]
    runs = [run for folder in folders for run in find(folder)]
    found = leftovers.find_leftovers(runs)
    with ExitStack() as locks:
        for run in runs if arguments.yes else ():
            locks.callback((lock := RunLock()).release)
            with suppress(NotWritable):  # a folder of another user
                lock.acquire(run)
            if not lock.is_held:  # the run was just started
                found = [each for each in found if not each.path.is_relative_to(run)]
        for each in found:
            kept = arguments.yes and not leftovers.remove(each.path)
            print(f"{size(each.bytes):>10}  {each.path}  ({each.why}{'; could not be removed' if kept else ''})")
    total = f"{len(found)} leftovers, {size(sum(each.bytes for each in found))}"
    print(f"{total}{' removed' if arguments.yes else '; --yes removes them'}" if found else "no leftovers")


def find(top: Path) -> Iterator[Path]:
    """Yield run folders: `top` itself or those below it. RunError if `top` is not a folder."""
    if not top.is_dir():
        raise RunError(f"{top}: no such folder; give the folder of the runs (trainer.default_local_dir) or of one run")
    return _below(top, MAX_DEPTH)


def _below(folder: Path, depth: int) -> Iterator[Path]:
    if any(os.path.exists(folder / name) for name in MARKS):  # False in folders that this user can't read
        yield folder
        return
    try:
        children = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    except OSError:  # a folder of another user
        return
    for name in children if depth else ():
        if not name.startswith("."):
            yield from _below(folder / name, depth - 1)


def read(path: Path, top: Path | None = None) -> Run:
    """Read the row of a run folder, with its name relative to `top`."""
    name = path.relative_to(top).as_posix() if top is not None and path != top else path.name
    run = Run(str(path), name)
    run.last_seen = last_log_write(path)
    try:
        check_files(path)
    except RunError as error:
        run.problems.append(str(error))
        return run
    sources = {status.FILE: _from_status, "metrics.jsonl": _from_metrics, "summary.json": _from_summary}
    for file, fill in sources.items():
        try:
            fill(run, path / file)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            run.problems.append(f"{file} can't be read ({type(error).__name__}: {error})")
    _add_sizes(run, path)
    return run


def _from_metrics(run: Run, path: Path) -> None:
    if not path.stat().st_size:
        return
    with path.open("rb") as rows, mmap.mmap(rows.fileno(), 0, access=mmap.ACCESS_READ) as content:
        end = content.rfind(b"\n") + 1  # a killed run may have left an incomplete last row
        first = max(0, end - TAIL_BYTES)
        row = _row_at(content, end - 1) if end else {}
        run.step = int(row["step"]) if row else None
        run.reward = next((float(row[name]) for name in REWARDS if name in row), None)
        if (found := content.rfind(b'"val-core/', first, end)) >= 0:
            validated = _row_at(content, found)
            run.validation = next(float(value) for name, value in validated.items() if name.startswith("val-core/"))
        if (
            run.state != "finished" or not path.with_name("summary.json").exists()
        ):  # otherwise the summary has the label
            logged = next((name for name in reversed(STRENGTH) if content.find(f'"fusion/{name}"'.encode()) >= 0), "")
            run.label = max(logged, run.label, key=("", *STRENGTH).index)


def _from_status(run: Run, path: Path) -> None:
    found = status.read(path.parent)
    if found is None:
        parse_json(path.read_text())  # raises the specific error
        raise ValueError("keys are missing or have values of the wrong type")
    run.state, run.sweep, run.error = status.state_now(path.parent, found), found.sweep, found.error
    run.started, run.total = found.started, found.total or None
    run.label = found.label
    run.host = found.host if found.host != socket.gethostname() else ""
    run.seconds = found.seconds(run.last_seen)


def _from_summary(run: Run, path: Path) -> None:
    summary = parse_json(path.read_text())
    seconds, label = float(summary["seconds"]), str(summary.get("label", ""))  # training of reward models has no label
    if run.state in ("finished", "unknown"):
        run.label = label
    if run.state == "unknown":
        run.state, run.seconds = "finished", seconds


def _row_at(content: mmap.mmap, position: int) -> dict[str, Any]:
    start = content.rfind(b"\n", 0, position) + 1
    row = parse_json(content[start : content.find(b"\n", position) + 1].decode())
    if not isinstance(row, dict):
        raise ValueError(f"the row at byte {start} is not a JSON object")
    return row


def _add_sizes(run: Run, path: Path) -> None:
    for folder, _, names in os.walk(path):
        inside = os.path.relpath(folder, path).startswith("global_step_")
        for name in names:
            with suppress(FileNotFoundError):  # the run is writing
                size = os.lstat(os.path.join(folder, name)).st_size
                run.checkpoints, run.size = run.checkpoints + inside * size, run.size + (not inside) * size


def _print(runs: Sequence[Run]) -> None:
    console = Console()
    columns = [*zip(COLUMNS, *map(_cells, runs), strict=True)]
    columns = [column for column in columns if any(cell != "-" for cell in column[1:])]
    if console.is_terminal:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for name, *_ in columns:
            table.add_column(
                name, justify="right" if name in NUMBERS else "left", overflow="fold", no_wrap=name in NO_WRAP
            )
        for row in [*zip(*columns, strict=True)][1:]:
            table.add_row(*map(escape, row))
        console.print(table, highlight=False)
        return
    print(aligned([*zip(*columns, strict=True)]))


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as lines with aligned columns, without truncation."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(set_cell_size, row, widths)).rstrip() for row in rows)


def _cells(run: Run) -> tuple[str, ...]:
    state, figure = run.state, "-" if run.step is None else str(run.step)
    if state == "running":
        state += f", last seen {duration(max(0.0, time.time() - run.last_seen))} ago"
    return (
        run.name,
        state + (f" on {run.host}" if run.host else ""),
        figure + (f"/{run.total}" if run.total else ""),
        "-" if run.reward is None else f"{run.reward:.3f}",
        "-" if run.validation is None else f"{run.validation:.3f}",
        run.label or "-",
        "-" if run.seconds is None else duration(run.seconds),
        time.strftime("%m-%d %H:%M", time.localtime(run.started or run.last_seen)),
        size(run.size),
        size(run.checkpoints) if run.checkpoints else "-",
        run.sweep or "-",
    )


def duration(seconds: float) -> str:
    """Format a duration in s, min, h or d."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def size(count: int) -> str:
    """Format bytes in KiB, MiB or GiB."""
    for unit, length in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= length:
            return f"{count / length:.1f} {unit}"
    return f"{count / 1024:.0f} KiB"
