"""Fused log-probs, entropy and their gradient against float64, and against torch in the type of the logits.

(9) of README.md. On a CPU the kernels need TRITON_INTERPRET=1; tests/unit/test_fused_log_probs.py runs this file so.
"""

import math

import pytest

pytest.importorskip("triton")
import torch

from rlfuse.algorithms.losses import entropy_from_logits, log_probs_from_logits
from rlfuse.engines.trainer.fused_log_probs import fused_log_probs

ROWS = 6


def _logits(device, size, dtype, forbidden=True):
    """Return rows: one large, one with a single likely token; some tokens are -inf in all rows."""
    found = 3 * torch.randn(ROWS, size, generator=torch.Generator().manual_seed(size))
    found[1] += 1000.0
    found[2, 0] += 80.0
    if forbidden:
        found[:, [1, size - 2]] = -math.inf
    return found.to(device, dtype)


def _targets(device, size):
    return torch.tensor([0, 3, size - 1, 5, 2, 7]).to(device)


def _torch(logits, targets, temperature, dtype):
    """Return the results of torch operations in this type, with logits / temperature in float32."""
    scaled = (logits.float() / temperature).to(dtype)
    return log_probs_from_logits(scaled, targets), entropy_from_logits(scaled)


def _gradient(function, logits, targets, temperature, weights):
    """Return (log-probs, entropy, gradient of their weighted sum); outputs with weight None are not differentiated."""
    leaf = logits.detach().clone().requires_grad_()
    found = function(leaf * 1, targets, temperature)
    sum((each * weight).sum() for each, weight in zip(found, weights, strict=True) if weight is not None).backward()
    return *(each.detach() for each in found), leaf.grad


def _weights(device, learned):
    weights = torch.randn(2, ROWS, generator=torch.Generator().manual_seed(1)).to(device)
    return [weights[i] if name in learned else None for i, name in enumerate(("log_probs", "entropy"))]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("size", [11, 4096, 9973])
@pytest.mark.parametrize("learned", ["log_probs", "entropy", "log_probs and entropy"])
def test_float32_agrees_with_float64(device, learned, size, temperature):
    given = _logits(device, size, torch.float32), _targets(device, size), temperature
    weights = _weights(device, learned)
    found = _gradient(fused_log_probs, *given, weights)
    exact = _gradient(lambda *each: _torch(*each, torch.float64), *given, weights)
    for have, want in zip(found, exact, strict=True):
        assert have.dtype == torch.float32
        torch.testing.assert_close(have.double(), want.double(), rtol=1e-6, atol=2e-6)
    print(f"{size} tokens: off by {max(float((a - b).abs().max()) for a, b in zip(found, exact, strict=True)):.1e}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_16_bit_types_are_rounded_once(device, temperature, dtype):
    """Triton's interpreter truncates to bfloat16, while GPUs round to nearest."""
    given = _logits(device, 5000, dtype), _targets(device, 5000), temperature
    weights = _weights(device, "log_probs and entropy")
    found = _gradient(fused_log_probs, *given, weights)
    exact = _gradient(lambda *each: _torch(*each, torch.float64), given[0].float(), *given[1:], weights)
    for have, want in zip(found[:2], exact[:2], strict=True):
        torch.testing.assert_close(have.double(), want, rtol=1e-6, atol=2e-6)
    assert found[2].dtype == dtype
    share = 0.5 if found[2].is_cuda or dtype == torch.float16 else 1.0
    rtol = share * torch.finfo(dtype).eps + 1e-5
    torch.testing.assert_close(found[2].double(), exact[2].double(), rtol=rtol, atol=1e-6)


def test_logits_of_any_layout(device):
    """Strided rows, strided columns, one row expanded, and no rows."""
    wide, targets = _logits(device, 60, torch.float32), _targets(device, 30)
    for view in (lambda x: x[:, :30], lambda x: x[:, ::2], lambda x: x.T[:30].T, lambda x: x[:1, :30].expand(ROWS, 30)):
        leaf, twin = (wide.clone().requires_grad_() for _ in range(2))
        sum(each.sum() for each in fused_log_probs(view(leaf), targets, 1.0)).backward()
        sum(each.sum() for each in _torch(view(twin), targets, 1.0, torch.float32)).backward()
        torch.testing.assert_close(leaf.grad, twin.grad, rtol=1e-5, atol=1e-5)
        assert torch.equal(leaf.detach(), wide) or view(wide).is_contiguous()
    empty = torch.empty(0, 30, device=device, requires_grad=True)
    sum(each.sum() for each in fused_log_probs(empty * 1, targets[:0], 1.0)).backward()
    assert empty.grad.shape == (0, 30)


def test_the_gradient_replaces_the_logits(device):
    leaf, targets = _logits(device, 30, torch.bfloat16).requires_grad_(), _targets(device, 30)
    logits, places = leaf * 1, []
    logits.register_hook(lambda gradient: places.append(gradient.data_ptr()))
    log_probs, _ = fused_log_probs(logits, targets, 0.7)
    log_probs.sum().backward(retain_graph=True)
    assert places == [logits.data_ptr()]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_probs.sum().backward()


def test_logits_that_are_referenced_elsewhere_are_reported(device):
    leaf = _logits(device, 30, torch.float32, forbidden=False).requires_grad_()
    log_probs, _ = fused_log_probs(leaf.tanh(), _targets(device, 30), 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_probs.sum().backward()


def test_nan_is_propagated(device):
    """A target outside the vocabulary, a NaN and a row of -inf give NaN, so that the step is skipped."""
    logits, targets = _logits(device, 30, torch.float32), _targets(device, 30)
    targets[0], targets[3], logits[1, 4], logits[2] = 30, -1, math.nan, -math.inf
    log_probs, entropy = fused_log_probs(logits, targets, 1.0)
    assert log_probs[:4].isnan().all() and log_probs[4:].isfinite().all() and entropy[1:3].isnan().all()
