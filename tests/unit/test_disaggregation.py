"""Disaggregated prefill and decode: assignment of engines, correctness, and the decision to use it."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.playing import play
from worlds.scenes import scenes

from rlfuse.config.checks import check
from rlfuse.config.facts import Facts
from rlfuse.config.schema import Config
from rlfuse.costs.rates import Rates
from rlfuse.events import read_events
from rlfuse.fusion.decisions import Settings
from rlfuse.fusion.lengths import Lengths
from rlfuse.fusion.policies import POLICIES
from rlfuse.fusion.tuning import Tuning
from rlfuse.simulate.online_tuning import OnlineTuning
from rlfuse.simulate.runner import simulate, simulate_later_step
from rlfuse.simulate.tuning import choose_prefill_share, tuning_draws
from rlfuse.simulate.workload import Drawn, Engine, Lognormal, Scoring, Training, Workload
from rlfuse.tools.simulate.recorded import config_of, read_run

exploring = settings(deadline=None, derandomize=True, max_examples=12)
APART = Settings(threshold=0.0, prefill_share=0.5)
LONG = Workload(
    4,
    Drawn(Lognormal(500, 0.8), 32, 2500),
    prompt_tokens=20_000,
    length_history_sigma=0.3,
    engine=Engine(kv_tokens=1 << 20, prefill_tokens_per_s=10_000.0),
    scoring=Scoring(200_000.0, 0.1),
    training=Training(50_000.0, 1, 0.1),
    switch_s=0.5,
    move_s=0.05,
    kv_bytes_per_token=28e3,
    link_bytes_per_s=20e9,
)
"""Long prompts with known response lengths: the longest responses can start before all prompts are prefilled."""


@pytest.mark.parametrize("policy", POLICIES)
@exploring
@given(scene=scenes(), share=st.floats(0.1, 0.9), read=st.sampled_from([50.0, 1e4]))
def test_every_sample_is_trained_on_once_even_if_engines_are_lost_or_drained(policy, scene, share, read):
    costs = replace(scene.costs, link_bytes_per_s=1e9, prefill_tokens_per_s=read)
    scene_with_prefill = replace(
        scene, policy=policy, costs=costs, settings=replace(scene.settings, prefill_share=share)
    )
    assert len(play(scene_with_prefill).learned) == 1


@pytest.mark.parametrize("group", [1, 8])
def test_only_prefill_engines_hand_over_groups_and_only_whole_ones(group):
    spans = simulate(replace(LONG, group=group), "adaptive", APART).spans
    moves = [span for span in spans if span.kind == "move"]
    assert {(move.attributes["source"] < 2, move.attributes["target"] >= 2) for move in moves} == {(True, True)}
    assert {move.attributes["carry"] for move in moves} == {"kv"}
    for move in moves:
        prompts = {name.rpartition("/")[0] for name in move.samples}
        assert len(prompts) == 1 and len(move.samples) == group
    read = {span.where for span in spans if span.kind == "decode" and span.attributes["prefill_tokens"]}
    assert read == {"rollout/0", "rollout/1"}
    decoded = {span.where for span in spans if span.kind == "decode" and span.attributes["steps"]}
    assert len(decoded) == 4  # prefill engines decode the groups that they prefilled last


def test_no_disaggregation_without_cache_transfer_or_with_one_engine():
    alone = simulate(replace(LONG, link_bytes_per_s=0.0), "adaptive", APART)
    assert alone.result.moved_samples == 0
    one = replace(LONG, slots=1)
    assert simulate(one, "stream", APART).result.step_s == simulate(one, "stream", Settings()).result.step_s


def test_long_prompts_are_disaggregated_if_the_gain_exceeds_the_cost_error():
    found = choose_prefill_share(LONG, "adaptive", Settings(), "auto", 0.05)
    assert found.share > 0 and "disaggregated: with" in found.why and "of 4 engines" in found.why
    unsure = choose_prefill_share(LONG, "adaptive", Settings(), "auto", 0.3)
    assert unsure.share == 0 and "no disaggregation" in unsure.why and "error of the costs (30%)" in unsure.why
    assert choose_prefill_share(LONG, "adaptive", Settings(), "off", 0.0).share == 0


def test_compared_steps_know_the_slot_speeds():
    """Compare steps with known speeds, as in later steps; a step that first has to measure them takes longer."""
    slow = replace(LONG, slot_speed=(1.0, 0.2, *[1.0] * (LONG.slots - 2)))
    known = fmean(simulate_later_step(draw, "rlhfuse", Settings()).result.step_s for draw in tuning_draws(slow))
    assert f"of a step of {known:.3g} s" in choose_prefill_share(slow, "rlhfuse", Settings(), "auto", 1.0).why


@pytest.mark.parametrize("policy", POLICIES)
def test_short_prompts_are_not_disaggregated_and_the_reason_has_numbers(policy):
    short = replace(LONG, prompt_tokens=100)
    found = choose_prefill_share(short, policy, Settings(), "auto", 0.1)
    assert found.share == 0 and "prefill is 0." in found.why and "costs (10%)" in found.why
    assert choose_prefill_share(short, policy, Settings(), "on", 0.1).share > 0


@pytest.mark.parametrize(
    ("changes", "reason"), [({"slots": 1}, "there is only one engine"), ({"link_bytes_per_s": 0.0}, "cannot be copied")]
)
def test_impossible_disaggregation_is_reported_with_the_reason(changes, reason):
    for mode in ("auto", "on"):
        found = choose_prefill_share(replace(LONG, **changes), "adaptive", Settings(), mode, 0.0)
        assert found.share == 0 and reason in found.why


@pytest.mark.slow
@exploring
@given(
    engines=st.integers(2, 5),
    prompt=st.sampled_from([50, 5000, 60_000]),
    median=st.sampled_from([50, 500]),
    group=st.sampled_from([1, 4]),
    history=st.sampled_from([None, 0.3]),
    error=st.sampled_from([0.0, 0.05, 0.2]),
)
def test_auto_is_never_slower_than_off_on_simulated_draws(engines, prompt, median, group, history, error):
    lengths = Drawn(Lognormal(median, 1.0), engines * 8, 5 * median)
    step = replace(
        LONG, slots=engines, response_tokens=lengths, prompt_tokens=prompt, group=group, length_history_sigma=history
    )
    found = choose_prefill_share(step, "adaptive", Settings(), "auto", error)

    def seconds(share):
        return sum(simulate(d, "adaptive", Settings(prefill_share=share)).result.step_s for d in tuning_draws(step))

    if found.share:
        assert seconds(found.share) <= (1 - error) * seconds(0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "is_disaggregated", "reason"),
    [("auto", False, None), ("on", True, "disaggregated"), ("off", False, None)],
)
def test_a_run_decides_by_measured_costs_and_reports_the_reason(mode, is_disaggregated, reason):
    folder, messages = Path(__file__).parent / "recorded_runs/video", []
    config, recording = config_of(folder / "config.yaml"), read_run(folder)
    config.rollout.disaggregate = mode
    lengths = Lengths(config.data.max_response_length)
    lengths.learn({-1: recording.steps[-1].workload.lengths().tolist()})
    costs = replace(recording.fit.costs, link_bytes_per_s=1e9, kv_bytes_per_token=1e4)
    tuning = Tuning(costs, lengths, Settings(), Rates(2), OnlineTuning(config, 2, messages.append))
    step = recording.steps[-1]
    spans = read_events(folder / "events.jsonl")
    tuning.relearn(tuning, [span for span in spans if step.start <= span.start <= step.start + step.seconds])
    assert (tuning.fixed.prefill_share > 0) == is_disaggregated
    assert messages == [] if reason is None else f"rollout.disaggregate={mode}: {reason}" in messages[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n_gpus_per_node": 1}, "at least two engines"),
        ({"n_gpus_per_node": 2, "nnodes": 2}, "within one node; this job has 2 nodes"),
        ({"n_gpus_per_node": 2, "deterministic": True}, "measured times"),
    ],
)
def test_on_is_refused_for_unsupported_jobs(changes, reason):
    config = Config()
    for name, value in changes.items():
        setattr(config.trainer, name, value)
    for mode, count in (("on", 1), ("auto", 0), ("off", 0)):
        config.rollout.disaggregate = mode
        problems = [line for line in check(config, Facts()) if "rollout.disaggregate" in line]
        assert len(problems) == count and all(reason in line for line in problems)
