"""Compatibility: TRL's built-in functions, and functions as documented by verl and OpenRLHF."""

import re

import pytest
from scored_rows import score_table

CHAT = [{"role": "user", "content": "1+1?"}]
ROWS = [
    {
        "prompt": CHAT,
        "response": "<think>\nadd\n</think>\nIt is #### 2",
        "response_ids": [1] * 70,
        "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 0, "split": "train"},
        "solution": "2",
    },
    {
        "prompt": CHAT,
        "response": "3",
        "response_ids": [1] * 95,
        "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 1, "split": "train"},
        "solution": "2",
    },
]


def rewards(function, **kwargs):
    table = score_table({"path": function, "kwargs": kwargs}, ROWS)
    assert [row["failure"] for row in table] == [None, None]
    return [row["reward"] for row in table]


# ---- verl ----------------------------------------------------------------------------------------------------------


def test_verls_custom_reward_function_with_reward_kwargs():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None, format_score=0.0, **kwargs):
        if data_source != "openai/gsm8k":
            raise NotImplementedError(data_source)
        assert extra_info["split"] == "train"
        found = re.findall(r"#### (\-?[0-9\.\,]+)", solution_str)
        acc = bool(found) and found[-1] == ground_truth
        return {"score": 1.0 if acc else format_score, "acc": acc, "pred": found[-1] if found else ""}

    assert rewards(compute_score, format_score=0.1) == [1.0, 0.1]


def test_defaults_of_verl_functions_take_precedence_over_columns():
    def one(data_source, solution_str, ground_truth, extra_info=None, solution="mine", *, score=0.5, **kwargs):
        options = {"method": "strict", **kwargs}  # a helper parameter that may have the name of a column
        return {"score": score, "solution": solution, "options": options}

    def requires_level(solution_str, level, split="own"):
        return {"score": 1.0, "level": level, "split": split}

    def many(data_sources, solution_strs, ground_truths, extra_infos, score=0.25, level=None):
        return [{"score": score, "level": str(level)} for _ in solution_strs]

    rows = [{**row, "score": 7.0, "split": "test", "level": "hard", "method": "loose"} for row in ROWS]
    for function, kwargs, reward, note in (
        (one, {}, 0.5, "one/solution: mine\none/options: {'method': 'strict'}"),
        (one, {"score": 2, "method": "mild"}, 2.0, "one/solution: mine\none/options: {'method': 'mild'}"),
        (
            requires_level,
            {},
            1.0,
            "requires_level/level: hard\nrequires_level/split: own",
        ),  # required, so filled from a column
        (many, {}, 0.25, "many/level: None"),
    ):
        for row in score_table({"path": function, "kwargs": kwargs}, rows):
            assert (row["failure"], row["reward"], row["note"]) == (None, reward, note)


def test_verls_batched_reward_function():
    def compute_score_batched(data_sources, solution_strs, ground_truths, extra_infos, length_penalty=0.0):
        assert [info["index"] for info in extra_infos] == [0, 1]
        scores = [float(solution.endswith(truth)) for solution, truth in zip(solution_strs, ground_truths, strict=True)]
        return [score - length_penalty for score in scores]

    assert rewards(compute_score_batched, length_penalty=0.25) == [0.75, -0.25]


# ---- OpenRLHF ------------------------------------------------------------------------------------------------------


def test_openrlhfs_agent_reward_function():
    import torch

    def reward_func(queries, prompts, labels, **kwargs):
        correct = torch.tensor(
            [float(q[len(p) :].endswith(a)) for q, p, a in zip(queries, prompts, labels, strict=True)]
        )
        return {"rewards": correct, "scores": correct, "extra_logs": {"dummy_scores": correct}}

    assert rewards(reward_func) == [1.0, 0.0]


# ---- TRL -----------------------------------------------------------------------------------------------------------


def test_trls_documented_functions():
    def format_reward_func(completions, **kwargs):
        pattern = r"^<think>.*?</think>\s*\S"
        contents = [completion[0]["content"] for completion in completions]
        return [1.0 if re.match(pattern, content, re.DOTALL) else 0.0 for content in contents]

    async def sum_of_ids(prompts, completions, completion_ids, trainer_state, **kwargs):
        kwargs["log_extra"]("solution", kwargs["solution"])
        kwargs["log_metric"]("longest", max(map(len, completion_ids)))
        return [float(sum(ids)) for ids in completion_ids]

    def lengths(completion_ids, **kwargs):
        return [-float(len(ids)) for ids in completion_ids]

    assert rewards(format_reward_func) == [1.0, 0.0]
    assert rewards(sum_of_ids) == [70.0, 95.0]
    assert rewards(lengths) == [-70.0, -95.0]


@pytest.mark.slow
def test_builtin_functions_of_trl():
    pytest.importorskip("trl")
    assert rewards("trl.rewards:think_format_reward") == [1.0, 0.0]
    punishment = rewards("trl.rewards:get_soft_overlong_punishment", max_completion_len=100, soft_punish_cache=20)
    assert punishment == [0.0, -0.75]
