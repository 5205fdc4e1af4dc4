"""Computation of a stage: forward, backward and weight gradients of micro-batches, and its share of the head.

The executor calls `forward`, `backward`, `weight_gradients` and `head` in the order of a schedule. Activations of F
are kept until B, or until W if the backward is split; losses and diagnostics are unnormalised sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlfuse.algorithms.losses import vocab_parallel_log_probs
from rlfuse.config.schema import Config
from rlfuse.engines.pipeline import split_backward
from rlfuse.engines.pipeline.partition import Part
from rlfuse.engines.trainer.dropout import check_repeatable
from rlfuse.engines.trainer.micro_batch_losses import (
    Loss,
    actor_loss,
    actor_loss_from_log_probs,
    critic_loss,
    log_probs,
    old_log_probs_from_update,
    scale_logits,
    weighted_loss,
)
from rlfuse.engines.trainer.model_inputs import Batch, Later, collate
from rlfuse.engines.trainer.models import response_values, visual_embeddings
from rlfuse.errors import EngineError
from rlfuse.samples import MicroBatch, Row


class DeviceStages(torch.nn.ModuleDict):
    """All stages of a model on one device, by number: the module of its DeepSpeed engine."""

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


@dataclass(slots=True)
class _ForwardState:
    """Tensors of a micro-batch kept between its F and its B."""

    received: Tensor | None
    result: Tensor
    """Hidden states, or the loss on a last stage with the whole head."""


class Stage:
    """One stage of `actor`, `critic` or `ref` on this device."""

    def __init__(self, config: Config, name: str, model: PreTrainedModel, part: Part, packed: bool, device: str):
        self.config, self.name, self.model, self.part = config, name, model, part
        self.packed, self.device, self.dtype = packed, device, model.dtype
        self.tape = split_backward.Tape()
        if name != "ref":
            split_backward.split_linears(model, self.tape)
        self._kept: dict[int, _ForwardState] = {}
        self._pending: dict[int, split_backward.Pending] = {}
        self.sums: dict[str, Tensor] = {}

    def begin(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Set the micro-batches of this stage's pipeline, numbered as in the next schedule."""
        self.micro_batches = list(micro_batches)
        self._batches: dict[int, Batch] = {}
        self.scores: dict[int, Later] = {}
        """Scores by micro-batch, copied from the device after the schedule has run."""
        self.head_input: dict[int, Tensor] = {}
        """On the last stage with a shared head, until H: hidden states [R, hidden size] that predict response
        tokens."""
        self.head_gradient: dict[int, Tensor] = {}
        """From H until B: the gradient of `head_input`."""
        self._kept.clear()
        self._pending.clear()

    def shape(self, micro_batch: int) -> tuple[int, ...]:
        """Return the shape of received and sent hidden states: [sequences, tokens, hidden size]."""
        ids = self._batch(micro_batch).inputs["input_ids"]
        return (*ids.shape, self.model.config.get_text_config().hidden_size)

    @property
    def _has_whole_head(self) -> bool:
        """True if this stage computes the whole head."""
        return self.part.last and self.part.head == (0, 1)

    def head_shape(self, micro_batch: int) -> tuple[int, int]:
        """Return the shape of `head_input`."""
        return len(self._batch(micro_batch).predict), self.model.config.get_text_config().hidden_size

    def forward(self, micro_batch: int, received: Tensor | None, training: bool) -> Tensor | None:
        """Return hidden states for the next stage; None on the last, which computes loss or scores unless the head is
        shared.

        `received`: hidden states, None on the first stage. `training`: a B will follow.
        """
        batch = self._batch(micro_batch)
        if received is not None:
            received = received.requires_grad_(training)
            inputs = {name: tensor for name, tensor in batch.inputs.items() if name != "input_ids"}
            batch = replace(batch, inputs=inputs | {"inputs_embeds": received})
        with torch.set_grad_enabled(training):
            if not self._has_whole_head:
                with visual_embeddings(self.model, batch):
                    result = self.model.base_model(**batch.inputs, use_cache=False).last_hidden_state
                if self.part.last:
                    result = batch.predictions(result[:, batch.keep])
                    self.head_input[micro_batch] = result.detach()
            elif training:
                result = self._loss(batch, micro_batch)
            else:
                self.scores[micro_batch] = batch.split_later(self._score(batch))
                result = None
        if training:
            self._kept[micro_batch] = _ForwardState(received, result)
        else:
            self._batches.pop(micro_batch)
        return None if self.part.last else result.detach()

    def backward(self, micro_batch: int, gradient: Tensor | None, whole: bool) -> Tensor | None:
        """Return the gradient of the input of F, None on the first stage. `whole=False` defers weight gradients to W.

        `gradient`: of the output of F, None on the last stage.
        """
        kept = self._kept.pop(micro_batch)
        self._batches.pop(micro_batch)
        gradient = self.head_gradient.pop(micro_batch, gradient)
        self.tape.deferring = not whole
        torch.autograd.backward(kept.result, gradient)
        if not whole:
            self._pending[micro_batch] = self.tape.take()
        return None if kept.received is None else kept.received.grad

    def weight_gradients(self, micro_batch: int) -> None:
        """Compute the weight gradients that B deferred (W)."""
        split_backward.run(self._pending.pop(micro_batch))

    def head(
        self, micro_batch: int, hidden: Tensor, training: bool, gather: Callable[[Tensor], Tensor], answers: bool
    ) -> Tensor | None:
        """Run forward and backward of a share of the head; return its part of the gradient of `hidden` in training.

        `hidden`: the last stage's `head_input`. `gather`: gathers all shares' statistics (`vocab_parallel_log_probs`).
        `answers`: this device records scores and diagnostics, which are equal on all devices.
        """
        batch, coefficient = self._batch(micro_batch), self.config.actor.entropy_coeff
        with torch.set_grad_enabled(training):
            hidden = hidden.requires_grad_(training)
            logits = scale_logits(self.config, self.model.lm_head(hidden))
            found, entropy = vocab_parallel_log_probs(logits, batch.targets, self.model.lm_head.first_id, gather)
            if not training:
                self._batches.pop(micro_batch)
                if answers:
                    self.scores[micro_batch] = batch.split_later(found)
                return None
            loss = actor_loss_from_log_probs(self.config, batch, found, entropy if coefficient else entropy.detach())
        self.tape.deferring = False
        self._accumulate(loss, batch, micro_batch, answers).backward()
        return hidden.grad

    def _batch(self, micro_batch: int) -> Batch:
        if micro_batch not in self._batches:
            rows = self.micro_batches[micro_batch].rows
            if not self.part.first:  # clips are inserted at the embedding
                rows = [replace(row, visual=()) for row in rows]
            self._batches[micro_batch] = collate(rows, self.packed, self.device)
        return self._batches[micro_batch]

    def _loss(self, batch: Batch, micro_batch: int) -> Tensor:
        objective = actor_loss if self.name == "actor" else critic_loss
        return self._accumulate(objective(self.config, self.model, batch), batch, micro_batch)

    def _accumulate(self, of: Loss, batch: Batch, micro_batch: int, answers: bool = True) -> Tensor:
        """Return the weighted loss; add its diagnostics to the sums and store the old log-probs of its rows, if
        missing."""
        (loss, sums), weight = of, self.micro_batches[micro_batch].weight
        if answers and (gained := old_log_probs_from_update(self.name, self.micro_batches[micro_batch].rows, batch)):
            self.scores[micro_batch] = gained
        for name, value in sums.items() if answers else ():
            self.sums[name] = self.sums.get(name, 0.0) + value.double() * weight
        return weighted_loss(loss, weight)

    def _score(self, batch: Batch) -> Tensor:
        if self.name == "critic":
            return response_values(self.model, batch)
        return log_probs(self.config, self.model, batch)


def _hidden_states(model: PreTrainedModel, packed: bool) -> dict[str, Any]:
    """Return inputs of a later stage: random hidden states of four tokens as `inputs_embeds`."""
    ids = np.arange(4, 8, dtype=np.int32)
    batch = collate([Row(ids[:1], ids[1:])], packed, model.device)
    width = model.config.get_text_config().hidden_size
    hidden = torch.randn(1, 4, width, generator=torch.Generator().manual_seed(0)).to(model.device, model.dtype)
    inputs = {name: each for name, each in batch.inputs.items() if name != "input_ids"}
    return inputs | {"inputs_embeds": hidden, "use_cache": False}


@torch.no_grad()
def check_first_layer(model: PreTrainedModel, packed: bool) -> None:
    """Raise EngineError for a class that changes embeddings before its first layer, because every stage would repeat
    the change on the hidden states that it receives."""
    inputs, taken = _hidden_states(model, packed), []

    def take(_: torch.nn.Module, positional: tuple, named: dict) -> None:
        taken.append(positional[0] if positional else named["hidden_states"])

    with model.base_model.layers[0].register_forward_pre_hook(take, with_kwargs=True):
        model.base_model(**inputs)
    if not torch.equal(taken[0], inputs["inputs_embeds"]):
        raise EngineError(
            f"training.pipeline_parallel_size above 1: a {type(model).__name__} changes embeddings before its "
            "first layer, and every stage would repeat the change; set it to 1."
        )


def check_training_passes(model: PreTrainedModel, packed: bool, role: str) -> None:
    """Raise EngineError if a stage draws random numbers in training mode (`check_repeatable`)."""
    inputs = _hidden_states(model, packed)
    check_repeatable(model, lambda: model.base_model(**inputs), role)


@torch.no_grad()
def check_head(model: PreTrainedModel, packed: bool) -> None:
    """Raise EngineError for a class whose logits are not the head applied to the hidden states of its body, because
    shares of the head would skip the additional operations."""
    inputs, taken = _hidden_states(model, packed), []
    wide = torch.linspace(-300.0, 300.0, model.lm_head.out_features).to(model.device, model.dtype)

    def answer(_: torch.nn.Module, given: tuple[Tensor], logits: Tensor) -> Tensor:
        taken.append(given[0])
        return torch.zeros_like(logits) + wide  # a cap only affects large logits

    with model.lm_head.register_forward_hook(answer):
        found = model(**inputs).logits
    made = model.base_model(**inputs).last_hidden_state
    whole = [each.shape for each in taken] == [made.shape] and found.shape == (*made.shape[:-1], *wide.shape)
    if not whole or not torch.allclose(taken[0], made, rtol=0.02, atol=1e-4) or (found.float() != wide.float()).any():
        raise EngineError(
            f"training.vocabulary_parallel=true: a {type(model).__name__} has operations besides its head between "
            "layers and logits, which stages can't share; set it to false."
        )


def body(model: PreTrainedModel, vocabulary: int) -> Callable:
    """Return the stage's layers on random embeddings as a function like a causal language model, for
    `packs_exactly`."""
    base, width = model.base_model, model.config.get_text_config().hidden_size
    table = torch.randn(vocabulary, width, generator=torch.Generator().manual_seed(0)).to(model.device, model.dtype)

    def run(input_ids: Tensor, logits_to_keep: int | Tensor, **inputs):
        hidden = base(inputs_embeds=table[input_ids], **inputs).last_hidden_state
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return type("Output", (), {"logits": hidden[:, keep]})

    return run
