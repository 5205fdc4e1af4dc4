"""`rlfuse report RUN_DIR [OTHER]`: a run, or two beside each other, as one HTML file that needs no network.

Role: gathers, has the figures drawn, fills the page. Called by `rlfuse.cli`. Invariant: whatever text a run holds
(prompts, responses, names) reaches the page escaped: by jinja2 in the page, and in the page's data as JSON without any
character that HTML knows, which the page's script shows as plain text.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from rlfuse.observe.run_folder import RunError, open_run
from rlfuse.report import figures
from rlfuse.report.gather import Gathered, gather

WINDOW, MOST_ALERTS = 5, 50
COMPARED = {
    "mean reward": "critic/score/mean",
    "response tokens": "response_length/mean",
    "cut off at the limit": "response_length/clip_ratio",
    "seconds per step": "timing_s/step",
    "tokens per second and slot": "perf/throughput",
    "slots idle within the step": "fusion/idle_share",
    "entropy": "actor/entropy",
    "policy change (ppo_kl)": "actor/ppo_kl",
    "gradient norm": "actor/grad_norm",
}


def main(argv: Sequence[str]) -> None:
    """Write the report. Raises RunError."""
    parser = argparse.ArgumentParser(prog="rlfuse report", description="A run, or two beside each other, as a page.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="one run, or two to compare")
    parser.add_argument("--out", type=Path, metavar="HTML", help="default: report.html in the (first) run folder")
    arguments = parser.parse_args(argv)
    if len(arguments.runs) > 2:
        raise RunError(f"{len(arguments.runs)} runs were given; a report shows one, or compares two")
    folders = [open_run(path) for path in arguments.runs]
    out = arguments.out or folders[0].path / "report.html"
    page = render([gather(folder) for folder in folders])
    try:
        out.write_text(page)
    except OSError as error:
        raise RunError(f"{out}: {error.strerror}; choose another --out") from error
    print(f"report     {out}  ({len(page.encode()) / 1e6:.1f} MB)")


def render(runs: Sequence[Gathered]) -> str:
    """The page of one run or two."""
    environment = Environment(
        loader=PackageLoader("rlfuse.report", "."),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    charts = {
        "curves": figures.curves(runs),
        "lengths": figures.lengths(runs),
        "idle": figures.idle(runs),
        "parts": figures.parts(runs),
        **{f"time-{number}": figures.time(run) for number, run in enumerate(runs)},
    }
    charts = {name: chart for name, chart in charts.items() if chart is not None}
    return environment.get_template("page.html").render(
        title=" and ".join(run.run.name for run in runs),
        runs=runs,
        colours=figures.RUNS,
        plotly=Markup(get_plotlyjs()),
        charts={name: embedded(chart) for name, chart in charts.items()},
        heights={name: chart.layout.height for name, chart in charts.items()},
        timelines=_timelines(runs),
        facts=_facts(runs),
        compared=_compared(runs),
        metrics=finite(_metrics(runs)),
        samples=finite([row | {"run": run.run.name} for run in runs for row in run.samples]),
        config=_config(runs),
        alerts=[(run.run.name, step, alert) for run in runs for step, alert in run.alerts][:MOST_ALERTS],
    )


def embedded(chart: Any) -> Markup:
    """A figure as JSON for a script element: nothing in it can end the element."""
    text = chart.to_json()
    for character in "<>&'":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def finite(value: Any) -> Any:
    """The same with null for NaN and infinity, which JSON does not know, and short numbers."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value


def _timelines(runs: Sequence[Gathered]) -> list[tuple[str, Markup]]:
    """(label, figure) of all steps that are shown."""
    several = len(runs) > 1
    return [
        (
            f"{run.run.name + ', ' if several else ''}step {each.step}, {each.seconds:.2f} s",
            embedded(figures.timeline(each)),
        )
        for run in runs
        for each in run.timelines
    ]


# Tables --------------------------------------------------------------------------------------------------------------


def _facts(runs: Sequence[Gathered]) -> list[tuple[str, list[str]]]:
    """(what, of each run): what the head of the page tells."""

    def told(run: Gathered) -> dict[str, str]:
        config, summary = run.run.config, run.summary
        held = (summary.get("val_before"), summary.get("val_after"))
        reward = (summary.get("reward_first"), summary.get("reward_last"))
        return {
            "folder": str(run.run.path),
            "model": str(config["model"]["path"]),
            "algorithm": config["algorithm"]["adv_estimator"],
            "fusion": f"{config['fusion']['policy']} ({summary.get('label', 'unfinished')})",
            "slots": str(run.run.slots),
            "steps": f"{len(run.steps)}" + (f" in {summary['seconds']:.0f} s" if summary else ", not finished"),
            "mean reward": _change(reward),
            "held out": _change(held),
            "versions": ", ".join(f"{name} {version}" for name, version in summary.get("versions", {}).items()),
        }

    told_of = [told(run) for run in runs]
    return [(name, [each[name] for each in told_of]) for name in told_of[0] if any(each[name] for each in told_of)]


def _change(values: tuple[float | None, float | None]) -> str:
    before, after = ("-" if value is None else f"{value:.3f}" for value in values)
    return "" if values == (None, None) else f"{before} → {after}"


def _compared(runs: Sequence[Gathered]) -> list[tuple[str, list[tuple[str, str]], str]]:
    """(what, (first, last steps) of each run, how the second's last steps differ from the first's)."""
    table = []
    for label, name in COMPARED.items():
        each = [[row[name] for row in run.steps if name in row] for run in runs]
        if not all(each):
            continue
        means = [(_mean(values[:WINDOW]), _mean(values[-WINDOW:])) for values in each]
        last = [after for _, after in means]
        ratio = f"{last[1] / last[0] - 1:+.1%}" if len(last) > 1 and min(last) > 0 else ""
        table.append((label, [(f"{before:.4g}", f"{after:.4g}") for before, after in means], ratio))
    return table


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _metrics(runs: Sequence[Gathered]) -> list[dict[str, Any]]:
    """Every scalar of each run, for the page's chart of any metric."""
    return [
        {
            "name": run.run.name,
            "series": {
                name: figures.series(run, name)
                for name in sorted({name for row in run.rows for name in row} - {"step", "training/global_step"})
            },
        }
        for run in runs
    ]


def _config(runs: Sequence[Gathered]) -> dict[str, Any]:
    """The whole configuration of each run, and where two differ."""
    flat = [_flat(run.run.config) for run in runs]
    keys = sorted(set().union(*flat))
    differing = [(key, [each.get(key) for each in flat]) for key in keys if len({str(f.get(key)) for f in flat}) > 1]
    return {"texts": [yaml.safe_dump(run.run.config, sort_keys=False) for run in runs], "differing": differing}


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name: value}
    return found
