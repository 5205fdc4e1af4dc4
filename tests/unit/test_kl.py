"""KL estimators compared with exact enumeration of a small vocabulary; values of the adaptive coefficient."""

import math

import pytest
import torch

from rlfuse.algorithms import kl

POLICY = [0.5, 0.2, 0.2, 0.1]
REFERENCE = [0.25, 0.4, 0.05, 0.3]
EXACT = sum(p * math.log(p / q) for p, q in zip(POLICY, REFERENCE, strict=True))


def expectation(kind: str) -> float:
    per_token = kl.kl_estimate(torch.tensor(POLICY).double().log(), torch.tensor(REFERENCE).double().log(), kind)
    return sum(p * x for p, x in zip(POLICY, per_token.tolist(), strict=True))


def test_k1_and_k3_are_unbiased_and_k2_and_abs_match_their_definitions():
    logs = [math.log(p / q) for p, q in zip(POLICY, REFERENCE, strict=True)]
    assert expectation("k1") == pytest.approx(EXACT, rel=1e-6)
    assert expectation("k3") == pytest.approx(EXACT, rel=1e-6)
    assert expectation("k2") == pytest.approx(sum(p * x * x / 2 for p, x in zip(POLICY, logs, strict=True)), rel=1e-6)
    assert expectation("abs") == pytest.approx(sum(p * abs(x) for p, x in zip(POLICY, logs, strict=True)), rel=1e-6)


@pytest.mark.parametrize(("name", "alias"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")])
def test_aliases(name, alias):
    assert expectation(name) == expectation(alias)
    assert {name, alias} <= set(kl.KL_KINDS)


def test_example_values():
    new, ref = torch.tensor([0.0, 0.0]), torch.tensor([1.0, -2.0])
    assert kl.kl_estimate(new, ref, "k1").tolist() == [-1.0, 2.0]
    assert kl.kl_estimate(new, ref, "abs").tolist() == [1.0, 2.0]
    assert kl.kl_estimate(new, ref, "k2").tolist() == [0.5, 2.0]
    assert kl.kl_estimate(new, ref, "k3").tolist() == pytest.approx([math.e - 2, math.exp(-2) + 1], rel=1e-6)


def test_k3_is_between_0_and_10():
    log_ratio = torch.cat([torch.linspace(-60, 60, 2001), torch.linspace(-1e-3, 1e-3, 2001)])
    k3 = kl.kl_estimate(torch.zeros_like(log_ratio), log_ratio, "k3")
    assert k3.min() >= 0 and k3.max() == 10
    assert kl.kl_estimate(torch.zeros(1), torch.zeros(1), "k3").item() == 0


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_expected_gradients_of_the_loss_match_the_documentation(kind):
    """Compare with the gradient of KL(policy || reference) for k2, of KL(reference || policy) for k3, and 0 for k1."""
    logits = torch.tensor(POLICY).double().log().requires_grad_()
    reference = torch.tensor(REFERENCE).double()
    log_probs = logits.log_softmax(-1)
    sampled = log_probs.detach().exp()  # samples do not depend on the parameters
    (sampled * kl.kl_estimate(log_probs, reference.log(), kind)).sum().backward()
    exact = logits.detach().clone().requires_grad_()
    policy = exact.softmax(-1)
    divergence = {
        "k1": 0 * policy.sum(),
        "k2": (policy * (policy.log() - reference.log())).sum(),
        "k3": (reference * (reference.log() - policy.log())).sum(),
    }[kind]
    divergence.backward()
    torch.testing.assert_close(logits.grad, exact.grad, rtol=1e-6, atol=1e-8)


def test_unknown_kind_lists_the_valid_ones():
    with pytest.raises(ValueError, match=r"'k4'.*k1, kl, abs, k2, mse, k3, low_var_kl"):
        kl.kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


@pytest.mark.parametrize(
    ("measured", "factor"),
    [(6.0, 1.0), (6.6, 1.01), (5.4, 0.99), (60.0, 1.02), (0.0, 0.98)],  # n / horizon = 0.1; errors +-0.1, clipped +-0.2
)
def test_adaptive_coefficient_examples(measured, factor):
    control = kl.AdaptiveKl(0.1, target=6.0, horizon=1000)
    control.update(measured, 100)
    assert control.value == pytest.approx(0.1 * factor, rel=1e-12)


def test_adaptive_coefficient_is_restored_from_a_checkpoint():
    control = kl.AdaptiveKl(0.1, target=6.0, horizon=1000)
    control.update(9.0, 100)
    resumed = kl.AdaptiveKl(0.1, target=6.0, horizon=1000)
    resumed.load_state_dict(control.state_dict())
    for c in (control, resumed):
        c.update(2.0, 50)
    assert resumed.value == control.value != 0.1


@pytest.mark.parametrize(("start", "target", "expected"), [(0.2, 6.0, 0.2), (0.1, None, 0.1), (0.1, 3.0, None)])
def test_changed_coefficient_setting_overrides_the_checkpoint(start, target, expected):
    """Load a checkpoint under new settings; `expected` None means that the adapted value is kept."""
    control = kl.AdaptiveKl(0.1, target=6.0, horizon=1000)
    control.update(9.0, 100)
    resumed = kl.AdaptiveKl(start, target=target, horizon=1000)
    resumed.load_state_dict(control.state_dict())
    assert resumed.value == (expected or control.value)


def test_adaptive_coefficient_rejects_nan():
    control = kl.AdaptiveKl(0.1, target=1.0, horizon=100)
    with pytest.raises(ValueError, match=r"nan"):
        control.update(math.nan, 10)
    assert control.value == 0.1
