"""What lies on one device, and whether it fits: pure functions of a configuration, shapes and the device's memory.

Role: `rlfuse plan` shows the parts and what is wrong with them. On GPUs the slot's engine and its rank take turns, so
each phase has a sum of its own: of the parts that `residency` finds there. On CPU hosts nothing leaves, and all parts
are one sum. Sources: ZeRO's states as in Rajbhandari et al. 2020 (arXiv 1910.02054) and in DeepSpeed 0.19; what an
engine takes as in vLLM 0.32.
Invariants: bytes are of the fullest device; every part that a phase's sum has is listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlfuse.cluster import cuda
from rlfuse.config.schema import Config
from rlfuse.engines.trainer.gradient_memory import REDUCED, gradient_bytes
from rlfuse.planning.activations import activations, stage_of
from rlfuse.planning.model_sizes import Shape
from rlfuse.planning.residency import MODELS, PHASES, TRAINING, Item, contents

GIB, MIB = 1 << 30, 1 << 20
ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
STATES = 8
"""AdamW's two moments, in float32."""
FAMILY_TOKENS = 768
"""Of a frame, at most, as the processors of VideoLLaMA3 and Qwen2.5-VL have it where a checkpoint does not say."""
REDUCED_WHOLE = 500_000_000
"""Gradient elements that DeepSpeed reduces at a time without ZeRO, whatever its configuration says."""
LIVE = 1_000_000_000
"""Parameters that ZeRO 3 holds gathered at a time, at the most."""
PROCESS = 600 * MIB
"""What each process of a slot takes besides: a CUDA context, or Python with torch."""
SERVED_BYTES = 8
"""Per word and sequence, while vLLM samples: logits in float32, and their log-probs."""
CPU_STEP_TOKENS = 2048
"""Of an engine on CPUs in one step at the most, as vLLM has it inside of another program."""
CPU_WORKER = 60 * MIB
"""What an engine's process on CPUs has above PROCESS before its model comes. Measured as HOLES."""
GRAPHS = 1 * GIB
"""What an engine that sleeps keeps: CUDA graphs and NCCL's buffers. An allowance, not measured."""
NCCL = 1 * GIB
"""What a rank's communicators keep. Likewise."""
SCORED_TOKENS, SCORER = 16384, GIB + 256 * MIB
"""A reward model's tokens at a time; its CUDA graphs and KV cache by default, where vLLM runs it. Likewise."""
HOLES = 1 / 2
"""Of activations on CPU hosts: what glibc keeps of freed blocks that the next do not fit (`rank_group.HOST_MEMORY`).
Measured by `tests/benchmarks/memory_peaks.py`."""
LANES = 1 * GIB
"""What a rank of a pipeline has besides: kernels loaded at its start, NCCL's buffers of its lanes. Likewise."""


@dataclass(frozen=True, slots=True)
class Part:
    """Something that lies on the device."""

    role: str
    """`actor`, `critic`, `reference`, `engine`, `tower`, `reward models` or `processes`."""
    what: str
    size: float
    """Bytes."""
    item: Item
    """When it is there."""


@dataclass(frozen=True, slots=True)
class Budget:
    """A device: `cuda` or `cpu`, and its bytes; on CPU hosts the slot's share of the memory."""

    device: str
    bytes: int
    host: int | None = None
    """Bytes of a node's own memory for what is off its GPUs; None: as many as it takes."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The fullest device."""

    parts: tuple[Part, ...]
    budget: Budget
    kv_tokens: int
    """That an engine's cache holds, all its devices together; 0 or less: none fits."""
    host: float
    """Bytes of pinned memory per slot while models are off a GPU, and of offloaded optimizers."""

    @property
    def phases(self) -> tuple[str, ...]:
        """In the order in which they happen; one on CPU hosts, where nothing takes turns."""
        return PHASES if self.budget.device == "cuda" else (TRAINING,)

    def of(self, phase: str) -> list[Part]:
        """Return the parts that are there in a phase."""
        there = contents()[phase] if self.budget.device == "cuda" else set(Item)
        return [part for part in self.parts if part.item in there]

    def total(self, phase: str) -> float:
        """Sum up the bytes of a phase."""
        return sum(part.size for part in self.of(phase))

    @property
    def moved(self) -> float:
        """Bytes that a slot moves between a GPU and its host to change roles."""
        if self.budget.device == "cpu":
            return 0.0
        return sum(part.size for part in self.parts if part.item in MODELS or part.item == Item.ENGINE_WEIGHTS)

    @property
    def tightest(self) -> str:
        """The phase that needs the most."""
        return max(self.phases, key=self.total)


def memory_of(
    config: Config, shapes: Mapping[str, Shape], budget: Budget, served: Mapping[str, Shape] | None = None
) -> Memory:
    """`shapes`: of `actor`, and of `critic` and `reference` where the job has them; `served`: of reward models."""
    engine, kv_tokens = _engine(config, shapes["actor"], budget)
    parts = [*_models(config, shapes, budget.device), *engine, *_residents(config, shapes, budget, served or {})]
    if budget.device == "cuda":
        parts += _on_their_way(config, shapes["actor"])
    return Memory(tuple(parts), budget, kv_tokens, _host(config, shapes, parts, budget.device))


def _residents(config: Config, shapes: Mapping[str, Shape], budget: Budget, served: Mapping[str, Shape]) -> list[Part]:
    """What never leaves: encoder ranks, reward models, and each process's own."""
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
        found.append(Part("engine", "what does not sleep", GRAPHS, Item.RESIDENTS))
        if config.slots > 1:
            found.append(Part("processes", "NCCL's buffers", NCCL, Item.RESIDENTS))
        if config.training.pipeline_parallel_size > 1:
            found.append(Part("processes", "kernels and lanes", LANES, Item.RESIDENTS))
    return found


def _on_their_way(config: Config, shape: Shape) -> list[Part]:
    """A bucket, once more where ZeRO 3 gathers it; and the layer that the engine loads beside what it replaces."""
    item = ITEM[config.model.dtype]
    layer = max(shape.layers) * item
    bucket = max(config.rollout.update_weights_bucket_mb * MIB, layer)
    ends = max(shape.embedding, shape.head) * item
    return [
        Part("actor", "bucket of weights", bucket * (2 if config.actor.zero_stage == 3 else 1), Item.BUCKETS),
        Part("engine", "layer being loaded", max(layer, ends) / config.rollout.tensor_model_parallel_size, Item.LAYER),
    ]


# Training ------------------------------------------------------------------------------------------------------------


def _models(config: Config, shapes: Mapping[str, Shape], device: str) -> list[Part]:
    """Return the models' parts on the pipeline's fullest position, where there is one."""
    stages = config.training.pipeline_parallel_size
    found = [_position(config, shapes, device, position) for position in range(stages)]
    return max(found, key=lambda each: sum(part.size for part in each))


def _position(config: Config, shapes: Mapping[str, Shape], device: str, position: int) -> list[Part]:
    """Parts on the device that has the actor's stage `position`."""
    item, zero, stages = ITEM[config.model.dtype], config.actor.zero_stage, config.training.pipeline_parallel_size
    copies = config.slots // stages
    found: list[Part] = []
    work: dict[str, float] = {}
    steps: list[Part] = []
    for role, shape in shapes.items():
        held = parameters_on(shape, role, position, stages)
        weights = held / copies if zero == 3 else held
        kind = Item.REFERENCE if role == "reference" else Item.PARAMETERS
        found.append(Part(role, "parameters", weights * item, kind))
        if role == "reference":
            if stages == 1 and shape is not shapes["actor"]:
                work[role] = activations(config, shape, role, device)
            continue
        found += _states(config, role, held, copies)
        if zero == 0:
            again = 4 * held if config.actor.grad_accum_dtype == "bfloat16" and item == 2 else 0
            steps.append(Part(role, "gradients in a step", again + 4 * min(held, REDUCED_WHOLE), Item.ACTIVATIONS))
        if zero >= 1:
            wide = gradient_bytes(0, config.model.dtype, config.actor.grad_accum_dtype, 1)
            if device == "cuda":
                found.append(Part(role, "reduction buffer", REDUCED * wide, _of_gradients(zero)))
            else:  # taken where it is used, while activations go
                steps.append(Part(role, "reduction buffer", min(REDUCED, held) * wide, Item.ACTIVATIONS))
            steps.append(Part(role, "gradients in a step", 4 * held / copies, Item.ACTIVATIONS))
        work[role] = activations(config, shape, role, device, position)
    if not config.video.freeze_tower:
        found += _trained_tower(config, shapes["actor"].tower, copies)
        steps.append(Part("tower", "activations", _tower_at_work(config, shapes["actor"]), Item.ACTIVATIONS))
    passes = _at_work(config, work)
    if device == "cpu":
        passes += [Part(part.role, "holes between activations", HOLES * part.size, part.item) for part in passes]
    if zero == 3:
        live = max(min(shape.parameters, LIVE) for shape in shapes.values())
        passes.append(Part("actor", "gathered parameters", live * item, Item.ACTIVATIONS))
    # What optimizers read, and a tower's units, come when activations have gone, one after the other.
    return [*found, *max([passes, *([step] for step in steps)], key=lambda each: sum(part.size for part in each))]


def _states(config: Config, role: str, held: float, copies: int) -> list[Part]:
    """Gradients and optimizer of `held` parameters that `copies` ranks have."""
    zero, dtype = config.actor.zero_stage, config.model.dtype
    gradients = gradient_bytes(zero, dtype, config.actor.grad_accum_dtype, copies) * held
    found = [Part(role, "gradients", gradients, _of_gradients(zero))]
    share = held / copies if zero >= 1 else held
    if not config.actor.offload_optimizer:
        master = 4 if ITEM[dtype] == 2 or zero >= 1 else 0
        found.append(Part(role, "optimizer", (master + STATES) * share, Item.OPTIMIZER))
    return found


def _of_gradients(zero: int) -> Item:
    """ZeRO 3 has room for gradients from its start on; under the other stages they begin with a backward."""
    return Item.OPTIMIZER if zero == 3 else Item.GRADIENTS


def _trained_tower(config: Config, size: int, copies: int) -> list[Part]:
    """A tower that learns: as DeepSpeed holds it, as it runs, its sums of gradients, and as the run began.

    See `engines.trainer.vision_tower`.
    """
    item, whole = ITEM[config.model.dtype], config.actor.zero_stage < 3
    each = (1 + (1 if whole else 1 / copies)) * item + 4 + (item if config.uses_reference else 0)
    return [Part("tower", "copies that learn", each * size, Item.PARAMETERS), *_states(config, "tower", size, copies)]


def _tower_at_work(config: Config, shape: Shape) -> float:
    """Of a unit of the largest frames, and of its gradient, whose sums are counted elsewhere."""
    video, item = config.video, ITEM[config.model.dtype]
    most = {"family": FAMILY_TOKENS, "seed_vl": max(video.levels), "fixed": video.tokens_per_frame}
    tokens = most[video.sampling]
    return shape.tower_kept(tokens, item) + shape.tower * item


def _at_work(config: Config, work: Mapping[str, float]) -> list[Part]:
    """Activations: of one model at a time; in a fused schedule of both."""
    both = config.training.pipeline_parallel_size > 1 and config.fusion.training == "fused"
    busiest = max(work, key=lambda role: work[role])
    return [Part(role, "activations", size, Item.ACTIVATIONS) for role, size in work.items() if both or role == busiest]


def parameters_on(shape: Shape, role: str, position: int, stages: int) -> int:
    """Of the model's stage on this device."""
    if stages == 1:
        return shape.parameters
    part = stage_of(shape, role, position, stages)
    ends = (shape.embedding if part.first else 0) + (shape.head + shape.hidden if part.last else 0)
    return sum(shape.layers[i] for i in part.layers) + ends


# Generating ----------------------------------------------------------------------------------------------------------


def _engine(config: Config, shape: Shape, budget: Budget) -> tuple[list[Part], int]:
    """Parts of an engine on one of its devices, and the tokens that its cache holds."""
    item, width = ITEM[config.model.dtype], config.rollout.tensor_model_parallel_size
    weights = (shape.parameters + shape.tower) * item / width
    longest = config.data.max_prompt_length + config.data.max_response_length
    given = cuda.engine_arguments(config.rollout, longest)
    if budget.device == "cpu":
        given["max_num_batched_tokens"] = min(CPU_STEP_TOKENS, given["max_num_batched_tokens"])
    given |= config.rollout.engine_kwargs
    # Some video models take a clip's whole embedding in one step.
    tokens = max(given["max_num_batched_tokens"], longest if shape.tower else 0)
    work = given.get("max_num_seqs", config.rollout.max_num_seqs) * shape.vocabulary * SERVED_BYTES / width
    work += _layer_at_work(shape, tokens, item, width)
    found = [Part("engine", "parameters", weights, Item.ENGINE_WEIGHTS)]
    if budget.device == "cpu":
        cache = config.rollout.kv_cache_memory_mb * MIB / width
        found += _beside_on_cpus(shape, item / width)
    else:
        cache = given["gpu_memory_utilization"] * budget.bytes - weights - work
    found += [
        Part("engine", "KV cache", max(0.0, cache), Item.KV_CACHE),
        Part("engine", "work space", work, Item.KV_CACHE),
    ]
    sample = shape.cache.bytes_of(longest, item, width, tokens)
    return found, int(cache * longest // sample)


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


def _host(config: Config, shapes: Mapping[str, Shape], parts: list[Part], device: str) -> float:
    """Pinned memory at most: models that left a GPU, and the engine's weights, whose room vLLM keeps once it slept.

    It pins every allocation of the engine's for itself, and torch rounds these up to powers of two.
    """
    if device == "cpu":
        return 0.0
    away = sum(part.size for part in parts if part.item in MODELS)
    away += 2 * sum(part.size for part in parts if part.item == Item.ENGINE_WEIGHTS)
    if config.actor.offload_optimizer:
        trained = sum(shape.parameters for role, shape in shapes.items() if role != "reference")
        away += (4 + STATES) * trained / config.slots
    return away


# Verdict -------------------------------------------------------------------------------------------------------------


def problems(config: Config, memory: Memory) -> list[str]:
    """One line for each thing that does not fit: what, by how much, its largest parts. `remedies` says what helps."""
    found = []
    longest = config.data.max_prompt_length + config.data.max_response_length
    if memory.kv_tokens < longest:
        key = "rollout.gpu_memory_utilization" if memory.budget.device == "cuda" else "rollout.kv_cache_memory_mb"
        have = f"room for {memory.kv_tokens} tokens" if memory.kv_tokens > 0 else "no room beside the engine's weights"
        found.append(
            f"generating: the KV cache has {have}, the longest sample needs {longest} (data.max_prompt_length + "
            f"data.max_response_length); {key}={getattr(config.rollout, key.split('.')[1])}, "
            f"rollout.tensor_model_parallel_size={config.rollout.tensor_model_parallel_size}"
        )
    for phase in memory.phases:
        total = memory.total(phase)
        if total > memory.budget.bytes:
            found.append(_too_much(memory, phase, total))
    waiting, host = memory.host * config.trainer.n_gpus_per_node, memory.budget.host
    if host is not None and waiting > host:
        found.append(
            f"a node's host memory: needs {waiting / GIB:.1f} GiB, pinned for what is off its "
            f"{config.trainer.n_gpus_per_node} devices, of {host / GIB:.1f} (host_memory_gb); "
            f"actor.zero_stage={config.actor.zero_stage}, actor.offload_optimizer={config.actor.offload_optimizer}"
        )
    return found


def _too_much(memory: Memory, phase: str, total: float) -> str:
    inside = sorted(memory.of(phase), key=lambda part: -part.size)
    largest = ", ".join(f"{part.role}'s {part.what} {part.size / GIB:.2f}" for part in inside[:3])
    over, limit = total - memory.budget.bytes, memory.budget.bytes
    where = f"{phase}: " if memory.budget.device == "cuda" else ""
    return (
        f"{where}needs {total / GIB:.2f} GiB of a device's {limit / GIB:.2f}, {over / GIB:.2f} too many. The largest: "
        f"{largest}."
    )
