"""Selection of prompts for each step, including repeated and deferred ones."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.playing import prompts
from worlds.random_engines import partial, response

from rlfuse.config.schema import Config
from rlfuse.data.prompts import PromptSource
from rlfuse.errors import DataError
from rlfuse.fusion.selection import LABELS, STRENGTH, Selection, drawn_at_most, label, weakest
from rlfuse.run.build import check_enough
from rlfuse.samples import Reward, make_groups

DATA = sorted(LABELS)


class CountingSource(PromptSource):
    """A source that counts the fetched prompts."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.fetched = Counter()

    def next_batch(self):
        batch = super().next_batch()
        self.fetched.update(prompt.index for prompt in batch)
        return batch


class Steps:
    """A selection whose steps end with randomly chosen complete groups."""

    def __init__(self, data, batch=4, excess=0.5, count=24, seed=0):
        self.rng, self.step = np.random.default_rng(seed), 0
        self.source = CountingSource(prompts(count), batch, True, seed)
        self.selection = Selection(data, excess, batch, self.source)
        self.learned, self.unused = Counter(), []

    def take(self):
        """Take one step; return (draw, groups trained on)."""
        self.step += 1
        draw = self.selection.draw(lambda drawn: make_groups(drawn, 2, 0, self.step))
        chosen = set(self.rng.permutation(draw.eligible)[: draw.needed].tolist())
        self.unused = [group for number, group in enumerate(draw.groups) if number not in chosen]
        complete = [group for number, group in enumerate(draw.groups) if number in chosen]
        partials = {}
        for sample in (sample for group in self.unused for sample in group.samples if sample.response is None):
            if sample.rollout_index == 0:
                sample.response, sample.reward = response(5, self.step - 1), Reward(1.0)
            else:
                partials[sample.id] = partial(2, self.step - 1)
        self.learned.update(group.prompt.index for group in complete)
        self.selection.return_unused(self.unused, partials)
        self.partials = partials
        return draw, complete


@pytest.mark.parametrize("data", DATA)
@settings(deadline=None, derandomize=True, max_examples=40)
@given(batch=st.integers(1, 6), excess=st.floats(0.05, 1.5), seed=st.integers(0, 1000), taken=st.integers(1, 9))
def test_a_step_trains_on_one_batch_of_distinct_prompts_and_no_prompt_is_lost(data, batch, excess, seed, taken):
    steps = Steps(data, batch, excess, 6 * batch, seed)
    for _ in range(taken):
        draw, complete = steps.take()
        indices = [group.prompt.index for group in draw.groups]
        assert len(set(indices)) == len(indices) and len(complete) == batch == draw.needed
    to_come = steps.selection.state_dict()
    assert steps.learned + Counter(to_come["again"]) + Counter(to_come["new"]) == steps.source.fetched


def test_exact_draws_batches_in_order():
    steps, source = Steps("exact"), PromptSource(prompts(24), 4, True, 0)
    for _ in range(9):
        assert [group.prompt.index for group in steps.take()[0].groups] == [p.index for p in source.next_batch()]
    assert steps.selection.state_dict() == {"again": [], "new": []}


def test_upcoming_prompts_are_reported_without_drawing_them():
    steps = Steps("exact", batch=4, count=10)
    for _ in range(6):  # across epochs
        before = steps.selection.state_dict(), steps.source.state_dict()
        upcoming = steps.selection.upcoming()
        assert (steps.selection.state_dict(), steps.source.state_dict()) == before
        draw, _ = steps.take()
        assert [group.prompt for group in draw.groups] == upcoming


@pytest.mark.parametrize("data", DATA)
def test_upcoming_prompts_are_an_estimate_if_prompts_are_returned(data):
    steps = Steps(data, batch=4, count=24)
    for _ in range(3):
        steps.take()
        assert 0 < len(steps.selection.upcoming()) <= 4


def test_tail_batching_completes_cut_off_prompts_in_separate_rounds():
    steps, cut_off, tails = Steps("tail_batching"), set(), 0
    for _ in range(12):
        draw, _ = steps.take()
        indices = {group.prompt.index for group in draw.groups}
        if draw.needed == len(draw.groups):
            assert indices <= cut_off
            tails, cut_off = tails + 1, cut_off - indices
        else:
            assert len(indices) == 6 and len(cut_off) < 4
        cut_off |= {group.prompt.index for group in steps.unused}
    assert tails == 4  # two of six prompts are cut off in each of the other eight steps


def test_over_sampling_restarts_cut_off_prompts():
    steps = Steps("over_sampling")
    steps.take()
    unused = [group.prompt.index for group in steps.unused]
    draw, _ = steps.take()
    assert [group.prompt.index for group in draw.groups[:2]] == unused
    assert draw.partials == {} and {sample.step for group in draw.groups for sample in group.samples} == {2}


@pytest.mark.parametrize("data", ["partial_rollout", "one_step_off"])
def test_partial_responses_are_carried_over_and_scored_again(data):
    steps = Steps(data)
    steps.take()
    unused, partials = steps.unused, steps.partials
    assert any(sample.response for group in unused for sample in group.samples) and partials
    draw, _ = steps.take()
    assert draw.groups[: len(unused)] == unused and draw.partials == partials
    assert all(sample.reward is None and not sample.tensors for group in unused for sample in group.samples)


def test_one_step_off_trains_on_each_batch_one_step_later():
    steps = Steps("one_step_off")
    drawn = [steps.take() for _ in range(4)]
    for (before, _), (after, complete) in pairwise(drawn):
        assert complete == after.groups[:4] == before.groups[4:]
        assert {sample.step for group in complete for sample in group.samples} == {after.groups[4].samples[0].step - 1}


@pytest.mark.parametrize("data", DATA)
def test_a_resumed_selection_draws_the_same_prompts(data):
    steps, resumed = Steps(data), Steps(data)
    for _ in range(3):
        steps.take()
    resumed.selection.load_state_dict(steps.selection.state_dict())
    resumed.source.load_state_dict(steps.source.state_dict())
    assert resumed.selection.state_dict() == steps.selection.state_dict()
    first, second = ({group.prompt.index for group in each.take()[0].groups} for each in (steps, resumed))
    assert first == second
    fewer = Steps(data, count=12)  # with a smaller dataset
    fewer.selection.load_state_dict({"again": [3, 20], "new": [23, 7]})
    assert fewer.selection.state_dict() == {"again": [3], "new": [7]}


def test_too_few_prompts_are_an_error():
    with pytest.raises(
        ValueError, match=r"data\.train_files has only 4 distinct prompts.*lower data\.train_batch_size"
    ):
        Steps("over_sampling", batch=4, count=4).take()


FEW = [
    ("over_sampling", 4, 0.5, 4, "draws 6 distinct prompts per step (data.train_batch_size=4, fusion.excess=0.5)"),
    ("over_sampling", 4, 0.25, 7, "has 4 in whole batches"),
    ("over_sampling", 64, 0.25, 64, "draws 80 distinct prompts"),
    ("tail_batching", 4, 0.5, 5, "fusion.data=tail_batching draws 6"),
    ("tail_batching", 1, 0.01, 1, "draws 2 distinct"),
    ("partial_rollout", 8, 1.0, 15, "draws 16"),
    ("one_step_off", 4, 0.25, 7, "Add data, lower data.train_batch_size, or set fusion.data=exact"),
    ("one_step_off", 4, 0.0, 4, "draws 8"),
    ("over_sampling", 4, 0.25, 8, None),
    ("over_sampling", 4, 0.0, 4, None),
    ("tail_batching", 4, 1.0, 8, None),
    ("partial_rollout", 4, 0.5, 8, None),
    ("one_step_off", 4, 0.25, 8, None),
    ("exact", 4, 9.0, 4, None),
]


@pytest.mark.parametrize(("data", "batch", "excess", "count", "part"), FEW, ids=str)
def test_too_few_prompts_are_rejected_at_startup(data, batch, excess, count, part):
    config = Config()
    config.data.train_batch_size, config.fusion.data, config.fusion.excess = batch, data, excess
    source = PromptSource(prompts(count), batch, True, 1)
    if part is not None:
        with pytest.raises(DataError) as error:
            check_enough(config, source)
        assert part in str(error.value)
        return
    check_enough(config, source)
    steps = Steps(data, batch, excess, count)
    assert all(len(steps.take()[0].groups) >= batch for _ in range(12)), "enough prompts remain enough"


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(DATA), st.integers(1, 6), st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.5]), st.integers(0, 9), st.data()
)
def test_as_many_prompts_as_a_step_draws_are_always_enough(data, batch, excess, more, drawn):
    count = max(-(-drawn_at_most(data, excess, batch) // batch) * batch, batch) + more
    steps = Steps(data, batch, excess, count, drawn.draw(st.integers(0, 99)))
    for _ in range(15):
        draw, complete = steps.take()
        indices = [group.prompt.index for group in draw.groups]
        assert len(complete) == batch and len(set(indices)) == len(indices)


def test_the_label_of_a_run_is_the_weakest_of_its_steps():
    labels = {label(data, draft=draft) for data in LABELS for draft in ("ngram", "history")}
    assert labels | {"mismatched"} == set(STRENGTH)
    assert weakest(["exact", "off-policy", "exact"]) == "off-policy"
    assert weakest(reversed(STRENGTH)) == weakest(STRENGTH) == "mismatched"
    assert weakest(["exact", "reordered", "exact"]) == "reordered"


@pytest.mark.parametrize("data", ["over_sampling", "tail_batching", "partial_rollout"])
def test_deferred_prompts_are_counted_and_kept_after_a_change_to_exact(data):
    steps = Steps(data)
    assert not steps.selection.set_aside
    steps.take()
    exact = Selection("exact", 0.5, 4, steps.source)
    exact.load_state_dict(steps.selection.state_dict())
    unused = sorted(group.prompt.index for group in steps.unused)
    assert exact.set_aside == unused and exact.metrics() == {"fusion/prompts_set_aside": 2}
    drawn = exact.draw(lambda prompts: make_groups(prompts, 2, 0, 2)).groups
    assert not {group.prompt.index for group in drawn} & set(unused), "a batch of new prompts"
    assert Selection("exact", 0.5, 4, steps.source).metrics() == {}
