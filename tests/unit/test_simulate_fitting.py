"""Fitting of costs to spans recovers the simulated costs, with and without outliers."""

from dataclasses import replace

import numpy as np
import pytest

from rlfuse.costs.fit import calls, fit, fit_non_negative
from rlfuse.costs.model import Costs
from rlfuse.events import Span
from rlfuse.simulate.runner import simulate
from rlfuse.simulate.workload import parse
from rlfuse.step.scoring import PASSES

WORKLOAD = parse(
    {
        "slots": 4,
        "response_tokens": {"lognormal": {"median": 60, "sigma": 1.0}, "cap": 400, "count": 256},
        "prompt_tokens": 50,
        "engine": {
            "step_base_s": 0.01,
            "step_per_sequence_s": 4e-4,
            "step_per_context_token_s": 3e-7,
            "flat_batch": 16,
            "max_sequences": 40,
            "prefill_tokens_per_s": 5000,
        },
        "scoring": {"tokens_per_s": 3000, "call_s": 0.03},
        "training": {"tokens_per_s": 2000, "call_s": 0.05, "mini_batches": 4, "optimizer_s": 0.07},
        "switch_s": 0.2,
        "step_s": 0.4,
    }
)
FITTED = ("step_base_s", "step_per_sequence_s", "step_per_context_token_s", "flat_batch", "prefill_tokens_per_s")
FITTED += ("score_tokens_per_s", "score_call_s", "train_tokens_per_s", "train_call_s", "optimizer_s", "switch_s")
FITTED += ("step_s",)


@pytest.fixture(scope="module")
def spans():
    return simulate(WORKLOAD, "stream").spans


def test_fit_recovers_the_simulated_costs(spans):
    fitted, true = fit(spans), WORKLOAD.costs()
    for name in FITTED:
        assert getattr(fitted.costs, name) == pytest.approx(getattr(true, name), rel=0.02), name
    assert set(fitted.accuracy) >= {"decoding", "scoring", "training", "optimizer", "switch"}
    assert all(abs(accuracy.total) < 0.01 for accuracy in fitted.accuracy.values())


def test_outliers_do_not_bias_the_costs(spans):
    rng = np.random.default_rng(0)
    noisy = [replace(span, end=span.end + span.seconds * 0.05 * rng.standard_normal()) for span in spans]
    for span in noisy:
        if span.kind == "decode" and rng.random() < 0.03:
            span.end += 10 * span.seconds
    costs = fit(noisy).costs
    assert costs.step_base_s == pytest.approx(0.01, rel=0.05)
    assert costs.step_per_sequence_s == pytest.approx(4e-4, rel=0.2)
    # Calls are few and of similar size: their duration is known, but not the part that depends on tokens.
    tokens = np.median([span.tokens for span in spans if span.kind in PASSES and span.where != "driver"])
    assert costs.score_call_s + tokens / costs.score_tokens_per_s == pytest.approx(0.03 + tokens / 3000, rel=0.15)


def test_the_mean_is_fitted_if_the_model_is_too_simple(spans):
    slow = [
        replace(span, end=span.end + span.seconds * (hash(span.end) % 3)) for span in spans if span.kind == "decode"
    ]
    assert fit(slow).accuracy["decoding"].total == pytest.approx(0.0, abs=0.01)


def test_no_spans_leave_the_costs_unchanged():
    before = Costs(step_base_s=0.5, switch_s=3.0)
    assert fit([], before).costs == before and fit([], before).accuracy == {}


def test_a_call_over_all_ranks_counts_its_busiest():
    def span(where, tokens, start, end):
        return Span("ref", where, start, end, tokens=tokens)

    ranks = [span("trainer/0", 100, 1.0, 2.0), span("trainer/0", 50, 2.0, 2.5), span("trainer/1", 120, 1.0, 2.2)]
    later = [span("trainer/0", 70, 3.0, 3.5), span("driver", 0, 3.0, 3.6)]
    later[1].attributes["slot"] = 0
    assert calls([*ranks, span("driver", 0, 1.0, 3.0), *later], ("ref",), ("ref",)) == [
        (2.0, 150),
        (pytest.approx(0.6), 70),
    ]


def test_factors_are_not_negative():
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    np.testing.assert_allclose(fit_non_negative(columns, np.array([3.0, 2.0, 1.0])), [2.0, 0.0])
    np.testing.assert_allclose(fit_non_negative(columns, np.array([3.0, 5.0, 7.0])), [1.0, 2.0])
