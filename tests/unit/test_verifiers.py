"""Verifiers of texts, numbers, choices, intervals and boxes, and their common behaviour."""

import inspect
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from scored_rows import score_table

from rlfuse.rewards.api.entries import load_entries
from rlfuse.rewards.api.functions import load_function
from rlfuse.rewards.api.items import item_of_row
from rlfuse.rewards.reasoning_tags import answer_after_reasoning
from rlfuse.rewards.verifiers import box, choice, code, exact, interval, json_schema, numeric, pattern
from rlfuse.rewards.verifiers import math as symbolic
from rlfuse.rewards.verifiers.answers import announced_answer, boxed
from rlfuse.tasks import clips

ALL = (box, choice, code, exact, interval, json_schema, numeric, pattern, symbolic)
MILLION = "1" * 1_000_000


def scores(module, answer, truth, **options):
    return module.score("source", answer, truth, **options)["score"]


def test_the_verifier_in_the_readme(tmp_path, monkeypatch):
    # The example has options, reasoning that is not scored, and an invalid ground truth.
    page = (Path(__file__).parents[2] / "rlfuse/rewards/README.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    responses = ["<think>Or 3 May 2024?</think>The answer is 17 May 2024.", "18 May 2024", "in spring", "17 May 2024"]
    rows = [{"prompt": "?", "response": each, "ground_truth": "17 May 2024"} for each in responses]
    rows[-1]["ground_truth"] = "2024-05-17"
    [named] = yaml.safe_load(re.search(r"reward\.functions=(.*)", code)[1])
    correct, wrong, none, unreadable = score_table([named], rows)
    assert [(row["reward"], row["date/acc"], row["date/format"]) for row in (correct, wrong, none)] == [
        (1.0, 1.0, 1.0),
        (0.0, 0.0, 1.0),
        (0.0, 0.0, 0.0),
    ]
    assert wrong["note"] == "date/reason: answered '18 May 2024', expected '17 May 2024'" and "date" in none["note"]
    assert unreadable["reward"] is None and "'2024-05-17' does not match" in unreadable["failure"]


@pytest.mark.parametrize("module", ALL)
def test_every_verifier_has_the_signature_of_verl(module):
    names = list(inspect.signature(module.score).parameters)
    assert names[:4] == ["data_source", "solution_str", "ground_truth", "extra_info"]
    assert load_function(module.score).answer_only
    assert all(
        parameter.kind is not parameter.VAR_KEYWORD for parameter in inspect.signature(module.score).parameters.values()
    )


def test_a_configured_verifier_reads_options_from_rows():
    rows = [
        {"prompt": "?", "response": "<think>A, or B?</think>The answer is (B).", "ground_truth": "B", "options": ["B"]},
        {"prompt": "?", "response": "Rome", "ground_truth": "B", "extra_info": {"options": ["Rome", "Paris"]}},
        {"prompt": "?", "response": "B", "ground_truth": "BB"},
    ]
    correct, wrong, unreadable = score_table("rlfuse.rewards.verifiers.choice:score", rows)
    assert (
        correct["reward"] == 1.0 and correct["score/acc"] == correct["score/format"] == 1.0 and correct["note"] is None
    )
    assert wrong["reward"] == 0.0 and wrong["note"] == "score/reason: answered 'A', expected 'B'"
    assert unreadable["reward"] is None and "ground_truth: got 'BB'; it must be" in unreadable["failure"]


@pytest.mark.parametrize(
    ("module", "truth", "unfinished"),
    [
        (numeric, "42", r"\boxed{42}. But wait, that can't be right"),
        (choice, "B", "the answer is (B)"),
        (exact, "Paris", "Paris"),
        (pattern, r"(?s).*", "anything at all"),
        (interval, "2 to 6", "2 to 6"),
        (box, [0, 0, 9, 9], "[0, 0, 9, 9]"),
    ],
)
def test_a_response_with_unclosed_reasoning_has_no_answer(module, truth, unfinished):
    # The response looks like an answer, but the prompt ends with an open `<think>`.
    entries, loaded = load_entries([f"{module.__name__}:score", {"path": module.score, "answer_only": False}])
    assert [entry.answer_only for entry in entries] == [True, False]
    row = {"prompt": [{"role": "user", "content": "?"}], "ground_truth": truth, "response": unfinished}
    items = [
        replace(item_of_row({**row, "response": response}), prompt_text=f"<u>?<a>{opened}")
        for opened, response in (("<think>\n", unfinished), ("<think>\n", f"so</think>{unfinished}"), ("", unfinished))
    ]
    [cut, uncut] = loaded.values()
    assert cut.answer_only and [score.value for score in cut.score(items)] == [0.0, 1.0, 1.0]
    assert [score.value for score in uncut.score(items[:1])] == [1.0]
    assert cut.score(items[:1])[0].extras["format"] == 0.0


def test_the_reward_of_the_clips_task_reads_answers_only():
    [(_, function)] = load_entries(["rlfuse.tasks.clips:compute_score"])[1].items()
    item = item_of_row({"prompt": [{"role": "user", "content": "?"}], "response": "3", "ground_truth": "3",
                        "data_source": clips.Kind.COUNT.data_source})  # fmt: skip
    opened = replace(item, prompt_text="<a><think>\n")
    assert [score.value for score in function.score([item, opened])] == [1.0, 0.0]


def test_answers_are_read_after_the_last_reasoning():
    assert answer_after_reasoning("<think>x</think> <think>y</think>\n z ") == "z"
    assert answer_after_reasoning(" z ") == "z" and answer_after_reasoning("<think>never ends") == ""
    assert scores(numeric, "<think>The answer is 4</think>5", 4) == 0.0
    assert boxed(r"\boxed{1} and \boxed{\frac{1}{2}} {") == r"\frac{1}{2}" and boxed(r"\boxed{{1}") is None
    assert announced_answer("The answer is 3.\nThe answer is: 4\nso") == "4" and announced_answer("3") is None


@pytest.mark.parametrize(
    ("answer", "truth", "options", "correct"),
    [
        ("Paris", "Paris", {}, 1),
        (" Paris \n  in  France", ["Rome", "Paris in France"], {}, 1),
        (r"It is \boxed{Paris}", "Paris", {}, 1),
        ("paris", "Paris", {}, 0),
        ("paris", "Paris", {"ignore_case": True}, 1),
        ("Paris, I think", "Paris", {}, 0),
        ("", "Paris", {}, 0),
    ],
)
def test_exact(answer, truth, options, correct):
    assert scores(exact, answer, truth, **options) == correct


@pytest.mark.parametrize(
    ("answer", "truth", "correct"),
    [
        ("It is 1,234.5 in all", "1234.5", 1),
        ("1,234,567", 1234567, 1),
        ("1.2e-3", "0.0012", 1),
        (r"$1.2 \times 10^{-3}$", 0.0012, 1),
        ("3/4", "0.75", 1),
        ("1 1/2", 1.5, 1),
        (r"\boxed{\frac{3}{4}} of 5", "0.75", 1),
        (r"2\dfrac{1}{2}", "5/2", 1),
        ("45%", "0.45", 1),
        (r"45\%", "45", 1),
        ("0.45", "45%", 1),
        ("The answer is **42**. I took 3 steps", 42, 1),
        ("first 42, then 3", 42, 0),
        ("$1,000", "1000", 1),
        ("−5", "-5", 1),  # noqa: RUF001 U+2212
        ("-5", "−5", 1),  # noqa: RUF001
        ("1２", "12", 1),  # noqa: RUF001 full-width digits are digits
        ("٣", "3", 0),  # digits of other scripts are not
        ("x1", "1", 0),
        ("2024-05-06", "-6", 0),
        ("1000001", "1000000", 0),
        ("0.333333", "1/3", 1),
        ("0.3333", "1/3", 0),
        ("nan", "1", 0),
        ("inf", "1", 0),
        ("1/0", "1", 0),
        ("1e999999999", "1", 0),
        ("1e-999999999", "0", 0),
        (MILLION, "1", 0),
        ("1" * 90_000, "1", 0),
        ("1," * 40_000 + "2", "2", 1),
        ("-" * 90_000, "1", 0),
        (r"\boxed{" * 14_000, "1", 0),
    ],
)
def test_numeric(answer, truth, correct):
    assert scores(numeric, answer, truth) == correct


def test_numeric_tolerances():
    assert scores(numeric, "101", 100) == 0.0 and scores(numeric, "101", 100, relative=0.01) == 1.0
    assert scores(numeric, "103", 100, absolute=3) == 1.0 and scores(numeric, "103.5", 100, absolute=3) == 0.0


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_in_python_format_are_parsed(number):
    value, percent = numeric.number_in(f"The result is {number!r}")
    assert float(value) == number and not percent


@pytest.mark.parametrize(
    ("answer", "correct"),
    [
        ("The answer is (B).", 1),
        ("the correct option is B, since 5 < 6", 1),
        ("B", 1),
        ("b", 1),
        ("(b)", 1),
        ("B.", 1),
        ("**B**", 1),
        ("B) Paris", 1),
        ("Option B", 1),
        (r"\boxed{\text{B}}", 1),
        ("Paris", 1),
        ("The answer is paris.", 1),
        ("It is A at first sight.\nAnswer: B", 1),
        ("I am not sure.\nB", 1),
        ("A", 0),
        ("D", 0),
        ("A or B", 0),
        ("(B) and (C)", 0),
        ("Because B", 0),
        ("Ｂ", 1),  # noqa: RUF001 full-width
        ("В", 0),  # noqa: RUF001 Cyrillic, the third letter of its alphabet
        ("", 0),
        ("(" * 90_000 + "B", 0),
    ],
)
def test_choice(answer, correct):
    assert scores(choice, answer, "B", options=["Rome", "Paris", "Berlin"]) == correct


def test_choice_supports_options_and_ignores_articles():
    assert scores(choice, "А", "A") == 0.0  # noqa: RUF001 Cyrillic
    assert scores(choice, "The answer is A dog", "A") == 0.0 and scores(choice, "The answer is A because", "A") == 1.0
    assert scores(choice, "B", "Paris", options={"A": "Rome", "B": "Paris", "C": None}) == 1.0
    assert choice.score("", "Paris", "B", {"options": '["Rome", "Paris"]'})["score"] == 1.0
    with pytest.raises(ValueError, match=r"options: got 'Rome'"):
        scores(choice, "B", "B", options="Rome")


@pytest.mark.parametrize(
    ("answer", "truth", "overlap"),
    [
        ("3.0 to 6.0", "2.0 to 6.0", 0.75),
        ("From 4 seconds to 8 seconds.", "2.0 to 6.0", 1 / 3),
        ("[4, 8]", [2.0, 6.0], 1 / 3),
        ("4.0s - 8.0s", "[2, 6]", 1 / 3),
        ("between 00:04 and 00:08.0", "00:02 to 00:06", 1 / 3),
        ("1:00:04–1:00:08", "3602 to 3606", 1 / 3),  # noqa: RUF001 en dash
        ("1 to 2, no: 2 to 6", "2 to 6", 1.0),
        ("7 to 9", "2 to 6", 0.0),
        ("6 to 2", "2 to 6", None),
        ("3 to 3", "2 to 6", None),
        ("-3 to 5", "2 to 6", None),
        ("nan to 5", "2 to 6", None),
        ("soon", "2 to 6", None),
        (f"{MILLION[:90_000]} to 5", "2 to 6", None),
        ("1:" * 40_000, "2 to 6", None),
    ],
)
def test_interval(answer, truth, overlap):
    result = interval.score("", answer, truth)
    assert result["score"] == pytest.approx(overlap or 0.0) and result["format"] == (overlap is not None)
    assert result["acc"] == ((overlap or 0.0) >= 0.5) and ("reason" in result) == ((overlap or 0.0) < 0.5)


times = st.floats(0, 1e5)


@given(times, times, times, times)
def test_interval_iou_is_symmetric_and_in_0_to_1(a, b, c, d):
    one, other = (min(a, b), max(a, b) + 1), (min(c, d), max(c, d) + 1)
    assert interval.interval_iou(one, other) == pytest.approx(interval.interval_iou(other, one))
    assert 0 <= interval.interval_iou(one, other) <= 1 and interval.interval_iou(one, one) == pytest.approx(1)


@pytest.mark.parametrize(
    ("answer", "truth", "options", "overlap"),
    [
        ("[0, 0, 10, 10]", [0, 0, 10, 10], {}, 1.0),
        ("The box is [5, 0, 15, 10].", "[0, 0, 10, 10]", {}, 1 / 3),
        ("[15, 10, 5, 0]", [10, 10, 0, 0], {}, 1 / 3),
        ("<bbox>5 0 15 10</bbox>", [0, 0, 10, 10], {}, 1 / 3),
        ("(0.1, 0.1, 0.2, 0.2)", [0.1, 0.1, 0.2, 0.2], {}, 1.0),
        ("[0.1, 0.1, 0.2, 0.2]", [10, 20, 20, 40], {"size": [100, 200]}, 1.0),
        ("[10, 20, 20, 40]", [0.1, 0.1, 0.2, 0.2], {"size": (100, 200)}, 1.0),
        ("[0.1, 0.1, 0.2, 0.2]", [10, 20, 20, 40], {}, 0.0),
        ("[20, 20, 30, 30]", [0, 0, 10, 10], {}, 0.0),
        ("[5, 5, 5, 9]", [0, 0, 10, 10], {}, None),
        ("[nan, 0, 10, 10]", [0, 0, 10, 10], {}, None),
        ("[1, 2, 3]", [0, 0, 10, 10], {}, None),
        ("[" * 90_000, [0, 0, 10, 10], {}, None),
        ("[1" + " " * 90_000, [0, 0, 10, 10], {}, None),
    ],
)
def test_box(answer, truth, options, overlap):
    result = box.score("", answer, truth, **options)
    assert result["score"] == pytest.approx(overlap or 0.0) and result["format"] == (overlap is not None)


@pytest.mark.parametrize(
    ("answer", "truth", "options", "correct"),
    [
        ("ab12", r"[a-z]+\d+", {}, 1),
        ("x ab12", r"[a-z]+\d+", {}, 0),
        ("x ab12", r"[a-z]+\d+", {"anywhere": True}, 1),
        ("a" * 50 + "!", r"(a|a)*b", {"timeout_s": 0.05}, 0),
        (MILLION, r"\d+", {}, 0),
    ],
)
def test_pattern(answer, truth, options, correct):
    assert scores(pattern, answer, truth, **options) == correct


@pytest.mark.parametrize(
    ("module", "truth"),
    [
        (exact, ""),
        (exact, None),
        (exact, ["a", 3]),
        (numeric, "twelve"),
        (numeric, math.nan),
        (numeric, None),
        (numeric, True),
        (choice, "AB"),
        (choice, "А"),  # noqa: RUF001 Cyrillic
        (choice, 1),
        (interval, "later"),
        (interval, "6 to 2"),
        (interval, [1.0]),
        (box, [0, 0, math.nan, 1]),
        (box, "[0, 0, 0, 1]"),
        (box, 7),
        (pattern, "(a"),
        (pattern, None),
        (code, "print(1)"),
        (code, {"inputs": ["1"]}),
        (code, {"inputs": ["1"], "outputs": ["1", "2"]}),
        (code, {"inputs": ["1"], "outputs": [1]}),
        (code, {"tests": ["assert f()"]}),
        (code, {"assert_case": ["assert ("]}),
        (code, {"assert_case": []}),
        (code, {"fn_name": "f", "inputs": ["1"], "outputs": [1]}),
        (code, 5),
    ],
)
def test_an_invalid_ground_truth_is_an_error(module, truth):
    with pytest.raises(ValueError, match=r"ground_truth: got .*must be"):
        scores(module, "answer: 1", truth)


def test_integers_beyond_float_are_wrong_without_error():
    truth = {"fn_name": "f", "inputs": [[0], [1], [2]], "outputs": [1.5, [1.5], 1e400]}
    result = code.score("", "def f(x): return [10**400, [-(10**400)], 10**400][x]", truth, continuous=True)
    assert result["score"] == 0.0 and result["reason"].count("wrong: got ") == 3
