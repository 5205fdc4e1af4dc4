"""A stage at work: forward, backward and weight gradients of numbered micro-batches.

Role: the executor calls `forward`, `backward` and `weight_gradients` in the order of a schedule; the rank hands over
the micro-batches before (`begin`) and takes what the last stage computed after.
Invariants: what F keeps lives until the whole B, or until W where the backward is split; losses and diagnostics are
unnormalised sums, like a `TrainerRank`'s; a micro-batch that has no B leaves only its scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlfuse.config.schema import Config
from rlfuse.engines.pipeline import split_backward
from rlfuse.engines.pipeline.partition import Part
from rlfuse.engines.trainer.model_inputs import Batch, collate
from rlfuse.engines.trainer.models import response_values, visual_embeddings
from rlfuse.engines.trainer.passes import actor_loss, critic_loss, log_probs, log_probs_gained, weighed
from rlfuse.samples import MicroBatch


class DeviceStages(torch.nn.ModuleDict):
    """All stages of a model on one device, by number: what a DeepSpeed engine takes as its module."""

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


@dataclass(slots=True)
class _Kept:
    """Of a micro-batch between its F and its B."""

    received: Tensor | None
    result: Tensor
    """Hidden states, or the loss on the last stage."""


class Stage:
    """One stage of `actor`, `critic` or `ref` on this device."""

    def __init__(self, config: Config, name: str, model: PreTrainedModel, part: Part, packed: bool, device: str):
        self.config, self.name, self.model, self.part = config, name, model, part
        self.packed, self.device, self.dtype = packed, device, model.dtype
        self.tape = split_backward.Tape()
        if name != "ref":
            split_backward.split_linears(model, self.tape)
        self._kept: dict[int, _Kept] = {}
        self._pending: dict[int, split_backward.Pending] = {}
        self.sums: dict[str, Tensor] = {}

    def begin(self, micro_batches: Sequence[MicroBatch]) -> None:
        """The micro-batches of this stage's pipeline, numbered as in the schedule that is about to run."""
        self.micro_batches = list(micro_batches)
        self._batches: dict[int, Batch] = {}
        self.scores: dict[int, list[np.ndarray]] = {}
        self._kept.clear()
        self._pending.clear()

    def shape(self, micro_batch: int) -> tuple[int, ...]:
        """Of the hidden states that go in and out: [sequences, tokens, hidden size]."""
        ids = self._batch(micro_batch).inputs["input_ids"]
        return (*ids.shape, self.model.config.get_text_config().hidden_size)

    def forward(self, micro_batch: int, received: Tensor | None, training: bool) -> Tensor | None:
        """Hidden states for the next stage, None on the last, which computes loss or scores.

        `received`: hidden states, None on the first stage. `training`: a B will follow.
        """
        batch = self._batch(micro_batch)
        if received is not None:
            received = received.requires_grad_(training)
            inputs = {name: tensor for name, tensor in batch.inputs.items() if name != "input_ids"}
            batch = replace(batch, inputs=inputs | {"inputs_embeds": received})
        with torch.set_grad_enabled(training):
            if not self.part.last:
                with visual_embeddings(self.model, batch):
                    result = self.model.base_model(**batch.inputs, use_cache=False).last_hidden_state
            elif training:
                result = self._loss(batch, micro_batch)
            else:
                self.scores[micro_batch] = batch.split(self._score(batch))
                result = None
        if training:
            self._kept[micro_batch] = _Kept(received, result)
        else:
            self._batches.pop(micro_batch)
        return None if self.part.last else result.detach()

    def backward(self, micro_batch: int, gradient: Tensor | None, whole: bool) -> Tensor | None:
        """The gradient of what F received, None on the first stage. Not `whole`: weights' gradients wait for W.

        `gradient`: of what F returned, None on the last stage.
        """
        kept = self._kept.pop(micro_batch)
        self._batches.pop(micro_batch)
        self.tape.deferring = not whole
        torch.autograd.backward(kept.result, gradient)
        if not whole:
            self._pending[micro_batch] = self.tape.take()
        return None if kept.received is None else kept.received.grad

    def weight_gradients(self, micro_batch: int) -> None:
        """W: what B left."""
        split_backward.run(self._pending.pop(micro_batch))

    def _batch(self, micro_batch: int) -> Batch:
        if micro_batch not in self._batches:
            rows = self.micro_batches[micro_batch].rows
            if not self.part.first:  # clips stand where tokens are embedded
                rows = [replace(row, visual=()) for row in rows]
            self._batches[micro_batch] = collate(rows, self.packed, self.device)
        return self._batches[micro_batch]

    def _loss(self, batch: Batch, micro_batch: int) -> Tensor:
        rows, weight = self.micro_batches[micro_batch].rows, self.micro_batches[micro_batch].weight
        loss, sums = (actor_loss if self.name == "actor" else critic_loss)(self.config, self.model, batch)
        if gained := log_probs_gained(self.name, rows, batch):
            self.scores[micro_batch] = gained
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value.double() * weight
        return weighed(loss, weight)

    def _score(self, batch: Batch) -> Tensor:
        if self.name == "critic":
            return response_values(self.model, batch)
        return log_probs(self.config, self.model, batch)[0]


def body(model: PreTrainedModel, vocabulary: int) -> Callable:
    """The stage's layers as a function like a causal language model, for `packs_exactly`: of random embeddings."""
    base, width = model.base_model, model.config.get_text_config().hidden_size
    table = torch.randn(vocabulary, width, generator=torch.Generator().manual_seed(0)).to(model.device, model.dtype)

    def run(input_ids: Tensor, logits_to_keep: int | Tensor, **inputs):
        hidden = base(inputs_embeds=table[input_ids], **inputs).last_hidden_state
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return type("Output", (), {"logits": hidden[:, keep]})

    return run
