"""Whole jobs with async reward functions of every kind, some of which fail, and with groups of equal rewards."""

import json
from pathlib import Path

import pytest
import torch
from driven_job import settings_of
from safetensors.torch import load_file

from rlfuse.config.custom_modules import load_module
from rlfuse.events import read_events
from rlfuse.observe.tracking import read_metrics

async_rewards = load_module(Path(__file__).parents[1] / "unit" / "async_rewards.py")
HANGS = "first_call_hangs"


def test_dynamic_sampling_replaces_groups_with_zero_std_and_drops_failures(driven, ending_model, tmp_path):
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
    assert 0 < row["reward/frac_reward_zero_std"] < 1, "the fraction is not of all groups"
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


def test_a_job_skips_responses_without_advantage_and_ends_with_the_same_weights(driven, ending_model, tmp_path):
    """Every second prompt has equal rewards. With one slot and one response per micro-batch, weights are bitwise equal.

    The second mini-batch also skips passes for old log-probs.
    """
    found, output = {}, {}
    for name, changes in {
        "auto": {},
        "off": {"actor.skip_zero_advantage": "false"},
        "kl_loss": {"actor.use_kl_loss": "true", "trainer.total_training_steps": 1},
    }.items():
        status, output[name] = driven("rlfuse_command", tmp_path, "train", **settings_of(tmp_path, ending_model) | {
            "algorithm": "dr_grpo", "fusion": "serial", "data.max_response_length": 24, "data.train_batch_size": 8,
            "actor.ppo_mini_batch_size": 4, "actor.ppo_micro_batch_size_per_gpu": 1, "rollout.n": 4,
            "reward.functions": f"[{tmp_path}/reward.py:half_flat]", "reward.max_failure_rate": 0.5,
            "trainer.n_gpus_per_node": 1, "trainer.total_training_steps": 2, "trainer.save_freq": 2,
            "trainer.experiment_name": name, "trainer.logger": "[console]", "trainer.val_before_train": "false",
        } | changes)  # fmt: skip
        assert status == 0, output[name]
        run = tmp_path / "runs" / "rlfuse" / name
        found[name] = {row["step"]: row for row in read_metrics(run / "metrics.jsonl") if row["step"] > 0}
    skipped = [row["actor/skipped_zero_advantage"] for row in found["auto"].values()]
    assert all(0 < share < 1 for share in skipped)
    assert not any(row["actor/skipped_zero_advantage"] for name in ("off", "kl_loss") for row in found[name].values())
    assert "responses without advantage are skipped in the actor's passes" in output["auto"]
    assert "not skipped in the actor's passes: actor.use_kl_loss=true adds a KL term" in output["kl_loss"]
    for step, row in found["off"].items():
        for name in ("actor/grad_norm", "actor/pg_loss", "critic/score/mean"):
            assert found["auto"][step][name] == pytest.approx(row[name], rel=1e-6, abs=1e-9), name
    weights = [load_file(next((tmp_path / "runs" / "rlfuse" / name).glob("**/actor/huggingface/*.safetensors")))
               for name in ("auto", "off")]  # fmt: skip
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    passes = {name: rows_of(tmp_path / "runs" / "rlfuse" / name, "old_log_prob") for name in ("auto", "off")}
    assert 0 < len(passes["auto"]) < len(passes["off"])


def rows_of(run, kind):
    """Return the ids of the samples for which ranks ran passes of this kind."""
    spans = read_events(run / "events.jsonl")
    return {name for span in spans if span.kind == kind and span.where.startswith("trainer") for name in span.samples}
