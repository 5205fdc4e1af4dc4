"""`rlfuse whatif`: what uneven workers cost a recorded training job, of which kind of work it is, and who it was.

Role: the command line of `rlfuse.whatif`: reads a table, prints what `slowdown` finds, writes it as JSON. Called by
`rlfuse.cli`; waits for nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from rlfuse.files import write_whole
from rlfuse.whatif.operations import Operations
from rlfuse.whatif.slowdown import ATTRIBUTED, SLOWEST, Slowdown, analyse
from rlfuse.whatif.study_trace import TraceError, operations_of, read

SHOWN = 5
"""Workers and kinds, the slowest first."""
SIZES = {"dp_size": "ranks", "pp_size": "stages"}
"""Keys of the metadata that the table tells, too."""


def main(argv: Sequence[str]) -> None:
    """Do what the arguments say. TraceError where the table or its metadata can't be read."""
    arguments = _parser().parse_args(argv)
    operations = operations_of(read(arguments.trace))
    if arguments.meta is not None:
        check_sizes(operations, arguments.meta)
    found = analyse(operations)
    console = Console(highlight=False)
    for line in told(found, operations):
        console.print(line, soft_wrap=isinstance(line, str))
    if arguments.out is not None:
        write_whole(arguments.out, json.dumps(found.as_json(), indent=2))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlfuse whatif", description="What uneven workers cost a training job, and who they are."
    )
    parser.add_argument("--trace", type=Path, required=True, help="operations, .parquet or .csv: a row each")
    parser.add_argument("--meta", type=Path, help="sizes of the job, .yaml (dp_size, pp_size, ...); else the table's")
    parser.add_argument("--out", type=Path, help="what is found, as JSON")
    return parser


def check_sizes(operations: Operations, path: Path) -> None:
    """TraceError where the metadata is of another job than the table."""
    try:
        meta = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise TraceError(f"--meta {path}: {error}") from error
    if not isinstance(meta, dict):
        raise TraceError(f"--meta {path}: needs lines like dp_size: 8")
    for key, name in SIZES.items():
        size, found = meta.get(key, getattr(operations, name)), getattr(operations, name)
        if size != found:
            raise TraceError(f"--meta {path}: {key}={size}, and the table has {found} {name}; is it of another job?")


def told(found: Slowdown, operations: Operations) -> list[str | Table]:
    """What the person reads."""
    workers = operations.stages * operations.ranks
    lines: list[str | Table] = [
        f"{operations.steps} steps on {workers} workers ({operations.stages} stages x {operations.ranks} data ranks): "
        f"{found.seconds:.2f} s a step, {found.ideal_seconds:.2f} s if all workers were alike",
        f"slowdown {found.S:.2f}: {found.waste:.0%} of the workers' time is lost to uneven work "
        f"(the replay leaves out {found.launch_delay:.1%}: so wrong it may be)",
    ]
    if found.workers is None or found.S_t is None or found.M_W is None or found.M_S is None:
        return [*lines, f"below {ATTRIBUTED:g}: nobody is to blame"]
    lines.append(
        f"of that, the slowest {SLOWEST:.0%} of the workers explain {_percent(found.M_W)}, the last stage "
        f"{_percent(found.M_S)} (parts hide behind one another: shares need not add up to 100 %)"
    )
    places = [(value, stage, rank) for stage, row in enumerate(found.workers) for rank, value in enumerate(row)]
    slowest = sorted(places, key=lambda place: -place[0])[:SHOWN]
    table = Table(box=box.SIMPLE_HEAD)
    table.title, table.title_justify = "slowdown by each alone", "left"
    for name in ("worker", "", "kind of work", ""):
        table.add_column(name, no_wrap=True)
    kinds = list(found.S_t.items())
    for number in range(min(SHOWN, max(len(slowest), len(kinds)))):
        worker = ("", "")
        if number < len(slowest):
            value, stage, rank = slowest[number]
            worker = (f"stage {stage}, data rank {rank}", f"{value:.2f}")
        kind = (kinds[number][0], f"{kinds[number][1]:.2f}") if number < len(kinds) else ("", "")
        table.add_row(*worker, *kind)
    return [*lines, table]


def _percent(share: float) -> str:
    return f"{round(100 * share)} %"  # a share of almost nothing has no sign
