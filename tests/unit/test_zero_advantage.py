"""Skipped rows without advantage: the predicate is compared with gradients of the loss for all algorithms and terms."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from test_experience import config, groups

from rlfuse.algorithms.experience import Experience
from rlfuse.algorithms.objectives import actor_objective
from rlfuse.algorithms.zero_advantage import SKIPPED_SHARE, expects_skips, has_only_zero_terms, skip_blocker, skip_note
from rlfuse.config.compose import compose_job
from rlfuse.config.rewards import RewardEntry
from rlfuse.config.schema import ActorConfig
from rlfuse.costs.model import Costs
from rlfuse.costs.spans import skipped_share
from rlfuse.errors import ConfigError
from rlfuse.events import Span
from rlfuse.fusion.lengths import Lengths
from rlfuse.fusion.tuning import RECENT_STEPS
from rlfuse.run.build import _tuning
from rlfuse.run.trial_calls import call_custom_functions
from rlfuse.samples import padded

REWARDS = [[0.1, 0.1, 0.1], [1.0, 0.0, 0.1], [0.25, 1.0, 0.5]]
LENGTHS = [[3, 5, 2], [4, 1, 3], [2, 2, 6]]
EQUAL = {0, 1, 2}
"""Rows of the group with equal rewards."""
PRESETS = {
    "ppo": set(),
    "reinforce_plus_plus": set(),  # whitened
    "reinforce_plus_plus_baseline": set(),  # whitened
    "distill": set(),
    "remax": {8},  # the score of its greedy response
    "gdpo": set(),  # whitened
} | dict.fromkeys(
    ("grpo", "dr_grpo", "dapo", "gspo", "rloo", "opo", "gpg", "cispo", "sapo", "clip_cov", "kl_cov"), EQUAL
)
"""algorithm preset -> rows without advantage; KL and whitening follow the preset, without the KL loss."""


def composed(*words):
    words = ("model.path=m", "data.train_files=[a]", "rollout.n=3", "actor.use_kl_loss=false", *words)
    return OmegaConf.to_object(compose_job(list(words)))


def prepared(found):
    """Return the samples of three groups with advantages."""
    batch = groups(REWARDS, LENGTHS, engine_offset=0.01)
    for group in batch:
        for sample in group.samples:
            sample.reward.dimensions["f"] = sample.reward.value
    experience = Experience(found, [RewardEntry(path="f.py:f", name="f", weight=1.0)])
    experience.prepare(batch)
    experience.complete(batch)
    return experience, [sample for group in batch for sample in group.samples]


def gradients(found, experience, samples):
    """Return the gradient of the actor loss by row, for log-probs that differ from the old ones."""
    masks = [sample.response.mask for sample in samples]
    tensors = {name: torch.from_numpy(padded([each.tensors[name] for each in samples], masks))
               for name in experience.actor_tensors}  # fmt: skip
    mask = torch.from_numpy(padded(masks, masks, bool))
    change = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0)) * 0.3
    log_probs = (tensors["old_log_probs"] + change).requires_grad_()
    loss, _ = actor_objective(found.actor, log_probs, log_probs.exp(), mask, tensors, 6)
    loss.backward()
    return log_probs.grad


def skipped_rows(found, samples):
    return {i for i, each in enumerate(samples)
            if has_only_zero_terms(found.actor, each.tensors, each.loss_mask)}  # fmt: skip


@pytest.mark.parametrize("preset", sorted(path.stem for path in Path("rlfuse/conf/algorithm").glob("*.yaml")))
def test_rows_without_advantage_have_no_gradient_under_any_algorithm(preset):
    wide = [f"actor.clip_ratio_{side}=0.9" for side in ("low", "high")]
    found = composed(f"algorithm={preset}", "algorithm.use_kl_in_reward=false", *wide)
    experience, samples = prepared(found)
    skipped = skipped_rows(found, samples)
    if preset == "kl_cov":  # selects at least one token
        skipped |= {i for i in EQUAL if samples[i].tensors["selected"].any()}
    assert skipped == PRESETS[preset] and not skip_blocker(found.actor)
    found_gradients = gradients(found, experience, samples)
    assert not found_gradients[sorted(skipped_rows(found, samples))].any()
    assert all(found_gradients[i].any() for i in range(9) if i not in PRESETS[preset] and preset not in ("clip_cov",))


def test_kl_in_the_reward_gives_every_row_an_advantage():
    found = composed("algorithm=rloo", "algorithm.use_kl_in_reward=true")
    _, samples = prepared(found)
    for sample in samples[:3]:
        assert sample.tensors["advantages"].any()
    assert skipped_rows(found, samples) == set()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"use_kl_loss": True}, "actor.use_kl_loss=true"),
        ({"entropy_coeff": 0.01}, "actor.entropy_coeff=0.01"),
        ({"skip_zero_advantage": "false"}, "actor.skip_zero_advantage=false"),
        ({"loss_mode": "mine.py:plain"}, "actor.loss_mode=mine.py:plain"),
        ({"loss_mode": "mine.py:denied"}, "actor.loss_mode=mine.py:denied"),
        ({"loss_mode": "mine.py:declared"}, ""),
    ],
)
def test_other_loss_terms_and_undeclared_custom_losses_prevent_skipping(tmp_path, monkeypatch, changes, key):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(CUSTOM)
    actor = config(**{f"actor__{name}": value for name, value in changes.items()}).actor
    reason = skip_blocker(actor)
    assert key in reason and bool(reason) == bool(key)


ROW = {"advantages": [0.0, -0.0, 0.0], "old_log_probs": [-1.0, -2.0, -3.0], "selected": [0.0, 0.0, 0.0]}
ONES, KL, BONUS = {"advantages": [1.0, 1.0, 1.0]}, {"use_kl_loss": True}, {"entropy_coeff": -0.01}


@pytest.mark.parametrize(
    ("changes", "mask", "settings", "only_zero"),
    [
        ({}, [1, 1, 1], {}, True),
        ({}, [1, 1, 1], KL, False),
        ({}, [1, 1, 1], BONUS, False),
        ({}, [1, 1, 1], {"skip_zero_advantage": "false"}, False),
        ({"advantages": [0.0, 1e-30, 0.0]}, [1, 1, 1], {}, False),
        ({"advantages": [0.0, np.nan, 0.0]}, [1, 1, 1], {}, False),
        ({"advantages": [0.0, -np.inf, 0.0]}, [1, 1, 1], {}, False),
        ({"advantages": [0.0, 1.0, 0.0]}, [1, 0, 1], {}, True),  # output of a tool
        (ONES, [0, 0, 0], {}, True),  # a truncated response
        (ONES, [0, 0, 0], KL, True),
        (ONES, [0, 0, 0], BONUS, True),
        (ONES, [0, 0, 0], {"skip_zero_advantage": "false"}, False),
        (ONES, [1, 1, 1], {}, False),
        ({"old_log_probs": [0.0, np.nan, 0.0]}, [1, 1, 1], {}, False),
        ({"is_weights": [1.0, np.inf, 0.0]}, [1, 1, 1], {}, False),
        ({"is_weights": [1.0, 2.0, 0.0]}, [1, 1, 1], {"loss_mode": "gspo"}, True),
        (ONES | {"is_weights": [0.0, 0.0, 0.0]}, [1, 1, 1], {"loss_mode": "gspo"}, True),  # rejected by rollout_rs
        (ONES | {"is_weights": [0.0, 0.0, 0.0]}, [1, 1, 1], KL, False),
        (ONES | {"is_weights": [0.0, 1.0, 0.0]}, [1, 1, 1], {}, False),
        ({"advantages": [0.0, np.nan, 0.0], "is_weights": [0.0, 0.0, 0.0]}, [1, 1, 1], {}, False),
        ({"selected": [0.0, 1.0, 0.0]}, [1, 1, 1], {"loss_mode": "kl_cov"}, False),
        ({"selected": [0.0, 1.0, 0.0], "is_weights": [0.0, 0.0, 0.0]}, [1, 1, 1], {"loss_mode": "kl_cov"}, True),
        ({"selected": [0.0, 1.0, 0.0]}, [1, 1, 1], {"loss_mode": "kl_cov", "ppo_kl_coef": 0.0}, True),
        ({"selected": [0.0, 1.0, 0.0]}, [1, 1, 1], {"loss_mode": "clip_cov"}, True),
        ({}, [1, 1, 1], {"loss_mode": "kl_cov"}, True),
    ],
)
def test_the_predicate_reads_advantages_weights_masks_and_selected_tokens(changes, mask, settings, only_zero):
    # If it is true, the loss and its gradient are 0.
    tensors = {name: np.array(values, "f4") for name, values in (ROW | changes).items()}
    actor = ActorConfig(**settings)
    assert has_only_zero_terms(actor, tensors, np.array(mask, bool)) == only_zero
    if not only_zero:
        return
    row_tensors = {name: torch.from_numpy(values)[None] for name, values in tensors.items()}
    row_tensors["ref_log_probs"] = row_tensors["old_log_probs"] - 0.1
    for change in (-0.5, 0.1, 0.5):
        log_probs = (row_tensors["old_log_probs"] + change).requires_grad_()
        loss, _ = actor_objective(actor, log_probs, log_probs.exp(), torch.tensor([mask]) > 0, row_tensors, 6)
        loss.backward()
        assert loss == 0 and not log_probs.grad.any()


CUSTOM = """
from rlfuse.algorithms.registry import policy_loss
def plain(log_probs, advantages): return -advantages * log_probs
@policy_loss(zero_without_advantage=False)
def denied(log_probs, advantages): return -advantages * log_probs
@policy_loss(zero_without_advantage=True)
def declared(log_probs, advantages): return -advantages * log_probs
@policy_loss(zero_without_advantage=True)
def shifted(log_probs, advantages): return (0.1 - advantages) * log_probs
@policy_loss(zero_without_advantage=True)
def coupled(log_probs, advantages): return -(advantages - advantages.mean()) * log_probs
@policy_loss(zero_without_advantage=True)
def rescaled(log_probs, advantages): return -advantages * log_probs / len(log_probs)
@policy_loss(zero_without_advantage=True)
def penalised_above(log_probs, old_log_probs, advantages):
    return (log_probs - old_log_probs - 0.2).clamp(min=0) - advantages * log_probs
@policy_loss(zero_without_advantage=True)
def penalised_below(log_probs, old_log_probs, advantages):
    return (old_log_probs - log_probs - 0.2).clamp(min=0) - advantages * log_probs
"""


@pytest.mark.parametrize(("name", "holds"), [("declared", True), ("plain", True), ("shifted", False),
                                             ("coupled", False), ("rescaled", False),
                                             ("penalised_above", False), ("penalised_below", False)])  # fmt: skip
def test_a_declared_trait_is_verified_before_the_run(tmp_path, monkeypatch, name, holds):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(CUSTOM)
    found = composed("algorithm=dr_grpo", f"actor.loss_mode=mine.py:{name}")
    prompts = [group.prompt for group in groups([[1.0], [0.0]], [[3], [2]])]
    if holds:
        return call_custom_functions(found, [], prompts)
    with pytest.raises(ConfigError, match=f"mine.py:{name}: declares zero_without_advantage=True, but"):
        call_custom_functions(found, [], prompts)
    return None


@pytest.mark.parametrize("written", ["false", "False", "auto"])
def test_the_key_takes_auto_or_false(written):
    assert composed(f"actor.skip_zero_advantage={written}").actor.skip_zero_advantage == written.lower()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algorithm=dr_grpo"], "responses without advantage are skipped"),
        (["algorithm=dr_grpo", "actor.entropy_coeff=0.01"], "are not skipped .*: actor.entropy_coeff=0.01 adds"),
        (["algorithm=grpo", "actor.use_kl_loss=true"], "are not skipped .*: actor.use_kl_loss=true adds"),
        (["algorithm=rloo", "algorithm.use_kl_in_reward=true"], "are not skipped .*: algorithm.use_kl_in_reward=true"),
        (["algorithm=distill", "ref.path=teacher"], "^$"),
        (["algorithm=dr_grpo", "actor.skip_zero_advantage=false"], "^$"),
        (["algorithm=ppo"], "^$"),  # whitened
    ],
)
def test_a_job_reports_skipping_or_its_blocker(words, message):
    found = composed(*words)
    assert re.search(message, skip_note(found)) and expects_skips(found) == ("are skipped" in message)


@pytest.mark.parametrize(
    ("changes", "loss_only"),
    [
        ({}, ("old_log_prob",)),
        ({"algorithm__use_kl_in_reward": True}, ()),
        ({"algorithm__rollout_correction__rollout_is": "token"}, ()),
        ({"algorithm__old_log_probs": "engine"}, ()),
        ({"actor__use_kl_loss": True}, ()),
        ({"actor__use_kl_loss": True, "actor__mask_truncated_completions": True}, ("old_log_prob", "ref")),
        ({"actor__use_kl_loss": True, "algorithm__filter_groups__enable": True}, ("old_log_prob", "ref")),
        ({"actor__mask_truncated_completions": True, "actor__skip_zero_advantage": "false"}, ()),
        ({"actor__skip_zero_advantage": "false"}, ()),
        ({"data__train_batch_size": 64, "actor__ppo_mini_batch_size": 64}, ()),  # one update, which computes them
    ],
)
def test_advantages_wait_for_old_log_probs_only_if_they_depend_on_them(changes, loss_only):
    job = {"algorithm__adv_estimator": "grpo", "data__train_batch_size": 64, "actor__ppo_mini_batch_size": 16}
    assert Experience(config(**job | changes)).loss_only == loss_only


def test_mismatch_metrics_cover_the_samples_that_the_trainer_scored():
    batch = groups(REWARDS, LENGTHS, engine_offset=0.01)
    experience = Experience(composed("algorithm=dr_grpo"))
    for sample in batch[0].samples:
        del sample.tensors["old_log_probs"]
    assert experience.mismatch(batch)["training/rollout_log_probs_diff_max"] == pytest.approx(0.01, rel=1e-4)
    assert experience.mismatch(batch[:1]) == {}


def test_the_skipped_share_of_a_step_is_weighted_by_rows_of_its_updates():
    def step(rows, skipped):
        return Span(
            "update_actor", "driver", 0.0, 1.0, attributes={"step": True, "rows": rows, "skipped_rows": skipped}
        )

    passes = Span("update_actor", "driver", 0.0, 1.0, samples=("1/0/0",))
    assert skipped_share([passes, step(30, 0), step(10, 10)]) == 0.25 and skipped_share([passes]) == 0.0


def test_a_resumed_run_expects_the_skipped_share_of_its_last_steps(tmp_path):
    rows = [{"step": 0}, *({"step": step, SKIPPED_SHARE: step / 10} for step in range(1, 7))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = SimpleNamespace(folder=tmp_path, drained=set(), returning=set())
    trainer = SimpleNamespace(lockstep=False, lockstep_backward=False, pipelined=False)
    engines = SimpleNamespace(rollout=[None], trainer=trainer)
    tuning = _tuning(composed("algorithm=dr_grpo"), job, engines, Costs(), Lengths(8), print)
    assert tuning.skipped_share == pytest.approx((0.3 + 0.4 + 0.5 + 0.6) / RECENT_STEPS)
