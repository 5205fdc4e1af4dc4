"""Policies and board on plain data: no engine, no clock."""

import numpy as np
import pytest

from rlfuse.fusion.board import Board
from rlfuse.fusion.decisions import Generate, Score, Snapshot, Train
from rlfuse.fusion.policies import POLICIES, admit
from rlfuse.samples import Prompt, Response, Reward, RewardFailure, make_groups

KINDS = ("reward", "old_log_prob", "values")


def prompts(n):
    return [Prompt(i, np.array([1, 2], np.int32), "p", (), "source", "0") for i in range(n)]


def response(tokens=3):
    return Response(np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32), "stop", 0, "text")


def play(policy, board, rng):
    """Carry out decisions in a random finishing order; returns the decisions in the order they were taken."""
    taken, generating, scoring = [], [], []
    while not board.done:
        for decision in policy(board.snapshot()):
            board.start(decision)
            taken.append((decision, len(generating)))
            if isinstance(decision, Generate):
                generating += [s.id for g in decision.groups for s in board.groups[g].samples]
            elif isinstance(decision, Score):
                scoring.append(decision)
            else:
                board.trained()
        pending = len(generating) + len(scoring)
        if not pending:
            continue
        pick = rng.integers(pending)
        if pick < len(generating):
            board.finished(generating.pop(pick), response())
        else:
            decision = scoring.pop(pick - len(generating))
            if decision.kind == "reward":
                for sample in decision.samples:
                    board.samples[sample].reward = Reward(1.0)
            board.scored(decision)
    return taken


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(10))
def test_every_sample_is_generated_scored_and_trained_exactly_once(name, seed):
    rng = np.random.default_rng(seed)
    groups = make_groups(prompts(int(rng.integers(1, 9))), int(rng.integers(1, 4)), run_seed=0, step=1)
    board = Board(groups, slots=int(rng.integers(1, 4)), kinds=KINDS, passes=2, mini_batch_groups=2)
    taken = [decision for decision, _ in play(POLICIES[name], board, rng)]
    everyone = sorted(board.samples)
    admitted = [g for d in taken if isinstance(d, Generate) for g in d.groups]
    assert sorted(admitted) == list(range(len(groups)))
    for kind in KINDS:
        assert sorted(s for d in taken if isinstance(d, Score) and d.kind == kind for s in d.samples) == everyone
    trained = [s.id for d in taken if isinstance(d, Train) for s in board.mini_batch(d.mini_batch)]
    assert sorted(trained) == sorted(everyone * 2)


@pytest.mark.parametrize("seed", range(5))
def test_serial_scores_only_after_generation_and_stream_does_not_wait(seed):
    def scored_while_generating(name):
        board = Board(make_groups(prompts(6), 2, 0, 1), 2, KINDS, 1, 3)
        taken = play(POLICIES[name], board, np.random.default_rng(seed))
        return [d for d, generating in taken if isinstance(d, Score) and generating]

    assert not scored_while_generating("serial")
    assert scored_while_generating("stream")


def test_admission_balances_samples_and_keeps_siblings_together():
    view = Snapshot(loads=(4, 0), waiting=((0, 4), (1, 4), (2, 4)), unscored={})
    assert admit(view) == [Generate(0, (1,)), Generate(1, (0, 2))]


def test_failed_samples_leave_their_group_and_mini_batches_keep_prompt_order():
    board = Board(make_groups(prompts(4), 2, 0, 1), 1, ("reward",), 1, 2)
    for i, sample in enumerate(board.samples.values()):
        sample.reward = RewardFailure("fn", "boom") if i in (0, 4, 5) else Reward(1.0)
    assert [[g.prompt.index for g in batch] for batch in board.mini_batches()] == [[0, 1], [3]]
    assert [s.id for s in board.mini_batch(0)] == ["1/0/1", "1/1/0", "1/1/1"]
    assert len(board.failures()) == 3


def test_dynamic_sampling_adds_groups_and_keeps_the_chosen():
    board = Board(make_groups(prompts(2), 1, 0, 1), 1, (), 1, 2)
    board.extend(make_groups(prompts(4)[2:], 1, 0, 1))
    for sample in board.samples.values():
        sample.reward = Reward(1.0)
    board.keep([1, 2, 3], at_most=2)
    assert [g.prompt.index for g in board.kept()] == [1, 2]
    assert board.batches == 2


def test_seeds_belong_to_the_sample():
    first, again = (make_groups(prompts(3), 2, run_seed=5, step=7) for _ in range(2))
    seeds = [s.seed for g in first for s in g.samples]
    assert seeds == [s.seed for g in again for s in g.samples]
    assert len(set(seeds)) == 6
    assert seeds != [s.seed for g in make_groups(prompts(3), 2, run_seed=6, step=7) for s in g.samples]
