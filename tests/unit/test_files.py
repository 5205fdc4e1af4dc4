"""Write locks of output files, and atomic replacement of files."""

import os
import stat
import subprocess
import sys

import pytest

from rlfuse.errors import RunError, UserError
from rlfuse.files import atomic_write, is_write_locked, write_atomically, write_lock

HOLD = (
    "import sys; from pathlib import Path; from rlfuse.files import write_lock; place = write_lock(Path(sys.argv[1]))"
)


@pytest.mark.slow
def test_a_write_lock_is_held_until_its_process_ends(tmp_path):
    path = tmp_path / "eval" / "step" / "responses.jsonl"
    command = [sys.executable, "-c", f"{HOLD}; place.__enter__(); print(1, flush=True); input()", path]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    other.stdout.readline()
    assert is_write_locked(path)
    refused = rf"process {other.pid} on .* is writing this file\. Wait for it to end, or choose"
    with pytest.raises(RunError, match=refused), write_lock(path):
        raise AssertionError
    other.kill()
    other.communicate()
    assert not is_write_locked(path)
    with write_lock(path), pytest.raises(RunError, match=f"process {os.getpid()} on"), write_lock(path):
        raise AssertionError
    assert not is_write_locked(path) and not [*path.parent.iterdir()]


def test_unused_folders_are_removed_and_invalid_paths_are_reported(tmp_path):
    with pytest.raises(KeyError), write_lock(tmp_path / "new" / "file"):
        raise KeyError
    assert not [*tmp_path.iterdir()]
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match=r"can't be written \(.*\)\. Choose another path"),
        write_lock(tmp_path / "file" / "x"),
    ):
        raise AssertionError


def test_concurrent_replacements_of_a_file_are_atomic(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    with atomic_write(path) as temporary:
        temporary.write_text("a" * 100)
        with monkeypatch.context() as other:
            other.setattr(os, "getpid", lambda: 1)
            write_atomically(path, "b")
        assert path.read_text() == "b"
    assert path.read_text() == "a" * 100 and [*tmp_path.iterdir()] == [path]


def test_symlinks_and_devices_are_preserved(tmp_path):
    (tmp_path / "target").write_text("before")
    for name, target in (("link", tmp_path / "target"), ("null", "/dev/null")):
        (tmp_path / name).symlink_to(target)
        write_atomically(tmp_path / name, "after")
        assert (tmp_path / name).is_symlink()
    assert (tmp_path / "target").read_text() == "after" and stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize("path", ["absent/file", "file/file", "folder", "n" * 300])
def test_an_unwritable_path_is_a_user_error(path, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"can't be written \(.*\)\. Choose another path"):
        write_atomically(tmp_path / path, "text")
    assert sorted(tmp_path.iterdir()) == before
