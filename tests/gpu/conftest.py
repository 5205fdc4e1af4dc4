"""Where a CUDA device is, the tests of this folder run on it; elsewhere one line says that they did not.

`RLFUSE_TEST_DEVICE=cpu` runs the same tests on a CPU, where a move moves nothing but names, shapes and logic are real.
"""

import gc
import os
import shutil
from pathlib import Path

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products that give the same bits again


def _device() -> str | None:
    """Looks for a driver first: importing torch for nothing would take the whole suite two seconds."""
    if asked := os.environ.get("RLFUSE_TEST_DEVICE"):
        return asked
    if shutil.which("nvidia-smi") is None and not any(Path("/dev").glob("nvidia[0-9]*")):
        return None
    import torch

    return "cuda" if torch.cuda.is_available() else None


DEVICE = _device()
collect_ignore_glob = [] if DEVICE else ["test_[1-9]*_*.py"]


@pytest.fixture(scope="session")
def device() -> str:
    """`cuda`, or what RLFUSE_TEST_DEVICE says."""
    if DEVICE is None:
        pytest.skip("no CUDA device here: what tests/gpu shows, and on which machine, is in its README.md")
    return DEVICE


@pytest.fixture(autouse=True)
def _no_cached_memory():
    """Return torch's cached memory after each test: vLLM only starts where its share of the device is free."""
    yield
    if DEVICE == "cuda":
        import torch

        gc.collect()
        torch.cuda.empty_cache()
