"""An engine that spans several slots in a whole job on a CPU host: vLLM's processes, their weights and KV caches."""

from pathlib import Path

import pytest

from rlfuse.observe.tracking import read_metrics

STEPS = 2


@pytest.fixture(scope="module")
def found(driven, tmp_path_factory):
    """Return what wide_steps.py recorded."""
    settings = {
        "rollout.tensor_model_parallel_size": 2,
        "rollout.draft": "history",
        "data.train_batch_size": 8,
        "data.max_response_length": 60,
        "data.max_prompt_length": 80,
        "actor.ppo_mini_batch_size": 4,
        "trainer.total_training_steps": STEPS,
        "trainer.save_freq": -1,
        "cluster.max_restarts": 0,
    }
    return driven("wide_steps", tmp_path_factory.mktemp("wide"), **settings)


def test_both_parts_of_the_engine_have_the_trainers_weights_after_every_step(found):
    rows = [row for row in read_metrics(Path(found["run"]) / "metrics.jsonl") if row["step"] > 0]
    assert len(rows) == STEPS and all(row["fusion/staleness"] == 0 for row in rows)
    assert min(row["actor/grad_norm"] for row in rows) > 1e-3
    assert max(row["training/rollout_log_probs_diff_max"] for row in rows) < 1e-4


def test_a_sample_resumes_from_the_kv_caches_of_both_parts(found):
    assert found["moved"] == found["expected"]
    assert min(found["carried"]) > 0 and min(found["cached"]) >= 64  # of 70 in the prompt, in blocks of 32


def test_drafts_change_no_token(found):
    assert found["identical"] and found["accepted"] > 0.8 * found["tokens"] > 0


def test_engine_processes_listen_on_loopback_only_and_end_with_the_engine(found):
    assert found["processes"] == 3  # the engine core and a worker for each part
    assert set(found["listening"]) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert found["left"] == []
    assert len(found["shared"]) > 3 and not any(found["shared"].values()), (
        "the next engine has not removed their shared memory"
    )
