"""Expected best, worst and majority score of n responses drawn from those to a prompt. Pure.

verl estimates `best@N`, `worst@N` and `maj@N` from 1,000 random draws with replacement; these functions return the
exact expectations over such draws.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import lru_cache

import numpy as np

MAX_NODES = 40
"""Limit of the quadrature: up to 79 tied answers are exact, and up to 200 are to 1e-12."""


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
    """Return for each answer, given by its number of responses (ascending), the chance to win the vote of `n` draws.

    Given their sum, independent Poisson votes are multinomial. The chance that an answer gets `votes` votes and wins is
    a coefficient of the product of the others' generating functions, found by a Fourier transform. Each of t + 1 tied
    answers is the first with the same chance 1 / (t + 1), the integral of u^t, computed by Gauss-Legendre quadrature.
    """
    distinct, repeats = np.unique(counts, return_counts=True)
    rates, most = n * distinct[:, None] / sum(counts), np.arange(n + 1)
    log_factorials = np.array([math.lgamma(each + 1) for each in most])
    poisson = np.exp(most * np.log(rates) - rates - log_factorials)
    points = n + 12 * math.isqrt(n) + 40  # more votes in total are too improbable to count
    turn = np.exp(-2j * np.pi / points * np.arange(points // 2 + 1))
    fewer, chances = np.zeros((len(distinct), len(turn)), complex), np.zeros(len(distinct))
    for votes in range(1, n + 1):
        fewer += poisson[:, votes - 1, None] * turn ** (votes - 1)
        nodes, weights = _quadrature(min(-(-min(n // votes, len(counts)) // 2), MAX_NODES))
        each = fewer + nodes[:, None, None] * poisson[:, votes, None] * turn**votes
        powers, one = each ** repeats[:, None], np.ones_like(each[:, :1])
        before = np.cumprod(np.concatenate([one, powers[:, :-1]], axis=1), axis=1)
        after = np.cumprod(np.concatenate([one, powers[:, :0:-1]], axis=1), axis=1)[:, ::-1]
        others = np.fft.irfft(before * after * each ** (repeats - 1)[:, None], points)[..., n - votes]
        chances += poisson[:, votes] * (weights @ others)
    chances /= math.exp(n * math.log(n) - n - log_factorials[n])
    return tuple(chances[np.searchsorted(distinct, counts)].tolist())


@lru_cache
def _quadrature(nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the nodes and weights of the Gauss-Legendre quadrature over [0, 1], exact to degree 2 * nodes - 1."""
    found, weights = np.polynomial.legendre.leggauss(nodes)
    return (found + 1) / 2, weights / 2
