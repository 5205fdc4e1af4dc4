"""Inputs of a run other than its settings: custom code edited in place, and models that were moved."""

import json
import os
import shutil

import pytest
from test_acceptance import changed, config, leave  # noqa: F401

from rlfuse.config.declare import Effect
from rlfuse.run.job import open_job
from rlfuse.run.resume.acceptance import NothingToDo, RunRefused, accept
from rlfuse.run_folder import checkpoints

WEIGHTS = bytes(range(256)) * 1024


def begin_and_end(job):
    """Start and close a run that executes no step."""
    job.begin(8).close()
    job.lock.release()


@pytest.fixture
def reward(config, tmp_path):  # noqa: F811
    """Configure a custom reward file and a bundled reward; return the custom file."""
    file = tmp_path / "mine.py"
    file.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    config.reward.functions = [f"{file}:compute_score", {"path": "rlfuse.tasks.remainder:compute_score"}]
    return file


def model_in(folder, weights=WEIGHTS, layers=2):
    """Write a folder as `save_pretrained` does, with bytes instead of tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": layers}))
    for number in (1, 2):
        (folder / f"model-0000{number}-of-00002.safetensors").write_bytes(weights)
    return str(folder)


def begun(config, *steps):  # noqa: F811
    """Return the folder of a run that was stopped after the last of `steps`, with a checkpoint of each."""
    begin_and_end(open_job(config))
    leave(config, 0, state="stopped", rows=False)
    return saved(config, *steps)


def saved(config, *steps):  # noqa: F811
    for step in steps:
        kept = config.run_folder / f"global_step_{step}"
        kept.mkdir()
        (kept / "run.json").write_text(json.dumps({"step": step}))
        (kept / checkpoints.MARKER).touch()
    return config.run_folder


def recorded(folder):
    return [json.loads(line) for line in (folder / "inputs.jsonl").read_text().splitlines()]


def test_reward_edited_in_place_is_reported_like_a_changed_setting(config, reward, capsys):  # noqa: F811
    folder = begun(config, 2)
    assert [(row["step"], row["input"]) for row in recorded(folder)] == [(0, str(reward))], (
        "bundled rewards are recorded"
    )
    assert accept(config).message == ""
    os.utime(reward)
    assert accept(config).message == "", "rewritten with the same content"
    reward.write_text(reward.read_text().replace("1.0", "2.0"))
    job = open_job(config)
    output = capsys.readouterr().out
    first = recorded(folder)[0]["sha256"][:12]
    assert f"    {reward}  {first} -> " in output and "edited: rewards before and after are not comparable" in output
    assert (
        "results before and after are not comparable" in output
        and "new run: rlfuse train ... trainer.experiment_name=mine-2" in output
    )
    begin_and_end(job)
    assert [row["step"] for row in recorded(folder)] == [0, 2] and not (folder / "changes.jsonl").exists()
    assert accept(config).message == "", "reported only once"


@pytest.mark.parametrize(
    ("key", "code", "edited"),
    [
        ("actor__loss_mode", "def mine(log_probs, advantages, mask):\n    return log_probs\n", "loss function"),
        ("model__video_family", "class mine: ...\n", "encoding of clips and placement of their tokens"),
    ],
)
def test_other_custom_code_edited_in_place_is_reported(config, reward, tmp_path, key, code, edited):  # noqa: F811
    file = tmp_path / "custom.py"
    file.write_text(code)
    config = changed(config, **{key: f"{file}:mine"})
    folder = begun(config, 2)
    assert str(file) in [row["input"] for row in recorded(folder)]
    file.write_text(code + "\n")
    message = accept(config).message
    assert (
        str(file) in message
        and f"edited: {edited}" in message
        and "results before and after are not comparable" in message
    )


def test_metric_edited_in_place_does_not_affect_comparability(config, reward, tmp_path):  # noqa: F811
    file = tmp_path / "custom_metrics.py"
    file.write_text("def longest(samples):\n    return 1\n")
    config.trainer.metrics = [f"{file}:longest"]
    assert str(file) in [row["input"] for row in recorded(begun(config, 2))]
    file.write_text(file.read_text().replace("1", "2"))
    message = accept(config).message
    assert (
        str(file) in message
        and "edited: logging and alerts" in message
        and "results before and after are not comparable" not in message
    )


@pytest.mark.slow
def test_resuming_from_an_earlier_checkpoint_uses_its_recorded_reward(config, reward):  # noqa: F811
    first, folder = reward.read_text(), begun(config, 2, 4)
    reward.write_text(first.replace("1.0", "2.0"))
    begin_and_end(open_job(config))
    back = changed(config, trainer__resume_mode=str(folder / "global_step_2"))
    assert "edited" in accept(back).message
    reward.write_text(first)
    assert accept(back).message == "" and "edited" in accept(config).message
    begin_and_end(open_job(back))
    assert [row["step"] for row in recorded(folder)] == [0], "records of abandoned steps are removed"


def test_finished_run_reports_a_reward_edited_afterwards(config, reward):  # noqa: F811
    begun(config)
    leave(config, 4)
    with pytest.raises(NothingToDo):
        accept(config)
    reward.write_text("")
    with pytest.raises(RunRefused, match=r"these changes would have no effect(.|\n)*mine.py .* edited: "):
        accept(config)


@pytest.mark.parametrize("key", ["model", "critic"])
def test_moved_model_is_accepted_with_a_message_and_another_model_is_refused(config, tmp_path, key):  # noqa: F811
    first = changed(config, **{f"{key}__path": model_in(tmp_path / "first")})
    begun(first, 2)
    (tmp_path / "first").rename(tmp_path / "moved")
    accepted = accept(moved := changed(config, **{f"{key}__path": str(tmp_path / "moved")}))
    [change] = accepted.changes
    assert (change.key, change.effect) == (f"{key}.path", Effect.IMMEDIATE)
    assert (
        f"{key}.path" in accepted.message
        and "moved or copied: same config.json, same sizes of weights" in accepted.message
    )
    begin_and_end(open_job(moved))
    assert accept(moved).message == ""
    others = {
        "further": {"weights": WEIGHTS[:-1] + b"x"},
        "longer": {"weights": WEIGHTS + b"x"},
        "deeper": {"layers": 3},
    }
    for name, kind in others.items():
        with pytest.raises(RunRefused, match="weights are loaded from the checkpoint"):
            accept(changed(config, **{f"{key}__path": model_in(tmp_path / name, **kind)}))
    with pytest.raises(RunRefused):
        accept(changed(config, **{f"{key}__path": "org/name"}))


def test_copied_model_is_recognized_without_a_record(config, tmp_path):  # noqa: F811
    first = model_in(tmp_path / "first")
    leave(changed(config, model__path=first), 2, state="stopped")
    shutil.copytree(first, tmp_path / "copy")
    copy = changed(config, model__path=str(tmp_path / "copy"))
    assert [change.effect for change in accept(copy).changes] == [Effect.IMMEDIATE]
    shutil.rmtree(first)
    with pytest.raises(RunRefused, match="weights are loaded from the checkpoint"):
        accept(copy)
