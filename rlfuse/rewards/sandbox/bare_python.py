"""Start a Python process for untrusted code: clean environment, own session, no inherited files, no `site`."""

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
"""The project itself is off the path again before anybody's code runs."""


class SandboxError(RuntimeError):
    """The process for untrusted code failed, not the code in it."""


def start_python(module: str, folder: str) -> subprocess.Popen[bytes]:
    """Run `module`'s `main` in `folder`, with pipes for all three streams. Installed packages can be imported there."""
    # As `-I`, whose options -s -P these are, but for the hash seed: the order of sets must not decide about a reward.
    options = ["-s", "-P", "-S", "-B", "-X", "utf8"]
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        # A pool of threads for each of many small processes would be all that they do.
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
