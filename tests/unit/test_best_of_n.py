"""Expected best, worst and majority scores, compared with an enumeration of all draws."""

import itertools
from collections import Counter

import numpy as np
import pytest

from rlfuse.observe.best_of_n import best_at, majority_at, sizes, worst_at


def majority(draw):
    """Return the score of verl's majority vote: the first response with the answer that has most votes."""
    counts = Counter(answer for _, answer in draw)  # in the order of first appearance
    winner = max(counts, key=counts.get)
    return next(score for score, answer in draw if answer == winner)


@pytest.mark.parametrize("answers", ["aabbc", "aaaab", "abcde", "aaaaa", "aabb", "ab"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_expectations_equal_an_enumeration_of_all_draws(answers, n):
    scores = [0.1, 1.0, 0.0, 0.5, 0.1][: len(answers)]
    draws = list(itertools.product(zip(scores, answers, strict=True), repeat=n))
    assert best_at(scores, n) == pytest.approx(np.mean([max(s for s, _ in draw) for draw in draws]))
    assert worst_at(scores, n) == pytest.approx(np.mean([min(s for s, _ in draw) for draw in draws]))
    assert majority_at(scores, answers, n) == pytest.approx(np.mean([majority(draw) for draw in draws]))


def test_expectations_match_the_bootstrap_of_verl():
    random = np.random.default_rng(0)
    answers = random.integers(0, 12, 64)
    scores = (answers == 3) * 1.0
    drawn = [random.integers(0, 64, 16) for _ in range(4000)]
    sampled = np.mean([majority([(scores[i], answers[i]) for i in draw]) for draw in drawn])
    assert majority_at(scores, answers, 16) == pytest.approx(sampled, abs=0.03)
    alone = [majority_at([float(answer == each) for answer in answers], answers, 64) for each in range(12)]
    assert sum(alone) == pytest.approx(1.0), "one answer wins each vote"


@pytest.mark.parametrize("kinds", [3, 40, 256])
def test_winning_probabilities_of_hundreds_of_responses_sum_to_one(kinds):
    answers = [number * number % kinds for number in range(256)]
    chances = [majority_at([float(answer == each) for answer in answers], answers, 256) for each in set(answers)]
    assert sum(chances) == pytest.approx(1.0, abs=1e-9)


def test_sizes_are_powers_of_two_and_all_responses():
    assert [sizes(n) for n in (1, 2, 3, 4, 6, 8)] == [[], [2], [2, 3], [2, 4], [2, 4, 6], [2, 4, 8]]
