"""Run a command and check that the machine was quiet: CPU time of other processes before and during the command.

    python tests/benchmarks/quiet.py [--note FILE] COMMAND ...

The command and its child processes are marked in their environment. The disturbance is the CPU time of all other
processes and of other virtual machines (steal), as a fraction of all cores. The command is not started if the
disturbance exceeds LIMIT before; the measurement is invalid if it exceeds LIMIT on average, or PEAK in any ten seconds.
Both exit with status 3; RLFUSE_BUSY=1 starts the command in any case, with a note. The last lines also go to FILE.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

MARK = "RLFUSE_MEASURED"
LIMIT, PEAK = 0.05, 0.25
BEFORE_S, WINDOW = 5, 10
"""Seconds of the check before the command, and one-second samples over which PEAK is averaged."""
DISTURBED = 3


class Others:
    """CPU time of processes without the mark."""

    def __init__(self, mark: str):
        self._mark, self._known, self._seen = f"{MARK}={mark}".encode(), {}, {}
        self._steal, self._at = psutil.cpu_times().steal, time.monotonic()
        self.share()

    def share(self) -> float:
        """Return the fraction of all cores used since the last call."""
        seen = dict(self._times())
        steal, now = psutil.cpu_times().steal, time.monotonic()
        took = sum(max(0.0, seconds - self._seen.get(who, 0.0)) for who, seconds in seen.items())
        share = (took + steal - self._steal) / ((now - self._at) * psutil.cpu_count() or 1)
        self._seen, self._steal, self._at = seen, steal, now
        return share

    def _times(self) -> Iterator[tuple[tuple[int, float], float]]:
        for process in psutil.process_iter(["ppid", "create_time", "cpu_times"]):
            who, times = (process.pid, process.info["create_time"]), process.info["cpu_times"]
            if times is None or process.info["ppid"] == 2 or process.pid in (2, os.getpid()) or self._ours(who):
                continue
            yield who, times.user + times.system

    def _ours(self, who: tuple[int, float]) -> bool:
        if not self._known.get(who):  # until exec, a process has the environment of its parent
            try:
                self._known[who] = self._mark in Path(f"/proc/{who[0]}/environ").read_bytes().split(b"\0")
            except OSError:
                self._known[who] = False
        return self._known[who]


def measure(command: list[str]) -> tuple[int, str]:
    """Return the exit status and the message."""
    others = Others(mark := uuid.uuid4().hex)
    time.sleep(BEFORE_S)
    before = others.share()
    if before > LIMIT and os.environ.get("RLFUSE_BUSY") != "1":
        return DISTURBED, f"not started: other processes take {before:.0%} of the machine; wait, or set RLFUSE_BUSY=1"
    began, shares = time.monotonic(), []
    process = subprocess.Popen(command, env=os.environ | {MARK: mark})
    while process.poll() is None:
        time.sleep(1.0)
        shares.append(others.share())
    took, mean = time.monotonic() - began, sum(shares) / len(shares)
    windows = [shares[at : at + WINDOW] for at in range(max(1, len(shares) - WINDOW + 1))]
    worst = max(sum(each) / len(each) for each in windows)
    quiet = max(before, mean) <= LIMIT and worst <= PEAK
    message = (
        f"other processes took {before:.1%} of the machine before, {mean:.1%} meanwhile, {worst:.1%} in the worst 10 s"
    )
    if process.returncode:
        return process.returncode, f"failed with status {process.returncode} after {took:.0f} s; {message}"
    return (0 if quiet else DISTURBED), f"{'quiet' if quiet else 'DISTURBED'}, {took:.0f} s; {message}"


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--note", type=Path, metavar="FILE")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    status, message = measure(arguments.command)
    print(f"[quiet] {message}")
    if arguments.note:
        arguments.note.parent.mkdir(parents=True, exist_ok=True)
        arguments.note.write_text(f"{message}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
