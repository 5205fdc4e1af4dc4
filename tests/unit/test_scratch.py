"""Folders in shared memory end with their makers."""

import subprocess
import sys

from rlfuse.engines import scratch

MAKER = (
    "import os, pathlib, sys; from rlfuse.engines import scratch; made = scratch.make('x-', pathlib.Path(sys.argv[1]))"
)


def test_the_folder_of_a_killed_process_goes_with_the_next_and_a_living_ones_stays(tmp_path):
    subprocess.run([sys.executable, "-c", f"{MAKER}; os.kill(os.getpid(), 9)", tmp_path], timeout=60)
    (left,) = tmp_path.iterdir()
    mine, held = scratch.make("x-", tmp_path)
    assert not left.exists() and mine.exists()
    other, _ = scratch.make("x-", tmp_path)
    assert mine.exists() and other.exists()
    held.close()
    scratch.sweep("x-", tmp_path)
    assert list(tmp_path.iterdir()) == [other]


def test_what_a_folder_owns_goes_with_it(tmp_path):
    folder, held = scratch.make("x-", tmp_path)
    files = [tmp_path / "message", tmp_path / "of-others"]
    for file in files:
        file.touch()
    scratch.own(folder, [files[0], tmp_path / "gone"])
    held.close()
    scratch.sweep("x-", tmp_path)
    assert list(tmp_path.iterdir()) == [files[1]]
