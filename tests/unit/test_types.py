"""mypy finds no error in the controller, the policies, the simulator and the interfaces between packages."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_contracts_hold():
    command = [sys.executable, "-m", "mypy", "--no-error-summary"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
