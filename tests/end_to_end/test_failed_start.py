"""Engines and ranks start concurrently; if either fails, the job ends with its cause and stops the other."""

import shutil
import sys
import time
from contextlib import suppress

import psutil
from driven_job import settings_of
from job_processes import all_gone, finish, start

LIMIT_S = 300


def is_agent(process):
    """Return whether this is a Ray agent, which outlives the job by a minute; test_job.py covers those."""
    with suppress(psutil.NoSuchProcess):
        return "Agent" in process.name()
    return False


def test_failed_ranks_end_the_job_and_its_engines_with_the_cause(ending_model, tmp_path):
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
        time.sleep(0.5)  # listing all processes takes 50 ms
    text = finish(job, 1, timeout=60)
    assert "trainer/0 failed" in text, text
    workers = [each for each in seen.values() if not is_agent(each)]
    assert len(workers) > 4 and not all_gone(workers)
