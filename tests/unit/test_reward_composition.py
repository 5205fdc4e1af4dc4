"""Composition of rewards: weights, gates, routing by source, dimensions."""

import math
from math import inf, nan

import numpy as np
import pytest
from scored_rows import score_table

from rlfuse.config.rewards import RewardConfig, RewardEntry, read_entries
from rlfuse.errors import RewardError
from rlfuse.rewards.api.combine import compose, positions_to_score, uncovered_sources, waves
from rlfuse.rewards.api.entries import load_entries
from rlfuse.rewards.api.items import Score, item_of_row
from rlfuse.rewards.workers.pool import RewardPool
from rlfuse.samples import Prompt, Reward, RewardFailure


def entry(name, weight=1.0, **more):
    return RewardEntry(f"m:{name}", name, None if more.get("gate") else weight, **more)


# ---- one sample ----------------------------------------------------------------------------------------------------


def test_scores_that_apply_are_summed():
    entries = [entry("a"), entry("b", 0.5), entry("c", 9.0)]
    outcomes = {"a": Score(1.0, {"n": 3.0}), "b": Score(4.0, {}, {"why": "x"}), "c": Score(None)}
    parts = {"a": 1.0, "a/n": 3.0, "b": 4.0}
    assert compose(entries, "", outcomes) == Reward(3.0, parts, "b/why: x", {"a": 1.0, "b": 4.0})


def test_a_failure_never_becomes_a_number():
    failed = RewardFailure("b", "broke", "trace")
    entries = [entry("a"), entry("b", 0.0)]
    assert compose(entries, "", {"a": Score(1.0), "b": failed}) == failed
    both = compose(entries, "", {"a": RewardFailure("a", "x"), "b": failed})
    assert both.message == "x (also failed: b)"
    assert compose(entries, "", {"b": failed, "a": RewardFailure("a", "x")}) == both  # regardless of order
    assert "every reward function returned None" in compose([entry("a")], "", {"a": Score(None)}).message
    too_large = compose([entry("a", 1e308)], "", {"a": Score(1e308)})
    assert "is inf, outside float32: lower the weights" in too_large.message


def test_values_are_clipped_but_logged_unclipped():
    entries = [entry("a", 2.0, clip=[-1.0, 1.0])]
    assert compose(entries, "", {"a": Score(7.0)}) == Reward(2.0, {"a": 7.0}, None, {"a": 1.0})


def test_a_closed_gate_gives_zero_and_an_open_one_adds_nothing():
    entries = [entry("gate", gate=True), entry("a", 2.0), entry("b", sources=["else*"])]
    shut = compose(entries, "sums", {"gate": Score(0.0, {}, {"text": "no end"})})
    assert shut == Reward(0.0, {"gate": 0.0}, "gate/text: no end", {"a": 0.0}, "gate")
    open_ = compose(entries, "sums", {"gate": Score(5.0), "a": Score(1.5)})
    assert open_ == Reward(3.0, {"gate": 5.0, "a": 1.5}, None, {"a": 1.5})
    undecided = compose(entries, "sums", {"gate": Score(None), "a": Score(1.5)})
    assert undecided.value == 3.0 and undecided.gate is None


def test_a_source_without_reward_function_fails_even_at_a_closed_gate():
    entries = [entry("gate", gate=True), entry("a", sources=["math/*", "code"])]
    for value in (0.0, 1.0):
        assert (
            "no reward function scores data_source 'chat'" in compose(entries, "chat", {"gate": Score(value)}).message
        )
    assert uncovered_sources(entries, ["code", "chat", "math/1", "chat", "codes"]) == ["chat", "codes"]


# ---- assignment of samples to functions -----------------------------------------------------------------------------


def test_gates_run_first_and_gated_samples_are_not_scored_further():
    first, second = entry("first", gate=True), entry("second", gate=True, sources=["a"])
    last = entry("last")
    assert waves([last, first, second]) == [[first], [second], [last]]
    items = [item_of_row({"prompt": "p", "response": "r", "data_source": source}) for source in "aabaa"]
    known = [{}, {"first": Score(0.0)}, {}, {"first": RewardFailure("first", "x")}, {"first": Score(None)}]
    assert positions_to_score(second, items, known) == [0, 4]
    assert positions_to_score(last, items, known) == [0, 2, 4]


ROWS = [
    {"prompt": "1+1", "response": "<think>x</think>2", "ground_truth": "2", "data_source": "math/sums"},
    {"prompt": "1+1", "response": "2", "ground_truth": "2", "data_source": "math/sums"},
    {"prompt": "hi", "response": "<think>x</think>hello", "data_source": "chat"},
    {"prompt": "hi", "response": "<think>x", "data_source": "chat"},
]


def test_a_mixed_batch_is_routed_and_gated():
    responses = {"exact": [], "length": []}

    def exact(solution_str, ground_truth):
        responses["exact"].append(solution_str)
        return float(solution_str == ground_truth)

    def length(solution_str):
        responses["length"].append(solution_str)
        return len(solution_str)

    gate = {"path": "rlfuse.rewards.reasoning_tags:format_gate", "gate": True}
    functions = [
        gate,
        {"path": exact, "sources": ["math/*"], "answer_only": True},
        {"path": length, "sources": ["chat"], "weight": 0.5, "clip": [0, 4]},
    ]
    table = score_table(functions, ROWS)
    assert [row["reward"] for row in table] == [1.0, 0.0, 2.0, 0.0]
    assert [row["gate"] for row in table] == [None, "format_gate", None, "format_gate"]
    assert responses == {"exact": ["2"], "length": ["<think>x</think>hello"]}
    assert table[3]["note"] == "format_gate/text: the reasoning is not closed with </think>"
    stray = score_table(functions, [{**ROWS[0], "data_source": "code"}])
    assert stray[0]["reward"] is None and "scores data_source 'code'" in stray[0]["failure"]


# ---- entries -------------------------------------------------------------------------------------------------------


def test_strings_dictionaries_and_callables_are_entries():
    entries, problems = read_entries(["a.py:f", {"path": "b.py:g", "weight": 2, "sources": ["x"]}, len], model_path="m")
    assert problems == []
    assert [(e.path, e.weight) for e in entries] == [("a.py:f", 1.0), ("b.py:g", 2.0), (len, 1.0), ("reward_model", 1)]
    entries, _ = read_entries([{"path": "g", "gate": True}, {"path": "reward_model"}, "f"], [0.5, 3], "m")
    assert [(e.path, e.weight) for e in entries] == [("g", None), ("reward_model", 0.5), ("f", 3.0)]


@pytest.mark.parametrize(
    ("functions", "weights", "words"),
    [
        ([], [], "no reward; give at least one function"),
        (["a"], [1.0, 2.0], "has 2 entries but needs 1"),
        (["a"], [math.nan], "nan is not a finite number"),
        ([{"path": "a", "weight": 2.0}], [1.0], "entries of reward.functions have weights too"),
        ([{"path": "a", "wieght": 2.0}], [], "functions.wieght: unknown key of an entry; did you mean weight?"),
        ([{"path": "a", "weight": "much"}], [], "functions.weight=much: needs a number"),
        ([{"path": "a", "gate": "maybe"}], [], "functions.gate=maybe: needs true or false"),
        ([{"weight": 1.0}], [], "an entry needs a path"),
        ([{"path": "judge"}], [], "a judge needs a model"),
        ([{"path": "a", "clip": [1.0, 0.0]}], [], "clip=[1.0, 0.0]: must be [low, high]"),
        ([{"path": "a", "weight": math.inf}], [], "must be a finite number"),
        ([{"path": "a", "gate": True}], [], "has only gates"),
        ([{"path": "a", "gate": True, "weight": 2.0}, "b"], [], "functions[0].weight=2.0: has no effect on a gate"),
        ([{"path": "a", "gate": True, "normalise": True}, "b"], [], "normalise=True: has no effect on a gate"),
        ([{"path": "reward_model"}], [], "there is no reward model; set reward.model_path to its folder or hub name"),
        (["http://"], [], "is not the URL of a service"),
        ([{"path": "http://host:80/x", "kwargs": {"a": 1}}], [], "takes no arguments"),
        ([{"path": "a", "name": "x"}, {"path": "b", "name": "x"}], [], "two entries have the name x"),
        ([{"path": "a", "name": "reward_model"}], [], "the reward model is always named reward_model"),
    ],
)
def test_one_error_in_an_entry_gives_one_message(functions, weights, words):
    _, problems = read_entries(functions, weights)
    assert len(problems) == 1 and words in problems[0]
    with pytest.raises(RewardError) as caught:
        load_entries(functions, weights)
    assert words in str(caught.value)


def test_given_names_are_kept_and_the_model_sees_answers_only(tmp_path):
    def f(solution_str):
        return 1.0

    (tmp_path / "config.json").write_text("{}")
    entries, functions = load_entries([f, {"path": f, "name": "f"}, f], model_path=str(tmp_path))
    module = __name__.rpartition(".")[2]
    assert [e.name for e in entries] == [f"{module}.f", "f", f"{module}.f_2", "reward_model"]
    assert list(functions) == [entry.name for entry in entries]
    assert [e.answer_only for e in entries] == [False, False, False, True]


# ---- checks at startup ----------------------------------------------------------------------------------------------


def prompts(*rows):
    return [
        Prompt(number, np.zeros(1, np.int32), "", (), source, None, columns)
        for number, (source, columns) in enumerate(rows)
    ]


def of_trl(prompts, completions, answer, scale, hint=None, **rest):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    "wrong, message",
    [({"num_workers": 0}, "num_workers is 0"), *(({"timeout_s": s}, "timeout_s is") for s in (0, nan, inf))],
)
def test_invalid_pool_settings_are_rejected(wrong, message):
    with pytest.raises(RewardError, match=rf"reward\.{message}.* must be"):
        RewardPool(RewardConfig([wants_the_prompt], **wrong))


def test_a_missing_column_is_reported():
    pool = RewardPool(
        RewardConfig([{"path": of_trl, "sources": ["math"], "kwargs": {"scale": 1}}, {"path": of_all, "gate": False}])
    )
    row = {"prompt": "p", "answer": 3}
    pool.check_prompts(prompts(("math", row), ("code", {})))
    with pytest.raises(RewardError, match="reward function of_trl: 1 of 2 rows have no column for parameter 'answer'"):
        pool.check_prompts(prompts(("math", row), ("math", {"solution": 3})), max_failure_rate=0.4)
    pool.check_prompts(prompts(("math", row), ("math", {"solution": 3})), max_failure_rate=0.5)
    with pytest.raises(RewardError, match="1 of 1 rows have no column for parameter 'prompt'; row 0 has prompt"):
        RewardPool(RewardConfig([wants_the_prompt])).check_prompts(prompts(("", {"prompt": "p"})))


def of_all(data_source, solution_str, ground_truth):
    return 0.0


def wants_the_prompt(solution_str, prompt):
    return 0.0


def test_a_source_without_reward_function_is_reported():
    pool = RewardPool(RewardConfig([{"path": of_all, "sources": ["sums"]}]))
    pool.check_prompts(prompts(("sums", {})))
    with pytest.raises(RewardError, match="no entry scores data_source 'code'"):
        pool.check_prompts(prompts(("sums", {}), ("code", {})))
