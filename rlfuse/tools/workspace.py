"""`rlfuse workspace`: save a view of a wandb project with the ten charts to look at first.

CHARTS --workspace--> view of wandb-workspaces --save--> server; --dry-run prints it instead
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlfuse.errors import UserError
from rlfuse.observe.sink import AXIS

CHARTS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "Learning": {
        "Reward": ("critic/score/mean", "critic/score/max", "critic/score/min"),
        "Held-out score": ("^val-core/",),
        "Response length (tokens)": ("response_length/mean", "response_length/max"),
        "Groups with equal rewards, truncated responses": ("reward/frac_reward_zero_std", "response_length/clip_ratio"),
    },
    "Stability": {
        "Entropy": ("actor/entropy", "response/entropy"),
        "KL to the reference": ("actor/reward_kl_penalty", "actor/kl_loss"),
        "KL and clipping of the updates": ("actor/ppo_kl", "actor/pg_clipfrac"),
        "Gradient norm": ("actor/grad_norm", "critic/grad_norm"),
        "Probabilities, engine against trainer": (
            "training/rollout_probs_diff_mean",
            "training/rollout_probs_diff_max",
        ),
    },
    "Speed": {"Seconds per stage": ("timing_s/step", "timing_s/gen", "timing_s/update_actor", "timing_s/reward")},
}
"""Section -> title of a chart -> its metrics. A leading ^ makes a metric a regular expression."""
PACKAGE = "wandb_workspaces"


def main(argv: Sequence[str]) -> None:
    """Run the command. UserError if the package is missing or the server rejects the view."""
    parser = argparse.ArgumentParser(
        prog="rlfuse workspace", description="Save a view with the ten most useful charts in a wandb project."
    )
    parser.add_argument("project", metavar="ENTITY/PROJECT", help="user or team, and trainer.project_name")
    parser.add_argument("--name", default="rlfuse", help="name of the view; default: rlfuse")
    parser.add_argument("--dry-run", action="store_true", help="print the view as JSON and save nothing")
    arguments = parser.parse_args(argv)
    entity, slash, project = arguments.project.partition("/")
    if not (entity and slash and project):
        parser.error(f"{arguments.project}: must be ENTITY/PROJECT, for example my-team/rlfuse")
    view = workspace(entity, project, arguments.name)
    if arguments.dry_run:
        print(json.dumps(as_dict(view), indent=2))
        return
    print(f"saved {save(view)}")


def workspace(entity: str, project: str, name: str = "rlfuse") -> Any:
    """Return the view as a `wandb_workspaces.workspaces.Workspace`, which is not saved yet."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise UserError("rlfuse workspace: the package wandb-workspaces is missing; pip install 'rlfuse[workspace]'")
    from wandb_workspaces.reports.v2 import LinePlot
    from wandb_workspaces.workspaces import Section, Workspace, WorkspaceSettings

    def chart(title: str, metrics: Sequence[str]) -> LinePlot:
        pattern = next((metric for metric in metrics if metric.startswith("^")), None)
        return LinePlot(title=title, x=AXIS, y=[] if pattern else list(metrics), metric_regex=pattern)

    sections = [
        Section(name=section, is_open=True, panels=[chart(title, metrics) for title, metrics in charts.items()])
        for section, charts in CHARTS.items()
    ]
    return Workspace(
        entity=entity, project=project, name=name, sections=sections, settings=WorkspaceSettings(x_axis=AXIS)
    )


def as_dict(view: Any) -> dict[str, Any]:
    """Return the view as wandb stores it."""
    return view._to_model().model_dump(mode="json", by_alias=True, exclude_none=True)


def save(view: Any) -> str:
    """Save the view in its project, and return its address. UserError if wandb rejects it."""
    try:
        return view.save().url
    except Exception as error:  # each version of wandb has others
        why = " ".join(str(error).split())[:400].rstrip(".")
        remedy = "check the project's name, `wandb login --verify` and the network"
        raise UserError(f"rlfuse workspace {view.entity}/{view.project}: not saved ({why}); {remedy}") from error
