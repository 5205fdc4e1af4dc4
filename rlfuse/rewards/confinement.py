"""What the kernel forbids a process that runs code nobody has read: limits, files, network, other processes.

Role: called inside processes that `sandbox_host` and `bounded_worker` are, before they touch what a model wrote. Only
the standard library, and nothing of rlfuse, so that such a process starts in milliseconds.

What holds where:
- *limits* (setrlimit; everywhere): memory, CPU time, size and number of open files, no core dumps;
- *files* (Landlock; Linux 5.13 and later with Landlock among its security modules): Python and system libraries can be
  read, one folder written (files only, no folders, links or devices), nothing else opened, `/proc` and `/dev/shm`
  included. Landlock does not cover attributes (`chmod`, `utime`); the filter of system calls does;
- *calls* (seccomp, where `libseccomp.so.2` is installed, as it is beside apt and systemd): no sockets, no new processes
  and no programs, no signals to others, no leaving the process group, no memory that outlives its process, no
  attributes of files, no `ptrace`, `io_uring`, `bpf`, mounts and namespaces. Threads are allowed; memory bounds them;
- *capabilities* are dropped, so that root is no more than the owner of its files.

Both Landlock and seccomp need no privilege, and work in containers whose profile forbids user namespaces, which is why
there are none. With no new processes there is also nothing that could stay behind or fork without end; where seccomp is
missing, RLIMIT_NPROC forbids new processes and threads, except to root, whom it does not bind. None of this is a
virtual machine: a hole in the kernel is a hole here.
Invariants: each function says what it could not do as text, None means done; nothing once confined is ever loosened.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Sequence

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

ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026
NOT_EQUAL, EQUAL, MASKED_EQUAL = 1, 4, 7
CLONE_THREAD, AF_UNIX = 0x00010000, 1
OWNER_OF_SIGNALS = (8, 10, 15)
"""fcntl's F_SETOWN, F_SETSIG, F_SETOWN_EX: with them a pipe sends any signal to any process of the user."""
FORBIDDEN = """
    socket accept accept4 connect bind listen sendmsg sendmmsg fork vfork execve execveat setsid setpgid unshare
    setns rt_sigqueueinfo rt_tgsigqueueinfo pidfd_open pidfd_send_signal pidfd_getfd ptrace process_vm_readv
    process_vm_writev process_madvise kcmp shmget msgget semget mq_open memfd_create memfd_secret chmod fchmod
    fchmodat fchmodat2 chown lchown fchown fchownat setxattr lsetxattr fsetxattr removexattr lremovexattr
    fremovexattr setxattrat removexattrat sched_setaffinity sched_setscheduler sched_setparam sched_setattr
    setpriority ioprio_set migrate_pages move_pages utime utimes futimesat utimensat io_uring_setup bpf
    perf_event_open userfaultfd keyctl add_key request_key personality mount umount2 fsopen fsmount move_mount
    open_tree mount_setattr pivot_root chroot open_by_handle_at name_to_handle_at fanotify_init inotify_init
    inotify_init1
"""


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64),)


class _Below(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("folder", ctypes.c_int32))


class _Compare(ctypes.Structure):
    _fields_ = (("place", ctypes.c_uint), ("how", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


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


def confine_files(writable: Sequence[str] = ()) -> str | None:
    """From now on open only what Python and its libraries are read from, and files in the `writable` folders."""
    version = LIBC.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return f"Landlock is not available ({os.strerror(ctypes.get_errno())})"
    handled = (1 << RIGHTS_OF_ABI.get(version, max(RIGHTS_OF_ABI.values()))) - 1
    attributes = _Ruleset(handled)
    ruleset = LIBC.syscall(LANDLOCK_CREATE, ctypes.byref(attributes), ctypes.c_size_t(ctypes.sizeof(attributes)), 0)
    if ruleset < 0:
        return f"Landlock gave no rules ({os.strerror(ctypes.get_errno())})"
    try:
        for path in _readable():
            _allow(ruleset, path, (READ_FILE | READ_DIR) & handled)
        _allow(ruleset, "/dev/null", (READ_FILE | WRITE_FILE) & handled)
        for path in writable:
            _allow(ruleset, path, (OF_FILES | READ_DIR | REMOVE_FILE | MAKE_REG) & handled)
        LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if LIBC.syscall(LANDLOCK_RESTRICT, ruleset, 0):
            return f"Landlock could not be switched on ({os.strerror(ctypes.get_errno())})"
    finally:
        os.close(ruleset)
    return None


def load_seccomp() -> ctypes.CDLL | None:
    """libseccomp, to be handed to `confine_calls`: loaded once, before files are confined; None where there is none."""
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return None
    library.seccomp_init.restype = ctypes.c_void_p
    for function in (library.seccomp_load, library.seccomp_release):
        function.argtypes = (ctypes.c_void_p,)
    library.seccomp_rule_add_array.argtypes = (
        ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(_Compare),
    )  # fmt: skip
    return library


def confine_calls(library: ctypes.CDLL | None) -> str | None:
    """From now on this process has no network, starts no process and reaches no other; it may start threads."""
    _drop_capabilities()
    problem = "libseccomp.so.2 is not installed" if library is None else _filter(library)
    if problem:
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    return problem


def _filter(library: ctypes.CDLL) -> str | None:
    context = library.seccomp_init(ALLOW)
    if not context:
        return "libseccomp could not make a filter"
    me = os.getpid()
    # Allowed: signals to oneself, as abort() sends them; pairs of sockets, which asyncio wakes its loop with, but to no
    # other address; threads. clone3 hides its flags in memory: C libraries are told there is none.
    rules = [(name, EPERM, ()) for name in FORBIDDEN.split()] + [
        ("kill", EPERM, (_Compare(0, NOT_EQUAL, me, 0),)),
        ("tkill", EPERM, ()),
        ("tgkill", EPERM, (_Compare(0, NOT_EQUAL, me, 0),)),
        ("prlimit64", EPERM, (_Compare(0, NOT_EQUAL, 0, 0),)),
        ("clone", EPERM, (_Compare(0, MASKED_EQUAL, CLONE_THREAD, 0),)),
        ("clone3", ENOSYS, ()),
        ("socketpair", EPERM, (_Compare(0, NOT_EQUAL, AF_UNIX, 0),)),
        ("sendto", EPERM, (_Compare(4, NOT_EQUAL, 0, 0),)),
        *(("fcntl", EPERM, (_Compare(1, EQUAL, command, 0),)) for command in OWNER_OF_SIGNALS),
    ]
    try:
        for name, action, compares in rules:
            number = library.seccomp_syscall_resolve_name(name.encode())
            if number == -1:  # younger than the library
                continue
            if library.seccomp_rule_add_array(
                context, action, number, len(compares), (_Compare * len(compares))(*compares)
            ):
                return f"libseccomp refused the rule for {name}"
        if library.seccomp_load(context):
            return "the kernel refused the filter of system calls"
    finally:
        library.seccomp_release(context)
    return None


def _drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(CAPSET_VERSION, 0)
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    LIBC.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def _readable() -> list[str]:
    """Where Python and the libraries it loads are."""
    python = {f"{prefix}/{lib}" for prefix in (sys.prefix, sys.base_prefix) for lib in ("lib", "lib64")}
    system = {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo"}
    files = {"/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/random", "/dev/zero"}
    return sorted({*python, *system, *files, *(path for path in sys.path if path)})


def _allow(ruleset: int, path: str, rights: int) -> None:
    """Rights below a folder, or on a file; nothing where there is no such path."""
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
