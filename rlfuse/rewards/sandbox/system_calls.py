"""Linux system calls that untrusted code may make, by family, with the reason.

An allowed call affects only the process itself or its open descriptors. Landlock restricts files by path; this filter
covers operations that some Landlock version does not. Newer calls get ENOSYS, so that libraries fall back.
All other known calls get EPERM: other processes and their memory, sessions, networks, shared memory and queues, locked
memory, attributes and links of files, `truncate` by path, io_uring and other calls that bypass filters, scheduling,
identities, namespaces, keys, kernel modules, and clock, name and disks of the machine.
A condition compares only the bits that the kernel reads: WORD for an `int`.
"""

from __future__ import annotations

WORD = 0xFFFF_FFFF
ALL = 0xFFFF_FFFF_FFFF_FFFF
OWN_PID = -1
"""Placeholder value for the process's own ID."""

Check = tuple[int, int, int]
"""(argument index, mask, value): true if the masked argument equals the value."""
Condition = tuple[tuple[Check, ...], ...]
"""Alternatives: a call is allowed if all checks of one alternative are true."""

# Linux 6.18; the position of a name is its number. "-" is an unused number.
_X86_64 = """
    read write open close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask
    rt_sigreturn ioctl pread64 pwrite64 readv writev access pipe select sched_yield mremap msync mincore madvise
    shmget shmat shmctl dup dup2 pause nanosleep getitimer alarm setitimer getpid sendfile socket connect accept
    sendto recvfrom sendmsg recvmsg shutdown bind listen getsockname getpeername socketpair setsockopt getsockopt
    clone fork vfork execve exit wait4 kill uname semget semop semctl shmdt msgget msgsnd msgrcv msgctl fcntl flock
    fsync fdatasync truncate ftruncate getdents getcwd chdir fchdir rename mkdir rmdir creat link unlink symlink
    readlink chmod fchmod chown fchown lchown umask gettimeofday getrlimit getrusage sysinfo times ptrace getuid
    syslog getgid setuid setgid geteuid getegid setpgid getppid getpgrp setsid setreuid setregid getgroups setgroups
    setresuid getresuid setresgid getresgid getpgid setfsuid setfsgid getsid capget capset rt_sigpending
    rt_sigtimedwait rt_sigqueueinfo rt_sigsuspend sigaltstack utime mknod uselib personality ustat statfs fstatfs
    sysfs getpriority setpriority sched_setparam sched_getparam sched_setscheduler sched_getscheduler
    sched_get_priority_max sched_get_priority_min sched_rr_get_interval mlock munlock mlockall munlockall vhangup
    modify_ldt pivot_root _sysctl prctl arch_prctl adjtimex setrlimit chroot sync acct settimeofday mount umount2
    swapon swapoff reboot sethostname setdomainname iopl ioperm create_module init_module delete_module
    get_kernel_syms query_module quotactl nfsservctl getpmsg putpmsg afs_syscall tuxcall security gettid readahead
    setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr
    lremovexattr fremovexattr tkill time futex sched_setaffinity sched_getaffinity set_thread_area io_setup
    io_destroy io_getevents io_submit io_cancel get_thread_area lookup_dcookie epoll_create epoll_ctl_old
    epoll_wait_old remap_file_pages getdents64 set_tid_address restart_syscall semtimedop fadvise64 timer_create
    timer_settime timer_gettime timer_getoverrun timer_delete clock_settime clock_gettime clock_getres
    clock_nanosleep exit_group epoll_wait epoll_ctl tgkill utimes vserver mbind set_mempolicy get_mempolicy mq_open
    mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr kexec_load waitid add_key request_key keyctl
    ioprio_set ioprio_get inotify_init inotify_add_watch inotify_rm_watch migrate_pages openat mkdirat mknodat
    fchownat futimesat newfstatat unlinkat renameat linkat symlinkat readlinkat fchmodat faccessat pselect6 ppoll
    unshare set_robust_list get_robust_list splice tee sync_file_range vmsplice move_pages utimensat epoll_pwait
    signalfd timerfd_create eventfd fallocate timerfd_settime timerfd_gettime accept4 signalfd4 eventfd2
    epoll_create1 dup3 pipe2 inotify_init1 preadv pwritev rt_tgsigqueueinfo perf_event_open recvmmsg fanotify_init
    fanotify_mark prlimit64 name_to_handle_at open_by_handle_at clock_adjtime syncfs sendmmsg setns getcpu
    process_vm_readv process_vm_writev kcmp finit_module sched_setattr sched_getattr renameat2 seccomp getrandom
    memfd_create kexec_file_load bpf execveat userfaultfd membarrier mlock2 copy_file_range preadv2 pwritev2
    pkey_mprotect pkey_alloc pkey_free statx io_pgetevents rseq uretprobe uprobe
"""
_AARCH64 = """
    io_setup io_destroy io_submit io_cancel io_getevents setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr
    listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr getcwd lookup_dcookie eventfd2
    epoll_create1 epoll_ctl epoll_pwait dup dup3 fcntl inotify_init1 inotify_add_watch inotify_rm_watch ioctl
    ioprio_set ioprio_get flock mknodat mkdirat unlinkat symlinkat linkat renameat umount2 mount pivot_root
    nfsservctl statfs fstatfs truncate ftruncate fallocate faccessat chdir fchdir chroot fchmod fchmodat fchownat
    fchown openat close vhangup pipe2 quotactl getdents64 lseek read write readv writev pread64 pwrite64 preadv
    pwritev sendfile pselect6 ppoll signalfd4 vmsplice splice tee readlinkat newfstatat fstat sync fsync fdatasync
    sync_file_range timerfd_create timerfd_settime timerfd_gettime utimensat acct capget capset personality exit
    exit_group waitid set_tid_address unshare futex set_robust_list get_robust_list nanosleep getitimer setitimer
    kexec_load init_module delete_module timer_create timer_gettime timer_getoverrun timer_settime timer_delete
    clock_settime clock_gettime clock_getres clock_nanosleep syslog ptrace sched_setparam sched_setscheduler
    sched_getscheduler sched_getparam sched_setaffinity sched_getaffinity sched_yield sched_get_priority_max
    sched_get_priority_min sched_rr_get_interval restart_syscall kill tkill tgkill sigaltstack rt_sigsuspend
    rt_sigaction rt_sigprocmask rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_sigreturn setpriority getpriority
    reboot setregid setgid setreuid setuid setresuid getresuid setresgid getresgid setfsuid setfsgid times setpgid
    getpgid getsid setsid getgroups setgroups uname sethostname setdomainname getrlimit setrlimit getrusage umask
    prctl getcpu gettimeofday settimeofday adjtimex getpid getppid getuid geteuid getgid getegid gettid sysinfo
    mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr msgget msgctl msgrcv msgsnd semget semctl
    semtimedop semop shmget shmctl shmat shmdt socket socketpair bind listen accept connect getsockname getpeername
    sendto recvfrom setsockopt getsockopt shutdown sendmsg recvmsg readahead brk munmap mremap add_key request_key
    keyctl clone execve mmap fadvise64 swapon swapoff mprotect msync mlock munlock mlockall munlockall mincore
    madvise remap_file_pages mbind get_mempolicy set_mempolicy migrate_pages move_pages rt_tgsigqueueinfo
    perf_event_open accept4 recvmmsg - - - - - - - - - - - - - - - - wait4 prlimit64 fanotify_init fanotify_mark
    name_to_handle_at open_by_handle_at clock_adjtime syncfs setns sendmmsg process_vm_readv process_vm_writev kcmp
    finit_module sched_setattr sched_getattr renameat2 seccomp getrandom memfd_create bpf execveat userfaultfd
    membarrier mlock2 copy_file_range preadv2 pwritev2 pkey_mprotect pkey_alloc pkey_free statx io_pgetevents rseq
    kexec_file_load
"""
_FROM_424 = """
    pidfd_send_signal io_uring_setup io_uring_enter io_uring_register open_tree move_mount fsopen fsconfig fsmount
    fspick pidfd_open clone3 close_range openat2 pidfd_getfd faccessat2 process_madvise epoll_pwait2 mount_setattr
    quotactl_fd landlock_create_ruleset landlock_add_rule landlock_restrict_self memfd_secret process_mrelease
    futex_waitv set_mempolicy_home_node cachestat fchmodat2 map_shadow_stack futex_wake futex_wait futex_requeue
    statmount listmount lsm_get_self_attr lsm_set_self_attr lsm_list_modules mseal setxattrat getxattrat listxattrat
    removexattrat open_tree_attr file_getattr file_setattr
"""


def _numbered(names: str) -> dict[int, str]:
    return {
        number: name
        for part, first in ((names, 0), (_FROM_424, 424))
        for number, name in enumerate(part.split(), first)
        if name != "-"
    }


MACHINES = {"x86_64": (0xC000003E, _numbered(_X86_64)), "aarch64": (0xC00000B7, _numbered(_AARCH64))}
"""`os.uname().machine` -> architecture ID (linux/audit.h) and names of calls by number."""

ALLOWED = {
    "its open descriptors": """
        read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek close close_range dup dup2 dup3
        pipe pipe2 copy_file_range""",
    "files by path or descriptor; Landlock restricts which": """
        creat unlink unlinkat rename renameat renameat2 ftruncate fsync fdatasync""",
    "existence and location of files, as Python needs to find modules": """
        stat fstat lstat newfstatat statx access faccessat faccessat2 statfs fstatfs readlink readlinkat getdents
        getdents64 getcwd chdir fchdir umask""",
    "its own memory, limited by RLIMIT_AS": "mprotect munmap brk mremap msync madvise",
    "its own threads: locks, their state and registers": """
        futex futex_wait futex_wake futex_requeue futex_waitv set_robust_list set_tid_address rseq arch_prctl gettid
        sched_yield getcpu""",
    "waiting for its open descriptors": """
        poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd
        eventfd2 timerfd_create timerfd_settime timerfd_gettime""",
    "reading clocks and sleeping": """
        time gettimeofday clock_gettime clock_getres nanosleep clock_nanosleep times""",
    "signals to itself: handlers and alarms": """
        rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack signalfd
        signalfd4 pause alarm getitimer setitimer restart_syscall""",
    "both ends of a socket pair": "recvfrom shutdown getsockname getpeername getsockopt",
    "its identity, limits and resource usage; limits can only be lowered": """
        getpid getppid getpgid getpgrp getsid getuid geteuid getresuid getgid getegid getresgid getgroups getrlimit
        setrlimit getrusage""",
    "reading its scheduling": """
        getpriority sched_getaffinity sched_getparam sched_getscheduler sched_getattr sched_get_priority_max
        sched_get_priority_min sched_rr_get_interval""",
    "machine name, memory and random numbers": "uname sysinfo getrandom",
    "exit and wait": "exit exit_group wait4 waitid",
}
"""Family with the reason why it is allowed -> its calls."""


def _one_of(argument: int, *values: int) -> Condition:
    return tuple(((argument, WORD, value),) for value in values)


def _opening(flags: int) -> Condition:
    """Allow writing, or reading without O_TRUNC, and never O_TMPFILE.

    Access mode 3 needs no Landlock right and truncates files before Landlock version 3. Without O_TMPFILE, every new
    file changes the folder, which shows that there are files to measure.
    """
    access, truncate, nameless = 0o3, 0o1000, 0o20000000
    return tuple(
        ((flags, mask | nameless, value),) for mask, value in ((access | truncate, 0), (access, 1), (access, 2))
    )


_OF_ITSELF = _one_of(0, OWN_PID)
_F_SETFL, _O_ASYNC = 4, 0o20000
_FEW = 0x40000 | 0x2000
CONDITIONAL: dict[str, tuple[str, Condition]] = {
    "open": ("no truncation without write access, no unnamed files", _opening(1)),
    "openat": ("no truncation without write access, no unnamed files", _opening(2)),
    # Files, or MAP_ANONYMOUS with MAP_PRIVATE. Shared memory persists while one of its pages is mapped, so RLIMIT_AS
    # would not limit it.
    "mmap": (
        "no huge or locked pages, which are scarce, and no anonymous shared memory",
        (((3, _FEW | 0x20, 0),), ((3, _FEW | 0x23, 0x22),)),
    ),
    # Flags of C libraries for threads; musl adds CLONE_DETACHED, which has no effect. `sandbox.host` counts threads.
    "clone": ("threads only, no processes", (((0, WORD & ~0x400000, 0x3D0F00),),)),
    "kill": ("signals to itself, as abort() sends", _OF_ITSELF),
    "tgkill": ("signals to its own threads", _OF_ITSELF),
    "prlimit64": ("its own limits", (*_one_of(0, 0), *_OF_ITSELF)),
    "socketpair": ("AF_UNIX, for the event loop of asyncio", _one_of(0, 1)),
    "sendto": ("to the other end of a pair, without address", (((4, ALL, 0),),)),
    # DUPFD GETFD SETFD GETFL, GETLK SETLK SETLKW, DUPFD_CLOEXEC, GETPIPE_SZ. Not OFD_SETLKW: a thread that waits for a
    # lock of its own process would keep a file open without a descriptor.
    "fcntl": (
        "copies, flags except O_ASYNC, and locks; no owner and no signal, which could reach any process of the user",
        (*_one_of(1, 0, 1, 2, 3, 5, 6, 7, 1030, 1032), ((1, WORD, _F_SETFL), (2, _O_ASYNC, 0))),
    ),
    # TCGETS TCGETS2 TIOCGWINSZ (is it a terminal?), FIONREAD FIONBIO FIONCLEX FIOCLEX.
    "ioctl": (
        "queries and flags of descriptors; no device operations, no owner, no FIOASYNC",
        _one_of(1, 0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451),
    ),
    # PR_SET_NAME PR_GET_NAME; not PR_SET_PDEATHSIG, with which the process could outlive its host.
    "prctl": ("names of threads", _one_of(0, 15, 16)),
}
"""Call -> what is allowed, and the condition for it; otherwise EPERM."""

ABSENT = {"flags in memory, which filters cannot see; C libraries fall back to clone and openat": "clone3 openat2"}
"""Reason -> calls that return ENOSYS."""
