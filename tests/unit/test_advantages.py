"""Advantage estimators against manually computed values and per-token loops."""

import math
import statistics

import pytest
import torch

from rlfuse.algorithms import advantages as adv

LENGTHS = [3, 1, 5, 4, 2, 5]
GROUPS = torch.tensor([7, 2, 7, 2, 7, 9])


def batch(seed: int = 0, width: int = 5, junk: float = 0.0):
    """Return (token rewards, values, mask) with `junk` at every padded position."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(len(LENGTHS), 5, generator=generator) for _ in range(2))
    mask = torch.zeros(len(LENGTHS), width)
    out = [torch.full((len(LENGTHS), width), junk) for _ in range(2)]
    for i, length in enumerate(LENGTHS):
        mask[i, :length] = 1
        out[0][i, :length], out[1][i, :length] = rewards[i, :length], values[i, :length]
    return out[0], out[1], mask


def whitened_reference(rows: list[list[float]]) -> list[list[float]]:
    tokens = [x for row in rows for x in row]
    mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
    return [[(x - mean) / math.sqrt(variance + 1e-8) for x in row] for row in rows]


def assert_rows(result: torch.Tensor, expected: list[list[float]], atol: float = 1e-5) -> None:
    for row, want in zip(result, expected, strict=True):
        padded = want + [0.0] * (len(row) - len(want))
        torch.testing.assert_close(row, torch.tensor(padded), atol=atol, rtol=1e-5)


def test_gae_against_manual_values():
    # gamma 0.5, lam 0.5, rewards 0 0 1, values 1 2 3:
    # deltas 0+1-1=0, 0+1.5-2=-0.5, 1+0-3=-2; advantages -2, -0.5-0.5=-1, 0-0.25=-0.25
    advantages, returns = adv.gae(
        torch.tensor([[0.0, 0.0, 1.0, 9.0]]),
        torch.tensor([[1.0, 2.0, 3.0, 9.0]]),
        torch.tensor([[1, 1, 1, 0]]),
        gamma=0.5,
        lam=0.5,
    )
    assert advantages.tolist() == [[-0.25, -1.0, -2.0, 0.0]]
    assert returns.tolist() == [[0.75, 1.0, 1.0, 0.0]]


def test_gae_equals_the_discounted_sum_of_td_errors_of_the_paper():
    rewards, values, mask = batch(1)
    gamma, lam = 0.9, 0.7
    expected = []
    for i, n in enumerate(LENGTHS):
        r, v = rewards[i, :n].tolist(), [*values[i, :n].tolist(), 0.0]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(n)]
        expected.append([sum((gamma * lam) ** k * delta[t + k] for k in range(n - t)) for t in range(n)])
    advantages, returns = adv.gae(rewards, values, mask, gamma, lam)
    assert_rows(advantages, expected)
    assert_rows(returns, [[a + values[i, t].item() for t, a in enumerate(row)] for i, row in enumerate(expected)])


def test_gae_undiscounted_is_return_minus_value():
    rewards, values, mask = batch(2)
    advantages, returns = adv.gae(rewards, values, mask, 1.0, 1.0)
    future = [[sum(rewards[i, t:n].tolist()) for t in range(n)] for i, n in enumerate(LENGTHS)]
    assert_rows(returns, future)
    assert_rows(advantages, [[g - values[i, t].item() for t, g in enumerate(row)] for i, row in enumerate(future)])


def test_gae_skips_a_gap_between_response_tokens():
    rewards, values = torch.tensor([[0.5, 1.0, -1.0]]), torch.tensor([[0.2, 0.4, 0.1]])
    mask = torch.tensor([[1, 0, 1, 0, 1]])
    spread = [torch.tensor([[x[0, 0], 99.0, x[0, 1], math.nan, x[0, 2]]]) for x in (rewards, values)]
    dense = adv.gae(rewards, values, torch.ones(1, 3), 0.9, 0.8)
    sparse = adv.gae(*spread, mask, 0.9, 0.8)
    for a, b in zip(dense, sparse, strict=True):
        assert torch.equal(a, b[:, ::2])
        assert b[0, 1] == b[0, 3] == 0


def test_whitening_against_the_statistics_module():
    rewards, _, mask = batch(3, junk=math.nan)
    rows = [rewards[i, :n].tolist() for i, n in enumerate(LENGTHS)]
    assert_rows(adv.whiten(rewards, mask), whitened_reference(rows))


# Scores of three groups: 7 with 1, 2, 6 (3, 5, 2 tokens), 2 with 5, 5 (1, 4 tokens), 9 with 4 (5 tokens).
ALL_EQUAL_OR_ALONE = 3  # responses without a gradient: group 2 and group 9
BASELINES = {
    "opo": [(1 * 3 + 2 * 5 + 6 * 2) / 10, 5.0, 4.0],
    "gpg": [3.0, 5.0, 4.0],
    "reinforce_plus_plus_baseline": [3.0, 5.0, 4.0],
}


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("n", [1, 3])
def test_group_baselines_against_manual_values(name, n):
    scores = torch.tensor([1.0, 5.0, 2.0, 5.0, 6.0, 4.0])
    _, _, mask = batch()
    rewards = adv.place_at_end(scores, mask)
    advantages, returns = adv.advantages_and_returns(name, rewards, None, GROUPS, mask, n=n)
    first, second, alone = BASELINES[name]
    alone = 0.0 if n == 1 else alone  # a group of size one keeps its score unless its other responses were lost
    expected = [1 - first, 5 - second, 2 - first, 5 - second, 6 - first, 4 - alone]
    factor = 6 / (6 - ALL_EQUAL_OR_ALONE) if name == "gpg" else 1.0
    assert_rows(advantages, [[factor * a] * length for a, length in zip(expected, LENGTHS, strict=True)])
    assert torch.equal(advantages, returns)


def test_remax_subtracts_the_greedy_score_from_every_return():
    rewards, _, mask = batch(5)
    baselines = torch.tensor([0.5, -1.0, 0.5, -1.0, 0.5, 2.0])
    future = [[sum(rewards[i, t:n].tolist()) for t in range(n)] for i, n in enumerate(LENGTHS)]
    advantages, returns = adv.advantages_and_returns("remax", rewards, None, None, mask, 0.5, baselines=baselines)
    assert_rows(returns, future)
    assert_rows(advantages, [[g - baselines[i].item() for g in row] for i, row in enumerate(future)])
    with pytest.raises(ValueError, match="remax needs baselines, got None: pass the score of each prompt's greedy"):
        adv.advantages_and_returns("remax", rewards, None, None, mask)


def test_gpg_with_equal_rewards_has_no_gradient():
    scores, mask = torch.full((6,), 0.1), batch()[2]
    assert not adv.gpg(scores, GROUPS, mask, n=3).any()


def test_grpo_against_manual_values():
    # group 7: 1, 2, 6 -> mean 3, sample deviation sqrt((4+1+9)/2) = sqrt 7; group 2: 5, 5 -> std 0; group 9: one score
    scores = torch.tensor([1.0, 5.0, 2.0, 5.0, 6.0, 4.0])
    _, _, mask = batch()
    s = math.sqrt(7) + 1e-6
    per_row = [-2 / s, 0.0, -1 / s, 0.0, 3 / s, 4.0 / (1 + 1e-6)]
    assert_rows(adv.grpo(scores, GROUPS, mask, True), [[a] * n for a, n in zip(per_row, LENGTHS, strict=True)])
    per_row = [-2.0, 0.0, -1.0, 0.0, 3.0, 4.0]
    assert_rows(adv.grpo(scores, GROUPS, mask, False), [[a] * n for a, n in zip(per_row, LENGTHS, strict=True)])


@pytest.mark.parametrize("estimator", ["grpo", "gdpo", "rloo"])
def test_a_response_without_scored_siblings_has_zero_advantage(estimator):
    scores, mask, groups = torch.tensor([[20.0], [1.0], [3.0]]), torch.ones(3, 1), torch.tensor([0, 1, 1])
    alone, *pair = adv.advantages_and_returns(estimator, scores, None, groups, mask, n=2)[0].flatten().tolist()
    assert alone == 0 and pair[1] == -pair[0] > 0.5
    single, *_ = adv.advantages_and_returns(estimator, scores, None, torch.arange(3), mask, n=1)[0].flatten().tolist()
    assert single == pytest.approx(20.0, rel=1e-5)


def test_gdpo_ignores_a_reward_that_only_one_sibling_has():
    columns = torch.tensor([[20.0, 1.0], [math.nan, 1.0]])
    found = adv.gdpo(columns, torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.ones(2, 1), True, n=2)
    assert found.abs().max() == 0


def test_grpo_group_with_zero_std_has_no_rounding_noise():
    scores, mask = torch.full((3,), 0.1), torch.ones(3, 2)
    assert adv.grpo(scores, torch.zeros(3, dtype=torch.long), mask, True).abs().max() < 1e-9


def test_rloo_against_leave_one_out_loops():
    scores = torch.tensor([1.0, 5.0, 2.0, -3.0, 6.0, 4.0])
    _, _, mask = batch()
    expected = []
    for i, n in enumerate(LENGTHS):
        others = [scores[j].item() for j in range(len(LENGTHS)) if j != i and GROUPS[j] == GROUPS[i]]
        baseline = sum(others) / len(others) if others else 0.0
        expected.append([scores[i].item() - baseline] * n)
    assert_rows(adv.rloo(scores, GROUPS, mask), expected)


def test_group_estimates_are_independent_of_the_rest_of_the_batch():
    scores = torch.tensor([0.3, 1.7, 2.9, -3.0, 0.4, 4.0])
    _, _, mask = batch()
    in_group = GROUPS == 7
    for estimate in (adv.rloo, lambda s, g, m: adv.grpo(s, g, m, True)):
        assert torch.equal(
            estimate(scores, GROUPS, mask)[in_group], estimate(scores[in_group], GROUPS[in_group], mask[in_group])
        )


def test_reinforce_plus_plus_against_loops():
    rewards, _, mask = batch(4, junk=5.0)
    gamma = 0.8
    returns = [
        [sum(gamma ** (k - t) * rewards[i, k].item() for k in range(t, n)) for t in range(n)]
        for i, n in enumerate(LENGTHS)
    ]
    got_advantages, got_returns = adv.reinforce_plus_plus(rewards, mask, gamma)
    assert_rows(got_returns, returns)
    assert torch.equal(got_advantages, got_returns)
    assert_rows(adv.whiten(got_advantages, mask), whitened_reference(returns))


def test_rewards_are_placed_at_the_last_token():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 0, 1]])
    placed = adv.place_at_end(torch.tensor([2.0, -1.0, 3.0]), mask)
    assert placed.tolist() == [[0, 2, 0], [-1, 0, 0], [0, 0, 3]]
    assert placed.dtype == torch.float32


def test_empty_responses_are_refused():
    with pytest.raises(ValueError, match=r"Rows \[1\]"):
        adv.place_at_end(torch.ones(2), torch.tensor([[1, 0], [0, 0]]))


@pytest.mark.parametrize("estimator", adv.ESTIMATORS)
def test_padding_does_not_change_the_result(estimator):
    def estimate(width: int, junk: float):
        rewards, values, mask = batch(5, width, junk)
        more = {"baselines": torch.linspace(-1, 1, 6), "old_log_probs": values, "ref_log_probs": rewards}
        return adv.advantages_and_returns(estimator, rewards, values, GROUPS, mask, 0.95, 0.9, True, **more)

    for narrow, wide in zip(estimate(5, 0.0), estimate(9, math.nan), strict=True):
        assert torch.equal(narrow, wide[:, :5])
        assert not wide[:, 5:].any()
        assert narrow.dtype == torch.float32


def test_the_dispatcher_equals_its_estimators():
    rewards, values, mask = batch(6)
    scores = rewards.double().sum(-1)

    def run(name, by_std=True):
        return adv.advantages_and_returns(name, rewards, values, GROUPS, mask, 0.9, 0.8, by_std)

    raw, returns = adv.gae(rewards, values, mask, 0.9, 0.8)
    assert torch.equal(run("gae")[0], raw)
    assert torch.equal(run("gae")[1], returns)
    torch.testing.assert_close(run("grpo")[0], adv.grpo(scores, GROUPS, mask, True))
    torch.testing.assert_close(run("grpo", False)[1], adv.grpo(scores, GROUPS, mask, False))
    torch.testing.assert_close(run("rloo")[0], adv.rloo(scores, GROUPS, mask))
    assert torch.equal(run("reinforce_plus_plus")[0], adv.reinforce_plus_plus(rewards, mask, 0.9)[0])


def test_invalid_calls_are_reported_with_a_remedy():
    rewards, values, mask = batch()
    with pytest.raises(ValueError, match=r"algorithm\.adv_estimator='ppo'.*gae, grpo, gdpo, rloo, remax, opo, gpg, "):
        adv.advantages_and_returns("ppo", rewards, values, GROUPS, mask)
    with pytest.raises(ValueError, match="needs values"):
        adv.advantages_and_returns("gae", rewards, None, GROUPS, mask)
    with pytest.raises(ValueError, match="needs groups"):
        adv.advantages_and_returns("rloo", rewards, values, None, mask)
