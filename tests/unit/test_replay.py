"""`rlfuse reward replay`: scoring the samples of a run with another reward, in this process."""

import csv
import json
import shutil
from pathlib import Path

import pytest

from rlfuse.cli import main as rlfuse
from rlfuse.files import write_lock
from rlfuse.rewards.api.items import item_of_sample
from rlfuse.run_folder.reader import open_run
from rlfuse.tools.evaluation import replay
from rlfuse.tools.evaluation.reward_table import score_items

RUN = Path(__file__).parents[2] / "notebooks" / "data" / "run"
MINE = """
def short(solution_str):
    return -len(solution_str)

def picky(solution_str, ground_truth):
    return {"score": float(ground_truth in solution_str), "length": 1 / (len(solution_str) % 7)}
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a copy of a run folder, whose rewards are scored without Ray, and the list of rewards used."""
    used = []

    async def score_locally(samples, reward, prompt_key, trusts):
        used.append(reward)
        items = [item_of_sample(sample, prompt_key) for sample in samples]
        return score_items(list(reward.functions), items, list(reward.weights), reward.model_path)

    monkeypatch.setattr(replay, "scored", score_locally)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return Path(shutil.copytree(RUN, tmp_path / "run")), used


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_the_reward_of_the_run_reproduces_the_saved_scores(run, capsys):
    folder, _ = run
    assert rlfuse(["reward", "replay", str(folder)]) == 0
    report = json.loads((folder / "replay.json").read_text())
    assert report["reward"]["functions"] == ["rlfuse.tasks.remainder:compute_score"]
    assert report["agreement"]["pearson"] == pytest.approx(1.0)
    assert report["agreement"]["samples"] == 384 and report["agreement"]["flipped"] == 0
    assert "384" in capsys.readouterr().out


def test_a_replay_is_rejected_while_another_writes_the_same_file(run, capsys):
    folder, used = run
    with write_lock(folder / "replay.json"):
        assert rlfuse(["reward", "replay", str(folder)]) == 2
    assert "is writing this file" in capsys.readouterr().err and not used


@pytest.mark.slow
def test_another_reward_reports_changed_scores_and_ranks(run, capsys):
    folder, used = run
    words = ["reward.functions=[mine.py:short]", "--examples", "2"]
    assert rlfuse(["reward", "replay", str(folder), *words]) == 0
    out = capsys.readouterr().out
    report = json.loads((folder / "replay.json").read_text())
    rows = rows_of(folder / "replay.csv")
    assert list(used[0].functions) == ["mine.py:short"]
    assert len(rows) == 384 and float(rows[4]["after"]) == -len(rows[4]["response"])
    assert report["agreement"]["flipped"] > 0 and report["agreement"]["pairs"] == 96 * 6
    assert len(report["examples"]) == 2 and report["examples"][0]["id"] in out
    assert f"{report['agreement']['flipped']} of 576" in out and "replay.csv" in out


@pytest.mark.slow
def test_failures_are_counted_and_have_no_score(run, capsys):
    folder, _ = run
    out = folder.parent / "elsewhere"
    assert rlfuse(["reward", "replay", str(folder), "reward.functions=[mine.py:picky]", "--out", str(out)]) == 0
    report = json.loads(Path(f"{out}.json").read_text())
    rows = rows_of(Path(f"{out}.csv"))
    failed = [row for row in rows if row["failure"]]
    assert len(rows) == 384 and report["unscored"] == len(failed) > 0
    assert all(row["after"] == "" and row["id"] and row["rank_shift"] == "" for row in failed) and report["agreement"][
        "samples"
    ] == 384 - len(failed)
    assert "picky: ZeroDivisionError" in capsys.readouterr().out
    assert not (folder / "replay.json").exists()


@pytest.mark.slow
def test_limits_of_the_run_apply():
    run = open_run(RUN)
    run.config["reward"] |= {"timeout_s": 7.0, "weights": [0.5], "model_path": "old"}
    reward = replay.reward_of(run, ["reward.functions=[{path: a.py:b, weight: 2}]", "reward.num_workers=3"])
    assert (reward.timeout_s, reward.num_workers) == (7.0, 3)
    assert (list(reward.weights), reward.model_path) == ([], None) and reward.functions[0]["weight"] == 2
    unchanged = replay.reward_of(run, [])
    assert unchanged.model_path == "old" and list(unchanged.weights) == [0.5]
    assert not replay.trusts_code(run, []) and replay.trusts_code(run, ["model.trust_remote_code=true"])
    replay.reward_of(run, ["model.trust_remote_code=true", "reward.model_path=m"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--examples", "-1"], "--examples -1: it must be 0 or more"),
        (["data.seed=3"], "data.seed=3: only reward.KEY=VALUE"),
        (["reward.function=[a.py:b]"], "did you mean reward.functions"),
        (["reward.timeout_s=soon"], "reward.timeout_s"),
        (["reward.functions=[mine.py:long]"], "has no function 'long'"),
    ],
)
def test_invalid_arguments_are_reported(run, capsys, words, message):
    assert rlfuse(["reward", "replay", str(run[0]), *words]) == 2
    assert message in capsys.readouterr().err
