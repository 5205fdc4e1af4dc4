"""Comparison of the training curves of two runs."""

import pytest

from rlfuse.observe.tracking import read_metrics

LEARNED = ("actor/", "critic/", "rewards/", "val-", "response_length/", "training/epoch")


def assert_same_curves(expected, found, steps):
    """Assert that the first steps of the run `found` have the training metrics of `expected`.

    A different summation order changes the last bits, which Adam's division amplifies to 2e-5 after a few steps. Losses
    are means of terms of both signs, about 1 each, so they differ by a few 1e-6.
    """
    expected, found = (read_metrics(path / "metrics.jsonl") for path in (expected, found))
    found = found[: len(expected)]
    assert [row["step"] for row in found] == [row["step"] for row in expected] == list(steps)
    for want, have in zip(expected, found, strict=True):
        for name, value in want.items():
            if name.startswith(LEARNED):
                least = 5e-6 if name.endswith("_loss") else 1e-6
                assert have[name] == pytest.approx(value, rel=2e-4, abs=least), (want["step"], name)
