"""`rlfuse plan --search`: find the fastest configuration that fits, and write its job file."""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from math import inf
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.markup import escape
from rich.table import Table

from rlfuse.config.compose import compose_job, to_config
from rlfuse.config.declare import as_typed, did_you_mean
from rlfuse.config.facts import Facts, planning_facts
from rlfuse.config.input_files import unwritable
from rlfuse.config.schema import Config
from rlfuse.engines.memory.estimate import GIB
from rlfuse.engines.memory.model_sizes import served_shapes, shapes_of
from rlfuse.engines.memory.remedies import changed
from rlfuse.engines.vllm.support import unplannable_reasons
from rlfuse.errors import ConfigError
from rlfuse.fusion.custom_policies import load_policy
from rlfuse.progress import Console
from rlfuse.tools.planning.cluster_file import Cluster, read_cluster
from rlfuse.tools.planning.forecast import Finalists, finalists, lengths_of, with_untuned_step
from rlfuse.tools.planning.node_order import best_order, exchange_seconds, node_traffic
from rlfuse.tools.planning.planned_job import (
    changed_settings,
    facts_for_device,
    missing_inputs,
    over_limit_options,
    prompt_tokens,
    read_lengths,
    with_placeholders,
    without_unresolvable_arguments,
    write_job,
)
from rlfuse.tools.planning.search import (
    Neighbour,
    Plan,
    SearchResult,
    evaluate_neighbours,
    refine,
    search,
    simplest,
    step_error_s,
    structure_of,
)
from rlfuse.tools.planning.searched_job import Job
from rlfuse.tools.planning.space import axes_of
from rlfuse.tools.planning.step_time import Seconds, fastest_labels
from rlfuse.tools.planning.tables import memory_table, table_console, table_of

DOES_NOT_FIT = 3
SECONDS, PATIENCE = 60.0, 64  # default time limit; plans without gain before an early end
SEARCH_SHARE, REFINE_SHARE = 0.5, 0.8  # shares of the time at which the search, and the refinement, end
SHOWN = 8  # plans in the table
REMEDIES = {
    "generating": "shorter responses, rollout.quantization, or a device with more memory bandwidth",
    "scoring": "algorithm.old_log_probs=engine, no reference, or a device with more FLOP/s",
    "training": "fewer or shorter samples per step, or a device with more FLOP/s",
}
"""Kind of work -> what shortens it on one device, where no other device can take a share."""


def main(argv: Sequence[str]) -> None:
    """Run `rlfuse plan --search`. Raises UserError for invalid input, SystemExit(3) if no plan fits."""
    from rlfuse.engines.trainer.families import training_problems  # imports transformers

    arguments, words = _parser().parse_known_args(argv)
    _check(arguments, words)
    console, cluster = table_console(), read_cluster(arguments.cluster)
    given = with_placeholders(compose_job(words))
    config = _accepted(cluster, without_unresolvable_arguments(given), arguments.keep)
    load_policy(config.fusion.policy, kwargs=config.fusion.policy_kwargs)
    beyond = over_limit_options(config, arguments.prompt_tokens, arguments.response_tokens)
    task = [f"trainer.task={config.trainer.task}: --search supports only trainer.task=rl; drop --search"]
    task *= config.trainer.task != "rl"
    refused = [*training_problems(config), *unplannable_reasons(config, config.cluster.device)]
    if wrong := [*task, *cluster.missing_for(config), *refused, *beyond]:
        raise ConfigError(wrong)
    (job, facts), began = _job(config, cluster, arguments), time.monotonic()
    seconds, patience = arguments.seconds or SECONDS, inf if arguments.seconds else PATIENCE
    with console.status("") as status:
        found = search(job, facts, SEARCH_SHARE * seconds, lambda line: status.update(escape(line)), patience)
    if not found.plans:
        _nothing_fits(found, SEARCH_SHARE * seconds, console)
    else:
        neighbours: list[Neighbour] = []
        with console.status("neighbours of the best plan"), suppress(KeyboardInterrupt):  # results so far are shown
            found, neighbours = refine(job, found, facts, began + REFINE_SHARE * seconds - time.monotonic())
        with console.status("the best plans with tuned thresholds"):
            tuned_plans = finalists(job, found.plans[:SHOWN], began + seconds - time.monotonic())
            compared = found.plans[0]
            if structure_of(compared) != structure_of(tuned_plans.plans[0]):
                compared = with_untuned_step(job, tuned_plans.plans[0])
                neighbours = evaluate_neighbours(job, compared, facts)
            plain = simplest(job, compared, facts, began + seconds - time.monotonic())
        table = _neighbours_table(compared, neighbours, job.hardware.errors)
        console.print(_plans_table(job, tuned_plans.plans), table)
        _show(job, given, found, tuned_plans, arguments, console)
        console.print(_simplest_line(given, compared, plain), soft_wrap=True)
    if not found.plans:
        raise SystemExit(DOES_NOT_FIT)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlfuse plan --search",
        usage="rlfuse plan --search [options] --cluster cluster.yaml [my_job.yaml] key=value ...",
        description="Find the fastest configuration that fits. Exit status 0: found, 2: invalid config, 3: none fits.",
        allow_abbrev=False,
    )
    parser.add_argument("--search", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cluster", type=Path, required=True, metavar="FILE", help="cluster file (YAML)")
    parser.add_argument("--out", type=Path, metavar="best.yaml", help="write the best plan as a job file")
    parser.add_argument("--keep", action="append", default=[], metavar="KEY", help="do not change this key")
    parser.add_argument("--seconds", type=float, metavar="N", help=f"time limit; default: at most {SECONDS:g}")
    parser.add_argument(
        "--response-tokens", type=float, metavar="N", help="mean response length; default: half the limit"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="mean prompt length; default: from the data, or half the limit"
    )
    parser.add_argument("--picture", type=Path, metavar="out.png", help="bar chart of the plans")
    return parser


def _check(arguments: argparse.Namespace, words: Sequence[str]) -> None:
    wrong = [
        f"--{name.replace('_', '-')} {value:g}: needs a number above 0"
        for name in ("seconds", "response_tokens", "prompt_tokens")
        if (value := getattr(arguments, name)) is not None and not (value > 0 and (name == "seconds" or value < inf))
    ]
    for option, path, ending in (("--out", arguments.out, ".yaml"), ("--picture", arguments.picture, ".png")):
        if problems := unwritable(option, path, ending):
            wrong += problems
        elif path is not None and path.resolve() in {Path(word).resolve() for word in (*words, arguments.cluster)}:
            wrong.append(f"{option} {path}: would overwrite an input file; choose another name")
    if wrong:
        raise ConfigError(wrong)


def _accepted(cluster: Cluster, given: DictConfig, keep: Collection[str]) -> Config:
    """Return the job on all machines or, if that is invalid, on one device; the search tries the rest."""

    def accepted(nodes: int, each: int) -> Config:
        job = _on_devices(nodes, each, cluster.device, given, keep)
        return to_config(job, lambda config: facts_for_device(config, config.cluster.device))

    try:
        return accepted(cluster.nodes, cluster.sizes[0])
    except ConfigError:
        with suppress(ConfigError):
            return accepted(1, 1)
        raise


def _on_devices(nodes: int, each: int, device: str, given: DictConfig, keep: Collection[str]) -> DictConfig:
    job = deepcopy(given)
    with suppress(OmegaConfBaseException):  # reported by `to_config`
        OmegaConf.resolve(job)  # references to these keys keep their values
    for key, value in {"trainer.nnodes": nodes, "trainer.n_gpus_per_node": each, "cluster.device": device}.items():
        if key not in keep:
            OmegaConf.update(job, key, value)
    return job


def _job(config: Config, cluster: Cluster, arguments: argparse.Namespace) -> tuple[Job, Facts]:
    shapes = shapes_of(config)
    axes = axes_of(config, shapes["actor"], cluster, arguments.keep)
    if unknown := [key for key in arguments.keep if key not in axes]:
        known = f"; valid: {', '.join(axes)}"
        raise ConfigError(
            [f"--keep {key}: is not a searched key{did_you_mean(key, tuple(axes)) or known}" for key in unknown]
        )
    prompt = arguments.prompt_tokens or prompt_tokens(config, read_lengths(config))
    job = Job(
        config,
        shapes,
        served_shapes(config, cluster.device),
        cluster,
        cluster.hardware(any(shape.active < 1 for shape in shapes.values())),
        lengths_of(config, arguments.response_tokens),
        min(prompt, config.data.max_prompt_length),
        axes,
    )
    actor = shapes["actor"]
    facts = replace(
        planning_facts(config),
        attention_heads=actor.heads,
        layers=len(actor.layers),
        video=actor.tower > 0,
        cuda=cluster.device == "cuda",
    )
    return job, facts


def _nothing_fits(found: SearchResult, seconds: float, console: Console) -> None:
    _, wrong = found.nearest or (0.0, ("every combination is invalid",))
    if found.unexplored:
        tried = f"none of {found.not_fitting} combinations tried in {seconds:g} s fits"
        console.print(
            f"[bold red]no plan found that fits[/]: {tried}, {found.unexplored} were not tried. Use --seconds to "
            "search longer. Closest to fitting:",
            soft_wrap=True,
        )
    else:
        console.print(f"[bold red]no plan fits[/]: {found.structures} structures tried. Closest to fitting:")
    for line in wrong:
        console.print(f"  {escape(line)}", soft_wrap=True)
    console.print("Use more devices, devices with more memory, shorter length limits, or a smaller model.")


def _show(
    job: Job,
    given: DictConfig,
    found: SearchResult,
    tuned_plans: Finalists,
    arguments: argparse.Namespace,
    console: Console,
) -> None:
    plans, errors, best = tuned_plans.plans, job.hardware.errors, tuned_plans.plans[0]
    config, memory = job.with_settings(best.settings)
    console.print(_policies_table(tuned_plans.policies, errors), memory_table(config, job.shapes, memory))
    for line in _summary(job, found, tuned_plans, errors):
        console.print(escape(line), soft_wrap=True)
    if arguments.picture is not None:
        from rlfuse.tools.planning.plots import draw_plans

        draw_plans(plans, [name_of(job, plan) for plan in plans], errors, arguments.picture)
        console.print(f"picture: {arguments.picture}", soft_wrap=True)
    settings = dict(best.settings) | {"cluster.device": job.cluster.device}
    if placed := _node_order(job, config):
        settings["cluster.node_order"], line = placed
        console.print(escape(line), soft_wrap=True)
    words = " ".join(f"{key}={as_typed(value)}" for key, value in changed_settings(given, settings))
    console.print(f"[bold green]best[/]  {escape(words)}", soft_wrap=True)
    if arguments.out is not None:
        write_job(arguments.out, given, settings, changed(job.config, settings.items()), console)


def _node_order(job: Job, config: Config) -> tuple[list[str], str] | None:
    """Return the nodes in the fastest order and a line about the gain, if links were measured."""
    uneven = len(job.cluster.sizes) > 1  # the device count of each measured node is unknown
    if config.trainer.nnodes == 1 or uneven or (links := job.cluster.node_links()) is None:
        return None
    sent = node_traffic(config, job.shapes["actor"], sum(job.lengths) + len(job.lengths) * job.prompt_tokens)
    order = best_order(links, sent)
    names = [links.names[at] for at in order[: config.trainer.nnodes]]
    before, after = (exchange_seconds(each, links, sent) for each in (range(len(order)), order))
    return (
        names,
        f"node order {', '.join(names)}: {after:.3g} s of inter-node communication per step, {before:.3g} s as listed",
    )


def name_of(job: Job, plan: Plan) -> str:
    """Return a short name: machines, parallelism degrees and ZeRO stage."""
    config = changed(job.config, plan.settings)
    nodes, each, training = config.trainer.nnodes, config.trainer.n_gpus_per_node, config.training
    degrees = {
        "TP": config.rollout.tensor_model_parallel_size,
        "PP": training.pipeline_parallel_size,
        "trainTP": training.tensor_model_parallel_size,
        "SP": training.ulysses_sequence_parallel_size,
    }
    words = [f"{nodes}x{each}", *(f"{name}{degree}" for name, degree in degrees.items() if degree > 1)]
    if (chunks := training.virtual_pipeline_model_parallel_size) > 1:
        words.append(f"{training.pipeline_placement}{chunks}")
    words += ["vocab"] if training.vocabulary_parallel else []
    alone = config.actor.optimizer_residency == "step"
    zero = sum((config.sharded_optimizer, config.sharded_gradients, config.sharded_weights))
    words.append(f"ZeRO{zero}" + "+off" * config.actor.offload_optimizer + "+step" * alone)
    words += [config.rollout.quantization] if config.rollout.quantization else []
    return " ".join(words)


def _plans_table(job: Job, plans: Sequence[Plan]) -> Table:
    numbers = ("tokens", "recompute", "seqs", "GiB", "generate", "score", "train", "step", "+-")
    table = table_of("Plans: step time in seconds with tuned thresholds, best first", "plan", numbers=numbers)
    table.pad_edge, table.padding = False, (0, 1, 0, 0)
    best = plans[0]
    for plan in plans:
        config, seconds = changed(job.config, plan.settings), plan.seconds
        same = plan is not best and not plan.seconds.is_significantly_slower(best.seconds, job.hardware.errors)
        table.add_row(
            ("= " if same else "  ") + name_of(job, plan),
            f"{config.actor.ppo_max_token_len_per_gpu}",
            {(True, True): "yes+off", (True, False): "yes", (False, True): "off"}.get(
                (config.model.enable_gradient_checkpointing, config.model.enable_activation_offload), "no"
            ),
            f"{config.rollout.max_num_seqs}",
            f"{max(map(plan.memory.total, plan.memory.phases)) / GIB:.1f}",
            *(f"{each:.1f}" for each in seconds.kinds.values()),
            f"{seconds.step:.2f}",
            f"{step_error_s(seconds, job.hardware.errors):.1f}",
        )
    table.caption_justify = "left"
    table.caption = (
        "plan: nodes x devices; TP: rollout tensor parallel size, PP: pipeline stages, trainTP: training tensor "
        "parallel size, SP: Ulysses, if above 1; v, interleaved: virtual pipeline stages per device; vocab: vocabulary "
        "parallel head; +off: optimizer offloaded, +step: on the device only during its steps; tokens: per "
        "micro-batch; recompute: gradient checkpointing, off: activations of long micro-batches offloaded; seqs: "
        "rollout.max_num_seqs; GiB: peak phase; +-: error of the step time; =: equal to the first within the error; if "
        "the error of a calibration leaves open which plan is faster, the job's values come first"
    )
    return table


def _neighbours_table(best: Plan, neighbours: Sequence[Neighbour], errors: Mapping[str, float]) -> Table:
    table = table_of("Neighbours of the best plan (before thresholds are tuned)", "change", "step time")
    feasible = [each for each in neighbours if each.is_feasible]
    for each in feasible:
        table.add_row(escape(f"{each.setting[0]}={as_typed(each.setting[1])}"), escape(_why(best, each, errors)))
    if excluded := len(neighbours) - len(feasible):
        table.caption = f"{excluded} more changes are invalid or do not fit"
        table.caption_justify = "left"
    return table


def _simplest_line(given: DictConfig, best: Plan, plain: Plan) -> str:
    """Return the line about the plan with the fewest changes of the job that is as fast as the best."""
    if plain.settings == best.settings:
        return "[bold green]simplest[/]  the best plan: no plan with more values of the job is equal within the error"
    words = " ".join(f"{key}={as_typed(value)}" for key, value in changed_settings(given, dict(plain.settings)))
    step = f"{plain.seconds.step:.2f} s instead of {best.seconds.step:.2f} s before thresholds are tuned"
    return f"[bold green]simplest[/]  {escape(words)}  ({step}, equal within the error)"


def _why(best: Plan, each: Neighbour, errors: Mapping[str, float]) -> str:
    if each.plan is None:
        return each.reason
    if not each.plan.seconds.is_significantly_slower(best.seconds, errors):
        return "equal within the error"
    more = each.plan.seconds.step - best.seconds.step
    mine, others = best.seconds.kinds, each.plan.seconds.kinds
    kinds = [(kind, others[kind] - mine[kind]) for kind in mine]
    parts = ", ".join(f"{kind} {by:+.1f}" for kind, by in sorted(kinds, key=lambda k: -abs(k[1])) if abs(by) >= 0.05)
    return f"{more:+.1f} s" + (f": {parts}" if parts else "")


def _policies_table(policies: Mapping[str, Seconds], errors: Mapping[str, float]) -> Table:
    table = table_of("Best plan under each policy, with tuned thresholds", "fusion.policy", numbers=("step",))
    labels = fastest_labels(policies, errors)
    for name, seconds in policies.items():
        table.add_row(name + (f" ({labels[name]})" if name in labels else ""), f"{seconds.step:.2f}")
    return table


def bottleneck_line(seconds: Seconds) -> str:
    """Return the line for plans on one device: the longest kind of work, and what would help most."""
    kind = max(seconds.kinds, key=seconds.kinds.__getitem__)
    share = seconds.kinds[kind] / seconds.step
    return (
        f"one device: {kind} takes {share:.0%} of the step, so {REMEDIES[kind]} would help most; fusion overlaps only "
        "reward functions"
    )


def _summary(job: Job, found: SearchResult, tuned_plans: Finalists, errors: Mapping[str, float]) -> list[str]:
    best = found.plans[0].seconds.step
    space = f"{found.structures} structures (parallelism, ZeRO stage, machines)"
    counts = f"{space}, {found.simulated} plan{'s' * (found.simulated != 1)} simulated, {found.not_fitting} did not fit"
    more = f"no other plan can be more than {max(0.0, 1 - found.bound_s / best):.1%} faster in the simulator"
    if found.unexplored:
        gain = more if found.bound_s else "no bound is known for structures that were not reached"
        more = f"stopped with {found.unexplored} not tried, use --seconds to search longer; {gain}"
    lengths, cluster = job.lengths, job.cluster
    unbounded = cluster.host_memory_gb is None and found.plans[0].memory.host > 0
    late = (
        [f"{tuned_plans.untuned_plans} more plans were not tuned in time; use --seconds to search longer"]
        if tuned_plans.untuned_plans
        else []
    )
    config, devices = changed(job.config, tuned_plans.plans[0].settings), cluster.devices
    idle = f"{config.slots} of {devices} devices are used: a run takes the same number of devices on each of its nodes"
    return [
        f"{counts}; {more}",
        *late,
        *[bottleneck_line(tuned_plans.plans[0].seconds)] * (config.slots == 1),
        *[idle] * (len(cluster.sizes) > 1 and config.slots < devices),
        f"memory: {cluster.memory_margin:.0%} of each device is left free (memory_margin)"
        + ("; host memory is assumed to be sufficient for pinned buffers (host_memory_gb)" if unbounded else ""),
        f"assumed: responses of {sum(lengths) / len(lengths):.0f} tokens on average, prompts of {job.prompt_tokens} "
        "(--response-tokens, --prompt-tokens)",
        f"assumed: {cluster.throughput_note()}",
        "errors: "
        + ", ".join(f"{kind} {each:.0%}" for kind, each in errors.items())
        + ("" if job.cluster.calibration else " (assumed; run `rlfuse calibrate` to measure them)"),
        *missing_inputs(job.config),
    ]
