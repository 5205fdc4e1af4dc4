"""Estimate the memory of a device in each phase, as a pure function of configuration, shapes and device memory.

The backend's `model_memory` estimates the models; the engine's memory follows vLLM 0.32. Sizes are bytes of the fullest
device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from rlfuse.config.quantization import EXPERTS_ONLY
from rlfuse.config.rollout import HISTORY
from rlfuse.config.schema import Config
from rlfuse.engines.memory.activations import (
    PASS_OF,
    activations,
    embeddings,
    graph_bytes,
    heap_fragmentation,
    largest_activation_plan,
    parts_on,
)
from rlfuse.engines.memory.model_memory import ITEM, STATES, ModelMemory, Part
from rlfuse.engines.memory.model_sizes import Shape
from rlfuse.engines.memory.residency import MODELS, PHASES, TRAINING, Item, contents
from rlfuse.engines.trainer.activation_placement import Place
from rlfuse.engines.trainer.backends import model_memory
from rlfuse.engines.vllm.gpu_settings import gpu_arguments
from rlfuse.engines.vllm.kv_cache import HEADROOM, HISTORY_TOKENS, UNKNOWN, Bounds, max_kv_cache_bytes, size_kv_cache
from rlfuse.engines.weights.sync import resolve_transfer

GIB, MIB = 1 << 30, 1 << 20
FAMILY_TOKENS = 768  # default maximum per frame (VideoLLaMA3, Qwen2.5-VL)
PROCESS = 600 * MIB  # additional memory of each process: a CUDA context, or Python with torch
SERVED_BYTES = 8  # per token of the vocabulary and sequence, while vLLM samples: float32 logits and log-probs
CPU_STEP_TOKENS = 2048  # maximum tokens of an engine step on CPUs: vLLM's default inside another program
CPU_WORKER = 60 * MIB  # an engine process on CPUs, in addition to PROCESS (tests/benchmarks/memory_peaks.py)
GRAPHS = 1 * GIB  # a sleeping engine's CUDA graphs and NCCL buffers; not measured
NCCL = 1 * GIB  # buffers of a rank's communicators; not measured
SCORED_TOKENS, SCORER = (
    16384,
    GIB + 256 * MIB,
)  # tokens of a step and work space of a reward model in vLLM; not measured
P2P_BUFFERS = 1 * GIB  # a pipeline rank's kernels and NCCL buffers of point-to-point groups; not measured


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory of a device, `cuda` or `cpu`; on CPU hosts the slot's share of the host memory."""

    device: str
    bytes: int
    host: int | None = None  # bytes of a node's host memory for offloaded data; None: unlimited


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes transferred between a GPU and its host."""

    all: float = 0.0
    optimizers: float = 0.0  # of these, data that only optimizer steps use


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory plan of the fullest device."""

    parts: tuple[Part, ...]
    budget: Budget
    kv_tokens: int  # capacity of an engine's cache on all its devices; 0 or less: it does not fit
    host: float  # bytes of pinned host memory per slot for offloaded models and activations
    optimizers_alone: bool = False  # each optimizer is on the device only in its steps and for checkpoints
    kv_cache_bytes: int | None = None  # set for each device of an engine; None: vLLM decides
    alternates: bool = True  # engine and ranks alternate on the device; False: both stay
    generates: bool = True  # False: an offline task, without engines

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases in order; a single one without engines, and on CPU hosts, where engines and ranks stay resident."""
        return PHASES if self.budget.device == "cuda" and self.generates else (TRAINING,)

    def of(self, phase: str) -> list[Part]:
        if self.budget.device == "cpu" or not self.generates:
            return list(self.parts)
        there = contents(self.optimizers_alone, self.alternates)[phase]
        return [part for part in self.parts if part.item in there]

    def total(self, phase: str) -> float:
        return sum(part.size for part in self.of(phase))

    @property
    def moved(self) -> Moved:
        """Bytes that a slot transfers between GPU and host when it changes roles."""
        if self.budget.device == "cpu":
            return Moved()
        optimizers = self.size_of({Item.OPTIMIZER})
        if self.alternates:
            return Moved(self.size_of(MODELS | {Item.ENGINE_WEIGHTS}), optimizers)
        return Moved(optimizers, optimizers) if self.optimizers_alone else Moved()

    def size_of(self, items: Set[Item]) -> float:
        return sum(part.size for part in self.parts if part.item in items)

    @property
    def tightest(self) -> str:
        return max(self.phases, key=self.total)


def memory_of(
    config: Config,
    shapes: Mapping[str, Shape],
    budget: Budget,
    served: Mapping[str, Shape] | None = None,
    models: Sequence[Part] = (),
) -> Memory:
    """Return the memory plan of a job. `shapes`: of `actor`, and of `critic` and `reference` if the job has them;
    `served`: of reward models; `models`: result of `models_of`, if already computed."""
    models = models or models_of(config, shapes, budget.device)
    if config.trainer.is_offline:
        return _offline_memory(config, shapes, budget, models)
    engine, kv_tokens, bounds = _engine(config, shapes["actor"], budget)
    parts = [*models, *engine, *_residents(config, shapes, budget, served or {})]
    if budget.device == "cuda":
        parts += _transfer_buffers(config, shapes["actor"])
    host, recorded = _host(config, shapes, budget.device), graph_bytes(config, shapes, budget.device)
    graphs = [Part("actor", "CUDA graphs", recorded, Item.PARAMETERS)] if recorded else []
    alone, wanted = config.actor.optimizer_residency == "step", config.rollout.free_cache_engine
    stay = Memory((*parts, *graphs), budget, kv_tokens, host, alone, bounds.alongside_ranks, alternates=False)
    fits = bounds.alongside_ranks is not None and stay.total(stay.tightest) <= (1 - HEADROOM) * budget.bytes
    if budget.device == "cuda" and (fits if wanted is None else not wanted):
        return stay
    # vLLM pins each weight allocation separately, and torch rounds pinned blocks up to a power of two.
    away = stay.size_of(MODELS) - recorded + 2 * stay.size_of({Item.ENGINE_WEIGHTS}) if budget.device == "cuda" else 0.0
    return replace(stay, parts=tuple(parts), host=host + away, kv_cache_bytes=bounds.alternating, alternates=True)


def _offline_memory(config: Config, shapes: Mapping[str, Shape], budget: Budget, models: Sequence[Part]) -> Memory:
    """Return the memory plan of trainer ranks alone."""
    parts, host = [*models, Part("processes", "base memory", PROCESS, Item.RESIDENTS)], 0.0
    if budget.device == "cuda":
        host, recorded = _host(config, shapes, budget.device), graph_bytes(config, shapes, budget.device)
        parts += [Part("actor", "CUDA graphs", recorded, Item.PARAMETERS)] * bool(recorded)
        parts += [Part("processes", "NCCL's buffers", NCCL, Item.RESIDENTS)] * (config.slots > 1)
    return Memory(tuple(parts), budget, 0, host, alternates=False, generates=False)


def _residents(config: Config, shapes: Mapping[str, Shape], budget: Budget, served: Mapping[str, Shape]) -> list[Part]:
    found, tower = [], shapes["actor"].tower
    if tower:
        found.append(Part("tower", "encoders' parameters", tower * ITEM[config.model.dtype], Item.RESIDENTS))
    here = -(-len(served) // config.slots)  # on the slot with the most
    if largest := sorted(served.values(), key=lambda shape: -shape.parameters)[:here]:
        item = ITEM[config.reward.model_dtype]
        weights = sum(each.parameters for each in largest) * item
        found.append(Part("reward models", "parameters", weights, Item.RESIDENTS))
        work = sum(_layer_work_space(each, SCORED_TOKENS, item) + SCORER for each in largest)
        found.append(Part("reward models", "work space", work, Item.RESIDENTS))
    count = 2 + bool(tower) + here
    found.append(Part("processes", "base memory", count * PROCESS, Item.RESIDENTS))
    if budget.device == "cuda":
        found.append(Part("engine", "graphs and buffers", GRAPHS, Item.RESIDENTS))
        if config.slots > 1:
            found.append(Part("processes", "NCCL's buffers", NCCL, Item.RESIDENTS))
        if config.training.pipeline_parallel_size > 1:
            found.append(Part("processes", "kernels and buffers", P2P_BUFFERS, Item.RESIDENTS))
    return found


def _transfer_buffers(config: Config, shape: Shape) -> list[Part]:
    """Return the buckets of a weight push, one more if ranks gather them, and the engine layer that is being loaded."""
    item = ITEM[config.model.dtype]
    layer = max(shape.layers) * item
    bucket = max(config.rollout.update_weights_bucket_mb * MIB, layer)
    ends = max(shape.embedding, shape.head) * item
    if config.training.vocabulary_parallel:
        bucket = max(bucket, shape.head * item)
    gathered = config.sharded_weights or config.mesh.tp > 1 or config.training.vocabulary_parallel
    transfer = resolve_transfer(config.rollout.weight_transfer, "cuda", config.training.pipeline_parallel_size)
    at_a_time = 3 if transfer == "ipc" else 1  # loaded, still mapped by the engine, and packed ahead
    return [
        Part("actor", "bucket of weights", bucket * (at_a_time + gathered), Item.BUCKETS),
        Part("engine", "layer being loaded", max(layer, ends) / config.rollout.tensor_model_parallel_size, Item.LAYER),
    ]


def models_of(config: Config, shapes: Mapping[str, Shape], device: str) -> list[Part]:
    """Return the models' parts on the pipeline's fullest position, where there is one, independent of the engine's
    cache and number of sequences."""
    stages, width = config.training.pipeline_parallel_size, config.training.tensor_model_parallel_size
    shapes = {role: shape.share(width) for role, shape in shapes.items()}
    found = [_position(config, shapes, device, position) for position in range(stages)]
    return max(found, key=lambda each: sum(part.size for part in each))


def _position(config: Config, shapes: Mapping[str, Shape], device: str, position: int) -> list[Part]:
    stages, memory = config.mesh.pp, model_memory(config)(config, config.mesh.copies, device)
    found = [] if config.video.freeze_vision_tower else _trained_tower(config, shapes["actor"].tower, memory)
    work: dict[str, float] = {}
    steps: list[list[Part]] = []
    for role, shape in shapes.items():
        held = parameters_on(config, shape, role, position)
        kind = Item.REFERENCE if role == "reference" else Item.PARAMETERS
        found.append(Part(role, "parameters", memory.parameters(held), kind))
        if role == "reference":
            if stages == 1 and shape is not shapes["actor"]:
                work[role] = activations(config, shape, role, device)
            continue
        found += memory.states(role, held)
        alone = _step_optimizer(config, role, found, device)
        found += memory.buffers(role, held)
        if phases := memory.in_step(role, held):
            steps += [*phases[:-1], [*phases[-1], *alone]]
        work[role] = activations(config, shape, role, device, position)
    if not config.video.freeze_vision_tower:
        steps.append([Part("tower", "activations", _tower_work_space(config, shapes["actor"]), Item.ACTIVATIONS)])
    passes = _busiest_activations(config, work)
    if device == "cpu":
        between = [(part, heap_fragmentation(config, shapes[part.role], part.role, part.size)) for part in passes]
        passes += [Part(part.role, "heap fragmentation", size, part.item) for part, size in between]
    if shapes["actor"].embedded:
        size = embeddings(config, shapes["actor"])
        passes.append(Part("actor", "visual embeddings", size, Item.ACTIVATIONS))
    passes += memory.in_passes(shapes)
    # Optimizer steps and vision tower units run after activations are freed, one after the other.
    return [*found, *max([passes, *steps], key=lambda each: sum(part.size for part in each))]


def _step_optimizer(config: Config, role: str, found: list[Part], device: str) -> list[Part]:
    """Return the optimizer memory of the role, if it is only resident in its steps."""
    if config.actor.optimizer_residency != "step" or device == "cpu":
        return []
    mine = {role, "tower"} if role == "actor" else {role}  # a trained tower is stepped with the actor
    size = sum(part.size for part in found if part.role in mine and part.item == Item.OPTIMIZER)
    return [Part(role, "optimizer, in its step", size, Item.ACTIVATIONS)]


def _trained_tower(config: Config, size: int, memory: ModelMemory) -> list[Part]:
    """Return the parts of a trained tower: the backend's copy, the running copy, accumulated gradients, and the initial
    weights. See `engines.trainer.vision_tower`."""
    each = ITEM[config.model.dtype] * (1 + config.uses_reference) + 4
    copies = Part("tower", "trained copies", memory.parameters(size) + each * size, Item.PARAMETERS)
    return [copies, *memory.states("tower", size)]


def _tower_work_space(config: Config, shape: Shape) -> float:
    """Return the activation bytes of a unit of the largest frames, and of its gradient without accumulation."""
    video, item = config.video, ITEM[config.model.dtype]
    most = {"family": FAMILY_TOKENS, "seed_vl": max(video.levels), "fixed": video.tokens_per_frame}
    tokens = most[video.sampling]
    return shape.tower_activation_bytes(tokens, item) + shape.tower * item


def _busiest_activations(config: Config, work: Mapping[str, float]) -> list[Part]:
    """Return the activations of the busiest model, or of all in a fused schedule."""
    both = config.training.pipeline_parallel_size > 1 and config.fusion.training == "fused"
    busiest = max(work, key=lambda role: work[role])
    return [Part(role, "activations", size, Item.ACTIVATIONS) for role, size in work.items() if both or role == busiest]


def parameters_on(config: Config, shape: Shape, role: str, position: int) -> int:
    """Return the number of parameters of the model's stages on this device."""
    if config.training.pipeline_parallel_size == 1:
        return shape.parameters
    return sum(
        sum(shape.layers[i] for i in part.layers)
        + (shape.embedding if part.first else 0)
        + (shape.hidden if part.last else 0)
        + (shape.head // part.head[1] if part.head else 0)
        for part in parts_on(config, shape, role, position)
    )


def _engine(config: Config, shape: Shape, budget: Budget) -> tuple[list[Part], int, Bounds]:
    """Return the parts of an engine on one of its devices, the tokens that its cache holds, and the cache's bounds."""
    item, width = ITEM[config.model.dtype], config.rollout.tensor_model_parallel_size
    weights = ((shape.parameters + shape.tower) * item - quantization_savings(config, shape)) / width
    longest = config.data.max_prompt_length + config.data.max_response_length
    given = gpu_arguments(config.rollout, longest)
    if budget.device == "cpu":
        given["max_num_batched_tokens"] = min(CPU_STEP_TOKENS, given["max_num_batched_tokens"])
    given |= config.rollout.engine_kwargs
    # Some video models process a clip's whole embedding in one step.
    tokens = max(given["max_num_batched_tokens"], longest if shape.tower else 0)
    sequences = given.get("max_num_seqs", config.rollout.max_num_seqs)
    work = sequences * shape.vocabulary * SERVED_BYTES / width
    if config.rollout.draft == HISTORY:  # logits of drafts
        work += min(tokens, sequences * HISTORY_TOKENS) * shape.vocabulary * item / width
    work += _layer_work_space(shape, tokens, item, width)
    if shape.embedded:  # in vLLM's encoder cache, and in the inputs of the layers that receive it
        work += tokens * (2 * shape.embedded - shape.hidden) * item
    found = [Part("engine", "parameters", weights, Item.ENGINE_WEIGHTS)]
    if budget.device == "cpu":
        cache = config.rollout.kv_cache_memory_mb * MIB / width
        bounds = UNKNOWN
        found += _packing_overhead(shape, item / width)
    else:
        share = given["gpu_memory_utilization"] * budget.bytes - weights - work
        cache, bounds = size_kv_cache(share, max_kv_cache_bytes(config, shape, item, tokens), given)
    found += [
        Part("engine", "KV cache", max(0.0, cache), Item.KV_CACHE),
        Part("engine", "work space", work, Item.KV_CACHE),
    ]
    sample = shape.cache.bytes_of(longest, item, width, tokens)
    return found, int(cache * longest // sample), bounds


def quantization_savings(config: Config, shape: Shape) -> float:
    """Return the bytes of an engine's weights that `rollout.quantization` saves, on all its devices. vLLM does not
    quantize embedding and head; norms and scales are negligible."""
    share = {None: 0.0, EXPERTS_ONLY: shape.expert_share}.get(config.rollout.quantization, 1.0)
    return (ITEM[config.model.dtype] - 1) * share * sum(shape.layers)


def _packing_overhead(shape: Shape, item: float) -> list[Part]:
    """Return the memory added by vLLM's `dispatch_cpu_unquantized_gemm`, which packs all weights. Embedding and head
    are kept in addition to their packed copies, even if tied, and glibc keeps the memory used for packing one of
    them."""
    packed, room = shape.embedding + shape.head, max(shape.embedding, shape.head)
    return [
        Part("engine", "embedding and head, packed", packed * item, Item.RESIDENTS),
        Part("engine", "heap memory of packing", room * item, Item.RESIDENTS),
        Part("engine", "worker code and buffers", CPU_WORKER, Item.RESIDENTS),
    ]


def _layer_work_space(shape: Shape, tokens: int, item: int, width: int = 1) -> float:
    """Return the bytes of a layer in a pass without gradients."""
    return tokens * (4 * shape.hidden + 3 * shape.intermediate / width) * item


def _host(config: Config, shapes: Mapping[str, Shape], device: str) -> float:
    """Return the maximum pinned memory of offloaded activations and optimizers."""
    if device == "cpu":
        return 0.0
    away = 0.0
    if config.model.enable_activation_offload and config.training.pipeline_parallel_size == 1:
        learning = {role: shape for role, shape in shapes.items() if role in PASS_OF}
        away += max(
            largest_activation_plan(config, shape, role, device).offloaded_bytes(Place.HOST)
            for role, shape in learning.items()
        )
    if config.actor.offload_optimizer:
        width = config.training.tensor_model_parallel_size
        trained = sum(shape.share(width).parameters for role, shape in shapes.items() if role != "reference")
        away += (4 + STATES) * trained * width / config.slots
    return away
