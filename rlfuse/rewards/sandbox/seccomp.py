"""Assemble the seccomp filter that enforces `system_calls`, with the standard library only.

other architecture (32 bit)? -> kill the process
call number within a run of calls with the same action? -> that action, or the checks of a condition, else EPERM
call number above all runs (newer calls, x32) -> ENOSYS
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
import sys

from rlfuse.rewards.sandbox.system_calls import ABSENT, ALLOWED, CONDITIONAL, MACHINES, OWN_PID, WORD, Condition

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
"""Filter actions (linux/seccomp.h)."""
LOAD, AND, IF_EQUAL, IF_GREATER, RETURN = 0x20, 0x54, 0x15, 0x25, 0x06
"""Instructions (linux/bpf_common.h). A jump has the number of instructions to skip if true, and if false."""
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Byte offsets in struct seccomp_data. Arguments have two words, the lower one first."""
SET_MODE_FILTER, ALL_THREADS = 1, 1
Instruction = tuple[int, int, int, int]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def actions() -> dict[str, int | Condition]:
    """Return, by name, the action of each call that is not denied, or the condition under which it is allowed."""
    families = ((ALLOWED, ALLOW), (ABSENT, ENOSYS))
    found = {name: answer for table, answer in families for calls in table.values() for name in calls.split()}
    return found | {name: condition for name, (_, condition) in CONDITIONAL.items()}


def program(machine: str, me: int) -> list[Instruction]:
    """Return the filter for this architecture and for the process with ID `me`."""
    architecture, calls = MACHINES[machine]
    known = actions()
    code = [
        (LOAD, 0, 0, ARCHITECTURE), (IF_EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)
    ]  # fmt: skip
    by_number = ((n, known.get(calls[n], EPERM) if n in calls else ENOSYS) for n in range(max(calls) + 1))
    for answer, run in itertools.groupby(by_number, lambda entry: entry[1]):
        block = [(RETURN, 0, 0, answer)] if isinstance(answer, int) else _checks(answer, me)
        code += [(IF_GREATER, len(block), 0, max(run)[0]), *block]
    return [*code, (RETURN, 0, 0, ENOSYS)]


def _checks(condition: Condition, me: int) -> list[Instruction]:
    code: list[Instruction] = []
    for checks in condition:
        steps: list[Instruction] = []
        for argument, mask, value in checks:
            expected = me if value == OWN_PID else value
            for word in (0, 1):
                part = mask >> 32 * word & WORD
                if part:
                    steps.append((LOAD, 0, 0, ARGUMENTS + 8 * argument + 4 * word))
                    steps.append((AND, 0, 0, part))
                    steps.append((IF_EQUAL, 0, 0, expected >> 32 * word & WORD))
        left = len(steps)
        code += [(kind, 0, left - place if kind == IF_EQUAL else 0, k) for place, (kind, _, _, k) in enumerate(steps)]
        code.append((RETURN, 0, 0, ALLOW))
    return [*code, (RETURN, 0, 0, EPERM)]


def filter_calls(libc: ctypes.CDLL) -> str | None:
    """Restrict this process to the system calls that the table allows. Return the problem, or None."""
    machine = os.uname().machine
    if machine not in MACHINES or sys.maxsize < 2**32:
        return f"system calls can't be filtered: no table for {machine} with {sys.maxsize.bit_length() + 1} bits"
    return load(libc, program(machine, os.getpid()))


def load(libc: ctypes.CDLL, code: list[Instruction]) -> str | None:
    """Install the filter `code` for this process, which must have set no_new_privs. Return the problem, or None."""
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    number = next(number for number, name in MACHINES[os.uname().machine][1].items() if name == "seccomp")
    if libc.syscall(number, SET_MODE_FILTER, ALL_THREADS, ctypes.byref(_Program(len(code), packed))):
        return f"system calls can't be filtered: seccomp is not available ({os.strerror(ctypes.get_errno())})"
    return None
