"""Score Python code by running tests in the sandbox; `code_tests` describes the ground truth.

Program outputs are compared up to white space at both ends of lines and a relative error of 1e-6 in numbers. Return
values must also match in type, where tuples equal lists. Assertions run outside the process of the code.
"""

from __future__ import annotations

import math
import re
from typing import Any

from rlfuse.rewards.reasoning_tags import answer_after_reasoning, answer_only
from rlfuse.rewards.sandbox.sandbox import Kind, Limits, Outcome, run_code
from rlfuse.rewards.verifiers.answers import MAX_CHARS, excerpt, ground_truth_error, not_found, verdict
from rlfuse.rewards.verifiers.code_blocks import solution
from rlfuse.rewards.verifiers.code_tests import Tests, read_tests

_DEFAULT = Limits()
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
_WHOLE = re.compile(r"[+-]?\d+")


@answer_only
def score(
    data_source: str,
    solution_str: str,
    ground_truth: str | dict[str, Any] | list[Any],
    extra_info: dict[str, Any] | None = None,
    *,
    continuous: bool = False,
    timeout_s: float = _DEFAULT.timeout_s,
    total_s: float = _DEFAULT.total_s,
    memory_mb: int = _DEFAULT.memory_mb,
    demand_isolation: bool = False,
) -> dict[str, Any]:
    """Return 1 if all tests pass, else 0; with `continuous` the fraction of tests that pass.

    Parts: `passed`, that fraction; `isolated`, 1 if the code was fully isolated, else `isolation` names what is
    missing. Limits: see `sandbox.Limits`.
    """
    limits = Limits(timeout_s, total_s, memory_mb, demand_isolation=demand_isolation)
    tests = read_tests(ground_truth)
    answer = answer_after_reasoning(solution_str)
    if len(answer) > MAX_CHARS:
        return not_found(None, "code")
    code = solution(answer, tests.fn_name, is_program=tests.kind is Kind.PROGRAM)
    if not code:
        return not_found(answer, "Python code")
    try:
        report = run_code(code, tests.kind, tests.given, fn_name=tests.fn_name, setup=tests.setup, limits=limits)
    except ValueError as error:
        raise ground_truth_error(ground_truth, f"a set of tests that can run ({error})") from error
    problems = [_problem(tests, outcome, right) for outcome, right in zip(report.outcomes, tests.expected, strict=True)]
    passed = problems.count("") / len(problems)
    failed = [f"test {number}: {problem}" for number, problem in enumerate(problems, 1) if problem]
    result = verdict(passed if continuous else passed == 1, "; ".join(failed), right=passed == 1)
    result |= {"passed": passed, "isolated": float(not report.missing_isolation)}
    return result | ({"isolation": report.missing_isolation} if report.missing_isolation else {})


def _problem(tests: Tests, outcome: Outcome, right: Any) -> str:
    if outcome.reason:
        return f"{outcome.reason}: {outcome.text}"
    if tests.kind is Kind.PROGRAM:
        equal = _same_output(outcome.value, right)
    else:
        equal = _same(outcome.value, right) or (tests.is_wrapped and _same(outcome.value, right[0]))
    return "" if equal else f"wrong: got {excerpt(outcome.value)}, expected {excerpt(right)}"


def _same_output(given: str, right: str) -> bool:
    lines, expected = ([line.strip() for line in text.strip().split("\n")] for text in (given, right))
    return len(lines) == len(expected) and all(map(_same_line, lines, expected))


def _same_line(given: str, right: str) -> bool:
    if given == right:
        return True
    words, expected = given.split(), right.split()
    return len(words) == len(expected) and all(map(_same_number, words, expected))


def _same_number(given: str, right: str) -> bool:
    numbers = _NUMBER.fullmatch(given) and _NUMBER.fullmatch(right)
    if not numbers or (_WHOLE.fullmatch(given) and _WHOLE.fullmatch(right)):
        return bool(numbers) and given == right
    return math.isfinite(float(given)) and _close(float(given), float(right))


def _same(given: Any, right: Any) -> bool:
    if isinstance(given, list | tuple) and isinstance(right, list | tuple):
        return len(given) == len(right) and all(map(_same, given, right))
    if isinstance(given, dict) and isinstance(right, dict):
        # Keys are strings in JSON.
        given, right = ({str(key): value for key, value in each.items()} for each in (given, right))
        return given.keys() == right.keys() and all(_same(given[key], right[key]) for key in given)
    if isinstance(given, bool) or isinstance(right, bool):
        return given is right
    if isinstance(given, float) or isinstance(right, float):
        numbers = isinstance(given, int | float) and isinstance(right, int | float)
        return numbers and _close(given, right)
    return type(given) is type(right) and given == right


def _close(given: float, right: float) -> bool:
    try:
        return math.isclose(given, right, rel_tol=1e-6, abs_tol=1e-9)
    except OverflowError:  # an integer that exceeds float
        return given == right
