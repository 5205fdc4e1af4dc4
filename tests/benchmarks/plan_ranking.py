"""Whether plans take as long as `rlfuse plan --search` says: jobs under several plans each, predicted and really run.

    python tests/benchmarks/plan_ranking.py outputs/ranking    # makes the runs that are missing there, a minute each

The plans of a job are the job as it is, the search's best, and others that differ in a key. They are predicted from a
calibration on the other jobs as they are: no plan is predicted from runs of its own job, but for the lengths of its
responses. Nothing learns (learning rates are 0): else each plan's responses would grow or shrink in their own way, and
with them its steps. Measured is the median step of a run but its first.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from calibration_transfer import GRPO, JOBS, LONG, make
from scipy.stats import spearmanr

from rlfuse.config.documentation import as_typed
from rlfuse.config.facts import Facts
from rlfuse.events import read_events
from rlfuse.planning.calibrate import read_works
from rlfuse.planning.calibration import errors_of, fitted, held_out
from rlfuse.planning.cluster_file import Cluster
from rlfuse.planning.hardware import Hardware, Links
from rlfuse.planning.model_sizes import shapes_of
from rlfuse.planning.remedies import Setting
from rlfuse.planning.search import search, settled
from rlfuse.planning.space import axes_of
from rlfuse.planning.step_time import Job
from rlfuse.simulate.recorded import config_of, spans_within, whole_samples

TASKS = {
    "small": JOBS["small"],
    "mid": JOBS["mid"],
    "mid_long": LONG,
    "mid_grpo": JOBS["mid_grpo"],
    "wide": JOBS["wide"],
    "wide_grpo": (*GRPO, "data.train_batch_size=16", "actor.ppo_mini_batch_size=8"),
}
OTHERS: dict[str, tuple[Setting, ...]] = {
    "serial": (("fusion.policy", "serial"),),
    "stream": (("fusion.policy", "stream"),),
    "one slot": (("trainer.n_gpus_per_node", 1),),
    "ZeRO 3": (("actor.zero_stage", 3),),
    "stages": (("training.pipeline_parallel_size", 2),),
    "Ulysses": (("training.ulysses_sequence_parallel_size", 2), ("actor.ppo_max_token_len_per_gpu", 256)),
    "tensor": (("rollout.tensor_model_parallel_size", 2),),
    "recompute": (("model.enable_gradient_checkpointing", True),),
    "few tokens": (("actor.ppo_max_token_len_per_gpu", 256),),
    "few sequences": (("rollout.max_num_seqs", 4),),
}
TRIED = {
    "small": ("serial", "few tokens"),
    "mid": ("one slot", "recompute"),
    "mid_long": ("stages", "tensor"),
    "mid_grpo": ("serial", "ZeRO 3"),
    "wide": ("one slot", "Ulysses"),
    "wide_grpo": ("stream", "few sequences"),
}
"""Of OTHERS, each at least once."""
FROZEN = ("actor.optim.lr=0", "critic.optim.lr=0")
CLUSTER = Cluster(1, 2, 10, calibration="of the other jobs", device="cpu")
LINKS = Links(within_bytes_per_s=1e9, within_s=2e-4)
"""Gloo between two processes of one machine: its order of magnitude."""


@dataclass(frozen=True)
class Tried:
    """A plan of a job."""

    name: str
    settings: tuple[Setting, ...]
    predicted_s: float
    measured_s: float = 0.0


def main() -> None:
    """Make what is missing, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    for name, words in TASKS.items():
        _run(arguments.folder, name, words, arguments.steps)
    every = []
    for name in TASKS:
        others = [folder_of(arguments.folder, other) for other in TASKS if other != name]
        works = [work for path in others for work in read_works(path, path.name)[0]]
        errors = {kind: error for kind, error in asdict(errors_of(held_out(works)[0])).items() if error is not None}
        hardware = replace(fitted(works), links=LINKS, errors=errors)
        plans = [
            replace(plan, measured_s=_measured(arguments.folder, name, plan, arguments.steps))
            for plan in _plans(folder_of(arguments.folder, name), hardware, TRIED[name])
        ]
        every += plans
        _show(name, plans)
    ranks = spearmanr([plan.predicted_s for plan in every], [plan.measured_s for plan in every]).statistic
    print(f"\nall {len(every)} plans: rank correlation {ranks:.3f}")


def folder_of(folder: Path, name: str) -> Path:
    return folder / "rlfuse" / name


def _run(folder: Path, name: str, words: tuple[str, ...], steps: int) -> None:
    if not (folder_of(folder, name) / "summary.json").exists():
        make(folder, name, (*words, *FROZEN), steps)


def _plans(folder: Path, hardware: Hardware, others: tuple[str, ...]) -> Iterator[Tried]:
    """The job as it is, the search's best and others, each under the policy that it names or the search's choice."""
    job, facts = _job(folder, hardware)
    found, _ = settled(job, search(job, facts), facts)
    for name, settings in (
        ("as it is", ()),
        ("best", found.plans[0].settings),
        *((each, OTHERS[each]) for each in others),
    ):
        config, memory = job.with_settings(settings)
        yield Tried(name, settings, job.times.simulated(config, memory, tuned=True).step)


def _job(folder: Path, hardware: Hardware) -> tuple[Job, Facts]:
    config, spans = config_of(folder / "config.yaml"), read_events(folder / "events.jsonl")
    shapes = shapes_of(config)
    step = next(span for span in reversed(spans) if span.kind == "step")
    lengths, prompt = whole_samples(spans_within(spans, step))
    axes = axes_of(config, shapes["actor"], CLUSTER)
    facts = Facts(attention_heads=shapes["actor"].heads, layers=len(shapes["actor"].layers))
    return Job(config, shapes, {}, CLUSTER, hardware, tuple(lengths), round(prompt), axes), facts


def _measured(folder: Path, name: str, plan: Tried, steps: int) -> float:
    words = tuple(f"{key}={as_typed(value)}" for key, value in plan.settings)
    where = f"{name}_{plan.name.replace(' ', '_')}" if words else name
    _run(folder, where, (*TASKS[name], *words), steps)
    spans = read_events(folder_of(folder, where) / "events.jsonl")
    return median([span.seconds for span in spans if span.kind == "step"][1:])


def _show(name: str, plans: list[Tried]) -> None:
    print(f"\n| {name} | predicted s | measured s |\n|---|---|---|")
    for plan in sorted(plans, key=lambda plan: plan.predicted_s):
        print(f"| {plan.name} | {plan.predicted_s:.2f} | {plan.measured_s:.2f} |")
    first, least = min(plans, key=lambda plan: plan.predicted_s), min(plan.measured_s for plan in plans)
    ranks = spearmanr([plan.predicted_s for plan in plans], [plan.measured_s for plan in plans]).statistic
    print(f"\n{name}: first {first.measured_s / least - 1:.1%} above the best that was run; ranks {ranks:.2f}")


if __name__ == "__main__":
    main()
