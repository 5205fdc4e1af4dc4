r"""Parse tests of a ground truth in the forms of public data sets. Pure. A form is a dict, a list, or JSON text of one:

    {"inputs": ["3\n"], "outputs": ["4\n"]}                              programs (APPS, TACO, verl)
    {"fn_name": "f", "inputs": [[3], [4]], "outputs": [4, 5]}            functions, or methods of `Solution`
    {"fn_name": "f", "inputs": ["3", "4"], "outputs": ["4", "5"]}        the same as text, an argument per line (verl)
    [{"input": "3\n", "output": "4\n", "testtype": "stdin"}]             either, case by case; or "test_cases"
    {"assert_case": ["assert f(3) == 4"], "setup": "import math"}        assertions (verl; MBPP: "test_list")
    {"test": "def check(candidate): ...", "entry_point": "f"}            one function (HumanEval, LeetCode)

A ground truth that fits no form, or several, is a ValueError that names the field.
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
"""`testtype` or `type` of a case -> whether it calls a function."""
_ASSIGNMENT = re.compile(r"[ \t]*[A-Za-z_]\w*[ \t]*=[ \t]*[^\s=]")
_NODES = re.compile(r"\b(?:list_node|tree_node|is_same_list|is_same_tree|ListNode|TreeNode)\b")


@dataclass(frozen=True, slots=True)
class Tests:
    """What code has to do."""

    kind: Kind
    given: list[Any]
    expected: list[Any]
    fn_name: str | None = None
    setup: str = ""
    is_wrapped: bool = False
    """Each expected value may be the only entry of a list."""


def read_tests(ground_truth: Any) -> Tests:
    """Return the tests of a ground truth. Raises ValueError with what is wrong."""
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
        raise ValueError(f"a {type(truth).__name__} of this content fits no form")
    fields: dict[str, Any] = {}
    for given, value in truth.items():
        name = ALIASES.get(given, given)
        # Parquet gives each row all keys that any row has.
        if value is None or value in ([], {}) or (value == "" and name not in ("inputs", "outputs")):
            continue
        if name in fields:
            raise ValueError(f"{name} is given twice, also as {given}")
        fields[name] = value
    for form, (optional, read) in FORMS.items():
        if form <= fields.keys():
            if unknown := sorted(fields.keys() - form - optional):
                raise ValueError(f"{', '.join(unknown)} can't be read together with {', '.join(sorted(form))}")
            return read(fields)
    raise ValueError(f"{', '.join(sorted(fields)) or 'nothing'} fits no form")


def _assertions(fields: dict[str, Any]) -> Tests:
    cases = fields["assert_case"]
    cases = [cases] if isinstance(cases, str) else list(cases)
    return Tests(Kind.ASSERTS, cases, [True] * len(cases), _function(fields), fields.get("setup", ""))


def _check_function(fields: dict[str, Any]) -> Tests:
    test, name = fields["test"], _function({"fn_name": fields["entry_point"]})
    if not (isinstance(test, str) and re.search(r"^def check\(", test, re.MULTILINE)):
        raise ValueError(f"test is {excerpt(test)}, which does not define check(candidate)")
    if found := _NODES.search(test):
        raise ValueError(f"test calls {found[0]}; linked lists and trees can't be handed to the sandbox")
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
            raise ValueError(f"{where} has {', '.join(case)} where input and output belong")
        kinds.add(TYPES[kind] if kind else name is not None)
        names.add(name)
    if len(kinds) > 1 or len(names) > 1:
        raise ValueError("test cases are of programs and of functions, or of several functions")
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
        raise ValueError("inputs and outputs are JSON text of lists; give the lists")
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
        raise ValueError(f"inputs are assignments ({excerpt(given[0])}); give fn_name and lists of arguments")
    return Tests(Kind.PROGRAM, given, [_lines("outputs", number, text) for number, text in enumerate(outputs)])


def _call(number: int, given: Any, expected: Any) -> tuple[list[Any], Any]:
    if isinstance(given, str):
        try:
            arguments = [json.loads(line) for line in given.strip().split("\n") if given.strip()]
            expected = json.loads(expected)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"inputs[{number}] is text, so each line must be an argument in JSON, and outputs[{number}] the value "
                f"in JSON: {error}"
            ) from None
    elif isinstance(given, list | tuple):
        arguments = list(given)
    else:
        raise ValueError(f"inputs[{number}] is {excerpt(given)} where a list of arguments belongs")
    return [_with_numbers(each) for each in arguments], expected


def _with_numbers(argument: Any) -> Any:
    """Convert keys back to integers, which JSON has only as text (APPS, TACO)."""
    if isinstance(argument, dict) and all(re.fullmatch(r"-?\d{1,18}", str(key)) for key in argument):
        return {int(key): value for key, value in argument.items()}
    return argument


def _lines(field: str, number: int, given: Any) -> str:
    if isinstance(given, list | tuple) and all(isinstance(line, str) for line in given):
        return "\n".join(given)
    if not isinstance(given, str):
        raise ValueError(
            f"{field}[{number}] is {excerpt(given)}; that of a program is text, and a function needs fn_name"
        )
    return given


def _function(fields: dict[str, Any]) -> str | None:
    name = fields.get("fn_name")
    if name is None:
        return None
    plain = re.sub(r"^Solution(\(\))?\.", "", str(name))
    if not plain.isidentifier():
        raise ValueError(f"{name!r} is not the name of a function")
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
"""Fields that a form needs -> those that it may have, and its reader."""
