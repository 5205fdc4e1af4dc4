"""`rlfuse plan`: predict memory, placement and step time of a job before it starts; needs no GPU.

Exit status: 0 it fits, 2 invalid configuration, 3 it does not fit.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from rlfuse.algorithms.experience import Experience
from rlfuse.config.compose import compose_job, to_config
from rlfuse.config.input_files import read, unwritable
from rlfuse.config.schema import Config
from rlfuse.engines.memory.activations import PASS_OF, describe_activations, largest_activation_plan
from rlfuse.engines.memory.estimate import GIB, Budget, Memory, Moved, memory_of
from rlfuse.engines.memory.model_sizes import Shape, served_shapes, shapes_of
from rlfuse.engines.memory.remedies import problems, remedies
from rlfuse.engines.vllm.gpu_settings import gpu_settings
from rlfuse.engines.vllm.setup import memory_arguments
from rlfuse.engines.vllm.support import unplannable_reasons
from rlfuse.errors import ConfigError
from rlfuse.fusion.custom_policies import load_policy
from rlfuse.fusion.decisions import traits_of
from rlfuse.progress import Console
from rlfuse.tools.planning import search_command
from rlfuse.tools.planning.cluster_file import Cluster, ClusterError, read_cluster
from rlfuse.tools.planning.planned_job import (
    DataLengths,
    facts_for_device,
    missing_inputs,
    over_limit_options,
    prompt_tokens,
    read_lengths,
    unset_keys,
    with_placeholders,
    without_unresolvable_arguments,
)
from rlfuse.tools.planning.step_time import MIN_GAIN, fastest_labels
from rlfuse.tools.planning.tables import memory_table, placement_table, settings_table, table_console, table_of

if TYPE_CHECKING:
    from rlfuse.tools.planning.forecast import Forecast
    from rlfuse.tools.planning.hardware import Hardware

COSTS = {"from": "run", "peak-tflops": "peak_tflops", "cluster": "cluster"}
"""Options that give costs -> names of their arguments."""


def main(argv: Sequence[str]) -> None:
    """Run `rlfuse plan`. Raises UserError for invalid input, SystemExit(3) if the job does not fit."""
    if "--search" in argv:
        return search_command.main(argv)
    arguments, words = _parser().parse_known_args(argv)
    if arguments.cluster is not None:
        arguments.cluster = read_cluster(arguments.cluster)
    from rlfuse.engines.trainer.families import training_problems  # imports transformers

    config = to_config(
        without_unresolvable_arguments(with_placeholders(compose_job(words))),
        lambda config: facts_for_device(config, device_of(config, arguments)),
    )
    _check(arguments, config)
    policy = load_policy(config.fusion.policy, kwargs=config.fusion.policy_kwargs)
    beyond = over_limit_options(config, arguments.prompt_tokens, arguments.response_tokens)
    if wrong := [*training_problems(config), *unplannable_reasons(config, device_of(config, arguments)), *beyond]:
        raise ConfigError(wrong)
    shapes = shapes_of(config)
    budget = budget_of(config, arguments)
    served = served_shapes(config, budget.device)
    memory = memory_of(config, shapes, budget, served)
    console = table_console()
    console.print(
        settings_table(config, unset_keys(config)),
        placement_table(config, shapes),
        memory_table(config, shapes, memory),
    )
    early = traits_of(policy).trains_early and not config.trainer.is_offline
    overlap_note = Experience(config).overlap_blocker() if early else ""
    data = read_lengths(config)
    if isinstance(data, DataLengths):
        console.print(data.table())
        if arguments.run is None:
            arguments.prompt_tokens = arguments.prompt_tokens or prompt_tokens(config, data)
    notes = [*_activation_offload_notes(config, shapes, budget.device), *filter(None, [overlap_note])]
    for line in (*notes, *planning_notes(config, budget.device, data)):
        console.print(escape(line), soft_wrap=True)
    if arguments.memory_picture is not None:
        _draw_memory(config, memory, arguments.memory_picture, console)
    if budget.device == "cuda":
        _show_settings(config, memory, arguments.settings, console)
    _forecast(config, shapes, memory, arguments, console)
    wrong = problems(config, memory)
    for line in wrong:
        console.print(f"[bold red]does not fit[/]  {escape(line)}", soft_wrap=True)
    if wrong:
        console.print(escape(remedies(config, shapes, budget, served)), soft_wrap=True)
        raise SystemExit(search_command.DOES_NOT_FIT)
    console.print("[bold green]fits[/]")


def _draw_memory(config: Config, memory: Memory, path: Path, console: Console) -> None:
    from rlfuse.tools.planning.plots import draw_memory

    draw_memory(memory, f"{config.model.path}, {config.slots} slots, {config.sharding}", path)
    console.print(f"picture: {path}\n", soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlfuse plan",
        usage="rlfuse plan [options] [my_job.yaml] key=value ...",
        description="Predict memory and step time of a job. Exit status 0: fits, 2: invalid config, 3: does not fit.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--device-memory", type=float, metavar="GIB", help="memory per GPU (CPU: per slot); default: as detected"
    )
    parser.add_argument("--peak-tflops", type=float, metavar="N", help="peak TFLOP/s of a device; forecasts step time")
    parser.add_argument("--cluster", type=Path, metavar="FILE", help="cluster file: memory, speed, links")
    parser.add_argument(
        "--from", dest="run", type=Path, metavar="RUN_DIR", help="use costs and lengths of a recorded run"
    )
    parser.add_argument(
        "--response-tokens", type=float, metavar="N", help="mean; default: from the run, or half the limit"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="mean prompt length; default: from the run or the data"
    )
    parser.add_argument(
        "--picture", type=Path, metavar="out.png|html", help="plot of the fused schedule (pipelines only)"
    )
    parser.add_argument("--memory-picture", type=Path, metavar="out.png", help="plot of device memory in each phase")
    parser.add_argument("--search", action="store_true", help="find the fastest plan that fits; see --search --help")
    parser.add_argument(
        "--settings", action="store_true", help="show environment variables and engine arguments for GPUs, with reasons"
    )
    return parser


def device_of(config: Config, arguments: argparse.Namespace) -> str:
    """Return `cuda`, `cpu`, or `auto` if another machine decides. --device-memory implies `cuda`."""
    if config.cluster.device != "auto":
        return config.cluster.device
    if arguments.cluster is not None:
        return arguments.cluster.device
    if arguments.device_memory is not None or any(Path("/dev").glob("nvidia[0-9]*")):
        return "cuda"
    return "auto" if config.cluster.ray_address else "cpu"


def _check(arguments: argparse.Namespace, config: Config) -> None:
    wrong = []
    for name in ("device_memory", "response_tokens", "prompt_tokens"):
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            wrong.append(f"--{name.replace('_', '-')} {value:g}: needs a number above 0")
    costs = [f"--{option}" for option, name in COSTS.items() if getattr(arguments, name) is not None]
    if config.trainer.is_offline:
        task = f"trainer.task={config.trainer.task}"
        wrong += [
            f"{option}: the step time of {task} is not forecast; drop it (--device-memory gives the memory)"
            for option in costs
        ]
    if len(costs) > 1:
        wrong.append(f"{' and '.join(costs)}: each gives the costs; use only one of them")
    if arguments.cluster is not None and arguments.device_memory is not None:
        wrong.append("--cluster and --device-memory: both give the memory; use only one of them")
    wrong += arguments.cluster.missing_for(config) if arguments.cluster is not None else ()
    wrong += unwritable("--picture", arguments.picture, ".png", ".html")
    wrong += unwritable("--memory-picture", arguments.memory_picture, ".png")
    if arguments.picture is not None:
        if config.training.pipeline_parallel_size == 1:
            wrong.append("--picture: plots pipeline schedules; set training.pipeline_parallel_size above 1")
        if not costs:
            wrong.append("--picture: a schedule needs costs; give --peak-tflops, --cluster or --from")
    if wrong:
        raise ConfigError(wrong)


def budget_of(config: Config, arguments: argparse.Namespace) -> Budget:
    """Return the device and its memory, as given or as detected here. Raises ConfigError if neither is known."""
    device, given = device_of(config, arguments), arguments.device_memory
    if device == "auto":
        raise ConfigError(["cluster.device=auto: cannot be resolved on this machine; set cluster.device=cuda or cpu"])
    if arguments.cluster is not None:
        return arguments.cluster.budget(config)
    if given is not None:
        return Budget(device, int(given * GIB))
    if device == "cpu":
        import psutil

        return Budget(device, psutil.virtual_memory().total // config.trainer.n_gpus_per_node)
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            ["--device-memory: no GPU on this machine; give the memory in GiB, for example --device-memory 80"]
        )
    return Budget(device, torch.cuda.get_device_properties(0).total_memory)


def _activation_offload_notes(config: Config, shapes: Mapping[str, Shape], device: str) -> list[str]:
    if not config.model.enable_activation_offload:
        return []
    learning = {role: shape for role, shape in shapes.items() if role in PASS_OF}
    return [
        line
        for role, shape in learning.items()
        for line in describe_activations(largest_activation_plan(config, shape, role, device), role)
    ]


def planning_notes(config: Config, device: str, lengths: DataLengths | str) -> list[str]:
    """Return the assumptions of the plan, a line each; `lengths`: of the data, or why they are unknown."""
    data, lines = config.data, []
    if config.cluster.device == "auto":
        other = "cpu" if device == "cuda" else "cuda and --device-memory GIB"
        lines.append(f"cluster.device=auto: planned for {device}; set cluster.device={other} to plan for the other")
    known = isinstance(lengths, DataLengths)
    lines += lengths.lines() if known else ()
    reason = "" if known else "no data was read" + (f" ({lengths})" if lengths else "") + ": "
    lines.append(
        f"{reason}memory is planned for the longest samples allowed, "
        f"data.max_prompt_length={data.max_prompt_length} and data.max_response_length={data.max_response_length}"
    )
    return [*lines, *missing_inputs(config)]


def _show_settings(config: Config, memory: Memory, all_of_them: bool, console: Console) -> None:
    name = config.trainer.experiment_name or "NAME"  # placeholder: a run without a name gets one at submission
    named = replace(config, trainer=replace(config.trainer, experiment_name=name))
    settings = gpu_settings(named, planned=memory_arguments(memory))
    if not all_of_them:
        console.print(f"{len(settings)} settings for GPUs were chosen; use --settings to show them with reasons.\n")
        return
    for where in dict.fromkeys(each.where for each in settings):
        console.print(f"[bold]Settings of {escape(where)}[/]")
        for each in (each for each in settings if each.where == where):
            console.print(f"  {escape(each.name)}={escape(each.value)}", soft_wrap=True)
            console.print(Padding(escape(each.why), (0, 0, 0, 6)))
        console.print()


def _forecast(
    config: Config, shapes: Mapping[str, Shape], memory: Memory, arguments: argparse.Namespace, console: Console
) -> None:
    if config.trainer.is_offline:
        return
    if all(getattr(arguments, name) is None for name in COSTS.values()):
        console.print(
            "Step time: not forecast. Give --peak-tflops N (peak of a device), --cluster FILE, or --from RUN_DIR "
            "(costs of a recorded run).\n",
            soft_wrap=True,
        )
        return
    from rlfuse.simulate.tuning import cost_error
    from rlfuse.tools.planning.cluster_file import UNCALIBRATED_ERRORS
    from rlfuse.tools.planning.costs import costs_of, work_speeds
    from rlfuse.tools.planning.forecast import assumptions, forecast, lengths_of, recorded_costs
    from rlfuse.tools.planning.hardware import KINDS
    from rlfuse.tools.planning.step_time import StepTimes
    from rlfuse.tools.simulate.recorded import read_run

    recording = None if arguments.run is None else read_run(arguments.run)
    hardware, machines, speeds = None, _machines(config, memory, arguments), ()
    lengths = lengths_of(config, arguments.response_tokens, recording)
    prompt = recording.steps[-1].workload.prompt_tokens if recording else -(-config.data.max_prompt_length // 2)
    prompt = min(arguments.prompt_tokens or prompt, config.data.max_prompt_length)
    times = StepTimes(shapes, lengths, prompt)
    if recording is not None:
        costs = recorded_costs(config, recording, str(arguments.run))
    else:
        hardware = machines.hardware(any(shape.active < 1 for shape in shapes.values()))
        costs = costs_of(config, shapes, hardware, times.context, memory.moved)
        speeds = work_speeds(config, shapes["actor"], hardware, machines.speeds(config), times.context)
    roomy = replace(costs, kv_tokens=max(1, memory.kv_tokens))
    errors = dict.fromkeys(KINDS, cost_error(recording.fit)) if recording else hardware.errors or UNCALIBRATED_ERRORS
    found = forecast(config, times, roomy, errors, speeds)
    console.print(time_table(found))
    console.print(f"  rollout.disaggregate={config.rollout.disaggregate}: {found.disaggregate}", soft_wrap=True)
    for line in assumptions(config, machines, hardware, lengths, prompt, recording):
        console.print(f"  assumed: {escape(line)}", soft_wrap=True)
    if hardware is not None:
        for line in _transfer_notes(config, shapes, hardware, times.context, memory.moved):
            console.print(escape(line), soft_wrap=True)
    given = {"--response-tokens": arguments.response_tokens, "--prompt-tokens": arguments.prompt_tokens}
    if recording is None and (guessed := [option for option, tokens in given.items() if tokens is None]):
        console.print(f"  assumed: lengths default to half the limits; set {' and '.join(guessed)}", soft_wrap=True)
    console.print()
    if arguments.picture is not None:
        _draw(found.schedule, arguments.picture, console)


def _machines(config: Config, memory: Memory, arguments: argparse.Namespace) -> Cluster | None:
    """Return the cluster of --cluster or --peak-tflops; None with the costs of a run. Raises ClusterError."""
    if arguments.cluster is not None or arguments.peak_tflops is None:
        return arguments.cluster
    machines = {"nodes": config.trainer.nnodes, "devices_per_node": config.trainer.n_gpus_per_node}
    machines |= {"device": memory.budget.device, "device_memory_gb": memory.budget.bytes / GIB}
    try:
        return read(Cluster, machines | {"peak_tflops": arguments.peak_tflops}, ClusterError)
    except ClusterError as error:
        raise ClusterError(*(f"--peak-tflops: {problem}" for problem in error.problems)) from None


def _transfer_notes(
    config: Config, shapes: Mapping[str, Shape], hardware: Hardware, context: float, moved: Moved
) -> Iterator[str]:
    from rlfuse.tools.planning.costs import offload_traffic, optimizer_transfer_seconds

    if moved.optimizers:
        trips = optimizer_transfer_seconds(config, shapes, hardware, context, moved)
        yield _optimizer_transfer_note(config, moved.optimizers, *trips)
    if config.actor.offload_optimizer:
        yield _offload_note(*offload_traffic(config, shapes, hardware, context))


def _optimizer_transfer_note(config: Config, size: float, seconds: float, hidden: float) -> str:
    residency = config.actor.optimizer_residency
    line = f"  actor.optimizer_residency={residency}: {size / GIB:.1f} GiB of optimizer state"
    if not seconds:
        return f"{line}; --cluster adds the transfer time"
    when = "is moved to the device and back for each update" if residency == "step" else "is moved to the device"
    return f"{line} {when}: {seconds:.2f} s per step, {hidden:.2f} s overlap gradients, {seconds - hidden:.2f} s do not"


def _offload_note(size: float, seconds: float) -> str:
    line = f"  actor.offload_optimizer=true: {size / GIB:.1f} GiB of gradients and weights to the host and back"
    if not seconds:
        return f"{line}; --cluster adds the transfer time"
    return f"{line}: {seconds:.2f} s per step, not overlapped"


def time_table(found: Forecast) -> Table:
    """Return a table of the step time by stage under the job's policy, and of the step under other policies."""
    seconds, mine = found.seconds, next(iter(found.steps))
    table = table_of(f"Step time forecast, fusion.policy={mine}", "stage", numbers=("seconds",))
    table.add_row("generation", f"{seconds.generating:.2f}")
    table.add_row("scoring after generation", f"{seconds.scoring:.2f}")
    table.add_row("training after scoring", f"{seconds.training:.2f}")
    if found.lost_overlap > MIN_GAIN * seconds.step:
        table.add_row("lost overlap: training waits for the whole batch", f"{found.lost_overlap:.2f}")
    table.add_section()
    labels = fastest_labels(found.steps, found.errors)
    for policy, each in found.steps.items():
        words = "step" if policy == mine else f"step under {policy} ({each.step / seconds.step:.2f}x)"
        table.add_row(words + (f", {labels[policy]}" if policy in labels else ""), f"{each.step:.2f}")
    if found.bound is not None:
        table.add_row(f"lower bound of any schedule ({found.bound.bound_by})", f"{found.bound.seconds:.2f}")
    return table


def _draw(problem, path: Path, console: Console) -> None:
    from rlfuse.fusion.schedules.baselines import serial_1f1b_rows
    from rlfuse.fusion.schedules.planning import SEARCH_S
    from rlfuse.fusion.schedules.search import search
    from rlfuse.observe.schedule_picture import draw

    rows = search(problem, time_limit=SEARCH_S).rows
    draw(problem, [("serial 1F1B", serial_1f1b_rows(problem)), ("fused", rows)], path)
    console.print(f"picture: {path}\n", soft_wrap=True)
