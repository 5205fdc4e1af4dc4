"""Shared by all unit tests."""

import logging

import pytest


@pytest.fixture(autouse=True)
def weights_may_be_unpickled(monkeypatch):
    """A rank forbids it to the process that it is made in; other tests' files are their own."""
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")


@pytest.fixture(autouse=True)
def logging_stays():
    """Hydra sets the root logger up for the process; its handler would write to a stream of a test that is over."""
    root = logging.getLogger()
    level, before = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    for handler in [each for each in root.handlers if each not in before]:
        root.removeHandler(handler)
