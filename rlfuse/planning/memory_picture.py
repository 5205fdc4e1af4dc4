"""Draw what a device holds in each phase, in GiB, below the device's limit."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from rlfuse.files import replacing
from rlfuse.planning.memory import GIB, Memory

HUES = {"engine": "#6aa3d8", "actor": "#7fbf9b", "critic": "#f0b45c", "reference": "#b39ad6", "tower": "#d98880"}
OTHER = "#c8c8c8"
NAMED = 0.035  # share of the device from which a part is named
INK, LIMIT = "#2b2b2b", "#b03a2e"


def draw(memory: Memory, title: str, path: Path) -> None:
    """A bar for each phase, in their order, as a PNG."""
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
    handles = [Patch(color=hue, label=role) for role, hue in HUES.items() if role in roles]
    handles += [Patch(color=OTHER, label="contexts, buffers")] if roles - HUES.keys() else []
    handles.append(Line2D([], [], color=LIMIT, label=f"the device, {limit:.0f} GiB"))
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, labelcolor=INK)
    axes.spines[["top", "right"]].set_visible(False)
    with replacing(path) as aside:
        figure.savefig(aside, format=path.suffix[1:], dpi=110)


def _bar(axes: Axes, place: int, memory: Memory, phase: str) -> None:
    floor = 0.0
    for part in sorted(memory.of(phase), key=lambda each: [*HUES, each.role].index(each.role)):
        size = part.size / GIB
        axes.bar(place, size, 0.82, floor, color=HUES.get(part.role, OTHER), edgecolor="white", linewidth=0.8)
        if part.size > NAMED * memory.budget.bytes:
            name = f"{part.role}: {part.what}  {size:.1f}"
            axes.text(place, floor + size / 2, name, ha="center", va="center", fontsize=7.5, color=INK)
        floor += size
    axes.text(place, floor, f"{floor:.1f}", ha="center", va="bottom", fontsize=9.5, fontweight="bold", color=INK)
