"""Fixtures and hooks of all tests."""

import gc
import os
import signal
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

# Background processes of shell scripts ignore SIGINT, so tests of Ctrl-C would wait forever.
signal.signal(signal.SIGINT, signal.default_int_handler)
# nohup ignores SIGHUP: tests that close a terminal would receive no signal.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Import the tests without garbage collections, then exclude their modules from those of the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items):
    """Let xdist run all tests of a file in one process, which starts its fixtures once, unless they are marked."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture(autouse=True)
def _unset_safe_path():
    """Unset the variable that commands set for child processes, as later scripts import modules next to them."""
    yield
    os.environ.pop("PYTHONSAFEPATH", None)


@pytest.fixture(scope="session")
def write_shadows():
    """Write modules with the names of all installed packages to a folder; return the file that lists those imported.

    Namespace packages are excluded, as any module takes precedence over them.
    """
    installed = Path(sysconfig.get_path("purelib"))
    names = {path.parent.name for path in installed.glob("*/__init__.py")}
    names |= {path.stem for path in installed.glob("*.py")} | {*filter(find_spec, sys.stdlib_module_names)}

    def write(folder):
        marker = folder / "imported.txt"
        for name in names - {"rlfuse", "__future__"}:
            text = f"open({str(marker)!r}, 'a').write(f'{{__name__}}\\n'); raise ImportError"
            (folder / f"{name}.py").write_text(text)
        return marker

    return write


def pytest_make_parametrize_id(val):
    """Shorten test ids made from long texts."""
    return f"{val[:40]!r}..." if isinstance(val, str | bytes) and len(val) > 100 else None


def pytest_testnodedown(node, error):
    """Record that an xdist worker died: the tests assigned to it did not run."""
    node.config.worker_died = getattr(node.config, "worker_died", False) or bool(error)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    if getattr(session.config, "worker_died", False):
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
