"""`rlfuse simulate`: compare fusion policies on a workload, or on the steps that a run recorded."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from rlfuse.config.input_files import WorkloadError, publish, schema_of, unwritable
from rlfuse.costs.fit import Fit
from rlfuse.costs.model import Costs
from rlfuse.costs.rates import SLOW
from rlfuse.files import write_whole
from rlfuse.fusion.decisions import Settings, traits_of
from rlfuse.fusion.own_policies import load_policy, loaded_policy
from rlfuse.fusion.policies import POLICIES
from rlfuse.simulate.runner import Result, Simulated, later_step
from rlfuse.simulate.tuning import tune
from rlfuse.simulate.workload import EXAMPLE, Workload, read_workload
from rlfuse.tools.run_code import add_option, policy_code, refuse_code
from rlfuse.tools.simulate.recorded import Recording, Step, read_run

REPLAYED = 8  # steps of a run that are replayed: the last ones, as the first are warming up


def main(argv: Sequence[str]) -> None:
    """Do what the arguments say. Raises WorkloadError, and PolicyError."""
    arguments = _parser().parse_args(argv)
    if arguments.schema or arguments.example:
        data = schema_of(Workload) if arguments.schema else EXAMPLE
        then = 'name it as "$schema" in a workload' if arguments.schema else "rlfuse simulate {path}"
        publish(data, arguments.schema or arguments.example, then, WorkloadError)
        return
    if (arguments.workload is None) == (arguments.run is None):
        raise WorkloadError("rlfuse simulate needs a WORKLOAD.json or --from RUN_DIR, one of them; --example shows one")
    for policy in arguments.policy or ():
        load_policy(policy, f"--policy {policy}")
    if wrong := unwritable("--out", arguments.out) + unwritable("--picture", arguments.picture):
        raise WorkloadError(*wrong)
    if arguments.threshold is not None and not 0 <= arguments.threshold <= 1:
        raise WorkloadError(f"--threshold {arguments.threshold}: needs a share of the samples, 0 to 1")
    if arguments.run is not None:
        _replay(arguments)
    else:
        _compare(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rlfuse simulate", description="What fusion policies make of a workload.")
    parser.add_argument("workload", nargs="?", type=Path, metavar="WORKLOAD.json", help="machine, costs and samples")
    parser.add_argument("--from", dest="run", type=Path, metavar="RUN_DIR", help="replay the steps of a recorded run")
    add_option(parser)
    names = f"{', '.join(POLICIES)} (default: these), or path/file.py:name for your own"
    parser.add_argument("--policy", nargs="+", action="extend", metavar="P", help=names)
    tuned = " and ".join(name for name, policy in POLICIES.items() if "threshold" in traits_of(policy).tuned)
    parser.add_argument("--threshold", type=float, metavar="R", help=f"of {tuned}; default: tuned by simulation")
    parser.add_argument("--out", type=Path, metavar="RESULT.json", help="one object for one policy, a list for several")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="a timeline of every slot, for each policy")
    parser.add_argument("--example", nargs="?", const="-", metavar="FILE", help="print a workload, or write it there")
    parser.add_argument("--schema", nargs="?", const="-", metavar="FILE", help="the same with the JSON schema of one")
    return parser


def _run(
    workload: Workload, policies: Sequence[str], threshold: float | None, by_rates: bool = True
) -> list[Simulated]:
    results = []
    for policy in policies:
        settings = tune(workload, policy) if threshold is None else Settings(threshold=threshold)
        if (tuned := traits_of(loaded_policy(policy)).tuned) and threshold is None:
            chosen = ", ".join(f"{name} {getattr(settings, name):g}" for name in tuned)
            print(f"{policy}: {chosen} (best on other draws of the lengths)")
        results.append(later_step(workload, policy, settings, by_rates))
    return results


def _write(path: Path | None, objects: list[dict[str, Any]]) -> None:
    if path is not None:
        write_whole(path, json.dumps(objects[0] if len(objects) == 1 else objects, indent=2) + "\n")


def _compare(arguments: argparse.Namespace) -> None:
    workload = read_workload(arguments.workload)
    runs = _run(workload, arguments.policy or list(POLICIES), arguments.threshold)
    results = [run.result for run in runs]
    print(table(workload, results))
    _write(arguments.out, [result.as_json() for result in results])
    if arguments.picture is not None:
        _draw(arguments.picture, [_timeline(run) for run in runs])


def table(workload: Workload, results: Sequence[Result]) -> str:
    """Times of each policy, how many times as fast as serial it is, where that was run, and its time in bounds."""
    serial = next((result for result in results if result.policy == "serial"), None)
    width = _width(result.policy for result in results)
    head = f"{'policy':<{width}}{'generation':>12}{'+ scoring':>12}{'step':>12}"
    speed, time = "x serial's speed", "x the bound's time"
    head += f"{speed:>18}{time:>20}{'busy':>7}{'moved':>8}"
    lines = [f"{workload.samples:,} samples on {workload.slots:,} slots", head]
    for result in results:
        gain = f"{serial.step_s / result.step_s:.2f}x" if serial else "-"
        lines.append(
            f"{result.policy:<{width}}{result.generation_s:>10.2f} s{result.generation_and_scoring_s:>10.2f} s"
            f"{result.step_s:>10.2f} s{gain:>18}{result.step_s / result.oracle_s:>19.3f}x{result.busy_share:>7.0%}"
            f"{result.moved_samples:>8}"
        )
    return "\n".join([*lines, f"no schedule takes less than {results[0].oracle_s:.2f} s: {results[0].bound_by}"])


def _width(policies: Iterable[str]) -> int:
    return max(10, *(len(policy) + 2 for policy in policies))


def _timeline(run: Simulated) -> Any:
    from rlfuse.observe.step_picture import Timeline

    step, result = next(span for span in run.spans if span.kind == "step"), run.result
    note = f"{result.step_s / result.oracle_s:.2f} x the bound, busy {result.busy_share:.0%}"
    return Timeline(
        f"{result.policy}   {result.step_s:.1f} s", note, run.spans, step.start, step.seconds, result.oracle_s
    )


def _draw(path: Path, timelines: Sequence[Any]) -> None:
    from rlfuse.observe.step_picture import draw

    draw(timelines, path)
    print(f"picture    {path}")


def _replay(arguments: argparse.Namespace) -> None:
    recording = read_run(arguments.run)
    steps = recording.steps[-REPLAYED:]
    print(accuracy_table(recording.fit))
    for line in slow_slots(recording.rates):
        print(line)
    policies = arguments.policy or [recording.policy]
    if not arguments.policy:
        refuse_code(arguments.run / "config.yaml", policy_code(recording.policy), arguments.run_code)
    rows = []
    for step in steps:
        for run in _run(step.workload, policies, arguments.threshold, recording.by_rates):
            same = run.result.policy == recording.policy
            rows.append(
                {"step": step.number, "measured_s": round(step.seconds, 6) if same else None} | run.result.as_json()
            )
    print("\n" + replay_table(recording, rows))
    _write(arguments.out, rows)
    if arguments.picture is not None:
        _draw(arguments.picture, _replay_timelines(recording, steps[-1], policies, arguments.threshold))


def slow_slots(rates: Sequence[float]) -> list[str]:
    """A line for each slot that is not typical; the others are what the costs are of."""
    unlike = [(slot, rate) for slot, rate in enumerate(rates) if max(rate, 1 / rate) >= SLOW]
    return [
        f"  slot {slot} takes {rate:.2f} times as long as a typical slot; simulated at its own speed"
        for slot, rate in unlike
    ]


def accuracy_table(fitted: Fit) -> str:
    """Each fitted cost, and how far it is from what was measured."""
    lines = ["costs fitted to the run's events, and their error"]
    for kind, accuracy in fitted.accuracy.items():
        lines.append(
            f"  {kind:<10}{accuracy.spans:>6} spans{accuracy.seconds:>10.2f} s   all of them {accuracy.total:+.1%}, "
            f"a typical one {accuracy.typical:.1%}"
        )
    costs = [f"{entry.name} {getattr(fitted.costs, entry.name):.4g}" for entry in fields(Costs)]
    return "\n".join([*lines, *(f"  {', '.join(costs[i : i + 4])}" for i in range(0, len(costs), 4))])


def replay_table(recording: Recording, rows: Sequence[dict[str, Any]]) -> str:
    """Simulated against measured, step by step, and over all of them."""
    width = _width(row["policy"] for row in rows)
    lines = [f"{'step':>5}  {'policy':<{width}}{'measured':>12}{'simulated':>12}{'error':>9}{'bound':>12}"]
    for row in rows:
        measured, simulated = row["measured_s"], row["step_s"]
        seen = f"{measured:>10.3f} s" if measured else f"{'-':>12}"
        error = f"{simulated / measured - 1:>+9.1%}" if measured else f"{'-':>9}"
        lines.append(
            f"{row['step']:>5}  {row['policy']:<{width}}{seen}{simulated:>10.3f} s{error}{row['oracle_s']:>10.3f} s"
        )
    pairs = [(row["measured_s"], row["step_s"]) for row in rows if row["measured_s"]]
    if pairs:
        measured, simulated = np.array(pairs).T
        lines.append(
            f"{recording.policy}: measured {measured.sum():.2f} s, simulated {simulated.sum():.2f} s "
            f"({simulated.sum() / measured.sum() - 1:+.1%}) over {len(pairs)} steps; a typical step is "
            f"{float(np.median(np.abs(simulated / measured - 1))):.1%} off"
        )
    return "\n".join(lines)


def _replay_timelines(recording: Recording, step: Step, policies: Sequence[str], threshold: float | None) -> list[Any]:
    from rlfuse.observe.step_picture import Timeline

    title = f"{recording.policy}, measured   {step.seconds:.2f} s"
    measured = Timeline(title, f"step {step.number}", step.spans, step.start, step.seconds)
    return [measured, *(_timeline(run) for run in _run(step.workload, policies, threshold, recording.by_rates))]
