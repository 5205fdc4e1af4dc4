"""A job whose terminal is closed ends as by SIGTERM, and none of its processes is killed before its checkpoint."""

import json
import os
import pty
import signal
import sys
import time

import psutil
import pytest
from driven_job import settings_of
from import_graph import TRAIN, reach, record_imports, recorded_imports
from job_processes import ENVIRONMENT, all_gone

from rlfuse.observe.tracking import read_metrics

LIMIT_S = 300


def in_a_terminal(*words, **variables):
    """(process, terminal): the command as the leader of a session that has a terminal of its own."""
    pid, terminal = pty.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # a job that ran in this process has blocked it
        os.execve(sys.executable, [sys.executable, "-m", "rlfuse.cli", *words], os.environ | ENVIRONMENT | variables)
    os.set_blocking(terminal, False)
    return psutil.Process(pid), terminal


def shown(terminal):
    try:
        return os.read(terminal, 1 << 20).decode(errors="replace")
    except (BlockingIOError, OSError):
        return ""


def hang_up(process, terminal, condition):
    """Close the terminal once the condition holds; returns the exit status."""
    text, until = "", time.monotonic() + LIMIT_S
    while not condition():
        text += shown(terminal)
        assert process.is_running() and process.status() != psutil.STATUS_ZOMBIE, text
        assert time.monotonic() < until, text
        time.sleep(0.1)
    everybody = process.children(recursive=True)
    os.close(terminal)
    status = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
    assert len(everybody) > 4 and not all_gone(everybody, timeout=120)
    return status


@pytest.fixture(scope="module")
def hung_up(ending_model, tmp_path_factory):
    """(run folder, exit status, modules that each process imported)."""
    folder, records = tmp_path_factory.mktemp("job"), tmp_path_factory.mktemp("imports")
    settings = settings_of(folder, ending_model) | {
        "data.max_response_length": 48, "data.train_batch_size": 8, "actor.ppo_mini_batch_size": 4,
        "actor.ppo_max_token_len_per_gpu": 128, "rollout.n": 2, "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": 500, "trainer.save_freq": 0, "trainer.logger": "[console]",
        "trainer.experiment_name": "hung_up",
    }  # fmt: skip
    words = [f"{key}={value}" for key, value in settings.items()]
    run = folder / "runs" / "rlfuse" / "hung_up"
    command = in_a_terminal("train", *words, **record_imports(records))
    status = hang_up(*command, lambda: len(read_metrics(run / "metrics.jsonl")) > 0)
    return run, status, recorded_imports(records)


def test_a_closed_terminal_ends_the_run_with_a_checkpoint(hung_up):
    run, status, _ = hung_up
    found = json.loads((run / "status.json").read_text())
    left = read_metrics(run / "metrics.jsonl")[-1]["step"]
    assert (status, found["state"]) == (75, "stopped"), found
    assert found["error"] == f"SIGHUP (the terminal was closed): the run left after step {left}, which is saved."
    assert (run / "latest_checkpointed_iteration.txt").read_text() == str(left)


def test_all_that_the_processes_of_a_run_import_counts_as_reached_by_train(hung_up):
    *_, processes = hung_up
    imported = set().union(*processes.values())
    parts = ("step.controller", "engines.vllm.rollout_worker", "engines.trainer.trainer_rank",
             "rewards.workers.reward_worker", "run.worker_imports")  # fmt: skip
    assert imported >= {f"rlfuse.{name}" for name in parts} and len(processes) > 3
    assert imported - reach(TRAIN) == {"rlfuse.cli"}, "which has found the command"
