"""`rlfuse simulate`: compare fusion policies on a workload."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlfuse.config.input_files import WorkloadError, publish, schema_of, unwritable
from rlfuse.files import write_atomically
from rlfuse.fusion.custom_policies import load_policy, loaded_policy
from rlfuse.fusion.decisions import Settings, traits_of
from rlfuse.fusion.policies import POLICIES
from rlfuse.simulate.runner import Result, Simulated, simulate_later_step
from rlfuse.simulate.tuning import tune
from rlfuse.simulate.workload import EXAMPLE, Workload, read_workload


def main(argv: Sequence[str]) -> None:
    """Do what the arguments say. Raises WorkloadError, and PolicyError."""
    arguments = _parser().parse_args(argv)
    if arguments.schema or arguments.example:
        data = schema_of(Workload) if arguments.schema else EXAMPLE
        then = 'name it as "$schema" in a workload' if arguments.schema else "rlfuse simulate {path}"
        publish(data, arguments.schema or arguments.example, then, WorkloadError)
        return
    if arguments.workload is None:
        raise WorkloadError("rlfuse simulate needs a WORKLOAD.json; --example shows one")
    for policy in arguments.policy or ():
        load_policy(policy, f"--policy {policy}")
    if wrong := unwritable("--out", arguments.out) + unwritable("--picture", arguments.picture):
        raise WorkloadError(*wrong)
    if arguments.threshold is not None and not 0 <= arguments.threshold <= 1:
        raise WorkloadError(f"--threshold {arguments.threshold}: needs a share of the samples, 0 to 1")
    workload = read_workload(arguments.workload)
    runs = _run(workload, arguments.policy or list(POLICIES), arguments.threshold)
    results = [run.result for run in runs]
    print(table(workload, results))
    if arguments.out is not None:
        objects = [result.as_json() for result in results]
        write_atomically(arguments.out, json.dumps(objects[0] if len(objects) == 1 else objects, indent=2) + "\n")
    if arguments.picture is not None:
        from rlfuse.observe.step_picture import draw

        draw([_timeline(run) for run in runs], arguments.picture)
        print(f"picture    {arguments.picture}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rlfuse simulate", description="What fusion policies make of a workload.")
    parser.add_argument("workload", nargs="?", type=Path, metavar="WORKLOAD.json", help="machine, costs and samples")
    names = f"{', '.join(POLICIES)} (default: these), or path/file.py:name for your own"
    parser.add_argument("--policy", nargs="+", action="extend", metavar="P", help=names)
    tuned = " and ".join(name for name, policy in POLICIES.items() if "threshold" in traits_of(policy).tuned)
    parser.add_argument("--threshold", type=float, metavar="R", help=f"of {tuned}; default: tuned by simulation")
    parser.add_argument("--out", type=Path, metavar="RESULT.json", help="one object for one policy, a list for several")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="a timeline of every slot, for each policy")
    parser.add_argument("--example", nargs="?", const="-", metavar="FILE", help="print a workload, or write it there")
    parser.add_argument("--schema", nargs="?", const="-", metavar="FILE", help="the same with the JSON schema of one")
    return parser


def _run(workload: Workload, policies: Sequence[str], threshold: float | None) -> list[Simulated]:
    results = []
    for policy in policies:
        settings = tune(workload, policy) if threshold is None else Settings(threshold=threshold)
        if (tuned := traits_of(loaded_policy(policy)).tuned) and threshold is None:
            chosen = ", ".join(f"{name} {getattr(settings, name):g}" for name in tuned)
            print(f"{policy}: {chosen} (best on other draws of the lengths)")
        results.append(simulate_later_step(workload, policy, settings))
    return results


def table(workload: Workload, results: Sequence[Result]) -> str:
    """Times of each policy, how many times as fast as serial it is, where that was run, and its time in bounds."""
    serial = next((result for result in results if result.policy == "serial"), None)
    width = max(10, *(len(result.policy) + 2 for result in results))
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


def _timeline(run: Simulated) -> Any:
    from rlfuse.observe.step_picture import Timeline

    step, result = next(span for span in run.spans if span.kind == "step"), run.result
    note = f"{result.step_s / result.oracle_s:.2f} x the bound, busy {result.busy_share:.0%}"
    return Timeline(
        f"{result.policy}   {result.step_s:.1f} s", note, run.spans, step.start, step.seconds, result.oracle_s
    )
