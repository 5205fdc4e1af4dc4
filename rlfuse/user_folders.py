"""Cache folders of the user, and their replacements if HOME is not writable (containers with an arbitrary user id).

Role: every command calls `redirect_caches` at startup, as do workers on the nodes of a running Ray cluster, before
libraries are imported; workers also call `keep_compiled_kernels`. Invariant: variables that are set and folders that
are writable are left unchanged; models are still read from HOME.
"""

from __future__ import annotations

import os
import pwd
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Like `python -P`, for child processes too: modules in the working folder do not shadow installed ones."""
FOLDERS = {
    "XDG_CACHE_HOME": ".cache",
    "XDG_CONFIG_HOME": ".config",
    "XDG_DATA_HOME": ".local/share",
    "TRITON_HOME": ".triton",
    "FLASHINFER_WORKSPACE_BASE": ".cache/flashinfer",
    "CUDA_CACHE_PATH": ".nv/ComputeCache",
}
"""Environment variables of libraries -> their default folders below HOME."""


def home() -> Path:
    """Return the home folder; / if neither HOME nor the user database has one."""
    found = Path(os.path.expanduser("~"))
    return found if found.is_absolute() else Path("/")


module_folders: list[str] = []
"""Folders of the user's modules in this process, in order: the working folder, then that of a job file."""


def append_modules(*folders: str) -> None:
    """Make the modules in these folders importable, after installed ones."""
    sys.path.extend(folder for folder in folders if folder not in sys.path)
    module_folders.extend(folder for folder in folders if folder not in module_folders)


def is_writable(folder: Path) -> bool:
    """Return whether files can be written in a folder or, until it exists, in its nearest existing parent."""
    while not os.path.exists(folder):  # also False inside another user's private folder
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)


def cache_folder() -> Path:
    """Return the folder for redirected caches: $RLFUSE_CACHE, else a private folder for temporary files."""
    if given := os.environ.get("RLFUSE_CACHE"):
        return Path(given)
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / f"rlfuse-cache-{os.getuid()}"
    if not _made_private(folder):
        os.environ["RLFUSE_CACHE"] = tempfile.mkdtemp(prefix=f"{folder.name}-")
        return cache_folder()
    return folder


def keep_compiled_kernels() -> None:
    """Make torch keep compiled kernels for the next run, as vLLM and Triton do, unless its variable is set.

    Torch's default is the folder for temporary files, which a run removes at its end. Kernels are loaded and executed,
    so that they are only kept in a folder that no other user can write to.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / f"rlfuse-inductor-{os.getuid()}"
    with suppress(OSError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        if _made_private(folder):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def _made_private(folder: Path) -> bool:
    """Create a folder that only this user can write to; return False if others own it or can write to it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def redirect_caches() -> str:
    """Point the variables in `FOLDERS` to `cache_folder()` where HOME is read-only; return a line about it, or ""."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:  # torch needs a user name
        os.environ.setdefault("USER", str(os.getuid()))
    redirected = {name for name, own in FOLDERS.items() if name not in os.environ and not is_writable(home() / own)}
    if not redirected:
        return ""
    models = home() / FOLDERS["XDG_CACHE_HOME"] / "huggingface"
    if "XDG_CACHE_HOME" in redirected and os.path.isdir(models):
        os.environ.setdefault("HF_HOME", str(models))
    for name in redirected:
        os.environ[name] = str(cache_folder() / FOLDERS[name])
    return (
        f"HOME={home()} is not writable; caches are written to {cache_folder()}. Set HOME or RLFUSE_CACHE to a "
        "writable folder to change this."
    )
