"""The bundled job as a user starts it, on the GPU, to its last step: Ray, vLLM, DeepSpeed and weight pushes.

(8) of README.md. Needs all dependencies. Two steps on a CPU.
"""

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from rlfuse.observe.tracking import read_metrics

for package in ("ray", "vllm", "deepspeed"):
    pytest.importorskip(package)

ROOT = Path(__file__).parents[2]
STEPS = {"cuda": 16, "cpu": 2}
PROBS_DIFF = "training/rollout_probs_diff_mean"


def test_the_quickstart_learns(device, tmp_path):
    steps = STEPS[device]
    job = ["experiment=quickstart", f"cluster.device={device}", "trainer.n_gpus_per_node=1"]
    job += [f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={tmp_path}", "trainer.save_freq=2"]
    for command in (["rlfuse.cli", "prepare", "quickstart"], ["rlfuse.train", *job, "trainer.experiment_name=card"]):
        environment = os.environ | {"WANDB_MODE": "offline"}
        subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=environment, check=True, timeout=540)
    [file] = tmp_path.rglob("metrics.jsonl")
    trained = [row for row in read_metrics(file) if row["step"]]
    rewards, differences = ([row[name] for row in trained] for name in ("critic/score/mean", PROBS_DIFF))
    print(f"mean rewards {rewards}; probabilities of engine and trainer differ by {max(differences):.1e} on average")
    print(f"of the last step: {trained[-1]}")
    assert trained[-1]["step"] == len(trained) == steps and max(differences) < 0.01
    if steps > 10:
        assert statistics.mean(rewards[-5:]) > statistics.mean(rewards[:5]) + 0.1
