"""Fixtures of all unit tests, and the order of test files."""

import dataclasses
import json
import logging
import os
import signal
import sys
import types
from contextlib import ExitStack, nullcontext
from functools import cache

import pytest
import yaml
from hypothesis import HealthCheck, settings

# No deadline: durations depend on the machine's load.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

JOB = """\
algorithm: grpo
fusion: stream
data:
  train_files: [{folder}/train.jsonl]
  max_response_length: 64
model.path: {folder}/model
reward.functions: ["{folder}/rewards.py:score"]
rollout:
  n: 4
  engine_kwargs: {{enforce_eager: true}}
actor.optim.lr: 1e-5
trainer:
  experiment_name: mine
  total_training_steps: 3
  default_local_dir: {folder}/runs
"""

LONGEST = ("vllm", "test_site", "ranks", "test_plan_search_command", "test_plan_search", "test_activation_offloading")
LONGEST += ("test_moves", "test_fusion_simulated", "test_plan_search_properties", "test_plan", "test_hostile_corpus")
LONGEST += ("test_images", "test_health_agent", "test_types", "test_api", "test_decode_pool")
"""Files and groups that start first, so that none of them runs alone at the end."""


def pytest_collection_modifyitems(items):
    """Sort tests by `LONGEST`, after `tests/conftest.py` has grouped them."""
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.get_closest_marker("xdist_group").args[0], len(order)))


@pytest.fixture(autouse=True)
def allow_unpickling(monkeypatch):
    """Allow unpickling again after a rank in the test process has forbidden it."""
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")


@pytest.fixture(autouse=True)
def unblock_hangups():
    """Unblock SIGHUP, which `rlfuse train` blocks in its thread; in tests, this thread also runs all later tests."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


@pytest.fixture(autouse=True)
def restore_logging():
    """Remove Hydra's root log handler, which would write to the stream of a finished test."""
    root = logging.getLogger()
    level, before = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    for handler in [each for each in root.handlers if each not in before]:
        root.removeHandler(handler)


@pytest.fixture(scope="module")
def one_decode_pool():
    """Share one decode pool between all readers in a module, since starting it takes longer than a test."""
    from rlfuse.data import clips
    from rlfuse.video.decode_pool import DecodePool

    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        start = cache(lambda *settings: stack.enter_context(DecodePool(*settings)))
        patch.setattr(clips, "DecodePool", lambda *settings, max_clips: nullcontext(start(*settings)))
        yield


@pytest.fixture
def job(tmp_path):
    """Write a 15-line job file whose files exist."""
    (tmp_path / "model").mkdir()
    limits = {"max_position_embeddings": 2048, "num_attention_heads": 4}
    (tmp_path / "model" / "config.json").write_text(json.dumps(limits))
    for name in ("train.jsonl", "model/tokenizer.json"):
        (tmp_path / name).touch()
    (tmp_path / "rewards.py").write_text("def score(samples): ...\n")
    path = tmp_path / "my_job.yaml"
    path.write_text(JOB.format(folder=tmp_path))
    assert len(path.read_text().splitlines()) == 15
    return path


SUMMARY = {"reward_first": 0.1, "reward_last": 0.2, "seconds": 7.0, "median_step_s": 1.5, "steps": 3}


class Ran(list):
    """List of the configurations that were run, with the sweep group of each in `groups`."""

    def __init__(self):
        super().__init__()
        self.groups = []


@pytest.fixture
def ran(monkeypatch):
    """Collect configurations that reach rlfuse.run.build.run, which writes a run folder with held-out score n / 8."""
    configs = Ran()

    def run(config):
        configs.append(config)
        configs.groups.append(os.environ.get("WANDB_RUN_GROUP"))
        config.run_folder.mkdir(parents=True, exist_ok=True)
        (config.run_folder / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(config)))
        (config.run_folder / "summary.json").write_text(json.dumps(SUMMARY | {"val_after": config.rollout.n / 8}))
        return config.run_folder

    monkeypatch.setitem(sys.modules, "rlfuse.run.build", types.SimpleNamespace(run=run))
    return configs
