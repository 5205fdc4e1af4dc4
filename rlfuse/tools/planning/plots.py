"""Plots of `rlfuse plan`, `rlfuse plan --search` and `rlfuse calibrate`, as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from rlfuse.engines.memory.estimate import GIB, Memory
from rlfuse.observe.schedule_picture import INK, legend, save
from rlfuse.tools.planning.calibration import Total
from rlfuse.tools.planning.hardware import KINDS
from rlfuse.tools.planning.search import Plan, step_error_s

ROLE_HUES = {"engine": "#6aa3d8", "actor": "#7fbf9b", "critic": "#f0b45c", "reference": "#b39ad6", "tower": "#d98880"}
OTHER = "#c8c8c8"
RUN_HUES = ("#6aa3d8", "#f0b45c", "#7fbf9b", "#b39ad6", "#d98880", "#8c8c8c")
KIND_HUES = {"generating": "#4c78a8", "scoring": "#f2b54b", "training": "#54a24b"}
NAMED = 0.035  # parts above this share of device memory are labelled
LIMIT, BAND = "#b03a2e", "#e4e4e4"


def draw_memory(memory: Memory, title: str, path: Path) -> None:
    """Plot the memory of a device in each phase, in GiB, with the limit of the device."""
    figure = Figure(figsize=(10.5, 6.0), layout="constrained")
    axes, limit = figure.subplots(), memory.budget.bytes / GIB
    for place, phase in enumerate(memory.phases):
        _bar(axes, place, memory, phase)
    axes.axhline(limit, color=LIMIT, linewidth=1.2)
    axes.set_xticks(range(len(memory.phases)), memory.phases, color=INK)
    axes.set_ylim(0, max(limit, memory.total(memory.tightest) / GIB) * 1.08)
    axes.set_ylabel("GiB on the device", color=INK)
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    roles = {part.role for phase in memory.phases for part in memory.of(phase)}
    handles = [Patch(color=hue, label=role) for role, hue in ROLE_HUES.items() if role in roles]
    handles += [Patch(color=OTHER, label="contexts, buffers")] if roles - ROLE_HUES.keys() else []
    handles.append(Line2D([], [], color=LIMIT, label=f"device memory, {limit:.0f} GiB"))
    legend(figure, handles, len(handles), "lower")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def _bar(axes: Axes, place: int, memory: Memory, phase: str) -> None:
    floor = 0.0
    for part in sorted(memory.of(phase), key=lambda each: [*ROLE_HUES, each.role].index(each.role)):
        size = part.size / GIB
        axes.bar(place, size, 0.82, floor, color=ROLE_HUES.get(part.role, OTHER), edgecolor="white", linewidth=0.8)
        if part.size > NAMED * memory.budget.bytes:
            name = f"{part.role}: {part.what}  {size:.1f}"
            axes.text(place, floor + size / 2, name, ha="center", va="center", fontsize=7.5, color=INK)
        floor += size
    axes.text(place, floor, f"{floor:.1f}", ha="center", va="bottom", fontsize=9.5, fontweight="bold", color=INK)


def draw_calibration(found: Sequence[Total], title: str, path: Path) -> None:
    """Plot measured and predicted seconds of held-out work, a panel for each kind."""
    figure = Figure(figsize=(11.0, 4.4), layout="constrained")
    sources = list(dict.fromkeys(total.source for total in found))
    for axes, kind in zip(figure.subplots(1, len(KINDS)), KINDS, strict=True):
        _panel(axes, kind, [total for total in found if total.kind == kind], sources)
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=11)
    handles, _ = figure.axes[0].get_legend_handles_labels()
    legend(figure, handles, len(handles), "lower")
    save(figure, path)


def _panel(axes: Axes, kind: str, found: Sequence[Total], sources: Sequence[str]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("measured, s", color=INK)
    axes.set_ylabel("predicted, s", color=INK)
    if not found:
        axes.set_title(f"{kind}: not measured", loc="left", color=INK, fontsize=10)
        return
    error = sum(total.error for total in found) / len(found)
    axes.set_title(f"{kind}: mean error {error:.1%}", loc="left", color=INK, fontsize=10)
    seconds = [each for total in found for each in (total.measured, total.predicted)]
    ends = [min(seconds) / 1.3, max(seconds) * 1.3]
    axes.fill_between(ends, [end * (1 - error) for end in ends], [end * (1 + error) for end in ends], color=BAND)
    axes.plot(ends, ends, color=INK, linewidth=0.8)
    for place, source in enumerate(sources):
        mine = [total for total in found if total.source == source]
        hue = RUN_HUES[place % len(RUN_HUES)]
        axes.scatter(*zip(*((t.measured, t.predicted) for t in mine), strict=True), s=26, color=hue, label=source)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)


def draw_plans(plans: Sequence[Plan], names: Sequence[str], errors: Mapping[str, float], path: Path) -> None:
    """Plot a bar for each plan, the fastest at the top, with the error of the step."""
    figure = Figure(figsize=(9, 1.5 + 0.45 * len(plans)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(plans)
    for kind, colour in KIND_HUES.items():
        widths = [plan.seconds.kinds[kind] for plan in plans]
        axes.barh(names, widths, left=left, color=colour, label=kind)
        left = [at + width for at, width in zip(left, widths, strict=True)]
    axes.errorbar(left, names, xerr=[step_error_s(plan.seconds, errors) for plan in plans], fmt="none", color="black")
    axes.invert_yaxis()
    axes.set_xlabel("step time in seconds, with the error of the forecast")
    legend(figure, axes.get_legend_handles_labels()[0], len(KIND_HUES))
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)
