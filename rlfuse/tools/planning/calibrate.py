"""`rlfuse calibrate`: measure a device by runs or by a probe, and write the file that plans are made from."""

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
    "links within a node: what ranks exchange is in the times of their optimizer steps; give a run of one slot, too"
)
NO_EXCHANGES = "links within a node: no two ranks of one had anything to exchange"
GATHERS = "what ranks take to gather a module's divided weights besides its bytes; give a run that divides them, too"
ONE_MODEL = (
    "models of other sizes: in one model reading weights can't be told from what steps take beside, or widths apart"
)
UNSEEN_RATE = "{}: too fast to be seen in this work, and taken for free; measure a larger model, too"
CROWDING = (
    "how much devices of a node slow one another: as many were at work all the time; give a run with fewer "
    "(trainer.n_gpus_per_node), too"
)
NO_CONTENTION = "how much devices of a node slow one another: one was at work, and plans take as many to be as fast"
NO_SCORING = "scoring: no passes were seen, and they are taken to be as fast as training"
NO_RUN = "an engine's own scheduling, data, rewards, weights on their way: decoding was that of transformers"


def main(argv: Sequence[str]) -> None:
    """Do what the arguments say. Raises CalibrationError and its like."""
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
        from rlfuse.tools.planning.pictures import draw_calibration

        draw_calibration(found, f"{calibration.device}: {words}", arguments.picture)
        console.print(f"picture: {escape(str(arguments.picture))}", soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlfuse calibrate",
        description="What this device does, from the events of runs or from a probe of half a minute.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN_DIR", help="runs of two steps or more on one device")
    add_option(parser)
    parser.add_argument("--probe", action="store_true", help="measure here and now instead: passes, decoding, copies")
    parser.add_argument("--links", action="store_true", help="measure between a Ray cluster's nodes: writes links.yaml")
    parser.add_argument("--address", default="auto", metavar="HOST:PORT", help="of that cluster; default: auto")
    parser.add_argument("--model", metavar="FOLDER", help="with config.json; default: each run's own, or small models")
    parser.add_argument("--device", metavar="NAME", help="the device's name; default: as this machine tells it")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: calibration.yaml, or links.yaml")
    parser.add_argument("--picture", type=Path, metavar="out.png", help="measured against predicted seconds")
    return parser


def _check(arguments: argparse.Namespace) -> None:
    wrong = []
    if [arguments.probe, bool(arguments.runs), arguments.links].count(True) != 1:
        wrong.append("rlfuse calibrate needs RUN_DIRs, --probe or --links, one of them")
    if arguments.links and arguments.picture is not None:
        wrong.append("--picture: shows work of a device; --links measures none")
    if len(set(map(Path.resolve, arguments.runs))) < len(arguments.runs):
        wrong.append("RUN_DIR: one run is named twice, and would be held against itself; name each once")
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
            raise CalibrationError(f"--links: {len(found)} node answers, two at least are needed; start more")
        device, _ = nodes.device_of("auto", found)
        measured = link_probe.measure(found, device, lambda line: console.print(line, soft_wrap=True))
    finally:
        placement.stop()
    alike = len({node.address for node in found}) < len(found)
    names = [node.id[: nodes.MIN_ID_PREFIX] if alike else node.address for node in found]
    pairs = [
        Pair(names[a], names[b], float(f"{rate / 1e9:.4g}"), round(wait * 1e6, 1))
        for (a, b), (wait, rate) in sorted(measured.items())
    ]
    write_links(MeasuredLinks("nccl" if device == "cuda" else "gloo", tuple(names), tuple(pairs)), arguments.out)
    slowest, fastest = (pick(pairs, key=lambda pair: pair.gbs) for pick in (min, max))
    for words, pair in (("fastest", fastest), ("slowest", slowest)):
        console.print(f"{words}: {pair.first} and {pair.second}, {pair.gbs:g} GB/s, {pair.us:g} us", soft_wrap=True)
    console.print(f"wrote {escape(str(arguments.out))}; name it as `links: {{measured: ...}}` in a cluster file")


Measured = tuple[list[Work], list[Source], list[str], dict[str, float]]
"""Work, where it comes from, what is missing, and speeds of the device by themselves."""


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
    """The work of one run. Raises CalibrationError where it can't be told."""
    config = read_generating_config(folder)
    if model is None and config.model.trust_remote_code:
        what = f"model.trust_remote_code=true for model.path={config.model.path}"
        refuse_code(folder / "config.yaml", [what], run_code)
    config.model.trust_remote_code &= run_code
    if (stages := config.training.pipeline_parallel_size) > 1:
        raise CalibrationError(
            f"{folder}: a run with pipelines (training.pipeline_parallel_size={stages}); its spans are of stages, and "
            "tell no whole pass; give a run with training.pipeline_parallel_size=1"
        )
    if model is not None:
        config.model.path = model
        config.critic.path = config.ref.path = None
    shapes, spans = shapes_of(config), read_events(folder / "events.jsonl")
    works = work_of_run(name, config, shapes, spans)
    if not works:
        raise CalibrationError(f"{folder / 'events.jsonl'}: no complete step after the first; let the run finish three")
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
        raise CalibrationError(f"--model {model}: no config.json there; give the folder of a model")
    probe = Probe(lambda line: console.print(escape(line), soft_wrap=True))
    probe.measure(model)
    sources = [
        Source(name, shape.parameters, len(shape.layers), shape.hidden, 0, 0, max(*probe.tokens, *CONTEXTS) + STEPS, 1)
        for name, shape in probe.shapes.items()
    ]
    speeds = {
        "product_flops": probe.product_flops,
        "copy_bytes_per_s": probe.copy_bytes_per_s,
    }
    if probe.host_bytes_per_s is not None:
        speeds["host_bytes_per_s"] = probe.host_bytes_per_s
    return probe.works, sources, [LINKS, NO_RUN, NO_CONTENTION], speeds


def _unseen(hardware: Hardware) -> list[str]:
    names = {"bytes_per_s": "the memory's bandwidth", "pass_flops": "products in passes", "train_flops": "in training"}
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
    table = table_of(title, "kind of work", numbers=("off by, in the mean",))
    for kind in KINDS:
        error = getattr(calibration.errors, kind)
        table.add_row(kind, "none seen" if error is None else f"{error:.1%}")
    table.add_section()
    hardware = calibration.hardware
    for words, rate in (("passes", hardware.pass_flops), ("training", hardware.train_flops)):
        table.add_row(words, f"{rate / 1e9:,.1f} GFLOP/s")
    when, read = "while" if hardware.decode_overlaps else "after", hardware.bytes_per_s / 1e9
    table.add_row("decoding", f"{hardware.decode_flops / 1e9:,.1f} GFLOP/s {when} it reads {read:,.2f} GB/s")
    table.add_row("a decoding step, beside", f"{1e3 * hardware.decode_step_s:,.2f} ms")
    if hardware.sent_bytes_per_s:
        table.add_row("exchanged with ranks of the node", f"{hardware.sent_bytes_per_s / 1e9:,.2f} GB/s")
    if hardware.crowding:
        table.add_row("longer, for each other device of the node", f"{hardware.crowding:.1%}")
    return table
