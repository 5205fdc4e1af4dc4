"""Every policy on random jobs, machines and finishing orders; `playing` holds each call and decision against the rules.

What a played step asserts: each sample is generated, scored once per kind and accumulated once per epoch; the optimizer
steps are those of mini-batches in prompt order, the actor's after all old log-probs; samples that a step leaves are
never trained on; engines are never given more than they hold, siblings stay together, busy slots are left alone.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.playing import assert_whole_batches, play
from worlds.scenes import Scene, scenes

from rlfuse.costs.model import Costs
from rlfuse.errors import WorkerLost
from rlfuse.fusion.decisions import Settings
from rlfuse.fusion.policies import POLICIES
from rlfuse.step.executor import Executor, StepContext

exploring = settings(deadline=None, derandomize=True, max_examples=16)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@exploring
@given(scene=scenes())
def test_whatever_finishes_first_and_fails_each_sample_is_learned_from_once_in_its_mini_batch(policy, scene):
    assert len(play(replace(scene, policy=policy)).learned) == 1


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@exploring
@given(scene=scenes(steps=2, reference=True, estimator="grpo"))
def test_pipelines_that_score_in_their_bubbles_keep_every_rule_too(policy, scene):
    pipelined = replace(scene.settings, lockstep=True, lockstep_backward=True, pipelined=True)
    world = play(replace(scene, policy=policy, settings=pipelined))
    assert len(world.learned) == 2
    assert not world.trainer.filled or scene.mini_batch < scene.batch


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@settings(exploring, max_examples=8)
@given(scene=scenes(steps=2, batches=3))
def test_dynamic_sampling_replaces_groups_and_learns_from_the_first_with_spread(policy, scene):
    assert_whole_batches(replace(scene, policy=policy))


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [name if name in ("stream", "adaptive") else pytest.param(name, marks=pytest.mark.slow) for name in POLICIES],
)
@settings(exploring, max_examples=8)
@given(scene=scenes(steps=4))
@pytest.mark.parametrize("data", ["over_sampling", "tail_batching", "partial_rollout", "one_step_off"])
def test_steps_that_leave_groups_learn_from_a_whole_batch_and_no_staler_than_they_say(data, policy, scene):
    world = play(replace(scene, data=data, policy=policy))
    most = {"one_step_off": 1, "partial_rollout": scene.steps}.get(data, 0)
    assert all(0 <= staleness <= most for staleness in world.staleness)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@settings(exploring, max_examples=12)
@given(scene=scenes(steps=3), data=st.data())
def test_slots_that_are_drained_and_restored_at_any_moment_change_nothing_that_is_learned(policy, scene, data):
    slots = st.integers(0, scene.slots - 1)
    changes = tuple(data.draw(st.lists(st.tuples(st.floats(0.0, 6.0), slots), max_size=6)))
    drained = tuple(range(scene.slots))[1:] if data.draw(st.booleans()) else ()
    assert len(play(replace(scene, policy=policy, drained=drained, changes=changes)).learned) == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_a_drained_slot_gets_nothing_and_the_others_end_the_step(policy):
    world = play(job(policy, drained=(1,)))
    assert len(world.learned) == 3 and world.decided["OptimizerStep"] == 3 * 4
    assert {world.first[s.id] for groups in world.learned for group in groups for s in group.samples} == {0, 2}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["serial", "stream"])  # which move none themselves
def test_samples_leave_a_slot_that_is_drained_in_the_middle_and_go_on_elsewhere(policy):
    costs = Costs(max_tokens=50, step_base_s=1.0, move_s=0.0)
    worlds = [play(job(policy, changes=((when, 0),), costs=costs)) for when in (1.0, 1.5, 2.0, 2.5, 3.0)]
    assert all(len(world.learned) == 3 for world in worlds)
    assert {slot for world in worlds for slot in world.went_on.values()} == {1, 2}


def test_a_drained_slot_works_on_where_no_other_could():
    world = play(job("stream", drained=(0,), lost=(99.0, 1.0, 1.2)))
    assert len(world.learned) == 3 and not world.engines_restarted


PIPELINED = Settings(lockstep=True, lockstep_backward=True, pipelined=True)


@pytest.mark.parametrize("zero", [40, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("given", [Settings(), Settings(lockstep_backward=True), PIPELINED])
@pytest.mark.parametrize("policy", POLICIES)
def test_samples_without_advantage_are_skipped_and_steps_are_the_same(policy, given, zero):
    """`playing` checks that the actor runs none of them and that each optimizer step counts them."""
    scene = replace(job(policy, settings=given, zero=zero), reference=False, epochs=2)
    for estimator in ("grpo", "gae"):
        world = play(replace(scene, estimator=estimator))
        assert len(world.learned) == 3 and all(0 < count <= 16 for count in world.skipped)
        assert (min(world.skipped) == 16) == (zero == 100)
        assert max(play(replace(scene, estimator=estimator, reference=True)).skipped) == 0, "a KL loss"


def job(policy, **changes):
    """Many samples, few slots, generous credits: whatever can overlap does, somewhere."""
    scene = {"batch": 8, "siblings": 2, "mini_batch": 2, "prompts": 24, "steps": 3, "seed": 1}
    return Scene(policy, slots=3, reference=True, **scene, **changes)


@pytest.mark.slow
def test_serial_overlaps_nothing_stream_scores_beside_generation_and_adaptive_also_trains():
    overlapped = {policy: play(replace(job(policy), seed=4)).overlapped for policy in POLICIES}
    assert overlapped["serial"] == set()
    assert overlapped["stream"] == overlapped["rlhfuse"] == {"old_log_prob", "ref"}
    assert overlapped["adaptive"] == {"old_log_prob", "ref", "gradients"}


def test_training_waits_for_the_batch_that_a_custom_estimator_reads(tmp_path):
    (tmp_path / "mine.py").write_text("def mine(scores, mask): ...")
    world = play(replace(job("adaptive"), seed=4, estimator=f"{tmp_path}/mine.py:mine"))
    assert len(world.learned) == 3 and world.overlapped == {"old_log_prob", "ref"}


@pytest.mark.parametrize("policy", POLICIES)
def test_passes_of_later_mini_batches_run_in_the_schedules_of_earlier_ones(policy):
    world = play(job(policy, settings=PIPELINED))
    if policy == "serial":  # of four mini-batches three follow one, in each of three steps; old log-probs in one go
        assert world.trainer.filled == {"ref": 3 * 3, "actor": 3}
    else:  # some run while training waits for rewards
        assert world.trainer.filled["ref"] > 3 and world.trainer.filled["actor"] > 0


@pytest.mark.slow
def test_only_rlhfuse_and_adaptive_move_samples():
    moving = {policy for policy in POLICIES if play(job(policy)).decided["Move"]}
    assert "rlhfuse" in moving and moving <= {"rlhfuse", "adaptive"}


@pytest.mark.slow
def test_a_credit_of_one_pauses_generation_until_the_consumer_has_caught_up():
    def switches(credit):
        settings = replace(job("stream").settings, credit_samples=credit)
        return play(job("stream", costs=Costs(max_sequences=2), settings=settings)).decided["Switch"]

    assert switches(1) > switches(100)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_last_engine_is_replaced_within_the_step(policy):
    world = play(job(policy, lost=(0.05, 0.1, 0.15)))
    assert world.engines_restarted == 1 and len(world.learned) == 3


async def test_without_the_weights_that_its_samples_are_of_the_last_engine_can_not_be_replaced():
    board = SimpleNamespace(mini_batches={"actor": SimpleNamespace(completed=1)})
    with pytest.raises(WorkerLost, match="had updated the actor"):
        await Executor(board, None, None, StepContext(step=1, sampling=None), None)._restart_engine(0)
