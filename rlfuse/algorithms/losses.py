"""Policy and value losses and their aggregation, exact under any split into micro-batches.

Pure functions of padded tensors: `[B, T]` float32, B whole responses of at most T tokens, `mask` [B, T] 1 on response
tokens; log-probs in nats.
Invariants:
- loss functions give a matrix, never a mean. `loss_sum` adds it up unnormalised; the one division is by `loss_divisor`
  of the *whole* mini-batch. So micro-batches, ranks and pipelines may split rows as they like, with the same gradient;
- diagnostics are unnormalised sums over response tokens: add them up and divide once by the number of tokens;
- masked-out positions affect neither losses nor gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlfuse.algorithms.registry import NO_KWARGS, Registry

AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
LOSS_MODES = Registry("actor.loss_mode")
_CHUNK_ELEMENTS = 1 << 24  # most logits upcast at a time (64 MiB in float32)


def loss_sum(matrix: Tensor, mask: Tensor, mode: str, max_tokens: int | None = None) -> Tensor:
    """Return the micro-batch's share of the loss (scalar), to be divided by `loss_divisor` of the whole mini-batch.

    token-mean weighs every token equally (DAPO, Yu et al. 2025, arXiv 2503.14476), seq-mean-token-mean every response
    (GRPO, Shao et al. 2024, arXiv 2402.03300); seq-mean-token-sum sums tokens within a response;
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
    """Return the divisor of a mini-batch's `loss_sum`s: its response tokens (token-mean), else its responses.

    `response_lengths` [samples of the whole mini-batch], in response tokens; rows of length 0 are padding.
    """
    _check_mode(mode, max_tokens)
    lengths = np.asarray(response_lengths)
    count = float(lengths.sum() if mode == "token-mean" else (lengths > 0).sum())
    if count == 0:
        raise ValueError(
            "The mini-batch has no response tokens, so its mean loss is undefined: drop empty responses first."
        )
    return count


def mask_response(x: Tensor, mask: Tensor) -> Tensor:
    """Return `x` with 0 at masked-out positions, even if they hold NaN."""
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
    selected: Tensor | None = None,
    kwargs: Mapping[str, Any] = NO_KWARGS,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss per token [B, T] and detached sums over tokens: `ppo_kl` (k1 of KL(old || new)) and the mode's.

    The loss function of `mode` receives the arguments that match its parameter names, 0 at masked-out positions, and
    `kwargs`; it returns the loss or (loss, sums). `is_weights` [B, T] are detached importance weights that multiply the
    loss, see `corrections.correction_weights`. Arguments of single modes: `selected` [B, T], see `covariance`, and
    `options`, such as `tau_pos`.
    """
    new, old, advantages = (mask_response(each, mask) for each in (log_probs, old_log_probs, advantages))
    given = {"log_probs": new, "old_log_probs": old, "advantages": advantages, "mask": mask}
    given |= {"clip_low": clip_low, "clip_high": clip_high, "clip_c": clip_c, **options}
    if selected is not None:
        given["selected"] = mask_response(selected, mask)
    found = LOSS_MODES.call(mode, given, kwargs)
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
    """Compute PPO's clipped objective (Schulman et al. 2017, arXiv 1707.06347): loss per token [B, T] and sums.

    The importance ratio is clipped to [1 - clip_low, 1 + clip_high] (clip-higher: DAPO, Yu et al. 2025, arXiv
    2503.14476). Dual clip: for negative advantages the loss is at most `clip_c` times -advantage (Ye et al. 2020, arXiv
    1912.09729; None disables it).
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
    """Compute GSPO's objective with sequence-level importance ratios (Zheng et al. 2025, arXiv 2507.18071).

    Returns the same as `vanilla`; there is no dual clip. Use it with actor.loss_agg_mode=seq-mean-token-mean.
    """
    log_ratio = _gspo_log_ratio(log_probs - old_log_probs, mask)
    loss, clipped = _clipped(log_ratio, advantages, clip_low, clip_high)
    return loss, {"pg_clipfrac": clipped.sum(), "pg_clipfrac_lower": torch.zeros_like(clipped).sum()}


@LOSS_MODES.built_in()
def cispo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute CISPO's objective (MiniMax-M1; MiniMax 2025, arXiv 2506.13585): loss per token [B, T] and sums.

    REINFORCE weighted by the importance ratio, clipped to [1 - clip_low, 1 + clip_high] and without a gradient. So
    every token has a gradient, also beyond the clip range.
    """
    ratio = _ratio(log_probs - old_log_probs).detach()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * advantages * log_probs, {"pg_clipfrac": (weight != ratio).sum()}


@LOSS_MODES.built_in()
def gpg(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """Compute the plain policy gradient of GPG (Chu et al. 2025, arXiv 2504.02546), without a ratio: loss [B, T]."""
    return -advantages * log_probs


@LOSS_MODES.built_in()
def sapo(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, tau_pos: float, tau_neg: float) -> Tensor:
    """Compute SAPO's objective (soft adaptive policy optimization; Gao et al. 2025, arXiv 2511.20347): loss [B, T].

    The gate 4 / tau * sigmoid(tau * (ratio - 1)) replaces the clip. Its slope is 1 at ratio 1 and decays on both sides,
    faster for larger tau, which is `tau_pos` for positive advantages and `tau_neg` otherwise.
    Use it with actor.loss_agg_mode=seq-mean-token-mean.
    """
    ratio = _ratio(log_probs - old_log_probs)
    tau = torch.full_like(ratio, tau_neg).masked_fill(advantages > 0, tau_pos)
    return -advantages * torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau


@LOSS_MODES.built_in()
def clip_cov(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, selected: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute Clip-Cov (Cui et al. 2025, arXiv 2505.22617): PPO's clipped objective, 0 on the `selected` tokens.

    `selected` [B, T]: 1 on tokens with a high covariance, see `covariance.select_tokens`. There is no dual clip.
    `pg_clipfrac` counts the selected tokens, as in verl.
    """
    loss, _ = _clipped(log_probs - old_log_probs, advantages, clip_low, clip_high)
    return torch.where(selected > 0, 0.0, loss), {"pg_clipfrac": (selected > 0).sum()}


@LOSS_MODES.built_in()
def kl_cov(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, selected: Tensor, ppo_kl_coef: float
) -> Tensor:
    """Compute KL-Cov (Cui et al. 2025, arXiv 2505.22617): loss [B, T] with a KL penalty on the `selected` tokens.

    The unclipped objective; on tokens with a high covariance (`selected`, as in `clip_cov`) plus `ppo_kl_coef` times
    |log-ratio|, the paper's estimate of the KL to the old policy.
    """
    log_ratio = log_probs - old_log_probs
    return -advantages * _ratio(log_ratio) + ppo_kl_coef * torch.where(selected > 0, log_ratio.abs(), 0.0)


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-20.0, 20.0).exp()


def _clipped(log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Return the clipped loss per token, and the tokens whose ratio was clipped."""
    ratio = _ratio(log_ratio)
    free = -advantages * ratio
    loss = torch.maximum(free, -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high))
    return loss, loss > free


def _gspo_log_ratio(token_log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Return log s_i(theta), s_i = exp(mean over t of log pi - log old), for every token of response i, [B, T].

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
    """Return the clipped squared error per token [B, T], and the number of clipped tokens (scalar).

    0.5 * max((new - returns)^2, (new clipped to old +- clip - returns)^2): value clipping as in OpenAI's implementation
    of PPO (the paper, Schulman et al. 2017, arXiv 1707.06347, has none). Values, returns, `clip` in reward units.
    """
    new, old, target = (mask_response(x, mask) for x in (values_new, values_old, returns))
    free = (new - target).square()
    clipped = (torch.clamp(new, old - clip, old + clip) - target).square()
    return 0.5 * torch.maximum(free, clipped), (clipped > free).sum().float()


def log_probs_from_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the log-prob of each target in nats: logits [..., V], targets [...] int -> [...], in float32 or wider.

    Saves for the backward pass only the logits in their dtype and one number per row; float32 copies and softmax exist
    for a slice of rows at a time. Non-contiguous rows are copied first.
    """
    return _LogProbs.apply(logits, targets)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Return the entropy of each row in nats: logits [..., V] -> [...], in float32 or wider.

    Uses as little memory as `log_probs_from_logits`. Logits of -inf contribute 0. Call it under `torch.no_grad()` if
    the entropy is only logged.
    """
    return _Entropy.apply(logits)


def vocab_parallel_log_probs(
    logits: Tensor, targets: Tensor, first: int, gather: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return (log-probs, entropy) [R] from this rank's vocabulary shard of the logits, [R, v], tokens from `first` on.

    Online softmax as in Vocabulary Parallelism (arXiv 2411.05288): `gather` all-gathers the statistics, [4, R] to
    [shards, 4, R], the only communication. All ranks get the same result, each the gradient of its own logits. Memory
    as in `log_probs_from_logits`; float32 or wider.
    """
    return _ShareLogProbs.apply(logits, targets, first, gather)


def vocab_shard_statistics(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """Return a shard's statistics [4, R]: max logit, sum of exp(x) for x = logit - max, sum of x exp(x), target logit.

    The target logit is 0 if another shard holds the target. Logits of -inf contribute 0.
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
    """Return each target's index in a shard (0 if it is in another), and whether it is in this one."""
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
        spread = total.log()  # not added to `top`, which may be much larger
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
