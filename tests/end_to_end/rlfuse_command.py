"""An `rlfuse` command in this process: its exit status, and what it prints. Performed by driven_jobs.py."""

import io
from contextlib import redirect_stderr, redirect_stdout

from rlfuse.cli import main


def perform(words):
    """`rlfuse`, with these words."""
    text = io.StringIO()
    with redirect_stdout(text), redirect_stderr(text):
        status = main(words)
    return status, text.getvalue()
