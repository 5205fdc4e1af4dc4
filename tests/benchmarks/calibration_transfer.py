"""Prediction error of a calibration on runs that it was not fitted to: other models, lengths, batch sizes, algorithms.

    python tests/benchmarks/calibration_transfer.py outputs/calibration    # makes the runs that are missing there

Each run is predicted from all others: the duration of each kind of work in its steps, and the steps themselves, by the
simulator on the generated samples. The first step of a run is warm-up and is not counted.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rlfuse.costs.spans import spans_within
from rlfuse.events import read_events
from rlfuse.simulate.job_step import finished_lengths, workload_of
from rlfuse.simulate.runner import simulate
from rlfuse.tools.planning.calibrate import read_work
from rlfuse.tools.planning.calibration import fit_hardware, totals
from rlfuse.tools.planning.costs import costs_of
from rlfuse.tools.planning.features import Work
from rlfuse.tools.planning.hardware import KINDS, Hardware
from rlfuse.tools.planning.plan import shapes_of
from rlfuse.tools.simulate.recorded import config_of

BASE = Path(".cache/rlfuse/remainder/model")
MODELS = {"small": (128, 384, 2, 4), "mid": (256, 768, 6, 4), "wide": (512, 1536, 8, 8)}
"""Hidden size, intermediate size, layers, heads; random weights, so that one token in 108 ends a response."""
LONG = ("data.train_batch_size=16", "data.max_response_length=480", "actor.ppo_max_token_len_per_gpu=2048")
GRPO = ("algorithm=grpo", "algorithm.use_kl_in_reward=false", "rollout.n=4", "data.max_response_length=96")
JOBS: dict[str, tuple[str, ...]] = {
    "small": ("data.train_batch_size=64",),
    "mid": ("data.train_batch_size=32",),
    "mid_long": LONG,
    "mid_grpo": (*GRPO, "data.train_batch_size=64", "actor.ppo_mini_batch_size=32"),
    "wide": ("data.train_batch_size=16", "data.max_response_length=96", "actor.ppo_mini_batch_size=8"),
}
QUIET = ("experiment=quickstart", "trainer.test_freq=1000", "trainer.val_before_train=false")


def main() -> None:
    """Make the missing runs, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    runs = arguments.folder / "rlfuse"
    for name, words in JOBS.items():
        if not (runs / name / "summary.json").exists():
            make(arguments.folder, name, words, arguments.steps)
    works = {name: read_work(runs / name, name)[0] for name in JOBS}
    print(
        f"| predicted from the others | {' | '.join(KINDS)} | step, mean | step, worst |\n|{'---|' * (len(KINDS) + 3)}"
    )
    every = []
    for name in JOBS:
        others = [work for other in JOBS if other != name for work in works[other]]
        errors, steps = _errors(runs / name, works[name], fit_hardware(others))
        every += steps
        kinds = " | ".join(f"{errors[kind]:.1%}" for kind in KINDS)
        print(f"| {name} | {kinds} | {np.mean(steps):.1%} | {max(steps):.1%} |")
    print(f"\nsteps: {len(every)}, off by {np.mean(every):.1%} on average, {max(every):.1%} maximum")


def make(folder: Path, name: str, words: tuple[str, ...], steps: int) -> None:
    model = folder.absolute() / "models" / name.partition("_")[0]
    if not BASE.exists():
        subprocess.run([sys.executable, "-m", "rlfuse.cli", "prepare", "quickstart"], check=True)
    if not model.exists():
        hidden, intermediate, layers, heads = MODELS[model.name]
        config = AutoConfig.from_pretrained(BASE)
        config.hidden_size, config.intermediate_size = hidden, intermediate
        config.num_hidden_layers, config.num_attention_heads = layers, heads
        config.layer_types = ["full_attention"] * layers
        AutoModelForCausalLM.from_config(config).save_pretrained(model)
        AutoTokenizer.from_pretrained(BASE).save_pretrained(model)
    where = (f"trainer.default_local_dir={folder.absolute()}", f"trainer.experiment_name={name}")
    steps_of_it = f"trainer.total_training_steps={steps}"
    command = [sys.executable, "-m", "rlfuse.cli", "train", *QUIET, f"model.path={model}", *where, steps_of_it, *words]
    subprocess.run(command, check=True)


def _errors(folder: Path, works: list[Work], hardware: Hardware) -> tuple[dict[str, float], list[float]]:
    """Return the mean error of each kind over steps, and the error of each step."""
    found = totals(works, hardware)
    kinds = {kind: float(np.mean([total.error for total in found if total.kind == kind])) for kind in KINDS}
    config, spans = config_of(folder / "config.yaml"), read_events(folder / "events.jsonl")
    shapes, errors = shapes_of(config), []
    for step in [span for span in spans if span.kind == "step"][1:]:
        lengths, prompt = finished_lengths(spans_within(spans, step))
        costs = costs_of(config, shapes, hardware, prompt + float(np.mean(lengths)))
        workload = workload_of(config, costs, config.slots, lengths, prompt)
        errors.append(abs(simulate(workload, config.fusion.policy).result.step_s / step.seconds - 1))
    return kinds, errors


if __name__ == "__main__":
    main()
