"""Folders that belong to another user: HOME, and an installation with DeepSpeed's compiled operations."""

import os
import tempfile
from pathlib import Path

import pytest
from other_user import NEEDS_ROOT, UID, as_other_user

from rlfuse import user_folders
from rlfuse.engines.deepspeed import deepspeed_ops

pytestmark = NEEDS_ROOT


@pytest.fixture
def plain(monkeypatch):
    """No variable of a cache is set; a folder for temporary files that all users write."""
    for name in (*user_folders.FOLDERS, "HF_HOME", "RLFUSE_CACHE", "USER", "TORCH_EXTENSIONS_DIR", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # pytest's own are closed to others
        os.chmod(name, 0o777)
        monkeypatch.setattr("tempfile.tempdir", name)
        yield Path(name)


def redirected():
    """What a command prints, and the variables that it sets."""
    names = (*user_folders.FOLDERS, "HF_HOME", "USER")
    return user_folders.redirect_caches(), {name: os.environ[name] for name in names if name in os.environ}


@pytest.mark.parametrize("home", ["/", "/nowhere", "/root-only"])
def test_caches_of_a_user_without_a_home_are_written_elsewhere(plain, home):
    if home == "/root-only":
        home = str(plain / "closed")
        (plain / "closed" / ".cache" / "huggingface").mkdir(parents=True)
        (plain / "closed").chmod(0o700)
    told, variables = as_other_user(redirected, HOME=home)
    assert told.startswith(f"HOME={home} is not writable; caches are written to {plain}/rlfuse-cache-{UID}. Set ")
    assert variables.keys() == {*user_folders.FOLDERS, "USER"}
    assert variables["XDG_CACHE_HOME"] == f"{plain}/rlfuse-cache-{UID}/.cache"
    assert (plain / f"rlfuse-cache-{UID}").stat().st_mode & 0o777 == 0o700


def test_what_is_set_or_writable_stays_and_models_of_a_read_only_home_are_found(plain):
    (plain / "home" / ".cache" / "huggingface").mkdir(parents=True)
    given = {"HOME": str(plain / "home"), "RLFUSE_CACHE": str(plain / "mine")}
    _, variables = as_other_user(redirected, **given)
    assert variables["TRITON_HOME"] == f"{plain}/mine/.triton"
    assert variables["HF_HOME"] == f"{plain}/home/.cache/huggingface"
    _, variables = as_other_user(redirected, **given, XDG_CACHE_HOME="/given")
    assert variables["XDG_CACHE_HOME"] == "/given" and "HF_HOME" not in variables
    assert as_other_user(redirected, HOME=str(plain))[0] == "", "a home that is writable"


def test_the_cache_folder_is_never_one_that_another_user_made(plain):
    (plain / f"rlfuse-cache-{UID}").mkdir(mode=0o777)
    found = as_other_user(lambda: [str(user_folders.cache_folder()) for _ in range(2)])
    assert found[0].startswith(f"{plain}/rlfuse-cache-{UID}-") and found[0] == found[1]


@pytest.mark.parametrize(
    ("mode", "of_root", "expected"),
    [(None, False, True), (0o700, False, True), (0o777, False, False), (0o770, False, False), (0o755, True, False)],
)
def test_compiled_kernels_are_kept_for_the_next_run_where_no_other_user_can_write(plain, mode, of_root, expected):
    kept = plain / "cache" / f"rlfuse-inductor-{UID}"
    (plain / "cache").mkdir()
    os.chown(plain / "cache", UID, UID)
    if mode is not None:
        kept.mkdir()
        kept.chmod(mode)
        os.chown(kept, 0 if of_root else UID, UID)

    def runs():
        found = []
        for _ in range(2):
            os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
            user_folders.keep_compiled_kernels()
            found.append(os.environ.get("TORCHINDUCTOR_CACHE_DIR"))
        return found

    assert as_other_user(runs, XDG_CACHE_HOME=str(kept.parent)) == [str(kept) if expected else None] * 2
    if mode is None:
        assert kept.stat().st_mode & 0o777 == 0o700


def test_a_user_s_own_folder_for_compiled_kernels_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/given")
    user_folders.keep_compiled_kernels()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/given"


def test_kernels_that_a_worker_compiles_outlive_its_temporary_files(monkeypatch, tmp_path):
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    from rlfuse.cluster.worker_environment import MODULES, prepare_worker

    for name, value in {"XDG_CACHE_HOME": "cache", "TMPDIR": "temporary", MODULES: "modules"}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    prepare_worker()
    assert Path(cache_dir()).parent == tmp_path / "cache"


@pytest.mark.parametrize("lock", ["", "process 1 of nowhere"])
def test_operations_that_another_user_compiled_are_copied_and_loaded(plain, lock):
    compiled = plain / "installation" / "deepspeed_shm_comm"
    compiled.mkdir(parents=True)
    (compiled / deepspeed_ops.OP_FILES["ShareMemCommBuilder"]).write_text("compiled")
    (compiled.parent / deepspeed_ops.LOCK).write_text(lock)

    def load():
        here, known = [], deepspeed_ops.is_compiled("deepspeed_shm_comm.so")
        left = deepspeed_ops.stale_locks()
        waits = deepspeed_ops.load(lambda: here.append(os.environ["TORCH_EXTENSIONS_DIR"]))
        return known, [*map(str, left)], waits, here

    known, left, waits, here = as_other_user(load, TORCH_EXTENSIONS_DIR=str(compiled.parent))
    copy = plain / f"rlfuse-cache-{UID}" / "torch_extensions"
    assert (known, left, waits, here) == (True, [], None, [str(copy)])
    assert (copy / "deepspeed_shm_comm" / "deepspeed_shm_comm.so").read_text() == "compiled"
    assert (compiled.parent / deepspeed_ops.LOCK).read_text() == lock, "another user's"
