"""Single state transitions of the board; `test_policies` covers whole random steps."""

from dataclasses import replace
from math import log

import numpy as np
import pytest
from worlds.playing import prompts
from worlds.random_engines import partial, response

from rlfuse.costs.model import Costs
from rlfuse.fusion.assignment import admit, divide_work, sibling_groups, unassigned
from rlfuse.fusion.board import Board
from rlfuse.fusion.decisions import Accumulate, Generate, Move, OptimizerStep, Score, Settings, Switch
from rlfuse.fusion.lengths import Lengths, seconds_to_generate, with_sibling
from rlfuse.fusion.mini_batches import MiniBatchProgress
from rlfuse.fusion.selection import Draw
from rlfuse.fusion.slot_table import SlotTable
from rlfuse.samples import TRAINING, VALIDATION, Reward, RewardFailure, make_groups


def made(count=4, siblings=1):
    return make_groups(prompts(count), siblings, run_seed=0, step=1)


def board(groups, slots=1, kinds=("reward",), models=("actor",), draw=None, **more):
    more = {"mini_batch_groups": 2} | more
    return Board(groups, SlotTable(slots, Costs(max_tokens=100)), kinds, models, draw=draw, **more)


def generate(board, *groups, slot=0):
    """Generate these groups on the slot, in this order."""
    board.start(Generate(slot, groups), 0.0)
    for sample in (sample for group in groups for sample in board.groups[group].samples):
        board.finished(sample.id, response(), 0.0)


def reward(board, *groups, fails=()):
    """Score the samples of these groups; those in `fails` get a `RewardFailure`."""
    decision = Score("reward", tuple(s.id for g in groups for s in board.groups[g].samples))
    board.start(decision, 0.0)
    for sample in (board.samples[name] for name in decision.samples):
        sample.reward = RewardFailure("f", "m") if sample.id in fails else Reward(1.0)
    board.scored(decision, 0.0)


def ready(board, model="actor"):
    return list(board.snapshot(0.0).ready[model])


def test_failed_samples_leave_their_group_and_mini_batches_keep_prompt_order():
    b = board(made(4, siblings=2))
    generate(b, 3, 0, 2, 1)
    reward(b, 3, 2, 1, 0, fails={"1/0/0", "1/2/0", "1/2/1"})
    b.prepared("actor", [3, 2, 1, 0])
    assert sorted(ready(b)) == ["1/0/1", "1/1/0", "1/1/1"]
    b.start(Accumulate("actor", tuple(ready(b))), 0.0)
    assert ready(b) == [] and b.snapshot(0.0).ready_to_step == []
    b.accumulated(Accumulate("actor", ("1/0/1", "1/1/0", "1/1/1")), 0.0)
    assert b.snapshot(0.0).ready_to_step == ["actor"]
    b.start(OptimizerStep("actor"), 0.0)
    b.stepped(OptimizerStep("actor"))
    assert sorted(ready(b)) == ["1/3/0", "1/3/1"]
    assert [group.prompt.index for group in b.groups_to_train()] == [0, 1, 3] and len(b.failures()) == 3


def with_baselines(count, siblings=2):
    return make_groups(prompts(count), siblings, run_seed=0, step=1, with_baseline=True)


def scored_with_baselines(b, rewards):
    """Generate all samples and set `rewards` in this order; None is a failure."""
    b.start(Generate(0, tuple(range(len(b.groups)))), 0.0)
    for name in b.samples:
        b.finished(name, response(), 0.0)
    for name, value in rewards.items():
        b.start(Score("reward", (name,)), 0.0)
        b.samples[name].reward = RewardFailure("f", "m") if value is None else Reward(value)
        b.scored(Score("reward", (name,)), 0.0)


def test_baselines_are_generated_and_scored_but_not_trained_on():
    groups = with_baselines(1)
    assert [(each.id, each.is_baseline) for each in groups[0].generated] == [
        ("1/0/2", True), ("1/0/0", False), ("1/0/1", False)]  # fmt: skip
    b = board(groups, kinds=("reward", "ref"))
    scored_with_baselines(b, {"1/0/0": 1.0, "1/0/1": 2.0})
    passes = Score("ref", tuple(b.snapshot(0.0).unscored["ref"]), 0)
    assert sorted(passes.samples) == ["1/0/0", "1/0/1"]
    b.switched(0, "trainer")
    b.start(passes, 0.0)
    b.scored(passes, 0.0)
    assert not b.take_complete() and not b.all_scored  # its baseline has no score yet
    b.start(Score("reward", ("1/0/2",)), 0.0)
    b.samples["1/0/2"].reward = Reward(0.5)
    b.scored(Score("reward", ("1/0/2",)), 0.0)
    assert b.take_complete() == [0] and b.all_scored
    b.prepared("actor", [0])
    assert ready(b) == ["1/0/0", "1/0/1"]
    (group,) = b.groups_to_train()
    assert group.baseline.reward.value == 0.5 and len(group.samples) == len(b.needed_samples()) == 2


@pytest.mark.parametrize("order", [["1/0/2", "1/0/0"], ["1/0/0", "1/0/2"]])
def test_a_baseline_without_a_reward_excludes_its_group_once(order):
    b = board(with_baselines(3), mini_batch_groups=3)
    rewards = dict.fromkeys(order) | {"1/0/1": 1.0} | {f"1/{prompt}/{k}": 1.0 for prompt in (1, 2) for k in range(3)}
    scored_with_baselines(b, rewards)
    b.prepared("actor", b.take_complete())
    assert sorted(ready(b)) == ["1/1/0", "1/1/1", "1/2/0", "1/2/1"]
    assert [group.prompt.index for group in b.groups_to_train()] == [1, 2] and b.all_scored
    work = Accumulate("actor", tuple(ready(b)))
    b.start(work, 0.0)
    b.accumulated(work, 0.0)
    assert b.snapshot(0.0).ready_to_step == ["actor"]


@pytest.mark.parametrize("last", ["1/0/2", "1/0/1"])
def test_siblings_scored_in_one_call_do_not_wait_for_their_baseline(last):
    long = [replace(prompt, token_ids=np.zeros(500, np.int32)) for prompt in prompts(1)]
    b = board(make_groups(long, 2, run_seed=0, step=1, with_baseline=True), kinds=("reward", "ref"))
    b.start(Generate(0, (0,)), 0.0)
    for name in sorted(b.samples, key=lambda name: name == last):
        assert b.snapshot(0.0).prompts_dominate
        b.finished(name, response(), 0.0)
    view = b.snapshot(0.0)
    assert sorted(view.unscored["ref"]) == ["1/0/0", "1/0/1"] and len(view.unscored["reward"]) == 3


def test_an_empty_mini_batch_is_skipped_even_if_the_next_was_ready_earlier():
    progress = MiniBatchProgress(passes=2)
    progress.set_mini_batches({0: 0, 1: 1}, sizes=[1, 1], tokens=[5.0, 5.0])
    progress.prepare({"b": (1, 5)})
    assert not progress.ready
    progress.drop(0)
    for _ in range(2):
        assert list(progress.ready) == ["b"]
        progress.start(["b"])
        progress.finish(["b"])
        assert progress.accumulated
        progress.step()
    assert progress.done


def test_the_actor_waits_for_all_old_log_probs_before_it_changes():
    b = board(made(2), kinds=("reward", "old_log_prob"), mini_batch_groups=1)
    generate(b, 0, 1)
    reward(b, 0, 1)
    passes = [Score("old_log_prob", (f"1/{prompt}/0",), 0) for prompt in (0, 1)]
    b.switched(0, "trainer")
    b.slot_table.occupy(0)
    b.switched(0, "trainer")
    b.start(passes[0], 0.0)
    b.scored(passes[0], 0.0)
    b.prepared("actor", b.take_complete())
    work = Accumulate("actor", ("1/0/0",), 0)
    b.start(work, 0.0)
    b.accumulated(work, 0.0)
    assert b.snapshot(0.0).ready_to_step == []
    b.start(passes[1], 0.0)
    b.scored(passes[1], 0.0)
    assert b.snapshot(0.0).ready_to_step == ["actor"]


def test_groups_added_by_dynamic_sampling_can_be_selected_like_the_first():
    b = board(made(2), mini_batch_groups=1)
    generate(b, 0, 1)
    reward(b, 0, 1)
    assert [group.prompt.index for group in b.groups_to_train(b.take_complete())] == [0, 1]
    b.train_on([1], at_most=2)
    b.extend(made(4)[2:], 0.0)
    generate(b, 2, 3)
    reward(b, 2, 3)
    assert [group.prompt.index for group in b.groups_to_train(b.take_complete())] == [2, 3]
    b.train_on([1, 2, 3], at_most=2)
    assert [group.prompt.index for group in b.groups_to_train()] == [1, 2] and b.batches == 2
    b.prepared("actor", range(4))
    assert ready(b) == ["1/1/0"]


def test_a_batch_without_spread_consumes_no_optimizer_steps():
    b = board(made(2), mini_batch_groups=1)
    generate(b, 0, 1)
    reward(b, 0, 1, fails={"1/0/0", "1/1/0"})
    b.train_on([], at_most=2)
    b.extend(made(3)[2:], 0.0)
    generate(b, 2)
    reward(b, 2)
    b.train_on([2], at_most=2)
    b.prepared("actor", range(3))
    assert ready(b) == ["1/2/0"] and not b.done


def drawn(count, eligible, needed, **more):
    groups = made(count)
    return board(groups, draw=Draw(groups, eligible, needed, {}), **more)


def test_no_training_until_the_first_finished_groups_are_selected():
    b = drawn(4, eligible=4, needed=2, mini_batch_groups=1)
    b.start(Generate(0, (0, 1, 2, 3)), 0.0)
    b.finished("1/3/0", response(), 0.0)
    reward(b, 3)
    b.prepared("actor", b.take_complete())
    assert ready(b) == [], "its mini-batch is not known yet"
    b.finished("1/1/0", response(), 0.0)
    assert b.take_surplus() == [(0, ["1/0/0", "1/2/0"])]
    assert ready(b) == []
    reward(b, 1)
    b.prepared("actor", b.take_complete())
    assert ready(b) == ["1/1/0"] and [group.prompt.index for group in b.groups_to_train()] == [1, 3]


def test_groups_selected_in_advance_are_trained_on_before_selection_ends():
    b = drawn(4, eligible=2, needed=2, mini_batch_groups=1)
    b.start(Generate(0, (0, 1, 2, 3)), 0.0)
    for prompt in (3, 0):
        b.finished(f"1/{prompt}/0", response(), 0.0)
        reward(b, prompt)
        b.prepared("actor", b.take_complete())
    assert ready(b) == ["1/0/0"]
    work = Accumulate("actor", ("1/0/0",))
    b.mini_batches["actor"].start(work.samples)
    b.mini_batches["actor"].finish(work.samples)
    b.finished("1/1/0", response(), 0.0)
    assert ready(b) == [], "the first is not accumulated again"
    assert b.snapshot(0.0).ready_to_step == [], "a reward that is missing may end the run"
    reward(b, 1)
    assert b.snapshot(0.0).ready_to_step == ["actor"]
    assert [group.prompt.index for group in b.unneeded_groups()[0]] == [2, 3]


def test_scoring_is_complete_only_after_calls_for_dropped_samples_return():
    b = drawn(2, eligible=1, needed=1)
    b.start(Generate(0, (0, 1)), 0.0)
    b.finished("1/1/0", response(), 0.0)
    call = Score("reward", ("1/1/0",))
    b.start(call, 0.0)
    b.finished("1/0/0", response(), 0.0)
    reward(b, 0)
    assert b.needed_samples() == b.groups[0].samples and not b.all_scored
    b.scored(call, 0.0)
    assert b.all_scored


def test_a_moving_sample_is_discarded_once_its_group_is_dropped():
    b = drawn(2, eligible=2, needed=1, slots=2)
    b.start(Generate(0, (0, 1)), 0.0)
    b.start(Move(("1/1/0",), source=0, target=1), 0.0)
    b.finished("1/0/0", response(), 0.0)
    assert b.evicted("1/1/0", partial(1), 0.0) is None
    assert (
        b.unneeded_groups()[1].keys() == {"1/1/0"} and b.snapshot(0.0).in_flight == 0 and not b.slot_table.slots[1].load
    )


def test_dropped_groups_with_finished_samples_are_not_counted():
    groups = made(3)
    for group in groups:
        group.samples[0].response = response()
    b = board(groups, draw=Draw(groups, 3, 1, {}))
    assert b.snapshot(0.0).unfinished == 0 and [group.prompt.index for group in b.groups_to_train()] == []
    reward(b, 0)
    assert b.all_scored and [group.prompt.index for group in b.groups_to_train()] == [0]


def test_a_moved_sample_keeps_its_tokens_and_a_lost_one_restarts():
    b = board(made(2), slots=2)
    b.start(Generate(0, (0,)), 0.0)
    b.start(Generate(1, (1,)), 0.0)
    b.start(Move(("1/0/0",), source=0, target=1), 0.0)
    assert b.evicted("1/0/0", partial(7), 0.1) == 1
    assert len(b.arrived("1/0/0", 1, 0.1).token_ids) == 7
    assert [b.slot_table.slots[1].samples[name].carried for name in ("1/1/0", "1/0/0")] == [0, 7]
    b.engine_lost(1, 0.2)
    view = b.snapshot(0.2)
    assert dict(view.waiting) == {1: 1, 0: 1} and list(view.engines_with_room) == [0] and view.in_flight == 0
    assert b.partials == {}
    b.start(Generate(0, (0,)), 0.2)
    assert b.slot_table.slots[0].samples["1/0/0"].carried == 0


def test_a_busy_slot_gets_no_work():
    b = board(made(1))
    b.start(Generate(0, (0,)), 0.0)
    with pytest.raises(RuntimeError, match="slot 0 got work while it is busy"):
        b.start(Switch(0, "trainer"), 0.0)


def test_admission_balances_samples_and_keeps_siblings_together_within_capacity():
    groups = made(5, siblings=4)
    b = Board(groups, SlotTable(2, Costs(max_sequences=8, max_tokens=100)), ("reward",), settings=Settings(samples=20))
    b.start(Generate(0, (0,)), 0.0)
    assert admit(b.snapshot(0.0)) == [Generate(1, (1, 3)), Generate(0, (2,))]


def test_an_empty_engine_admits_a_group_larger_than_its_capacity():
    b = Board(made(2, siblings=4), SlotTable(1, Costs(max_sequences=2, max_tokens=100)), ("reward",))
    assert admit(b.snapshot(0.0)) == [Generate(0, (0,))]


def test_work_of_all_ranks_occupies_every_slot():
    b = board(made(1), slots=2)
    for slot in (0, 1):
        b.start(Switch(slot, "trainer"), 0.0)
        b.switched(slot, "trainer")
    view = b.snapshot(0.0)
    assert unassigned(view, [], 5) == [0, 1] and unassigned(view, [], 1) == [0]
    assert unassigned(view, [Score("ref", ("a",), 0)], 5) == [1]
    assert unassigned(view, [Score("ref", ("a",))], 5) == []


def test_shares_are_balanced_and_leave_work_for_slots_that_become_free_later():
    view = board(made(1), slots=4).snapshot(0.0)
    sizes = {"a": 9, "b": 8, "c": 7, "d": 6, "e": 5, "f": 5}
    assert divide_work(view, sizes, 40, [0, 3], call_s=0, tokens_per_s=1) == {0: ("a",), 3: ("b", "e")}
    assert set(divide_work(view, sizes, 40, [2], call_s=100, tokens_per_s=1)[2]) == sizes.keys()


def test_seeds_depend_on_run_and_sample():
    seeds, again, other = ([s.seed for g in make_groups(prompts(3), 2, run, 7) for s in g.samples] for run in (5, 5, 6))
    assert seeds == again != other and len(set(seeds)) == 6


def test_seeds_of_a_scope_do_not_depend_on_the_step():
    scopes = [(step, scope) for scope in (TRAINING, VALIDATION) for step in (1, 2)]
    seeds = [
        [s.seed for g in make_groups(prompts(3), 2, 5, step, with_baseline=True, scope=scope) for s in g.generated]
        for step, scope in scopes
    ]
    assert seeds[0] == seeds[1] and seeds[2] == seeds[3]
    assert len({*seeds[0], *seeds[2]}) == 18


def test_lengths_follow_the_policy_and_finished_siblings():
    lengths = Lengths(longest=100)
    assert lengths.expect(0) == 25 and not lengths.knows(0)
    lengths.learn({0: [10, 30], 1: [80]})
    assert lengths.error is None, "these prompts have no history"
    assert (lengths.expect(0), lengths.expect(1), lengths.expect(2)) == (20, 80, 40)
    lengths.learn({0: [40]})
    assert lengths.expect(0) == 30 and lengths.knows(1)
    assert lengths.error == pytest.approx(log(40 / 20))
    again = Lengths(longest=100)
    again.load_state_dict(lengths.state_dict())
    assert [again.expect(prompt) for prompt in range(3)] == [lengths.expect(prompt) for prompt in range(3)]
    assert with_sibling(30.0, finished=1, length=60) == 40.0


def test_max_sequences_is_lowered_only_while_all_lengths_are_known():
    lengths, costs = Lengths(longest=100), Costs(max_sequences=8, max_tokens=100)
    lengths.learn({prompt: [50] for prompt in range(4)})
    groups = made(5, siblings=1)
    b = Board(groups[:4], SlotTable(1, costs), ("reward",), settings=Settings(max_sequences=2), lengths=lengths)
    assert b.slot_table.costs.max_sequences == 2
    b.start(Generate(0, (0, 1)), 0.0)
    assert not b.slot_table.engines_with_room
    b.extend(groups[4:], 0.0)
    assert b.slot_table.costs.max_sequences == 8 and list(b.slot_table.engines_with_room) == [0]


def test_generation_time_is_bounded_by_the_longest_sample_and_the_share_of_work():
    costs = Costs(step_base_s=0.01, step_per_sequence_s=0.001, flat_batch=2, max_sequences=10)
    one, two = (seconds_to_generate(np.array([100.0] * 8), slots, 0.0, costs) for slots in (1, 2))
    assert 1.0 <= two < one
    assert seconds_to_generate(np.array([100.0]), 4, 0.0, costs) == pytest.approx(1.0, rel=0.01)
    assert seconds_to_generate(np.array([100.0] * 8), 2, 5.0, costs) >= 2.5 + two / 2


def test_siblings_are_scored_in_one_call_if_prompts_dominate():
    long = [replace(prompt, token_ids=np.zeros(500, np.int32)) for prompt in prompts(2)]
    b = board(make_groups(long, 3, run_seed=0, step=1), slots=2, kinds=("reward", "ref"))
    b.start(Generate(0, (0, 1)), 0.0)
    first, *others = (sample for group in b.groups for sample in group.samples)
    b.finished(first.id, response(), 0.0)
    waiting = b.snapshot(0.0).unscored
    assert list(waiting["reward"]) == [first.id] and not waiting["ref"]
    for sample in others:
        b.finished(sample.id, response(), 0.0)
    view = b.snapshot(0.0)
    assert len(view.unscored["ref"]) == 6 and view.prompts_dominate
    calls = divide_work(view, view.unscored["ref"], view.backlog["ref"], [0, 1], call_s=0, tokens_per_s=1)
    assert sorted(calls.values()) == [("1/0/0", "1/0/1", "1/0/2"), ("1/1/0", "1/1/1", "1/1/2")]
    # Unsplit groups would leave two of four slots idle. On three slots, split groups are four parts: one too many.
    parts = [("1/0/0", "1/0/2"), ("1/0/1",), ("1/1/0", "1/1/2"), ("1/1/1",)]
    assert [len([*sibling_groups(view, view.unscored["ref"], slots)]) for slots in (1, 2, 3, 4, 6, 9)] == [
        2,
        2,
        2,
        4,
        6,
        6,
    ]
    assert [*sibling_groups(view, view.unscored["ref"], 4)] == parts
    assert len([*sibling_groups(replace(view, unfinished=1), view.unscored["ref"], 4)]) == 2


def test_states_of_samples_and_groups_and_refusal_of_an_invalid_transition():
    b = board(made(1), slots=2)
    record = b.records["1/0/0"]
    assert (record.state, record.group.state) == ("waiting", "generating")
    b.start(Generate(0, (0,)), 0.0)
    b.start(Move((record.id,), source=0, target=1), 0.0)
    assert record.state == "leaving"
    with pytest.raises(RuntimeError, match="sample 1/0/0 cannot change to leaving: it is leaving"):
        b.start(Move((record.id,), source=0, target=1), 0.0)
    b.evicted(record.id, partial(7), 0.1)
    assert record.state == "moving"
    b.arrived(record.id, 1, 0.1)
    b.finished(record.id, response(), 0.2)
    assert (record.state, record.group.state) == ("finished", "generated")
    reward(b, 0)
    assert (record.state, record.group.state) == ("scored", "complete")


def zero_advantages(groups, **more):
    """Return a board with generated groups, in role `trainer`, whose old log-probs are read only by the loss."""
    b = board(groups, kinds=("reward", "old_log_prob"), **{"loss_only": ("old_log_prob",)} | more)
    generate(b, *range(len(groups)))
    b.switched(0, "trainer")
    return b


def test_a_skipped_sample_counts_as_accumulated_in_every_epoch():
    b = zero_advantages(made(2, siblings=2), passes=2, fused_into_first_update=("old_log_prob",))
    reward(b, 0, 1)
    assert b.take_complete() == [0, 1] and b.all_scored
    b.prepared("actor", [0, 1], skipped=["1/0/0", "1/0/1"])
    for _ in range(2):
        assert ready(b) == ["1/1/0", "1/1/1"] and not b.snapshot(0.0).ready_to_step
        b.start(Accumulate("actor", ("1/1/0", "1/1/1"), 0), 0.0)
        b.accumulated(Accumulate("actor", ("1/1/0", "1/1/1"), 0), 0.0)
        progress = b.mini_batches["actor"]
        assert b.snapshot(0.0).ready_to_step == ["actor"] and set(progress.skipped_samples) == {"1/0/0", "1/0/1"}
        assert sorted(progress.accumulated_samples) == ["1/0/0", "1/0/1", "1/1/0", "1/1/1"]
        b.start(OptimizerStep("actor"), 0.0)
        b.stepped(OptimizerStep("actor"))
    assert b.mini_batches["actor"].done and b.skipped_share == 0.5


def test_a_mini_batch_without_advantages_steps_immediately_and_trains_the_critic():
    b = zero_advantages(made(2), models=("critic", "actor"), fused_into_first_update=("old_log_prob",))
    reward(b, 0, 1)
    for model, skipped in (("critic", ()), ("actor", ["1/0/0", "1/1/0"])):
        b.prepared(model, [0, 1], skipped)
    assert ready(b, "critic") == ["1/0/0", "1/1/0"] and ready(b) == []
    assert b.snapshot(0.0).ready_to_step == ["actor"] and b.skipped_share == 1.0


def test_old_log_probs_are_dropped_unless_a_call_has_started():
    """Skip one group without advantages in the first mini-batch, and one whose pass is running in the second."""
    b = zero_advantages(made(4), mini_batch_groups=2)
    running = Score("old_log_prob", ("1/2/0",), 0)
    b.start(running, 0.0)
    reward(b, 0, 1, 2, 3)
    tokens = b.snapshot(0.0).tokens_to_score
    b.prepared("actor", b.take_complete(), skipped=["1/0/0", "1/2/0"])
    view = b.snapshot(0.0)
    assert list(view.unscored["old_log_prob"]) == ["1/1/0", "1/3/0"]
    assert tokens - view.tokens_to_score == b.samples["1/0/0"].tokens
    b.scored(running, 0.0)
    assert ready(b) == [] and not b.snapshot(0.0).ready_to_step, "other groups still need their old log-probs"
    rest = Score("old_log_prob", ("1/1/0", "1/3/0"), 0)
    b.start(rest, 0.0)
    b.scored(rest, 0.0)
    assert ready(b) == ["1/1/0"] and b.snapshot(0.0).tokens_to_score == 0


def test_groups_replaced_by_dynamic_sampling_need_no_old_log_probs():
    b = zero_advantages(made(3), mini_batch_groups=1)
    reward(b, 0, 1, 2)
    b.train_on([1], at_most=1)
    assert list(b.snapshot(0.0).unscored["old_log_prob"]) == ["1/1/0"]
    b.prepared("actor", b.take_complete())
    chosen = Score("old_log_prob", ("1/1/0",), 0)
    b.start(chosen, 0.0)
    b.scored(chosen, 0.0)
    assert ready(b) == ["1/1/0"] and b.snapshot(0.0).tokens_to_score == 0


def test_remaining_tokens_expect_skipped_samples():
    progress = MiniBatchProgress(1, skipped_share=0.5)
    progress.set_mini_batches({0: 0, 1: 0}, [2], [40.0])
    assert progress.remaining_tokens == 20
    progress.skip("a", 0, 20)
    assert progress.remaining_tokens == 10 and set(progress.skipped_samples) == {"a"}
    progress.prepare({"b": (1, 20)})
    assert progress.remaining_tokens == 20 and progress.start(["b"]) == 20 and progress.remaining_tokens == 0
