"""The backward pass in two: gradients of inputs now, gradients of linear layers' weights now or later.

Role: `split_linears` prepares a stage's model; the stage then chooses for every backward whether its `Tape` computes
weight gradients at once (whole backward) or keeps what they need until `run` (the W of Zero Bubble, Qi et al. 2023,
arXiv 2401.10241).

Invariants: the two ways do the same arithmetic. A linear layer's weight gets its gradient from the tape alone, never
from autograd; norms, biases' owners that are no linear layers, and embeddings get theirs in B. After B only inputs and
output gradients of the linear layers are alive, since autograd's graph is gone by then, and after W nothing is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Pending = list[tuple[torch.nn.Linear, Tensor, Tensor]]
"""(layer, its input, the gradient of its output) of one micro-batch's backward."""


@dataclass(slots=True)
class Tape:
    """What a backward pass leaves to do for weights. Used by one thread; one backward at a time."""

    deferring: bool = False
    pending: Pending = field(default_factory=list)

    def add(self, layer: torch.nn.Linear, input: Tensor, gradient: Tensor) -> None:
        """Called by every linear layer's backward."""
        if self.deferring:
            self.pending.append((layer, input, gradient))
        else:
            _accumulate(layer, input, gradient)

    def take(self) -> Pending:
        """What was deferred since the last call."""
        pending, self.pending = self.pending, []
        return pending


def run(pending: Pending) -> None:
    """Add the weight gradients that a backward left, and let go of what they needed."""
    while pending:
        _accumulate(*pending.pop())


@torch.no_grad()
def _accumulate(layer: torch.nn.Linear, input: Tensor, gradient: Tensor) -> None:
    rows, columns = gradient.reshape(-1, layer.out_features), input.reshape(-1, layer.in_features)
    if layer.weight.grad is not None and layer.weight.grad.dtype == rows.dtype:
        layer.weight.grad.addmm_(rows.t(), columns)
    else:
        _add(layer.weight, rows.t() @ columns)
    if layer.bias is not None:
        _add(layer.bias, rows.sum(0))


def _add(parameter: torch.nn.Parameter, gradient: Tensor) -> None:
    """As autograd does: in the dtype of the parameter's sums."""
    gradient = gradient.to(parameter.grad_dtype)
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


class _Linear(torch.autograd.Function):
    """A linear map whose backward gives the input's gradient and tells the tape about the weight's."""

    @staticmethod
    def forward(ctx, input: Tensor, layer: torch.nn.Linear, tape: Tape) -> Tensor:
        ctx.layer, ctx.tape = layer, tape
        ctx.save_for_backward(input)
        return torch.nn.functional.linear(input, layer.weight, layer.bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        (input,) = ctx.saved_tensors
        ctx.tape.add(ctx.layer, input, gradient)
        return gradient @ ctx.layer.weight, None, None


class SplitLinear(torch.nn.Linear):
    """A linear layer whose weight gradient goes through a tape. Its input must need a gradient when training."""

    tape: Tape

    def forward(self, input: Tensor) -> Tensor:
        return _Linear.apply(input, self, self.tape)


def split_linears(model: torch.nn.Module, tape: Tape) -> None:
    """Make every linear layer of `model` a `SplitLinear`, in place: parameters and their names stay."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__, module.tape = SplitLinear, tape
