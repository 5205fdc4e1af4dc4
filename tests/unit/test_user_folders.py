"""Folders that belong to another user: HOME, and an installation with compiled operations of DeepSpeed."""

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
    """Unset all cache variables; return a folder for temporary files that all users can write."""
    for name in (*user_folders.FOLDERS, "HF_HOME", "RLFUSE_CACHE", "USER", "TORCH_EXTENSIONS_DIR", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # pytest's folders are closed to other users
        os.chmod(name, 0o777)
        monkeypatch.setattr("tempfile.tempdir", name)
        yield Path(name)


def redirected():
    """Return the message of a command and the variables that it sets."""
    names = (*user_folders.FOLDERS, "HF_HOME", "USER")
    return user_folders.redirect_caches(), {name: os.environ[name] for name in names if name in os.environ}


@pytest.mark.parametrize("home", ["/", "/nowhere", "/root-only"])
def test_caches_of_a_user_without_a_home_are_written_elsewhere(plain, home):
    if home == "/root-only":
        home = str(plain / "closed")
        (plain / "closed" / ".cache" / "huggingface").mkdir(parents=True)
        (plain / "closed").chmod(0o700)
    message, variables = as_other_user(redirected, HOME=home)
    assert message.startswith(f"HOME={home} is not writable; caches are written to {plain}/rlfuse-cache-{UID}. Set ")
    assert variables.keys() == {*user_folders.FOLDERS, "USER"}
    assert variables["XDG_CACHE_HOME"] == f"{plain}/rlfuse-cache-{UID}/.cache"
    assert (plain / f"rlfuse-cache-{UID}").stat().st_mode & 0o777 == 0o700


def test_set_variables_and_writable_homes_are_kept_and_models_of_a_read_only_home_found(plain):
    (plain / "home" / ".cache" / "huggingface").mkdir(parents=True)
    environment = {"HOME": str(plain / "home"), "RLFUSE_CACHE": str(plain / "mine")}
    _, variables = as_other_user(redirected, **environment)
    assert variables["TRITON_HOME"] == f"{plain}/mine/.triton"
    assert variables["HF_HOME"] == f"{plain}/home/.cache/huggingface"
    _, variables = as_other_user(redirected, **environment, XDG_CACHE_HOME="/given")
    assert variables["XDG_CACHE_HOME"] == "/given" and "HF_HOME" not in variables
    assert as_other_user(redirected, HOME=str(plain))[0] == "", "HOME is writable"


def test_cache_folders_of_other_users_are_not_used(plain):
    (plain / f"rlfuse-cache-{UID}").mkdir(mode=0o777)
    found = as_other_user(lambda: [str(user_folders.cache_folder()) for _ in range(2)])
    assert found[0].startswith(f"{plain}/rlfuse-cache-{UID}-") and found[0] == found[1]


@pytest.mark.parametrize(
    ("mode", "of_root", "expected"),
    [(None, False, True), (0o700, False, True), (0o777, False, False), (0o770, False, False), (0o755, True, False)],
)
def test_compiled_kernels_are_kept_if_no_other_user_can_write(plain, mode, of_root, expected):
    cache = plain / "cache" / f"rlfuse-inductor-{UID}"
    (plain / "cache").mkdir()
    os.chown(plain / "cache", UID, UID)
    if mode is not None:
        cache.mkdir()
        cache.chmod(mode)
        os.chown(cache, 0 if of_root else UID, UID)

    def runs():
        found = []
        for _ in range(2):
            os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
            user_folders.keep_compiled_kernels()
            found.append(os.environ.get("TORCHINDUCTOR_CACHE_DIR"))
        return found

    assert as_other_user(runs, XDG_CACHE_HOME=str(cache.parent)) == [str(cache) if expected else None] * 2
    if mode is None:
        assert cache.stat().st_mode & 0o777 == 0o700


def test_a_user_defined_folder_for_compiled_kernels_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/given")
    user_folders.keep_compiled_kernels()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/given"


def test_compiled_kernels_of_a_worker_outlive_its_temporary_files(monkeypatch, tmp_path):
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
def test_operations_compiled_by_another_user_are_copied_and_loaded(plain, lock):
    compiled = plain / "installation" / "deepspeed_shm_comm"
    compiled.mkdir(parents=True)
    (compiled / deepspeed_ops.OP_FILES["ShareMemCommBuilder"]).write_text("compiled")
    (compiled.parent / deepspeed_ops.LOCK).write_text(lock)

    def load():
        used_folders, known = [], deepspeed_ops.is_compiled("deepspeed_shm_comm.so")
        locks = deepspeed_ops.stale_locks()
        waits = deepspeed_ops.load(lambda: used_folders.append(os.environ["TORCH_EXTENSIONS_DIR"]))
        return known, [*map(str, locks)], waits, used_folders

    known, locks, waits, used_folders = as_other_user(load, TORCH_EXTENSIONS_DIR=str(compiled.parent))
    copy = plain / f"rlfuse-cache-{UID}" / "torch_extensions"
    assert (known, locks, waits, used_folders) == (True, [], None, [str(copy)])
    assert (copy / "deepspeed_shm_comm" / "deepspeed_shm_comm.so").read_text() == "compiled"
    assert (compiled.parent / deepspeed_ops.LOCK).read_text() == lock, "the lock of another user is unchanged"
