"""Answer formats that each verifier accepts, and the time limit of parsing."""

import importlib
import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlfuse.rewards.verifiers import box, choice, exact, interval, numeric, pattern
from rlfuse.rewards.verifiers import math as symbolic
from rlfuse.rewards.verifiers.answers import fenced_blocks, parts_of, strip_wrapping
from rlfuse.rewards.verifiers.units import conversion_factor


def forms():
    """Yield (verifier, options, ground truth, right answers, wrong answers) for each line of answer_forms.txt."""
    name, options = "", {}
    for line in (Path(__file__).parent / "answer_forms.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("== "):
            _, name, options = line.split(" ", 2)
        elif line and not line.startswith("# ") and line != "#":
            truth, _, answers = line.partition(" => ")
            groups = [group.replace("\\n", "\n").split(" ;; ") for group in answers.partition(" // ")[::2]]
            yield pytest.param(name, json.loads(options), truth, *groups, id=f"{name}: {truth[:40]}")


@pytest.mark.parametrize(("name", "options", "truth", "right", "wrong"), list(forms()))
def test_answer_formats(name, options, truth, right, wrong):
    score = importlib.import_module(f"rlfuse.rewards.verifiers.{name}").score
    found = {answer: score("", answer, truth, **options)["acc"] for answer in [*right, *wrong] if answer}
    misjudged = {answer: acc for answer, acc in found.items() if acc != (answer in right)}
    assert not misjudged and len(found) >= len(right)


REPEATED = (
    "1", " ", "1 ", "1,", "1:", "1.", "1 to ", "[1,", "(1,2),", "(", "{", "[", "\n", "\t", "$", "**", "`", "\"", "\\",
    "-", "\\boxed{", "<answer>", "</answer>", "answer is ", "Answer: ", "**Answer", "I would go with ", "```\n",
    "A or ", "wait A", "B, ", "\\text{", "\\frac{1}{", "^{", "1^", "\\left", "x1=1 ", "start: 1 ", "1 m 1 ", "<b>",
    "答案", "1 1/", "and ", "\\pm", "=", "&", "\\begin{pmatrix}", "1_", "'a' ",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "truth"),
    [(box, "[0, 0, 1, 2]"), (choice, "B"), (exact, "B"), (interval, "1 to 2"), (numeric, "1"), (pattern, "a"),
     (symbolic, "x")],
)  # fmt: skip
def test_time_is_linear_in_the_length_of_an_answer(module, truth):
    """Fail on quadratic time, which takes many seconds here; linear time takes a few hundredths of a second."""
    for repeated in REPEATED:
        start = time.process_time()
        module.score("", repeated * (20_000 // len(repeated)), truth)
        assert time.process_time() - start < 3, repeated


def test_pathological_answers_are_parsed_quickly():
    start = time.process_time()
    box.score("", "[" + "1 " * 230, [0, 0, 1, 2])
    choice.score("", "A" + " ," * 8_000 + " x", "B")
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    "expression",
    ["9**9**9", "9^{9^{9}}", "2^{99999}", "99999!", "3!!!", "7" * 80, "(x+1)^{999}(y+1)^{999}", "1000!" + "+999!" * 60,
     r"e^{e^{e^{e}}}", r"\sin(10^{4000})", "x!" * 200, "-" * 400, "7" * 90_000, r"\boxed{" + "7" * 50_000 + "}",
     "(" * 100 + "x" + ")" * 100, r"\frac{1}{" * 13 + "2" + "}" * 13, "__import__('os').system('true')", "_"],
)  # fmt: skip
def test_math_rejects_large_expressions(expression):
    start = time.process_time()
    assert symbolic.score("", expression, "1")["score"] == 0.0
    assert len(expression) > 500 or symbolic.score("", expression, expression)["score"] == 1.0, "identical text"
    assert time.process_time() - start < 2


@pytest.mark.parametrize("truth", ["", " ", "$$", None, float("nan"), [1]])
def test_math_rejects_only_an_empty_ground_truth(truth):
    with pytest.raises(ValueError, match=r"ground_truth: got .*must be an expression"):
        symbolic.score("", "1", truth)


@pytest.mark.slow
@settings(max_examples=50)
@given(st.text(max_size=60), st.text(alphabet="x1+-^_{}()[]\\,.|!&:=<>%$ ", min_size=1, max_size=30))
def test_math_accepts_any_text(answer, truth):
    for given_answer in (answer, truth + answer):
        try:
            assert symbolic.score("", given_answer, truth)["score"] in (0.0, 1.0)
        except ValueError as error:
            assert "ground_truth: got" in str(error)


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        ('**Final answer:** "B".', "B"),
        (r"<answer>\(\boxed{\text{B}}\)</answer>", "B"),
        ("*a* or *b*", "*a* or *b*"),
        ("$3$ and $4$", "$3$ and $4$"),
        ("```json\n{}\n```", "{}"),
        ("- 5", "- 5"),
        (r"\text{a} \text{b}", r"\text{a} \text{b}"),
    ],
)
def test_strip_wrapping(text, inner):
    assert strip_wrapping(text) == inner


def test_a_truncated_response_has_no_answer():
    assert parts_of(r"\boxed{1} \boxed{2") is None and parts_of("<answer>1</answer><answer>2") is None
    assert parts_of(r"\boxed{\left\{1\right.}").box == r"\left\{1\right"
    assert parts_of("<answer>so 1</answer> or 2").stated == parts_of("1</answer>").stated == "1"


def test_code_blocks_are_paired():
    text = "```python\na\n```\noutput\n```\nb\n```\n  ~~~json\n  {}\n  ~~~\n```c\nopen"
    assert fenced_blocks(text) == [("python", "a"), ("", "b"), ("json", "  {}")]


@pytest.mark.parametrize(
    ("one", "other", "factor"),
    [("km", "m", 1000), ("km/h", "m/s", 1 / 3.6), ("J/(kg K)", r"\text{J} \text{kg}^{-1} K^{-1}", None),
     ("cm", "cm^2", None), ("J", "N m", 1), ("N*m", "joules", 1), ("apples", "apple", 1), ("apples", "oranges", None)],
)  # fmt: skip
def test_units(one, other, factor):
    assert conversion_factor(one, other) == (factor if factor is None else pytest.approx(factor))
