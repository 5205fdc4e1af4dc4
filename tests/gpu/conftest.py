"""Run the tests of this folder on a CUDA device if there is one, else report one skipped test.

`RLFUSE_TEST_DEVICE=cpu` runs the same tests on a CPU, which covers names, shapes and logic, but not transfers.
"""

import gc
import os
import shutil
from pathlib import Path

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products


def _device() -> str | None:
    """Return `cuda`, RLFUSE_TEST_DEVICE or None; look for a driver first, as importing torch takes two seconds."""
    if requested := os.environ.get("RLFUSE_TEST_DEVICE"):
        return requested
    if shutil.which("nvidia-smi") is None and not any(Path("/dev").glob("nvidia[0-9]*")):
        return None
    import torch

    return "cuda" if torch.cuda.is_available() else None


DEVICE = _device()
collect_ignore_glob = [] if DEVICE else ["test_[1-9]*_*.py"]


@pytest.fixture(scope="session")
def device() -> str:
    """Return the device type of these tests; skip without one."""
    if DEVICE is None:
        pytest.skip("no CUDA device here: what tests/gpu shows, and on which machine, is in its README.md")
    return DEVICE


@pytest.fixture(autouse=True)
def _no_cached_memory():
    """Release torch's cached memory after each test, because vLLM starts only if its share of the device is free."""
    yield
    if DEVICE == "cuda":
        import torch

        gc.collect()
        torch.cuda.empty_cache()
