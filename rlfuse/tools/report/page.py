"""`rlfuse report RUN_DIR [MORE ...]`: write one or several runs as one HTML file that needs no network.

All text of a run is escaped: by jinja2 in the page, and as JSON without special characters of HTML in its data.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from rlfuse.files import write_atomically
from rlfuse.run_folder.reader import RunFolder, open_run, reading
from rlfuse.tools.report import charts, tables
from rlfuse.tools.report.gather import Gathered, gather

MAX_ALERTS = 50
MAX_COLUMN_RUNS = 3  # more runs than this are rows of the tables, not columns, except of settings


def main(argv: Sequence[str]) -> None:
    """Write the report. Raises RunError."""
    description = "Write one or several runs as one HTML page."
    parser = argparse.ArgumentParser(prog="rlfuse report", description=description)
    help_of_runs = "run folder, or a project folder with all its runs"
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help=help_of_runs)
    help_of_out = "default: report.html in the run folder, or in the common parent folder of several runs"
    parser.add_argument("--out", type=Path, metavar="HTML", help=help_of_out)
    arguments = parser.parse_args(argv)
    folders = find(arguments.runs)
    out = arguments.out or Path(os.path.commonpath([folder.path for folder in folders])) / "report.html"
    named, gathered = zip(folders, names([folder.path for folder in folders]), strict=True), []
    for folder, name in named:
        with reading(folder.path):
            gathered.append(gather(folder, name, len(folders)))
    with reading(folders[0].path):
        page = render(gathered)
    write_atomically(out, page)
    shown = "" if len(folders) == 1 else f"{len(folders)} runs, "
    print(f"report     {out}  ({shown}{len(page.encode()) / 1e6:.1f} MB)")


def find(paths: Sequence[Path]) -> list[RunFolder]:
    """Return the runs of these folders without duplicates; a project folder is replaced by all runs in it."""
    found = []
    for path in paths:
        inside = [] if (path / "config.yaml").exists() else sorted(file.parent for file in path.glob("*/config.yaml"))
        found += [each.resolve() for each in inside or [path]]
    return [open_run(path) for path in dict.fromkeys(found)]


def names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that are unique."""
    length = 1
    while len({path.parts[-length:] for path in paths}) < len(paths):
        length += 1
    return ["/".join(path.parts[-length:]) for path in paths]


def render(runs: Sequence[Gathered]) -> str:
    """Return the HTML of the page."""
    environment = Environment(
        loader=PackageLoader("rlfuse.tools.report", "."),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    colours = charts.colours(len(runs))
    panels = {"curves": charts.curves(runs), "parts": charts.parts(runs)}
    lengths, time = charts.lengths(runs, colours), charts.time(runs)
    shown = [charts.timeline(each) for run in runs for each in run.timelines]
    return environment.get_template("page.html").render(
        title=" and ".join(run.name for run in runs) if len(runs) <= MAX_COLUMN_RUNS else f"{len(runs)} runs",
        runs=runs,
        colours=colours,
        transposed=len(runs) > MAX_COLUMN_RUNS,
        plotly=Markup(get_plotlyjs()),
        style=_part("page.css"),
        script=_part("page.js"),
        panels=panels,
        lengths={number: embedded(each) for number, each in lengths.items()},
        bands=[(name, charts.pale(charts.RUNS[0], opacity)) for name, _, _, opacity in charts.BANDS],
        time={number: embedded(each) for number, each in time.items()},
        timelines=[embedded(each) for each in shown],
        time_legend=_legend(time.values()),
        timeline_legend=_legend(shown),
        differing_settings=tables.differing_settings(runs) if len(runs) > 1 else [],
        outcomes=tables.outcomes(runs),
        facts=tables.facts(runs),
        idle=tables.idle(runs),
        alerts=[(run.name, step, alert) for run in runs for step, alert in run.alerts][:MAX_ALERTS],
        configurations=[yaml.safe_dump(run.run.config, sort_keys=False) for run in runs],
        data=finite(_data(runs, colours, panels)),
    )


def _part(name: str) -> Markup:
    return Markup(Path(__file__).with_name(name).read_text())


def embedded(chart: Any) -> Markup:
    """Return a chart as JSON for a script element; nothing in it can close the element."""
    text = chart.to_json()
    for character in "<>&'":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def finite(value: Any) -> Any:
    """Return `value` with None for NaN and infinity, which JSON lacks, and floats of six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value


def _legend(drawn: Any) -> list[tuple[str, str, str]]:
    """Return (key, label, colour) of each kind of time in the charts, in the order of `COLOURS`."""
    seen = {trace.name for chart in drawn for trace in chart.data}
    return [(key, charts.WORDS[key], colour) for key, colour in charts.COLOURS.items() if key in seen]


def _data(runs: Sequence[Gathered], colours: list[str], panels: dict[str, list[charts.Panel]]) -> dict[str, Any]:
    return {
        "runs": [_scalars(run, colour, len(runs)) for run, colour in zip(runs, colours, strict=True)],
        "panels": {name: [asdict(panel) for panel in each] for name, each in panels.items()},
        "timelines": [(number, each.seconds) for number, run in enumerate(runs) for each in run.timelines],
        "samples": [row | {"run": number} for number, run in enumerate(runs) for row in run.samples],
    }


def _scalars(run: Gathered, colour: str, sharing: int) -> dict[str, Any]:
    """Return the scalars of a run. `steps`: lists of steps; `series`: metric -> (index of its list, values)."""
    steps: dict[tuple[int, ...], int] = {}
    series = {}
    for name in sorted({name for row in run.rows for name in row} - {"step", "training/global_step"}):
        at, values = charts.series(run, name, sharing)
        series[name] = (steps.setdefault(tuple(at), len(steps)), values)
    return {"name": run.name, "colour": colour, "steps": list(steps), "series": series}
