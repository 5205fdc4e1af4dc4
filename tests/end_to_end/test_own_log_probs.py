"""Old log-probs of first mini-batches from their update, or from engines with drafts, do not change a job's curves."""

import numpy as np
import pytest
from rollouts import write_repeating

from rlfuse.events import read_events
from rlfuse.observe.tracking import read_metrics


def test_log_probs_from_the_update_give_bitwise_the_curves_of_a_separate_pass(driven, tmp_path):
    """A KL coefficient of 0 in the reward requires the separate pass and changes no reward. One row per micro-batch."""
    settings = {
        "data.max_response_length": 24, "data.train_batch_size": 6, "rollout.n": 2,
        "actor.ppo_mini_batch_size": 3, "actor.ppo_micro_batch_size_per_gpu": 1, "actor.ppo_epochs": 2,
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": 2, "trainer.val_before_train": "false", "fusion": "serial",
    }  # fmt: skip
    needed = {"algorithm.use_kl_in_reward": "true", "algorithm.kl_ctrl.kl_coef": 0}
    rows, passes = [], []
    for name, more in (("own", {}), ("before", needed)):
        changed = settings | {"trainer.experiment_name": name} | more
        status, text = driven("rlfuse_command", tmp_path, "train", **changed)
        assert status == 0, text
        run = tmp_path / "runs" / "rlfuse" / name
        rows.append([row for row in read_metrics(run / "metrics.jsonl") if row["step"] > 0])
        driver = [span for span in read_events(run / "events.jsonl") if span.where == "driver"]
        passes.append([name for span in driver if span.kind == "old_log_prob" for name in span.samples])
    assert [len(each) for each in passes] == [2 * 2 * 3, 2 * 2 * 6]
    assert len(rows[0]) == len(rows[1]) == 2
    compared = ("actor/", "critic/rewards", "critic/advantages", "response_length/", "training/rollout_")
    for have, want in zip(*rows, strict=True):
        names = [name for name in want if name.startswith(compared) and "reward_kl" not in name]
        assert {"actor/ppo_kl", "actor/grad_norm", "training/rollout_probs_diff_max"} <= {*names}
        np.testing.assert_equal({name: have[name] for name in names}, {name: want[name] for name in names})


def test_drafts_change_no_curve_with_log_probs_of_the_engine(driven, ending_model, tmp_path):
    """Responses repeat themselves, so n-gram drafts are accepted."""
    settings = {
        "model.path": write_repeating(ending_model, tmp_path / "repeating"), "actor.optim.lr": 1e-5,
        "data.max_response_length": 60, "data.train_batch_size": 6, "rollout.n": 2, "rollout.temperature": 0.3,
        "actor.ppo_mini_batch_size": 3, "algorithm.old_log_probs": "engine", "trainer.total_training_steps": 2,
        "trainer.n_gpus_per_node": 1, "trainer.val_before_train": "false", "fusion": "serial",
    }  # fmt: skip
    rows = []
    for name, more in (("drafts", {"fusion.tail_speculation": 16}), ("none", {})):
        changed = settings | {"trainer.experiment_name": name} | more
        status, text = driven("rlfuse_command", tmp_path, "train", **changed)
        assert status == 0, text
        rows.append([row for row in read_metrics(tmp_path / "runs" / "rlfuse" / name / "metrics.jsonl") if row["step"]])
    compared = ("actor/", "critic/rewards", "critic/advantages", "response_length/")
    for have, want in zip(*rows, strict=True):
        assert have["fusion/draft_acceptance"] > 0 and "fusion/draft_acceptance" not in want
        names = [name for name in want if name.startswith(compared)]
        assert {"actor/ppo_kl", "actor/grad_norm", "response_length/mean"} <= {*names}
        assert {name: have[name] for name in names} == pytest.approx({name: want[name] for name in names}, 1e-3, 1e-4)
