"""Detection of files left in shared memory."""

import time
from pathlib import Path

from rlfuse.cluster import scratch


def weights_left(timeout=120):
    """Return the folders of weight pushes, except those of killed drivers, which the next push removes.

    Jobs of other tests create and remove some, so this polls until there are none or `timeout` expires.
    """
    until = time.monotonic() + timeout
    scratch.sweep(scratch.WEIGHTS)
    while (left := list(Path("/dev/shm").glob("rlfuse-weights-*"))) and time.monotonic() < until:
        time.sleep(0.005)
    return left
