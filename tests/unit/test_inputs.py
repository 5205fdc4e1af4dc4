"""What a run is made of beside its settings: rewards that are edited in place, models that are moved."""

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
    """As a run that came to no step does."""
    job.begin(8).close()
    job.lock.release()


@pytest.fixture
def reward(config, tmp_path):  # noqa: F811
    """The file of the job's reward, beside one of rlfuse's own."""
    file = tmp_path / "mine.py"
    file.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    config.reward.functions = [f"{file}:compute_score", {"path": "rlfuse.tasks.remainder:compute_score"}]
    return file


def model_in(folder, weights=WEIGHTS, layers=2):
    """A folder as `save_pretrained` leaves it, but for the tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": layers}))
    for number in (1, 2):
        (folder / f"model-0000{number}-of-00002.safetensors").write_bytes(weights)
    return str(folder)


def begun(config, *steps):  # noqa: F811
    """The folder of a run that began and was stopped after the last of these steps, at each of which it was saved."""
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


def test_a_reward_edited_in_place_is_told_like_another_setting(config, reward, capsys):  # noqa: F811
    folder = begun(config, 2)
    assert [(row["step"], row["input"]) for row in recorded(folder)] == [(0, str(reward))], "rlfuse's own is not kept"
    assert accept(config).message == ""
    os.utime(reward)
    assert accept(config).message == "", "written again as it was"
    reward.write_text(reward.read_text().replace("1.0", "2.0"))
    job = open_job(config)
    said = capsys.readouterr().out
    first = recorded(folder)[0]["sha256"][:12]
    assert f"    {reward}  {first} -> " in said and "edited: rewards before and after are not comparable" in said
    assert (
        "results before and after are not comparable" in said
        and "new run: rlfuse train ... trainer.experiment_name=mine-2" in said
    )
    begin_and_end(job)
    assert [row["step"] for row in recorded(folder)] == [0, 2] and not (folder / "changes.jsonl").exists()
    assert accept(config).message == "", "said once"


@pytest.mark.parametrize(
    ("key", "code", "edited"),
    [
        ("actor__loss_mode", "def mine(log_probs, advantages, mask):\n    return log_probs\n", "loss function"),
        ("model__video_family", "class mine: ...\n", "encoding of clips and placement of their tokens"),
    ],
)
def test_other_custom_code_edited_in_place_is_reported_too(config, reward, tmp_path, key, code, edited):  # noqa: F811
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


def test_a_metric_edited_in_place_leaves_the_experiment_what_it_was(config, reward, tmp_path):  # noqa: F811
    file = tmp_path / "figures.py"
    file.write_text("def longest(samples):\n    return 1\n")
    config.trainer.metrics = [f"{file}:longest"]
    assert str(file) in [row["input"] for row in recorded(begun(config, 2))]
    file.write_text(file.read_text().replace("1", "2"))
    told = accept(config).message
    assert (
        str(file) in told
        and "edited: logging and alerts" in told
        and "results before and after are not comparable" not in told
    )


@pytest.mark.slow
def test_who_goes_back_has_the_reward_of_then(config, reward):  # noqa: F811
    first, folder = reward.read_text(), begun(config, 2, 4)
    reward.write_text(first.replace("1.0", "2.0"))
    begin_and_end(open_job(config))
    back = changed(config, trainer__resume_mode=str(folder / "global_step_2"))
    assert "edited" in accept(back).message
    reward.write_text(first)
    assert accept(back).message == "" and "edited" in accept(config).message
    begin_and_end(open_job(back))
    assert [row["step"] for row in recorded(folder)] == [0], "of the steps that are abandoned nothing is left"


def test_a_finished_run_says_that_its_reward_was_edited_since(config, reward):  # noqa: F811
    begun(config)
    leave(config, 4)
    with pytest.raises(NothingToDo):
        accept(config)
    reward.write_text("")
    with pytest.raises(RunRefused, match=r"these changes would have no effect(.|\n)*mine.py .* edited: "):
        accept(config)


@pytest.mark.parametrize("key", ["model", "critic"])
def test_a_model_that_was_moved_goes_on_with_a_line_and_another_is_refused(config, tmp_path, key):  # noqa: F811
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


def test_a_copy_is_known_where_nothing_was_recorded(config, tmp_path):  # noqa: F811
    first = model_in(tmp_path / "first")
    leave(changed(config, model__path=first), 2, state="stopped")
    shutil.copytree(first, tmp_path / "copy")
    copy = changed(config, model__path=str(tmp_path / "copy"))
    assert [change.effect for change in accept(copy).changes] == [Effect.IMMEDIATE]
    shutil.rmtree(first)
    with pytest.raises(RunRefused, match="weights are loaded from the checkpoint"):
        accept(copy)
