"""Triton kernels over rows of logits: one read for log-probs and entropy, one read and one write for the gradient.

Role: launched by `fused_log_probs` on CUDA tensors; TRITON_INTERPRET=1 runs them on CPUs. One program per row; sums are
float32 for any dtype of logits. Logits of -inf contribute nothing, as in `algorithms.losses`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 4096, 8
_LOWEST = tl.constexpr(-3e38)  # finite initial maximum, as -inf - -inf is NaN


@triton.jit
def _scaled(logits, at, inside, temperature, SCALE: tl.constexpr):
    x = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x, temperature) if SCALE else x


@triton.jit
def _forward(logits, targets, results, rows, size, temperature, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """Fill `results` [4, rows]: log-prob, entropy, highest logit, log of the sum of exp(logit - highest)."""
    row = tl.program_id(0).to(tl.int64)
    highest, total, products = _LOWEST, 0.0, 0.0  # products: sum of (logit - highest) * exp(logit - highest)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = _scaled(logits, row * size + columns, columns < size, temperature, SCALE)
        top = tl.maximum(highest, tl.max(x, 0))
        shift = tl.where(total == 0.0, 0.0, highest - top)
        below = x - top
        weights = tl.exp(below)
        products = (products + total * shift) * tl.exp(shift) + tl.sum(
            tl.where(weights == 0.0, 0.0, below * weights), 0
        )
        total = total * tl.exp(shift) + tl.sum(weights, 0)
        highest = top
    target = tl.load(targets + row)
    valid = (target >= 0) & (target < size)  # an invalid target gives NaN, which skips the step
    chosen = tl.load(logits + row * size + target, mask=valid, other=float("nan")).to(tl.float32)
    if SCALE:
        chosen = tl.div_rn(chosen, temperature)
    spread = tl.log(total)
    tl.store(results + row, chosen - highest - spread)
    tl.store(results + rows + row, spread - products / total)
    tl.store(results + 2 * rows + row, highest)
    tl.store(results + 3 * rows + row, spread)


@triton.jit
def _backward(
    logits,
    targets,
    results,
    of_log_probs,
    of_entropy,
    rows,
    size,
    temperature,
    LEARNS_ENTROPY: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Overwrite the logits with their gradient; `results` are those of `_forward`."""
    row = tl.program_id(0).to(tl.int64)
    target, upstream = tl.load(targets + row), tl.load(of_log_probs + row)
    highest, spread = tl.load(results + 2 * rows + row), tl.load(results + 3 * rows + row)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        at, inside = row * size + columns, columns < size
        log_probs = _scaled(logits, at, inside, temperature, SCALE) - highest - spread
        probs = tl.exp(log_probs)
        gradient = tl.where(columns == target, upstream, 0.0) - probs * upstream
        if LEARNS_ENTROPY:  # dH / dlogit = -p * (log p + H)
            entropy, of = tl.load(results + rows + row), tl.load(of_entropy + row)
            gradient -= tl.where(probs == 0.0, 0.0, probs * (log_probs + entropy)) * of
        if SCALE:
            gradient = tl.div_rn(gradient, temperature)
        tl.store(logits + at, gradient.to(logits.dtype.element_ty), mask=inside)


def _options(size: int, temperature: float) -> dict[str, int | bool]:
    return {"SCALE": temperature != 1.0, "BLOCK": min(_BLOCK, triton.next_power_of_2(size)), "num_warps": _WARPS}


def forward(logits: Tensor, targets: Tensor, results: Tensor, temperature: float) -> None:
    """Fill `results`, float32 [4, rows], from contiguous logits [rows, V] and int64 targets [rows]."""
    rows, size = logits.shape
    _forward[(rows,)](logits, targets, results, rows, size, temperature, **_options(size, temperature))


def backward(
    logits: Tensor,
    targets: Tensor,
    results: Tensor,
    of_log_probs: Tensor,
    of_entropy: Tensor | None,
    temperature: float,
) -> None:
    """Overwrite the logits with their gradient, given float32 [rows] gradients of log-probs and optionally entropy."""
    rows, size = logits.shape
    learns, options = of_entropy is not None, _options(size, temperature)
    upstream = of_log_probs, of_entropy if learns else of_log_probs
    _backward[(rows,)](logits, targets, results, *upstream, rows, size, temperature, LEARNS_ENTROPY=learns, **options)
