"""Start a Python process for untrusted code: clean environment, new session, no inherited files, no `site`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

START_S = 60.0
ROOT = str(Path(__file__).parents[3])
START = """\
import importlib, sys
root, module, *packages = sys.argv[1:]
sys.argv[1:] = []
sys.path[:] = [root, *sys.path, *packages]
main = importlib.import_module(module).main
sys.path.remove(root)
main()
"""
"""The project is removed from sys.path before untrusted code runs."""


class SandboxError(RuntimeError):
    """The sandbox process failed, as opposed to the code in it."""


def start_python(module: str, folder: str) -> subprocess.Popen[bytes]:
    """Run `main` of `module` in `folder`, with pipes for all three streams. Installed packages can be imported."""
    # -s -P are `-I` without -E, so that PYTHONHASHSEED applies: the order of sets must not affect a reward.
    options = ["-s", "-P", "-S", "-B", "-X", "utf8"]
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        # Starting a thread pool in each of many small processes would take most of their time.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, *options, "-c", START, ROOT, module, *packages],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env=environment,
        start_new_session=True,
    )
