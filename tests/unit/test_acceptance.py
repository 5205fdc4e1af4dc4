"""Acceptance of a job at startup: finished runs, changed settings, run names, and folders in use by other jobs."""

import dataclasses
import json
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import time

import pytest
import yaml
from omegaconf import OmegaConf

from rlfuse.config.compose import compose_job, conf_folder
from rlfuse.config.schema import Config
from rlfuse.errors import ConfigError
from rlfuse.run.job import open_job, run_with_restarts
from rlfuse.run.resume.acceptance import NothingToDo, RunRefused, accept
from rlfuse.run_folder import checkpoints, run_lock, status
from rlfuse.run_folder.run_lock import RunLock


@pytest.fixture
def config(tmp_path):
    config = Config()
    config.model.path, config.algorithm.adv_estimator = "somewhere", "grpo"
    config.trainer.default_local_dir, config.trainer.experiment_name = str(tmp_path), "mine"
    config.trainer.total_training_steps, config.trainer.logger = 4, []
    return config


def changed(config, **settings):
    """Return a copy of the configuration with other settings, such as `actor__optim__lr=1`."""
    config = dataclasses.replace(
        config, **{field.name: dataclasses.replace(getattr(config, field.name)) for field in dataclasses.fields(config)}
    )
    for name, value in settings.items():
        *groups, leaf = name.split("__")
        node = config
        for group in groups:
            setattr(node, group, dataclasses.replace(getattr(node, group)))
            node = getattr(node, group)
        setattr(node, leaf, value)
    return config


def leave(config, step, state="finished", rows=True):
    """Write the folder of a run that ended at this step in this state, and return it."""
    folder = config.run_folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(config)))
    if rows:
        (folder / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in range(1, step + 1)))
    if step:
        kept = folder / f"global_step_{step}"
        kept.mkdir()
        (kept / "run.json").write_text(json.dumps({"step": step}))
        (kept / checkpoints.MARKER).touch()
    status.begin(folder, "rlfuse/mine", time.time())
    if state == "finished":
        (folder / "summary.json").write_text("{}")
    if state != "running":
        status.end(folder, state)
    return folder


def begin_and_end(job, total_steps):
    """Begin a run and end it before its first step."""
    job.begin(total_steps).close()
    job.lock.release()


@pytest.fixture
def untouched(tmp_path):
    """Return a function after whose call the test may not write, rename or remove a file."""
    before = []

    def look():
        return sorted((str(path), path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))

    yield lambda: before.append(look())
    assert before in ([], [look()])


def test_a_finished_run_with_the_same_settings_has_nothing_to_do(config, untouched, capsys):
    folder = leave(config, 4)
    untouched()
    with pytest.raises(NothingToDo) as end:
        accept(changed(config, trainer__logger=["wandb"], alerts__kl=1.0))
    first, with_more_steps, as_new_run = str(end.value).splitlines()
    assert first == f"{folder} finished after 4 steps on {time.strftime('%Y-%m-%d %H:%M')}: nothing to do."
    assert with_more_steps.endswith("trainer.experiment_name=mine trainer.total_training_steps=8")
    assert as_new_run.endswith("trainer.experiment_name=mine-2")
    assert run_with_restarts(config, lambda job: pytest.fail("begun")) == folder and first in capsys.readouterr().out
    with pytest.raises(NothingToDo, match=r"mine trainer\.total_training_steps=8 trainer\.total_epochs=null\n"):
        accept(changed(config, trainer__total_epochs=1))


def test_a_finished_run_resumes_only_with_more_steps(config):
    folder = leave(config, 4)
    accepted = accept(changed(config, trainer__total_training_steps=6, actor__optim__lr=1e-3))
    assert accepted.checkpoint == folder / "global_step_4"
    assert [change.key for change in accepted.changes] == ["actor.optim.lr", "trainer.total_training_steps"]
    with pytest.raises(NothingToDo, match="nothing to do"):
        accept(changed(config, trainer__total_training_steps=3))
    with pytest.raises(RunRefused, match=r"finished after 4 steps, so these changes would have no effect") as error:
        accept(changed(config, actor__optim__lr=1e-3))
    assert "actor.optim.lr  1e-06 -> 0.001" in str(error.value)
    assert "train longer with them  rlfuse train ... trainer.experiment_name=mine trainer.total" in str(error.value)
    with pytest.raises(RunRefused, match=r"model.path  somewhere -> elsewhere"):
        accept(changed(config, trainer__total_training_steps=6, model__path="elsewhere"))


def test_epochs_are_compared_once_the_data_is_loaded(config):
    by_epochs = changed(config, trainer__total_training_steps=None)
    leave(by_epochs, 4)
    with pytest.raises(NothingToDo):
        accept(by_epochs)
    job = open_job(changed(by_epochs, trainer__total_epochs=2))
    before = (job.folder / "config.yaml").read_text()
    with pytest.raises(NothingToDo, match="has already completed 4 steps, and the job has 3"):
        job.begin(3)
    assert (job.folder / "config.yaml").read_text() == before
    begin_and_end(job, 8)
    assert yaml.safe_load((job.folder / "config.yaml").read_text())["trainer"]["total_epochs"] == 2


def test_a_run_that_failed_after_its_last_step_is_completed_by_the_same_command(config):
    leave(config, 4, state="failed")
    assert accept(config).checkpoint.name == "global_step_4"
    with pytest.raises(NothingToDo, match="has already completed 4 steps, and the job has 3"):
        accept(changed(config, trainer__total_training_steps=3))


def test_changes_of_fixed_settings_are_refused_with_both_commands(config, untouched, monkeypatch):
    folder = leave(config, 2, state="stopped")
    typed = "/venv/bin/python /venv/bin/rlfuse train my_job.yaml algorithm=ppo trainer.experiment_name=mine"
    monkeypatch.setattr(sys, "orig_argv", typed.split())
    untouched()
    with pytest.raises(RunRefused) as error:
        accept(changed(config, algorithm__adv_estimator="gae", data__seed=3, actor__optim__lr=1.0))
    lines = str(error.value).splitlines()
    assert (
        lines[0]
        == f"{folder} has a run whose fixed settings differ from this job, so it can't resume. Nothing was changed."
    )
    assert [" ".join(line.split()[:4]) for line in lines[1:7] if "->" in line] == [
        "algorithm.adv_estimator grpo -> gae",
        "data.seed 1 -> 3",
        "actor.optim.lr 1e-06 -> 1.0",
    ]
    name_setting = "trainer.experiment_name=mine"
    assert lines[-2].endswith(f"  rlfuse train my_job.yaml {name_setting} algorithm.adv_estimator=grpo"), (
        "no preset matches"
    )
    assert lines[-1].endswith(f"  rlfuse train my_job.yaml algorithm=ppo {name_setting}-2")


@pytest.mark.slow
@pytest.mark.parametrize("preset", sorted(path.stem for path in (conf_folder() / "algorithm").glob("*.yaml")))
def test_the_suggested_resume_command_has_only_the_preset_of_the_run(preset, tmp_path, monkeypatch):
    def job(*words):
        return OmegaConf.to_object(compose_job([*words]))

    rest = ["model.path=m", "data.train_files=[d]", f"trainer.default_local_dir={tmp_path}", "rollout.n=3"]
    rest.append("trainer.experiment_name=mine")
    leave(job(f"algorithm={preset}", *rest), 2, state="stopped")
    typed = ["algorithm=grpo" if preset == "ppo" else "algorithm=ppo", *rest]
    monkeypatch.setattr(sys, "orig_argv", ["/venv/bin/python", "/venv/bin/rlfuse", "train", *typed])
    with pytest.raises(RunRefused) as error:
        accept(job(*typed))
    words = shlex.split(str(error.value).splitlines()[-2].partition("rlfuse train ")[2])
    assert [word for word in words if word.startswith("algorithm")] == [f"algorithm={preset}"]
    assert accept(job(*words)).changes == ()


def test_accepted_changes_are_reported_applied_and_recorded(config, capsys):
    folder = leave(config, 2, state="stopped")
    job = open_job(changed(config, actor__optim__lr=1e-3, data__train_batch_size=32))
    output = capsys.readouterr().out
    assert f"resumes from {folder}/global_step_2 with changed settings" in output
    assert "  take effect, but results before and after are not comparable:\n    data.train_batch_size" in output
    assert "start a new run: rlfuse train ... trainer.experiment_name=mine-2" in output
    assert not (folder / "changes.jsonl").exists()
    begin_and_end(job, 4)
    rows = [json.loads(line) for line in (folder / "changes.jsonl").read_text().splitlines()]
    assert rows == [
        {"step": 2, "key": "data.train_batch_size", "was": 64, "is": 32},
        {"step": 2, "key": "actor.optim.lr", "was": 1e-6, "is": 1e-3},
    ]
    assert yaml.safe_load((folder / "config.yaml").read_text())["actor"]["optim"]["lr"] == 1e-3
    assert accept(changed(config, actor__optim__lr=1e-3, data__train_batch_size=32)).message == ""


@pytest.mark.slow
def test_resuming_an_older_checkpoint_compares_its_settings_and_drops_later_changes(config):
    folder, faster = leave(config, 2, state="stopped"), changed(config, actor__optim__lr=1e-3)
    begin_and_end(open_job(faster), 8)
    leave(faster, 4, state="stopped")
    slow = changed(faster, actor__optim__lr=1e-9)
    begin_and_end(open_job(slow), 8)

    def recorded_changes():
        rows = [json.loads(line) for line in (folder / "changes.jsonl").read_text().splitlines()]
        return [(row["step"], row["was"], row["is"]) for row in rows]

    assert recorded_changes() == [(2, 1e-6, 1e-3), (4, 1e-3, 1e-9)]
    back = {"trainer__resume_mode": str(folder / "global_step_2")}
    assert accept(changed(faster, **back)).changes == ()
    [change] = accept(changed(slow, **back)).changes
    assert (change.was, change.now) == (1e-3, 1e-9), "although config.yaml already has the value"
    open_job(changed(faster, **back)).begin(8).close()
    assert recorded_changes() == [(2, 1e-6, 1e-3)]


def test_a_missing_config_is_reported_once(config, capsys):
    folder = leave(config, 2, state="stopped")
    (folder / "config.yaml").unlink()
    job = open_job(config)
    message = f"{folder} has no readable config.yaml"
    assert capsys.readouterr().out.count(message) == 1
    begin_and_end(job, 4)
    assert message not in accept(config).message


def test_the_settings_of_a_named_checkpoint_are_compared(config):
    folder = leave(config, 2, state="stopped")
    resumed = changed(config, trainer__resume_mode=str(folder / "global_step_2"), trainer__experiment_name="other")
    accepted = accept(resumed)
    assert accepted.changes == () and accepted.config.run_folder.name == "other"
    with pytest.raises(RunRefused, match=r"resume it .*model.dtype=bfloat16") as error:
        accept(changed(resumed, model__dtype="float32"))
    assert error.match("trainer.experiment_name=other-?2? trainer.resume_mode=auto")


def test_resuming_a_checkpoint_of_another_run_does_not_overwrite_an_existing_run(config, untouched):
    source, other = leave(config, 2, state="stopped"), changed(config, trainer__experiment_name="other")
    folder = leave(changed(other, actor__optim__lr=1e-2), 4)
    untouched()
    path = source / "global_step_2"
    with pytest.raises(RunRefused, match="global_step_2 names a checkpoint of another run") as error:
        accept(changed(other, trainer__resume_mode=str(path)))
    assert error.match(f"{folder} already has a run(.|\n)*=other trainer.resume_mode=auto(.|\n)*=other-2")
    assert accept(changed(config, trainer__resume_mode=f"{source}/../mine/global_step_2")).checkpoint, "the same run"


@pytest.mark.slow
def test_suggested_commands_work_for_sweeps_and_names_of_verl(config, monkeypatch):
    leave(changed(config, trainer__experiment_name="s-actor.lr=1e-6"), 4)
    python, swept = (
        "/venv/bin/python /venv/bin/rlfuse train",
        changed(config, trainer__experiment_name="s-actor.lr=1e-6"),
    )

    def suggested(words, accepted):
        monkeypatch.setattr(sys, "orig_argv", f"{python} {words}".split())
        with pytest.raises((NothingToDo, RunRefused)) as end:
            accept(accepted)
        lines = [line for line in str(end.value).splitlines() if "rlfuse train" in line]
        return [shlex.split(line[line.index("rlfuse train") :])[2:] for line in lines]

    with_more_steps, as_new_run = suggested("experiment=quickstart", swept)
    assert compose_job(with_more_steps).trainer.experiment_name == "s-actor.lr=1e-6"
    assert compose_job(as_new_run).trainer.experiment_name == "s-actor.lr=1e-6-2"
    sweep = "-m experiment=quickstart actor.optim.lr=1e-6,1e-5"
    assert suggested(sweep, swept)[0] == [*sweep.split(), "trainer.total_training_steps=8"], "the sweep names its runs"
    resumed, _ = suggested(
        "experiment=quickstart actor_rollout_ref.model.path=b",
        changed(swept, model__path="b", trainer__total_training_steps=8),
    )
    assert compose_job(resumed).model.path == "somewhere"


def test_a_used_folder_without_a_checkpoint_is_refused(config, untouched):
    leave(config, 2, state="stopped")
    untouched()
    with pytest.raises(RunRefused, match=r"resume_mode=disable does not resume it(.|\n)*resume_mode=auto(.|\n)*mine-2"):
        accept(changed(config, trainer__resume_mode="disable"))


def test_a_run_in_use_by_another_process_is_refused(config, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT_S", 60.0)
    folder, lock = leave(config, 2, state="running"), RunLock()
    assert lock.acquire(folder)
    job = open_job(changed(config, trainer__experiment_name="free"))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(RunRefused, match=f"in use by a running job: process {os.getpid()} on .*rlfuse watch .*mine"):
        accept(config)
    with pytest.raises(RunRefused):
        dataclasses.replace(job, folder=folder).begin(4)  # accepted before the other run began
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}, "a file was changed"
    lock.release()
    assert accept(config).checkpoint.name == "global_step_2", "without the lock it counts as crashed"


def test_of_two_jobs_that_begin_simultaneously_one_is_refused(config):
    jobs, barrier, results = [open_job(config) for _ in range(2)], multiprocessing.Barrier(2), multiprocessing.Queue()

    def begin(job):
        barrier.wait()
        try:
            job.begin(4)
            results.put("begun")
        except RunRefused as error:
            results.put("in use" if "a running job" in str(error) else str(error))
        barrier.wait()  # so that both runs exist at the same time

    processes = [multiprocessing.get_context("fork").Process(target=begin, args=(job,)) for job in jobs]
    for process in processes:
        process.start()
    assert sorted(results.get(timeout=30) for _ in processes) == ["begun", "in use"]
    for process in processes:
        process.join()


def test_checkpoints_written_by_another_job_since_acceptance_are_kept(config):
    job, other = open_job(config), open_job(config)
    begin_and_end(other, 4)
    leave(config, 4)
    before = status.read(job.folder)
    with pytest.raises(RunRefused, match="has written checkpoints since"):
        job.begin(8)
    assert status.read(job.folder) == before and not job.lock.is_held


def test_runs_without_a_name_get_unique_names_within_a_second(config):
    unnamed = changed(config, trainer__experiment_name=None, trainer__job_name="my job")
    first, second = accept(unnamed).config, accept(unnamed).config
    assert first.run_folder != second.run_folder
    for each in (first, second):
        assert re.fullmatch(r"my_job-grpo-\d{8}-\d{6}(-2)?", each.trainer.experiment_name)
    assert unnamed.trainer.experiment_name is None


@pytest.mark.slow
def test_a_job_without_a_name_resumes_the_last_run_of_its_configuration(config, capsys):
    unnamed = changed(config, trainer__experiment_name=None)
    folder = leave(config, 2, state="stopped")
    other = leave(changed(config, trainer__experiment_name="later", actor__optim__lr=1e-3), 2, state="stopped")
    accepted = accept(changed(unnamed, trainer__save_freq=7))
    assert accepted.config.run_folder == folder and accepted.checkpoint == folder / "global_step_2"
    assert f"{folder}, the last run of this configuration" in capsys.readouterr().out
    assert accept(changed(unnamed, actor__optim__lr=1e-3)).config.run_folder == other
    another_job = accept(changed(unnamed, trainer__job_name="another")).config
    assert another_job.trainer.experiment_name.startswith("another-grpo-")
    assert accept(changed(unnamed, actor__optim__lr=1e-4)).config.run_folder not in (folder, other)
    assert accept(changed(unnamed, trainer__resume_mode="disable")).checkpoint is None
    status.end(folder, "finished")
    with pytest.raises(NothingToDo) as end:
        rename_checkpoint(folder, 4)
        accept(unnamed)
    assert str(end.value).splitlines()[-1].endswith("trainer.resume_mode=disable")


def rename_checkpoint(folder, step):
    (folder / "global_step_2").rename(folder / f"global_step_{step}")
    (folder / f"global_step_{step}" / "run.json").write_text(json.dumps({"step": step}))


def test_a_job_without_a_name_skips_a_run_that_cannot_be_resumed(config):
    unnamed = changed(config, trainer__experiment_name=None)
    folder = leave(config, 0, state="failed", rows=False)
    assert accept(unnamed).config.run_folder == folder, "it completed no step"
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    assert accept(unnamed).config.run_folder != folder


@pytest.mark.slow
def test_a_generated_name_is_released_if_the_run_never_starts(tmp_path):
    program = f"""
from rlfuse.run.resume.acceptance import accept
from rlfuse.config.schema import Config
config = Config()
config.model.path, config.trainer.default_local_dir = "somewhere", {str(tmp_path)!r}
print(accept(config).config.run_folder.exists())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n" and list((tmp_path / "rlfuse").iterdir()) == []


def test_a_folder_that_cannot_be_created_is_reported_with_its_key(config, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"trainer.default_local_dir: .*/file/.* can't be created"):
        accept(changed(config, trainer__experiment_name=None, trainer__default_local_dir=str(tmp_path / "file")))
