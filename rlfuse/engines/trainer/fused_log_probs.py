"""Fused log-probs and entropy of response tokens on GPUs: one pass over the logits, gradient computed in place.

`algorithms.losses` computes the same, and is the reference in tests. Needs four float32 numbers per row in addition to
the logits, which the gradient overwrites. Memory plans run it on meta tensors, where no kernel is launched.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_fused(logits: Tensor) -> bool:
    """Return whether the kernels support these logits."""
    return logits.is_cuda and logits.dtype in _TYPES and not unavailable(logits.device.type)


@cache
def unavailable(device: str) -> str:
    """Return why the kernels cannot run on `device`, found by one launch; empty if they can, and for `cpu`."""
    if device == "cpu":
        return ""
    try:
        from rlfuse.engines.trainer import vocabulary_kernels

        logits, results = torch.zeros(1, 2, device=device), torch.empty(4, 1, device=device)
        vocabulary_kernels.forward(logits, torch.zeros(1, dtype=torch.int64, device=device), results, 1.0)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # e.g. no Triton, no C compiler or a read-only cache folder
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return ""


def fused_log_probs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return (log-probs of the targets, entropy), float32 [r], of logits [r, V] / `temperature`.

    The backward pass overwrites the logits, so no other backward may need them. Autograd raises if one does, except if
    saved-tensor hooks store them (`activation_offloading`). Non-contiguous logits are copied first.
    """
    return _Fused.apply(logits, targets, temperature)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        logits, targets = logits.contiguous(), targets.contiguous()
        results = logits.new_empty(4, len(logits), dtype=torch.float32)
        if len(logits) and not logits.is_meta:
            from rlfuse.engines.trainer import vocabulary_kernels  # loads Triton, which takes a second

            vocabulary_kernels.forward(logits, targets, results, temperature)
        ctx.save_for_backward(logits, targets, results)
        ctx.temperature = temperature
        return results[0].clone(), results[1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, of_log_probs: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor, None, None]:
        logits, targets, results = ctx.saved_tensors
        if of_log_probs is None:
            of_log_probs = torch.zeros_like(results[0])
        if len(logits) and not logits.is_meta:
            from rlfuse.engines.trainer import vocabulary_kernels

            upstream = [each if each is None else each.float().contiguous() for each in (of_log_probs, of_entropy)]
            vocabulary_kernels.backward(logits, targets, results, *upstream, ctx.temperature)
        torch.autograd.graph.increment_version(logits)
        return logits.detach(), None, None
