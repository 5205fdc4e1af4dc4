"""`rlfuse reward serve | replay`: finds the sub-command; each is imported only when it is called."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def main(argv: Sequence[str]) -> None:
    """Run one of them. Raises RewardError, ConfigError or RunError."""
    parser = argparse.ArgumentParser(prog="rlfuse reward", description="Reward functions beside a job.")
    parser.add_argument("command", choices=("serve", "replay"), help="serve one over HTTP; replay a run with another")
    command, rest = parser.parse_args(argv[:1]).command, argv[1:]
    if command == "serve":
        from rlfuse.tools.evaluation.service import main as serve

        return serve(rest)
    from rlfuse.tools.evaluation.replay import main as replay

    return replay(rest)
