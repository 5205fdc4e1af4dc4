"""Draw the steps of a search's plans, with their errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rlfuse.files import replacing
from rlfuse.planning.search import Plan, error_of

COLOURS = {"generating": "#4c78a8", "scoring": "#f2b54b", "training": "#54a24b"}


def draw(plans: Sequence[Plan], names: Sequence[str], errors: Mapping[str, float], path: Path) -> None:
    """A bar for each plan, the fastest at the top, with the error of the whole step."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.45 * len(plans)), layout="constrained")
    left = [0.0] * len(plans)
    for kind, colour in COLOURS.items():
        widths = [plan.seconds.kinds[kind] for plan in plans]
        axes.barh(names, widths, left=left, color=colour, label=kind)
        left = [at + width for at, width in zip(left, widths, strict=True)]
    axes.errorbar(left, names, xerr=[error_of(plan.seconds, errors) for plan in plans], fmt="none", color="black")
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step, and how far they may be off")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    with replacing(path) as aside:
        figure.savefig(aside, format=path.suffix[1:], dpi=120)
    pyplot.close(figure)
