"""Reward functions with all signatures: loading, calling, composing, error messages. Without Ray."""

from __future__ import annotations

import math
import textwrap

import async_rewards
import numpy as np
import pytest
from scored_rows import score_table

from rlfuse.config import custom_functions
from rlfuse.errors import RewardError
from rlfuse.rewards.api.entries import load_entries
from rlfuse.rewards.api.functions import load_function
from rlfuse.rewards.api.items import Score, item_of_row, item_of_sample
from rlfuse.samples import Prompt, Response, Reward, RewardFailure, Sample

ROWS = [
    {"prompt": "2+2", "response": "4", "ground_truth": "4", "data_source": "sums", "level": 1},
    {"prompt": "3+3", "response": "seven", "ground_truth": "6", "data_source": "sums", "level": 2},
]


def write(tmp_path, code, name="mine.py"):
    path = tmp_path / name
    path.write_text(textwrap.dedent(code))
    return path


def outcomes(function, rows=ROWS):
    return load_function(function).score([item_of_row(row, number) for number, row in enumerate(rows)])


# ---- shapes --------------------------------------------------------------------------------------------------------


def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": solution_str == ground_truth, "length": len(solution_str), "seen": f"{data_source} {extra_info}"}


async def verl_async(solution_str, ground_truth):
    return np.float32(solution_str == ground_truth)


def trl(prompts, completions, level, **columns):
    assert columns["ground_truth"] == ["4", "6"] and columns["trainer_state"].global_step == -1
    columns["log_metric"]("calls", 1)
    columns["log_metric"]("calls", 3)
    columns["log_extra"]("doubled", [2 * one for one in level])
    return [float(one) if completion == "4" else None for one, completion in zip(level, completions, strict=True)]


async def trl_async(completions, completion_ids):
    return [len(ids) for ids in completion_ids]


def openrlhf(queries, prompts, labels, **kwargs):
    rewards = np.array([q == p + label for q, p, label in zip(queries, prompts, labels, strict=True)], dtype=np.float32)
    return {"rewards": rewards, "scores": rewards * 2, "extra_logs": {"batch": 2, "level": kwargs["level"]}}


async def openrlhf_async(queries, prompts, labels):
    return {"rewards": [1.0] * len(queries)}


def verl_many(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    assert list(data_sources) == ["sums", "sums"] and extra_infos == [{}, {}]
    pairs = zip(solution_strs, ground_truths, strict=True)
    return [{"score": float(solution == truth), "length": len(solution)} for solution, truth in pairs]


def by_samples(samples, bonus=0.0):
    return [Reward(len(s.response) + bonus, {"level": s.columns["level"]}, f"saw {s.data_source}") for s in samples]


class Graded:
    """Object with a method `score` that takes samples."""

    def __init__(self, scale=1.0):
        self.scale = scale

    async def score(self, batch):
        return [self.scale if sample.response == sample.ground_truth else None for sample in batch]


def test_verl_gives_scores_extras_and_notes():
    first, second = outcomes(verl)
    assert first == Score(1.0, {"length": 1.0}, {"seen": "sums {}"})
    assert second == Score(0.0, {"length": 5.0}, {"seen": "sums {}"})
    assert [score.value for score in outcomes(verl_async)] == [1.0, 0.0]


def test_trl_functions_receive_batches_and_columns_and_may_return_none():
    assert outcomes(trl) == [Score(1.0, {"calls": 2.0, "doubled": 2.0}), Score(None, {"calls": 2.0, "doubled": 4.0})]
    rows = [{**row, "response_ids": np.arange(2 + n)} for n, row in enumerate(ROWS)]
    assert [score.value for score in outcomes(trl_async, rows)] == [2.0, 3.0]


def test_trl_functions_receive_text_or_messages_as_in_the_row():
    seen = []

    def look(prompts, completions):
        seen.append((prompts, completions))
        return [0.0] * len(prompts)

    chat = [{"role": "user", "content": "hi"}]
    outcomes(look, [{"prompt": "hi", "response": "yo"}])
    outcomes(look, [{"prompt": chat, "response": "yo"}])
    assert seen == [(["hi"], ["yo"]), ([chat], [[{"role": "assistant", "content": "yo"}]])]


def test_openrlhf_gives_rewards_and_logs():
    assert outcomes(openrlhf) == [
        Score(1.0, {"scores": 2.0, "batch": 2.0, "level": 1.0}),
        Score(0.0, {"scores": 0.0, "batch": 2.0, "level": 2.0}),
    ]
    assert [score.value for score in outcomes(openrlhf_async)] == [1.0, 1.0]


def test_batched_verl_functions_give_scores_and_extras():
    assert outcomes(verl_many) == [Score(1.0, {"length": 1.0}), Score(0.0, {"length": 5.0})]


def test_functions_and_objects_take_samples_and_give_rewards():
    first, second = outcomes(by_samples)
    assert first == Score(1.0, {"level": 1.0}, {"text": "saw sums"}) and second.value == 5.0
    assert [score.value for score in outcomes(Graded(2.0))] == [2.0, None]
    assert [score.value for score in outcomes(Graded)] == [1.0, None]  # instantiated with kwargs
    failed = outcomes(lambda samples: [RewardFailure("?", "no idea"), Reward(math.nan)])
    assert [failure.message for failure in failed] == ["no idea", "returned nan; a reward must be finite"]
    assert "returned 1 rewards for 2 samples" in outcomes(lambda samples: [Reward(1.0)])[0].message


def test_kwargs_of_functions_classes_and_factories():
    def make(most):
        return lambda completions, **kwargs: [min(most, len(text)) for text in completions]

    def value(found, **kwargs):
        items = [item_of_row(row, number) for number, row in enumerate(ROWS)]
        return [score.value for score in load_function(found, kwargs).score(items)]

    assert value(by_samples, bonus=0.5) == [1.5, 5.5]
    assert value(Graded, scale=3.0) == [3.0, None]
    assert value(make, most=2) == [1.0, 2.0]
    with pytest.raises(RewardError, match="no parameter bonsu; it has samples, bonus"):
        load_function(by_samples, {"bonsu": 1})
    with pytest.raises(RewardError, match=r"(?s)make\(\*\*{'least': 1}\) failed: TypeError.*entry's kwargs"):
        load_function(make, {"least": 1})


@pytest.mark.parametrize("name", async_rewards.NAMES)
def test_async_functions_of_every_kind_are_accepted_awaited_and_bounded(name):
    spec = f"{async_rewards.__file__}:{name}"
    custom_functions.read(custom_functions.REWARDS, spec)  # in the config check of a job
    for given in (spec, getattr(async_rewards, name)):  # in a job and in a notebook
        function = load_function(given)
        assert function.is_async or name == "returns_awaitable"
        assert [score.value for score in function.score([item_of_row(row) for row in ROWS])] == [1.0, 5.0]
        assert function.is_async
    [late] = function.score([item_of_row(ROWS[0] | {"response": "hang"})], timeout_s=0.02)
    assert late.message == f"{function.name} took longer than 0.02 s (reward.timeout_s) and was stopped"


def test_a_reward_file_may_extend_the_path_before_it_imports(tmp_path):
    (tmp_path / "lib").mkdir()
    write(tmp_path / "lib", "def measure(text): return len(text)\n", "helper_in_lib.py")
    path = write(
        tmp_path,
        f"""
    import sys
    sys.path.append({str(tmp_path / "lib")!r})
    import helper_in_lib
    def f(solution_str): return helper_in_lib.measure(solution_str)
    """,
    )
    custom_functions.read(custom_functions.REWARDS, f"{path}:f")
    assert [score.value for score in outcomes(f"{path}:f")] == [1.0, 5.0]


def test_callables_of_other_kinds():
    assert [score.value for score in outcomes(lambda completions: [1, 2])] == [1.0, 2.0]


def test_columns_of_mixed_rows_are_none_or_a_failure_for_that_row_only():
    rows = [ROWS[0], {"prompt": "x", "response": "y"}]
    assert [s.value for s in outcomes(lambda completions, level=None: [x or 0 for x in level], rows)] == [1.0, 0.0]
    good, bad = outcomes(lambda completions, level: level, rows)
    assert good == Score(1.0) and "'level' is not a column" in bad.message


def test_sample_and_row_give_the_same_item():
    chat = ({"role": "user", "content": "2+2"},)
    columns = {"prompt": list(chat), "extra_info": {"index": 3}, "reward_model": {"ground_truth": "4"}}
    prompt = Prompt(0, np.array([1, 2], np.int32), "<u>2+2", chat, "sums", "4", columns)
    response = Response(np.array([5], np.int32), np.zeros(1, np.float32), "stop", 0, "4")
    item = item_of_sample(Sample(prompt, 7, 0, 1, response))
    row = item_of_row({**columns, "response": "4", "response_ids": [5], "data_source": "sums"})
    same = ("prompt", "messages", "response", "response_ids", "data_source", "ground_truth")
    assert {name: getattr(item, name) for name in same} == {name: getattr(row, name) for name in same}
    assert (item.id, item.step, item.prompt_text) == ("7/0/0", 7, "<u>2+2")
    with pytest.raises(ValueError, match="has no response"):
        item_of_sample(Sample(prompt, 7, 0, 1))


# ---- results that are not numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda solution_str: math.nan, "returned nan"),
        (lambda solution_str: {"score": math.inf}, "returned inf"),
        (lambda solution_str: "good", "a reward must be a number"),
        (lambda solution_str: None, "a reward must be a number"),
        (lambda solution_str: np.zeros(2), "array of shape"),
        (lambda solution_str: {"reward": 1}, "key `score` is required"),
        (lambda completions: [1.0], "returned 1 rewards for 2 samples"),
        (lambda completions: 1.0, "a list of numbers"),
        (lambda completions: [math.nan, math.nan], "returned nan"),
        (lambda queries: [1.0, 2.0], "a dict with the key `rewards`"),
        (lambda queries: {"rewards": [None, None]}, "a reward must be a number"),
    ],
)
def test_non_numbers_are_failures(function, message):
    for outcome in outcomes(function):
        assert isinstance(outcome, RewardFailure) and message in outcome.message


def test_nan_fails_only_its_sample():
    good, bad = outcomes(lambda completions: [1.0, math.nan])
    assert good == Score(1.0) and isinstance(bad, RewardFailure)


@pytest.mark.parametrize("keyword", ["", "async "])
def test_an_exception_keeps_only_the_users_traceback(tmp_path, keyword):
    path = write(tmp_path, f"{keyword}def f(solution_str):\n    return int(solution_str)\n")
    good, bad = outcomes(f"{path}:f")
    assert good == Score(4.0)
    assert bad.message == "ValueError: invalid literal for int() with base 10: 'seven'"
    assert "return int(solution_str)" in bad.traceback and str(path) in bad.traceback
    assert "rlfuse/rewards" not in bad.traceback and "asyncio" not in bad.traceback


def test_exit_is_a_failure(tmp_path):
    path = write(tmp_path, "import sys\nasync def a(solution_str): sys.exit(3)\ndef b(solution_str): sys.exit(3)\n")
    for name in "ab":
        assert [outcome.message for outcome in outcomes(f"{path}:{name}")] == ["SystemExit: 3"] * 2


@pytest.mark.slow
def test_async_items_run_concurrently_with_a_timeout_each(tmp_path):
    code = """
    import asyncio
    async def f(solution_str):
        await asyncio.sleep(0.01 if solution_str == "4" else 30)
        return 1.0
    """
    function = load_function(f"{write(tmp_path, code)}:f")
    good, late = function.score([item_of_row(row) for row in ROWS], timeout_s=2)
    assert good == Score(1.0) and late.message == "f took longer than 2 s (reward.timeout_s) and was stopped"


# ---- loading -------------------------------------------------------------------------------------------------------


def test_a_file_is_reloaded_and_may_import_its_neighbours(tmp_path):
    write(tmp_path, "VALUE = 5\n", "neighbour_of_mine.py")
    code = "from neighbour_of_mine import VALUE\ndef f(solution_str): return VALUE + 1\n"
    path = write(tmp_path, code)
    assert outcomes(f"{path}:f")[0] == Score(6.0)
    path.write_text(code.replace("1", "2"))
    assert outcomes(f"{path}:f")[0] == Score(7.0)


def test_a_module_is_loaded_by_name(tmp_path, monkeypatch):
    write(tmp_path, "def f(solution_str): return 1.0\n", "module_of_rewards.py")
    monkeypatch.syspath_prepend(tmp_path)
    assert outcomes("module_of_rewards:f")[0] == Score(1.0)


def test_loading_errors_describe_the_fix(tmp_path, monkeypatch):
    write(tmp_path, "def good(solution_str): return 1\nNUMBER = 3\ndef _hidden(): pass\n", "good.py")
    write(tmp_path, "x = 1\ndef f(solution_str:\n    return 1\n", "syntax.py")
    write(tmp_path, "import json\njson.loads('{')\n", "raises.py")
    write(tmp_path, "import no_such_package_here\n", "needs.py")
    write(tmp_path, "def f(answer, *rest): return 1\n", "shape.py")
    monkeypatch.chdir(tmp_path)
    for spec, *parts in [
        ("god.py:good", "does not exist", "'good.py'"),
        ("good.py:goood", "has no function 'goood'", "['good']"),
        ("good.py:NUMBER", "it is a int"),
        ("good.py", "Append one of the functions in the file: ['good']"),
        ("syntax.py:f", "syntax.py, line 2", "def f(solution_str:", "'(' was never closed"),
        ("raises.py:f", "JSONDecodeError", "json.loads('{')"),
        ("needs.py:f", "No module named 'no_such_package_here'", "install"),
        ("no_module_like_this:f", "PYTHONPATH"),
        ("shape.py:f", "(answer, *rest)", "solution_str", "completions", "queries"),
        (3, "path/to/file.py:function"),
    ]:
        with pytest.raises(RewardError) as caught:
            load_function(spec)
        for part in parts:
            assert part in str(caught.value), (spec, part)


def test_loading_reports_all_problems_and_makes_names_unique(tmp_path):
    first = write(tmp_path, "def compute_score(solution_str): return 1\n", "math_task.py")
    second = write(tmp_path, "def compute_score(solution_str): return 2\n", "code_task.py")
    entries, functions = load_entries([f"{first}:compute_score", f"{second}:compute_score", verl, verl])
    names = [entry.name for entry in entries]
    assert [functions[name].name for name in names] == names
    module = __name__.rpartition(".")[2]
    assert names == ["math_task.compute_score", "code_task.compute_score", f"{module}.verl", f"{module}.verl_2"]
    with pytest.raises(RewardError, match=r"(?s)does not exist.*no function 'g'"):
        load_entries([f"{tmp_path}/absent.py:f", f"{first}:g", verl])


# ---- tables, models -------------------------------------------------------------------------------------------------


def test_score_table_shows_rewards_parts_and_failures():
    first, second = score_table([verl, lambda solution_str: int(solution_str)], ROWS, [1.0, 0.5])
    assert (first["reward"], first["verl"], first["<lambda>"], first["failure"]) == (3.0, 1.0, 4.0, None)
    assert second["reward"] is None and "ValueError" in second["failure"] and "int(solution_str)" in second["traceback"]
    assert first["prompt"] == "2+2"
    with pytest.raises(ValueError, match="row 0: response is None"):
        score_table(verl, [{"prompt": "x"}])
