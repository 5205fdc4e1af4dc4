"""Expected best, worst and majority score of n responses drawn from those to a prompt. Pure.

verl estimates `best@N`, `worst@N` and `maj@N` from 1,000 random draws with replacement; these functions return the
exact expectations over such draws.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from functools import lru_cache

import numpy as np


def sizes(responses: int) -> list[int]:
    """Return the values of N up to the number of responses: 2, 4, 8, ... and that number; empty for one response."""
    return [*(1 << power for power in range(1, responses.bit_length()) if 1 << power < responses), responses][
        : responses - 1
    ]


def best_at(scores: Sequence[float], n: int) -> float:
    """Return the expected maximum of `n` scores drawn with replacement."""
    ranks = np.arange(len(scores) + 1) / len(scores)
    return float(np.diff(ranks**n) @ np.sort(scores))


def worst_at(scores: Sequence[float], n: int) -> float:
    """Return the expected minimum of `n` scores drawn with replacement."""
    return -best_at([-score for score in scores], n)


def majority_at(scores: Sequence[float], answers: Sequence[Hashable], n: int) -> float:
    """Return the expected score of the majority answer of `n` responses drawn with replacement.

    A tie is won by the answer that was drawn first (self-consistency, Wang et al. 2022, arXiv 2203.11171).
    """
    by_answer: dict[Hashable, list[float]] = defaultdict(list)
    for score, answer in zip(scores, answers, strict=True):
        by_answer[answer].append(score)
    voted = sorted(by_answer.values(), key=len)
    chances = _chances(tuple(map(len, voted)), n)
    return float(sum(chance * np.mean(values) for chance, values in zip(chances, voted, strict=True)))


@lru_cache(maxsize=4096)
def _chances(counts: tuple[int, ...], n: int) -> tuple[float, ...]:
    """Return for each answer, given by its number of responses, the chance to win the vote of `n` draws."""
    chance = {
        count: sum(_wins_with(votes, count, counts, n) for votes in range(1, n + 1)) for count in dict.fromkeys(counts)
    }
    return tuple(chance[count] for count in counts)


def _wins_with(votes: int, count: int, counts: tuple[int, ...], n: int) -> float:
    """Return the chance that an answer of `count` responses gets `votes` votes and wins.

    The number of draws is counted by exponential generating functions: `ways[t, m]` is the coefficient of x^m of the
    other answers, `t` of which have as many votes. By symmetry each of these t + 1 is the first with equal chance.
    """
    total, others, rest = sum(counts), list(counts), n - votes
    others.remove(count)
    ways = np.zeros((n // votes, rest + 1))
    ways[0, 0] = 1.0
    draws = np.subtract.outer(np.arange(rest + 1), np.arange(rest + 1)).T
    for other, repeats in Counter(others).items():
        terms = np.array([(other / total) ** m / math.factorial(m) for m in range(votes + 1)])
        fewer = np.where((draws >= 0) & (draws < votes), terms[np.clip(draws, 0, votes)], 0.0)
        for _ in range(repeats):
            tied = terms[votes] * ways[:-1, : max(0, rest + 1 - votes)]
            ways = ways @ fewer
            ways[1:, votes:] += tied
    first = (count / total) ** votes * math.comb(n, votes) * math.factorial(rest)
    return float(first * (ways[:, -1] / np.arange(1, len(ways) + 1)).sum())
