"""A GRPO job with a reference on pipelines: passes in the bubbles of training change when, never what."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_job import REWARD

BATCH, MINI_BATCH = 8, 2


@pytest.fixture(scope="module")
def found(tiny_model, tmp_path_factory):
    """case -> what its steps did."""
    folder = tmp_path_factory.mktemp("filled")
    (folder / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"w{3 + i} w{50 + i} w{7 + i % 5}", "answer": str(i), "data_source": "x"} for i in range(64)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "algorithm": "grpo",
        "model.path": tiny_model,
        "model.dtype": "float32",
        "data.train_files": f"[{folder}/train.jsonl]",
        "data.max_prompt_length": 16,
        "data.max_response_length": 48,
        "data.train_batch_size": BATCH,
        "actor.ppo_mini_batch_size": MINI_BATCH,
        "actor.ppo_max_token_len_per_gpu": 128,
        "actor.optim.lr": 1e-3,
        "actor.use_kl_loss": "true",
        "rollout.n": 4,
        "rollout.kv_cache_memory_mb": 32,
        "training.pipeline_parallel_size": 2,
        "fusion": "serial",
        "reward.functions": f"[{folder}/reward.py:even]",
        "trainer.n_gpus_per_node": 2,
        "trainer.total_training_steps": 12,
        "trainer.logger": "[]",
        "trainer.default_local_dir": folder / "runs",
        "cluster.timeout_s": 300,
    }
    script, out = Path(__file__).with_name("filled_steps.py"), folder / "found.json"
    command = [sys.executable, str(script), str(out), *(f"{key}={value}" for key, value in settings.items())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


def test_passes_in_bubbles_give_the_curves_of_passes_before_training(found):
    for serial, fused in zip(found["serial"], found["fused"], strict=True):
        assert fused["responses"] == serial["responses"] and fused["trained"] == serial["trained"]
        same = [name for name in serial["metrics"] if name.startswith("actor/")]
        assert {"actor/pg_loss", "actor/kl_loss", "actor/grad_norm"} <= set(same)
        for name in same:
            assert fused["metrics"][name] == pytest.approx(serial["metrics"][name], rel=2e-4, abs=1e-6), name
        assert max(each["metrics"]["training/rollout_log_probs_diff_max"] for each in (serial, fused)) < 1e-4


def test_every_mini_batch_is_scored_in_the_schedule_before_its_own(found):
    parts = BATCH // MINI_BATCH
    for serial, fused in zip(found["serial"], found["fused"], strict=True):
        assert serial["scored"] == [{}] * parts and serial["alone"] == fused["alone"] == {"old_log_prob": 1, "ref": 1}
        assert [sorted(each) for each in fused["scored"]] == [["actor", "ref"], *[["ref"]] * (parts - 2), []]
