"""Metrics and samples of steps are read back unchanged, and truncated at the checkpoint of a resume."""

import json
import math
from dataclasses import replace
from datetime import date
from decimal import Decimal

import numpy as np
import pytest
from test_observe import sample

from rlfuse.observe.tracking import StepFile, read_metrics, sample_of_row, sample_row
from rlfuse.rewards.api.items import UnknownTokens, item_of_sample
from rlfuse.samples import Reward, RewardFailure


def test_metrics_after_the_checkpoint_are_removed_on_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "x": step}) + "\n" for step in (0, 1, 2, 3)))
    log = StepFile(path, after=2)
    log.write(3, {"x": 30.0})
    log.close()
    assert read_metrics(path) == [{"step": 0, "x": 0}, {"step": 1, "x": 1}, {"step": 2, "x": 2}, {"step": 3, "x": 30.0}]


@pytest.mark.parametrize("given", ["a question", [{"role": "user", "content": "a question"}]])
def test_a_saved_sample_gives_reward_functions_the_same_input(tmp_path, given):
    scored = sample(3, 1, 5, Reward(0.5))
    columns = {"question": given, "extra_info": {"index": 3}, "reward_model": {"ground_truth": "1"}}
    messages = ({"role": "user", "content": "a question"},)
    scored.prompt = replace(scored.prompt, columns=columns, messages=messages, text="<user>a question")
    log = StepFile(tmp_path / "samples.jsonl", after=0)
    log.write(1, sample_row(scored))
    log.close()
    [row] = read_metrics(tmp_path / "samples.jsonl")
    before, after = item_of_sample(scored, "question"), item_of_sample(sample_of_row(row, "question"), "question")
    assert after == replace(before, response_ids=UnknownTokens())


NAN, INFINITY = float("nan"), float("inf")
NOT_JSON = [
    NAN,
    INFINITY,
    -INFINITY,
    np.float64("nan"),
    np.float64("-inf"),
    np.float32("nan"),
    [NAN],
    [1.0, INFINITY, "x"],
    (NAN, 2),
    {"score": NAN},
    {"a": {"b": [{"c": -INFINITY}]}},
    {"a": [], "b": None, "c": NAN},
    [[NAN], [[INFINITY]]],
    {NAN: 1},
    {"1": {"2": (INFINITY, [NAN])}},
    [{"role": "user", "content": "a", "weight": NAN}],
    {"NaN": NAN},
    [True, NAN, 10**30],
    {"date": date(2025, 1, 1), "x": NAN},
    {"bytes": b"ab", "x": [INFINITY]},
    [Decimal("NaN")],
    [complex(NAN, 1)],
]


@pytest.mark.parametrize("given", NOT_JSON, ids=repr)
def test_rows_without_finite_numbers_stay_json(tmp_path, given):
    def refuse(text):
        raise AssertionError(f"{text} is not JSON")

    scored = sample(3, 1, 5, Reward(0.5))
    scored.prompt = replace(scored.prompt, columns={"given": given}, ground_truth=given)
    log = StepFile(tmp_path / "samples.jsonl", after=0)
    log.write(1, sample_row(scored))
    log.write(2, {"actor/grad_norm": NAN, "x": -INFINITY, "y": 2.0})
    log.close()
    first, second = (json.loads(line, parse_constant=refuse) for line in log.path.read_text().splitlines())
    assert first["columns"]["given"] == first["ground_truth"] != given
    if isinstance(given, float):
        assert float(first["ground_truth"]) == given or math.isnan(given), "the text states the number"
    assert second == {"step": 2, "actor/grad_norm": "NaN", "x": "-Infinity", "y": 2.0}
    row = read_metrics(log.path)[1]
    assert math.isnan(row["actor/grad_norm"]) and row["x"] == -INFINITY and row["y"] == 2.0, "metrics are numbers"


def test_samples_are_saved_as_readable_rows(tmp_path):
    scored = sample(3, 1, 5, Reward(0.5, {"fn/format": 1.0}, "no number"))
    failed = sample(4, 0, 6, RewardFailure("judge", "timed out"), finish="length")
    log = StepFile(tmp_path / "samples.jsonl", after=0)
    log.write(1, sample_row(scored), sample_row(failed))
    log.close()
    first, second = read_metrics(tmp_path / "samples.jsonl")
    assert first == {
        "step": 1,
        "id": "1/3/1",
        "data_source": "sums",
        "prompt": "p",
        "response": "r",
        "finish": "stop",
        "prompt_tokens": 4,
        "response_tokens": 5,
        "reward": 0.5,
        "parts": {"fn/format": 1.0},
        "note": "no number",
        "ground_truth": "1",
        "columns": {},
        "contact_sheet": None,
        "pred": None,
        "token_rewards": None,
    }
    assert second["reward"] is None and second["parts"] == {} and second["note"] == "judge: timed out"
    log = StepFile(tmp_path / "samples.jsonl", after=0)
    log.close()
    assert read_metrics(tmp_path / "samples.jsonl") == []
