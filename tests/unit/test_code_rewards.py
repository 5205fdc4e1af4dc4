"""Extraction of code from answers, and the ground-truth formats of public datasets."""

import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfuse.rewards.sandbox.sandbox import Kind
from rlfuse.rewards.verifiers import code
from rlfuse.rewards.verifiers.code_blocks import solution
from rlfuse.rewards.verifiers.code_tests import read_tests

F = "def f(x):\n    return x"
BLOCKS = [
    ("A = 1", "A = 1"),
    (f"So:\n```python\n{F}\n```\nDone.", F),
    (f"```python\n{F}\n```\nOutput:\n```\n5\n```\nDone.", F),
    (f"```python\n{F}\n```\n```output\n5\n```\nAs wanted.", F),
    (f"```\n{F}\n```\nIt prints\n```\n5\n7\n```\n", F),
    ("```\n5\n```", "5"),
    (f"```bash\nls\n```\nThen\n```Python\n{F}\n```\n```json\n[1]\n```", F),
    ("```cpp\nint main() {}\n```\nIt is correct.", None),
    ("```text\n5\n```\nand\n```\nA = 1\n```", "A = 1"),
    (f"~~~python3\n{F}\n~~~", F),
    (f"````py\n{F}\ns = '''\n```\n'''\n````", f"{F}\ns = '''\n```\n'''"),
    ("~~~py\ns = '```'\n~~~", "s = '```'"),
    ("1. First\n   ```python\n   if A:\n       B\n   ```\n2. Then", "if A:\n    B"),
    ("- ```python\n  if A:\n      B\n  ```", "if A:\n    B"),
    ("> ```python\n> if A:\n>     B\n>\n> C\n> ```", "if A:\n    B\n\nC"),
    ("\t```python\n\tA = 1\n\t```", "A = 1"),
    ("```python\n    A = 1\n    B = 2\n```", "A = 1\nB = 2"),
    ("```python\r\nA = 1\r\nB = 2\r\n```\r\n", "A = 1\nB = 2"),
    (f"```python3.11\n{F}\n```", F),
    (f"```python title='a.py'\n{F}\n```", F),
    (f"```{{.python .numberLines}}\n{F}\n```", F),
    (f"``` python\n{F}\n``` \n", F),
    (f"```python\n{F}", F),
    (f"Code: ```python\n{F}\n```", F),
    (f"```python\n{F}```", F),
    (f"<answer>```python\n{F}\n```</answer>", F),
    (f"```python\n{F}\n```python\nA = 1\n```", "A = 1"),
    (f"```python\n{F}\n```output\n5\n```", F),
    (
        "```python\ndef f():\n    '''\n    ```\n    f()\n    ```\n    '''\n```",
        "def f():\n    '''\n    ```\n    f()\n    ```\n    '''",
    ),
    ("````markdown\n# So\n```python\nA = 1\n```\n````", "A = 1"),
    ("```md\nNo code.\n```", None),
    ("The `x` of ```inline``` is\n```python\nA = 1\n```", "A = 1"),
    ("```python\nA = '！'\n```", "A = '！'"),  # noqa: RUF001 full-width
]


@pytest.mark.parametrize(("answer", "expected"), BLOCKS)
def test_code_is_the_last_python_block(answer, expected):
    assert solution(answer) == expected


@pytest.mark.parametrize(
    ("blocks", "name", "expected"),
    [
        ([F, "print(f(3))"], "f", 0),
        ([F, "def main():\n    print(f(3))"], "f", 0),
        ([F, "class Solution:\n    def f(self, x):\n        return 1"], "f", 1),
        (["f = lambda x: x", "f(1)"], "f", 0),
        ([F, "print(f(3))"], None, 0),
        ([F, F + "  "], "f", 1),
        ([F, "print(g(3))"], "g", 1),
    ],
)
def test_the_extracted_code_defines_the_function(blocks, name, expected):
    answer = "\nFor example:\n".join(f"```python\n{each}\n```" for each in blocks)
    assert solution(answer, name, is_program=False) == blocks[expected]


def test_blocks_are_found_in_linear_time():
    many = 99_000
    hostile = ["`" * many, "``` " * (many // 4), "- " * (many // 2) + "```", "> " * (many // 4), "~" * many, " " * many]
    hostile += [
        "```python\n" * (many // 10),
        "```" + " " * many + "x y",
        "1. " * (many // 3),
        ">" * 900 + "```\n" * 900,
    ]
    hostile += [">" * 300 + "```\n" + (">" * 300 + "x\n") * 300, "```\n" + "def " * (many // 4), "a\n" * (many // 2)]
    start = time.process_time()
    for answer in hostile:
        solution(answer, "f", is_program=False)
    assert time.process_time() - start < 3, "a quadratic pattern takes minutes"


LINES = {"inputs": ["3\n4\n"], "outputs": ["7\n"]}
SUM = "print(int(input()) + int(input()))"
CALL = {"fn_name": "f", "inputs": [[3], [4]], "outputs": [4, 5]}
NEXT = "def f(x): return x + 1"
CHECK = "METADATA = {}\n\ndef check(candidate):\n    assert candidate(3) == 4\n    assert candidate(x=4) == 5\n"
FORMS = [
    (LINES, SUM),
    (json.dumps(LINES), SUM),
    (json.dumps(json.dumps(LINES)), SUM),
    ({"inputs": "3\n4\n", "outputs": "7\n"}, SUM),
    ({"inputs": ["3\n4\n"], "outputs": "7"}, SUM),
    ({"inputs": [["3", "4"]], "outputs": [["7"]]}, SUM),
    ({"input": ["3\n4\n"], "output": ["7\n"]}, SUM),
    (LINES | {"fn_name": None, "assert_case": [], "setup": "", "test": None}, SUM),
    ({name: np.array(each, object) for name, each in LINES.items()}, SUM),
    ([{"input": "3\n4", "output": "7"}], SUM),
    ([{"input": "3\n4", "output": "7", "testtype": "stdin", "metadata": {"func_name": None}}], SUM),
    ({"language": "python", "test_cases": [{"type": "stdin_stdout", "input": "3\n4", "output": "7"}]}, SUM),
    (CALL, NEXT),
    (json.dumps(CALL), NEXT),
    (CALL, "class Solution:\n    def f(self, x: int) -> int:\n        return x + 1"),
    (CALL | {"outputs": [[4], [5]]}, NEXT),
    (CALL | {"outputs": [[4], [5]]}, "def f(x): return [x + 1]"),
    (CALL | {"outputs": [[4], [5]]}, "def f(x): return (x + 1,)"),
    (CALL | {"inputs": ["3", "4"], "outputs": ["4", "5"]}, NEXT),
    (CALL | {"inputs": ["3\n", "4"], "outputs": ["[4]", "[5]"]}, NEXT),
    ({"fn_name": "f", "inputs": ["[1, 2]\n3"], "outputs": ["[1, 2, 3]"]}, "def f(a, b): return a + [b]"),
    ({"fn_name": "f", "inputs": [""], "outputs": ["null"]}, "def f(): pass"),
    ({"fn_name": "f", "inputs": [[{"1": 2}]], "outputs": [3]}, "def f(d): return d[1] + 1"),
    ({"fn_name": "Solution().f", "inputs": [[3]], "outputs": [4]}, NEXT),
    ([{"input": "3", "output": "4", "testtype": "functional", "metadata": {"func_name": "f"}}], NEXT),
    ([{"input": "3", "output": "4", "testtype": "functional", "metadata": '{"func_name": "f"}'}], NEXT),
    ([{"type": "function_call", "fn_name": "f", "input": [3], "output": [4]}], NEXT),
    ({"assert_case": ["assert f(3) == 4"]}, NEXT),
    ({"assert_case": ["assert f(3) == 4"], "inputs": [], "outputs": None}, NEXT),
    (["assert f(3) == 4", "assert f(4) == 5"], NEXT),
    (json.dumps(["assert f(3) == 4"]), NEXT),
    ({"test_list": ["assert f(3) == 4"], "test_setup_code": "import math", "challenge_test_list": []}, NEXT),
    ({"test": CHECK, "entry_point": "f"}, NEXT),
    ({"test": CHECK, "entry_point": "Solution().f"}, "class Solution:\n    def f(self, x: List[int]): return x + 1"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("truth", "answer"), FORMS)
def test_ground_truth_formats_of_public_datasets(truth, answer):
    assert code.score("", answer, truth)["score"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("truth", [FORMS[0][0], CALL, {"test": CHECK, "entry_point": "f"}])
@pytest.mark.parametrize(
    "wrong",
    [
        "def f(*x, **y): return 'no'\nprint(8)",
        "exit()",
        "import os\nos._exit(0)",
        "def f(x):\n    import sys\n    sys.exit(0)\nf(1)",
        "def f(x):\n    quit()",
    ],
)
def test_code_that_exits_early_passes_no_test(truth, wrong):
    result = code.score("", wrong, truth)
    assert (result["score"], result["passed"]) == (0.0, 0.0)


REFUSED = [
    ("assert f(3) == 4", "Expecting value"),
    (["3", "4"], "no known format"),
    ([], "no known format"),
    ({}, r"the fields \(none\) match no known format"),
    (5, "no known format"),
    ({"inputs": '["3"]', "outputs": '["4"]'}, "use lists"),
    ({"inputs": [[3, 4]], "outputs": ["7"]}, r"inputs\[0\] is \[3, 4\].*needs fn_name"),
    ({"inputs": ["3"], "outputs": [7]}, r"outputs\[0\] is 7.*needs fn_name"),
    ({"inputs": ["nums = [3, 3], target = 6"], "outputs": ["[0, 1]"]}, "inputs are assignments"),
    ([{"input": "nums = [3, 3]", "output": "6"}], "inputs are assignments"),
    (CALL | {"inputs": [3, 4]}, r"inputs\[0\] is 3; it must be a list of arguments"),
    (CALL | {"inputs": [{"x": 3}, {"x": 4}]}, r"inputs\[0\] is .*; it must be a list of arguments"),
    (CALL | {"inputs": ["x", "y"], "outputs": ["4", "5"]}, r"inputs\[0\] is text, so each line"),
    (CALL | {"inputs": ["3", "4"]}, r"inputs\[0\] is text, so each line"),
    (CALL | {"outputs": [4]}, "got 2 inputs and 1 outputs"),
    (CALL | {"fn_name": "f(x)"}, r"'f\(x\)' is not a valid function name"),
    (CALL | {"assert_case": ["assert f(3)"]}, "inputs, outputs can't be combined with assert_case"),
    (LINES | {"input": ["3"]}, "inputs is set twice, also as input"),
    (LINES | {"setup": "import math"}, "setup can't be combined"),
    (LINES | {"stdin": "x"}, "stdin can't be combined"),
    ({"test": CHECK}, "the fields test match no known format"),
    ({"test": "from solution import f\ndef test_f(): assert f(3)", "entry_point": "f"}, "does not define check"),
    ({"test": CHECK + "    assert is_same_list(candidate(1), 1)", "entry_point": "f"}, "test calls is_same_list"),
    ([{"input": "3", "output": "4", "testtype": "functional"}], "need fn_name"),
    ([{"input": "3", "output": "4", "testtype": "checker"}], "type 'checker' is not one of stdin"),
    ([{"input": "3", "output": "4", "weight": 2}], "input, output, weight; it must have input and output"),
    ([{"input": "3", "output": "4"}, {"input": "3", "output": "4", "fn_name": "f"}], "mix programs and functions"),
    ({"language": "cpp", "test_cases": [{"input": "3", "output": "4"}]}, "language is 'cpp'"),
]


@pytest.mark.parametrize(("truth", "why"), REFUSED)
def test_unknown_ground_truth_formats_raise_with_the_field(truth, why):
    with pytest.raises(ValueError, match=rf"(?s)ground_truth: got .*must be .*{why}"):
        read_tests(truth)


KEYS = ["inputs", "outputs", "input", "output", "fn_name", "assert_case", "setup", "test", "entry_point", "test_cases"]
names = st.sampled_from([*KEYS, "x"])
leaves = st.none() | st.booleans() | st.integers() | st.sampled_from(["", "3", "[1]", "f", "assert f(3)", "stdin"])
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4))


@given(values | values.map(json.dumps))
def test_any_ground_truth_is_parsed_or_raises_value_error(truth):
    try:
        tests = read_tests(truth)
    except ValueError as error:
        assert str(error).startswith("ground_truth: got ")
    else:
        assert len(tests.given) == len(tests.expected)


def test_single_outputs_are_unwrapped_only_if_all_are_wrapped():
    assert read_tests(CALL | {"outputs": [[4], [5]]}).is_wrapped and read_tests(CALL).kind is Kind.CALLS
    assert not read_tests(CALL | {"outputs": [[4], [5, 6]]}).is_wrapped
    assert not read_tests([{"input": "3", "output": "[4]", "testtype": "functional", "fn_name": "f"}]).is_wrapped


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "output", "right"),
    [
        ("print(0.1 + 0.2)", "0.3", 1),
        ("print(1.0)", "1", 1),
        ("print(10**20)", str(10**20 + 1), 0),
        ("print(1, 2.50)", "1 2.5", 1),
        ("print('a  b')", "a b", 0),
        ("print(' a ')", "a\n", 1),
        ("print('a\\n\\nb')", "a\nb", 0),
        ("print('1e400')", "1e401", 0),
        ("print('1' * 900_000 + 'x')", "1.0", 0),
        ("print('007')", "7", 0),
        ("print(5)\nexit()\nprint(6)", "5", 1),
        ("print(5)\nquit(0)", "5", 1),
        ("import sys\nprint(5)\nsys.exit('failed')", "5", 0),
        ("print(5)\nexit(1)", "5", 0),
        ("exit()\nprint(5)", "5", 0),
        ("def main() -> List[int]:\n    print(gcd(10, 15))\nmain()", "5", 1),
        ("print(Counter('aab').most_common(1)[0][1], math.floor(2.5))", "2 2", 1),
    ],
)
def test_programs_run_as_in_public_harnesses(answer, output, right):
    assert code.score("", answer, {"inputs": [""], "outputs": [output]})["score"] == right


@pytest.mark.slow
def test_names_imported_by_the_harness_are_not_a_solution():
    truth = {"fn_name": "gcd", "inputs": [[10, 15]], "outputs": [5]}
    assert "the code does not define gcd" in code.score("", "x = 1", truth)["reason"]
    assert (
        "the code does not define gcd"
        in code.score("", "x = 1", {"assert_case": ["assert gcd(10, 15) == 5"]})["reason"]
    )
    assert code.score("", "def gcd(a, b): return math.gcd(a, b)\nexit()", truth)["score"] == 1.0
    deep = "def gcd(a, b):\n    return a if a == b else gcd(a - b, b) if a > b else gcd(b, a)"
    assert code.score("", deep, truth | {"inputs": [[15_000, 5]]})["score"] == 1.0
    other = code.score("", "```java\nint f() {}\n```", truth)
    assert (other["score"], other["format"]) == (0.0, 0.0) and "no Python code" in other["reason"]
