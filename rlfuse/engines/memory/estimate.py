"""What a device holds in each phase, and whether it fits: a pure function of configuration, shapes and device memory.

The backend's `model_memory` estimates the models; an engine's memory is as in vLLM 0.32. Bytes are of the
fullest device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from rlfuse.config.quantization import EXPERTS_ONLY
from rlfuse.config.schema import Config
from rlfuse.engines.memory.activations import PASS_OF, activations, embeddings, graph_bytes, holes, leaves, parts_on
from rlfuse.engines.memory.model_memory import ITEM, STATES, ModelMemory, Part
from rlfuse.engines.memory.model_sizes import Shape
from rlfuse.engines.memory.residency import MODELS, PHASES, TRAINING, Item, contents
from rlfuse.engines.trainer.activation_placement import Place
from rlfuse.engines.trainer.backends import model_memory
from rlfuse.engines.vllm.gpu_settings import gpu_arguments
from rlfuse.engines.vllm.kv_cache import HEADROOM, UNKNOWN, Bounds, max_kv_cache_bytes, size_kv_cache
from rlfuse.engines.weights.sync import resolve_transfer

GIB, MIB = 1 << 30, 1 << 20
FAMILY_TOKENS = 768  # per frame at most (VideoLLaMA3, Qwen2.5-VL), if unknown
PROCESS = 600 * MIB  # what each process of a slot takes besides: a CUDA context, or Python with torch
SERVED_BYTES = 8  # per word and sequence, while vLLM samples: logits in float32, and their log-probs
CPU_STEP_TOKENS = 2048  # of an engine on CPUs in one step at the most, as vLLM has it inside of another program
CPU_WORKER = 60 * MIB  # an engine's process on CPUs above PROCESS (tests/benchmarks/memory_peaks.py)
GRAPHS = 1 * GIB  # a sleeping engine's CUDA graphs and NCCL buffers; not measured
NCCL = 1 * GIB  # what a rank's communicators keep. Likewise.
SCORED_TOKENS, SCORER = 16384, GIB + 256 * MIB  # of a reward model in vLLM; not measured
P2P_BUFFERS = 1 * GIB  # a pipeline rank's kernels and NCCL buffers of lanes; not measured


@dataclass(frozen=True, slots=True)
class Budget:
    """A device: `cuda` or `cpu`, and its bytes; on CPU hosts the slot's share of the memory."""

    device: str
    bytes: int
    host: int | None = None  # bytes of a node's own memory for what is off its GPUs; None: as many as it takes


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes on their way between a GPU and its host."""

    all: float = 0.0
    optimizers: float = 0.0  # of these, what only optimizer steps read


@dataclass(frozen=True, slots=True)
class Memory:
    """The fullest device."""

    parts: tuple[Part, ...]
    budget: Budget
    kv_tokens: int  # that an engine's cache holds, all its devices together; 0 or less: none fits
    host: float  # bytes of pinned memory per slot while models or activations are off the GPU
    optimizers_alone: bool = False  # each optimizer is on the device in its own steps only, and for checkpoints
    kv_cache_bytes: int | None = None  # given to each device of an engine; None: vLLM decides
    alternates: bool = True  # engine and ranks take turns on the device; False: both stay there

    @property
    def phases(self) -> tuple[str, ...]:
        """In the order in which they happen; one on CPU hosts, where nothing takes turns."""
        return PHASES if self.budget.device == "cuda" else (TRAINING,)

    def of(self, phase: str) -> list[Part]:
        if self.budget.device == "cpu":
            return list(self.parts)
        there = contents(self.optimizers_alone, self.alternates)[phase]
        return [part for part in self.parts if part.item in there]

    def total(self, phase: str) -> float:
        return sum(part.size for part in self.of(phase))

    @property
    def moved(self) -> Moved:
        """What a slot moves between a GPU and its host to change roles."""
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
    """`shapes`: of `actor`, and of `critic` and `reference` where the job has them; `served`: of reward models;
    `models`: as `models_of` has them, where that was asked before."""
    engine, kv_tokens, bounds = _engine(config, shapes["actor"], budget)
    models = models or models_of(config, shapes, budget.device)
    parts = [*models, *engine, *_residents(config, shapes, budget, served or {})]
    if budget.device == "cuda":
        parts += _on_their_way(config, shapes["actor"])
    host, recorded = _host(config, shapes, budget.device), graph_bytes(config, shapes, budget.device)
    graphs = [Part("actor", "CUDA graphs", recorded, Item.PARAMETERS)] if recorded else []
    alone, wanted = config.actor.optimizer_residency == "step", config.rollout.free_cache_engine
    stay = Memory((*parts, *graphs), budget, kv_tokens, host, alone, bounds.alongside_ranks, alternates=False)
    fits = bounds.alongside_ranks is not None and stay.total(stay.tightest) <= (1 - HEADROOM) * budget.bytes
    if budget.device == "cuda" and (fits if wanted is None else not wanted):
        return stay
    # vLLM pins each allocation of an engine's weights for itself, which torch rounds up to a power of two.
    away = stay.size_of(MODELS) - recorded + 2 * stay.size_of({Item.ENGINE_WEIGHTS}) if budget.device == "cuda" else 0.0
    return replace(stay, parts=tuple(parts), host=host + away, kv_cache_bytes=bounds.alternating, alternates=True)


def _residents(config: Config, shapes: Mapping[str, Shape], budget: Budget, served: Mapping[str, Shape]) -> list[Part]:
    found, tower = [], shapes["actor"].tower
    if tower:
        found.append(Part("tower", "encoders' parameters", tower * ITEM[config.model.dtype], Item.RESIDENTS))
    here = -(-len(served) // config.slots)  # on the slot that has the most of them
    if largest := sorted(served.values(), key=lambda shape: -shape.parameters)[:here]:
        item = ITEM[config.reward.model_dtype]
        weights = sum(each.parameters for each in largest) * item
        found.append(Part("reward models", "parameters", weights, Item.RESIDENTS))
        work = sum(_layer_at_work(each, SCORED_TOKENS, item) + SCORER for each in largest)
        found.append(Part("reward models", "work space", work, Item.RESIDENTS))
    count = 2 + bool(tower) + here
    found.append(Part("processes", "of their own", count * PROCESS, Item.RESIDENTS))
    if budget.device == "cuda":
        found.append(Part("engine", "CUDA graphs and buffers", GRAPHS, Item.RESIDENTS))
        if config.slots > 1:
            found.append(Part("processes", "NCCL's buffers", NCCL, Item.RESIDENTS))
        if config.training.pipeline_parallel_size > 1:
            found.append(Part("processes", "kernels and lanes", P2P_BUFFERS, Item.RESIDENTS))
    return found


def _on_their_way(config: Config, shape: Shape) -> list[Part]:
    """Buckets, one more where ranks gather it; and the layer that the engine loads beside what it replaces."""
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
    """Return the models' parts on the pipeline's fullest position, where there is one, whatever an engine's cache is
    and how many sequences it runs."""
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
        alone = _in_its_step(config, role, found, device)
        found += memory.buffers(role, held)
        if phases := memory.in_step(role, held):
            steps += [*phases[:-1], [*phases[-1], *alone]]
        work[role] = activations(config, shape, role, device, position)
    if not config.video.freeze_vision_tower:
        steps.append([Part("tower", "activations", _tower_at_work(config, shapes["actor"]), Item.ACTIVATIONS)])
    passes = _at_work(config, work)
    if device == "cpu":
        between = [(part, holes(config, shapes[part.role], part.role, part.size)) for part in passes]
        passes += [Part(part.role, "heap fragmentation", size, part.item) for part, size in between]
    if shapes["actor"].embedded:
        size = embeddings(config, shapes["actor"])
        passes.append(Part("actor", "visual embeddings", size, Item.ACTIVATIONS))
    passes += memory.in_passes(shapes)
    # What optimizers read, and a tower's units, come when activations have gone, one after the other.
    return [*found, *max([passes, *steps], key=lambda each: sum(part.size for part in each))]


def _in_its_step(config: Config, role: str, found: list[Part], device: str) -> list[Part]:
    """What only steps of the role read, where that comes when activations have gone."""
    if config.actor.optimizer_residency != "step" or device == "cpu":
        return []
    mine = {role, "tower"} if role == "actor" else {role}  # a tower that learns is stepped with the actor
    size = sum(part.size for part in found if part.role in mine and part.item == Item.OPTIMIZER)
    return [Part(role, "optimizer, in its step", size, Item.ACTIVATIONS)]


def _trained_tower(config: Config, size: int, memory: ModelMemory) -> list[Part]:
    """A tower that learns: as the backend holds it, as it runs, its sums of gradients, and as the run began. See
    `engines.trainer.vision_tower`."""
    each = ITEM[config.model.dtype] * (1 + config.uses_reference) + 4
    copies = Part("tower", "trained copies", memory.parameters(size) + each * size, Item.PARAMETERS)
    return [copies, *memory.states("tower", size)]


def _tower_at_work(config: Config, shape: Shape) -> float:
    """Of a unit of the largest frames, and of its gradient, whose sums are counted elsewhere."""
    video, item = config.video, ITEM[config.model.dtype]
    most = {"family": FAMILY_TOKENS, "seed_vl": max(video.levels), "fixed": video.tokens_per_frame}
    tokens = most[video.sampling]
    return shape.tower_activation_bytes(tokens, item) + shape.tower * item


def _at_work(config: Config, work: Mapping[str, float]) -> list[Part]:
    """Activations: of one model at a time; in a fused schedule of both."""
    both = config.training.pipeline_parallel_size > 1 and config.fusion.training == "fused"
    busiest = max(work, key=lambda role: work[role])
    return [Part(role, "activations", size, Item.ACTIVATIONS) for role, size in work.items() if both or role == busiest]


def parameters_on(config: Config, shape: Shape, role: str, position: int) -> int:
    """Of the model's stages on this device."""
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
    """Parts of an engine on one of its devices, the tokens that its cache holds, and the cache's bounds."""
    item, width = ITEM[config.model.dtype], config.rollout.tensor_model_parallel_size
    weights = ((shape.parameters + shape.tower) * item - quantization_savings(config, shape)) / width
    longest = config.data.max_prompt_length + config.data.max_response_length
    given = gpu_arguments(config.rollout, longest)
    if budget.device == "cpu":
        given["max_num_batched_tokens"] = min(CPU_STEP_TOKENS, given["max_num_batched_tokens"])
    given |= config.rollout.engine_kwargs
    # Some video models take a clip's whole embedding in one step.
    tokens = max(given["max_num_batched_tokens"], longest if shape.tower else 0)
    work = given.get("max_num_seqs", config.rollout.max_num_seqs) * shape.vocabulary * SERVED_BYTES / width
    work += _layer_at_work(shape, tokens, item, width)
    if shape.embedded:  # in vLLM's encoder cache, and in what the layers that are fed read from
        work += tokens * (2 * shape.embedded - shape.hidden) * item
    found = [Part("engine", "parameters", weights, Item.ENGINE_WEIGHTS)]
    if budget.device == "cpu":
        cache = config.rollout.kv_cache_memory_mb * MIB / width
        bounds = UNKNOWN
        found += _beside_on_cpus(shape, item / width)
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
    """Bytes of an engine's weights that `rollout.quantization` saves, on all its devices together. vLLM leaves
    embedding and head as they are; a layer's norms, and the scales, are too small to count."""
    share = {None: 0.0, EXPERTS_ONLY: shape.expert_share}.get(config.rollout.quantization, 1.0)
    return (ITEM[config.model.dtype] - 1) * share * sum(shape.layers)


def _beside_on_cpus(shape: Shape, item: float) -> list[Part]:
    """What vLLM's `dispatch_cpu_unquantized_gemm` leaves, which packs all weights: embedding and head stay beside their
    packed copies, even where the two are one tensor, and glibc keeps the room that packing one of them took."""
    packed, room = shape.embedding + shape.head, max(shape.embedding, shape.head)
    return [
        Part("engine", "embedding and head, packed", packed * item, Item.RESIDENTS),
        Part("engine", "left in the heap by packing", room * item, Item.RESIDENTS),
        Part("engine", "code and buffers of its worker", CPU_WORKER, Item.RESIDENTS),
    ]


def _layer_at_work(shape: Shape, tokens: int, item: int, width: int = 1) -> float:
    """Bytes while a layer runs without a backward pass to come."""
    return tokens * (4 * shape.hidden + 3 * shape.intermediate / width) * item


def _host(config: Config, shapes: Mapping[str, Shape], device: str) -> float:
    """Pinned memory at most of offloaded activations and optimizers."""
    if device == "cpu":
        return 0.0
    away = 0.0
    if config.model.enable_activation_offload and config.training.pipeline_parallel_size == 1:
        learning = {role: shape for role, shape in shapes.items() if role in PASS_OF}
        away += max(leaves(config, shape, role, device).offloaded_bytes(Place.HOST) for role, shape in learning.items())
    if config.actor.offload_optimizer:
        width = config.training.tensor_model_parallel_size
        trained = sum(shape.share(width).parameters for role, shape in shapes.items() if role != "reference")
        away += (4 + STATES) * trained * width / config.slots
    return away
