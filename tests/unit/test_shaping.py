"""DAPO's soft overlong penalty, and groups with zero std."""

import numpy as np

from rlfuse.algorithms.shaping import has_zero_std, overlong_penalty


def test_penalty_values():
    # limit 100, buffer 20: none up to 80, half at 90, full from 100
    penalty = overlong_penalty([0, 80, 81, 90, 100, 130], 100, 20, factor=2.0)
    np.testing.assert_allclose(penalty, [0, 0, -0.1, -1.0, -2.0, -2.0])


def test_penalty_off():
    np.testing.assert_array_equal(overlong_penalty(np.array([5, 100]), 100, 0, factor=1.0), [0, 0])


def test_penalty_over_the_whole_response():
    np.testing.assert_allclose(overlong_penalty([0, 5, 10], 10, 10, factor=1.0), [0, -0.5, -1.0])


def test_zero_std_groups():
    groups = [[1.0, 1.0, 1.0], [0.0, 1.0], [0.1, 0.1], [0.5], [], [0.0, -0.0], [float("nan")] * 2]
    assert has_zero_std(groups, n=3) == [True, False, True, True, True, True, False]
    assert has_zero_std([[0.5], []], n=1) == [False, True]
