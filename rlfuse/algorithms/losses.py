"""Losses of policy and critic, and their aggregation, exact under any split into micro-batches.

Role: called by trainer ranks for each micro-batch. Pure functions of padded tensors: `[B, T]` float32, B whole
responses of at most T tokens, `mask` [B, T] 1 on response tokens; log-probs in nats.
Invariants:
- loss functions give a matrix, never a mean. `loss_sum` adds it up unnormalised; the one division is by `loss_divisor`
  of the *whole* mini-batch. So micro-batches, ranks and pipelines may split rows as they like, with the same gradient;
- diagnostics are unnormalised sums over response tokens: add them up and divide once by the number of tokens;
- what stands at masked-out positions reaches neither a loss nor a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlfuse.algorithms.registry import Registry, call

AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
LOSS_MODES = Registry("actor.loss_mode")
_CHUNK_ELEMENTS = 1 << 24  # vocabulary rows are upcast in pieces of at most this many numbers (64 MiB in float32)


def loss_sum(matrix: Tensor, mask: Tensor, mode: str, max_tokens: int | None = None) -> Tensor:
    """Scalar: the micro-batch's part of the loss, to be divided by `loss_divisor` of the whole mini-batch.

    token-mean weighs every token alike (DAPO, Yu et al. 2025, arXiv 2503.14476); seq-mean-token-mean every response
    alike (GRPO, Shao et al. 2024, arXiv 2402.03300); seq-mean-token-sum adds tokens up within a response;
    seq-mean-token-sum-norm also divides by the constant `max_tokens` (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783).
    """
    _check_mode(mode, max_tokens)
    sums = mask_response(matrix, mask).sum(-1)
    if mode == "seq-mean-token-mean":
        sums = sums / mask.sum(-1).clamp(min=1)
    elif mode == "seq-mean-token-sum-norm":
        sums = sums / max_tokens
    return sums.sum()


def loss_divisor(response_lengths: Sequence[int] | np.ndarray, mode: str, max_tokens: int | None = None) -> float:
    """What the `loss_sum`s of a mini-batch are divided by: its response tokens (token-mean), else its responses.

    `response_lengths` [samples of the whole mini-batch], in response tokens; rows of length 0 are padding, not counted.
    """
    _check_mode(mode, max_tokens)
    lengths = np.asarray(response_lengths)
    count = float(lengths.sum() if mode == "token-mean" else (lengths > 0).sum())
    if count == 0:
        raise ValueError(
            "The mini-batch has no response token, so its mean loss is undefined: drop empty responses first."
        )
    return count


def mask_response(x: Tensor, mask: Tensor) -> Tensor:
    """`x` with 0 beside response tokens, whatever stood there."""
    return torch.where(mask.bool(), x, torch.zeros_like(x))


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    clip_c: float | None,
    mode: str = "vanilla",
    is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss per token [B, T], and detached sums over tokens: `ppo_kl`, k1's estimate of KL(old || new), and the mode's.

    The mode's function is given by name what it has parameters for, all 0 beyond the response, and returns the loss, or
    (loss, sums). `is_weights` [B, T], constants, multiply the loss: see `corrections.truncated_importance_weights`.
    """
    function = LOSS_MODES.find(mode)
    new, old, advantages = (mask_response(each, mask) for each in (log_probs, old_log_probs, advantages))
    given = {"log_probs": new, "old_log_probs": old, "advantages": advantages, "mask": mask}
    found = call(function, given | {"clip_low": clip_low, "clip_high": clip_high, "clip_c": clip_c})
    loss, sums = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
    loss = LOSS_MODES.check_result(mode, loss, log_probs)
    if is_weights is not None:
        loss = loss * mask_response(is_weights.detach(), mask)
    kl = -(new - old).detach().clamp(-20.0, 20.0).sum()
    return loss, {name: each.detach().to(loss.device).float() for name, each in sums.items()} | {"ppo_kl": kl}


@LOSS_MODES.built_in()
def vanilla(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    clip_c: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped objective (Schulman et al. 2017, arXiv 1707.06347), loss per token [B, T] and sums.

    It has separate ranges below and above 1 (DAPO, Yu et al. 2025, arXiv 2503.14476); for negative advantages the loss
    is at most `clip_c` times -advantage (dual clip, Ye et al. 2020, arXiv 1912.09729; None turns it off).
    """
    loss, clipped = _clipped(log_probs - old_log_probs, advantages, clip_low, clip_high)
    clipped_lower = torch.zeros_like(clipped)
    if clip_c is not None:
        ceiling = -advantages * clip_c
        clipped_lower = (advantages < 0) & (loss > ceiling)
        loss = torch.where(advantages < 0, torch.minimum(loss, ceiling), loss)
    return loss, {"pg_clipfrac": clipped.sum(), "pg_clipfrac_lower": clipped_lower.sum()}


@LOSS_MODES.built_in()
def gspo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clip around the ratio of whole responses (Zheng et al. 2025, arXiv 2507.18071), as `vanilla` returns it.

    It has no dual clip. See `_gspo_log_ratio`; aggregate it with seq-mean-token-mean.
    """
    log_ratio = _gspo_log_ratio(log_probs - old_log_probs, mask)
    loss, clipped = _clipped(log_ratio, advantages, clip_low, clip_high)
    return loss, {"pg_clipfrac": clipped.sum(), "pg_clipfrac_lower": torch.zeros_like(clipped).sum()}


def _clipped(log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """The loss per token, and where the clip decides."""
    ratio = log_ratio.clamp(-20.0, 20.0).exp()
    free = -advantages * ratio
    loss = torch.maximum(free, -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high))
    return loss, loss > free


def _gspo_log_ratio(token_log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Log of s_i(theta) = exp(mean over t of log pi - log old) for every token of response i, [B, T].

    The value at each token is log s_i; the gradient is routed through that token alone:
    s_it = sg[s_i] * pi_it / sg[pi_it], sg = stop gradient (GSPO-token, section 4.3 of the paper).
    Averaged over the response's tokens this gives the value and the gradient of s_i itself, since
    d s_i = s_i * mean over t of d log pi_it; with advantages that differ by token each token keeps its own.
    """
    mean = token_log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return mask_response(token_log_ratio - token_log_ratio.detach() + mean.detach(), mask)


def value_loss(
    values_new: Tensor, values_old: Tensor, returns: Tensor, mask: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """Clipped squared error per token [B, T], and the number of tokens where the clip decides (scalar).

    0.5 * max((new - returns)^2, (new clipped to old +- clip - returns)^2), the value clip of OpenAI's implementation of
    PPO (Schulman et al. 2017, arXiv 1707.06347, itself has none); values, returns and `clip` in reward units.
    """
    new, old, target = (mask_response(x, mask) for x in (values_new, values_old, returns))
    free = (new - target).square()
    clipped = (torch.clamp(new, old - clip, old + clip) - target).square()
    return 0.5 * torch.maximum(free, clipped), (clipped > free).sum().float()


def log_probs_from_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-prob in nats of each target: logits [..., V], targets [...] int -> [...], in float32 or wider.

    Keeps for the backward pass the logits as they came (bfloat16 stays bfloat16) and one number per row; the float32
    copy and the softmax exist only for a slice of rows at a time. Rows that are not contiguous are copied first.
    """
    return _LogProbs.apply(logits, targets)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy in nats of each row: logits [..., V] -> [...], in float32 or wider.

    Memory as `log_probs_from_logits`. Logits of -inf contribute nothing. Call it under `torch.no_grad()` when the
    entropy is only logged.
    """
    return _Entropy.apply(logits)


def vocab_parallel_log_probs(
    logits: Tensor, targets: Tensor, first: int, gather: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropy) [R] of whole rows from a share of their logits, [R, v] those of the tokens from `first` on.

    By online softmax, as Vocabulary Parallelism has it (arXiv 2411.05288): `gather` gives all shares' statistics
    [shares, 4, R] for this one's [4, R], the only exchange. Every holder of a share computes the same; the gradient is
    that of its own logits. Memory as `log_probs_from_logits`; in float32 or wider.
    """
    return _ShareLogProbs.apply(logits, targets, first, gather)


def vocab_shard_statistics(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """[4, R] of a share: highest logit, sum of exp(x) of x = logit - highest, sum of x exp(x), the target's logit.

    The last is 0 where another share has the target. Logits of -inf count for nothing.
    """
    found = logits.new_empty(4, len(logits), dtype=_wide(logits))
    picks, inside = _inside(targets, first, logits.shape[-1])
    for part in _slices(logits):
        wide = logits[part].to(found.dtype)
        highest = wide.amax(-1).clamp(min=torch.finfo(found.dtype).min)
        below = wide - highest[:, None]
        weights = below.exp()
        found[0, part], found[1, part] = highest, weights.sum(-1)
        found[2, part] = torch.where(weights == 0, 0.0, below.mul_(weights)).sum(-1)
        found[3, part] = torch.where(inside[part], wide.gather(-1, picks[part, None]).squeeze(-1), 0.0)
    return found


def _inside(targets: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Where each target stands in a share, 0 for those of others; and whether it does."""
    inside = (first <= targets) & (targets < first + size)
    return torch.where(inside, targets - first, 0), inside


class _ShareLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, logits: Tensor, targets: Tensor, first: int, gather: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        highest, weights, products, target = gather(vocab_shard_statistics(logits, targets, first)).unbind(1)
        top = highest.amax(0)
        below = highest - top
        scale = below.exp()
        total = (weights * scale).sum(0)
        spread = total.log()  # kept apart from `top`, beside which it may be small
        entropy = spread - ((products + weights * below) * scale).sum(0) / total
        ctx.first = first
        ctx.save_for_backward(logits, targets, top, spread, entropy)
        return target.sum(0) - top - spread, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, of_log_probs: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor, None, None, None]:
        logits, targets, top, spread, entropy = ctx.saved_tensors
        picks, inside = _inside(targets, ctx.first, logits.shape[-1])
        grad = torch.zeros_like(logits)
        for part in _slices(logits):
            probs = (logits[part].to(top.dtype) - top[part, None]).sub_(spread[part, None]).exp_()
            if of_entropy is not None:  # dH / dlogit = -p * (log p + H)
                tilted = torch.special.entr(probs) - probs * entropy[part, None]
                grad[part] += tilted.mul_(of_entropy[part, None])
            if of_log_probs is not None:
                upstream = of_log_probs[part, None]
                own = torch.where(inside[part, None], upstream, 0.0)
                grad[part] += probs.mul_(-upstream).scatter_add_(-1, picks[part, None], own)
        return grad, None, None, None


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor) -> Tensor:
        rows, picks = _rows(logits), targets.reshape(-1, 1)
        normaliser = rows.new_empty(len(rows), dtype=_wide(rows))
        out = torch.empty_like(normaliser)
        for part in _slices(rows):
            wide = rows[part].to(_wide(rows))
            normaliser[part] = wide.logsumexp(-1)
            out[part] = wide.gather(-1, picks[part]).squeeze(-1) - normaliser[part]
        ctx.save_for_backward(logits, targets, normaliser)
        return out.view(targets.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor) -> tuple[Tensor, None]:
        logits, targets, normaliser = ctx.saved_tensors
        rows, picks = _rows(logits), targets.reshape(-1, 1)
        upstream, grad = grad_out.reshape(-1, 1), torch.empty_like(rows)
        for part in _slices(rows):
            probs = (rows[part].to(_wide(rows)) - normaliser[part, None]).exp_()
            grad[part] = probs.mul_(-upstream[part]).scatter_add_(-1, picks[part], upstream[part])
        return grad.view(logits.shape), None


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor) -> Tensor:
        rows = _rows(logits)
        out = rows.new_empty(len(rows), dtype=_wide(rows))
        for part in _slices(rows):
            out[part] = torch.special.entr(rows[part].to(_wide(rows)).softmax(-1)).sum(-1)
        ctx.save_for_backward(logits, out)
        return out.view(logits.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor) -> Tensor:
        logits, entropy = ctx.saved_tensors
        rows = _rows(logits)
        upstream, grad = grad_out.reshape(-1, 1), torch.empty_like(rows)
        for part in _slices(rows):
            probs = rows[part].to(_wide(rows)).softmax(-1)
            # dH / dlogit = -p * (log p + H)
            grad[part] = (torch.special.entr(probs) - probs * entropy.view(-1, 1)[part]).mul_(upstream[part])
        return grad.view(logits.shape)


def _rows(logits: Tensor) -> Tensor:
    return logits.reshape(-1, logits.shape[-1])


def _wide(rows: Tensor) -> torch.dtype:
    return torch.promote_types(rows.dtype, torch.float32)


def _slices(rows: Tensor) -> list[slice]:
    size = max(1, _CHUNK_ELEMENTS // rows.shape[-1])
    return [slice(start, start + size) for start in range(0, len(rows), size)]


def _check_mode(mode: str, max_tokens: int | None) -> None:
    if mode not in AGG_MODES:
        raise ValueError(f"actor.loss_agg_mode={mode!r} is not known; use one of {', '.join(AGG_MODES)}.")
    if mode == "seq-mean-token-sum-norm" and (max_tokens is None or max_tokens < 1):
        raise ValueError(
            f"actor.loss_agg_mode={mode} divides by max_tokens, received {max_tokens}: "
            "pass data.max_response_length (at least 1)."
        )
