"""Executes the notebooks, which include training jobs; replays a run with another reward."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"


def runner():
    specification = importlib.util.spec_from_file_location("execute_notebooks", FOLDER / "execute.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def shown(notebook):
    """Return (text, number of images) of all outputs."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    data = [output.data for output in outputs if "data" in output]
    text = "\n".join([*(output.get("text", "") for output in outputs), *(each.get("text/plain", "") for each in data)])
    return text, sum("image/png" in each for each in data)


def test_the_reward_notebook_trains_with_its_reward(tmp_path):
    text, pictures = shown(runner().execute(FOLDER / "01_write_a_reward.ipynb", tmp_path))
    assert pictures == 2 and "ZeroDivisionError" in text
    assert "step 2/2" in text and "the same rewards: True" in text
    config = (tmp_path / "runs" / "rlfuse" / "steps_reward" / "config.yaml").read_text()
    assert "steps_reward.py:compute_score" in config


def test_the_reward_model_notebook_trains_and_plots_an_extended_model(tmp_path):
    text, pictures = shown(runner().execute(FOLDER / "02_extend_a_reward_model.ipynb", tmp_path))
    assert pictures == 4 and "60 steps of" in text and "{'path': 'reward_model:brief', 'weight': 0.2}" in text
    run = tmp_path / "runs" / "rlfuse" / "two_layers"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["val-aux/reward_model/acc/brief"] > 0.65 and rows[-1]["val-core/reward_model/acc"] > 0.6
    assert (run / "global_step_60" / "reward_model" / "huggingface" / "my_reward_model.py").exists()


def test_the_judge_notebook_trains_a_judge_and_uses_it_in_a_job(tmp_path):
    text, pictures = shown(runner().execute(FOLDER / "03_generative_judge.ipynb", tmp_path))
    assert pictures == 3 and "0 failures" in text and "template: {b} is missing" in text
    [(first, second, mean)] = re.findall(r"^all +([\d.]+) +([\d.]+) +([\d.]+)$", text, re.MULTILINE)
    assert float(mean) > 0.65 and float(mean) >= min(float(first), float(second))
    assert re.search(r"judge +weight 1, sees the answer only\ncompute_score +weight 0, sees all", text)


def test_the_run_notebook_reads_a_run(tmp_path):
    text, pictures = shown(runner().execute(FOLDER / "04_read_a_run.ipynb", tmp_path))
    assert pictures == 5 and "idle/controller" in text and "surprise" in text and "subtractions" in text


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_committed_notebooks_have_outputs_without_machine_names(path):
    text, pictures = shown(nbformat.read(path, as_version=4))
    assert pictures >= 2 and path.stat().st_size < 400_000
    assert not re.search(r"/(tmp|home|root|work|Users)/", path.read_text()) and "Error:" not in text.replace(
        "right_steps: ZeroDivisionError:", ""
    )


def test_replay_scores_in_processes_with_time_limits(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import time\n"
        "def slow_on_one(solution_str):\n"
        "    if solution_str.startswith(' 95 - 6 = 18'):\n"
        "        time.sleep(600)\n"
        "    return len(solution_str)\n"
    )
    settings = [f"reward.functions=[{tmp_path}/mine.py:slow_on_one]", "reward.timeout_s=1"]
    command = [sys.executable, "-m", "rlfuse.cli", "reward", "replay", str(FOLDER / "data" / "run"), *settings]
    done = subprocess.run([*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert 0 < report["unscored"] < 10 and report["agreement"]["samples"] == 384 - report["unscored"]
    assert "took longer than 1 s" in done.stdout
