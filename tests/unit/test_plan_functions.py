"""Custom functions in `rlfuse plan`: refused as by `rlfuse train`, except for missing reward files."""

import json
import re

import pytest
from test_plan import SEVEN_B, command


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SEVEN_B))
    return tmp_path


def test_all_problems_of_function_files_are_reported(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = "def none(): pass\ndef loss(log_probs): return log_probs\nmade = print\n"
    (tmp_path / "mine.py").write_text(text)
    names = {"fusion.policy": "mine.py:nope", "trainer.metrics": "[mine.py:none]", "actor.loss_mode": "mine.py:nope"}
    names |= {"model.video_family": "mine.py:Nope"}
    rewards = "reward.functions=[mine.py:none,mine.py:made,mine.py:absent,gone.py:f,no_such_package.rewards:f]"
    assert command(model, "--device-memory", "800", rewards, *(f"{key}={value}" for key, value in names.items())) == 2
    output = capsys.readouterr().err
    for wrong in (
        "fusion.policy=mine.py:nope: the file has no function `nope`",
        "trainer.metrics=mine.py:none: takes ()",
        "actor.loss_mode=mine.py:nope: the file has no function `nope`; its functions: none, loss",
        "model.video_family=mine.py:Nope: the file has no class",
        "reward.functions=mine.py:absent: the file has no function `absent`",
    ):
        assert wrong in output
    assert "gone.py" not in output and "no_such_package" not in output, "rewards may be on another machine"
    assert "mine.py:made" not in output and "rewards=mine.py:none" not in output and "a.parquet" not in output


@pytest.mark.slow
def test_lost_overlap_of_a_batch_estimator_is_reported(model, tmp_path, capsys):
    file = tmp_path / "mine.py"
    group = "@advantage_estimator(needs_batch=False)\ndef of_group(scores, mask): ...\n"
    file.write_text(f"def of_batch(scores, mask): ...\n{group}")
    job = ("--device-memory", "800", "--peak-tflops", "300", "data.train_batch_size=8", "actor.ppo_mini_batch_size=8")
    job += ("data.max_response_length=4096", "rollout.n=2", "trainer.n_gpus_per_node=4", "actor.zero_stage=1")
    assert command(model, *job, f"algorithm.adv_estimator={file}:of_batch") == 0
    output = capsys.readouterr().out
    assert f"algorithm.adv_estimator={file}:of_batch reads the whole batch" in output
    assert float(re.search(r"lost overlap: training waits for the whole batch\W+([\d.]+)", output)[1]) > 0
    assert command(model, *job, f"algorithm.adv_estimator={file}:of_group") == 0
    output = capsys.readouterr().out
    assert "lost overlap" not in output and "whole batch" not in output
