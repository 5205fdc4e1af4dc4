"""The bundled image job: its accuracy exceeds that of any policy that does not see the images."""

from collections import Counter

import pyarrow.parquet as pq
import pytest

from rlfuse.observe.tracking import read_metrics
from rlfuse.tasks.prepare import prepare_images


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return prepare_images(tmp_path_factory.mktemp("still_images") / "task")


@pytest.fixture(scope="module")
def rows(driven, task):
    """Return the metrics of the first steps of `experiment=images`, enough for it to learn."""
    folder = task.root.parent
    settings = {
        "algorithm": "grpo",
        "model.path": task.model_path,
        "data.train_files": f"[{task.train_file}]",
        "data.val_files": f"[{task.val_file},{task.val_blind_file}]",
        "data.max_prompt_length": 64,
        "actor.optim.lr": 3e-4,
        "rollout.n": 8,
        "rollout.kv_cache_memory_mb": 64,
        "reward.functions": "[rlfuse.tasks.clips:compute_score]",
        "trainer.total_training_steps": 10,
        "trainer.experiment_name": "run",
    }
    status, text = driven("rlfuse_command", folder, "train", "experiment=images", **settings)
    assert status == 0, text
    return read_metrics(folder / "runs/rlfuse/run/metrics.jsonl")


def blind_accuracy(file):
    """Return the best accuracy of answers that depend on the question alone."""
    truths = Counter()
    for row in pq.read_table(file).to_pylist():
        truths[row["prompt"][0]["content"], row["reward_model"]["ground_truth"]] += 1
    likeliest = {question: max(truths[each] for each in truths if each[0] == question) for question, _ in truths}
    return sum(likeliest.values()) / truths.total()


def test_accuracy_exceeds_the_bound_without_images(rows, task):
    blind, before, after = blind_accuracy(task.val_file), rows[0], rows[-1]
    seen, unseen = "val-core/images_place/acc/mean@1", "val-core/images_place_blind/acc/mean@1"
    assert after[seen] > max(before[seen] + 0.2, blind + 0.3)
    assert before[unseen] <= blind and after[unseen] <= blind, "accuracy without images exceeds the bound"


def test_images_are_encoded_once_and_engine_and_trainer_agree(rows):
    steps = [row for row in rows if row["step"]]
    assert all(row["video/encoded_over_unique_tokens"] == 1.0 for row in steps)
    assert all(row["video/frames"] == 1.0 and row["video/tokens"] == 48.0 for row in steps)
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in steps)
