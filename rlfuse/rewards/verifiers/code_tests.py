r"""Parse the tests in a ground truth, in the formats of public data sets: a dict, a list, or JSON text of either. Pure.

    {"inputs": ["3\n"], "outputs": ["4\n"]}                              programs (APPS, TACO, verl)
    {"fn_name": "f", "inputs": [[3], [4]], "outputs": [4, 5]}            functions, or methods of `Solution`
    {"fn_name": "f", "inputs": ["3", "4"], "outputs": ["4", "5"]}        the same as text, one argument per line (verl)
    [{"input": "3\n", "output": "4\n", "testtype": "stdin"}]             either, case by case; or "test_cases"
    {"assert_case": ["assert f(3) == 4"], "setup": "import math"}        assertions (verl; MBPP: "test_list")
    {"test": "def check(candidate): ...", "entry_point": "f"}            one function (HumanEval, LeetCode)

A ground truth in no known format, or with fields of several, raises a ValueError that names the field.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from rlfuse.rewards.sandbox.sandbox import Kind
from rlfuse.rewards.verifiers.answers import excerpt, ground_truth_error

VALID = "inputs and outputs of the same length, with or without fn_name, assert_case or test and entry_point (see "
VALID += "verifiers/code_tests.py)"

ALIASES = {
    "input": "inputs",
    "output": "outputs",
    "func_name": "fn_name",
    "test_list": "assert_case",
    "test_setup_code": "setup",
}
TYPES = {"stdin": False, "stdin_stdout": False, "functional": True, "function_call": True}
"""`testtype` or `type` of a test case -> whether it calls a function."""
_ASSIGNMENT = re.compile(r"[ \t]*[A-Za-z_]\w*[ \t]*=[ \t]*[^\s=]")
_NODES = re.compile(r"\b(?:list_node|tree_node|is_same_list|is_same_tree|ListNode|TreeNode)\b")


@dataclass(frozen=True, slots=True)
class Tests:
    """Tests for a piece of code."""

    kind: Kind
    given: list[Any]
    expected: list[Any]
    fn_name: str | None = None
    setup: str = ""
    is_wrapped: bool = False
    """True if each expected value may be wrapped in a list of length 1."""


def read_tests(ground_truth: Any) -> Tests:
    """Return the tests of a ground truth. Raises ValueError for an unknown or inconsistent format."""
    try:
        return _tests(_decoded(ground_truth))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ground_truth_error(ground_truth, f"{VALID}; {error}") from None


def _decoded(truth: Any) -> Any:
    while isinstance(truth, str):
        truth = json.loads(truth)
    return _plain(truth)


def _plain(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _tests(truth: Any) -> Tests:
    if isinstance(truth, list) and truth and all(isinstance(each, dict) for each in truth):
        return _cases({"test_cases": truth})
    if isinstance(truth, list) and truth and all(isinstance(each, str) and "assert" in each for each in truth):
        return _assertions({"assert_case": truth})
    if not isinstance(truth, dict):
        raise ValueError(f"a {type(truth).__name__} with this content has no known format")
    fields: dict[str, Any] = {}
    for given, value in truth.items():
        name = ALIASES.get(given, given)
        # Parquet adds the keys of all rows to each row.
        if value is None or value in ([], {}) or (value == "" and name not in ("inputs", "outputs")):
            continue
        if name in fields:
            raise ValueError(f"{name} is set twice, also as {given}")
        fields[name] = value
    for form, (optional, read) in FORMS.items():
        if form <= fields.keys():
            if unknown := sorted(fields.keys() - form - optional):
                raise ValueError(f"{', '.join(unknown)} can't be combined with {', '.join(sorted(form))}")
            return read(fields)
    raise ValueError(f"the fields {', '.join(sorted(fields)) or '(none)'} match no known format")


def _assertions(fields: dict[str, Any]) -> Tests:
    cases = fields["assert_case"]
    cases = [cases] if isinstance(cases, str) else list(cases)
    return Tests(Kind.ASSERTS, cases, [True] * len(cases), _function(fields), fields.get("setup", ""))


def _check_function(fields: dict[str, Any]) -> Tests:
    test, name = fields["test"], _function({"fn_name": fields["entry_point"]})
    if not (isinstance(test, str) and re.search(r"^def check\(", test, re.MULTILINE)):
        raise ValueError(f"test is {excerpt(test)}, which does not define check(candidate)")
    if found := _NODES.search(test):
        raise ValueError(f"test calls {found[0]}; linked lists and trees are not supported by the sandbox")
    return Tests(Kind.ASSERTS, [f"{test}\ncheck({name})\n"], [True], name, fields.get("setup", ""))


def _cases(fields: dict[str, Any]) -> Tests:
    cases, language = _decoded(fields["test_cases"]), fields.get("language", "python")
    if language not in ("python", "python3"):
        raise ValueError(f"language is {language!r}; the sandbox runs Python")
    kinds, names = set(), set()
    for number, case in enumerate(cases):
        where = f"test case {number}"
        case = {name: value for name, value in case.items() if value is not None}
        kind = case.pop("testtype", case.pop("type", None))
        name = _case_function(case) or fields.get("fn_name")
        if (kind or "stdin") not in TYPES:
            raise ValueError(f"{where}: type {kind!r} is not one of {', '.join(TYPES)}")
        if case.keys() != {"input", "output"}:
            raise ValueError(f"{where} has the fields {', '.join(case)}; it must have input and output")
        kinds.add(TYPES[kind] if kind else name is not None)
        names.add(name)
    if len(kinds) > 1 or len(names) > 1:
        raise ValueError("test cases mix programs and functions, or several functions")
    pairs = {f"{side}s": [case[side] for case in cases] for side in ("input", "output")}
    if kinds == {False}:
        return _inputs_outputs(pairs)
    if names == {None}:
        raise ValueError("test cases of a function need fn_name")
    tests = _inputs_outputs(pairs | {"fn_name": names.pop()})
    return replace(tests, is_wrapped=False) if kind == "functional" else tests


def _case_function(case: dict[str, Any]) -> str | None:
    metadata = _decoded(case.pop("metadata", None)) or {}
    return case.pop("fn_name", case.pop("func_name", metadata.get("func_name")))


def _inputs_outputs(fields: dict[str, Any]) -> Tests:
    inputs, outputs = fields["inputs"], fields["outputs"]
    if all(isinstance(each, str) and isinstance(_json(each), list) for each in (inputs, outputs)):
        raise ValueError("inputs and outputs are JSON texts of lists; use lists")
    inputs, outputs = ([each] if isinstance(each, str) else each for each in (inputs, outputs))
    if not (isinstance(inputs, list | tuple) and isinstance(outputs, list | tuple) and len(inputs) == len(outputs)):
        sizes = [len(each) if isinstance(each, list | tuple) else excerpt(each) for each in (inputs, outputs)]
        raise ValueError(f"got {sizes[0]} inputs and {sizes[1]} outputs")
    if name := _function(fields):
        pairs = [_call(number, *pair) for number, pair in enumerate(zip(inputs, outputs, strict=True))]
        expected = [value for _, value in pairs]
        is_wrapped = all(isinstance(value, list) and len(value) == 1 for value in expected)
        return Tests(Kind.CALLS, [arguments for arguments, _ in pairs], expected, name, is_wrapped=is_wrapped)
    given = [_lines("inputs", number, text) for number, text in enumerate(inputs)]
    if all(map(_ASSIGNMENT.match, given)):
        raise ValueError(f"inputs are assignments ({excerpt(given[0])}); set fn_name and use lists of arguments")
    return Tests(Kind.PROGRAM, given, [_lines("outputs", number, text) for number, text in enumerate(outputs)])


def _call(number: int, given: Any, expected: Any) -> tuple[list[Any], Any]:
    if isinstance(given, str):
        try:
            arguments = [json.loads(line) for line in given.strip().split("\n") if given.strip()]
            expected = json.loads(expected)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"inputs[{number}] is text, so each line must be one argument as JSON, and outputs[{number}] the "
                f"result as JSON: {error}"
            ) from None
    elif isinstance(given, list | tuple):
        arguments = list(given)
    else:
        raise ValueError(f"inputs[{number}] is {excerpt(given)}; it must be a list of arguments")
    return [_with_numbers(each) for each in arguments], expected


def _with_numbers(argument: Any) -> Any:
    """Convert numeric keys back to integers; JSON keys are strings (APPS, TACO)."""
    if isinstance(argument, dict) and all(re.fullmatch(r"-?\d{1,18}", str(key)) for key in argument):
        return {int(key): value for key, value in argument.items()}
    return argument


def _lines(field: str, number: int, given: Any) -> str:
    if isinstance(given, list | tuple) and all(isinstance(line, str) for line in given):
        return "\n".join(given)
    if not isinstance(given, str):
        raise ValueError(
            f"{field}[{number}] is {excerpt(given)}; it must be text for a program, and a function needs fn_name"
        )
    return given


def _function(fields: dict[str, Any]) -> str | None:
    name = fields.get("fn_name")
    if name is None:
        return None
    plain = re.sub(r"^Solution(\(\))?\.", "", str(name))
    if not plain.isidentifier():
        raise ValueError(f"fn_name {name!r} is not a valid function name")
    return plain


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


FORMS = {
    frozenset({"assert_case"}): (frozenset({"setup", "fn_name"}), _assertions),
    frozenset({"test", "entry_point"}): (frozenset({"setup"}), _check_function),
    frozenset({"test_cases"}): (frozenset({"language", "fn_name"}), _cases),
    frozenset({"inputs", "outputs"}): (frozenset({"fn_name"}), _inputs_outputs),
}
"""Required fields of a format -> (optional fields, parser)."""
