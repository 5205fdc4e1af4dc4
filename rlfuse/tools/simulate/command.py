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
    """Run `rlfuse simulate`. Raises WorkloadError and FunctionError."""
    arguments = _parser().parse_args(argv)
    if arguments.schema or arguments.example:
        data = schema_of(Workload) if arguments.schema else EXAMPLE
        then = 'set it as "$schema" of a workload' if arguments.schema else "rlfuse simulate {path}"
        publish(data, arguments.schema or arguments.example, then, WorkloadError)
        return
    if arguments.workload is None:
        raise WorkloadError("rlfuse simulate needs a WORKLOAD.json; --example shows one")
    for policy in arguments.policy or ():
        load_policy(policy, f"--policy {policy}")
    if wrong := unwritable("--out", arguments.out) + unwritable("--picture", arguments.picture):
        raise WorkloadError(*wrong)
    if arguments.threshold is not None and not 0 <= arguments.threshold <= 1:
        raise WorkloadError(f"--threshold {arguments.threshold}: must be a share of the samples, between 0 and 1")
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
    parser = argparse.ArgumentParser(
        prog="rlfuse simulate", description="Simulate fusion policies on a workload and compare them."
    )
    parser.add_argument("workload", nargs="?", type=Path, metavar="WORKLOAD.json", help="machine, costs and samples")
    names = f"{', '.join(POLICIES)} (default: these), or path/file.py:name for a custom policy"
    parser.add_argument("--policy", nargs="+", action="extend", metavar="P", help=names)
    tuned = " and ".join(name for name, policy in POLICIES.items() if "threshold" in traits_of(policy).tuned)
    parser.add_argument(
        "--threshold", type=float, metavar="R", help=f"consolidation threshold of {tuned}; default: tuned by simulation"
    )
    parser.add_argument(
        "--out", type=Path, metavar="RESULT.json", help="write results: an object for one policy, a list for several"
    )
    parser.add_argument("--picture", type=Path, metavar="PNG", help="timeline of every slot, for each policy")
    parser.add_argument(
        "--example", nargs="?", const="-", metavar="FILE", help="print an example workload, or write it to FILE"
    )
    parser.add_argument(
        "--schema",
        nargs="?",
        const="-",
        metavar="FILE",
        help="print the JSON schema of a workload, or write it to FILE",
    )
    return parser


def _run(workload: Workload, policies: Sequence[str], threshold: float | None) -> list[Simulated]:
    results = []
    for policy in policies:
        settings = tune(workload, policy) if threshold is None else Settings(threshold=threshold)
        if (tuned := traits_of(loaded_policy(policy)).tuned) and threshold is None:
            chosen = ", ".join(f"{name} {getattr(settings, name):g}" for name in tuned)
            print(f"{policy}: {chosen} (tuned on resampled lengths)")
        results.append(simulate_later_step(workload, policy, settings))
    return results


def table(workload: Workload, results: Sequence[Result]) -> str:
    """Return a table with the times of each policy, its speedup over serial, and its time over the lower bound."""
    serial = next((result for result in results if result.policy == "serial"), None)
    width = max(10, *(len(result.policy) + 2 for result in results))
    head = f"{'policy':<{width}}{'generation':>12}{'+ scoring':>12}{'step':>12}"
    speedup, ratio = "speedup vs serial", "time / lower bound"
    head += f"{speedup:>18}{ratio:>20}{'busy':>7}{'moved':>8}"
    lines = [f"{workload.samples:,} samples on {workload.slots:,} slots", head]
    for result in results:
        gain = f"{serial.step_s / result.step_s:.2f}x" if serial else "-"
        lines.append(
            f"{result.policy:<{width}}{result.generation_s:>10.2f} s{result.generation_and_scoring_s:>10.2f} s"
            f"{result.step_s:>10.2f} s{gain:>18}{result.step_s / result.oracle_s:>19.3f}x{result.busy_share:>7.0%}"
            f"{result.moved_samples:>8}"
        )
    return "\n".join([*lines, f"lower bound of any schedule: {results[0].oracle_s:.2f} s ({results[0].bound_by})"])


def _timeline(run: Simulated) -> Any:
    from rlfuse.observe.step_picture import Timeline

    step, result = next(span for span in run.spans if span.kind == "step"), run.result
    note = f"{result.step_s / result.oracle_s:.2f}x the lower bound, busy {result.busy_share:.0%}"
    return Timeline(
        f"{result.policy}   {result.step_s:.1f} s", note, run.spans, step.start, step.seconds, result.oracle_s
    )
