"""Losses compared with scalar loops and example cases; aggregation is exact for any split into micro-batches."""

import math

import pytest
import torch

from rlfuse.algorithms import losses
from rlfuse.config.schema import Config
from rlfuse.engines.trainer.micro_batch_losses import scale_logits

LENGTHS = [3, 1, 5, 4, 2, 5]
MASK = torch.tensor([[float(t < n) for t in range(5)] for n in LENGTHS])
MAX_TOKENS = 8
SELECTED = torch.tensor([[float((i + t) % 3 == 0) for t in range(5)] for i in range(6)])
OPTIONS = {"tau_pos": 1.5, "tau_neg": 2.0, "ppo_kl_coef": 0.7}


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one(x: float) -> torch.Tensor:
    return torch.tensor([[x]])


def reference_mean_loss(matrix: list[list[float]], mode: str) -> float:
    rows = [row[:n] for row, n in zip(matrix, LENGTHS, strict=True)]
    if mode == "token-mean":
        return sum(sum(row) for row in rows) / sum(LENGTHS)
    per_row = {
        "seq-mean-token-sum": [sum(row) for row in rows],
        "seq-mean-token-mean": [sum(row) / len(row) for row in rows],
        "seq-mean-token-sum-norm": [sum(row) / MAX_TOKENS for row in rows],
    }[mode]
    return sum(per_row) / len(rows)


@pytest.mark.parametrize("mode", losses.AGG_MODES)
def test_aggregation_against_loops(mode):
    matrix = randn(0, 6, 5)
    got = losses.loss_sum(matrix, MASK, mode, MAX_TOKENS) / losses.loss_divisor(LENGTHS, mode, MAX_TOKENS)
    assert got.item() == pytest.approx(reference_mean_loss(matrix.tolist(), mode), rel=1e-12)


@pytest.mark.parametrize("loss_mode", losses.LOSS_MODES)
@pytest.mark.parametrize("mode", losses.AGG_MODES)
@pytest.mark.parametrize("split", [[[0, 1, 2, 3, 4, 5]], [[0], [1], [2], [3], [4], [5]], [[4, 1], [0, 5, 2], [3]]])
def test_any_split_gives_the_same_loss_and_gradient(split, mode, loss_mode):
    """Pad micro-batches to their longest row and add a row of padding, as ranks do."""
    weight, inputs, old = randn(1, 7), randn(2, 6, 5, 7), randn(3, 6, 5)
    advantages = randn(4, 6, 5)
    count = losses.loss_divisor([*LENGTHS, 0, 0], mode, MAX_TOKENS)

    def loss_of(rows: list[int], w: torch.Tensor, spare_row: bool) -> torch.Tensor:
        width = max(LENGTHS[i] for i in rows)
        take = [*rows, rows[0]] if spare_row else rows
        mask = MASK[take, :width].clone()
        if spare_row:
            mask[-1] = 0
        log_probs = inputs[take, :width] @ w
        matrix, _ = losses.policy_loss(
            log_probs, old[take, :width], advantages[take, :width], mask, 0.2, 0.3, 3.0, loss_mode,
            selected=SELECTED[take, :width], **OPTIONS,
        )  # fmt: skip
        return losses.loss_sum(matrix, mask, mode, MAX_TOKENS) / count

    whole, parts = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = loss_of(list(range(6)), whole, spare_row=False)
    expected.backward()
    total = 0.0
    for rows in split:
        loss = loss_of(rows, parts, spare_row=True)
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-12, atol=1e-14)
    assert whole.grad.abs().max() > 1e-3


def test_loss_count():
    assert losses.loss_divisor([3, 0, 2], "token-mean") == 5.0
    assert losses.loss_divisor([3, 0, 2], "seq-mean-token-mean") == 2.0
    with pytest.raises(ValueError, match="no response token"):
        losses.loss_divisor([0], "token-mean")


def test_invalid_modes_are_reported_with_the_valid_ones():
    with pytest.raises(ValueError, match=r"actor\.loss_agg_mode='mean'.*token-mean"):
        losses.loss_sum(one(1.0), one(1.0), "mean")
    with pytest.raises(ValueError, match=r"received None: pass data\.max_response_length"):
        losses.loss_divisor([1], "seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match=r"actor\.loss_mode='ppo'.*vanilla, gspo"):
        losses.policy_loss(one(0.0), one(0.0), one(1.0), one(1.0), 0.2, 0.2, None, "ppo")


# ratio, advantage -> loss, gradient by log ratio, clipped, clipped by dual clip; low 0.2, high 0.3, c 3
CASES = [
    (1.1, 2.0, -2.2, -2.2, 0, 0),  # inside
    (1.5, 2.0, -2.6, 0.0, 1, 0),  # gain beyond the upper range
    (0.5, 2.0, -1.0, -1.0, 0, 0),  # good token less likely: gradient pulls it back
    (0.5, -2.0, 1.6, 0.0, 1, 0),  # gain beyond the lower range
    (1.5, -2.0, 3.0, 3.0, 0, 0),  # bad token more likely: gradient pulls it back
    (5.0, -2.0, 6.0, 0.0, 0, 1),  # the same, beyond the dual clip
    (5.0, 2.0, -2.6, 0.0, 1, 0),  # the dual clip does not apply to positive advantages
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient", "clipped", "lower"), CASES)
def test_vanilla_loss_cases(ratio, advantage, loss, gradient, clipped, lower):
    new = one(math.log(ratio)).requires_grad_()
    matrix, diagnostics = losses.policy_loss(new, one(0.0), one(advantage), one(1.0), 0.2, 0.3, 3.0)
    matrix.sum().backward()
    assert matrix.item() == pytest.approx(loss, rel=1e-6)
    assert new.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert (diagnostics["pg_clipfrac"].item(), diagnostics["pg_clipfrac_lower"].item()) == (clipped, lower)
    assert diagnostics["ppo_kl"].item() == pytest.approx(-math.log(ratio), rel=1e-6)


def test_without_dual_clip_the_loss_is_unbounded():
    matrix, diagnostics = losses.policy_loss(one(math.log(5.0)), one(0.0), one(-2.0), one(1.0), 0.2, 0.3, None)
    assert matrix.item() == pytest.approx(10.0)
    assert diagnostics["pg_clipfrac_lower"].item() == 0


def test_log_ratio_is_clamped():
    matrix, _ = losses.policy_loss(one(100.0), one(0.0), one(-1.0), one(1.0), 0.2, 0.2, None)
    assert matrix.item() == pytest.approx(math.exp(20.0), rel=1e-6)


def test_importance_weights_multiply_the_loss_and_get_no_gradient():
    new, weights = randn(5, 6, 5).requires_grad_(), (randn(6, 6, 5).exp()).requires_grad_()
    old, advantages = randn(7, 6, 5), randn(8, 6, 5)
    plain, _ = losses.policy_loss(new, old, advantages, MASK, 0.2, 0.2, 3.0)
    weighted, _ = losses.policy_loss(new, old, advantages, MASK, 0.2, 0.2, 3.0, is_weights=weights)
    torch.testing.assert_close(weighted, plain * weights.detach() * MASK)
    weighted.sum().backward()
    assert weights.grad is None and new.grad is not None


@pytest.mark.parametrize("mode", losses.LOSS_MODES)
def test_policy_loss_ignores_padding(mode):
    new, old, advantages = randn(9, 6, 5), randn(10, 6, 5), randn(11, 6, 5)
    options = {"selected": SELECTED, **OPTIONS}
    clean_matrix, clean = losses.policy_loss(new, old, advantages, MASK, 0.2, 0.2, 3.0, mode, **options)
    dirty = [torch.where(MASK.bool(), x, torch.nan).requires_grad_() for x in (new, old, advantages)]
    dirty_matrix, diagnostics = losses.policy_loss(*dirty, MASK, 0.2, 0.2, 3.0, mode, **options)
    assert torch.equal(clean_matrix, dirty_matrix)
    assert clean == diagnostics
    losses.loss_sum(dirty_matrix, MASK, "token-mean").backward()
    assert dirty[0].grad.isfinite().all() and not dirty[0].grad[MASK == 0].any()


@pytest.mark.parametrize("spread", [0.05, 1.0])
def test_gspo_is_the_clipped_objective_of_sequence_ratios(spread):
    """Compare value and gradient with autograd through equation 5 of the paper, one response at a time."""
    start, old, scores = spread * randn(12, 6, 5), spread * randn(13, 6, 5), randn(14, 6)
    direct = start.clone().requires_grad_()
    objective, clipped_tokens = 0.0, 0
    for i, n in enumerate(LENGTHS):
        ratio = torch.exp(sum(direct[i, t] - old[i, t] for t in range(n)) / n)
        bounded = min(max(ratio.item(), 0.9), 1.2)
        gain, limit = ratio * scores[i], bounded * scores[i]
        objective = objective + (gain if gain <= limit else limit)
        clipped_tokens += n * bool(gain > limit)
    expected = -objective / len(LENGTHS)
    expected.backward()

    routed = start.clone().requires_grad_()
    advantages = scores.unsqueeze(-1).expand(6, 5)
    matrix, diagnostics = losses.policy_loss(routed, old, advantages, MASK, 0.1, 0.2, 3.0, "gspo")
    mode = "seq-mean-token-mean"
    loss = losses.loss_sum(matrix, MASK, mode) / losses.loss_divisor(LENGTHS, mode)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(routed.grad, direct.grad)
    assert routed.grad.abs().max() > 1e-3
    assert diagnostics["pg_clipfrac"].item() == clipped_tokens
    assert diagnostics["pg_clipfrac_lower"].item() == 0
    if spread == 1.0:
        assert clipped_tokens > 0


def test_gspo_supports_different_token_advantages():
    new, advantages = torch.tensor([[0.1, -0.1]]).requires_grad_(), torch.tensor([[1.0, -3.0]])
    matrix, _ = losses.policy_loss(new, torch.zeros(1, 2), advantages, torch.ones(1, 2), 0.2, 0.2, None, "gspo")
    matrix.sum().backward()
    assert matrix.tolist() == [[-1.0, 3.0]] and new.grad.tolist() == [[-1.0, 3.0]]


def reference_loss(mode: str, new: torch.Tensor, old: float, a: float, selected: float) -> torch.Tensor:
    """Return the loss of one token as in the papers; clip range [0.8, 1.3]."""
    ratio = torch.exp(new - old)
    bounded = min(max(ratio.item(), 0.8), 1.3)
    if mode == "cispo":  # equation 4 of MiniMax-M1
        return -bounded * a * new
    if mode == "gpg":  # equation 6 of GPG
        return -new * a
    if mode == "sapo":  # equations 5 and 6 of SAPO
        tau = OPTIONS["tau_pos"] if a > 0 else OPTIONS["tau_neg"]
        return -a * 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))
    if mode == "kl_cov":
        return -ratio * a + (OPTIONS["ppo_kl_coef"] * (new - old) * (1 if new > old else -1) if selected else 0)
    clipped = -bounded * a if -bounded * a > (-ratio * a).item() else -ratio * a
    return 0 * new if selected else clipped + 0 * new


@pytest.mark.parametrize("mode", ["cispo", "gpg", "sapo", "clip_cov", "kl_cov"])
def test_loss_and_gradient_per_token_against_the_papers(mode):
    start, old, advantages = (0.5 * randn(seed, 6, 5) for seed in (30, 31, 32))
    new, expected = (start.clone().requires_grad_() for _ in range(2))
    options = {"selected": SELECTED, **OPTIONS}
    matrix, sums = losses.policy_loss(new, old, advantages, MASK, 0.2, 0.3, 3.0, mode, **options)
    matrix.sum().backward()
    total, outside = 0.0, 0
    for i, n in enumerate(LENGTHS):
        for t in range(n):
            of_token = (float(each[i, t]) for each in (old, advantages, SELECTED))
            loss = reference_loss(mode, expected[i, t], *of_token)
            assert matrix[i, t].item() == pytest.approx(loss.item(), rel=1e-12)
            outside += not 0.8 <= math.exp(start[i, t] - old[i, t]) <= 1.3
            total = total + loss
    total.backward()
    torch.testing.assert_close(new.grad, expected.grad, rtol=1e-12, atol=1e-14)
    counted = {"cispo": outside, "clip_cov": (SELECTED * MASK).sum().item()}.get(mode)
    assert sums.get("pg_clipfrac") == counted and 0 < outside < sum(LENGTHS)


# new, old, return -> loss, clipped, gradient; clip 0.5
VALUE_CASES = [
    (1.2, 1.0, 2.0, 0.5 * 0.64, 0, -0.8),  # inside the range
    (2.0, 1.0, 2.0, 0.5 * 0.25, 1, 0.0),  # too far towards the return: clipped
    (0.0, 1.0, 2.0, 0.5 * 4.0, 0, -2.0),  # too far from the return: the unclipped error is larger
]


@pytest.mark.parametrize(("new", "old", "target", "loss", "clipped", "gradient"), VALUE_CASES)
def test_value_loss_cases(new, old, target, loss, clipped, gradient):
    values = one(new).requires_grad_()
    matrix, count = losses.value_loss(values, one(old), one(target), one(1.0), 0.5)
    matrix.sum().backward()
    assert matrix.item() == pytest.approx(loss, rel=1e-6)
    assert count.item() == clipped
    assert values.grad.item() == pytest.approx(gradient, rel=1e-6, abs=1e-6)


def test_value_loss_ignores_padding():
    inputs = [randn(seed, 6, 5) for seed in (15, 16, 17)]
    clean, clean_count = losses.value_loss(*inputs, MASK, 0.5)
    dirty, count = losses.value_loss(*(torch.where(MASK.bool(), x, torch.nan) for x in inputs), MASK, 0.5)
    assert torch.equal(clean, dirty) and clean_count == count


def reference_softmax(row: list[float]) -> list[float]:
    top = max(row)
    weights = [math.exp(x - top) for x in row]
    return [w / sum(weights) for w in weights]


@pytest.mark.parametrize("chunk", [1, 22, 1 << 24])
def test_log_probs_and_entropy_against_loops_and_autograd(chunk, monkeypatch):
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", chunk)
    logits = (3 * randn(18, 2, 3, 11)).requires_grad_()
    targets = torch.arange(6).view(2, 3)
    log_probs, entropy = losses.log_probs_from_logits(logits, targets), losses.entropy_from_logits(logits)
    for b in range(2):
        for t in range(3):
            probs = reference_softmax(logits[b, t].tolist())
            assert log_probs[b, t].item() == pytest.approx(math.log(probs[targets[b, t]]), rel=1e-12)
            assert entropy[b, t].item() == pytest.approx(-sum(p * math.log(p) for p in probs), rel=1e-12)
    assert torch.autograd.gradcheck(lambda x: losses.log_probs_from_logits(x, targets), logits)
    assert torch.autograd.gradcheck(losses.entropy_from_logits, logits)


def test_bfloat16_logits_are_computed_in_float32_and_kept_in_bfloat16():
    logits = randn(19, 4, 50).to(torch.bfloat16).requires_grad_()
    targets = torch.tensor([0, 7, 49, 3])
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        log_probs, entropy = losses.log_probs_from_logits(logits, targets), losses.entropy_from_logits(logits)
    assert log_probs.dtype == entropy.dtype == torch.float32
    assert all(x.dtype == torch.bfloat16 for x in kept if x.numel() >= logits.numel())
    exact = logits.detach().double().log_softmax(-1)
    torch.testing.assert_close(log_probs.double(), exact.gather(-1, targets[:, None]).squeeze(-1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(-1), rtol=1e-6, atol=1e-6)
    log_probs.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("temperature, entropy_coeff, copied", [(1.0, 0.0, False), (0.7, 0.0, True), (1.0, 0.1, True)])
def test_logits_are_only_copied_if_temperature_or_entropy_require_it(monkeypatch, temperature, entropy_coeff, copied):
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", 100)
    config, targets = Config(), torch.tensor([0, 7, 49, 3])
    config.rollout.temperature, config.actor.entropy_coeff = temperature, entropy_coeff
    ours, theirs = (randn(19, 4, 50).to(torch.bfloat16).requires_grad_() for _ in range(2))
    scaled = scale_logits(config, ours)
    assert (scaled is not ours) == copied and scaled.dtype == (torch.float32 if copied else torch.bfloat16)
    found, expected = (losses.log_probs_from_logits(each, targets) for each in (scaled, theirs.float() / temperature))
    (found * torch.arange(4)).sum().backward()
    (expected * torch.arange(4)).sum().backward()
    assert torch.equal(found, expected) and torch.equal(ours.grad, theirs.grad) and ours.grad.any()


def test_entropy_ignores_masked_tokens():
    logits = torch.tensor([[0.0, 0.0, -math.inf]]).requires_grad_()
    entropy = losses.entropy_from_logits(logits)
    (entropy.sum() + losses.log_probs_from_logits(logits, torch.tensor([1])).sum()).backward()
    assert entropy.item() == pytest.approx(math.log(2))
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.5, 0.5, 0.0]]))


@pytest.mark.parametrize("chunk", [1, 22, 1 << 24])
@pytest.mark.parametrize("shares", [1, 2, 4])
def test_vocabulary_shards_match_whole_rows(shares, chunk, monkeypatch):
    """Compare log-probs, entropy and the gradient of each shard, with logits of -inf among them."""
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", chunk)
    whole, targets = 3 * randn(20, 6, 12), torch.tensor([0, 3, 5, 6, 11, 8])
    whole[:, [1, 4]] = -math.inf
    weights = randn(21, 2, 6)
    whole.requires_grad_()
    expected = losses.log_probs_from_logits(whole, targets), losses.entropy_from_logits(whole)
    sum((weight * each).sum() for weight, each in zip(weights, expected, strict=True)).backward()
    parts = whole.detach().chunk(shares, -1)
    firsts = range(0, 12, 12 // shares)
    statistics = torch.stack(
        [losses.vocab_shard_statistics(*each) for each in zip(parts, [targets] * shares, firsts, strict=True)]
    )
    for part, first in zip(parts, firsts, strict=True):
        shard = part.clone().requires_grad_()
        found = losses.vocab_parallel_log_probs(shard, targets, first, lambda _: statistics)
        for have, want in zip(found, expected, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)
        sum((weight * each).sum() for weight, each in zip(weights, found, strict=True)).backward()
        torch.testing.assert_close(shard.grad, whole.grad[:, first : first + 12 // shares], rtol=1e-12, atol=1e-12)
        found = losses.vocab_parallel_log_probs(shard, targets, first, lambda _: statistics)[0]
        (alone,) = torch.autograd.grad(found.sum(), shard)
        assert alone.isfinite().all()  # also if entropy is only logged


def test_fully_masked_shard_does_not_contribute():
    whole, targets = torch.tensor([[0.0, 1.0, -math.inf, -math.inf]]), torch.tensor([1])
    parts = zip(whole.chunk(2, -1), (0, 2), strict=True)
    statistics = torch.stack([losses.vocab_shard_statistics(part, targets, first) for part, first in parts])
    log_probs, entropy = losses.vocab_parallel_log_probs(whole[:, 2:], targets, 2, lambda _: statistics)
    assert log_probs.item() == pytest.approx(math.log(reference_softmax([0.0, 1.0])[1]))
    assert entropy.item() == pytest.approx(losses.entropy_from_logits(whole[:, :2]).item())


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_entropy_of_shards_is_accurate_for_large_logits(offset):
    """Shift all logits, which does not change the distribution; low temperatures give large logits."""
    whole, targets = 3 * randn(22, 6, 400).float() + offset, torch.arange(0, 360, 60)
    exact = whole.double().requires_grad_()
    losses.entropy_from_logits(exact).sum().backward()
    parts, firsts = whole.chunk(4, -1), range(0, 400, 100)
    statistics = torch.stack(
        [losses.vocab_shard_statistics(*each) for each in zip(parts, [targets] * 4, firsts, strict=True)]
    )
    for part, first in zip(parts, firsts, strict=True):
        shard = part.clone().requires_grad_()
        _, entropy = losses.vocab_parallel_log_probs(shard, targets, first, lambda _: statistics)
        torch.testing.assert_close(entropy, losses.entropy_from_logits(whole), rtol=1e-6, atol=2e-6)
        entropy.sum().backward()
        torch.testing.assert_close(shard.grad.double(), exact.grad[:, first : first + 100], rtol=1e-4, atol=1e-7)
