"""Measure threads and files of a process with untrusted code from outside, by `/proc`."""

from __future__ import annotations

import contextlib
import os
import stat


def threads(pid: int) -> list[str]:
    """Their numbers; none where the process is gone."""
    with contextlib.suppress(OSError):
        return os.listdir(f"/proc/{pid}/task")
    return []


def files(pid: int, open_files: int, file_bytes: int) -> dict[int, int]:
    """Return sizes by inode of the folder's and unnamed files; those only in memory count as the largest."""
    found: dict[int, int] = {}
    with os.scandir() as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # unlinked in between
                held = entry.stat(follow_symlinks=False)
                found[held.st_ino] = held.st_size
    # The first thread may have ended while others go on; what they hold they share.
    tasks = [f"/proc/{pid}/task/{thread}" for thread in threads(pid)]
    task, mapped = next(((task, inodes) for task in tasks if (inodes := _mapped(task)) is not None), ("", set()))
    for number in range(open_files if task else 0):
        with contextlib.suppress(OSError):
            held = os.stat(f"{task}/fd/{number}")
            if stat.S_ISREG(held.st_mode) and not held.st_nlink:
                found[held.st_ino] = held.st_size
    return dict.fromkeys(mapped, file_bytes) | found


def _mapped(task: str) -> set[int] | None:
    """Return the mapped files without a name; None if the thread has ended."""
    mapped, line = set(), b""
    with contextlib.suppress(OSError), open(f"{task}/maps", "rb") as lines:
        for line in lines:
            if line.endswith(b" (deleted)\n"):
                mapped.add(int(line.split(maxsplit=5)[4]))
    return mapped if line else None
