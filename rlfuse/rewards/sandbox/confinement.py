"""Confine the calling process before it runs untrusted code: limits, files, system calls, capabilities.

- limits (setrlimit): memory, CPU time, file size, open files, no core dumps. The kernel has no limit for threads or for
  all files together; `sandbox.host` polls these and kills.
- files (Landlock, Linux 5.13 and later): Python and system libraries are readable, one folder is writable, nothing else
  can be opened, `/proc` and `/dev/shm` included.
- calls (seccomp; x86-64 and 64-bit ARM): those that `system_calls` allows. No network, processes, programs or signals
  to others; also what older Landlock versions do not govern.
- capabilities are dropped.

Isolation is full with seccomp and any version of Landlock. Neither needs a privilege. What is missing is returned as
text, never ignored; nothing is loosened later. Uses only the standard library, so the process starts in milliseconds.
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
"""System calls; the numbers are the same on every architecture. Rights: linux/landlock.h."""
RIGHTS_OF_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""How many rights over files each version knows; later ones as the last."""
WRITE_FILE, READ_FILE, READ_DIR, REMOVE_FILE, MAKE_REG, TRUNCATE = (1 << bit for bit in (1, 2, 3, 5, 8, 14))
OF_FILES = WRITE_FILE | READ_FILE | TRUNCATE
"""Rights that a rule on a file, not a folder, may name."""

CONNECTIONS = 0b11
"""TCP: to bind and to connect, from version 4 on."""
SCOPES = 0b11
"""Abstract sockets and signals, from version 6 on: only to processes as confined as the sender."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _Below(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("folder", ctypes.c_int32))


def die_with_parent(parent: int) -> None:
    """End as soon as the process `parent`, which started this one, does; at once where it has already."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def limit(memory_bytes: int, cpu_s: int, file_bytes: int, open_files: int) -> None:
    """Set what this process and its children may use; CPU time (2 s at least) counts for each by itself."""
    for what, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, open_files),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        # A second after SIGXCPU, which tells why, comes SIGKILL.
        resource.setrlimit(what, (max(1, most - 1) if what == resource.RLIMIT_CPU else most, most))


def confine_files(writable: Sequence[str] = (), readable: Sequence[str] = ()) -> str | None:
    """Allow only Python's files, `readable`, and files in `writable`; later calls restrict further."""
    version = _landlock_version()
    if version < 1:
        return f"files can't be confined: Landlock is not available ({os.strerror(ctypes.get_errno())})"
    handled = (1 << RIGHTS_OF_ABI.get(version, max(RIGHTS_OF_ABI.values()))) - 1
    ruleset = _ruleset(_Ruleset(files=handled, network=CONNECTIONS if version >= 4 else 0))
    if ruleset < 0:
        return f"files can't be confined: Landlock gave no rules ({os.strerror(ctypes.get_errno())})"
    try:
        for path in (*_readable(), *readable):
            _allow(ruleset, path, (READ_FILE | READ_DIR) & handled)
        _allow(ruleset, "/dev/null", (READ_FILE | WRITE_FILE) & handled)
        for path in writable:
            _allow(ruleset, path, (OF_FILES | READ_DIR | REMOVE_FILE | MAKE_REG) & handled)
        LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if LIBC.syscall(LANDLOCK_RESTRICT, ruleset, 0):
            return f"files can't be confined: Landlock could not be switched on ({os.strerror(ctypes.get_errno())})"
    finally:
        os.close(ruleset)
    return None


def confine_calls() -> str | None:
    """From now on this process has no network, starts no process and reaches no other; it may start threads."""
    _drop_capabilities()
    _confine_signals()
    if problem := filter_calls(LIBC):
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    return problem


def _landlock_version() -> int:
    return LIBC.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)


def _ruleset(attributes: _Ruleset) -> int:
    # Fields younger than the kernel are 0, which every version takes.
    return LIBC.syscall(LANDLOCK_CREATE, ctypes.byref(attributes), ctypes.c_size_t(ctypes.sizeof(attributes)), 0)


def _confine_signals() -> None:
    """Let Landlock block signals to every process outside; the filter of system calls forbids them too."""
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
    """Grant rights below a folder or on a file; nothing if the path does not exist."""
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rule = _Below(rights if os.path.isdir(path) else rights & OF_FILES, place)
        if LIBC.syscall(LANDLOCK_ADD, ruleset, 1, ctypes.byref(rule), 0):
            raise OSError(ctypes.get_errno(), f"Landlock takes no rule for {path}")
    finally:
        os.close(place)
