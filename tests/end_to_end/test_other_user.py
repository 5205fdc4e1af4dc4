"""rlfuse in the installation of another user and with a read-only HOME, as in containers with arbitrary user ids."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UID = 54321
# Read access only: the interpreter may be in a folder of root.
BECOME = ["setpriv", "--reuid", str(UID), "--regid", str(UID), "--clear-groups"]
BECOME += ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv") or subprocess.run([*BECOME, "true"]).returncode != 0,
    reason="only root can become another user, by setpriv",
)
def test_ray_schedules_and_deepspeed_start_without_write_access_to_home_and_installation(tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    os.chown(cache, UID, UID)
    for folder in tmp_path.parents[:2]:
        folder.chmod(0o755)
    compiled = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / "deepspeed_shm_comm" / "deepspeed_shm_comm.so"
    compiled.parent.parent.chmod(0o755)
    kept = ("PATH", "TORCH_EXTENSIONS_DIR", "OMP_NUM_THREADS")
    environment = {name: os.environ[name] for name in kept if name in os.environ} | {"HOME": "/", "RLFUSE_CACHE": cache}
    command = [*BECOME, sys.executable, Path(__file__).with_name("ray_of_another_user.py")]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    message, extensions, slots = json.loads(done.stdout.splitlines()[-1])
    assert message.startswith(f"HOME=/ is not writable; caches are written to {cache}.")
    copied = Path(extensions) / "deepspeed_shm_comm" / compiled.name
    assert copied.is_relative_to(cache) and copied.stat().st_mtime == compiled.stat().st_mtime, (
        "the operation was compiled again"
    )
    assert slots.startswith("CPUs of 127.0.0.1")
