"""Modules in the working folder do not shadow installed ones, in all processes of a command."""

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


WORKER = """
import os, subprocess, sys
from rlfuse.cluster.worker_environment import job_environment
from rlfuse.config.compose import read_command
from rlfuse.application import run_command

CHECK = "from rlfuse.cluster.worker_environment import prepare_worker; prepare_worker(); "
CHECK += "import json, helper_of_mine, of_the_job"

def command():
    read_command([sys.argv[1]])
    import of_the_job
    environment = os.environ | job_environment()["env_vars"]
    sys.exit(subprocess.run([sys.executable, "-c", CHECK], cwd="/", env=environment).returncode)

sys.exit(run_command(command))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, write_shadows):
    """Return a working folder with shadowing modules and a helper module of the user."""
    folder = tmp_path_factory.mktemp("job")
    write_shadows(folder)
    (folder / "helper_of_mine.py").touch()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["-m", "rlfuse.cli", "--version"], ["-P", "-c", CHILDREN]], ids=["command", "children"]
)
def test_installed_modules_take_precedence(folder, words):
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not (folder / "imported.txt").exists(), (folder / "imported.txt").read_text()


@pytest.mark.slow
def test_modules_next_to_a_job_file_elsewhere_are_importable_in_workers(folder, tmp_path, write_shadows):
    write_shadows(tmp_path)
    (tmp_path / "of_the_job.py").touch()
    (tmp_path / "job.yaml").write_text("rollout: {n: 2}\n")
    words = [sys.executable, "-P", "-c", WORKER, str(tmp_path / "job.yaml")]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not [path for path in (folder, tmp_path) if (path / "imported.txt").exists()]
