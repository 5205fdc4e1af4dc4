"""Modules in the working folder shadow no installed ones, in any process that a command starts."""

import subprocess
import sys

import pytest

CHILDREN = """
import multiprocessing, subprocess, sys
from rlfuse.application import run_command

def command():
    child = multiprocessing.get_context("spawn").Process(target=exec, args=("import json, helper_of_mine",))
    child.start()
    child.join()
    sys.exit(child.exitcode or subprocess.run([sys.executable, "-m", "json.tool", "--help"]).returncode)

sys.exit(run_command(command))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, write_shadows):
    """A working folder with a module of the user's own, too."""
    folder = tmp_path_factory.mktemp("job")
    write_shadows(folder)
    (folder / "helper_of_mine.py").touch()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["-m", "rlfuse.cli", "--version"], ["-P", "-c", CHILDREN]], ids=["command", "children"]
)
def test_installed_modules_are_those_that_are_imported(folder, words):
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not (folder / "imported.txt").exists(), (folder / "imported.txt").read_text()
