"""`rlfuse slots [RUN_DIR]`: show the slots of a running job; `slots drain 3`, `leave 3`, `restore 3` change one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rlfuse.errors import RunError
from rlfuse.observe.terminal import FILE
from rlfuse.run_folder import slots as disk
from rlfuse.run_folder import status
from rlfuse.tools.listing import aligned, find
from rlfuse.tools.watch import read_view

COLUMNS = ("slot", "node", "device", "rate", "state", "does")
HELP = """\
rlfuse slots [RUN_DIR]               which slots there are, and what they do
rlfuse slots drain SLOT [RUN_DIR]    the slot gets no more work; its samples go on elsewhere, no number changes;
                                     with --until-recovered it works again once it is as fast as the others
rlfuse slots restore SLOT [RUN_DIR]  the slot gets work again
rlfuse slots leave SLOT [RUN_DIR]    its node may go: once the step under way is saved, another takes its place

`rate`: seconds that a slot's work takes for each that it takes a typical one. Drained slots do some fixed work between
steps, which tells theirs.
"""


def main(argv: Sequence[str]) -> None:
    """List, or ask the run for a change. RunError where none goes on, SlotRefused where the run can't do it."""
    do = argv[0] if argv and argv[0] in ("drain", "restore", "leave") else ""
    parser = argparse.ArgumentParser(
        prog=f"rlfuse slots {do}".rstrip(), formatter_class=argparse.RawDescriptionHelpFormatter, description=HELP
    )
    if do:
        parser.add_argument("slot", type=int, metavar="SLOT", help="its number, as rlfuse slots lists it")
    if do == "drain":
        parser.add_argument(
            "--until-recovered", action="store_true", help="it works again once it is as fast as the others"
        )
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN_DIR", help="default: the one that goes on in runs/")
    arguments = parser.parse_args(argv[1:] if do else argv)
    folder = find_running(arguments.run)
    if do:
        print(disk.send_request(folder, do, arguments.slot, do == "drain" and arguments.until_recovered))
    else:
        print(table(disk.read(folder), read_activity(folder)))


def find_running(folder: Path | None, top: Path = Path("runs")) -> Path:
    """The folder of a run that goes on: this one, or the only one below `top`. RunError where there is none."""
    if folder is None:
        found = [path for path in find(top) if _goes_on(path)]
        if len(found) == 1:
            return found[0]
        told = f"{len(found)} runs go on there: {', '.join(map(str, found))}" if found else "no running job"
        raise RunError(f"{top}: {told}; give the folder of one")
    if (run := status.read(folder)) is None:
        raise RunError(f"{folder}: is no run's folder, as there is no {status.FILE}; rlfuse runs lists those there are")
    if (state := status.state_now(folder, run)) != "running":
        raise RunError(f"{folder}: the run doesn't go on ({state}), so that its slots are nobody's")
    return folder


def _goes_on(folder: Path) -> bool:
    run = status.read(folder)
    return run is not None and status.state_now(folder, run) == "running"


def read_activity(folder: Path) -> list[tuple[str, int]]:
    """What each slot does and how many samples it has, as the live view says; empty between steps."""
    try:
        return [(str(what), int(samples)) for what, samples in read_view(folder / FILE)[1].slots]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def table(states: Sequence[disk.SlotState], does: Sequence[tuple[str, int]]) -> str:
    """A line for each slot."""
    rows = [COLUMNS]
    for each in states:
        what, samples = does[each.index] if each.index < len(does) else ("-", 0)
        told = f"{what}, {samples} samples" if samples else what
        rows.append((str(each.index), each.node, each.device, f"{each.rate:.2f}", each.state, told))
    return aligned(rows)
