"""Ways to run a job that this project does not have yet, as the search would see them: what they would save and cost.

Role: `rlfuse plan --search --hypothetical` searches their axes, too, and says so wherever it names one; no job file has
them. Pure. A configuration with them is a `HypotheticalConfig`; `memory` and `costs` of any other are the plain ones.

Trainers' tensor parallelism: `tensor_parallel_size` ranks are seen as one of as many times the memory, speed and links,
which divides weights, states and, with sequence parallelism between the products, activations (Megatron, arXiv
1909.08053 and 2205.05198); four all-reduces of a token's hidden states a layer, two of them backward.
Experts: attention and experts are mapped apart, TP*CP*DP = ETP*EP*EDP (MoE Parallel Folding, arXiv 2504.14960): a rank
holds 1/EP of the experts, and each token goes to its experts' ranks and back.
Activations: as large a share waits in the host's memory as is copied while the rank computes (MEMO, arXiv 2407.12117).
Engines' weights of 8 bits: half as many bytes to hold and to read as of bfloat16; products as fast as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from rlfuse.config.schema import Config
from rlfuse.fusion.costs import Costs
from rlfuse.planning.activations import micro_batch_tokens
from rlfuse.planning.costs import costs_of
from rlfuse.planning.hardware import Hardware
from rlfuse.planning.memory import ITEM, Budget, Memory, Part, memory_of
from rlfuse.planning.model_sizes import Shape
from rlfuse.planning.residency import Item

GROUP = "hypothetical"
AWAY_AT_ONCE = 2
"""Layers whose activations are on the device although they wait in the host's memory: on their way out and back."""
OF_RANKS = frozenset({Item.PARAMETERS, Item.REFERENCE, Item.OPTIMIZER, Item.GRADIENTS, Item.ACTIVATIONS})


@dataclass(frozen=True)
class Hypothetical:
    """What can't be run yet; with the defaults, nothing of it."""

    tensor_parallel_size: int = 1
    """Of trainers."""
    expert_parallel_size: int = 1
    """Trainer ranks that share the experts of a mixture."""
    offload_activations: bool = False
    rollout_8bit: bool = False


NOTHING = Hypothetical()


@dataclass
class HypotheticalConfig(Config):
    """A job with them."""

    hypothetical: Hypothetical = field(default_factory=Hypothetical)


def hypothetical(config: Config) -> HypotheticalConfig:
    """The job, ready to be given other values of these keys."""
    return HypotheticalConfig(**{entry.name: getattr(config, entry.name) for entry in fields(Config)})


def of(config: Config) -> Hypothetical:
    """What the job has of it."""
    return getattr(config, GROUP, NOTHING)


def words(config: Config) -> list[str]:
    """What of it differs from nothing, as `key=value`."""
    given = ((entry.name, getattr(of(config), entry.name), entry.default) for entry in fields(Hypothetical))
    return [f"{name}={str(value).lower()}" for name, value, default in given if value != default]


def axes(config: Config, shape: Shape, devices_per_node: int) -> dict[str, tuple[object, ...]]:
    """Key -> its values, what can be run first."""
    experts = shape.experts
    return {
        f"{GROUP}.tensor_parallel_size": tuple(n for n in (1, 2, 4, 8) if n <= min(devices_per_node, shape.heads)),
        f"{GROUP}.expert_parallel_size": tuple(n for n in (1, 2, 4, 8, 16) if n == 1 or (experts and not experts % n)),
        f"{GROUP}.offload_activations": (False, True),
        f"{GROUP}.rollout_8bit": (False, True) if ITEM[config.model.dtype] == 2 else (False,),
    }


def problems(config: Config, shape: Shape) -> Iterator[str]:
    """What speaks against the degrees: tensor parallelism leaves no node, and both mappings cover a stage's ranks."""
    given, training = of(config), config.training
    tensor, expert, stages = given.tensor_parallel_size, given.expert_parallel_size, training.pipeline_parallel_size
    if config.trainer.n_gpus_per_node % tensor:
        yield f"{GROUP}.tensor_parallel_size={tensor}: needs a divisor of a node's {config.trainer.n_gpus_per_node}"
    if config.slots % (tensor * stages * training.ulysses_sequence_parallel_size):
        yield f"{GROUP}.tensor_parallel_size={tensor}: times stages and Ulysses, needs a divisor of {config.slots}"
    elif wrong := mapping_problem(config.slots // stages, expert, shape.experts):
        yield f"{GROUP}.expert_parallel_size={expert}: {wrong}"
    if tensor > 1 and config.actor.zero_stage > 1:
        yield f"{GROUP}.tensor_parallel_size={tensor}: goes with ZeRO 0 and 1, as Megatron's optimizer does"


def mapping_problem(ranks: int, expert: int, experts: int, expert_tensor: int = 1) -> str:
    """Why `expert` times `expert_tensor` parallel experts can't lie on a stage's `ranks`; nothing if they can.

    Of attention the same ranks are TP * CP * DP, of experts ETP * EP * EDP.
    """
    if expert > 1 and not experts:
        return "the model has no experts"
    if experts % expert:
        return f"needs a divisor of the model's {experts} experts"
    if ranks % (expert * expert_tensor):
        return f"times {expert_tensor} tensor-parallel shares of an expert, needs a divisor of a stage's {ranks} ranks"
    return ""


# Several ranks as one ------------------------------------------------------------------------------------------------


def as_one(config: Config) -> Config:
    """The job with one rank for each tensor-parallel group."""
    tensor = of(config).tensor_parallel_size
    return replace(config, trainer=replace(config.trainer, n_gpus_per_node=config.trainer.n_gpus_per_node // tensor))


def group_hardware(hardware: Hardware, tensor: int) -> Hardware:
    """A group's: what its devices do together."""
    names = ("pass_flops", "train_flops", "decode_flops", "bytes_per_s", "hidden_bytes_per_s", "host_bytes_per_s")
    faster = {name: getattr(hardware, name) * tensor for name in names}
    if hardware.optimizer_bytes_per_s is not None:
        faster["optimizer_bytes_per_s"] = hardware.optimizer_bytes_per_s * tensor
    links = hardware.links
    wider = replace(
        links,
        within_bytes_per_s=links.within_bytes_per_s * tensor,
        between_bytes_per_s=links.between_bytes_per_s * tensor,
        per_node=max(1, links.per_node // tensor),
    )
    return replace(hardware, **faster, links=wider)


def costs(config: Config, shapes: Mapping[str, Shape], hardware: Hardware, context: float, moved: float = 0.0) -> Costs:
    """As `costs_of`."""
    given, plain = of(config), costs_of(config, shapes, hardware, context, moved)
    if given == NOTHING:
        return plain
    tensor = given.tensor_parallel_size
    group = costs_of(as_one(config), shapes, group_hardware(hardware, tensor), context, moved)
    sent = _sent_s(config, shapes["actor"], hardware)
    found = replace(
        plain,
        score_tokens_per_s=1 / (tensor / group.score_tokens_per_s + sent),
        train_tokens_per_s=1 / (tensor / group.train_tokens_per_s + 2 * sent),
        optimizer_s=group.optimizer_s,
        step_s=group.step_s,
    )
    if given.rollout_8bit:
        shape = shapes["actor"]
        item, width = ITEM[config.model.dtype], config.rollout.tensor_model_parallel_size
        read = (sum(shape.layers) + shape.head) * item / (hardware.bytes_per_s * width)
        found = replace(found, step_base_s=found.step_base_s - read / 2, flat_batch=max(1, found.flat_batch // 2))
    return found


def _sent_s(config: Config, shape: Shape, hardware: Hardware) -> float:
    """Of a token, forward, on each of a group's devices: between products, and to its experts' ranks and back."""
    given, links, item = of(config), hardware.links, ITEM[config.model.dtype]
    tensor, expert = given.tensor_parallel_size, given.expert_parallel_size
    hidden, width = len(shape.layers) * shape.hidden * item, config.rollout.tensor_model_parallel_size
    reduced = links.all_reduce(2 * hidden, tensor) - links.all_reduce(0, tensor)
    rate = links.within_bytes_per_s if expert <= links.per_node else links.between_bytes_per_s
    exchanged = 2 * shape.experts_used * hidden * (expert - 1) / expert / rate
    return (reduced * tensor + exchanged) / width


# Memory --------------------------------------------------------------------------------------------------------------


def memory(
    config: Config,
    shapes: Mapping[str, Shape],
    budget: Budget,
    served: Mapping[str, Shape],
    hardware: Hardware,
) -> Memory:
    """As `memory_of`."""
    given, plain = of(config), memory_of(config, shapes, budget, served)
    if given == NOTHING:
        return plain
    group = memory_of(as_one(config), shapes, budget, served)
    kept = [part for part in plain.parts if part.item not in OF_RANKS]
    mine = [_on_a_rank(config, shapes, part) for part in group.parts if part.item in OF_RANKS]
    away = 0.0
    if given.offload_activations:
        share = _copied_meanwhile(config, shapes, hardware, mine)
        away = share * sum(part.size for part in mine if part.what == "activations")
        left = 1 - share + share * min(1.0, AWAY_AT_ONCE / len(shapes["actor"].layers))
        mine = [replace(part, size=part.size * left) if part.what == "activations" else part for part in mine]
    found = replace(plain, parts=(*mine, *kept), host=plain.host + away)
    return _with_small_weights(found) if given.rollout_8bit else found


def _on_a_rank(config: Config, shapes: Mapping[str, Shape], part: Part) -> Part:
    """A group's part on each of its ranks, which hold a share of the experts."""
    given, zero = of(config), config.actor.zero_stage
    size = part.size if part.what == "reduction buffer" else part.size / given.tensor_parallel_size
    divided = {"parameters": 3, "gradients": 2, "optimizer": 1}  # from this stage of ZeRO on, experts or not
    if part.role in shapes and zero < divided.get(part.what, 0):
        size *= 1 - shapes[part.role].of_experts * (1 - 1 / given.expert_parallel_size)
    return replace(part, size=size)


def _copied_meanwhile(config: Config, shapes: Mapping[str, Shape], hardware: Hardware, parts: Sequence[Part]) -> float:
    """Share of what a forward pass keeps that reaches the host while the pass lasts."""
    kept = sum(part.size for part in parts if part.what == "activations") / micro_batch_tokens(config, learns=True)
    shape = shapes["actor"]
    token_s = 2 * (shape.passed + shape.head) / of(config).tensor_parallel_size / hardware.train_flops
    return min(1.0, token_s * hardware.host_bytes_per_s / kept) if kept else 0.0


def _with_small_weights(found: Memory) -> Memory:
    """Half of the engine's weights go to its cache, where that takes what is left of its share of a GPU."""
    weights = next(part.size for part in found.parts if part.item == Item.ENGINE_WEIGHTS)
    cache = next(part.size for part in found.parts if part.what == "KV cache")
    more = weights / 2 if found.budget.device == "cuda" and cache else 0.0
    sizes = {Item.ENGINE_WEIGHTS: weights / 2, "KV cache": cache + more}
    parts = tuple(replace(part, size=sizes.get(part.item, sizes.get(part.what, part.size))) for part in found.parts)
    return replace(found, parts=parts, kv_tokens=int(found.kv_tokens * (1 + more / cache)) if cache else 0)
