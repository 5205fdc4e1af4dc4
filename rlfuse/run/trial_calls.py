"""Call the custom functions of a job once on dummy data, before any process starts.

Role: estimator, loss, KL, metrics and fusion policy are called as in a step: with rollout.n responses to two prompts of
the job, with unequal rewards, on the CPU. Reward functions are not called: their results depend on real responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import numpy as np
import torch

from rlfuse.algorithms.experience import Experience
from rlfuse.algorithms.losses import mask_response, policy_loss
from rlfuse.algorithms.objectives import actor_objective, policy_loss_arguments
from rlfuse.config.custom_functions import METRICS, POLICY, custom_functions_of, loss_traits_of, traits_of
from rlfuse.config.declare import names_function
from rlfuse.config.policy_losses import DECORATOR
from rlfuse.config.rewards import RewardEntry
from rlfuse.config.schema import ActorConfig, Config
from rlfuse.costs.model import Costs
from rlfuse.errors import ConfigError, FunctionError
from rlfuse.observe.custom_metrics import CustomMetrics
from rlfuse.samples import Group, Prompt, Response, Reward, make_groups, padded
from rlfuse.simulate.job_step import workload_of
from rlfuse.simulate.runner import simulate

LENGTHS = (3, 2, 5, 1)
"""Response tokens of the dummy samples, repeated. Their maximum is not the number of samples."""


class _Parts(dict[str, float]):
    """Parts of a dummy reward. It has every name, since a reward function may return further numbers."""

    def __missing__(self, name: str) -> float:
        return 0.5


def call_custom_functions(config: Config, entries: Sequence[RewardEntry], prompts: Sequence[Prompt]) -> None:
    """Call each custom function of the job once. Raises FunctionError or ConfigError.

    `entries`: the loaded reward functions. `prompts`: at least one; their columns are passed to metrics.
    """
    keys = {key for key, _ in custom_functions_of(config)}
    groups = _groups(config, entries, prompts)
    if any(key.startswith(("algorithm.", "actor.")) for key in keys):
        _learn(config, entries, groups)
    if METRICS in keys:
        problems: list[str] = []
        metrics = CustomMetrics(config, problems.append, "It was called with dummy samples; correct the function.")
        metrics.of([sample for group in groups for sample in group.samples])
        if problems:
            raise FunctionError("\n".join(problems))
    if POLICY in keys:
        simulate(workload_of(config, Costs(), config.slots, LENGTHS, prompt_tokens=8), config.fusion.policy)


def _groups(config: Config, entries: Sequence[RewardEntry], prompts: Sequence[Prompt]) -> list[Group]:
    names = [entry.name for entry in entries if not entry.gate]
    with_baseline = traits_of(config.algorithm.adv_estimator).needs_baseline
    groups = make_groups((prompts[0], prompts[-1]), config.rollout.n, config.data.seed, 1, with_baseline)
    lengths = cycle(LENGTHS)
    for number, sample in ((number, sample) for number, group in enumerate(groups) for sample in group.generated):
        k, count = sample.rollout_index, next(lengths)
        log_probs = np.linspace(-0.5, -0.1, count, dtype=np.float32)
        reason = "stop" if (number + k) % 2 else "length"
        sample.response = Response(np.arange(count, dtype=np.int32), log_probs, reason, 0, "a dummy response")
        dimensions = {name: 0.25 * (number + 1) * (k + 1) for name in names}
        sample.reward = Reward(sum(dimensions.values()), _Parts(dimensions), dimensions=dimensions)
        sample.tensors = {"old_log_probs": log_probs, "ref_log_probs": log_probs - 0.1}
        sample.tensors["values"] = np.full(count, 0.1, np.float32)
    return groups


def _learn(config: Config, entries: Sequence[RewardEntry], groups: Sequence[Group]) -> None:
    """Compute advantages, loss and gradient; raise ConfigError if one of them is not finite."""
    experience, algorithm, actor = Experience(config, entries), config.algorithm, config.actor
    experience.prepare(groups)
    experience.complete(groups)
    samples = [sample for group in groups for sample in group.samples]
    masks = [sample.response.mask for sample in samples]

    def matrix(name: str) -> torch.Tensor:
        return torch.from_numpy(padded([sample.tensors[name] for sample in samples], masks))

    for name in ("advantages", "returns"):
        if not matrix(name).isfinite().all():
            raise _problem(f"algorithm.adv_estimator={algorithm.adv_estimator}", f"{name} that are not finite")
    mask = torch.from_numpy(padded(masks, masks, bool))
    log_probs = (matrix("old_log_probs") + 0.05).requires_grad_()
    tensors = {name: matrix(name) for name in experience.actor_tensors}
    loss, _ = actor_objective(actor, log_probs, log_probs.exp(), mask, tensors, config.data.max_response_length)
    losses = f"actor.loss_mode={actor.loss_mode}" + f", actor.kl_loss_type={actor.kl_loss_type}" * actor.use_kl_loss
    if not loss.requires_grad:
        raise _problem(losses, "a loss that does not depend on log_probs")
    loss.backward()
    if not (loss.isfinite() and log_probs.grad.isfinite().all()):
        raise _problem(losses, f"the loss {loss.item():g} with the gradient {log_probs.grad[mask].tolist()}")
    if names_function(actor.loss_mode) and loss_traits_of(actor.loss_mode).zero_without_advantage:
        _check_zero_without_advantage(actor, log_probs.detach(), mask, tensors)


def _check_zero_without_advantage(
    actor: ActorConfig, log_probs: torch.Tensor, mask: torch.Tensor, tensors: dict[str, torch.Tensor]
) -> None:
    """Raise ConfigError unless a row with the advantages 0 has no loss, no gradient and no effect on the others.

    Ratios of new to old probabilities are below, within and above the clip range.
    """
    log_probs = log_probs + (torch.arange(mask.shape[1]) % 3 - 1.0)
    advantages = torch.arange(len(mask), dtype=torch.float32)[:, None].expand(mask.shape)  # 0 in the first row
    tensors = tensors | {"advantages": mask_response(advantages, mask)}

    def gradient(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = log_probs[rows].clone().requires_grad_()
        given = policy_loss_arguments(actor, {name: each[rows] for name, each in tensors.items()})
        loss, _ = policy_loss(leaf, mask=mask[rows], **given)
        loss = mask_response(loss, mask[rows])
        loss.sum().backward()
        return loss.detach(), leaf.grad

    (loss, found), (_, others) = gradient(slice(None)), gradient(slice(1, None))
    if loss[0].any() or found[0].any() or not torch.equal(found[1:], others):
        raise ConfigError([
            f"actor.loss_mode={actor.loss_mode}: declares zero_without_advantage=True, but a response with the "
            f"advantages 0 has the loss {loss[0].tolist()} and the gradient {found[0].tolist()}, or changes the "
            f"gradient of other responses; remove @{DECORATOR}(zero_without_advantage=True), or correct the function"
        ])  # fmt: skip


def _problem(what: str, result: str) -> ConfigError:
    return ConfigError([f"{what}: for dummy data it returned {result}; correct the function"])
