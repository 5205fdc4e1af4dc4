"""Confine the calling process before it runs untrusted code: limits, files, system calls, capabilities.

- limits (setrlimit): memory, CPU time, file size, open files, no core dumps. The kernel has no limit for threads or
  the total size of files; `sandbox.host` polls both and kills the process.
- files (Landlock, Linux 5.13 and later): Python and system libraries are readable, one folder is writable, nothing else
  can be opened, including `/proc` and `/dev/shm`.
- system calls (seccomp; x86-64 and 64-bit ARM): only those in `system_calls`. No network, processes, programs or
  signals to other processes. The filter also covers operations that older Landlock versions do not.
- capabilities are dropped.

Isolation is complete with seccomp and any version of Landlock. Neither needs privileges. Missing isolation is returned
as text, never ignored; limits are never relaxed later. Uses only the standard library, for a start in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Sequence

from rlfuse.rewards.sandbox.seccomp import filter_calls

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CAPSET_VERSION = 0x20080522
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
"""System call numbers, equal on every architecture. Rights are from linux/landlock.h."""
RIGHTS_OF_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Number of file rights by Landlock version; later versions as the last one."""
WRITE_FILE, READ_FILE, READ_DIR, REMOVE_FILE, MAKE_REG, TRUNCATE = (1 << bit for bit in (1, 2, 3, 5, 8, 14))
OF_FILES = WRITE_FILE | READ_FILE | TRUNCATE
"""Rights that are valid in a rule for a file, as opposed to a folder."""

CONNECTIONS = 0b11
"""TCP bind and connect, from version 4 on."""
SCOPES = 0b11
"""Abstract sockets and signals, from version 6 on: restricted to processes in the same or a nested domain."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _Below(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("folder", ctypes.c_int32))


def die_with_parent(parent: int) -> None:
    """Die with the process `parent`, which started this one; exit now if it is already gone."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def limit(memory_bytes: int, cpu_s: int, file_bytes: int, open_files: int) -> None:
    """Set resource limits of this process and its children. CPU time (at least 2 s) counts per process."""
    for name, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, open_files),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(name)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # SIGKILL follows one second after SIGXCPU, which identifies the reason.
        resource.setrlimit(name, (max(1, value - 1) if name == resource.RLIMIT_CPU else value, value))


def confine_files(writable: Sequence[str] = (), readable: Sequence[str] = ()) -> str | None:
    """Restrict file access to Python, `readable` and folders in `writable`. Return what is missing, or None.

    Further calls can only restrict more.
    """
    version = _landlock_version()
    if version < 1:
        return f"files can't be confined: Landlock is not available ({os.strerror(ctypes.get_errno())})"
    handled = (1 << RIGHTS_OF_ABI.get(version, max(RIGHTS_OF_ABI.values()))) - 1
    ruleset = _ruleset(_Ruleset(files=handled, network=CONNECTIONS if version >= 4 else 0))
    if ruleset < 0:
        return f"files can't be confined: Landlock created no ruleset ({os.strerror(ctypes.get_errno())})"
    try:
        for path in (*_readable(), *readable):
            _allow(ruleset, path, (READ_FILE | READ_DIR) & handled)
        _allow(ruleset, "/dev/null", (READ_FILE | WRITE_FILE) & handled)
        for path in writable:
            _allow(ruleset, path, (OF_FILES | READ_DIR | REMOVE_FILE | MAKE_REG) & handled)
        LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if LIBC.syscall(LANDLOCK_RESTRICT, ruleset, 0):
            return f"files can't be confined: Landlock could not be enabled ({os.strerror(ctypes.get_errno())})"
    finally:
        os.close(ruleset)
    return None


def confine_calls() -> str | None:
    """Deny network, new processes and access to other processes; threads are allowed. Return the problem, or None."""
    _drop_capabilities()
    _confine_signals()
    if problem := filter_calls(LIBC):
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    return problem


def _landlock_version() -> int:
    return LIBC.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)


def _ruleset(attributes: _Ruleset) -> int:
    # Fields that the kernel does not know are 0, which every version accepts.
    return LIBC.syscall(LANDLOCK_CREATE, ctypes.byref(attributes), ctypes.c_size_t(ctypes.sizeof(attributes)), 0)


def _confine_signals() -> None:
    """Block signals to other processes by Landlock, in addition to the seccomp filter."""
    if _landlock_version() < 6:
        return
    ruleset = _ruleset(_Ruleset(scoped=SCOPES))
    LIBC.syscall(LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


def _drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(CAPSET_VERSION, 0)
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    LIBC.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def _readable() -> list[str]:
    python = {f"{prefix}/{lib}" for prefix in (sys.prefix, sys.base_prefix) for lib in ("lib", "lib64")}
    system = {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo"}
    files = {"/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/random", "/dev/zero"}
    return sorted({*python, *system, *files, *(path for path in sys.path if path)})


def _allow(ruleset: int, path: str, rights: int) -> None:
    """Grant rights for a file or below a folder. No-op if the path does not exist."""
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rule = _Below(rights if os.path.isdir(path) else rights & OF_FILES, place)
        if LIBC.syscall(LANDLOCK_ADD, ruleset, 1, ctypes.byref(rule), 0):
            raise OSError(ctypes.get_errno(), f"Landlock rejected the rule for {path}")
    finally:
        os.close(place)
