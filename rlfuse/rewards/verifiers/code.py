"""Python code that passes tests, run in the sandbox.

The ground truth is a dict, or the same as JSON text, in one of verl's forms:

    {"inputs": ["3\\n"], "outputs": ["4\\n"]}                            a program: standard input and output
    {"fn_name": "f", "inputs": [[3], [4]], "outputs": [4, 5]}            a function, or a method of `Solution`
    {"assert_case": ["assert f(3) == 4"], "setup": "import math"}        assertions; `fn_name` where it names a built-in

Outputs of programs are equal up to white space at ends of lines and of the whole; returned values where their types and
numbers are, a tuple being a list and floats being equal to a millionth. Assertions run outside the code's process and
call its functions with plain data: they can't look at objects it makes, nor at what it does to its arguments.
The code is the last fenced block of the answer, or all of it.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from rlfuse.rewards.sandbox.sandbox import Kind, Limits, Outcome, run_code
from rlfuse.rewards.thoughts import answer_only
from rlfuse.rewards.verifiers.answers import answer_in, bad_truth, excerpt, not_found, verdict

_FENCED = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_DEFAULT = Limits()
VALID = "inputs and outputs of the same length, with or without fn_name, or assert_case (see verifiers/code.py)"


@answer_only
def score(
    data_source: str,
    solution_str: str,
    ground_truth: str | dict[str, Any],
    extra_info: dict[str, Any] | None = None,
    *,
    continuous: bool = False,
    timeout_s: float = _DEFAULT.timeout_s,
    total_s: float = _DEFAULT.total_s,
    memory_mb: int = _DEFAULT.memory_mb,
    demand_isolation: bool = False,
) -> dict[str, Any]:
    """1 if all tests pass; with `continuous` the share that does. `passed` is that share, `isolated` 1 where the kernel
    could isolate the code fully (`isolation` says what was missing); limits are those of `sandbox.Limits`."""
    limits = Limits(timeout_s, total_s, memory_mb, demand_isolation=demand_isolation)
    kind, tests, outputs, options = _tests(ground_truth)
    answer = answer_in(solution_str)
    blocks = _FENCED.findall(answer) if answer else []
    code = blocks[-1] if blocks else answer
    if not code:
        return not_found(answer, "code")
    try:
        report = run_code(code, kind, tests, limits=limits, **options)
    except ValueError as error:
        raise bad_truth(ground_truth, str(error)) from error
    problems = [_problem(kind, outcome, right) for outcome, right in zip(report.outcomes, outputs, strict=True)]
    passed = problems.count("") / len(problems)
    failed = [f"test {number}: {problem}" for number, problem in enumerate(problems, 1) if problem]
    result = verdict(passed if continuous else passed == 1, "; ".join(failed), right=passed == 1)
    result |= {"passed": passed, "isolated": float(not report.missing)}
    return result | ({"isolation": report.missing} if report.missing else {})


def _tests(ground_truth: Any) -> tuple[Kind, list[Any], list[Any], dict[str, Any]]:
    """Kind, tests, what each has to give, and the options of `run_code`."""
    try:
        truth = json.loads(ground_truth) if isinstance(ground_truth, str) else dict(ground_truth)
        # Parquet gives each row all keys that any row has.
        truth = {key: value for key, value in truth.items() if value is not None}
    except (TypeError, ValueError, AttributeError) as error:
        raise bad_truth(ground_truth, f"{VALID} ({error})") from None
    if unknown := set(truth) - {"inputs", "outputs", "fn_name", "assert_case", "setup"}:
        raise bad_truth(ground_truth, f"{VALID}, not {sorted(unknown)}")
    name = truth.get("fn_name")
    if "assert_case" in truth:
        cases = truth["assert_case"]
        cases = [cases] if isinstance(cases, str) else list(cases)
        return Kind.ASSERTS, cases, [True] * len(cases), {"fn_name": name, "setup": truth.get("setup", "")}
    inputs, outputs = (list(truth.get(key, ())) for key in ("inputs", "outputs"))
    if not inputs or len(inputs) != len(outputs):
        raise bad_truth(ground_truth, f"{VALID}; got {len(inputs)} and {len(outputs)}")
    if name is None and not all(isinstance(text, str) for text in outputs):
        raise bad_truth(ground_truth, f"{VALID}; outputs of a program are texts")
    return (Kind.CALLS if name else Kind.PROGRAM), inputs, outputs, {"fn_name": name}


def _problem(kind: Kind, outcome: Outcome, right: Any) -> str:
    """Why a test failed; "" where it passed."""
    if outcome.reason:
        return f"{outcome.reason}: {outcome.text}"
    equal = _lines(outcome.value) == _lines(right) if kind is Kind.PROGRAM else _same(outcome.value, right)
    return "" if equal else f"wrong: got {excerpt(outcome.value)}, right is {excerpt(right)}"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _same(given: Any, right: Any) -> bool:
    """Equal in value and kind, as JSON has them."""
    if isinstance(given, list | tuple) and isinstance(right, list | tuple):
        return len(given) == len(right) and all(map(_same, given, right))
    if isinstance(given, dict) and isinstance(right, dict):
        # JSON's keys are texts.
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
    except OverflowError:  # a whole number above all floats
        return given == right
