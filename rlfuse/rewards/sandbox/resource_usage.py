"""Measure threads and files of a process with untrusted code from outside, through `/proc`."""

from __future__ import annotations

import contextlib
import os
import stat


def threads(pid: int) -> list[str]:
    """Return the thread IDs of a process; an empty list if it has ended."""
    with contextlib.suppress(OSError):
        return os.listdir(f"/proc/{pid}/task")
    return []


def files(pid: int, open_files: int, file_bytes: int) -> dict[int, int]:
    """Return file sizes in bytes by inode.

    Includes files in the working folder, open unlinked files, and mapped unlinked files, which count as `file_bytes`.
    """
    found: dict[int, int] = {}
    with os.scandir() as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # unlinked in between
                status = entry.stat(follow_symlinks=False)
                found[status.st_ino] = status.st_size
    # The first thread may have ended while others run; all threads share their files.
    tasks = [f"/proc/{pid}/task/{thread}" for thread in threads(pid)]
    task, mapped = next(((task, inodes) for task in tasks if (inodes := _mapped(task)) is not None), ("", set()))
    for number in range(open_files if task else 0):
        with contextlib.suppress(OSError):
            status = os.stat(f"{task}/fd/{number}")
            if stat.S_ISREG(status.st_mode) and not status.st_nlink:
                found[status.st_ino] = status.st_size
    return dict.fromkeys(mapped, file_bytes) | found


def _mapped(task: str) -> set[int] | None:
    """Return the inodes of mapped unlinked files; None if the thread has ended."""
    mapped, line = set(), b""
    with contextlib.suppress(OSError), open(f"{task}/maps", "rb") as lines:
        for line in lines:
            if line.endswith(b" (deleted)\n"):
                mapped.add(int(line.split(maxsplit=5)[4]))
    return mapped if line else None
