"""Durations when the system clock is changed: measured with a monotonic clock, never negative."""

import ast
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlfuse import clock
from rlfuse.config.schema import Config
from rlfuse.engines.rollout.liveness import Liveness
from rlfuse.engines.rollout.step_meter import StepMeter
from rlfuse.engines.vllm.setup import engine_step as step_of
from rlfuse.events import Recorder
from rlfuse.health.sampling import Sampler
from rlfuse.rewards.workers.pool import RewardPool
from rlfuse.run.job import next_attempt, open_job, run_with_restarts
from rlfuse.run_folder import checkpoints, status

PACKAGE = Path(clock.__file__).parent
DATES = {
    "clock.py": "defines the other clock",
    "data/clips.py": "age of a file",
    "engines/deepspeed/deepspeed_ops.py": "age of a file",
    "observe/wandb_sink.py": "a number for wandb that is larger than that of the process before",
    "observe/mlflow_sink.py": "date of a metric",
    "observe/terminal.py": "date of the view",
    "tools/watch.py": "age of the view, which another host may have written",
    "rewards/sandbox/sandbox.py": "age of a file",
    "run/job.py": "date of the start",
    "tools/leftovers.py": "age of a file",
    "tools/listing.py": "age of a file",
    "run/slot_requests.py": "a date that another host wrote",
    "tools/submission.py": "dates of the cluster",
    "run_folder/run_lock.py": "age of a file",
    "run_folder/slots.py": "a date for another host",
    "run_folder/status.py": "age of a file, date of the end",
}
"""Modules that may call `time.time`, and the reason."""


@pytest.fixture
def set_back(monkeypatch):
    """Set the system clock back by an hour at each read."""
    earlier = iter(range(0, 1 << 30, 3600))
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() - next(earlier))


@pytest.mark.slow
def test_wall_clock_time_is_read_only_for_dates():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if name in ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now"):
                found.add(path.relative_to(PACKAGE).as_posix())
    assert found == set(DATES)


def span(tmp_path):
    recorder = Recorder("driver")
    with recorder.span("step") as found:
        pass
    return found.seconds


def engine_step(tmp_path):
    meter = StepMeter(Recorder("rollout/0"), 1000)
    meter.pause()
    scheduler = SimpleNamespace(iteration_details=None, spec_decoding_stats=None)
    more = {"num_generation_tokens": 1, "prompt_token_stats": SimpleNamespace(computed=8)}
    for start in (-3600.0, 0.01):  # vLLM subtracts two dates
        iteration = {"inter_token_latencies_iter": [], "time_to_first_tokens_iter": [start]}
        read = step_of(scheduler, SimpleNamespace(iteration_timestamp=time.time(), **iteration, **more))
        meter.record(read, 0.1, idle=False)
    meter.close()
    return min(found.seconds for found in meter._recorder.drain())


def stall(tmp_path):
    return Liveness(lambda: 0.0).check_progress(busy=True).stalled_s


def sample(tmp_path):
    sampler = Sampler("node/a", workers=list, gpus=SimpleNamespace(read=lambda _: {}))
    sampler.sample()
    time.sleep(0.01)
    return min(each.seconds for each in sampler.sample())


def run(tmp_path):
    config = Config()
    config.trainer.default_local_dir, config.trainer.experiment_name = str(tmp_path), "x"
    config.model.path, config.trainer.logger = "somewhere", []

    def attempt(job):
        job.begin(8)
        return job.folder

    found = status.read(run_with_restarts(config, attempt))
    return found.seconds(0.0)


@pytest.mark.parametrize("measured", [span, engine_step, stall, sample, run])
def test_durations_are_not_negative_if_the_clock_is_set_back(tmp_path, set_back, measured):
    assert 0 <= measured(tmp_path) < 60


def test_a_first_call_of_zero_seconds_does_not_cause_a_division_by_zero():
    pool = SimpleNamespace(_pace={}, _functions={})
    for seconds in (1e-12, 0.0, 2.0):
        RewardPool._update_pace(pool, SimpleNamespace(name="f", seconds=seconds, items=[1], returns_awaitable=False))
        assert (
            RewardPool._size(pool, SimpleNamespace(name="f", is_model=False, is_batched=False, is_async=False), 9) > 0
        )


def test_checkpoints_of_the_run_are_identified_independent_of_their_dates(tmp_path):
    config = Config()
    config.trainer.default_local_dir, config.trainer.experiment_name, config.model.path = str(tmp_path), "x", "m"

    def write(step, date):
        path = checkpoints.folder_of(config.run_folder, step)
        path.mkdir(parents=True, exist_ok=True)
        (path / "run.json").write_text(f'{{"step": {step}}}')
        (path / checkpoints.MARKER).touch()
        os.utime(path / checkpoints.MARKER, (date, date))

    write(2, time.time() + 3600)
    config.trainer.resume_mode = "disable"
    job = open_job(config)
    assert next_attempt(job, RuntimeError()).checkpoint is None, "it is of an earlier run"
    write(4, time.time() - 3600)
    assert next_attempt(job, RuntimeError()).checkpoint.name == "global_step_4"


@pytest.mark.slow
def test_all_processes_of_a_run_share_its_clock(monkeypatch):
    program = "from rlfuse import clock; print(clock.now())"
    monkeypatch.setitem(os.environ, clock.OFFSET, f"{clock.BOOT} {clock._OFFSET - 7200!r}")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(clock.now() - 7200, abs=60)
    monkeypatch.setitem(os.environ, clock.OFFSET, "another-boot -1.0")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(time.time(), abs=60)


def test_a_process_is_identified_by_its_start_in_ticks():
    assert clock.process_start_ticks(os.getpid()) == clock.process_start_ticks(os.getpid()) > 0
    with pytest.raises(OSError, match="No such"):
        clock.process_start_ticks(2**22 + 1)
