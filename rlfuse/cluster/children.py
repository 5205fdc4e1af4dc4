"""Child processes of Ray's processes: their exit statuses.

Role: called by the driver once Ray is up, and by processes that run users' code.
"""

import signal
import threading


def heed_children() -> None:
    """Exit statuses of this process's children again: Ray, told to end them, ignores SIGCHLD, so that all read as 0."""
    if threading.current_thread() is threading.main_thread():  # no other may set it
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
