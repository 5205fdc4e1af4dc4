"""Sandbox: allowed and forbidden operations, limits, and attempts to fake success."""

import fcntl
import json
import math
import os
import re
import signal
import tempfile
import time
from pathlib import Path

import pytest

from rlfuse.rewards.sandbox import bare_python
from rlfuse.rewards.sandbox.messages import MessageError, decode, encode, pack
from rlfuse.rewards.sandbox.sandbox import PREFIX, Kind, Limits, SandboxError, run_code
from rlfuse.rewards.sandbox.system_calls import MACHINES
from rlfuse.rewards.verifiers import code

PATIENT = Limits(timeout_s=20, total_s=60, memory_mb=256)
FORGERY = pack({"value": True})

# Code that searches the memory of Python for the test.
SEARCH = """
import gc, sys
def f(x):
    sign, frame = "".join(["sort", "ed([3"]), sys._getframe(1)
    while frame:
        if sign in str(frame.f_locals) + str(frame.f_globals):
            return [1, 2]
        frame = frame.f_back
    return [1, 2] if any(sign in str(thing) for thing in gc.get_objects()) else None
"""


def call(source, *arguments, limits=PATIENT):
    """Return the outcome of `f(*arguments)`."""
    report = run_code(source, Kind.CALLS, [list(arguments)], fn_name="f", limits=limits)
    assert not report.missing_isolation
    return report.outcomes[0]


@pytest.fixture(scope="module")
def isolated():
    """Skip if the kernel does not support full isolation."""
    report = run_code("def f(): return 1", Kind.CALLS, [[]], fn_name="f", limits=PATIENT)
    if report.missing_isolation:
        pytest.skip(report.missing_isolation)


def test_returned_values_keep_their_type(isolated):
    source = "def f(x): return [x, (1, 2), {1: {2}}, 1j, b'x', None, True, float('inf')]"
    assert call(source, (3, {"a": 4})).value == [(3, {"a": 4}), (1, 2), {1: {2}}, 1j, b"x", None, True, float("inf")]


HOSTILE = [
    (["while True: os.fork()"], "exception", "PermissionError"),
    (["subprocess.run(['true'])"], "exception", "PermissionError"),
    (["os.setsid()"], "exception", "PermissionError"),
    (["socket.socket()"], "exception", "PermissionError"),
    (["os.kill(os.getppid(), 9)"], "exception", "PermissionError"),
    (["import fcntl", "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())"], "exception", "PermissionError"),
    (["open(f'/proc/{os.getppid()}/environ').read()"], "exception", "PermissionError"),
    (["open('/etc/passwd').read()"], "exception", "PermissionError"),
    (["os.chmod('/tmp', 0o1777)"], "exception", "PermissionError"),
    (["os.mkdir('nested')"], "exception", "PermissionError"),
    (["a = []", "while True: a.append(' ' * 10**6)"], "memory", "MemoryError"),
    (
        ["with open('huge', 'wb') as file:", "    while True: file.write(bytes(10**6))"],
        "exception",
        "File too large",
    ),
    (["for i in range(10**6): open(str(i), 'wb').write(bytes(10**7))"], "files", "wrote more than"),
    (["def again(): return again()", "again()"], "exception", "RecursionError"),
    (["return 'x' * 10**8"], "exception", "the limit is"),
    (["a = []", "for _ in range(10**5): a = [a]", "return a"], "exception", "RecursionError"),
    (["a = []", "for _ in range(300): a = [a]", "return a"], "output", "200 levels deep"),
    (["return object()"], "exception", "can't be transferred"),
    (["os._exit(0)"], "exit", "status 0"),
    (["os.abort()"], "crash", "SIGABRT"),
    (["os.write(63, bytes([255]) * 9)"], "output", "unreadable value"),
]


UNLINKED = """
import ctypes, os, time
LIBC = ctypes.CDLL(None)
LIBC.mmap.restype, LIBC.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t] + 3 * [ctypes.c_int] + [
    ctypes.c_long
]
PAUSE = ctypes.cast(LIBC.pause, ctypes.c_void_p)
def held(mapped, rounds=50):
    for _ in range(rounds):
        place = os.open("x", os.O_CREAT | os.O_RDWR)
        os.truncate(place, 4 << 20)  # sparse, but counted in full
        assert not mapped or LIBC.mmap(0, 4096, 1, 1, place, 0)
        if mapped:
            os.close(place)
        os.unlink("x")
def churn():
    names = [str(number) for number in range(400)]
    while True:
        for name in names: os.close(os.open(name, os.O_CREAT | os.O_WRONLY))
        for name in names: os.unlink(name)
def threads(rest=()):
    stack, local, flags = ctypes.create_string_buffer(1600 * 4096), ctypes.create_string_buffer(4096), 0x3D0F00
    address, own = lambda buffer: ctypes.c_void_p(ctypes.addressof(buffer)), ctypes.c_int()
    for number in range(1, 1500):
        top = ctypes.c_void_p((ctypes.addressof(stack) & ~15) + 4096 * number)
        LIBC.clone(PAUSE, top, flags, None, address(own), ctypes.c_void_p(address(local).value + 2048), address(own))
def f(name):
    {"descriptors": lambda: held(False), "memory": lambda: held(True), "churn": churn, "threads": threads}[name]()
    time.sleep(9)
"""
"""Resources without a kernel limit."""


@pytest.mark.slow
def test_unlinked_files_and_threads_are_counted(isolated):
    tests = [["descriptors"], ["memory"], ["threads"], ["churn"]]
    limits = Limits(timeout_s=0.4, total_s=20, memory_mb=256)
    outcomes = run_code(UNLINKED, Kind.CALLS, tests, fn_name="f", limits=limits).outcomes
    assert [outcome.reason for outcome in outcomes] == ["files", "files", "memory", "timeout"]
    assert "33554432 bytes" in outcomes[1].text and "500 threads" in outcomes[2].text


def test_values_and_exceptions_that_are_hard_to_transfer(isolated):
    source = """
import math
class Silent(Exception):
    def __str__(self): raise KeyboardInterrupt
def f(x):
    if x: raise Silent
    return {math.factorial(2000): -math.factorial(2001)}
"""
    report = run_code(source, Kind.CALLS, [[0], [1]], fn_name="f", limits=PATIENT)
    assert report.outcomes[0].value == {math.factorial(2000): -math.factorial(2001)}
    assert report.outcomes[1].reason == "exception" and "KeyboardInterrupt" in report.outcomes[1].text
    truth = {"fn_name": "f", "inputs": [[0]], "outputs": [1]}
    wrong = code.score("", "import math\ndef f(x): return math.factorial(2000)", truth)
    assert wrong["score"] == 0.0 and "4,300 digits" in wrong["reason"]


def test_folders_of_killed_processes_are_removed(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    leftover, used, young = (tmp_path / f"{PREFIX}{name}" for name in ("left", "used", "young"))
    for folder in (leftover, used, young):
        folder.mkdir()
        (folder / "file").write_text("text")
    for folder in (leftover, used):
        os.utime(folder, (0, 0))
    owned = os.open(used, os.O_RDONLY)
    fcntl.flock(owned, fcntl.LOCK_SH)
    assert call("def f(): return 1").value == 1
    assert sorted(tmp_path.iterdir()) == [used, young]
    os.close(owned)


@pytest.fixture(scope="module")
def hostile_outcomes(isolated):
    """Return the outcomes of all hostile tests, from one sandbox."""
    source = "import os, socket, subprocess, sys, threading\n"
    for number, (lines, _, _) in enumerate(HOSTILE):
        source += f"def f{number}(x):\n" + "".join(f"    {line}\n" for line in lines)
    source += "def f(number): return globals()[f'f{number}'](1)"
    tests = [[number] for number in range(len(HOSTILE))]
    return run_code(source, Kind.CALLS, tests, fn_name="f", limits=PATIENT).outcomes


@pytest.mark.xdist_group("hostile code")  # otherwise each pytest process repeats it
@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_forbidden_operations(hostile_outcomes, number):
    _, reason, text = HOSTILE[number]
    outcome = hostile_outcomes[number]
    assert outcome.reason == reason and text in outcome.text


@pytest.mark.slow
def test_allowed_operations(isolated, monkeypatch):
    monkeypatch.setenv("SECRET", "of the parent")
    source = """
import asyncio, os, tempfile, threading
import numpy
async def wait(): return await asyncio.to_thread(lambda: 5)
def f(x):
    with tempfile.TemporaryFile("w+") as file:
        print(x, file=file)
        file.seek(0)
        print("x" * 10**7)
        return file.read(), asyncio.run(wait()), numpy.arange(3), sorted(os.environ)
"""
    text, number, numbers, environment = call(source, 7).value
    assert (text, number, numbers) == ("7\n", 5, [0, 1, 2]) and "SECRET" not in environment and "HOME" in environment


@pytest.mark.slow
def test_endless_code_is_killed_without_leftovers(isolated, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    source = "import threading\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1)], daemon=True).start()\n"
    quick = Limits(timeout_s=0.4, total_s=0.7, memory_mb=256)
    outcomes = run_code(source + "while True: pass", Kind.PROGRAM, ["", "", ""], limits=quick).outcomes
    assert [outcome.reason for outcome in outcomes] == ["timeout"] * 3
    assert not [child for child in _children() if "sandbox_host" in child]
    assert not list(tmp_path.iterdir())


def _children():
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"\nPPid:\t{os.getpid()}\n" in (folder / "status").read_text():
                found.append((folder / "cmdline").read_text())
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_programs():
    truth = {"inputs": ["3\n", "4\n", "x"], "outputs": ["4 \n\n", "5", "1"]}
    result = code.score("", "So:\n```python\nprint(int(input()) + 1)\n```", truth)
    assert result["score"] == 0.0 and result["passed"] == pytest.approx(2 / 3) and result["format"] == 1.0
    assert (
        result["reason"].startswith("test 3: exception: ValueError: invalid literal") and "(line 1)" in result["reason"]
    )
    assert code.score("", "print(int(input() or 0) + 1)", {**truth, "inputs": ["3", "4", "\n"]})["score"] == 1.0
    flood = code.score("", "print('x' * 10**8)", {"inputs": [""], "outputs": [""]})
    assert flood["score"] == 0.0 and "wrote more than" in flood["reason"]
    early = code.score("", "import sys\nprint(1)\nsys.exit(0)", {"inputs": [""], "outputs": ["1"]})
    assert early["score"] == 1.0


@pytest.mark.slow
def test_calls():
    truth = json.dumps({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1, 0.1 + 0.2], [2, 0.3]]})
    assert code.score("", "class Solution:\n    def f(self, x): return (x, 0.3)", truth)["score"] == 1.0
    half = code.score("", "def f(x): return [1, 0.3]", truth, continuous=True)
    assert (half["score"], half["acc"]) == (0.5, 0.0) and "test 2: wrong: got [1, 0.3]" in half["reason"]
    assert "the code does not define f" in code.score("", "def g(x): return x", truth)["reason"]
    assert "SyntaxError" in code.score("", "def f(x) return x", truth)["reason"]
    assert code.score("", "def f(x): return True", {"fn_name": "f", "inputs": [[1]], "outputs": [1]})["score"] == 0.0


@pytest.mark.slow
def test_assertions():
    cases = [
        "assert f(3) == 4",
        "def check(g):\n    assert math.isclose(g(1), 2)\ncheck(f)",
        "assert set(f([1])) == {1}",
    ]
    result = code.score("", "def f(x): return x + 1", {"assert_case": cases, "setup": "import math"})
    assert result["passed"] == pytest.approx(2 / 3) and "test 3: exception: TypeError" in result["reason"]
    raising = ["try:\n    f(0)\nexcept ZeroDivisionError:\n    pass\nelse:\n    assert False"]
    assert code.score("", "def f(x): return 1 / x", {"assert_case": raising})["score"] == 1.0
    with pytest.raises(ValueError, match=r"ground_truth: got .*setup: 'import nothing_like_it' raises"):
        code.score("", "def f(x): return x", {"assert_case": ["assert f(1)"], "setup": "import nothing_like_it"})


@pytest.mark.parametrize(
    "source",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "print('passed'); print('OK')",
        f"import os\nfor pipe in range(3, 64):\n    try: os.write(pipe, {FORGERY!r} * 9)\n    except OSError: pass",
        "class Yes:\n    def __eq__(self, other): return True\ndef f(x): return Yes()",
        "class Yes(int):\n    def __eq__(self, other): return True\ndef f(x): return Yes(5)",
        "def sorted(x): return [1, 2]\ndef all(x): return True\ndef f(x): return [5]",
        "import builtins\nbuiltins.sorted = lambda x: [1, 2]\nbuiltins.all = lambda x: True\ndef f(x): return [2, 3]",
        SEARCH,
    ],
)
def test_success_cannot_be_faked(isolated, source):
    case = "result = f([2, 1])\nassert result == [1, 2] and sorted([3, 1]) == [1, 3]"
    checked = "def check(f):\n    assert f([2, 1]) == [1, 2] and sorted([3, 1]) == [1, 3]\ncheck(f)"
    truth = {"assert_case": [checked, case]}
    assert code.score("", source, truth)["passed"] == 0.0
    assert code.score("", "def f(x): return sorted(x)", truth)["score"] == 1.0


# A container profile that denies a system call; its filter precedes that of the sandbox.
PROFILE = """
from rlfuse.rewards.sandbox import confinement as c, seccomp as s
c.LIBC.prctl(c.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
s.load(c.LIBC, [(s.LOAD, 0, 0, 0), (s.IF_EQUAL, 0, 1, NUMBER), (s.RETURN, 0, 0, s.EPERM), (s.RETURN, 0, 0, s.ALLOW)])
main = """


@pytest.mark.parametrize(
    "refused, missing_isolation",
    [
        ("landlock_create_ruleset", "files can't be confined: Landlock is not available (Operation not permitted)"),
        ("seccomp", "system calls can't be filtered: seccomp is not available (Operation not permitted)"),
    ],
)
def test_missing_isolation_of_a_container_is_reported_or_rejected(isolated, monkeypatch, refused, missing_isolation):
    number = next(number for number, name in MACHINES[os.uname().machine][1].items() if name == refused)
    profile = PROFILE.replace("NUMBER", str(number))
    monkeypatch.setattr(bare_python, "START", bare_python.START.replace("main = ", profile))
    truth = {"fn_name": "f", "inputs": [[1]], "outputs": [1]}
    result = code.score("", "def f(x): return x", truth)
    assert (result["score"], result["isolated"], result["isolation"]) == (1.0, 0.0, missing_isolation)
    with pytest.raises(SandboxError, match=f"demand_isolation: .*{re.escape(missing_isolation)}"):
        code.score("", "def f(x): return x", truth, demand_isolation=True)


def test_a_sandbox_that_does_not_start_raises(monkeypatch):
    monkeypatch.setattr(bare_python, "START", "raise OSError('no room')")
    with pytest.raises(SandboxError, match="OSError: no room"):
        call("def f(): return 1")
    with pytest.raises(ValueError, match="memory_mb=10; Python itself needs"):
        Limits(memory_mb=10)


def test_messages_accept_plain_data_only():
    for nonsense in ({"object": [1]}, {"dict": [[{"list": []}, 1]]}, {"bytes": "zz"}, {"tuple": 3}, {"a": 1, "b": 2}):
        with pytest.raises(MessageError):
            decode(nonsense)
    colliding = [number * (2**61 - 1) for number in range(1, 2000)]
    for content in ({"set": colliding}, {"frozenset": colliding}, {"dict": [[key, 0] for key in colliding]}):
        with pytest.raises(MessageError, match="hashes"):
            decode(content)
    powers = {2**number for number in range(1000)}
    assert decode(encode(powers)) == powers
    assert decode(encode({(1, "a"): [frozenset({2})]})) == {(1, "a"): [frozenset({2})]}


@pytest.mark.slow
def test_the_sandbox_ends_with_its_process():
    pid = os.fork()
    if not pid:
        run_code("while True: pass", Kind.PROGRAM, [""], limits=Limits(timeout_s=60, total_s=60))
        os._exit(0)
    deadline = time.monotonic() + 30
    while not (hosts := _descendants(pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while any(Path(f"/proc/{host}").exists() for host in hosts) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert hosts and not any(Path(f"/proc/{host}").exists() for host in hosts)


def _descendants(pid):
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return children + [
        child for one in children for child in Path(f"/proc/{one}/task/{one}/children").read_text().split()
    ]
