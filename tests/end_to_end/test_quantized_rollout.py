"""A job whose engines have weights of 8 bits: pushed, corrected for, and told of."""

import sys

from driven_job import settings_of
from job_processes import finish, start

from rlfuse.algorithms.corrections import LOG_PROBS_DIFF_MEAN, bound_of
from rlfuse.config.quantization import ON_CPUS
from rlfuse.observe.tracking import read_metrics


def test_what_engines_draw_differs_by_rounding_is_corrected_for_and_logged(ending_model, tmp_path):
    settings = settings_of(tmp_path, ending_model) | {
        "model.dtype": "bfloat16", "algorithm.rollout_is_threshold": 2, "data.max_response_length": 24,
        "data.train_batch_size": 6, "actor.ppo_mini_batch_size": 3, "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": 2, "trainer.val_before_train": "false",
    }  # fmt: skip
    words = [f"{key}={value}" for key, value in settings.items()]
    finish(start([sys.executable, "-m", "rlfuse.train", *words], "small", f"rollout.quantization={ON_CPUS}"), 0)
    rows = [row for row in read_metrics(tmp_path / "runs" / "rlfuse" / "small" / "metrics.jsonl") if row["step"] > 0]
    assert len(rows) == 2 and all(row["training/rollout_is_weight_mean"] > 0 for row in rows)
    assert all(row["fusion/off-policy"] == 1 for row in rows)
    for apart in [row[LOG_PROBS_DIFF_MEAN] for row in rows]:
        assert bound_of("bfloat16", None).mean < apart < bound_of("bfloat16", ON_CPUS).mean
