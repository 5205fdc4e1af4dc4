"""Error and ranking of `rlfuse plan --search`: jobs under several plans each, predicted and measured.

    python tests/benchmarks/plan_ranking.py outputs/ranking    # makes the runs that are missing there, a minute each

The plans of a job are the job as it is, the search's first choice, and others that differ in one key. They are
predicted from a calibration on the other jobs, and on one slot where that is a candidate: a plan never uses runs of its
own job, except for response lengths. The search gets the lengths of the step with the median number of tokens;
predicted and measured are means over all steps but the first. Lengths are the same under every plan: nothing is learned
(learning rates are 0), and samples depend only on the step.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean

from calibration_transfer import GRPO, JOBS, LONG, make
from scipy.stats import spearmanr

from rlfuse.config.checks import value_of
from rlfuse.config.declare import as_typed
from rlfuse.config.facts import Facts
from rlfuse.costs.spans import spans_within
from rlfuse.engines.memory.model_sizes import shapes_of
from rlfuse.engines.memory.remedies import Setting
from rlfuse.events import read_events
from rlfuse.simulate.job_step import finished_lengths
from rlfuse.tools.planning.calibrate import read_work
from rlfuse.tools.planning.calibration import fit_hardware, held_out, mean_errors
from rlfuse.tools.planning.cluster_file import Cluster
from rlfuse.tools.planning.hardware import Hardware, Links
from rlfuse.tools.planning.search import refine, search
from rlfuse.tools.planning.searched_job import Job
from rlfuse.tools.planning.space import axes_of
from rlfuse.tools.simulate.recorded import config_of

TASKS = {
    "small": JOBS["small"],
    "mid": JOBS["mid"],
    "mid_long": LONG,
    "mid_grpo": JOBS["mid_grpo"],
    "wide": JOBS["wide"],
    "wide_grpo": (*GRPO, "data.train_batch_size=16", "actor.ppo_mini_batch_size=8"),
}
AS_IT_IS, BEST = "as it is", "best"
ONE_SLOT = "one slot"
OTHERS: dict[str, tuple[Setting, ...]] = {
    "serial": (("fusion.policy", "serial"),),
    "stream": (("fusion.policy", "stream"),),
    ONE_SLOT: (("trainer.n_gpus_per_node", 1),),
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
    "mid": (ONE_SLOT, "recompute"),
    "mid_long": ("stages", "tensor"),
    "mid_grpo": ("serial", "ZeRO 3"),
    "wide": (ONE_SLOT, "Ulysses"),
    "wide_grpo": ("stream", "few sequences"),
}
"""Plans of OTHERS per job; each of them is used at least once."""
SECONDS = 30.0
"""Time limit of a search."""
FROZEN = ("actor.optim.lr=0", "critic.optim.lr=0")
CLUSTER = Cluster(1, 2, 10, calibration="of the other jobs", device="cpu")
LINKS = Links(within_bytes_per_s=1e9, within_s=2e-4)
"""Gloo between two processes of one machine (order of magnitude), if the other jobs have no measurement."""


@dataclass(frozen=True)
class Tried:
    """One plan of a job, predicted and measured."""

    name: str
    settings: tuple[Setting, ...]
    predicted_s: float
    first: bool
    """True for the search's first choice."""
    measured_s: float = 0.0


def main() -> None:
    """Make the missing runs, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    known = {name: _calibrating(arguments.folder, name, arguments.steps) for name in TASKS}
    every = []
    for name in TASKS:
        others = [path for other, paths in known.items() if other != name for path in paths]
        works = [work for path in others for work in read_work(path, path.name)[0]]
        errors = {kind: error for kind, error in asdict(mean_errors(held_out(works)[0])).items() if error is not None}
        hardware = fit_hardware(works)
        links = replace(LINKS, within_bytes_per_s=hardware.sent_bytes_per_s or LINKS.within_bytes_per_s)
        hardware = replace(hardware, links=links, errors=errors)
        plans = [
            replace(plan, measured_s=_measured(arguments.folder, name, plan, arguments.steps))
            for plan in _plans(folder_of(arguments.folder, name), hardware, TRIED[name])
        ]
        every += plans
        _show(name, plans)
    ranks = spearmanr([plan.predicted_s for plan in every], [plan.measured_s for plan in every]).statistic
    off = [abs(plan.predicted_s / plan.measured_s - 1) for plan in every]
    accuracy = f"rank correlation {ranks:.3f}, off by {mean(off):.1%} on average, {max(off):.1%} maximum"
    print(f"\nall {len(every)} plans: {accuracy}")


def folder_of(folder: Path, name: str) -> Path:
    return folder / "rlfuse" / name


def _calibrating(folder: Path, name: str, steps: int) -> list[Path]:
    """Return the runs of a job that calibrate the machine."""
    plans = [(), *(OTHERS[each] for each in TRIED[name] if each == ONE_SLOT)]
    return [_made(folder, name, ONE_SLOT, settings, steps) for settings in plans]


def _plans(folder: Path, hardware: Hardware, others: tuple[str, ...]) -> Iterator[Tried]:
    """Return the job's plan, the search's first choice if it differs, and others."""
    job, facts, steps = _job(folder, hardware)
    found, _ = refine(job, search(job, facts, SECONDS), facts)
    changes = tuple((key, value) for key, value in found.plans[0].settings if value != value_of(job.config, key))
    first = BEST if changes else AS_IT_IS
    plans = {AS_IT_IS: (), first: changes} | {each: OTHERS[each] for each in others}
    for name, settings in plans.items():
        config, memory = job.with_settings(settings)
        predicted = mean(step.simulated(config, memory, tuned=True).step for step in steps)
        yield Tried(name, settings, predicted, name == first)


def _job(folder: Path, hardware: Hardware) -> tuple[Job, Facts, list[Job]]:
    """Return the job with the lengths of its median step, its candidates, and the job with the lengths of each step."""
    config, spans = config_of(folder / "config.yaml"), read_events(folder / "events.jsonl")
    shapes = shapes_of(config)
    steps = [finished_lengths(spans_within(spans, span)) for span in spans if span.kind == "step"][1:]
    axes = axes_of(config, shapes["actor"], CLUSTER)
    facts = Facts(attention_heads=shapes["actor"].heads, layers=len(shapes["actor"].layers))
    jobs = [
        Job(config, shapes, {}, CLUSTER, hardware, tuple(lengths), round(prompt), axes) for lengths, prompt in steps
    ]
    return sorted(jobs, key=lambda job: sum(job.lengths))[len(jobs) // 2], facts, jobs


def _measured(folder: Path, name: str, plan: Tried, steps: int) -> float:
    spans = read_events(_made(folder, name, plan.name, plan.settings, steps) / "events.jsonl")
    return mean([span.seconds for span in spans if span.kind == "step"][1:])


def _made(folder: Path, name: str, plan: str, settings: tuple[Setting, ...], steps: int) -> Path:
    """Return the run of a plan of a job."""
    words = tuple(f"{key}={as_typed(value)}" for key, value in settings)
    where = f"{name}_{plan.replace(' ', '_')}" if words else name
    if not (folder_of(folder, where) / "summary.json").exists():
        make(folder, where, (*TASKS[name], *words, *FROZEN), steps)
    return folder_of(folder, where)


def _show(name: str, plans: list[Tried]) -> None:
    print(f"\n| {name} | predicted s | measured s |\n|---|---|---|")
    for plan in sorted(plans, key=lambda plan: plan.predicted_s):
        which = f"**{plan.name}**" if plan.first else plan.name
        print(f"| {which} | {plan.predicted_s:.2f} | {plan.measured_s:.2f} |")
    (first,), least = [plan for plan in plans if plan.first], min(plan.measured_s for plan in plans)
    print(f"\n{name}: the search's first takes {first.measured_s / least - 1:.1%} more than the best that was run")


if __name__ == "__main__":
    main()
