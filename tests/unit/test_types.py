"""mypy reports no errors in the controller, policies, simulator and interfaces between packages."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_mypy_reports_no_errors():
    command = [sys.executable, "-m", "mypy", "--no-error-summary"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
