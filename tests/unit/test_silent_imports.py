"""Libraries print nothing while a command imports them."""

import subprocess
import sys

import pytest

from rlfuse.cli import MODULES

IMPORTS = "import importlib, sys; from rlfuse.progress import quiet_libraries; quiet_libraries(); "
IMPORTS += "[importlib.import_module(name) for name in sys.argv[1:]]"


@pytest.mark.slow
def test_commands_and_their_libraries_are_imported_silently():
    modules = [*MODULES.values(), "rlfuse.run.build", "rlfuse.run.offline.training", "rlfuse.notebook", "deepspeed"]
    done = subprocess.run([sys.executable, "-c", IMPORTS, *modules], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
