"""A whole job whose rewards are async functions of every kind, of which some fail, and a group filter."""

import json
from pathlib import Path

from driven_job import settings_of

from rlfuse.config.custom_modules import load_module
from rlfuse.events import read_events
from rlfuse.observe.tracking import read_metrics

async_rewards = load_module(Path(__file__).parents[1] / "unit" / "async_rewards.py")
HANGS = "first_call_hangs"


def test_dynamic_sampling_replaces_groups_without_spread_and_failures_are_left_out(driven, ending_model, tmp_path):
    names = HANGS, *async_rewards.NAMES
    watched = ", ".join(f"{{path: {async_rewards.__file__}:{name}, weight: 0}}" for name in names)
    status, text = driven("rlfuse_command", tmp_path, "train", **settings_of(tmp_path, ending_model) | {
        "algorithm": "dapo", "data.max_response_length": 48, "data.train_batch_size": 8,
        "actor.ppo_mini_batch_size": 4, "actor.ppo_max_token_len_per_gpu": 128, "rollout.n": 4,
        "reward.functions": f"[{watched}, {tmp_path}/reward.py:half_flat]", "reward.max_failure_rate": 0.5,
        "reward.timeout_s": 5, "algorithm.filter_groups.max_num_gen_batches": 8, "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": 1, "trainer.experiment_name": "dapo", "trainer.logger": "[console]",
    })  # fmt: skip
    assert status == 0, text
    run = tmp_path / "runs" / "rlfuse" / "dapo"
    row = next(row for row in read_metrics(run / "metrics.jsonl") if row["step"] == 1)
    assert 2 <= row["train/num_gen_batches"] <= 8
    assert 0 < row["reward/frac_reward_zero_std"] < 1, "of all groups, not of those that were kept"
    assert 0 < row["perf/mfu/actor"] < 1 and 0 < row["perf/mfu/rollout"] < 1
    assert not (run / "wandb").exists() and "critic/vf_loss" not in row
    trained = {s for span in read_events(run / "events.jsonl") if span.kind == "backward" for s in span.samples}
    odd = {name for name in trained if int(name.split("/")[1]) % 2}
    assert trained and not odd
    failures = [json.loads(line) for line in (run / "reward_failures.jsonl").read_text().splitlines()]
    raised = [failure for failure in failures if "took longer than 5 s (reward.timeout_s)" not in failure["message"]]
    assert all("unlucky" in failure["message"] and "raise RuntimeError" in failure["traceback"] for failure in raised)
    assert [failure["function"] for failure in failures if failure not in raised] == [HANGS]
    assert all(row[f"rewards/{name}/mean"] > 0 for name in names)
    assert row["reward/latency_s/half_flat/max"] > 0 and row["reward/frac_gated"] == 0
    if failed := row.get("reward/failures/half_flat"):
        assert "unlucky" in text and 0 < failed <= len(failures)
