"""`rlfuse slots [RUN_DIR]`: show the slots of a running job; `drain`, `leave` and `restore` change one."""

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

COLUMNS = ("slot", "node", "device", "rate", "state", "activity")
HELP = """\
rlfuse slots [RUN_DIR]               list the slots and their activity
rlfuse slots drain SLOT [RUN_DIR]    assign no more work to the slot; its samples move to other slots, results are
                                     unchanged. With --until-recovered it is restored once it is as fast as the others
rlfuse slots restore SLOT [RUN_DIR]  assign work to the slot again
rlfuse slots leave SLOT [RUN_DIR]    release its node: after the current step is saved, another node replaces it

`rate`: time of a slot for the same work, relative to a typical slot. Drained slots run a fixed workload between steps,
by which their rate is measured.
"""


def main(argv: Sequence[str]) -> None:
    """List slots, or request a change from the run. RunError if no run is found, SlotRefused if the run refuses."""
    do = argv[0] if argv and argv[0] in ("drain", "restore", "leave") else ""
    parser = argparse.ArgumentParser(
        prog=f"rlfuse slots {do}".rstrip(), formatter_class=argparse.RawDescriptionHelpFormatter, description=HELP
    )
    if do:
        parser.add_argument("slot", type=int, metavar="SLOT", help="slot number, as listed by rlfuse slots")
    if do == "drain":
        parser.add_argument(
            "--until-recovered", action="store_true", help="restore it once it is as fast as the others"
        )
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN_DIR", help="default: the running job in runs/")
    arguments = parser.parse_args(argv[1:] if do else argv)
    folder = find_running(arguments.run)
    if do:
        print(disk.send_request(folder, do, arguments.slot, do == "drain" and arguments.until_recovered))
    else:
        print(table(disk.read(folder), read_activity(folder)))


def find_running(folder: Path | None, top: Path = Path("runs")) -> Path:
    """Return the folder of a running job: `folder`, or the only one below `top`. RunError if there is none."""
    if folder is None:
        found = [path for path in find(top) if _is_running(path)]
        if len(found) == 1:
            return found[0]
        state = f"{len(found)} running jobs: {', '.join(map(str, found))}" if found else "no running job"
        raise RunError(f"{top}: {state}; give the run folder")
    if (run := status.read(folder)) is None:
        raise RunError(f"{folder}: not a run folder, as it has no {status.FILE}; rlfuse runs lists the run folders")
    if (state := status.state_now(folder, run)) != "running":
        raise RunError(f"{folder}: the run is not running ({state}), so it has no slots")
    return folder


def _is_running(folder: Path) -> bool:
    run = status.read(folder)
    return run is not None and status.state_now(folder, run) == "running"


def read_activity(folder: Path) -> list[tuple[str, int]]:
    """Return (activity, samples) of each slot from the live view; empty between steps."""
    try:
        return [(str(what), int(samples)) for what, samples in read_view(folder / FILE)[1].slots]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def table(states: Sequence[disk.SlotState], activities: Sequence[tuple[str, int]]) -> str:
    """Format a line for each slot."""
    rows = [COLUMNS]
    for each in states:
        what, samples = activities[each.index] if each.index < len(activities) else ("-", 0)
        activity = f"{what}, {samples} samples" if samples else what
        rows.append((str(each.index), each.node, each.device, f"{each.rate:.2f}", each.state, activity))
    return aligned(rows)
