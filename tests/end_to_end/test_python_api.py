"""Runs the README's script in a separate process, compares it with the same job from files, and evaluates its model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml
from job_processes import ENVIRONMENT

import rlfuse

README = Path(__file__).parents[2] / "README.md"
SMALL = {
    "data": {"max_prompt_length": 16, "max_response_length": 12, "train_batch_size": 4},
    "rollout": {"n": 4, "name": "transformers", "kv_cache_memory_mb": 32},
    "actor": {"ppo_mini_batch_size": 4, "optim": {"lr": 1e-3}},
    "trainer": {"total_training_steps": 2, "n_gpus_per_node": 1, "logger": [], "val_before_train": False},
}
REWARD = re.compile(r"\ndef correct.*?\n\n\n", re.DOTALL)


@pytest.fixture(scope="module")
def script(tiny_model):
    """Write the README's script, with a tiny model and few tokens."""
    [code] = re.findall(r"```python\n(# my_run\.py.*?)```", README.read_text(), re.DOTALL)
    for given, small in (
        ('"Qwen/Qwen2.5-0.5B-Instruct"', repr({"path": str(tiny_model), "dtype": "float32"})),
        ('trainer={"total_training_steps": 20}', f"**{SMALL!r}"),
        ("What is {a} + {b}?", "w{a + 3} w{b + 3}"),  # words in the vocabulary
    ):
        assert code.count(given) == 1, given
        code = code.replace(given, small)
    return code


def run_in(folder, *command):
    command, environment = [sys.executable, *command], os.environ | ENVIRONMENT
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    [run] = (folder / "runs" / "rlfuse").iterdir()
    return rlfuse.Run(run), done.stdout


@pytest.fixture(scope="module")
def run(script, tmp_path_factory):
    """Run the script; return its run folder and output."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "my_run.py").write_text(script)
    return run_in(folder, "my_run.py")


def test_objects_give_the_metrics_of_the_job_file(run, script, tiny_model, tmp_path):
    run, shown = run
    values = {}
    exec(script.partition("run = ")[0], values)
    pd.DataFrame(values["rows"]).to_parquet(tmp_path / "train.parquet")
    (tmp_path / "my_reward.py").write_text(REWARD.search(script)[0])
    job = SMALL | {
        "algorithm": "grpo",
        "model": {"path": str(tiny_model), "dtype": "float32"},
        "reward": {"functions": ["my_reward.py:correct"]},
        "data": SMALL["data"] | {"train_files": ["train.parquet"]},
    }
    (tmp_path / "my_job.yaml").write_text(yaml.safe_dump(job))
    expected, _ = run_in(tmp_path, "-m", "rlfuse.train", "my_job.yaml")
    steps = [1, 2]
    assert [*run.metrics.index] == [*expected.metrics.index] == steps
    assert expected.metrics["actor/grad_norm"].min() > 1e-4 and "rewards/correct/mean" in expected.metrics
    learned = [name for name in expected.metrics if name.startswith(("actor/", "critic/", "rewards/", "response_"))]
    assert len(learned) > 10 and learned == [name for name in run.metrics if name in learned]
    pd.testing.assert_frame_equal(run.metrics[learned], expected.metrics[learned], rtol=2e-4, atol=5e-6)
    pd.testing.assert_series_equal(run.samples["response"], expected.samples["response"])
    assert run.checkpoint.name == "global_step_2" and (run.model / "config.json").exists() and str(run.folder) in shown


def test_a_run_is_evaluated_on_rows(run, monkeypatch):
    run, _ = run
    monkeypatch.chdir(run.folder.parents[2])
    rows = [{"prompt": f"w{i} w9", "answer": "3", "data_source": "held out"} for i in range(3, 6)]
    with pytest.raises(rlfuse.RlfuseError, match="run-code"):
        rlfuse.evaluate(run, dataset=rows)
    found = rlfuse.evaluate(run, dataset=rows, run_code=True, show=lambda line: None)
    assert found.scores.loc["held out", "samples"] == 3 and found.folder == run.folder / "eval" / "global_step_2"
    assert found.scores.loc["held out", "reward"] == pytest.approx(found.samples["reward"].mean())
    assert [*found.samples["prompt"]] == [row["prompt"] for row in rows]
    assert found.metrics["val-core/held out/reward/mean@1"] == pytest.approx(found.samples["reward"].mean())
