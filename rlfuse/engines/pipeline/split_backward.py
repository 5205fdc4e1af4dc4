"""The backward pass in two: gradients of inputs now, weight gradients of linear layers now or later.

Role: `split_linears` prepares a stage's model; its `Tape` computes weight gradients at once or in `run` (the W of Zero
Bubble, Qi et al. 2023, arXiv 2401.10241), also those of a rank's share of a layer (`trainer.tensor_parallel`).
Invariants: both ways do the same arithmetic. A linear layer's weight gets its gradient from the tape only; norms, other
biases and embeddings get theirs in B. After B only inputs and output gradients of linear layers are alive.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlfuse.engines.trainer.tensor_parallel import ShardedLinear

Weights = tuple[torch.nn.Parameter, torch.nn.Parameter | None]
"""Of a linear map, and its bias."""
Pending = list[tuple[Weights, Tensor, Tensor]]
"""(weights, input, the gradient of the output) of the linear maps in one micro-batch's backward."""


@dataclass(slots=True)
class Tape:
    """What a backward pass leaves to do for weights. Used by one thread; one backward at a time."""

    deferring: bool = False
    pending: Pending = field(default_factory=list)

    def add(self, weights: Weights, input: Tensor, gradient: Tensor) -> None:
        """Called by every linear map's backward."""
        if self.deferring:
            self.pending.append((weights, input, gradient))
        else:
            _accumulate(weights, input, gradient)

    def take(self) -> Pending:
        """What was deferred since the last call."""
        pending, self.pending = self.pending, []
        return pending


def run(pending: Pending) -> None:
    """Add the weight gradients that a backward left, and let go of what they needed."""
    while pending:
        _accumulate(*pending.pop())


@torch.no_grad()
def _accumulate(weights: Weights, input: Tensor, gradient: Tensor) -> None:
    weight, bias = weights
    rows, columns = gradient.reshape(-1, weight.shape[0]), input.reshape(-1, weight.shape[1])
    if weight.grad is not None and weight.grad.dtype == rows.dtype:
        weight.grad.addmm_(rows.t(), columns)
    else:
        _add(weight, rows.t() @ columns)
    if bias is not None:
        _add(bias, rows.sum(0))


def _add(parameter: torch.nn.Parameter, gradient: Tensor) -> None:
    """As autograd does: in the dtype of the parameter's sums."""
    gradient = gradient.to(parameter.grad_dtype)
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


class _Linear(torch.autograd.Function):
    """A linear map whose backward gives the input's gradient and tells the tape about the weight's."""

    @staticmethod
    def forward(ctx, input: Tensor, weights: Weights, tape: Tape) -> Tensor:
        ctx.weights, ctx.tape = weights, tape
        ctx.save_for_backward(input)
        return torch.nn.functional.linear(input, *weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        (input,) = ctx.saved_tensors
        ctx.tape.add(ctx.weights, input, gradient)
        return gradient @ ctx.weights[0], None, None


class SplitLinear(torch.nn.Linear):
    """A linear layer whose weight gradient goes through a tape. Its input must need a gradient when training."""

    tape: Tape

    def forward(self, input: Tensor) -> Tensor:
        return _Linear.apply(input, (self.weight, self.bias), self.tape)


def split_linears(model: torch.nn.Module, tape: Tape) -> None:
    """Make every linear layer of `model` a `SplitLinear`, and have shares of them multiply as one, in place.

    Parameters and their names stay.
    """
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__, module.tape = SplitLinear, tape
        elif isinstance(module, ShardedLinear):
            module.multiply = partial(_multiply, tape)


def _multiply(tape: Tape, input: Tensor, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None = None) -> Tensor:
    return _Linear.apply(input, (weight, bias), tape)
