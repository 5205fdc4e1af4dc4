"""Workloads of the simulator: fields of the JSON, and messages for invalid workloads."""

import json

import numpy as np
import pytest

from rlfuse.simulate.tuning import tuning_draws
from rlfuse.simulate.workload import WorkloadError, parse, read_workload, workload_from_costs

FULL = {
    "slots": 16,
    "seed": 0,
    "response_tokens": {"lognormal": {"median": 200, "sigma": 1.0}, "cap": 1024, "count": 512},
    "prompt_tokens": 128,
    "group": 1,
    "engine": {
        "step_base_s": 0.02,
        "step_per_sequence_s": 0.0001,
        "step_per_context_token_s": 2e-8,
        "flat_batch": 64,
        "max_sequences": 256,
        "kv_tokens": 400000,
        "prefill_tokens_per_s": 20000,
    },
    "scoring": {"tokens_per_s": 40000},
    "training": {"tokens_per_s": 8000, "mini_batches": 4},
    "switch_s": 0.5,
    "kv_bytes_per_token": 800000,
    "link_bytes_per_s": 2.5e10,
}


def test_every_field_reaches_the_costs():
    workload = parse(FULL)
    costs = workload.costs()
    assert (costs.step_base_s, costs.flat_batch, costs.kv_tokens) == (0.02, 64, 400_000)
    assert (costs.score_tokens_per_s, costs.train_tokens_per_s, costs.switch_s) == (40_000, 8_000, 0.5)
    assert (costs.kv_bytes_per_token, costs.link_bytes_per_s, costs.max_tokens) == (800_000, 2.5e10, 1024)
    assert (workload.samples, workload.prompts, workload.mini_batch_prompts) == (512, 512, 128)


def test_lengths_follow_the_distribution_and_the_seed():
    lengths = parse(FULL | {"response_tokens": FULL["response_tokens"] | {"count": 20_000}}).lengths()
    assert lengths.min() >= 1 and lengths.max() == 1024
    assert np.median(lengths) == pytest.approx(200, rel=0.05)
    assert np.log(lengths[lengths < 1024]).std() == pytest.approx(0.9, rel=0.1)  # below 1, as the tail is capped
    np.testing.assert_array_equal(parse(FULL).lengths(), parse(FULL).lengths())
    assert (parse(FULL).lengths() != parse(FULL | {"seed": 1}).lengths()).any()


def test_samples_of_a_prompt_correlate_and_history_predicts_their_mean():
    distribution = {"lognormal": {"median": 200, "sigma": 1.0}, "count": 8000}
    workload = parse(FULL | {"group": 8, "response_tokens": distribution, "length_history_sigma": 0.3})
    logs = np.log(workload.lengths().reshape(-1, 8))
    assert logs.mean(axis=1).var() / logs.var() == pytest.approx(0.7 + 0.3 / 8, abs=0.05)
    means = workload.lengths().reshape(-1, 8).mean(axis=1)
    assert np.log(workload.history() / means).std() == pytest.approx(0.3, rel=0.1)
    assert parse(FULL | {"length_history_sigma": None}).history() is None


def test_workload_from_costs_has_these_costs():
    workload = parse(FULL)
    rebuilt = workload_from_costs(workload.costs(), 16, tuple(workload.lengths().tolist()), training=workload.training)
    assert rebuilt.costs() == workload.costs()  # the longest sample is at the cap
    assert (rebuilt.engine, rebuilt.scoring, rebuilt.training) == (workload.engine, workload.scoring, workload.training)


WRONG = [
    ({"slots": 0}, r"slots=0: needs a whole number of at least 1"),
    ({"slots": "8"}, r"slots='8': needs a whole number"),
    ({"slots": True}, r"slots=True: needs a whole number"),
    ({"switch_s": -0.1}, r"switch_s=-0.1: needs a number of at least 0"),
    ({"switch_s": float("nan")}, r"switch_s=nan: needs a number"),
    ({"scoring": {"tokens_per_s": 0}}, r"scoring.tokens_per_s=0: needs a number above 0"),
    ({"scoring": {"kinds": ["rewards"]}}, r"scoring.kinds\[0\]='rewards': needs one of old_log_prob, ref, values"),
    ({"scoring": 3}, r"scoring=3: needs an object with tokens_per_s"),
    ({"training": {"bubbles": 0.5}}, r"lockstep='none': must be 'all' for pipelines \(training.bubbles\)"),
    ({"scoring": {"deferred": True}}, r"scoring.deferred=true: requires a pipeline"),
    (
        {"scoring": {"by_update": True, "kinds": ["ref"]}},
        r"scoring.by_update=true: requires 'old_log_prob' in scoring.kinds",
    ),
    ({"lockstep": "some"}, r"lockstep='some': needs one of none, gradients, all"),
    ({"credit_samples": 0}, r"credit_samples=0: needs a whole number of at least 1"),
    ({"training": {"models": []}}, r"training.models=\[\]: a step trains at least one model"),
    ({"slot": 4}, r"slot: unknown field; did you mean slots\?"),
    ({"xyz": 4}, r"xyz: unknown field; valid fields: slots, response_tokens, seed"),
    ({"engine": {"kv_token": 4}}, r"engine.kv_token: unknown field; did you mean engine.kv_tokens\?"),
    ({"response_tokens": []}, r"response_tokens=\[\]: at least one length"),
    ({"response_tokens": 5}, r"response_tokens=5: needs a list"),
    ({"scoring": {"tokens_per_s": 1e300}}, r"tokens_per_s=1e\+300: needs a number above 0, at most 1e\+18"),
    ({"response_tokens": [10, 0]}, r"response_tokens\[1\]=0: needs a whole number of at least 1"),
    ({"response_tokens": {"lognormal": {"median": 5}, "count": 4}}, r"response_tokens.lognormal.sigma is missing"),
    ({"response_tokens": [5, 6, 7], "group": 2}, r"length 3, not a multiple of group=2"),
    ({"slot_speed": [1.0, 0.5]}, r"slot_speed has 2 values for slots=16"),
    ({"failures": [{"slot": 16, "at_s": 1}]}, r"failures\[0\].slot=16: must be below slots=16"),
    (
        {"response_tokens": {"lognormal": {"median": 5, "sigma": 1}, "count": 1e9}},
        r"count=1000000000.0: .*most 1,000,000$",
    ),
    ({"response_tokens": {"lognormal": {"median": 1e9, "sigma": 1}, "count": 9}}, r"median=1000.*at most 10,000,000"),
    ({"prompt_tokens": 1e12}, r"prompt_tokens=1000000000000.0: needs a whole number of at least 1, at most 10,000,000"),
    ({"slots": 10**7}, r"slots=10000000: needs a whole number of at least 1, at most 10,000"),
    ({"switch_s": 1e18}, r"switch_s=1e\+18: needs a number of at least 0, at most 1,000,000,000"),
    ({"training": {"epochs": 10**9}}, r"training.epochs=1000000000: .*at most 1,000"),
    ({"engine": {"kv_tokens": 1000}}, r"engine.kv_tokens=1000: the longest sample has 1152 tokens"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_errors_contain_the_value_and_the_fix(change, message):
    with pytest.raises(WorkloadError, match=message):
        parse(FULL | change)


def test_errors_contain_the_path_of_the_file(tmp_path):
    path = tmp_path / "workload.json"
    with pytest.raises(WorkloadError, match=r"workload\.json: No such file"):
        read_workload(path)
    path.write_text("{")
    with pytest.raises(WorkloadError, match=r"workload\.json: .*line 1.*one JSON object"):
        read_workload(path)
    path.write_text("[" * 100_000)
    with pytest.raises(WorkloadError, match=r"workload\.json: brackets are nested too deep"):
        read_workload(path)
    path.write_text(json.dumps({"response_tokens": [1]}))
    with pytest.raises(WorkloadError, match=r"workload\.json: slots is missing: add it to the workload"):
        read_workload(path)
    path.write_text(json.dumps(FULL))
    assert read_workload(path) == parse(FULL)


def test_a_scaled_down_step_has_slow_slots_in_proportion():
    uneven = parse(FULL | {"slots": 64, "slot_speed": [1.0] * 32 + [0.5] * 32})
    assert {draw.slot_speed for draw in tuning_draws(uneven)} == {(1.0,) * 8 + (0.5,) * 8}
    assert {draw.slot_speed for draw in tuning_draws(parse(FULL | {"slots": 64}))} == {()}
