"""Every policy on random jobs, machines and finishing orders; `playing` checks each call and decision.

The checks of a step: each sample is generated, scored once per kind and accumulated once per epoch; optimizer steps
follow mini-batches in prompt order, those of the actor after all old log-probs; dropped samples are never trained on;
engines never receive more than their capacity, samples of a group stay together, busy slots are not switched.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
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
def test_each_sample_is_trained_once_in_its_mini_batch_despite_failures(policy, scene):
    assert len(play(replace(scene, policy=policy)).learned) == 1


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@exploring
@given(scene=scenes(steps=2, reference=True, estimator="grpo"))
def test_pipelines_that_score_in_bubbles_follow_all_rules(policy, scene):
    pipelined = replace(scene.settings, lockstep=True, lockstep_backward=True, pipelined=True)
    world = play(replace(scene, policy=policy, settings=pipelined))
    assert len(world.learned) == 2
    assert not world.trainer.filled or scene.mini_batch < scene.batch


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@settings(exploring, max_examples=8)
@given(scene=scenes(steps=2, batches=3))
def test_dynamic_sampling_replaces_groups_without_reward_spread(policy, scene):
    assert_whole_batches(replace(scene, policy=policy))


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [name if name in ("stream", "adaptive") else pytest.param(name, marks=pytest.mark.slow) for name in POLICIES],
)
@settings(exploring, max_examples=8)
@given(scene=scenes(steps=4))
@example(scene=Scene(slots=1, batch=2, siblings=1, mini_batch=1, estimator="gae", failing=100))
@pytest.mark.parametrize("data", ["over_sampling", "tail_batching", "partial_rollout", "one_step_off"])
def test_steps_that_carry_groups_over_train_whole_batches_within_the_staleness_limit(data, policy, scene):
    world = play(replace(scene, data=data, policy=policy))
    most = {"one_step_off": 1, "partial_rollout": scene.steps}.get(data, 0)
    assert all(0 <= staleness <= most for staleness in world.staleness)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@settings(exploring, max_examples=12)
@given(scene=scenes(steps=3), data=st.data())
def test_draining_and_restoring_slots_at_any_time_does_not_change_training(policy, scene, data):
    slots = st.integers(0, scene.slots - 1)
    changes = tuple(data.draw(st.lists(st.tuples(st.floats(0.0, 6.0), slots), max_size=6)))
    drained = tuple(range(scene.slots))[1:] if data.draw(st.booleans()) else ()
    assert len(play(replace(scene, policy=policy, drained=drained, changes=changes)).learned) == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_drained_slot_receives_no_samples_and_the_others_finish_the_step(policy):
    world = play(job(policy, drained=(1,)))
    assert len(world.learned) == 3 and world.decided["OptimizerStep"] == 3 * 4
    assert {world.first[s.id] for groups in world.learned for group in groups for s in group.samples} == {0, 2}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["serial", "stream"])  # these policies never move samples
def test_samples_of_a_slot_drained_during_the_step_continue_on_other_slots(policy):
    costs = Costs(max_tokens=50, step_base_s=1.0, move_s=0.0)
    worlds = [play(job(policy, changes=((when, 0),), costs=costs)) for when in (1.0, 1.5, 2.0, 2.5, 3.0)]
    assert all(len(world.learned) == 3 for world in worlds)
    assert {slot for world in worlds for slot in world.went_on.values()} == {1, 2}


def test_drained_slot_keeps_working_if_all_others_are_lost():
    world = play(job("stream", drained=(0,), lost=(99.0, 1.0, 1.2)))
    assert len(world.learned) == 3 and not world.engines_restarted


PIPELINED = Settings(lockstep=True, lockstep_backward=True, pipelined=True)


@pytest.mark.parametrize("zero", [40, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("given", [Settings(), Settings(lockstep_backward=True), PIPELINED])
@pytest.mark.parametrize("policy", POLICIES)
def test_samples_without_advantage_are_skipped_without_changing_the_steps(policy, given, zero):
    """Rely on `playing`, which checks that the actor runs none of them and that each optimizer step counts them."""
    scene = replace(job(policy, settings=given, zero=zero), reference=False, epochs=2)
    for estimator in ("grpo", "gae"):
        world = play(replace(scene, estimator=estimator))
        assert len(world.learned) == 3 and all(0 < count <= 16 for count in world.skipped)
        assert (min(world.skipped) == 16) == (zero == 100)
        assert max(play(replace(scene, estimator=estimator, reference=True)).skipped) == 0, "a KL loss needs all"


def job(policy, **changes):
    """Return a scene with many samples, few slots and large credits, so that all possible overlaps occur."""
    scene = {"batch": 8, "siblings": 2, "mini_batch": 2, "prompts": 24, "steps": 3, "seed": 1}
    return Scene(policy, slots=3, reference=True, **scene, **changes)


@pytest.mark.slow
def test_work_that_each_policy_overlaps_with_generation():
    overlapped = {policy: play(replace(job(policy), seed=4)).overlapped for policy in POLICIES}
    assert overlapped["serial"] == set()
    assert overlapped["stream"] == overlapped["rlhfuse"] == {"old_log_prob", "ref"}
    assert overlapped["adaptive"] == {"old_log_prob", "ref", "gradients"}


def test_training_waits_for_the_whole_batch_with_a_batch_estimator(tmp_path):
    (tmp_path / "mine.py").write_text("def mine(scores, mask): ...")
    world = play(replace(job("adaptive"), seed=4, estimator=f"{tmp_path}/mine.py:mine"))
    assert len(world.learned) == 3 and world.overlapped == {"old_log_prob", "ref"}


@pytest.mark.parametrize("policy", POLICIES)
def test_passes_of_later_mini_batches_fill_the_schedules_of_earlier_ones(policy):
    world = play(job(policy, settings=PIPELINED))
    if policy == "serial":  # 3 of 4 mini-batches in each of 3 steps; old log-probs at once
        assert world.trainer.filled == {"ref": 3 * 3, "actor": 3}
    else:  # some run while training waits for rewards
        assert world.trainer.filled["ref"] > 3 and world.trainer.filled["actor"] > 0


@pytest.mark.slow
def test_only_rlhfuse_and_adaptive_move_samples():
    moving = {policy for policy in POLICIES if play(job(policy)).decided["Move"]}
    assert "rlhfuse" in moving and moving <= {"rlhfuse", "adaptive"}


@pytest.mark.slow
def test_credit_of_one_pauses_generation_until_scoring_has_caught_up():
    def switches(credit):
        settings = replace(job("stream").settings, credit_samples=credit)
        return play(job("stream", costs=Costs(max_sequences=2), settings=settings)).decided["Switch"]

    assert switches(1) > switches(100)


@pytest.mark.parametrize("policy", POLICIES)
def test_last_engine_is_replaced_within_the_step(policy):
    world = play(job(policy, lost=(0.05, 0.1, 0.15)))
    assert world.engines_restarted == 1 and len(world.learned) == 3


async def test_last_engine_cannot_be_replaced_after_the_actor_was_updated():
    board = SimpleNamespace(mini_batches={"actor": SimpleNamespace(completed=1)})
    with pytest.raises(WorkerLost, match="had updated the actor"):
        await Executor(board, None, None, StepContext(step=1, sampling=None), None)._restart_engine(0)
