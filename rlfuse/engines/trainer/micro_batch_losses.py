"""Log-probs, values, scores and losses of one micro-batch, according to the configuration.

Role: called by trainer ranks with a whole model, and by the last pipeline stage with its part of one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from rlfuse.algorithms.losses import entropy_from_logits, log_probs_from_logits
from rlfuse.algorithms.objectives import actor_objective, critic_objective
from rlfuse.algorithms.preferences import bradley_terry, dpo
from rlfuse.config.schema import Config
from rlfuse.engines.trainer import fused_log_probs
from rlfuse.engines.trainer.model_inputs import Batch, Later
from rlfuse.engines.trainer.models import response_logits, response_scores, response_values
from rlfuse.engines.trainer.transfers import DeviceTimes
from rlfuse.events import Span
from rlfuse.samples import Row

Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""Loss and detached diagnostics of a micro-batch, all sums."""


def log_probs(config: Config, model: Callable, batch: Batch) -> torch.Tensor:
    """Return the log-probs of the response tokens at the sampling temperature, float32 [R]."""
    logits = response_logits(model, batch)
    if fused_log_probs.is_fused(logits):
        found, _ = fused_log_probs.fused_log_probs(logits, batch.targets, config.rollout.temperature)
    else:
        found = log_probs_from_logits(scale_logits(config, logits), batch.targets)
    return batch.gather_slices(found)


def log_probs_and_entropy(config: Config, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return log-probs and entropy, float32 [r] each, of logits [r, V]; entropy has a gradient only if
    actor.entropy_coeff is not 0."""
    learns = bool(config.actor.entropy_coeff)
    if fused_log_probs.is_fused(logits):
        found, entropy = fused_log_probs.fused_log_probs(logits, targets, config.rollout.temperature)
        return found, entropy if learns else entropy.detach()
    logits = scale_logits(config, logits)
    found = log_probs_from_logits(logits, targets)
    with torch.set_grad_enabled(learns):
        return found, entropy_from_logits(logits)


def scale_logits(config: Config, logits: torch.Tensor) -> torch.Tensor:
    """Return `logits / rollout.temperature` in float32, or `logits` without a copy if the result is the same.

    Losses convert a slice of rows at a time to float32 and round its gradient once. An entropy bonus adds a second
    gradient, and their sum must be rounded only once.
    """
    temperature = config.rollout.temperature
    return logits if temperature == 1.0 and not config.actor.entropy_coeff else logits.float() / temperature


def actor_loss(config: Config, model: Callable, batch: Batch) -> Loss:
    """Return the actor's loss of rows with `advantages` and the other tensors that the loss reads.

    Rows without `old_log_probs` were sampled from the current weights: the log-probs of this pass become their old
    log-probs, and are written to the batch.
    """
    found, entropy = map(
        batch.gather_slices, log_probs_and_entropy(config, response_logits(model, batch), batch.targets)
    )
    return actor_loss_from_log_probs(config, batch, found, entropy)


def actor_loss_from_log_probs(config: Config, batch: Batch, found: torch.Tensor, entropy: torch.Tensor) -> Loss:
    """Return `actor_loss` from log-probs `found` and entropy, float32 [R] each."""
    new = batch.matrix(found)
    batch.tensors.setdefault("old_log_probs", new.detach())
    longest = config.data.max_response_length
    return actor_objective(config.actor, new, batch.matrix(entropy), batch.mask, batch.tensors, longest)


def old_log_probs_from_update(model: str, rows: Sequence[Row], batch: Batch) -> Later | None:
    """Return a reader of the old log-probs that `actor_loss` added to the batch; None if it added none."""
    if model != "actor" or "old_log_probs" in rows[0].tensors or "old_log_probs" not in batch.tensors:
        return None
    return batch.split_later(batch.responses(batch.tensors["old_log_probs"]))


def critic_loss(config: Config, model: Callable, batch: Batch) -> Loss:
    """Return the critic's loss of rows with `values` and `returns`."""
    values = batch.matrix(response_values(model, batch))
    clip, mode = config.critic.cliprange_value, config.actor.loss_agg_mode
    return critic_objective(clip, mode, values, batch.mask, batch.tensors, config.data.max_response_length)


def preference_loss(config: Config, model: Callable, batch: Batch) -> Loss:
    """Return the Bradley-Terry loss of pairs of rows, chosen before rejected, with `margin` and `label`.

    A row's score is that of its last token; the trailing token only gives it a position to predict. A filler is a
    single row and contributes no pair.
    """
    ends = batch.mask.sum(1).cumsum(0) - 1
    scores = response_scores(model, batch)[ends]
    whole = len(scores) - len(scores) % 2
    chosen, rejected = scores[:whole].view(-1, 2).unbind(1)
    return bradley_terry(chosen, rejected, batch.tensors["margin"][:whole:2, 0])


def dpo_loss(config: Config, model: Callable, batch: Batch) -> Loss:
    """Return the DPO loss of pairs of rows, chosen before rejected, with `ref_log_probs`; a filler has no pair."""
    found, whole = batch.matrix(log_probs(config, model, batch)), len(batch.mask) - len(batch.mask) % 2
    totals = [each[:whole].sum(1).view(-1, 2) for each in (found, batch.tensors["ref_log_probs"], batch.mask)]
    return dpo(*totals, config.dpo.beta, config.dpo.loss_type)


def demonstration_loss(config: Config, model: Callable, batch: Batch) -> Loss:
    """Return the summed negative log-likelihood of the tokens with a loss."""
    logits = response_logits(model, batch)
    with torch.no_grad():
        right = batch.gather_slices((logits.argmax(-1) == batch.targets).float())
    found, entropy = map(batch.gather_slices, log_probs_and_entropy(config, logits, batch.targets))
    loss = -found.sum()
    sums = {"loss": loss.detach(), "mean_token_accuracy": right.sum(), "entropy": entropy.detach().sum()}
    return loss, {name: total.float() for name, total in sums.items()}


def weighted_loss(loss: torch.Tensor, weight: float) -> torch.Tensor:
    """Return `weight * loss`, with a non-finite gradient if the loss is not finite.

    A clamp or mask could hide a non-finite loss from the gradient, and steps are skipped by the gradient's norm, which
    all ranks share.
    """
    return loss * (weight + 0.0 * loss.detach())


def add_sums(totals: dict[str, torch.Tensor], sums: Mapping[str, torch.Tensor], weight: float) -> None:
    """Add the weighted diagnostics of a micro-batch to `totals`."""
    for name, value in sums.items():
        totals[name] = totals.get(name, 0.0) + value.double() * weight


def read_sums(sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return diagnostics as floats, with a single read from the device."""
    values = [each.reshape(()) for each in sums.values()]
    return dict(zip(sums, torch.stack(values).tolist(), strict=True)) if sums else {}


OUTPUTS: dict[str, Callable[[Config, Callable, Batch], torch.Tensor]] = {
    "actor": log_probs,
    "ref": log_probs,
    "critic": lambda config, model, batch: response_values(model, batch),
    "reward_model": lambda config, model, batch: response_scores(model, batch),
}
"""Model -> function that returns the output of a pass without gradients, float32 [R]."""
POLICY_LOSSES = {"rl": actor_loss, "sft": demonstration_loss, "dpo": dpo_loss}
"""trainer.task -> loss function of the policy. Memory plans of reward models assume the RL loss."""
OBJECTIVES: dict[str, Callable[[Config, Callable, Batch], Loss]] = {
    "actor": lambda config, model, batch: POLICY_LOSSES.get(config.trainer.task, actor_loss)(config, model, batch),
    "critic": critic_loss,
    "reward_model": preference_loss,
}
"""Model -> loss function."""


PassResults = dict[str, tuple[list[list[np.ndarray]], float]]
"""Model -> (by micro-batch, float32 [T] per row, empty if another rank returns it; start time of its first pass)."""


class RankCall:
    """Passes of one call to a rank: shared inputs, times, and results that are read at the end."""

    def __init__(self, models: Sequence[str], device: str):
        self.models = models
        self._times, self._first = DeviceTimes(device), dict[str, Span]()
        self.batches: dict[int, Batch] = {}
        """Index of a micro-batch -> inputs that the call's next model reuses."""
        self.results: defaultdict[str, list[Later | None]] = defaultdict(list)
        """Model -> by micro-batch, reader of its arrays; None if another rank returns them."""

    @contextmanager
    def timed(self, model: str, span: Span) -> Iterator[None]:
        """Time the body as part of the model's pass; add the pass and model to an error."""
        self._first.setdefault(model, span)
        try:
            with self._times.timed(span):
                yield
        except Exception as error:
            error.add_note(f"Raised in the {span.kind} pass of the {model}.")
            raise

    def read(self) -> PassResults:
        """Wait for the device and return the results of all passes."""
        self._times.settle()
        return {
            model: (
                [read() if read else [] for read in self.results[model]],
                self._first[model].start if model in self._first else math.inf,
            )
            for model in self.models
        }
