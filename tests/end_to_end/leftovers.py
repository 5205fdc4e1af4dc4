"""What engines and jobs leave in shared memory, if anything."""

import time
from pathlib import Path

from rlfuse.cluster import scratch


def weights_left(timeout=120):
    """Folders of pushes, but for those of killed drivers, which the next push removes.

    Those of jobs that other tests run come and go: waits for a moment without any.
    """
    until = time.monotonic() + timeout
    scratch.sweep(scratch.WEIGHTS)
    while (left := list(Path("/dev/shm").glob("rlfuse-weights-*"))) and time.monotonic() < until:
        time.sleep(0.005)
    return left
