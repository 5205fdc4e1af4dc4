"""Shared by all tests."""

import signal

import pytest

# A shell's script ignores Ctrl-C in what it starts in the background: tests that press it would wait for good.
signal.signal(signal.SIGINT, signal.default_int_handler)
# nohup ignores SIGHUP in what it starts: tests that close a terminal would see no signal.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_testnodedown(node, error):
    """Remember that an xdist worker died: the tests that were assigned to it did not run."""
    node.config.worker_died = getattr(node.config, "worker_died", False) or bool(error)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    if getattr(session.config, "worker_died", False):
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
