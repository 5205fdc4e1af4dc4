"""The `rlfuse` command: finds the sub-command and hands the rest of the line to it.

Role: a dispatcher without options of its own, so that a command's arguments reach it untouched (Hydra reads them).
Each command is imported only when it is called.
"""

from __future__ import annotations

import difflib
import sys

COMMANDS = {
    "train": "run a job: rlfuse train experiment=quickstart | rlfuse train my_job.yaml key=value ...",
    "prepare": "make the model and the data of a bundled task: rlfuse prepare [quickstart | long_video]",
    "simulate": "what each fusion policy makes of a workload, or of a recorded run, on a virtual clock",
    "report": "a run, or two beside each other, as one HTML page: curves, timelines, idle time, samples",
    "trace": "a run's events for ui.perfetto.dev: a row per slot, arrows from samples to optimizer steps",
    "reward": "serve a reward function over HTTP: rlfuse reward serve path/file.py:function --port 8000",
    "schedule": "one pipeline schedule in which several models train, as short as can be",
}


def usage() -> str:
    """What there is, one line per command."""
    listed = "\n".join(f"  rlfuse {name:<9}{text}" for name, text in COMMANDS.items())
    return f"rlfuse: RLHF post-training, fused sample by sample\n\n{listed}\n  rlfuse COMMAND --help, rlfuse --version"


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    command, arguments = (argv[0], argv[1:]) if argv else ("--help", [])
    if command in ("--help", "-h", "help"):
        print(usage())
        return 0
    if command in ("--version", "-V"):
        from rlfuse import __version__

        print(f"rlfuse {__version__}")
        return 0
    if command == "train":
        from rlfuse.train import main as train

        return train(arguments)
    if command == "prepare":
        from rlfuse.tasks.prepare import main as prepare
        from rlfuse.train import reported

        return reported(lambda: prepare(arguments))
    if command == "simulate":
        from rlfuse.simulate.command import main as simulate
        from rlfuse.train import reported

        return reported(lambda: simulate(arguments))
    if command == "report":
        from rlfuse.report.command import main as report
        from rlfuse.train import reported

        return reported(lambda: report(arguments))
    if command == "trace":
        from rlfuse.observe.trace import main as trace
        from rlfuse.train import reported

        return reported(lambda: trace(arguments))
    if command == "reward":
        from rlfuse.rewards.service import main as reward
        from rlfuse.train import reported

        return reported(lambda: reward(arguments))
    if command == "schedule":
        from rlfuse.fusion.schedules.command import main as schedule
        from rlfuse.train import reported

        return reported(lambda: schedule(arguments))
    near = difflib.get_close_matches(command, COMMANDS, n=1)
    meant = f"did you mean `rlfuse {near[0]}`?" if near else f"commands: {', '.join(COMMANDS)}"
    if "=" in command:
        meant = f"did you mean `rlfuse train {command}`?"
    print(f"rlfuse {command}: unknown command; {meant}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
