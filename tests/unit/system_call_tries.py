"""Test programs for each family of system calls, which `test_calls` runs in a confined process."""

TRIES = {
    "its open descriptors": """
        reader, writer = os.pipe()
        copy = os.dup2(os.dup(writer), 40)
        os.writev(copy, [b"a", b"b"])
        assert os.read(reader, 9) == b"ab"
        with open("one", "wb+") as one, open("two", "wb+") as two:
            os.pwrite(one.fileno(), b"text", 0)
            assert os.copy_file_range(one.fileno(), two.fileno(), 4) == 4
        shutil.copyfile("one", "three")
        with open("three", "rb+") as two:
            assert os.pread(two.fileno(), 9, 0) == b"text" and os.lseek(two.fileno(), 0, os.SEEK_END) == 4
        os.closerange(40, 42)""",
    "files by path or descriptor; Landlock restricts which": """
        with open("here", "wb") as file:
            file.write(b"12345")
            file.flush()
            os.ftruncate(file.fileno(), 2)
            os.fsync(file.fileno())
        os.rename("here", "there")
        open("there", "wb").close()
        os.unlink("there")""",
    "existence and location of files, as Python needs to find modules": """
        assert os.stat(".").st_mode and os.path.exists(os.__file__) and os.access(".", os.W_OK)
        assert os.statvfs(".").f_bsize and "lib" in os.listdir(sys.base_prefix + "/lib") + ["lib"]
        os.chdir(os.getcwd())
        os.umask(os.umask(0o22))
        assert os.path.realpath("/lib")""",
    "its own memory, limited by RLIMIT_AS": """
        memory = mmap.mmap(-1, 1 << 24, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTNEED)
        memory.resize(1 << 25)
        memory.flush()
        memory.close()
        assert len(bytearray(1 << 26)) == 1 << 26""",
    "its own threads: locks, their state and registers": """
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert sorted(pool.map(lambda n: n * n, range(64)))[-1] == 63 * 63
        assert threading.get_native_id()""",
    "waiting for its open descriptors": """
        reader, writer = os.pipe()
        os.write(writer, b"1")
        for kind in (selectors.SelectSelector, selectors.PollSelector, selectors.EpollSelector):
            with kind() as selector:
                selector.register(reader, selectors.EVENT_READ)
                assert selector.select(1)
        assert os.eventfd_read(os.eventfd(3)) == 3""",
    "reading clocks and sleeping": """
        time.sleep(0.001)
        assert time.time() and time.monotonic() and time.process_time() and time.clock_getres(time.CLOCK_REALTIME)
        assert os.times()""",
    "signals to itself: handlers and alarms": """
        heard = []
        signal.signal(signal.SIGALRM, lambda *_: heard.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        signal.pause()
        signal.alarm(0)
        assert heard and not signal.sigpending() and not signal.pthread_sigmask(signal.SIG_BLOCK, [])""",
    "both ends of a socket pair": """
        left, right = socket.socketpair()
        left.setblocking(False)
        left.send(b"x")
        assert right.recv(1) == b"x" and right.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
        left.shutdown(socket.SHUT_RDWR)""",
    "its identity, limits and resource usage; limits can only be lowered": """
        assert os.getpid() and os.getppid() and os.getpgid(0) and os.getsid(0) and os.getresuid() and os.getresgid()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss and os.getgroups() is not None
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard + 1, hard + 1))
            raise AssertionError("a limit rose")
        except (PermissionError, ValueError):
            pass""",
    "reading its scheduling": """
        assert os.sched_getaffinity(0) and os.cpu_count() and os.getpriority(os.PRIO_PROCESS, 0) is not None
        assert os.sched_getscheduler(0) is not None and os.sched_get_priority_max(os.SCHED_FIFO)""",
    "machine name, memory and random numbers": """
        assert os.uname().sysname == "Linux" and os.sysconf("SC_PHYS_PAGES") and os.urandom(4) and random.random()""",
    "exit and wait": """
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            pass""",
    "open": """
        for mode in ("w", "a", "r", "r+", "w+"):
            open("again", mode).close()
        assert tried("open", b"again", os.O_RDONLY | os.O_TRUNC) and tried("open", b"again", 3)""",
    "openat": """
        folder = os.open(".", os.O_RDONLY)
        os.close(os.open("at", os.O_CREAT | os.O_TRUNC | os.O_WRONLY, dir_fd=folder))
        tempfile.TemporaryFile().close()
        for flags in (os.O_TMPFILE | os.O_RDWR, os.O_TMPFILE | os.O_WRONLY | HIGH):
            assert tried("openat", folder, b".", flags, 0o600) == errno.EPERM
        assert tried("openat", folder, b"at", os.O_RDONLY | os.O_TRUNC) and tried("openat", folder, b"at", 3 | HIGH)""",
    "mmap": """
        with open("mapped", "wb+") as file:
            file.write(bytes(4096))
            file.flush()
            mmap.mmap(file.fileno(), 4096, mmap.MAP_SHARED).close()
        for flags in (0x40022, 0x2022, 0x21, 0x23, 0x21 | HIGH):
            assert tried("mmap", 0, 4096, 3, flags, -1, 0) == errno.EPERM""",
    "clone": """
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
        for flags in (17, 0x11 | HIGH, 0x10000, 0x3D0F00 | 0x10000000):
            assert tried("clone", flags) == errno.EPERM""",
    "kill": """
        os.kill(os.getpid(), 0)
        assert not tried("kill", os.getpid() | HIGH, 0)
        for pid in (os.getppid(), os.getppid() | HIGH, 0, -1, 1):
            assert tried("kill", pid, 0) == errno.EPERM""",
    "tgkill": """
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.raise_signal(signal.SIGUSR1)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        assert tried("tgkill", os.getppid(), os.getppid(), 0) == errno.EPERM""",
    "prlimit64": """
        resource.prlimit(os.getpid(), resource.RLIMIT_CPU)
        assert tried("prlimit64", os.getppid(), 0, 0, 0) == errno.EPERM""",
    "socketpair": """
        socket.socketpair()[0].close()
        assert tried("socketpair", 16, 3, 0, 0) == errno.EPERM""",
    "sendto": """
        left, right = socket.socketpair(type=socket.SOCK_DGRAM)
        left.send(b"x")
        for address in (ctypes.addressof(ctypes.create_string_buffer(b"\\1\\0/x")), HIGH):
            assert tried("sendto", left.fileno(), b"x", 1, 0, address, 4) == errno.EPERM""",
    "fcntl": """
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_inheritable(reader, True)
        with open("locked", "w") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for command in (8, 10, 15, 9, 36, 37, 38, 1024, 1026, 1031, 1033):
            for given in (command, command | HIGH, command | 7 * HIGH):
                assert tried("fcntl", reader, given, os.getppid()) == errno.EPERM
        for flags in (fcntl.FASYNC, fcntl.FASYNC | HIGH):
            assert tried("fcntl", reader, fcntl.F_SETFL, flags) == errno.EPERM""",
    "ioctl": """
        reader, writer = os.pipe()
        assert not os.isatty(reader)
        os.set_inheritable(reader, True)
        assert not tried("ioctl", reader, 0x541B, ctypes.addressof(ctypes.c_int()))
        owner = ctypes.c_int(os.getppid())
        for request in (0x8901, 0x8902, 0x5452, 0x5412, 0x5410, 0x40045436):
            for given in (request, request | HIGH):
                assert tried("ioctl", reader, given, ctypes.addressof(owner)) == errno.EPERM""",
    "prctl": """
        assert not tried("prctl", 15, ctypes.addressof(ctypes.create_string_buffer(b"name")))
        for option in (1, 1 | HIGH, 4, 22, 35):
            assert tried("prctl", option, 0, 0, 0, 0) == errno.EPERM""",
}
"""Program for each allowed family, and for values within and beyond each condition."""

TRYING = """
import concurrent.futures, ctypes, errno, fcntl, mmap, os, random, resource, selectors, shutil, signal, socket, sys
import tempfile
import textwrap, threading, time, traceback
HIGH = 1 << 32
LIBC = ctypes.CDLL(None, use_errno=True)
def raw(number, *given):
    ctypes.set_errno(0)
    LIBC.syscall.restype = ctypes.c_long
    given = [one if isinstance(one, bytes) else ctypes.c_ulong(one & (1 << 64) - 1) for one in given]
    return ctypes.get_errno() if LIBC.syscall(ctypes.c_long(number), *given) == -1 else 0
def f(numbers, tries, denied):
    def tried(name, *given):
        return raw(numbers[name], *given) if name in numbers else errno.EPERM
    failures = {}
    for name, source in tries.items():
        try:
            exec(textwrap.dedent(source), globals() | {"tried": tried})
        except BaseException:
            failures[name] = traceback.format_exc()[-300:]
    return failures, {name: tried(name, 0, 0, 0, 0, 0, 0) for name in denied}, raw(0x40000000 | 39), raw(500)
"""
