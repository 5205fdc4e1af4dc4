"""An `rlfuse` command in this process. Run by driven_jobs.py."""

import io
from contextlib import redirect_stderr, redirect_stdout

from rlfuse.cli import main


def perform(words):
    """Run `rlfuse` with these arguments; return its exit status and output."""
    text = io.StringIO()
    with redirect_stdout(text), redirect_stderr(text):
        status = main(words)
    return status, text.getvalue()
