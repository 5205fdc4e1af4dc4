"""Token-level rewards: results of reward functions, their combination, and use by estimators."""

import math
from dataclasses import replace

import numpy as np
import pytest
from test_experience import config, groups, prepare_and_complete
from test_reward_composition import entry

from rlfuse.algorithms.experience import Experience
from rlfuse.observe.tracking import sample_row
from rlfuse.rewards.api.combine import compose
from rlfuse.rewards.api.functions import load_function
from rlfuse.rewards.api.items import Item, Score, UnknownTokens
from rlfuse.samples import Reward, RewardFailure


def item(tokens=4):
    return Item("0", 1, "p", [], "p", "r", tokens if isinstance(tokens, UnknownTokens) else [7] * tokens, "s", None)


def outcome(result, tokens=4):
    def function(data_source, solution_str, ground_truth):
        return result

    (found,) = load_function(function).score([item(tokens)])
    return found


@pytest.mark.parametrize(
    ("result", "value", "token_rewards"),
    [
        ({"token_rewards": [0.5, 0, -1, 2]}, 1.5, (0.5, 0, -1, 2)),
        ({"score": 1.0, "token_rewards": np.array([0.5, 0, 0, 0])}, 1.5, (0.5, 0, 0, 0)),
        ({"score": 1, "step_rewards": [(3, 0.5), [1, 0.25]]}, 1.75, (0, 0.25, 0, 0.5)),
        ({"step_rewards": []}, 0.0, (0, 0, 0, 0)),
        ({"score": 2.0}, 2.0, None),
    ],
)
def test_a_function_returns_rewards_of_tokens_steps_or_the_response(result, value, token_rewards):
    assert outcome(result) == Score(value, token_rewards=token_rewards)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"token_rewards": [0.5]}, "returned 1 token_rewards for a response of 4 tokens"),
        ({"token_rewards": [0.5, 0, 0, math.nan]}, "returned nan; a token reward must be finite"),
        ({"token_rewards": [0.5, 0, 0, "a"]}, "a token reward must be a number"),
        ({"token_rewards": 1.0}, "returned 1.0 (float) as token_rewards; it must be a list"),
        ({"step_rewards": [(4, 1.0)]}, "a step that ends at token 4 of 4"),
        ({"step_rewards": [(1, 1.0), (1, 2.0)]}, "a step that ends at token 1 of 4"),
        ({"step_rewards": [(1234567, 1.0)]}, "a step that ends at token 1234567 of 4;"),
        ({"step_rewards": [(0.5, 1.0)]}, "indices must be whole numbers from 0"),
        ({"step_rewards": [(1, math.inf)]}, "returned inf; a step reward must be finite"),
        ({"step_rewards": [(1, 2.0, 3.0)]}, "an entry must be (token index, number)"),
        ({"step_rewards": [], "token_rewards": []}, "returned both token_rewards and step_rewards"),
        ({"reward": 1.0}, "the key `score` is required, or else `token_rewards` or `step_rewards`"),
    ],
)
def test_invalid_token_rewards_are_failures(result, message):
    found = outcome(result)
    assert type(found) is RewardFailure and message in found.message


def test_responses_without_saved_tokens_can_be_scored_again():
    assert outcome({"step_rewards": [(2, 0.5)]}, UnknownTokens()).token_rewards == (0, 0, 0.5)
    assert type(outcome({"token_rewards": [1.0]}, UnknownTokens(3))) is RewardFailure


def test_all_signatures_may_return_token_rewards_and_receive_requested_tokens():
    def of_verl(data_source, solution_str, ground_truth, completion_ids):
        return {"step_rewards": [(len(completion_ids) - 1, 1.0)]}

    def of_trl(prompts, completions, completion_ids):
        return [{"token_rewards": [0.5] * len(ids)} for ids in completion_ids]

    def with_kwargs(data_source, solution_str, ground_truth, **kwargs):
        return float("completion_ids" in kwargs)

    class Model:
        def score(self, samples):
            return [Reward(1.0, token_rewards=(0.25,) * each.tokens) for each in samples]

    totals = [load_function(each).score([item(2)])[0] for each in (of_verl, of_trl, with_kwargs, Model())]
    assert [each.token_rewards for each in totals] == [(0, 1.0), (0.5, 0.5), None, (0.25, 0.25)]
    assert [each.value for each in totals] == [1.0, 1.0, 0.0, 1.0]


def test_token_rewards_are_combined_by_weight():
    entries = [entry("f", 2.0), entry("g"), entry("h")]
    outcomes = {"f": Score(1.0, token_rewards=(0.25, 0.5)), "g": Score(1.0), "h": Score(1, token_rewards=(1.0, 0.0))}
    found = compose(entries, "s", outcomes)
    assert (found.value, found.token_rewards) == (4.0, (1.5, 1.0)) and found.parts["f"] == 1.0
    for key, value in (("clip", [0.0, 1.0]), ("normalise", True)):
        assert f"{key} can't be applied" in compose([entry("f", **{key: value})], "s", outcomes).message
    large = compose(entries[:1], "s", {"f": Score(0.0, token_rewards=(1e300, -1e300))})
    assert "the rewards of a token is 2e+300, outside float32" in large.message
    closed = compose([entry("g", gate=True), entry("f")], "s", {"g": Score(0.0)})
    assert closed.token_rewards is None


def with_token_rewards(batch, *token_rewards):
    samples = [sample for group in batch for sample in group.samples]
    for sample, given in zip(samples, token_rewards, strict=True):
        sample.reward = replace(sample.reward, token_rewards=given)
    return batch


def test_estimators_use_token_rewards_at_their_tokens():
    keys = dict(algorithm__adv_estimator="gae", algorithm__gamma=0.5, algorithm__lam=1.0)
    batch = with_token_rewards(groups([[1.0, 2.0]], [[3, 2]]), (0.25, 0.0, 0.5), None)
    prepare_and_complete(Experience(config(**keys)), batch)
    first, second = batch[0].samples
    np.testing.assert_allclose(first.tensors["token_rewards"], [0.25, 0.0, 0.75])  # 1 - 0.75 more on the last token
    np.testing.assert_allclose(second.tensors["token_rewards"], [0.0, 2.0])
    np.testing.assert_allclose(first.tensors["returns"], [0.25 + 0.75 / 4, 0.75 / 2, 0.75])
    reinforced = with_token_rewards(groups([[1.0, 2.0]], [[3, 2]]), (0.25, 0.0, 0.5), None)
    experience = Experience(config(**keys | {"algorithm__adv_estimator": "reinforce_plus_plus"}))
    experience.prepare(reinforced)
    np.testing.assert_allclose(reinforced[0].samples[0].tensors["returns"], first.tensors["returns"])


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_outcome_estimators_use_the_sum_of_token_rewards(estimator):
    plain, process = (groups([[1.0, 0.5, 0.25]], [[3, 2, 4]]) for _ in range(2))
    with_token_rewards(process, (0.25, 0.0, 0.5), (0.5, 0.5), None)
    for batch in (plain, process):
        prepare_and_complete(Experience(config(algorithm__adv_estimator=estimator)), batch)
    for one, other in zip(plain[0].samples, process[0].samples, strict=True):
        np.testing.assert_allclose(other.tensors["advantages"], one.tensors["advantages"], atol=1e-6)


def test_rewards_of_tokens_not_generated_by_the_model_move_to_the_last_token():
    batch = with_token_rewards(groups([[1.0]], [[4]]), (0.0, 0.5, 0.25, 0.0))
    (sample,) = batch[0].samples
    sample.response = replace(sample.response, trainable=np.array([True, False, True, True]))
    Experience(config(algorithm__adv_estimator="reinforce_plus_plus")).prepare(batch)
    np.testing.assert_allclose(sample.tensors["token_rewards"], [0.0, 0.0, 0.25, 0.75])


def test_logged_samples_have_nonzero_token_rewards():
    batch = with_token_rewards(groups([[1.0, 0.0]], [[4, 2]]), (0.0, 0.5, 0.25, 0.0), None)
    rows = [sample_row(sample) for sample in batch[0].samples]
    assert [row["token_rewards"] for row in rows] == [[[1, 0.5], [2, 0.25]], None]
