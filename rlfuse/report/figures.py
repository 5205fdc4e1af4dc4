"""The report's charts: plotly figures of what was gathered, of one run or of two side by side.

Role: pure functions from `Gathered` to figures, called by the command. Every work and every cause of idleness has one
colour in all of them: work is saturated, waiting is pale. Curves longer than POINTS are means over neighbouring steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from rlfuse.report.gather import QUANTILES, Gathered, Timeline

POINTS = 400
RUNS = ("#1d5c9e", "#c2385a")
INK, GRID = "#2b2b2b", "#e6e3de"
BUSY = {
    "generate": "#3f7fbf",
    "encode": "#4fb3bf",
    "old_log_prob": "#f0a830",
    "ref": "#d98c1f",
    "values": "#b8731a",
    "train": "#3f9e6e",
    "optimizer": "#1e5c3c",
    "update_weights": "#8467b5",
    "testing": "#7a6a5d",
    "save_checkpoint": "#4a4038",
    "reward": "#c2385a",
}
IDLE = {
    "tail": "#e3b7c1",
    "imbalance": "#ecd0a5",
    "reward": "#d9a7d0",
    "bubble": "#bfd9c5",
    "weights": "#cfc4e6",
    "switch": "#c9c3bb",
    "calls": "#c5d5e6",
    "data": "#e2dfa9",
    "controller": "#d6d6d6",
    "start_up": "#efece8",
}
WAITS = {
    "tail": "others still generate",
    "imbalance": "other slots still score or train",
    "reward": "reward functions",
    "bubble": "pipeline bubble",
    "weights": "new weights",
    "switch": "change of role",
    "calls": "its call is on the way",
    "data": "prompts, clips",
    "controller": "controller, logging",
    "start_up": "start-up",
}
CURVES = (
    ("reward", ("critic/score/mean",)),
    ("held out", ("val-core/",)),
    ("response tokens", ("response_length/mean", "response_length/max")),
    ("KL to the reference", ("critic/kl", "actor/kl_loss")),
    ("policy change (ppo_kl)", ("actor/ppo_kl",)),
    ("entropy", ("actor/entropy",)),
    ("policy loss", ("actor/pg_loss",)),
    ("gradient norm", ("actor/grad_norm", "critic/grad_norm")),
    ("clipped", ("actor/pg_clipfrac", "response_length/clip_ratio")),
    ("groups without spread", ("reward/frac_reward_zero_std",)),
    ("seconds per step", ("timing_s/step",)),
    ("tokens per second and slot", ("perf/throughput",)),
)
"""Title -> metrics; one that ends in / stands for all that begin with it."""


def thin(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most POINTS points: means over neighbours."""
    if len(steps) <= POINTS:
        return list(steps), list(values)
    edges = np.linspace(0, len(steps), POINTS, endpoint=False).astype(int)
    counts = np.diff(edges, append=len(steps))
    return tuple((np.add.reduceat(np.asarray(each, dtype=float), edges) / counts).tolist() for each in (steps, values))


def series(run: Gathered, name: str) -> tuple[list[float], list[float]]:
    """Steps and values of a metric, thinned."""
    points = [(row["step"], row[name]) for row in run.rows if row.get(name) is not None]
    return thin(*zip(*points, strict=True)) if points else ([], [])


LEGEND = {"orientation": "h", "traceorder": "normal", "yref": "container", "y": 0.0, "yanchor": "bottom", "x": 0.0}
LEGEND_HEIGHT = 84


def _styled(figure: go.Figure, height: int, legend: bool = False, **layout: object) -> go.Figure:
    """`legend`: below the chart, in room of its own."""
    below = LEGEND_HEIGHT if legend else 0
    figure.update_layout(
        template="plotly_white",
        height=height + below,
        legend=LEGEND,
        margin={"l": 56, "r": 16, "t": 44, "b": 44 + below},
        font={"family": "system-ui, sans-serif", "size": 12, "color": INK},
        hoverlabel={"font": {"family": "ui-monospace, monospace", "size": 12}, "align": "left"},
        **layout,
    )
    figure.update_xaxes(gridcolor=GRID, zeroline=False)
    figure.update_yaxes(gridcolor=GRID, zeroline=False)
    return figure


# Curves --------------------------------------------------------------------------------------------------------------


def curves(runs: Sequence[Gathered]) -> go.Figure | None:
    """The usual ones in a grid; those that no run has are left out. None before the first step."""
    names = {name for run in runs for row in run.rows for name in row}
    panels = []
    for title, wanted in CURVES:
        found = [
            name
            for want in wanted
            for name in sorted(names)
            if name == want or (want[-1] == "/" in name and name.startswith(want))
        ]
        if found:
            panels.append((title, found))
    return _grid(runs, panels)


def parts(runs: Sequence[Gathered]) -> go.Figure | None:
    """Mean of every named part of the reward, and how many samples each function failed on; None without any."""
    names = sorted({name for run in runs for row in run.rows for name in row})
    panels = [
        (name.split("/", 1)[1].removesuffix("/mean"), [name])
        for name in names
        if name.startswith("rewards/") and name.endswith("/mean")
    ]
    panels += [
        (f"failures of {name.split('/', 2)[2]}", [name]) for name in names if name.startswith("reward/failures/")
    ]
    return _grid(runs, panels)


def _grid(runs: Sequence[Gathered], panels: Sequence[tuple[str, list[str]]], columns: int = 3) -> go.Figure | None:
    if not panels:
        return None
    lines = -(-len(panels) // columns)
    figure = make_subplots(
        lines,
        columns,
        subplot_titles=[title for title, _ in panels],
        vertical_spacing=0.4 / max(lines, 2),
        horizontal_spacing=0.06,
    )
    for place, (_, names) in enumerate(panels):
        at = {"row": place // columns + 1, "col": place % columns + 1}
        for run, colour in zip(runs, RUNS, strict=False):
            for number, name in enumerate(names):
                steps, values = series(run, name)
                line = {
                    "color": colour,
                    "width": 1.8 if not number else 1.2,
                    "dash": ("solid", "dot", "dash")[number % 3],
                }
                mode = "lines+markers" if len(steps) < 3 else "lines"
                hover = f"{name}<br>step %{{x:.0f}}: %{{y:.4g}}<extra>{_plain(run.run.name)}</extra>"
                figure.add_scatter(x=steps, y=values, line=line, mode=mode, hovertemplate=hover, showlegend=False, **at)
    figure.update_annotations(font_size=12)
    return _styled(figure, 70 + 200 * lines)


def _plain(text: str) -> str:
    """For plotly's labels, which know some HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


# Lengths -------------------------------------------------------------------------------------------------------------


def lengths(runs: Sequence[Gathered]) -> go.Figure | None:
    """Response tokens of every step: all, nine tenths, half of the samples, and the median; one panel a run."""
    shown = [(run, colour) for run, colour in zip(runs, RUNS, strict=False) if run.lengths]
    if not shown:
        return None
    figure = make_subplots(
        1,
        len(shown),
        shared_yaxes=True,
        subplot_titles=[_plain(run.run.name) for run, _ in shown] if len(shown) > 1 else None,
    )
    for column, (run, colour) in enumerate(shown, 1):
        table = np.array([run.lengths[step] for step in run.lengths])
        at = {"row": 1, "col": column}
        levels = [thin(list(run.lengths), table[:, place]) for place in range(len(QUANTILES))]
        for low, high, opacity, what in (
            (0, 6, 0.12, "shortest, longest"),
            (1, 5, 0.2, "5 % to 95 %"),
            (2, 4, 0.35, "25 % to 75 %"),
        ):
            edge = {"mode": "lines", "line": {"width": 0}, "showlegend": False}
            figure.add_scatter(
                x=levels[low][0], y=levels[low][1], hovertemplate=f"{what}: %{{y:.0f}}<extra></extra>", **edge, **at
            )
            figure.add_scatter(
                x=levels[high][0],
                y=levels[high][1],
                fill="tonexty",
                fillcolor=_pale(colour, opacity),
                hovertemplate=f"{what}: %{{y:.0f}}<extra></extra>",
                **edge,
                **at,
            )
        figure.add_scatter(
            x=levels[3][0],
            y=levels[3][1],
            mode="lines",
            line={"color": colour, "width": 2},
            showlegend=False,
            hovertemplate="median: %{y:.0f}<extra></extra>",
            **at,
        )
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="response tokens", rangemode="tozero", col=1)
    return _styled(figure, 320, hovermode="x unified")


def _pale(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


# Time ----------------------------------------------------------------------------------------------------------------


def time(run: Gathered) -> go.Figure | None:
    """Seconds of every row by what slots did, work below, waiting above; None for runs that did not account for it."""
    figure, known = go.Figure(), False
    tops = []
    for side, colours in (("busy", BUSY), ("idle", IDLE)):
        for name, colour in colours.items():
            key = f"{side}/{name}"
            values = [row.get(key, 0.0) for row in run.steps]
            if not any(values):
                continue
            known = True
            steps, values = thin([row["step"] for row in run.steps], values)
            if name != "start_up":
                tops.append(values)
            label = name if side == "busy" else f"idle: {WAITS[name]}"
            figure.add_bar(
                x=steps,
                y=values,
                name=label,
                marker={"color": colour, "line": {"width": 0}},
                hovertemplate=f"{label}<br>step %{{x:.0f}}: %{{y:.3f}} s<extra></extra>",
            )
    if not known:
        return None
    top = 1.15 * float(np.quantile(np.sum(tops, axis=0), 0.98))
    figure.update_yaxes(title_text="seconds per slot", range=[0, top])
    figure.update_xaxes(title_text="step")
    return _styled(figure, 340, legend=True, barmode="stack", bargap=0.08 if len(run.steps) < 100 else 0.0)


def idle(runs: Sequence[Gathered]) -> go.Figure | None:
    """What share of slots' time each cause costs, start-up left out."""
    shares = [idle_shares(run) for run in runs]
    names = [name for name in reversed(IDLE) if any(name in each for each in shares)]
    if not names:
        return None
    figure = go.Figure()
    for run, each, colour in zip(runs, shares, RUNS, strict=False):
        if each:
            figure.add_bar(
                y=[WAITS[name] for name in names],
                x=[100 * each.get(name, 0.0) for name in names],
                name=_plain(run.run.name),
                orientation="h",
                marker_color=colour,
                showlegend=len(runs) > 1,
                hovertemplate="%{y}: %{x:.1f} %<extra></extra>",
            )
    figure.update_xaxes(title_text="% of the slots' time", rangemode="tozero")
    figure.update_yaxes(automargin=True)
    return _styled(figure, 320, legend=len(runs) > 1, barmode="group")


def idle_shares(run: Gathered) -> dict[str, float]:
    """Cause -> share of all slots' time after start-up."""
    totals = {name: sum(row.get(f"idle/{name}", 0.0) for row in run.steps) for name in IDLE if name != "start_up"}
    busy = sum(row.get(f"busy/{name}", 0.0) for row in run.steps for name in BUSY)
    whole = busy + sum(totals.values())
    return {name: value / whole for name, value in totals.items() if value} if whole else {}


# Timelines -----------------------------------------------------------------------------------------------------------


def timeline(shown: Timeline) -> go.Figure:
    """One step: samples in flight above, a row for each slot below."""
    labels = [label for label, _ in shown.rows]
    height = 120 + 24 * len(labels)
    figure = make_subplots(2, 1, shared_xaxes=True, row_heights=[90, height], vertical_spacing=0.03)
    times, counts = zip(*shown.flight, strict=True)
    figure.add_scatter(
        x=times,
        y=counts,
        line={"shape": "hv", "color": BUSY["generate"], "width": 1.2},
        fill="tozeroy",
        fillcolor=_pale(BUSY["generate"], 0.25),
        showlegend=False,
        hovertemplate="%{x:.3f} s: %{y} samples generated<extra></extra>",
        row=1,
        col=1,
    )
    kinds = [f"{side}/{name}" for side, names in (("busy", BUSY), ("idle", IDLE)) for name in names]
    for kind in kinds:
        bars = [(label, start, seconds) for label, each in shown.rows for what, start, seconds in each if what == kind]
        if bars:
            figure.add_trace(_bar(kind, bars), row=2, col=1)
    figure.update_yaxes(
        categoryorder="array", categoryarray=labels[::-1], row=2, col=1, fixedrange=True, gridcolor="white"
    )
    figure.update_yaxes(title_text="samples", rangemode="tozero", row=1, col=1, fixedrange=True)
    figure.update_xaxes(title_text="seconds", row=2, col=1, range=[0, shown.seconds])
    return _styled(figure, 90 + height, legend=True, barmode="overlay", bargap=0.12, hovermode="closest")


def _bar(kind: str, bars: Iterable[tuple[str, float, float]]) -> go.Bar:
    side, _, name = kind.partition("/")
    labels, starts, seconds = (list(each) for each in zip(*bars, strict=True))
    label = name if side == "busy" else f"idle: {WAITS[name]}"
    return go.Bar(
        y=labels,
        x=[round(each, 5) for each in seconds],
        base=[round(each, 5) for each in starts],
        orientation="h",
        name=label,
        marker={"color": (BUSY if side == "busy" else IDLE)[name], "line": {"width": 0}},
        hovertemplate=f"%{{y}}: {label}<br>from %{{base:.3f}} s, for %{{x:.3f}} s<extra></extra>",
    )
