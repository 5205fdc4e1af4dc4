"""Admission and moves of samples on constructed snapshots."""

from dataclasses import replace

import pytest
from worlds.playing import prompts
from worlds.random_engines import response

from rlfuse.costs.model import Costs
from rlfuse.fusion import adaptive
from rlfuse.fusion.assignment import consolidate, slots_needed
from rlfuse.fusion.board import Board
from rlfuse.fusion.decisions import Generate, Move, Settings
from rlfuse.fusion.lengths import Lengths
from rlfuse.fusion.slot_table import SlotTable
from rlfuse.samples import make_groups

COSTS = Costs(step_base_s=0.01, step_per_sequence_s=0.001, flat_batch=2, max_sequences=8, max_tokens=1000)
CONSOLIDATING = Settings(threshold=1.0, max_decode_slowdown=1.0)


def board_with(*slots, costs=COSTS, settings=CONSOLIDATING, waiting=()):
    """Return a board whose slots hold samples of these expected lengths, one prompt each; `waiting` are not started."""
    lengths, everyone = Lengths(costs.max_tokens), [length for slot in slots for length in slot] + list(waiting)
    lengths.learn({prompt: [length] for prompt, length in enumerate(everyone)})
    settings = replace(settings, samples=len(everyone))
    groups = make_groups(prompts(len(everyone)), 1, 0, 1)
    kinds = ("reward", "old_log_prob")
    board = Board(groups, SlotTable(len(slots), costs), kinds, ("actor",), settings=settings, lengths=lengths)
    first = 0
    for slot, held in enumerate(slots):
        board.start(Generate(slot, tuple(range(first, first + len(held)))), 0.0)
        first += len(held)
    return board


def moved(decisions):
    return {(name, move.source, move.target) for move in decisions for name in move.samples}


@pytest.mark.parametrize(
    ("samples", "max_decode_slowdown", "kv_tokens", "expected"),
    [(0, 1.0, 10**6, 1), (2, 1.0, 10**6, 1), (5, 1.0, 10**6, 3), (5, 1.3, 10**6, 1), (5, 1.0, 4, 3), (5, 1.0, 2, 5)],
)
def test_number_of_destinations_follows_flat_batch_and_kv_cache(samples, max_decode_slowdown, kv_tokens, expected):
    costs = Costs(step_base_s=0.01, step_per_sequence_s=0.001, flat_batch=2, max_sequences=8, kv_tokens=kv_tokens)
    settings = Settings(max_decode_slowdown=max_decode_slowdown)
    view = board_with([5, 5], [5], costs=costs, settings=settings).snapshot(0.0)
    assert slots_needed(view, samples) == expected  # 2 prompt tokens in the cache for each sample


def test_tail_is_consolidated_on_the_fullest_slots():
    view = board_with([9], [9, 9, 9], [9, 9], [9]).snapshot(0.0)  # 7 samples: ceil(7 / 2) = 4 slots
    assert consolidate(view) == []
    board = board_with([9], [9, 9], [9], [])
    assert moved(consolidate(board.snapshot(0.0))) == {("1/3/0", 2, 0)}


def test_all_samples_of_an_emptied_slot_move_exactly_once():
    costs = Costs(step_base_s=0.01, flat_batch=8, max_sequences=16)
    board = board_with([9, 9], [9, 9, 9], [9], costs=costs)
    decisions = consolidate(board.snapshot(0.0))
    assert moved(decisions) == {("1/0/0", 0, 1), ("1/1/0", 0, 1), ("1/5/0", 2, 1)}
    for decision in decisions:
        board.start(decision, 0.0)
    assert consolidate(board.snapshot(0.0)) == []


def test_no_consolidation_above_the_threshold_or_while_groups_wait():
    costs = Costs(step_base_s=0.01, flat_batch=8)
    assert consolidate(board_with([9], [9], costs=costs).snapshot(0.0))
    assert not consolidate(board_with([9], [9], costs=costs, settings=Settings(threshold=0.5)).snapshot(0.0))
    assert not consolidate(board_with([9], [9], costs=costs, settings=Settings(threshold=0.0)).snapshot(0.0))
    assert not consolidate(board_with([9], [9], costs=costs, waiting=[9]).snapshot(0.0))


def test_samples_are_carried_as_tokens_or_kv_whichever_is_faster():
    def carry(**costs):
        (move,) = consolidate(board_with([9], [9], costs=Costs(flat_batch=8, **costs)).snapshot(0.0))
        return move.carry

    assert carry() == "tokens"
    assert carry(link_bytes_per_s=1e9, kv_bytes_per_token=10) == "kv"
    assert carry(link_bytes_per_s=1e3, kv_bytes_per_token=10) == "tokens"


# adaptive ------------------------------------------------------------------------------------------------------------


def test_longest_samples_are_admitted_first_into_small_batches():
    costs = Costs(step_base_s=0.01, step_per_sequence_s=0.01, flat_batch=1, max_sequences=6, max_tokens=1000)
    board = board_with([], [], costs=costs, waiting=[10] * 20 + [400, 390])
    batches = {decision.slot: decision.groups for decision in adaptive.admit_by_deadline(board.snapshot(0.0))}
    assert batches[0][0] == 20, "the longest sample is first"
    assert len(batches[0]) < costs.max_sequences, "a full slot would finish it late"


def test_admission_without_longest_first_is_the_default():
    board = board_with([], [], waiting=[10, 400, 20], settings=Settings(longest_first=False))
    assert adaptive.admit_by_deadline(board.snapshot(0.0)) == [Generate(0, (0, 2)), Generate(1, (1,))]


def with_backlog(board, tokens):
    """Return a snapshot with a scoring backlog of this many tokens."""
    return replace(board.snapshot(0.0), backlog={"reward": 0, "old_log_prob": tokens})


def test_slots_are_freed_for_a_large_backlog_and_the_longest_samples_stay():
    board = board_with([300], [500], [20], [30], costs=Costs(step_base_s=0.01, flat_batch=4, move_s=0.02, switch_s=0.1))
    decisions = adaptive.free_slots(with_backlog(board, 100_000))
    assert moved(decisions) == {("1/0/0", 0, 1), ("1/2/0", 2, 1), ("1/3/0", 3, 1)}
    assert all(isinstance(decision, Move) for decision in decisions)
    assert adaptive.free_slots(with_backlog(board, 100)) == [], "moving and switching cost more"


def test_no_release_check_is_skipped_if_several_samples_finish_at_once():
    board = board_with([300], [500])
    board.finished("1/0/0", response(), 0.0)
    view = board.snapshot(0.0)
    assert (view.finished, board.snapshot(0.0).finished) == (1, 0)
    due = [
        adaptive.release_check_is_due(replace(view, unfinished=unfinished, finished=1))
        for unfinished in range(128, 133)
    ]
    assert due == [True, False, False, False, True]
    assert not adaptive.release_check_is_due(replace(view, unfinished=130, finished=2)), "131 and 130"
    assert adaptive.release_check_is_due(replace(view, unfinished=130, finished=3)), "132 was passed"


def test_no_slot_is_freed_while_another_is_free_or_groups_wait():
    costs = Costs(step_base_s=0.01, flat_batch=4, move_s=0.02, switch_s=0.1)
    assert adaptive.free_slots(with_backlog(board_with([300], [500], costs=costs, waiting=[9]), 100_000)) == []
    board = board_with([300], [500], [], costs=costs)
    board.slot_table.occupy(2)
    board.switched(2, "trainer")
    assert adaptive.free_slots(with_backlog(board, 100_000)) == []
