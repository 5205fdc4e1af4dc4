"""The tables of `rlfuse plan`: settings, placement, memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.markup import escape
from rich.table import Table

from rlfuse.config.checks import value_of
from rlfuse.config.declare import as_typed
from rlfuse.config.documentation import keys
from rlfuse.config.rewards import JUDGE
from rlfuse.config.schema import Config
from rlfuse.engines.memory.activations import layer_costs, micro_batch_tokens, parts_on
from rlfuse.engines.memory.estimate import GIB, Memory
from rlfuse.engines.memory.model_sizes import Shape
from rlfuse.engines.memory.sharing import describe_sharing
from rlfuse.engines.pipeline.partition import logits_fraction
from rlfuse.progress import Console

PIPE_WIDTH = 1000
"""Characters per line if the output is not a terminal, so that no key or value is folded."""


def table_console() -> Console:
    """Return the console that prints tables."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def table_of(title: str, *columns: str, numbers: Sequence[str] = ()) -> Table:
    """Return an empty table; the columns `numbers` are right-aligned."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for name in (*columns, *numbers):
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    return table


def settings_table(config: Config, without: Collection[str] = ()) -> Table:
    """Return a table of the keys that differ from their defaults, except those in `without`."""
    table = table_of("Settings that differ from the defaults (all: rlfuse train --cfg job ...)", "key", "value")
    for key in keys():
        value = value_of(config, key.name)
        if (key.required or value != key.default) and key.name not in without:
            table.add_row(key.name, escape(as_typed(value)))
    return table


def placement_table(config: Config, shapes: Mapping[str, Shape]) -> Table:
    """Return a table of the slots of the first node; other nodes have the same layout."""
    found = placements(config, shapes)
    video, pipeline = shapes["actor"].tower > 0, config.training.pipeline_parallel_size
    pipeline *= config.training.tensor_model_parallel_size
    title = f"Placement: {config.slots} slots on {config.trainer.nnodes} node{'s' * (config.trainer.nnodes > 1)}"
    table = table_of(title, "node", "slot", "rollout engine", "trainer rank", *(["encoder ranks"] if video else []))
    for place in found:
        if place.node and pipeline <= config.trainer.n_gpus_per_node:
            continue
        more = [str(place.encoders)] if video else []
        table.add_row(str(place.node), str(place.slot), place.engine, place.trainer, *more)
    if found[-1].node and len(found) > table.row_count:
        table.add_row(f"1-{found[-1].node}", "...", "same", "same")
    if config.trainer.is_offline:
        return table
    reward = config.reward
    models = [given for given in reward.functions if isinstance(given, dict) and given.get("path") == JUDGE]
    rewards = reward.num_workers * (len(models) < len(reward.functions)) + len(models) + bool(reward.model_path)
    table.caption = f"plus the driver and {rewards} reward process{'es' * (rewards != 1)}"
    if config.training.pipeline_parallel_size > 1:
        table.caption += f"; {stage_note(config, shapes['actor'])}"
    table.caption_justify = "left"
    return table


def stage_note(config: Config, shape: Shape) -> str:
    """Describe how layers are assigned to pipeline stages."""
    share = logits_fraction(config.data)
    layers, _, head = layer_costs(shape.share(config.training.tensor_model_parallel_size), share)
    if config.training.vocabulary_parallel:
        return "stages with equal numbers of layers; the actor's head is split over all stages"
    head_layers = head * len(layers) / sum(layers)
    return (
        f"stages of equal cost: the actor's head counts as {head_layers:.1f} layers, since {share:.0%} of positions "
        "need logits; after a checkpoint, measured costs are used if that is 5 % faster"
    )


def memory_table(config: Config, shapes: Mapping[str, Shape], memory: Memory) -> Table:
    """Return a table of memory in GiB, with a row per part and a column per phase."""
    sizes = ", ".join(f"{role} {shape.parameters / 1e6:,.1f} M" for role, shape in shapes.items())
    limit = f"{memory.budget.bytes / GIB:.1f} GiB"
    device = f"GPU with {limit}" if memory.budget.device == "cuda" else f"slot with {limit} of host memory"
    phases = memory.phases if memory.budget.device == "cuda" and memory.generates else ("all phases",)
    table = table_of(f"Memory in GiB, {device} (parameters: {sizes})", "role", "part", numbers=phases)
    table.pad_edge, table.padding = False, (0, 1, 0, 0)
    for column in table.columns:  # no wrapping within 80 columns
        column.no_wrap = True
    for part in memory.parts:
        cells = [f"{part.size / GIB:.2f}" if part in memory.of(phase) else "" for phase in memory.phases]
        table.add_row(part.role, part.what, *cells)
    table.add_section()
    totals = [memory.total(phase) for phase in memory.phases]
    colours = ["red" if total > memory.budget.bytes else "green" for total in totals]
    row = [f"[{colour}]{total / GIB:.2f}[/]" for total, colour in zip(totals, colours, strict=True)]
    table.add_row("total", "", *row)
    longest = config.data.max_prompt_length + config.data.max_response_length
    tightest = memory.tightest
    notes = [
        f"peak phase: {tightest}, {memory.total(tightest) / memory.budget.bytes:.0%} of the device",
        f"micro-batches of {micro_batch_tokens(config)} tokens",
    ]
    if memory.generates:
        held = max(0, memory.kv_tokens)
        samples = f"{held // longest:,} samples of maximum length ({longest})"
        notes.append(f"the KV cache of an engine holds {held:,} tokens: {samples}")
    if memory.budget.device == "cuda" and memory.generates:
        notes += describe_sharing(config, memory)
    if memory.host:
        per_node = memory.host * config.trainer.n_gpus_per_node / GIB
        notes.append(f"up to {per_node:.1f} GiB of pinned host memory per node for offloaded state")
    table.caption, table.caption_justify = "; ".join(notes), "left"
    return table


@dataclass(frozen=True, slots=True)
class SlotPlacement:
    """The engine and trainer rank of a slot."""

    slot: int
    node: int
    engine: str
    trainer: str
    encoders: int = 0  # encoder ranks of a video job


def placements(config: Config, shapes: Mapping[str, Shape]) -> list[SlotPlacement]:
    """Return the placement of each slot, in order."""
    width, mesh = config.rollout.tensor_model_parallel_size, config.mesh
    encoders = (config.video.encoder_ranks or config.slots) if shapes["actor"].tower else 0
    held, found = {role: shape.share(mesh.tp) for role, shape in shapes.items()}, []
    for slot in range(config.slots):
        engine, trainer = f"rollout/{slot // width}{_part(slot, width)}", f"trainer/{slot}{_part(slot, mesh.tp)}"
        roles = ", ".join(_held(config, role, shape, mesh.coordinates(slot)["pp"]) for role, shape in held.items())
        mine = len(range(slot, encoders, config.slots))
        engine = "none" if config.trainer.is_offline else engine
        found.append(SlotPlacement(slot, slot // config.trainer.n_gpus_per_node, engine, f"{trainer}: {roles}", mine))
    return found


def _part(slot: int, width: int) -> str:
    return f" ({slot % width + 1} of {width})" if width > 1 else ""


def _held(config: Config, role: str, shape: Shape, position: int) -> str:
    if config.training.pipeline_parallel_size == 1:
        return role
    held = [part.layers for part in parts_on(config, shape, role, position) if part.layers]
    layers = " and ".join(f"{each.start}-{each.stop - 1}" for each in held)
    return f"{role} layers {layers}" if layers else f"{role} head"
