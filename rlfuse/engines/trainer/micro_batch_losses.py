"""One micro-batch through a model: log-probs, and what the optimizers minimise, as the configuration has it.

Role: called by trainer ranks with a whole model, and by the last stage of a pipeline with its part of one.
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
from rlfuse.algorithms.preferences import bradley_terry
from rlfuse.config.schema import Config
from rlfuse.engines.trainer import fused_log_probs
from rlfuse.engines.trainer.model_inputs import Batch, Later
from rlfuse.engines.trainer.models import response_logits, response_scores, response_values
from rlfuse.engines.trainer.transfers import DeviceTimes
from rlfuse.events import Span
from rlfuse.samples import Row

Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""The loss and detached diagnostics of a micro-batch, all of them sums."""


def log_probs(config: Config, model: Callable, batch: Batch) -> torch.Tensor:
    """float32 [R] of the response tokens at the sampling temperature."""
    logits = response_logits(model, batch)
    if fused_log_probs.is_fused(logits):
        found, _ = fused_log_probs.fused_log_probs(logits, batch.targets, config.rollout.temperature)
    else:
        found = log_probs_from_logits(scale_logits(config, logits), batch.targets)
    return batch.gather_slices(found)


def log_probs_and_entropy(config: Config, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Both float32 [r], from logits [r, V]; entropy has a gradient only where actor.entropy_coeff needs it."""
    learns = bool(config.actor.entropy_coeff)
    if fused_log_probs.is_fused(logits):
        found, entropy = fused_log_probs.fused_log_probs(logits, targets, config.rollout.temperature)
        return found, entropy if learns else entropy.detach()
    logits = scale_logits(config, logits)
    found = log_probs_from_logits(logits, targets)
    with torch.set_grad_enabled(learns):
        return found, entropy_from_logits(logits)


def scale_logits(config: Config, logits: torch.Tensor) -> torch.Tensor:
    """Return `logits / rollout.temperature` in float32, or `logits` without a copy where that changes no number.

    Losses convert a slice of rows at a time to float32 and round its gradient once. An entropy bonus adds a second
    gradient, and their sum has to be rounded once too.
    """
    temperature = config.rollout.temperature
    return logits if temperature == 1.0 and not config.actor.entropy_coeff else logits.float() / temperature


def actor_loss(config: Config, model: Callable, batch: Batch) -> Loss:
    """Of a micro-batch whose rows carry `advantages` and what else the loss reads.

    Rows without `old_log_probs` are of the weights that they are learned from first: their old log-probs are those of
    this very pass, which the batch gains.
    """
    found, entropy = map(
        batch.gather_slices, log_probs_and_entropy(config, response_logits(model, batch), batch.targets)
    )
    return actor_loss_from_log_probs(config, batch, found, entropy)


def actor_loss_from_log_probs(config: Config, batch: Batch, found: torch.Tensor, entropy: torch.Tensor) -> Loss:
    """`actor_loss` from log-probs and entropy, float32 [R] of the response tokens."""
    new = batch.matrix(found)
    batch.tensors.setdefault("old_log_probs", new.detach())
    longest = config.data.max_response_length
    return actor_objective(config.actor, new, batch.matrix(entropy), batch.mask, batch.tensors, longest)


def old_log_probs_from_update(model: str, rows: Sequence[Row], batch: Batch) -> Later | None:
    """float32 [T] per row, after its loss: the old log-probs of an actor's `rows` that came without; else None."""
    if model != "actor" or "old_log_probs" in rows[0].tensors:
        return None
    return batch.split_later(batch.responses(batch.tensors["old_log_probs"]))


def critic_loss(config: Config, model: Callable, batch: Batch) -> Loss:
    """Of a micro-batch whose rows carry `values` and `returns`."""
    values = batch.matrix(response_values(model, batch))
    clip, mode = config.critic.cliprange_value, config.actor.loss_agg_mode
    return critic_objective(clip, mode, values, batch.mask, batch.tensors, config.data.max_response_length)


def preference_loss(config: Config, model: Callable, batch: Batch) -> Loss:
    """Of a micro-batch of pairs, chosen before rejected, whose rows carry `margin` and `label`.

    A filler is one row, and no pair. A row's score is that of its last token; the one behind it is there to be
    predicted, and never looked at.
    """
    ends = batch.mask.sum(1).cumsum(0) - 1
    scores = response_scores(model, batch)[ends]
    whole = len(scores) - len(scores) % 2
    chosen, rejected = scores[:whole].view(-1, 2).unbind(1)
    return bradley_terry(chosen, rejected, batch.tensors["margin"][:whole:2, 0])


def weighted_loss(loss: torch.Tensor, weight: float) -> torch.Tensor:
    """`weight` times the loss, to go backward from; one that is not finite has no finite gradient.

    A clamp or a mask can keep from the gradient what the loss shows, and the step is skipped by the gradient's norm,
    which all ranks share.
    """
    return loss * (weight + 0.0 * loss.detach())


def read_sums(sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Diagnostics from the device, by one read of all."""
    values = [each.reshape(()) for each in sums.values()]
    return dict(zip(sums, torch.stack(values).tolist(), strict=True)) if sums else {}


OUTPUTS: dict[str, Callable[[Config, Callable, Batch], torch.Tensor]] = {
    "actor": log_probs,
    "ref": log_probs,
    "critic": lambda config, model, batch: response_values(model, batch),
    "reward_model": lambda config, model, batch: response_scores(model, batch),
}
"""Model -> float32 [R], what a pass without gradients returns."""
OBJECTIVES = {"actor": actor_loss, "critic": critic_loss, "reward_model": preference_loss}
"""What each kind of model is trained on."""


PassResults = dict[str, tuple[list[list[np.ndarray]], float]]
"""Model -> float32 [T] per row, per micro-batch, none of one that another rank answers for; and when its pass began."""


class RankCall:
    """The passes of one call to a rank: inputs that they share, times, and results that are read at the end."""

    def __init__(self, models: Sequence[str], device: str):
        self.models = models
        self._times, self._first = DeviceTimes(device), dict[str, Span]()
        self.batches: dict[int, Batch] = {}
        """Number of a micro-batch -> inputs that the call's next model uses again."""
        self.results: defaultdict[str, list[Later | None]] = defaultdict(list)
        """Model -> per micro-batch, a read of its arrays where this rank answers."""

    @contextmanager
    def timed(self, model: str, span: Span) -> Iterator[None]:
        """The body is part of the model's pass, which an error in it names."""
        self._first.setdefault(model, span)
        try:
            with self._times.timed(span):
                yield
        except Exception as error:
            error.add_note(f"It happened in the {span.kind} pass of the {model}.")
            raise

    def read(self) -> PassResults:
        """Wait for the device and return what the passes returned."""
        self._times.settle()
        return {
            model: (
                [read() if read else [] for read in self.results[model]],
                self._first[model].start if model in self._first else math.inf,
            )
            for model in self.models
        }
