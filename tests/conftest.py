"""Shared by all tests."""

import signal

# A shell's script ignores Ctrl-C in what it starts in the background: tests that press it would wait for good.
signal.signal(signal.SIGINT, signal.default_int_handler)
# nohup ignores SIGHUP in what it starts: tests that close a terminal would see no signal.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
