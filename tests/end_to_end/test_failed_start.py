"""Engines and ranks start at the same time: a side that fails ends the job, and the other side, with its cause."""

import shutil
import sys
import time
from contextlib import suppress

import psutil
from driven_job import settings_of
from job_processes import all_gone, finish, start

LIMIT_S = 300


def is_agent(process):
    """Whether it is one of Ray's that stay for a minute; test_job.py waits for those."""
    with suppress(psutil.NoSuchProcess):
        return "Agent" in process.name()
    return False


def test_ranks_that_fail_end_the_job_and_its_engines_with_their_cause(ending_model, tmp_path):
    critic = shutil.copytree(ending_model, tmp_path / "critic")
    (critic / "model.safetensors").write_bytes((critic / "model.safetensors").read_bytes()[:-1000])
    settings = settings_of(tmp_path, ending_model) | {
        "algorithm": "ppo", "critic.path": critic, "trainer.n_gpus_per_node": 1, "trainer.logger": "[console]",
    }  # fmt: skip
    job = start([sys.executable, "-m", "rlfuse.train", *(f"{key}={value}" for key, value in settings.items())], "fails")
    seen, until = {}, time.monotonic() + LIMIT_S
    while job.poll() is None and time.monotonic() < until:
        with suppress(psutil.NoSuchProcess):
            seen |= {each.pid: each for each in psutil.Process(job.pid).children(recursive=True)}
        time.sleep(0.5)  # a look at all processes of the machine takes 50 ms
    text = finish(job, 1, timeout=60)
    assert "trainer/0 failed" in text, text
    workers = [each for each in seen.values() if not is_agent(each)]
    assert len(workers) > 4 and not all_gone(workers)
