"""The on-policy distillation objective against the exact reverse KL, and against TRL's loss on the same rows."""

import asyncio
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlfuse.algorithms.advantages import advantages_and_returns
from rlfuse.algorithms.objectives import actor_objective
from rlfuse.config.rewards import RewardConfig
from rlfuse.config.schema import ActorConfig
from rlfuse.errors import RewardError
from rlfuse.rewards.workers.pool import RewardPool
from rlfuse.samples import Prompt

LENGTHS, VOCABULARY, TEMPERATURE = (5, 1, 3), 11, 0.7


def loss_of(log_probs, teacher, mask):
    """Return the mean loss per token of the first update, whose old log-probs equal the current ones."""
    old = log_probs.detach()
    advantages, _ = advantages_and_returns(
        "distill", torch.zeros_like(old), None, None, mask, old_log_probs=old, ref_log_probs=teacher
    )
    tensors = {"old_log_probs": old, "advantages": advantages}
    loss, _ = actor_objective(ActorConfig(), log_probs, torch.zeros_like(old), mask, tensors, mask.shape[1])
    return loss / mask.sum()


def test_the_expected_gradient_equals_that_of_the_reverse_kl():
    torch.manual_seed(0)
    student, teacher = (torch.randn(VOCABULARY, dtype=torch.float64) for _ in range(2))
    sampled, exact = (student.clone().requires_grad_() for _ in range(2))
    for token, probability in enumerate(student.softmax(-1)):  # every token, weighted by its probability
        log_prob, wanted = (each.log_softmax(-1)[token].view(1, 1) for each in (sampled, teacher))
        (probability * loss_of(log_prob, wanted, torch.tensor([[True]]))).backward()
    log_probs = exact.log_softmax(-1)
    (log_probs.exp() * (log_probs - teacher.log_softmax(-1))).sum().backward()
    torch.testing.assert_close(sampled.grad, exact.grad, rtol=1e-5, atol=1e-6)


def test_no_reward_process_starts_without_a_reward_function():
    prompt = Prompt(0, np.array([1], np.int32), "p", (), "any source", None)

    async def run(pool):
        pool.check_prompts([prompt])
        await pool.start()
        found = await pool.drain()
        await pool.close()
        return found

    assert asyncio.run(run(RewardPool(RewardConfig(), required=False))) == []
    with pytest.raises(RewardError, match="no reward; give at least one function"):
        RewardPool(RewardConfig())


@pytest.mark.slow
def test_gradient_and_loss_equal_those_of_trl_without_importance_weights():
    from trl.experimental.iw_opd.iw_opd_trainer import IWOPDTrainer

    torch.manual_seed(0)
    shape = (len(LENGTHS), max(LENGTHS), VOCABULARY)
    logits, teacher, tokens = torch.randn(shape), torch.randn(shape), torch.randint(VOCABULARY, shape[:2])
    mask = torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))

    def sampled(scores):
        return (scores / TEMPERATURE).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]

    loss = loss_of(sampled(ours), sampled(teacher), mask)
    loss.backward()
    settings = {"temperature": TEMPERATURE, "iw_opd_epsilon": 1e-8, "iw_opd_gamma": 0.0}
    logged = {"train": defaultdict(list)}
    trainer = SimpleNamespace(**settings, model=torch.nn.Identity(), _metrics=logged)
    labels = torch.where(mask, tokens, -100)
    other = IWOPDTrainer._compute_iw_opd_loss(
        trainer, theirs, tokens, labels, sampled(teacher), sampled(logits), mask.sum()
    )
    other.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    # The loss values differ: rlfuse multiplies the advantage by the ratio, which is 1, and TRL by the log-prob.
    advantages = (sampled(teacher) - sampled(logits)) * mask
    assert loss.item() == pytest.approx(-advantages.sum().item() / mask.sum().item(), abs=1e-6)
    assert other.item() == pytest.approx(-(advantages * sampled(logits)).sum().item() / mask.sum().item(), abs=1e-5)
