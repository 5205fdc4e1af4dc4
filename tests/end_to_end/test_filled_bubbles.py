"""A GRPO job with a reference on pipelines: passes in training bubbles do not change results."""

import pytest

BATCH, MINI_BATCH = 8, 2


@pytest.fixture(scope="module")
def found(driven, tmp_path_factory):
    """Return case -> its steps."""
    settings = {
        "data.max_response_length": 48,
        "data.train_batch_size": BATCH,
        "actor.ppo_mini_batch_size": MINI_BATCH,
        "actor.ppo_max_token_len_per_gpu": 128,
        "actor.use_kl_loss": "true",
        "training.pipeline_parallel_size": 2,
        "fusion": "serial",
        "trainer.total_training_steps": 12,
    }
    return driven("filled_steps", tmp_path_factory.mktemp("filled"), **settings)


def test_passes_in_bubbles_give_the_metrics_of_passes_before_training(found):
    for serial, fused in zip(found["serial"], found["fused"], strict=True):
        assert fused["responses"] == serial["responses"] and fused["trained"] == serial["trained"]
        same = [name for name in serial["metrics"] if name.startswith("actor/")]
        assert {"actor/pg_loss", "actor/kl_loss", "actor/grad_norm"} <= set(same)
        for name in same:
            assert fused["metrics"][name] == pytest.approx(serial["metrics"][name], rel=2e-4, abs=1e-6), name
        assert max(each["metrics"]["training/rollout_log_probs_diff_max"] for each in (serial, fused)) < 1e-4


def test_every_mini_batch_is_scored_in_the_schedule_of_the_previous_one(found):
    parts = BATCH // MINI_BATCH
    for serial, fused in zip(found["serial"], found["fused"], strict=True):
        assert serial["scored"] == [{}] * parts and serial["alone"] == {"old_log_prob": 1, "ref": 1}
        assert fused["alone"] == {"old_log_prob": 0, "ref": 1}, (
            "the first mini-batch takes old log-probs from its update"
        )
        assert [sorted(each) for each in fused["scored"]] == [["actor", "ref"], *[["ref"]] * (parts - 2), []]
