"""Fusion policies against `serial` and against the lower bound, in virtual time, on random small machines."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rlfuse.config.schema import Config
from rlfuse.costs.model import Costs
from rlfuse.costs.rates import Rates
from rlfuse.fusion.decisions import Score, Settings
from rlfuse.fusion.policies import POLICIES
from rlfuse.fusion.serial import serial
from rlfuse.simulate import tuning
from rlfuse.simulate.batching import SimulationError
from rlfuse.simulate.job_step import workload_of
from rlfuse.simulate.runner import simulate
from rlfuse.simulate.tuning import tune
from rlfuse.simulate.workload import Drawn, Engine, Failure, Lognormal, Scoring, Training, Workload, parse

exploring = settings(deadline=None, derandomize=True, max_examples=10)


@st.composite
def slowdowns(draw, slots):
    """Draw a slowdown of one slot, from 0 or 1 s on, for three seconds or until the end of the step."""
    begin, rate = draw(st.sampled_from([0.0, 1.0])), draw(st.sampled_from([0.5, 2.0, 5.0]))
    until = draw(st.sampled_from([None, begin + 3.0]))
    return {"slot": draw(st.integers(0, slots - 1)), "rate": rate, "from_s": begin, "until_s": until}


@st.composite
def workloads(draw):
    """Draw a workload of up to 80 long-tailed samples on unequal slots, with small KV caches and lost engines.

    Ranks are independent, or run in lockstep as with ZeRO, Ulysses or pipelines, whose bubbles scoring passes may fill.
    A slot may be slow for some time.
    """
    slots, group = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 4]))
    together = draw(st.sampled_from(["none", "none", "gradients", "all", "pipelines"]))
    pipelines, reference = together == "pipelines", ["ref"] * draw(st.booleans())
    gae, lost = draw(st.booleans()), draw(st.sets(st.integers(0, slots - 1), max_size=slots - 1))
    return parse(
        {
            "slots": slots,
            "seed": draw(st.integers(0, 1000)),
            "response_tokens": {
                "lognormal": {"median": 40, "sigma": draw(st.floats(0.3, 1.3))},
                "cap": 400,
                "count": group * draw(st.integers(1, 80 // group)),
            },
            "group": group,
            "prompt_tokens": draw(st.integers(1, 100)),
            "engine": {
                "step_per_sequence_s": draw(st.sampled_from([1e-4, 1e-3])),
                "step_per_context_token_s": draw(st.sampled_from([0.0, 1e-7])),
                "flat_batch": draw(st.integers(1, 16)),
                "max_sequences": draw(st.integers(4, 64)),
                "kv_tokens": draw(st.sampled_from([600, 2000, 100_000])),
            },
            "scoring": {
                "tokens_per_s": draw(st.sampled_from([500, 5000])),
                "call_s": draw(st.sampled_from([0.0, 0.05])),
                "kinds": ["old_log_prob", *reference, "values"] if gae else ["old_log_prob", *reference],
                "deferred": pipelines and draw(st.booleans()),
                "by_update": draw(st.booleans()),
                "loss_only": draw(st.booleans()),
            },
            "training": {
                "tokens_per_s": draw(st.sampled_from([500, 5000])),
                "mini_batches": draw(st.integers(1, 4)),
                "models": ["critic", "actor"] if gae else ["actor"],
                "early": draw(st.booleans()),
                "skipped_share": draw(st.sampled_from([0.0, 0.0, 0.3, 0.7, 1.0])),
                "epochs": draw(st.sampled_from([1, 1, 2])),
                "bubbles": draw(st.sampled_from([0.1, 0.6])) if pipelines else None,
                "call_s": draw(st.sampled_from([0.0, 0.05])),
                "optimizer_s": draw(st.sampled_from([0.0, 0.1])),
            },
            "lockstep": "all" if pipelines else together,
            "credit_samples": draw(st.sampled_from([None, None, 2, 8])),
            "switch_s": draw(st.sampled_from([0.0, 0.1, 0.5])),
            "kv_bytes_per_token": 1000,
            "link_bytes_per_s": draw(st.sampled_from([0.0, 1e8])),
            "slot_speed": [draw(st.sampled_from([0.5, 1.0, 2.0])) for _ in range(slots)],
            "slowdowns": draw(st.lists(slowdowns(slots), max_size=1)),
            "failures": [{"slot": slot, "at_s": draw(st.floats(0.0, 4.0))} for slot in sorted(lost)],
            "length_history_sigma": draw(st.sampled_from([None, 0.3])),
            "baselines": group > 1 and draw(st.booleans()),
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@exploring
@given(workload=workloads())
def test_a_step_trains_on_every_sample_and_takes_at_least_the_bound(policy, workload):
    result = simulate(workload, policy).result
    assert result.samples_finished == workload.samples
    assert result.step_s >= result.oracle_s * (1 - 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["stream", "rlhfuse", "adaptive"])
@settings(exploring, max_examples=3, phases=(Phase.explicit, Phase.generate))  # shrinking would tune for minutes
@given(workload=workloads())
def test_a_tuned_policy_never_loses_to_serial_by_more_than_a_switch(policy, workload):
    """Measure slot speeds in an earlier step, since results with unexpected slowdowns are random."""
    workload = replace(workload, slowdowns=())
    serial, tuned = second_step(workload, "serial"), second_step(workload, policy, tune(workload, policy))
    assert tuned - serial <= tolerance(workload)


def tolerance(workload):
    """Return the seconds that a policy may lose to `serial`: one switch, and one sample if engines are lost.

    A lost engine loses its samples: at the same time, one policy may lose a sample that another has finished.
    """
    if not workload.failures:
        return workload.switch_s
    tokens, costs = workload.longest + workload.prompt_tokens, workload.costs()
    again = workload.longest * costs.step_base_s / min(speed.least for speed in workload.speeds())
    later = tokens / costs.score_tokens_per_s + tokens / costs.train_tokens_per_s
    later += costs.score_call_s + costs.train_call_s
    return workload.switch_s + workload.move_s + again + later


def second_step(workload, policy, settings=None):
    """Return the seconds of a step with slot rates measured in a step of `serial`, whose passes are long enough."""
    rates = Rates(workload.slots)
    simulate(workload, "serial", None, rates)
    return simulate(workload, policy, settings, rates).result.step_s


@pytest.mark.slow
def test_tuning_takes_lockstep_of_ranks_into_account():
    """Regression: tuned for independent ranks, `adaptive` consolidated the tail and was slower than `serial`."""
    free = Workload(2, Drawn(Lognormal(200, 0.9), 32, 2000), switch_s=0.1, engine=Engine(max_sequences=64))
    together = replace(free, lockstep="all")
    serial = simulate(together, "serial").result.step_s
    assert simulate(together, "adaptive", tune(together, "adaptive")).result.step_s <= serial
    assert simulate(together, "adaptive", tune(free, "adaptive")).result.step_s > serial


@pytest.mark.slow
def test_a_gain_on_two_draws_by_chance_is_rejected(monkeypatch):
    """Regression: overlapping was faster on both draws but slower on average; a small KV cache makes steps uneven."""
    lengths = Drawn(Lognormal(40, 0.5), 8, 400)
    workload = with_small_cache(Workload(4, lengths, seed=32, prompt_tokens=200, group=2, lockstep="gradients"))
    draws = tuning.verification_draws(workload)
    assert ratios_to_serial(workload, draws).mean() <= 1
    monkeypatch.setattr(tuning, "MAX_VERIFICATION_DRAWS", 0)
    assert ratios_to_serial(workload, draws).mean() > 1.01


@pytest.mark.slow
def test_a_small_mean_gain_does_not_justify_large_losses_on_some_draws():
    """Regression: three of ten draws were 4 to 6% slower, the mean gain was 0.3%, and this draw was 5% slower."""
    lengths = (
        "225 2000 212 2000 207 193 187 2000 2000 219 215 197 2000 2000 2000 209 2000 187 2000 220 2000 244 "
        "2000 2000 195 223 182 174 205 196 2000 166 184 2000 2000 181 197 159 206 179 2000 207 2000 217 195 "
        "2000 2000 192 "
    )
    engine = Engine(0.02, 0.005, 2e-08, 1, 4, 8000, 2000)
    scoring = Scoring(2000, kinds=("old_log_prob", "ref"), by_update=True)
    training = Training(3000, 2, call_s=0.5, optimizer_s=1.0, models=("critic", "actor"), epochs=2, bubbles=0.1)
    given = {"group": 4, "credit_samples": 16, "lockstep": "all", "length_history_sigma": 1.0, "switch_s": 0.1}
    given |= {"prompt_tokens": 64, "kv_bytes_per_token": 100_000, "link_bytes_per_s": 0.0, "move_s": 0.5}
    workload = Workload(6, tuple(map(int, lengths.split())), engine=engine, scoring=scoring, training=training, **given)
    assert ratios_to_serial(workload, [workload]).max() <= 1 + tuning.MAX_LOSS


@pytest.mark.slow
def test_a_large_mean_gain_outweighs_a_small_loss_on_one_draw():
    """Regression: one of ten draws was 3% slower, so overlapping was disabled."""
    lengths = Drawn(Lognormal(40, 0.8065), 24, 400)
    workload = with_small_cache(Workload(3, lengths, seed=7, prompt_tokens=58, group=4, credit_samples=8))
    ratios = ratios_to_serial(workload, tuning.verification_draws(workload))
    assert ratios.max() > 1 + tuning.MAX_LOSS, "one draw is slower"
    assert ratios.mean() < 0.9


def with_small_cache(workload):
    """Return the workload with a KV cache that holds few samples."""
    later = {"scoring": Scoring(tokens_per_s=500), "training": Training(5000, optimizer_s=0.1, early=False)}
    return replace(workload, engine=Engine(kv_tokens=600), kv_bytes_per_token=1000, **later)


def ratios_to_serial(workload, draws):
    """Return step times of `adaptive`, tuned for the workload, divided by those of `serial`."""
    tuned = tune(workload, "adaptive")
    steps = [
        [simulate(draw, *arguments).result.step_s for arguments in (("adaptive", tuned), ("serial",))] for draw in draws
    ]
    return np.divide(*np.transpose(steps))


@pytest.mark.slow
def test_tuning_takes_slot_speeds_into_account():
    """Regression: tuned without slot speeds, `adaptive` was 14% slower than `serial` once they were known."""
    speeds, lengths = (0.5, 1.0, 2.0, 2.0, 1.0), Drawn(Lognormal(40, 0.717), 8, 400)
    workload = Workload(5, lengths, seed=496, group=2, slot_speed=speeds, length_history_sigma=0.3)
    serial, tuned = second_step(workload, "serial"), second_step(workload, "adaptive", tune(workload, "adaptive"))
    assert tuned <= serial


@pytest.mark.slow
def test_tail_migration_is_tuned_together_with_admission():
    """Regression: tried only with longest-first admission, it was rejected, 6% slower than `rlhfuse`."""
    lengths = (20, 10, 18, 360, 22, 22, 18, 327, 19, 20, 383, 21, 20, 283, 20, 18) * 2
    scoring = Scoring(tokens_per_s=500, call_s=0.05, kinds=("old_log_prob", "ref"))
    training = Training(mini_batches=2, optimizer_s=0.1, models=("critic", "actor"), early=False)
    engine = Engine(step_per_sequence_s=0.0, max_sequences=4, prefill_tokens_per_s=2000)
    given = {"group": 4, "credit_samples": 16, "lockstep": "gradients", "length_history_sigma": 0.0, "move_s": 0.0}
    workload = Workload(4, lengths, engine=engine, scoring=scoring, training=training, **given)
    tuned = simulate(workload, "adaptive", tune(workload, "adaptive")).result.step_s
    assert tuned <= 1.001 * simulate(workload, "rlhfuse", Settings(threshold=0.35)).result.step_s


@pytest.mark.slow
def test_only_early_training_is_disabled_if_it_may_be_slower():
    """Regression: on two slots with few large samples, all overlapping was disabled, 4% slower than `stream`."""
    engine = Engine(step_per_sequence_s=0.0, step_per_context_token_s=0.0, flat_batch=2, max_sequences=2)
    costs = {"scoring": Scoring(tokens_per_s=480), "training": Training(tokens_per_s=96, mini_batches=2)}
    lengths = Drawn(Lognormal(100, 0.9), 12, 600)
    workload = Workload(2, lengths, seed=7, engine=engine, switch_s=0.2, length_history_sigma=0.0, **costs)
    tuned = tune(replace(workload, seed=1007), "adaptive")
    assert tuned.overlapping and not tuned.early_training
    assert simulate(workload, "adaptive", tuned).result.step_s < simulate(workload, "stream").result.step_s


WELL_KNOWN = Workload(
    2,
    Drawn(Lognormal(100, 1.0), 24, 500),
    seed=2,
    engine=Engine(step_per_sequence_s=1e-3, flat_batch=6, max_sequences=64),
    training=Training(tokens_per_s=20_000),
    switch_s=0.1,
    length_history_sigma=0.3,
)
"""All samples fit at once, in batches that decode slower than batches of half the size."""


@pytest.mark.parametrize("most", [1, 5])
def test_engines_respect_max_sequences_and_start_with_the_longest(most):
    spans = simulate(WELL_KNOWN, "adaptive", Settings(threshold=0.0, max_sequences=most)).spans
    assert max(span.attributes["batch"] for span in spans if span.kind == "decode") == most
    whole = sorted((span for span in spans if span.kind == "generate"), key=lambda span: span.start)
    part_tokens = {
        name: sum(span.tokens for span in part) for name, part in (("first", whole[:8]), ("last", whole[-8:]))
    }
    assert part_tokens["first"] > 2 * part_tokens["last"]


@pytest.mark.slow
def test_max_sequences_is_lowered_if_lengths_are_known():
    found = tune(replace(WELL_KNOWN, seed=1), "adaptive")
    assert found.longest_first and found.max_sequences < 12
    steps = [simulate(WELL_KNOWN, "adaptive", each).result.step_s for each in (found, replace(found, max_sequences=64))]
    assert steps[0] < 0.97 * steps[1]
    assert tune(replace(WELL_KNOWN, length_history_sigma=None), "adaptive").max_sequences == Settings().max_sequences


def test_the_rank_of_a_lost_engine_scores_with_any_tuning():
    """Regression: tuned without overlapping, `adaptive` left the rank idle while other engines generated."""
    lengths = (16, 69, 13, 25, 23, 20, 9, 111, 14, 11, 22, 18, 9, 18, 14, 21, 8, 44, 22, 22, 23, 29, 15, 15)
    machine = {"engine": Engine(flat_batch=1, max_sequences=2), "scoring": Scoring(tokens_per_s=500)}
    machine |= {"group": 8, "credit_samples": 4, "failures": (Failure(0, 0.5),)}
    workload = Workload(3, lengths, prompt_tokens=512, **machine)
    steps = {name: simulate(workload, name, Settings(overlapping=False)).result.step_s for name in POLICIES}
    assert steps["adaptive"] <= steps["stream"] < 0.85 * steps["serial"]


@pytest.mark.parametrize(
    ("zero", "ulysses", "stages", "lockstep", "bubbles", "deferred"),
    [
        (1, 1, 1, "none", None, False),
        (2, 1, 1, "gradients", None, False),
        (3, 1, 1, "all", None, False),
        (1, 2, 1, "all", None, False),
        (1, 1, 2, "all", 1 / 4, True),
    ],
)
def test_the_workload_of_a_job_has_the_lockstep_of_its_ranks(zero, ulysses, stages, lockstep, bubbles, deferred):
    config = Config()
    config.trainer.n_gpus_per_node, config.algorithm.adv_estimator, config.fusion.credit_samples = 4, "grpo", 8
    config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.actor.zero_stage = 32, 16, zero
    config.training.ulysses_sequence_parallel_size, config.training.pipeline_parallel_size = ulysses, stages
    workload = workload_of(config, Costs(), 4, (7,) * 32, 11)
    assert (workload.lockstep, workload.training.bubbles) == (lockstep, bubbles)
    assert (workload.scoring.deferred, workload.credit_samples) == (deferred, 8)
    assert simulate(workload, "adaptive").result.samples_finished == 32


@pytest.mark.parametrize(("estimator", "n"), [("remax", 1), ("remax", 3), ("grpo", 4)])
def test_baselines_are_generated_but_not_scored_by_ranks_or_trained_on(estimator, n):
    config, baselines = Config(), estimator == "remax"
    config.algorithm.adv_estimator, config.rollout.n = estimator, n
    config.data.train_batch_size, config.actor.ppo_mini_batch_size = 4, 2
    lengths = ((5, 6, 7, 8)[:n] + (50,) * baselines) * 4
    workload = workload_of(config, Costs(), 2, lengths, 11)
    assert (workload.prompts, workload.baselines, workload.training.mini_batches) == (4, baselines, 2)
    spans = simulate(workload, "serial").spans
    trained = 4 * sum(11 + length for length in (5, 6, 7, 8)[:n])
    tokens = {kind: sum(span.tokens for span in spans if span.kind == kind) for kind in ("generate", "backward")}
    assert tokens == {"generate": sum(lengths), "backward": trained}


def test_simulated_ranks_refuse_single_rank_calls_in_lockstep():
    def alone(view):
        decisions = serial(view)
        return [replace(each, slot=0) if isinstance(each, Score) and each.kind == "ref" else each for each in decisions]

    workload = Workload(2, (5, 9), lockstep="all", scoring=Scoring(kinds=("ref",)))
    with pytest.raises(BaseExceptionGroup) as raised:
        simulate(workload, alone)
    assert raised.group_contains(SimulationError, match="slot 0 was requested to run ref alone, but it needs all ranks")


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_first_mini_batch_needs_no_pass_if_its_update_provides_old_log_probs(epochs):
    scoring, training = Scoring(tokens_per_s=1000.0), Training(1000.0, mini_batches=2, epochs=epochs)
    passes = Workload(1, (100, 120, 140, 160), prompt_tokens=30, scoring=scoring, training=training)
    none = replace(passes, scoring=replace(scoring, by_update=True))
    before, after = (simulate(each, "serial").result for each in (passes, none))
    assert before.step_s - after.step_s == pytest.approx((100 + 120 + 2 * 30) / 1000)
    assert after.oracle_s < before.oracle_s and after.oracle_s <= after.step_s


def test_passes_in_bubbles_take_no_additional_time():
    together = {"lockstep": "all", "prompt_tokens": 1, "response_tokens": (99,) * 8}
    training, scoring = Training(mini_batches=2, bubbles=0.5), Scoring(kinds=("old_log_prob", "ref"))
    steps = [
        simulate(Workload(2, training=training, scoring=replace(scoring, deferred=deferred), **together), "serial")
        for deferred in (False, True)
    ]
    # Half of the samples are in the second mini-batch: one pass over 400 tokens for each of two kinds on two slots.
    at_once, later = (step.result.step_s for step in steps)
    assert at_once - later == pytest.approx(2 * 400 / 2 / scoring.tokens_per_s)


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_that_switch_back_to_generation_get_no_joint_scoring_call(policy):
    """Regression: with credit available again, one decision switched the slots and another let all of them score."""
    scoring, models = Scoring(kinds=("old_log_prob", "values"), deferred=True), ("critic", "actor")
    training = Training(mini_batches=2, models=models, bubbles=0.5)
    more = {"engine": Engine(max_sequences=1), "lockstep": "all", "credit_samples": 4}
    workload = Workload(2, (10, 60, 30, 30, 30, 60), scoring=scoring, training=training, **more)
    assert simulate(workload, policy).result.samples_finished == 6


LAYOUTS = {
    "whole models": {},
    "ZeRO 2": {"lockstep": "gradients"},
    "ZeRO 3": {"lockstep": "all"},
    "pipelines": {"lockstep": "all", "training": {"bubbles": 0.5}, "scoring": {"deferred": True}},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("models", [("actor",), ("critic", "actor")])
@pytest.mark.parametrize("policy", POLICIES)
def test_skipped_samples_save_the_actors_passes(policy, models, layout):
    """Check in each simulation that the critic trains on skipped samples and the actor does not."""
    more = dict(LAYOUTS[layout])
    training = Training(tokens_per_s=500.0, mini_batches=2, models=models, epochs=2, **more.pop("training", {}))
    kinds = ("old_log_prob", "values") if "critic" in models else ("old_log_prob",)
    scoring = Scoring(tokens_per_s=2000.0, kinds=kinds, loss_only=True, by_update=True, **more.pop("scoring", {}))
    lengths = (10, 60, 30, 30, 30, 60, 20, 40, 25, 35, 45, 15)
    given = Workload(2, lengths, group=2, prompt_tokens=9, scoring=scoring, training=training, **more)
    found = []
    for share in (0.0, 0.5, 1.0):
        workload = replace(given, training=replace(training, skipped_share=share))
        found.append(simulate(workload, policy).result)
        assert workload.skipped().sum() == share * len(lengths)
        assert found[-1].step_s >= found[-1].oracle_s * (1 - 1e-9)
    assert found[0].step_s > found[1].step_s > found[2].step_s
    assert found[0].oracle_s > found[1].oracle_s >= found[2].oracle_s


def test_passes_are_saved_only_if_rewards_arrive_first():
    """Use `serial`, which has advantages before it scores; passes on idle slots during generation start earlier."""
    training = Training(tokens_per_s=1000.0, skipped_share=1.0)
    given = Workload(1, (100, 140), prompt_tokens=30, training=training)
    steps = [
        simulate(replace(given, scoring=Scoring(tokens_per_s=1000.0, loss_only=loss_only)), "serial").result.step_s
        for loss_only in (False, True)
    ]
    assert steps[0] - steps[1] == pytest.approx((100 + 140 + 2 * 30) / 1000)


@pytest.mark.parametrize(
    ("changes", "share", "loss_only"),
    [
        ({}, 0.25, True),
        ({"use_kl_loss": True}, 0.0, False),
        ({"entropy_coeff": 0.1}, 0.0, False),
        ({"skip_zero_advantage": "false"}, 0.0, False),
    ],
)
def test_the_workload_of_a_job_has_its_share_of_skipped_samples(changes, share, loss_only):
    config = Config()
    config.algorithm.adv_estimator, config.data.train_batch_size, config.actor.ppo_mini_batch_size = "grpo", 32, 16
    for name, value in changes.items():
        setattr(config.actor, name, value)
    workload = workload_of(config, Costs(), 4, (7,) * 32, 11, skipped_share=0.25)
    assert (workload.training.skipped_share, workload.scoring.loss_only) == (share, loss_only)
