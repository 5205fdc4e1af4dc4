"""Split backward pass: input gradients immediately, weight gradients of linear layers immediately or later.

A `Tape` computes weight gradients in B or later in `run` (the W of Zero Bubble, Qi et al. 2023, arXiv 2401.10241),
with the same arithmetic. Norms, other biases and embeddings get their gradients in B. After B only inputs and output
gradients of linear layers are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlfuse.engines.trainer.tensor_parallel import ShardedLinear

Weights = tuple[torch.nn.Parameter, torch.nn.Parameter | None]
"""Weight and bias of a linear layer."""
Pending = list[tuple[Weights, Tensor, Tensor]]
"""(weights, input, output gradient) of the linear layers in the backward pass of a micro-batch."""


@dataclass(slots=True)
class Tape:
    """Record of deferred weight gradients. Not thread-safe; one backward pass at a time."""

    deferring: bool = False
    pending: Pending = field(default_factory=list)

    def add(self, weights: Weights, input: Tensor, gradient: Tensor) -> None:
        """Compute or defer a weight gradient; called in the backward pass of every linear layer."""
        if self.deferring:
            self.pending.append((weights, input, gradient))
        else:
            _accumulate(weights, input, gradient)

    def take(self) -> Pending:
        """Return what was deferred since the last call."""
        pending, self.pending = self.pending, []
        return pending


def run(pending: Pending) -> None:
    """Add the deferred weight gradients and release their inputs."""
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
    """Add to the gradient in the parameter's `grad_dtype`, as autograd does."""
    gradient = gradient.to(parameter.grad_dtype)
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


class _Linear(torch.autograd.Function):
    """Linear map whose backward returns the input gradient and passes the weight gradient to a tape."""

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
    """Linear layer with a tape for its weight gradient. In training its input must require a gradient."""

    tape: Tape

    def forward(self, input: Tensor) -> Tensor:
        return _Linear.apply(input, (self.weight, self.bias), self.tape)


def split_linears(model: torch.nn.Module, tape: Tape) -> None:
    """Convert every linear layer of `model`, and tensor-parallel shares of them, to use `tape`, in place.

    Parameters and their names stay the same.
    """
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__, module.tape = SplitLinear, tape
        elif isinstance(module, ShardedLinear):
            module.multiply = partial(_multiply, tape)


def _multiply(tape: Tape, input: Tensor, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None = None) -> Tensor:
    return _Linear.apply(input, (weight, bias), tape)
