"""Tables of the report: settings that differ, facts and results of each run, idle time of its slots."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import yaml

from rlfuse.config.job_file import settings_of
from rlfuse.fusion.selection import choice
from rlfuse.observe.idle import CAUSES
from rlfuse.run_folder.run_lock import last_log_write
from rlfuse.run_folder.status import state_now
from rlfuse.tools.report.charts import COLOURS, INK
from rlfuse.tools.report.gather import Gathered

Rows = list[tuple[str, list[str]]]  # (label, text of each run)
WINDOW, UNKNOWN = 5, "(no such key)"
COMPARED = {
    "mean reward": "critic/score/mean",
    "response tokens": "response_length/mean",
    "truncated responses": "response_length/clip_ratio",
    "seconds per step": "timing_s/step",
    "tokens per second and slot": "perf/throughput",
    "entropy": "actor/entropy",
    "KL of the update (ppo_kl)": "actor/ppo_kl",
    "gradient norm": "actor/grad_norm",
}


def outcomes(runs: Sequence[Gathered]) -> Rows:
    """Return state, duration, metrics of the first and last steps, alerts and faults of each run."""
    first, last = zip(*map(_outcome, runs), strict=True)
    return _filled(first) + compared(runs) + _filled([_idle(run) for run in runs]) + _filled(last)


def _outcome(run: Gathered) -> tuple[dict[str, str], dict[str, str]]:
    status, summary = run.status, run.summary
    seconds = status.seconds(last_log_write(run.run.path)) if status else summary.get("seconds")
    faults = summary.get("faults") or {
        name.removeprefix("fault/"): value
        for name, value in (run.rows[-1] if run.rows else {}).items()
        if name.startswith("fault/")
    }
    alerts: dict[str, list[int]] = defaultdict(list)
    for step, alert in run.alerts:
        alerts[alert.title].append(step)
    state = state_now(run.run.path, status) if status else "finished" if summary else "not finished"
    above = {
        "state": state + (f": {status.error}" if status and status.error else ""),
        "steps": str(len(run.steps)) + (f" in {duration(seconds)}, with startup and validation" if seconds else ""),
        "startup": duration(start_up) if (start_up := sum(row.get("idle/start_up", 0.0) for row in run.steps)) else "",
        "validation": _change(summary.get("val_before"), summary.get("val_after")),
    }
    return above, {
        "alerts": "; ".join(f"{title} ({_steps(steps)})" for title, steps in alerts.items()) or "none",
        "faults": ", ".join(f"{count:g} {name.replace('_', ' ')}" for name, count in faults.items() if count) or "none",
    }


def _idle(run: Gathered) -> dict[str, str]:
    shares = idle_shares(run)
    return {"idle share of slot time": f"{100 * sum(shares.values()):.1f} %" if shares else ""}


def facts(runs: Sequence[Gathered]) -> Rows:
    """Return start time, command, host, model, algorithm and versions of each run."""
    return _filled([_facts(run) for run in runs])


def _filled(columns: Sequence[dict[str, str]]) -> Rows:
    return [(name, [each[name] for each in columns]) for name in columns[0] if any(each[name] for each in columns)]


def _facts(run: Gathered) -> dict[str, str]:
    config, status, summary = run.run.config, run.status, run.summary
    label = f" ({summary['label']})" if "label" in summary else ""
    policy = config["trainer"].get("task", "rl") == "rl"
    return {
        "started": date(status.started) if status else "",
        "command": status.command if status else "",
        "commit": status.commit if status else "",
        "host": status.host if status else "",
        "sweep": status.sweep if status else "",
        "folder": str(run.run.path),
        "model": str(config["model"]["path"]),
        "algorithm": f"adv_estimator={config['algorithm']['adv_estimator']}" if policy else config["trainer"]["task"],
        "fusion": summary.get("fusion", choice(config["fusion"])) + label if policy else "",
        "slots": str(run.run.slots),
        "versions": ", ".join(f"{name} {version}" for name, version in summary.get("versions", {}).items()),
    }


def _steps(steps: Sequence[int]) -> str:
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(map(str, steps[:3])) + (", ..." if steps[3:] else "")


def _change(before: float | None, after: float | None) -> str:
    if before is None and after is None:
        return ""
    return " → ".join("-" if value is None else f"{value:.3f}" for value in (before, after))


def date(seconds: float) -> str:
    """Format epoch seconds as date and time in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def duration(seconds: float) -> str:
    """Format a duration in s, min or h."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{seconds:.0f} s" if not minutes else f"{minutes} min {rest} s" if minutes < 60 else f"{minutes / 60:.1f} h"


def compared(runs: Sequence[Gathered]) -> Rows:
    """Return means over the first and last steps of each run, with the difference from the first run in per cent."""
    table = []
    for label, name in COMPARED.items():
        means = [_means([row[name] for row in run.steps if row.get(name) is not None]) for run in runs]
        if any(means):
            cells = [" → ".join(f"{value:.4g}" for value in each) for each in means]
            more = ["", *(_than(each, means[0]) for each in means[1:])]
            table.append((label, [cell + than for cell, than in zip(cells, more, strict=True)]))
    return table


def _means(values: Sequence[float]) -> list[float]:
    """Return the means of the first and last steps, at most `WINDOW` each without overlap; a single value as it is."""
    if len(values) < 2:
        return list(values)
    window = min(WINDOW, len(values) // 2)
    return [sum(each) / window for each in (values[:window], values[-window:])]


def _than(means: Sequence[float], first: Sequence[float]) -> str:
    return f" ({means[-1] / first[-1] - 1:+.1%})" if means and first and min(means[-1], first[-1]) > 0 else ""


def idle(runs: Sequence[Gathered]) -> list[tuple[str, str, list[float]]]:
    """Return (cause, colour, per cent of slot time in each run), without startup: all causes, then largest first."""
    shares = [idle_shares(run) for run in runs]
    total = ("all causes", INK, [100 * sum(each.values()) for each in shares])
    table = [
        (words, COLOURS[f"idle/{cause}"], [100 * each.get(cause, 0.0) for each in shares])
        for cause, words in CAUSES.items()
        if any(each.get(cause) for each in shares)
    ]
    return [total, *sorted(table, key=lambda row: -max(row[2]))] if table else []


def idle_shares(run: Gathered) -> dict[str, float]:
    """Return idle cause -> share of slot time, without startup."""
    totals: dict[str, float] = defaultdict(float)
    for row in run.steps:
        for name in COLOURS.keys() & row.keys() - {"idle/start_up"}:
            totals[name] += row[name]
    whole = sum(totals.values())
    return {name: totals[f"idle/{name}"] / whole for name in CAUSES if totals[f"idle/{name}"]} if whole else {}


def differing_settings(runs: Sequence[Gathered]) -> Rows:
    """Return the settings that differ, those that all runs have first; `trainer.experiment_name` is left out."""
    flat = [_settings(run) for run in runs]
    keys = sorted(
        set().union(*flat) - {"trainer.experiment_name"}, key=lambda key: (any(key not in e for e in flat), key)
    )
    rows = [(key, [each.get(key, UNKNOWN) for each in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _settings(run: Gathered) -> dict[str, str]:
    """Return key -> value, followed by later values if a resume changed it."""
    phases = run.run.phases(max((int(row["step"]) for row in run.rows), default=0))
    shown: dict[str, str] = {}
    before: dict[str, str] = {}
    for start, config in phases:
        now = {key: _value(value) for key, value in settings_of(config)}
        for key, value in now.items():
            if key not in shown:
                shown[key] = value
            elif value != before.get(key):
                shown[key] += f", from step {start} on {value}"
        before = now
    return shown


def _value(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).strip().removesuffix("...").strip()
