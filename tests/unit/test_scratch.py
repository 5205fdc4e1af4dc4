"""Scratch folders are removed after their process ends."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from rlfuse.cluster import scratch

MAKER = (
    "import os, pathlib, sys; from rlfuse.cluster import scratch; made = scratch.make('x-', pathlib.Path(sys.argv[1]))"
)
SWEEP = "import pathlib; assert scratch.sweep('x-', pathlib.Path(sys.argv[1])) == []"


def test_folders_of_killed_processes_are_removed_and_those_of_live_ones_kept(tmp_path):
    subprocess.run([sys.executable, "-c", f"{MAKER}; os.kill(os.getpid(), 9)", tmp_path], timeout=60)
    (leftover,) = tmp_path.iterdir()
    mine, held = scratch.make("x-", tmp_path)
    assert not leftover.exists() and mine.exists()
    other, _ = scratch.make("x-", tmp_path)
    assert mine.exists() and other.exists()
    held.close()
    scratch.sweep("x-", tmp_path)
    assert list(tmp_path.iterdir()) == [other]


def test_only_recorded_files_in_shared_memory_are_removed(tmp_path, monkeypatch):
    folder, held = scratch.make("x-", tmp_path)
    names = "psm_recorded", "psm_replaced", "sem.mp-of-others", "vllm_dist_of_others"
    recorded, replaced, *others = files = [tmp_path / name for name in names]
    for file in files:
        file.touch()
    scratch.attach(folder, [recorded, replaced, tmp_path / "psm_gone"])
    (tmp_path / "new").touch()
    (tmp_path / "new").rename(replaced)  # another program reuses the name
    assert scratch.attached(folder) == [recorded]
    with monkeypatch.context() as later:
        later.setattr(scratch, "BOOT", "another")  # after a reboot, inodes belong to other files
        assert scratch.attached(folder) == []
    held.close()
    scratch.sweep("x-", tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([replaced, *others])


def test_processes_that_outlive_their_driver_are_ended_with_its_folder(tmp_path):
    code = (
        "import os, pathlib, subprocess; from rlfuse.cluster import scratch\n"
        f"folder, held = scratch.make(scratch.RUN, pathlib.Path({str(tmp_path)!r}))\n"
        "left = subprocess.Popen(['/bin/sleep', '60'], env={'TMPDIR': str(folder)}, stdout=subprocess.DEVNULL)\n"
        "print(left.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60)
    other = subprocess.Popen(["sleep", "60"], env=os.environ | {"TMPDIR": str(tmp_path)})
    orphan = psutil.Process(int(done.stdout))
    mine, _held = scratch.make(scratch.RUN, tmp_path)
    assert [*tmp_path.iterdir()] == [mine]
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
    assert other.poll() is None
    other.kill()
    other.wait()


def test_a_process_removes_its_temporary_files_at_exit_but_a_fork_does_not(tmp_path):
    code = (
        "import os, pathlib, sys, tempfile; from rlfuse.cluster import scratch\n"
        "scratch.LONGEST_ROOT = 200; scratch.keep_temporary_files(); print(tempfile.mkdtemp(), flush=True)\n"
        "if os.fork() == 0: sys.exit()\n"
        "assert os.environ['RAY_TMPDIR'] == sys.argv[1]; os.wait(); assert scratch.of_this_process().is_dir()\n"
        "assert scratch.abandoned(scratch.RUN, pathlib.Path(sys.argv[1])) == []"
    )
    environment = {name: value for name, value in os.environ.items() if name != "RAY_TMPDIR"} | {
        "TMPDIR": str(tmp_path)
    }
    done = subprocess.run([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True, env=environment)
    assert done.returncode == 0 and done.stdout.startswith(f"{tmp_path}/{scratch.RUN}")
    assert not [*tmp_path.iterdir()]


def test_a_root_too_long_for_socket_paths_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", "/short")
    assert scratch.temporary_root() == Path("/short")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "deep"))
    assert scratch.temporary_root() == Path("/tmp")
    session = f"{scratch.RUN}12345678/ray/session_2026-11-23_03-32-44_869102_4194304"
    assert len(f"{'r' * scratch.LONGEST_ROOT}/{session}/sockets/plasma_store") <= 107


@pytest.mark.skipif(os.getuid() != 0, reason="requires root")
def test_folders_of_another_user_are_not_removed():
    with tempfile.TemporaryDirectory(dir="/tmp") as root:
        os.chmod(root, 0o755)
        folder, held = scratch.make("x-", Path(root))
        held.close()
        code = f"import os, sys; from rlfuse.cluster import scratch; os.setuid(65534); {SWEEP}"
        subprocess.run([sys.executable, "-c", code, root], check=True, timeout=60)
        assert folder.exists()
        assert scratch.sweep("x-", Path(root)) == [folder]
