"""Engines and ranks start at the same time: a side that fails ends the job with its own cause, and the other side."""

import shutil
import sys
import time
from contextlib import suppress

import psutil
import pytest
from driven_job import settings_of
from job_processes import all_gone, finish, start

LIMIT_S = 120


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"rollout.engine_kwargs": "{{max_num_batched_tokens: 8}}"}, "rollout/0 could not start"),
        ({"algorithm": "ppo", "critic.path": "{critic}"}, "trainer/0 failed"),
    ],
    ids=["engine", "ranks"],
)
def test_a_side_that_fails_ends_the_job_with_its_cause(changed, cause, ending_model, tmp_path):
    critic = shutil.copytree(ending_model, tmp_path / "critic")
    (critic / "model.safetensors").write_bytes((critic / "model.safetensors").read_bytes()[:-1000])
    settings = settings_of(tmp_path, ending_model) | {"trainer.n_gpus_per_node": 1, "trainer.logger": "[console]"}
    words = [f"{key}={value}" for key, value in (settings | changed).items()]
    job = start([sys.executable, "-m", "rlfuse.train", *(word.format(critic=critic) for word in words)], "fails")
    seen, until = {}, time.monotonic() + LIMIT_S
    while job.poll() is None and time.monotonic() < until:
        with suppress(psutil.NoSuchProcess):
            seen |= {each.pid: each for each in psutil.Process(job.pid).children(recursive=True)}
        time.sleep(0.2)
    text = finish(job, 1, timeout=1)
    assert cause in text, text
    assert len(seen) > 4 and not all_gone([*seen.values()], timeout=120), "nor do those of Ray that stay for a minute"
