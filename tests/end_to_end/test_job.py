"""Whole jobs as a user runs them: `python -m rlfuse.train` in separate processes with real Ray, vLLM and DeepSpeed."""

import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from curves import assert_same_curves
from driven_job import settings_of
from import_graph import TRAIN, reach, record_imports, recorded_imports
from intruder import reached
from job_processes import (
    SECRETS,
    all_gone,
    descendants,
    finish,
    hang_up,
    listening_on_the_network,
    start,
    wait_for,
    wait_for_step,
)

from rlfuse.application import main as train_command
from rlfuse.cli import main as rlfuse
from rlfuse.cluster import scratch
from rlfuse.errors import USER_ERROR
from rlfuse.events import read_events
from rlfuse.observe.tracking import read_metrics
from rlfuse.run_folder.response_store import FILE as DRAFTS
from rlfuse.run_folder.response_store import StoredResponses

STEPS, LATEST = 4, "latest_checkpointed_iteration.txt"


@pytest.fixture(scope="module")
def job(ending_model, tmp_path_factory):
    """Return (folder, settings) of a small PPO job with critic, reference, KL reward, two slots and checkpoints."""
    folder = tmp_path_factory.mktemp("job")
    settings = settings_of(folder, ending_model)
    return folder, settings | {
        "algorithm": "ppo",
        "data.val_files": f"[{folder}/val.jsonl]",
        "data.max_response_length": 48,
        "data.train_batch_size": 8,
        "actor.ppo_mini_batch_size": 4,
        "actor.ppo_max_token_len_per_gpu": 128,
        "critic.optim.lr": 1e-3,
        "rollout.n": 2,
        "algorithm.use_kl_in_reward": "true",
        "reward.functions": f"[{{path: {folder}/reward.py:even, normalise: true, clip: [0, 0.9], {SECRETS}}}]",
        "trainer.total_training_steps": STEPS,
        "trainer.save_freq": 2,
        "trainer.test_freq": STEPS,
        "trainer.logger": "[console,wandb]",
        "trainer.timeline_freq": STEPS,
    }


@pytest.fixture(scope="module")
def words(job):
    """Return the settings as command-line overrides."""
    return [f"{key}={value}" for key, value in job[1].items()]


@pytest.fixture(scope="module")
def command(words):
    return [sys.executable, "-m", "rlfuse.train", *words]


@pytest.fixture(scope="module")
def temporary():
    """Yield a folder for temporary files of some of the jobs; its path is short because it holds sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def train(driven, job):
    """Return a function that runs the job on live engines and returns (folder, exit status, output)."""
    folder, settings = job

    def train(name, script="rlfuse_command", **changed):
        settings_too = settings | {"trainer.experiment_name": name} | changed
        return folder / "runs" / "rlfuse" / name, *driven(script, folder, "train", **settings_too)

    return train


@pytest.fixture(scope="module")
def serial(train):
    """Run the job serially without interruption; return (folder, output)."""
    run, status, text = train("serial", fusion="serial")
    assert status == 0, text
    return run, text


def test_run_folder_holds_the_files_that_the_readme_lists(serial):
    run, text = serial
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == STEPS and summary["fusion"] == "serial" and summary["label"] == "exact"
    assert summary["val_before"] is not None and summary["val_after"] is not None
    assert {"torch", "ray", "deepspeed", "rlfuse"} <= summary["versions"].keys()
    assert str(run) in text and "mean reward" in text and f"wandb sync {run}/wandb/offline-run-*" in text
    assert (run / "reward_curve.png").stat().st_size > 1000
    assert [path.name for path in run.glob("timelines/*")] == [f"step_{STEPS}.png"]
    assert list((run / "wandb").glob("offline-run-*/files/media/images/timeline*"))
    assert list((run / "wandb").glob("offline-run-*/*.wandb"))
    assert list((run / "wandb").glob("offline-run-*/files/media/table/samples*"))
    for name in ("actor/pg_loss", "critic/vf_loss", "actor/reward_kl_penalty", "response_length/mean", "timing_s/gen",
                 "timing_s/ref", "perf/throughput", "rewards/even/words/mean", "reward/running_std/even",
                 "reward/latency_s/even/mean", "training/rollout_probs_diff_max"):  # fmt: skip
        assert name in summary["metrics"], name


def test_engine_and_trainer_agree_after_every_sync(serial):
    run, _ = serial
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["step"] > 0]
    assert len(rows) == STEPS
    assert all(row["fusion/staleness"] == 0 for row in rows)
    assert max(row["training/rollout_log_probs_diff_max"] for row in rows) < 1e-4
    # The policy changes in every step, so agreement means that the new weights have arrived.
    assert min(row["actor/grad_norm"] for row in rows) > 1e-3


def test_all_processes_collect_garbage_only_at_the_end_of_a_step(serial):
    run, _ = serial
    spans = read_events(run / "events.jsonl")
    ends, found = [s.end for s in spans if s.kind == "step"], [s for s in spans if s.kind == "gc"]
    assert len(ends) == STEPS
    for step, (end, following) in enumerate(pairwise([*ends, math.inf]), 1):
        planned = [span for span in found if span.step == step and span.cause == "step"]
        everywhere = ["driver", "reward/0", "rollout/0", "rollout/1", "trainer/0", "trainer/1"]
        assert sorted(span.where for span in planned) == everywhere
        assert all(end <= span.start and span.end <= following for span in planned)
        assert max(span.start for span in planned) - min(span.start for span in planned) < 1.0
        if step > 1:
            assert not any(span.attributes["automatic"] for span in planned if span.where != "reward/0")
            assert [span for span in found if span.step == step and span.cause == "python"] == []
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["step"] > 0]
    assert all(row["timing_s/gc"] > 0 for row in rows) and rows[-1]["perf/gc_unplanned"] == 0


def test_events_cover_every_sample_and_stage(serial):
    run, _ = serial
    spans = read_events(run / "events.jsonl")
    kinds = {span.kind for span in spans}
    assert {"generate", "reward", "old_log_prob", "ref", "values", "forward", "backward", "optimizer", "update_weights",
            "save_checkpoint", "testing", "step", "gen", "start"} <= kinds  # fmt: skip
    assert all(span.end >= span.start for span in spans)
    generated = [span.samples[0] for span in spans if span.kind == "generate" and span.step == 1]
    assert len(set(generated)) == 8 * 2
    assert {span.where for span in spans if span.kind == "generate"} == {"rollout/0", "rollout/1"}
    for kind in ("forward", "backward"):
        seen = [s for span in spans if span.kind == kind and span.step == 1 and
                span.attributes["model"] == "actor" for s in span.samples]  # fmt: skip
        assert sorted(seen) == sorted(generated)


def test_every_second_of_every_slot_is_accounted_for(serial):
    run, _ = serial
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["step"] > 0]
    seconds = {
        side: [sum(value for name, value in row.items() if name.startswith(side)) for row in rows]
        for side in ("busy/", "idle/")
    }
    # Bounds from events and from file times: on a loaded machine, files are written late.
    spans = read_events(run / "events.jsonl")
    began = min(span.start for span in spans if span.where == "driver" and span.kind == "start")
    last = max(span.end for span in spans if span.kind == "step")
    written = (run / "metrics.jsonl").stat().st_mtime - (
        run / "config.yaml"
    ).stat().st_mtime  # written before Ray starts
    assert last - began <= sum(seconds["busy/"]) + sum(seconds["idle/"]) <= written + 0.1
    for row, *parts in zip(rows[1:], seconds["busy/"][1:], seconds["idle/"][1:], strict=True):
        assert sum(parts) >= row["timing_s/step"] and min(parts) > 0
        assert "idle/start_up" not in row
    assert rows[0]["idle/start_up"] > rows[0]["timing_s/step"] and rows[0]["busy/testing"] > 0
    assert all(row[name] > 0 for row in rows for name in ("busy/generate", "busy/train", "idle/calls"))
    assert any(row.get("idle/tail", 0) > 0 for row in rows)


def test_no_secret_is_written_to_the_run_folder_or_printed(serial):
    run, text = serial
    files = [path for path in run.rglob("*") if path.is_file()]
    assert [path for path in files if b"marked-secret" in path.read_bytes()] == [] and "marked-secret" not in text
    config = (run / "config.yaml").read_text()
    assert "api_key: '***'" in config and "judge: ${oc.env:JUDGE_TOKEN}" in config
    assert any(path.suffix == ".wandb" for path in files)


def test_a_trace_follows_every_sample_to_its_optimizer_steps(serial):
    run, _ = serial
    assert rlfuse(["trace", str(run), "--steps", "2", "--out", str(run.parent / "trace.json")]) == 0
    events = json.loads((run.parent / "trace.json").read_text())["traceEvents"]
    arrows = {event["args"]["sample"] for event in events if event["ph"] == "f"}
    assert len(arrows) == 8 * 2 * 2 and {name.split()[-1] for name in arrows} == {"actor", "critic"}
    for phase, count in (("s", 1), ("t", 2), ("f", 1)):  # steps in between: reward and micro-batch
        assert sum(event["ph"] == phase for event in events) == count * len(arrows)


def test_a_report_of_two_runs_has_charts_of_both(serial, tmp_path):
    run, out, other = serial[0], tmp_path / "report.html", tmp_path / "other"
    shutil.copytree(run, other, ignore=shutil.ignore_patterns("global_step_*", "wandb"))
    assert rlfuse(["report", str(run), str(other), "--out", str(out)]) == 0
    page = out.read_text()
    assert all(f'id="chart-{name}"' in page for name in ("lengths-0", "lengths-1", "time-0", "time-1"))
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == STEPS * 8 * 2 and samples[0]["response"] in page


def test_checkpoints_are_pruned_and_load_with_from_pretrained(serial, ending_model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, _ = serial
    assert (run / LATEST).read_text() == str(STEPS)
    assert sorted(path.name for path in run.glob("global_step_*")) == ["global_step_2", f"global_step_{STEPS}"]
    folder = run / f"global_step_{STEPS}" / "actor" / "huggingface"
    assert (folder / "generation_config.json").read_text() == (ending_model / "generation_config.json").read_text()
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.dtype.is_floating_point and len(AutoTokenizer.from_pretrained(folder)) == 200


def test_an_evaluation_of_the_last_checkpoint_repeats_the_last_validation(driven, job, serial):
    """Results are bitwise equal, although the evaluation has one slot and the run had two."""
    (run, _), (folder, settings) = serial, job
    settings = settings | {"trainer.experiment_name": run.name, "trainer.n_gpus_per_node": 1}
    status, text = driven("rlfuse_command", folder, "eval", str(run), **settings)
    assert status == 0, text
    found = json.loads((run / "eval" / f"global_step_{STEPS}" / "eval.json").read_text())
    last = read_metrics(run / "metrics.jsonl")[-1]
    assert found["metrics"] == {name: value for name, value in last.items() if name.startswith("val-")}
    kept = [row["response"] for row in read_metrics(run / "validation.jsonl") if row["step"] == STEPS]
    assert [row["response"] for row in found_rows(run)] == kept and len(kept) == 6
    assert f"step {STEPS} of {run}" in text and "pass@1" in text and "✓ engine 1 of 1" in text
    assert f"drafts  responses in {run / DRAFTS}; they do not change the results" in text
    stored = StoredResponses(run / "eval" / f"global_step_{STEPS}" / DRAFTS)
    assert stored.count == len(kept) and stored.last_step == STEPS


def found_rows(run):
    """Return the responses of the evaluation, in the order of prompts."""
    rows = read_metrics(run / "eval" / f"global_step_{STEPS}" / "responses.jsonl")
    return sorted(rows, key=lambda row: row["id"])


def has_responses_after_checkpoint(run):
    latest = (run / LATEST).read_text() if (run / LATEST).exists() else ""
    return latest and StoredResponses(run / DRAFTS).last_step > int(re.search(r"\d+", latest)[0])


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Return the folder where each process of `resumed` records its imports."""
    return tmp_path_factory.mktemp("imports")


@pytest.fixture(scope="module")
def resumed(job, command, temporary, records, write_shadows):
    """Kill a longer adaptive job on one slot after its checkpoint, resume it, and end it with Ctrl-C and SIGTERM.

    Return (folder, output). Assertions on its live processes are made here.
    """
    folder, _ = job
    shadows = write_shadows(folder)
    temporary.chmod(0o1777)  # mode of /tmp
    more = ("fusion=adaptive", "trainer.total_training_steps=500", "trainer.n_gpus_per_node=1")
    run = folder / "runs" / "rlfuse" / "adaptive"
    recorded = record_imports(records)
    process = start(command, "adaptive", *more, TMPDIR=str(temporary), **recorded, cwd=folder)
    wait_for_step(run, 1, process)
    processes = descendants(process)
    semaphores = scratch.held_by(processes)
    workers = [each for each in processes if "Agent" not in each.name()]  # Ray's agents stay for a minute
    assert listening_on_the_network([process, *workers]) == []
    assert next(each for each in workers if each.name() == "raylet").environ()["RAY_AUTH_MODE"] == "token"
    [server] = [each for each in workers if "rlfuse.cluster.fork_server" in each.cmdline()]
    forks = [each.name() for each in server.children()]
    assert [name for name in forks if "TrainerRank" in name] and [name for name in forks if "RolloutWorker" in name]
    wait_for(lambda: has_responses_after_checkpoint(run), "a response of the step after its checkpoint", process)
    process.kill()
    assert len(workers) > 6 and not all_gone(workers), "workers outlive the killed driver"
    for name in ("metrics", "samples", "events"):  # a row cut off by the kill
        with (run / f"{name}.jsonl").open("a") as file:
            file.write('{"step": 9, "x')
    assert [*temporary.glob("rlfuse-run-*/ray/session_*_*")], "no session folder of Ray, of which each start makes one"
    extensions = shutil.copytree(os.environ["TORCH_EXTENSIONS_DIR"], folder / "extensions")
    (extensions / "deepspeed_shm_comm" / "lock").touch()  # as left by a process killed during compilation
    (extensions / "rlfuse.lock").write_text("process 1 of nowhere")
    places = {"TORCH_EXTENSIONS_DIR": str(extensions), "TMPDIR": str(temporary)}
    launcher = {"OMPI_COMM_WORLD_LOCAL_RANK": "3", "RANK": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    process = start(command, "adaptive", *more, **places, **launcher, **recorded, cwd=folder)
    wait_for_step(run, STEPS, process)
    workers = descendants(process)
    assert reached([psutil.Process(process.pid), *workers], folder) == []
    assert hang_up(process, workers) > 1, "Ray's processes are not in the process group"
    os.killpg(process.pid, signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    text = finish(process, expected=130, timeout=240)  # takes a minute on a loaded machine
    assert not all_gone(workers)
    assert not all_gone(processes), "Ray's agents did not end within a minute"
    assert not shadows.exists(), shadows.read_text()
    assert not any(path.exists() for path in semaphores)  # forked engines have no named semaphores
    return run, text


def test_killed_and_resumed_adaptive_run_equals_the_uninterrupted_serial_one(resumed, serial):
    """Neither fusion nor the interruption changes results."""
    run, text = resumed
    assert "resumed from" in text and f"{run}/events.jsonl: skipping the last row (from byte" in text
    assert_same_curves(serial[0], run, range(STEPS + 1))


def test_an_interrupted_step_is_repeated_with_its_stored_responses_as_drafts(resumed):
    run, text = resumed
    step, count = re.search(r"step (\d+) was repeated: all (\d+) stored responses are identical", text).groups()
    [acceptance] = [
        row["fusion/draft_acceptance"] for row in read_metrics(run / "metrics.jsonl") if row["step"] == int(step)
    ]
    assert int(count) > 0 and acceptance > 0.9


def test_a_run_leaves_nothing_outside_its_folder(resumed, temporary):
    assert not [*temporary.iterdir()]


def test_a_stale_lock_of_a_killed_job_is_removed_and_reported(resumed):
    run, text = resumed
    lock = run.parents[2] / "extensions" / "deepspeed_shm_comm" / "lock"
    assert f": {lock} was left behind by process 1 of nowhere that has ended: removed" in text
    assert not lock.exists()


def test_a_job_saves_a_checkpoint_on_ctrl_c_and_sigterm(resumed):
    run, text = resumed
    left = read_metrics(run / "metrics.jsonl")[-1]["step"]
    assert f"Ctrl-C: stopping with a checkpoint after step {left}; press Ctrl-C again to stop immediately" in text
    assert f"SIGTERM: stopping with a checkpoint after step {left}, if it ends within" in text
    assert f"Ctrl-C: stopped after step {left}, which is saved" in text and "Traceback" not in text
    assert (run / LATEST).read_text() == str(left) and f"global_step_{left}; rerun the same command" in text
    assert json.loads((run / "status.json").read_text())["state"] == "stopped"
    assert " died" not in text, "SIGHUP ended a process before the checkpoint"


def test_modules_imported_at_run_time_are_reachable_from_train(resumed, records):
    processes = recorded_imports(records)
    imported = set().union(*processes.values())
    parts = ("step.controller", "engines.vllm.rollout_worker", "engines.trainer.trainer_rank",
             "rewards.workers.reward_worker", "run.worker_imports")  # fmt: skip
    assert imported >= {f"rlfuse.{name}" for name in parts} and len(processes) > 3
    assert imported <= {"rlfuse.train", *reach(TRAIN)}  # rlfuse.train is the command itself


def test_a_job_in_fused_pipelines_has_the_curves_of_the_serial_job(train, serial):
    """Stages share the actor's head (vocabulary parallel); engines receive the whole head."""
    pipelines = {"training.pipeline_parallel_size": 2, "training.split_backward": "true"}
    shared = {"training.vocabulary_parallel": "true", "trainer.logger": "[console]", "trainer.timeline_freq": 0}
    run, status, text = train("pipelines", **pipelines, **shared)
    assert status == 0 and "training wait for all responses: training.pipeline_parallel_size=2" in text, text
    assert_same_curves(serial[0], run, range(STEPS + 1))
    spans = read_events(run / "events.jsonl")
    last = [span for span in spans if span.step == STEPS]
    assert {(s.where, s.attributes["model"], s.attributes["stage"]) for s in last if s.kind == "weight_gradients"} == {
        ("trainer/0", "actor", 0),
        ("trainer/1", "actor", 1),
        ("trainer/1", "critic", 0),
        ("trainer/0", "critic", 1),
    }
    heads = {(s.where, s.attributes["model"], s.attributes["stage"]) for s in last if s.kind == "head"}
    assert heads == {(f"trainer/{rank}", *one) for rank in (0, 1) for one in (("actor", rank), ("ref", 1 - rank))}
    # No bubbles are filled until operations are measured, at first and after a slot's speed has changed.
    planned = [s.attributes["planned"] for s in spans if s.kind == "weight_gradients" and "planned" in s.attributes]
    assert planned and all(begin < end for begin, end in planned)
    made = [row for row in read_metrics(run / "metrics.jsonl") if "fusion/train_makespan_planned" in row]
    assert all(0 < row["fusion/train_makespan_planned"] <= row["fusion/train_makespan_serial"] for row in made) and made
    assert (run / f"global_step_{STEPS}" / "actor" / "huggingface" / "model.safetensors.index.json").exists()


def test_a_log_prob_mismatch_ends_the_run_before_the_first_update(train):
    run, status, text = train("other", "other_model", **{"trainer.n_gpus_per_node": 1, "trainer.logger": "[]"})
    (message,) = (line for line in text.splitlines() if "log-probs of" in line)
    assert status == 1 and "With model.dtype=float32, rounding explains at most 0.001" in message, text
    assert "set rollout.on_mismatch=alert" in message and "Traceback" not in text
    assert not read_metrics(run / "metrics.jsonl")


def test_bad_input_is_one_error_message_at_startup(job, words, tmp_path, capsys, monkeypatch):
    folder, _ = job
    monkeypatch.setenv("JUDGE_TOKEN", "marked-secret-2")
    (tmp_path / "broken.py").write_text("def even(solution_str:\n    return 1\n")
    (tmp_path / "columns.jsonl").write_text('{"question": "w5"}\n')
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "w5 " * 40}) + "\n")
    cases = {
        f"model.path={tmp_path}/nothing": ["model.path", "nothing"],
        f"reward.functions=[{tmp_path}/broken.py:even]": ["broken.py", "line 1", "syntax error"],
        f"data.train_files=[{tmp_path}/columns.jsonl]": ["columns.jsonl", "question", "data.prompt_key"],
        f"data.train_files=[{tmp_path}/long.jsonl]": ["long.jsonl", "row 0", "40 tokens", "truncation"],
        "actor.ppo_mini_batch_sise=4": ["actor.ppo_mini_batch_sise", "actor.ppo_mini_batch_size"],
        "actor_rollout_ref.actor.ppo_mini_batch_size=3": ["actor.ppo_mini_batch_size"],
    }
    for override, named in cases.items():
        assert train_command([*words, "trainer.experiment_name=bad", override]) == USER_ERROR, override
        text = capsys.readouterr().err
        assert "Traceback" not in text, text
        assert all(word in text for word in named), (override, text)
    assert not (folder / "runs" / "rlfuse" / "bad").exists()


def test_commands_for_a_finished_run_change_none_of_its_files(command, serial):
    """The same job has nothing to do; for other settings the message names the commands to extend or to rename."""
    run, _ = serial
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    cases = {
        ("fusion=serial",): (0, f"{run} finished after {STEPS} steps", "trainer.experiment_name=serial-2"),
        ("fusion=serial", "trainer.resume_mode=disable"): (2, "already has a run", "trainer.resume_mode=auto"),
        ("fusion=serial", "actor.optim.lr=1"): (2, "actor.optim.lr", f"trainer.total_training_steps={2 * STEPS}"),
        ("fusion=serial", "algorithm=grpo"): (2, "algorithm.adv_estimator  gae -> grpo", "serial-2"),
    }
    for more, (status, *expected) in cases.items():
        text = finish(start(command, "serial", *more), expected=status)
        assert all(words in text for words in expected), text
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
