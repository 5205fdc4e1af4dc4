"""`rlfuse calibrate`: measure a device from recorded runs or with a probe, and write `calibration.yaml`."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from rlfuse import version_of
from rlfuse.config.input_files import unwritable
from rlfuse.config.schema import Config
from rlfuse.costs.spans import lengths_of
from rlfuse.engines.memory.model_sizes import Shape, shapes_of
from rlfuse.events import read_events
from rlfuse.progress import Console
from rlfuse.tools.planning.calibration import UNMEASURED_RATE, fit_hardware, held_out, mean_errors
from rlfuse.tools.planning.features import Work, work_of_run
from rlfuse.tools.planning.hardware import (
    KINDS,
    Calibration,
    CalibrationError,
    Hardware,
    Source,
    rounded_coefficients,
    write,
)
from rlfuse.tools.planning.node_order import MeasuredLinks, Pair, write_links
from rlfuse.tools.planning.tables import table_of
from rlfuse.tools.run_code import add_option, refuse_code
from rlfuse.tools.simulate.recorded import read_generating_config

OUT, LINKS_OUT = Path("calibration.yaml"), Path("links.yaml")
LINKS = "links between nodes"
EXCHANGES = (
    "bandwidth within a node: communication time is included in optimizer step times; add a run with one slot to "
    "separate them"
)
NO_EXCHANGES = "bandwidth within a node: no two ranks on the same node communicated"
GATHERS = "fixed cost of gathering a module's sharded weights; add a run with sharded weights (ZeRO 3)"
ONE_MODEL = (
    "other model sizes: runs of a single model cannot separate reading weights from the fixed cost of a decoding step"
)
UNSEEN_RATE = "{}: too fast to measure with this workload and assumed to be free; also measure a larger model"
CROWDING = (
    "contention between devices of a node: all runs used the same number of devices per node; add a run with fewer "
    "(trainer.n_gpus_per_node)"
)
NO_CONTENTION = "contention between devices of a node: only one device was busy, so plans assume no contention"
NO_SCORING = "scoring: the runs have no scoring passes, so they are assumed to run at the training rate"
NO_RUN = "engine scheduling, data loading, rewards and weight updates: the probe decodes with transformers"


def main(argv: Sequence[str]) -> None:
    """Run `rlfuse calibrate`. Raises CalibrationError, and ClusterError or EngineError for --links."""
    arguments = _parser().parse_args(argv)
    arguments.out = arguments.out or (LINKS_OUT if arguments.links else OUT)
    console = Console(highlight=False)
    _check(arguments)
    if arguments.links:
        _measure_links(arguments, console)
        return
    if arguments.probe:
        works, sources, missing, speeds = _probed(arguments.model, console)
    else:
        works, sources, missing, speeds = _recorded(arguments.runs, arguments.model, arguments.run_code)
    hardware = fit_hardware(works)
    found, words = held_out(works)
    calibration = Calibration(
        measured="probe" if arguments.probe else "runs",
        device=arguments.device or _device(),
        count=max(source.slots for source in sources),
        rlfuse=version_of("rlfuse") or "unknown",
        hardware=rounded_coefficients(replace(hardware, host_bytes_per_s=speeds.pop("host_bytes_per_s", inf))),
        errors=mean_errors(found),
        held_out=words,
        fitted_on=tuple(sources),
        not_measured=(*missing, *_unseen(hardware), *_between_ranks(works, hardware)),
        **speeds,
    )
    write(calibration, arguments.out)
    console.print(_table(calibration))
    for line in calibration.not_measured:
        console.print(f"  not measured: {escape(line)}", soft_wrap=True)
    console.print(f"wrote {escape(str(arguments.out))}", soft_wrap=True)
    if arguments.picture is not None:
        from rlfuse.tools.planning.plots import draw_calibration

        draw_calibration(found, f"{calibration.device}: {words}", arguments.picture)
        console.print(f"picture: {escape(str(arguments.picture))}", soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlfuse calibrate",
        description="Measure this device from the events of recorded runs, or with a probe that takes half a minute.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs",
        nargs="*",
        type=Path,
        metavar="RUN_DIR",
        help="folders of runs with at least two steps, all on one kind of device",
    )
    add_option(parser)
    parser.add_argument(
        "--probe", action="store_true", help="measure this machine instead of reading runs: passes, decoding, copies"
    )
    parser.add_argument(
        "--links", action="store_true", help="measure bandwidth between the nodes of a Ray cluster: writes links.yaml"
    )
    parser.add_argument(
        "--address", default="auto", metavar="HOST:PORT", help="address of the Ray cluster; default: auto"
    )
    parser.add_argument(
        "--model", metavar="FOLDER", help="folder with config.json; default: the model of each run, or small models"
    )
    parser.add_argument("--device", metavar="NAME", help="name of the device; default: as detected")
    parser.add_argument("--out", type=Path, metavar="FILE", help="output file; default: calibration.yaml or links.yaml")
    parser.add_argument("--picture", type=Path, metavar="out.png", help="plot of measured and predicted seconds")
    return parser


def _check(arguments: argparse.Namespace) -> None:
    wrong = []
    if [arguments.probe, bool(arguments.runs), arguments.links].count(True) != 1:
        wrong.append("rlfuse calibrate needs exactly one of RUN_DIR, --probe and --links")
    if arguments.links and arguments.picture is not None:
        wrong.append("--picture: plots device measurements; --links makes none, drop --picture")
    if len(set(map(Path.resolve, arguments.runs))) < len(arguments.runs):
        wrong.append("RUN_DIR: the same run is given twice; give each run once")
    wrong += unwritable("--out", arguments.out) + unwritable("--picture", arguments.picture, ".png")
    if wrong:
        raise CalibrationError(*wrong)


def _measure_links(arguments: argparse.Namespace, console: Console) -> None:
    from rlfuse.cluster import joining, nodes, placement
    from rlfuse.tools.planning import link_probe  # imports ray

    joining.join_ray(arguments.address)
    try:
        found = nodes.answering_nodes()
        if len(found) < 2:
            raise CalibrationError(f"--links: {len(found)} node responded, at least two are needed; start more nodes")
        device, _ = nodes.device_of("auto", found)
        measured = link_probe.measure(found, device, lambda line: console.print(line, soft_wrap=True))
    finally:
        placement.stop()
    share_address = len({node.address for node in found}) < len(found)
    names = [node.id[: nodes.MIN_ID_PREFIX] if share_address else node.address for node in found]
    pairs = [
        Pair(names[a], names[b], float(f"{rate / 1e9:.4g}"), round(wait * 1e6, 1))
        for (a, b), (wait, rate) in sorted(measured.items())
    ]
    write_links(MeasuredLinks("nccl" if device == "cuda" else "gloo", tuple(names), tuple(pairs)), arguments.out)
    slowest, fastest = (pick(pairs, key=lambda pair: pair.gbs) for pick in (min, max))
    for words, pair in (("fastest", fastest), ("slowest", slowest)):
        console.print(f"{words}: {pair.first} and {pair.second}, {pair.gbs:g} GB/s, {pair.us:g} us", soft_wrap=True)
    console.print(f"wrote {escape(str(arguments.out))}; use it in a cluster file as `links: {{measured: FILE}}`")


Measured = tuple[list[Work], list[Source], list[str], dict[str, float]]
"""Measured work, its sources, what was not measured, and the device speeds measured directly."""


def _recorded(folders: Sequence[Path], model: str | None, run_code: bool) -> Measured:
    works, sources, missing = [], [], [LINKS]
    for folder in folders:
        name = str(folder) if len({each.name for each in folders}) < len(folders) else folder.absolute().name
        found, source = read_work(folder, name, model, run_code)
        works += found
        sources.append(source)
    if len({(source.parameters, source.layers) for source in sources}) == 1:
        missing.append(ONE_MODEL)
    if len({work.busy_peers for work in works}) == 1:
        missing.append(CROWDING)
    if not any(work.kind == "scoring" for work in works):
        missing.append(NO_SCORING)
    return works, sources, missing, {}


def read_work(folder: Path, name: str, model: str | None = None, run_code: bool = False) -> tuple[list[Work], Source]:
    """Return the work of one run and its description. Raises CalibrationError if the run is not usable."""
    config = read_generating_config(folder)
    if model is None and config.model.trust_remote_code:
        setting = f"model.trust_remote_code=true for model.path={config.model.path}"
        refuse_code(folder / "config.yaml", [setting], run_code)
    config.model.trust_remote_code &= run_code
    if (stages := config.training.pipeline_parallel_size) > 1:
        raise CalibrationError(
            f"{folder}: pipeline-parallel run (training.pipeline_parallel_size={stages}), whose spans show no complete "
            "pass; use a run with training.pipeline_parallel_size=1"
        )
    if model is not None:
        config.model.path = model
        config.critic.path = config.ref.path = None
    shapes, spans = shapes_of(config), read_events(folder / "events.jsonl")
    works = work_of_run(name, config, shapes, spans)
    if not works:
        raise CalibrationError(
            f"{folder / 'events.jsonl'}: no complete step after the first; use a run with three or more steps"
        )
    return works, _source(name, config, shapes["actor"], works, list(lengths_of(spans).values()))


def _source(
    name: str, config: Config, shape: Shape, works: Sequence[Work], lengths: Sequence[tuple[int, int]]
) -> Source:
    prompts, responses = zip(*lengths, strict=True) if lengths else ((0,), (0,))
    return Source(
        name=name,
        parameters=shape.parameters,
        layers=len(shape.layers),
        hidden=shape.hidden,
        prompt_tokens=round(sum(prompts) / len(prompts), 1),
        response_tokens=round(sum(responses) / len(responses), 1),
        longest=max(map(sum, lengths), default=0),
        slots=config.slots,
        **{kind: sum(work.kind == kind for work in works) for kind in KINDS},
    )


def _probed(model: str | None, console: Console) -> Measured:
    from rlfuse.tools.planning.probe import CONTEXTS, STEPS, Probe  # imports torch

    if model is not None and not (Path(model) / "config.json").is_file():
        raise CalibrationError(f"--model {model}: no config.json in this folder; give the folder of a model")
    probe = Probe(lambda line: console.print(escape(line), soft_wrap=True))
    probe.measure(model)
    sources = [
        Source(name, shape.parameters, len(shape.layers), shape.hidden, 0, 0, max(*probe.tokens, *CONTEXTS) + STEPS, 1)
        for name, shape in probe.shapes.items()
    ]
    speeds = {"product_flops": probe.product_flops, "copy_bytes_per_s": probe.copy_bytes_per_s}
    if probe.host_bytes_per_s is not None:
        speeds["host_bytes_per_s"] = probe.host_bytes_per_s
    return probe.works, sources, [LINKS, NO_RUN, NO_CONTENTION], speeds


def _unseen(hardware: Hardware) -> list[str]:
    names = {"bytes_per_s": "memory bandwidth", "pass_flops": "FLOP/s of scoring", "train_flops": "FLOP/s of training"}
    return [UNSEEN_RATE.format(words) for name, words in names.items() if getattr(hardware, name) == UNMEASURED_RATE]


def _between_ranks(works: Sequence[Work], hardware: Hardware) -> Iterator[str]:
    if hardware.sent_bytes_per_s is None:
        yield EXCHANGES if any(work.sent for work in works) else NO_EXCHANGES
    if not any(work.gathers for work in works):
        yield GATHERS


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(named, platform.machine())}, one core"


def _table(calibration: Calibration) -> Table:
    title = escape(f"{calibration.device}: {calibration.held_out}")
    table = table_of(title, "kind of work", numbers=("mean error",))
    for kind in KINDS:
        error = getattr(calibration.errors, kind)
        table.add_row(kind, "not measured" if error is None else f"{error:.1%}")
    table.add_section()
    hardware = calibration.hardware
    for words, rate in (("scoring and prefill", hardware.pass_flops), ("training", hardware.train_flops)):
        table.add_row(words, f"{rate / 1e9:,.1f} GFLOP/s")
    when, read = "overlapping" if hardware.decode_overlaps else "after", hardware.bytes_per_s / 1e9
    table.add_row("decoding", f"{hardware.decode_flops / 1e9:,.1f} GFLOP/s, {when} reads at {read:,.2f} GB/s")
    table.add_row("fixed cost of a decoding step", f"{1e3 * hardware.decode_step_s:,.2f} ms")
    if hardware.sent_bytes_per_s:
        table.add_row("bandwidth within a node", f"{hardware.sent_bytes_per_s / 1e9:,.2f} GB/s")
    if hardware.crowding:
        table.add_row("slowdown per other busy device of the node", f"{hardware.crowding:.1%}")
    return table
