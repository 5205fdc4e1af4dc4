"""A job whose engines have 8-bit weights: weight pushes, importance correction, and logging."""

from rlfuse.algorithms.corrections import LOG_PROBS_DIFF_MEAN, mismatch_bound
from rlfuse.config.quantization import CPU_METHOD
from rlfuse.observe.tracking import read_metrics


def test_the_log_prob_difference_of_8_bit_engines_is_corrected_and_logged(driven, tmp_path):
    settings = {
        "model.dtype": "bfloat16", "algorithm.rollout_correction.rollout_is": "token", "data.max_response_length": 24,
        "data.train_batch_size": 6, "actor.ppo_mini_batch_size": 3, "rollout.quantization": CPU_METHOD,
        "trainer.n_gpus_per_node": 1, "trainer.total_training_steps": 2, "trainer.val_before_train": "false",
        "trainer.experiment_name": "small",
    }  # fmt: skip
    status, text = driven("rlfuse_command", tmp_path, "train", **settings)
    assert status == 0, text
    rows = [row for row in read_metrics(tmp_path / "runs" / "rlfuse" / "small" / "metrics.jsonl") if row["step"] > 0]
    assert len(rows) == 2 and all(row["rollout_corr/rollout_is_mean"] > 0 for row in rows)
    assert all(row["fusion/off-policy"] == 1 for row in rows)
    for difference in [row[LOG_PROBS_DIFF_MEAN] for row in rows]:
        assert mismatch_bound("bfloat16", None).mean < difference < mismatch_bound("bfloat16", CPU_METHOD).mean
