"""Charts of the report: panels of metrics, and plotly charts of lengths, time and steps."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from rlfuse.observe.idle import CAUSES, WORK_LABELS
from rlfuse.observe.offline_metrics import LOSSES, SCORES
from rlfuse.tools.report.gather import QUANTILES, Gathered, Timeline

POINTS, LEAST_POINTS = 400, 80
RUNS = ("#1d5c9e", "#c2385a", "#3f9e6e", "#d98c1f", "#8467b5", "#4fb3bf", "#7a6a5d", "#b0409c", "#8a9a2b", "#2b2b2b")
DASHES = ("", "2,3", "8,4", "9,3,2,3")  # as in SVG: pixels drawn, pixels skipped
INK, GRID = "#2b2b2b", "#e6e3de"
COLOURS = {
    "busy/generate": "#3f7fbf",
    "busy/encode": "#4fb3bf",
    "busy/old_log_prob": "#f0a830",
    "busy/ref": "#d98c1f",
    "busy/values": "#b8731a",
    "busy/train": "#3f9e6e",
    "busy/optimizer": "#1e5c3c",
    "busy/update_weights": "#8467b5",
    "busy/testing": "#7a6a5d",
    "busy/save_checkpoint": "#4a4038",
    "busy/reward": "#c2385a",
    "idle/tail": "#e3b7c1",
    "idle/imbalance": "#ecd0a5",
    "idle/drained": "#c9c2b6",
    "idle/reward": "#d9a7d0",
    "idle/bubble": "#bfd9c5",
    "idle/weights": "#cfc4e6",
    "idle/switch": "#c9c3bb",
    "idle/calls": "#c5d5e6",
    "idle/data": "#e2dfa9",
    "idle/controller": "#d6d6d6",
    "idle/start_up": "#efece8",
}
"""Colour of each kind of work and idle cause, in stacking order."""
WORDS = {f"busy/{name}": word for name, word in WORK_LABELS.items()} | {
    f"idle/{name}": word for name, word in CAUSES.items()
}
CURVES = (
    ("mean reward", ("critic/score/mean",)),
    ("validation", ("val-core/",)),
    ("response length, tokens", ("response_length/mean", "response_length/max")),
    ("share of responses truncated at the length limit", ("response_length/clip_ratio",)),
    ("reverse KL to the teacher, nats per token", ("actor/teacher_kl",)),
    ("KL to the reference, nats", ("actor/reward_kl_penalty", "actor/kl_loss")),
    ("KL to the policy before the update (ppo_kl), nats", ("actor/ppo_kl",)),
    ("entropy, nats per token", ("actor/entropy", "response/entropy")),
    ("policy loss", ("actor/pg_loss",)),
    ("value loss", ("critic/vf_loss",)),
    ("loss", LOSSES),
    ("accuracy", SCORES),
    ("gradient norm", ("actor/grad_norm", "critic/grad_norm", "reward_model/grad_norm")),
    ("share of tokens with a clipped ratio (pg_clipfrac)", ("actor/pg_clipfrac",)),
    ("share of groups with equal rewards", ("reward/frac_reward_zero_std",)),
    ("seconds per step", ("timing_s/step",)),
    ("tokens per second and slot", ("perf/throughput",)),
    ("share of slot time that was idle, within the step", ("fusion/idle_share",)),
    ("custom metrics", ("custom/",)),
    ("custom metrics, validation", ("val-custom/",)),
)
"""(title, metrics) of each panel. A name that ends in / selects all metrics with this prefix, one panel each."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Chart of some metrics over the steps."""

    title: str
    lines: tuple[tuple[str, str], ...]  # (metric, dash)


def colours(count: int) -> list[str]:
    """Return a colour for each run: those of `RUNS`, then generated hues."""
    more = (colorsys.hls_to_rgb(0.618 * number % 1, 0.42, 0.5) for number in range(count - len(RUNS)))
    return [*RUNS[:count], *("#" + "".join(f"{round(255 * part):02x}" for part in each) for each in more)]


def thin(steps: Sequence[float], values: Sequence[float], points: int = POINTS) -> tuple[list[int], list[float]]:
    """Return at most `points` points: means over neighbouring steps, at the last step of each."""
    if len(steps) <= points:
        return [int(step) for step in steps], list(values)
    edges = np.linspace(0, len(steps), points, endpoint=False).astype(int)
    counts = np.diff(edges, append=len(steps))
    means = np.add.reduceat(np.asarray(values, dtype=float), edges) / counts
    return [int(steps[last]) for last in edges + counts - 1], means.tolist()


def series(run: Gathered, name: str, sharing: int = 1) -> tuple[list[int], list[float]]:
    """Return the steps and values of a metric, thinned more if more runs share the page (`sharing`)."""
    points = [(row["step"], row[name]) for row in run.rows if row.get(name) is not None]
    return thin(*zip(*points, strict=True), max(LEAST_POINTS, POINTS * 4 // (3 + sharing))) if points else ([], [])


def curves(runs: Sequence[Gathered]) -> list[Panel]:
    """Return the panels of `CURVES` for which some run has values."""
    names = sorted({name for run in runs for row in run.rows for name in row})
    panels = []
    for title, wanted in CURVES:
        if wanted[0].endswith("/"):
            panels += [Panel(title, ((name, ""),)) for name in names if name.startswith(wanted[0])]
        elif lines := tuple((name, dash) for name, dash in zip(wanted, DASHES, strict=False) if name in names):
            panels.append(Panel(title, lines))
    return panels


def parts(runs: Sequence[Gathered]) -> list[Panel]:
    """Return panels of the mean of each reward part, and of the number of samples that each function failed on."""
    names = sorted({name for run in runs for row in run.rows for name in row})
    means = [name for name in names if name.startswith("rewards/") and name.endswith("/mean")]
    failures = [name for name in names if name.startswith("reward/failures/")]
    return [Panel(name.split("/", 1)[1].removesuffix("/mean"), ((name, ""),)) for name in means] + [
        Panel(f"failures of {name.split('/', 2)[2]}, samples", ((name, ""),)) for name in failures
    ]


def lengths(runs: Sequence[Gathered], colour_of: Sequence[str]) -> dict[int, go.Figure]:
    """Return run number -> response tokens per step: the median, and bands of all, 90 % and 50 % of the samples."""
    shown = {number: run for number, run in enumerate(runs) if run.lengths}
    top = max((levels[-1] for run in shown.values() for levels in run.lengths.values()), default=0)
    figures = {number: _bands(run, colour_of[number]) for number, run in shown.items()}
    return _equal(figures, runs, "response tokens", 1.05 * top)


def _bands(run: Gathered, colour: str) -> go.Figure:
    figure, table = go.Figure(), np.array([run.lengths[step] for step in run.lengths])
    levels = [thin(list(run.lengths), table[:, place]) for place in range(len(QUANTILES))]
    for name, low, high, opacity in BANDS:
        for place, fill in ((low, None), (high, "tonexty")):
            figure.add_scatter(
                x=levels[place][0],
                y=levels[place][1],
                mode="lines",
                line={"width": 0},
                fill=fill,
                fillcolor=pale(colour, opacity),
                hovertemplate=f"{name}: %{{y:.0f}}<extra></extra>",
            )
    line = {"color": colour, "width": 2}
    hover = "median: %{y:.0f}<extra></extra>"
    figure.add_scatter(
        x=levels[3][0], y=levels[3][1], mode="lines+markers", marker_size=4, line=line, hovertemplate=hover
    )
    return styled(figure, 260, hovermode="x unified")


BANDS = (("all responses", 0, 6, 0.12), ("90 % of the responses", 1, 5, 0.2), ("50 % of the responses", 2, 4, 0.35))
"""(name, lower and upper index into `QUANTILES`, opacity)."""


def time(runs: Sequence[Gathered]) -> dict[int, go.Figure]:
    """Return run number -> mean seconds per slot in each step by work and idle cause, without startup.

    All charts share one axis. The few steps that exceed it are marked, and hovering shows their total.
    """
    stacks = {number: stack for number, run in enumerate(runs) if (stack := _stack(run))}
    totals = {number: np.sum([values for _, values in stack.values()], axis=0) for number, stack in stacks.items()}
    every = np.concatenate([*totals.values(), [0.0]])
    top = 1.08 * min(every.max(), OUTLYING * float(np.quantile(every, 0.9)))
    figures = {}
    for number, stack in stacks.items():
        figure = go.Figure()
        for what, (steps, values) in stack.items():
            hover = f"{WORDS[what]}<br>step %{{x:.0f}}: %{{y:.3f}} s<extra></extra>"
            marker = {"color": COLOURS[what], "line": {"width": 0}}
            figure.add_bar(x=steps, y=values, name=what, marker=marker, hovertemplate=hover)
        beyond = [(step, total) for step, total in zip(steps, totals[number], strict=True) if total > top]
        for step, total in beyond:
            hover = {"hovertext": f"step {step}: {total:.3f} s", "captureevents": True}
            figure.add_annotation(x=step, y=1, yref="paper", yanchor="top", text="▲", showarrow=False, **hover)
        figures[number] = styled(figure, 300, barmode="stack", bargap=0.08 if len(runs[number].steps) < 100 else 0.0)
    return _equal(figures, runs, "seconds per slot", top)


OUTLYING = 3.0  # upper end of the time axis, in 90th percentiles of the step time


def _stack(run: Gathered) -> dict[str, tuple[list[int], list[float]]]:
    steps = [row["step"] for row in run.steps]
    found = {what: [row.get(what, 0.0) for row in run.steps] for what in COLOURS if what != "idle/start_up"}
    return {what: thin(steps, values) for what, values in found.items() if any(values)}


def _equal(figures: dict[int, go.Figure], runs: Sequence[Gathered], title: str, top: float) -> dict[int, go.Figure]:
    last = max((row["step"] for run in runs for row in run.rows), default=0)
    for figure in figures.values():
        figure.update_xaxes(title_text="step", range=[0.4, last + 0.6])
        figure.update_yaxes(title_text=title, range=[0, top])
    return figures


def timeline(shown: Timeline) -> go.Figure:
    """Return the chart of a step: samples in flight above, a row for each slot below."""
    labels = [label for label, _ in shown.rows]
    height = 24 * len(labels)
    figure = make_subplots(2, 1, shared_xaxes=True, row_heights=[90, height], vertical_spacing=24 / (114 + height))
    times, counts = zip(*shown.in_flight, strict=True)
    figure.add_scatter(
        x=times,
        y=counts,
        name="busy/generate",
        line={"shape": "hv", "color": COLOURS["busy/generate"], "width": 1.2},
        fill="tozeroy",
        fillcolor=pale(COLOURS["busy/generate"], 0.25),
        hovertemplate="%{x:.3f} s: %{y} samples being generated<extra></extra>",
        row=1,
        col=1,
    )
    for what in COLOURS:
        bars = [(label, start, seconds) for label, each in shown.rows for name, start, seconds in each if name == what]
        if bars:
            figure.add_trace(_bar(what, bars), row=2, col=1)
    rows = {"categoryorder": "array", "categoryarray": labels[::-1], "fixedrange": True, "showgrid": False}
    figure = styled(figure, 90 + 24 + height + 60, barmode="overlay", bargap=0.12, hovermode="closest")
    figure.update_yaxes(row=2, col=1, **rows)
    figure.update_yaxes(title_text="samples", rangemode="tozero", row=1, col=1, fixedrange=True)
    figure.update_xaxes(title_text="seconds", row=2, col=1)
    return figure


def _bar(what: str, bars: Iterable[tuple[str, float, float]]) -> go.Bar:
    labels, starts, seconds = (list(each) for each in zip(*bars, strict=True))
    return go.Bar(
        y=labels,
        x=[round(each, 5) for each in seconds],
        base=[round(each, 5) for each in starts],
        orientation="h",
        name=what,
        marker={"color": COLOURS[what], "line": {"width": 0}},
        hovertemplate=f"%{{y}}: {WORDS[what]}<br>from %{{base:.3f}} s, for %{{x:.3f}} s<extra></extra>",
    )


def styled(figure: go.Figure, height: int, **layout: object) -> go.Figure:
    """Return `figure` with the style of all charts; its legend is part of the page."""
    figure.update_layout(
        template="none",
        height=height,
        showlegend=False,
        margin={"l": 60, "r": 14, "t": 12, "b": 44},
        font={"family": "system-ui, sans-serif", "size": 12, "color": INK},
        hoverlabel={"font": {"family": "ui-monospace, monospace", "size": 12}, "align": "left"},
        **layout,
    )
    figure.update_xaxes(gridcolor=GRID, zeroline=False)
    figure.update_yaxes(gridcolor=GRID, zeroline=False)
    return figure


def pale(colour: str, opacity: float) -> str:
    """Return `colour` with this opacity, for a filled area."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
