"""Estimate the activation memory of the worst-case micro-batches, for any data within the length limits.

The worst case may be the longest samples (attention), short prompts (logits for nearly every token) or the responses to
one prompt (keys and values copied per response); all are evaluated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf

from rlfuse.config.graph_checks import graph_sizes, no_graphs_reason
from rlfuse.config.schema import Config
from rlfuse.engines.memory.model_memory import gradient_item
from rlfuse.engines.memory.model_sizes import Shape
from rlfuse.engines.memory.tracing import SequenceLengths, Work
from rlfuse.engines.pipeline.layout import Pipelines, pipelines_of
from rlfuse.engines.pipeline.partition import LayerCosts, Part, logits_fraction, parts
from rlfuse.engines.trainer.activation_placement import TIERS, Layer, Place, Placement, TierCapacity, place_activations
from rlfuse.engines.trainer.attention import attends_by_layout
from rlfuse.video.embedding import BF16

MIB, GIB = 1 << 20, 1 << 30
DISK_BYTES_PER_S = 2e9  # default for an NVMe drive, reading or writing; ranks measure theirs
ENDURANCE = 600e12  # rated write endurance of a 1 TB consumer drive, in bytes


@dataclass(frozen=True, slots=True)
class ActivationPlan:
    """Placement of a micro-batch's activations, and the resulting memory."""

    tokens: int
    layer: float  # bytes of activations of the largest layer
    places: Placement
    peak: float  # maximum bytes on the device

    def offloaded_bytes(self, tier: Place) -> float:
        return self.places.layers.count(tier) * self.layer

    @property
    def recomputed_fraction(self) -> float:
        return self.places.layers.count(Place.RECOMPUTE) / len(self.places.layers)


def plan_activations(
    config: Config,
    shape: Shape,
    role: str,
    texts: SequenceLengths,
    device: str,
    seconds: float = inf,
    host_s: float = inf,
) -> ActivationPlan:
    """Plan the activations of a training micro-batch of `role`. `seconds`: of its forward pass through a layer;
    `host_s`: bytes a second to the host; by default transfers are not a bottleneck."""
    model, tokens = config.model, sum(map(sum, texts.lengths))
    kept = _work(config, shape, role, texts, device, model.enable_gradient_checkpointing)
    if not model.enable_activation_offload:
        usual = Place.RECOMPUTE if model.enable_gradient_checkpointing else Place.DEVICE
        return ActivationPlan(tokens, max(kept.layers), Placement((usual,) * len(kept.layers)), kept.peak)
    again = _work(config, shape, role, texts, device, True)
    layer, tiers = Layer(max(kept.layers), max(again.layers), seconds), tiers_of(config, device, host_s)
    count, most = len(kept.layers), model.activation_device_mb * MIB
    found = place_activations(count, layer, most, tiers, model.enable_gradient_checkpointing)
    inputs = found.layers.count(Place.RECOMPUTE) * layer.inputs
    gone = sum(kept.layers[i] for i, place in enumerate(found.layers) if place is not Place.DEVICE)
    stays = inputs if found.inputs is Place.DEVICE else 0.0
    return ActivationPlan(tokens, layer.activations, found, max(kept.peak - gone + stays, again.peak - inputs + stays))


def tiers_of(config: Config, device: str, host_s: float) -> dict[Place, TierCapacity]:
    """Return the offload tiers of a rank; host memory without a configured limit counts as unlimited."""
    model = config.model
    host = inf if model.activation_host_mb is None else model.activation_host_mb * MIB
    rooms = {Place.HOST: TierCapacity(host if device == "cuda" else 0.0, host_s)}
    return rooms | {Place.DISK: TierCapacity(model.activation_disk_mb * MIB, DISK_BYTES_PER_S)}


def _work(config: Config, shape: Shape, role: str, texts: SequenceLengths, device: str, again: bool) -> Work:
    model = replace(config.model, enable_gradient_checkpointing=again)
    return shape.model.work(replace(config, model=model), role, texts, device)


def describe_activations(found: ActivationPlan, role: str) -> Iterator[str]:
    """Yield a line on offloaded and recomputed layers, and one on the endurance of the disk."""
    layers = found.places.layers
    counts = {place: layers.count(place) for place in (*TIERS, Place.RECOMPUTE) if place in layers}
    if not counts:
        return
    named = {Place.HOST: "in host memory", Place.DISK: "on disk", Place.RECOMPUTE: "recomputed"}
    parts = ", ".join(f"{count} {named[place]}" for place, count in counts.items())
    yield f"{role}: activations of {len(layers)} layers in a micro-batch of {found.tokens:,} tokens: {parts}"
    if written := found.offloaded_bytes(Place.DISK):
        yield (
            f"{role}: each such micro-batch writes {written / GIB:.2f} GiB to disk; a drive rated for "
            f"{ENDURANCE / 1e12:.0f} TB written endures {ENDURANCE / written:,.0f} of them"
        )


WORKSPACES = 128 << 20  # bytes of cuBLAS workspaces for two recording streams (Hopper)
PASS_OF = {"actor": "reference", "critic": "values"}  # passes of trained models without gradients


def micro_batch_tokens(config: Config, learns: bool = False) -> int:
    """Return the tokens of the largest micro-batch on a rank: the token budget, or one sequence or pair (split by
    sequence parallelism) that exceeds it. `learns`: of micro-batches with gradients."""
    alone = _together(config) * _longest(config)
    return max(_filled(config, learns), -(-alone // config.training.ulysses_sequence_parallel_size))


def _longest(config: Config) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def _together(config: Config) -> int:
    """Return the least number of sequences in a micro-batch: 2 in tasks on pairs."""
    return 2 if config.trainer.task in ("dpo", "reward_model") else 1


def _siblings(config: Config) -> int:
    """Return the number of sequences of a prompt."""
    return _together(config) if config.trainer.is_offline else config.rollout.n


def _prompts(config: Config, learns: bool) -> int:
    has_parts = learns and not config.trainer.is_offline
    return config.actor.ppo_mini_batch_size if has_parts else config.data.train_batch_size


def _sharers(config: Config, learns: bool) -> int:
    """Return the number of model copies over which a call is distributed: all if they run in lockstep, else one
    slot's."""
    if config.lockstep_backward if learns else config.lockstep:
        return config.mesh.copies
    return config.rollout.tensor_model_parallel_size // config.mesh.tp


def _filled(config: Config, learns: bool) -> int:
    """Return the tokens of the largest micro-batch of several samples that a rank gets in a call."""
    longest, most = _longest(config), _most(config, learns)
    siblings = (
        _siblings(config) if config.training.pipeline_parallel_size == 1 else 1
    )  # samples of a prompt that stay on one rank
    units = _prompts(config, learns) * _siblings(config) // siblings
    share = -(-units // _sharers(config, learns)) * siblings
    return min(config.actor.ppo_max_token_len_per_gpu, share * longest, most * longest)


def _most(config: Config, learns: bool) -> int:
    """Return the maximum number of sequences in a micro-batch."""
    all_of_them, limit = _prompts(config, learns) * _siblings(config), config.actor.ppo_micro_batch_size_per_gpu
    return min(all_of_them, max(limit, _together(config))) if limit else all_of_them


def worst_micro_batches(config: Config, linear: bool, learns: bool = True) -> list[SequenceLengths]:
    """Return candidate micro-batches, one of which needs the most memory. `linear`: attention stores no scores, so only
    the number of tokens matters. `learns`: micro-batches with gradients."""
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    tokens, filled = micro_batch_tokens(config, learns), _filled(config, learns)
    most = _most(config, learns)
    short = min(prompt, max(1, -(-filled // most) - response))  # with few samples, prompts must be longer to fill it
    found = [_rows(config, filled, short, most)]
    if not linear or tokens > filled:
        found.append(_rows(config, tokens, prompt, most))
    siblings = _siblings(config) if config.actor.ppo_micro_batch_size_per_gpu is None else 1
    if siblings > 1 and (each := min(response, (filled - prompt) // siblings)) > 0:
        found.append(SequenceLengths(((prompt, each),) * siblings, shared=True))
    return [texts for texts in found if texts.lengths]


def _rows(config: Config, tokens: int, prompt: int, most: int) -> SequenceLengths:
    """Return samples with prompts of length `prompt` and maximum responses; the last one is cut to `tokens` in
    total."""
    response = config.data.max_response_length
    whole = min(tokens // (prompt + response), most)
    left = tokens - whole * (prompt + response) if whole < most else 0
    predicted = min(response, left - 1)
    rest = ((left - predicted, predicted),) if left > 1 else ()
    return SequenceLengths(((prompt, response),) * whole + rest)


def embeddings(config: Config, shape: Shape) -> int:
    """Return the bytes of the visual embeddings of a micro-batch whose prompts consist of clips only; twice that if
    they feed several layers and are copied into batch order (`models.visual_embeddings`)."""
    prompts = max(each.prompts for learns in (False, True) for each in worst_micro_batches(config, False, learns))
    return prompts * shape.embedded * BF16 * (2 if shape.embedded > shape.hidden else 1)


def activations(config: Config, shape: Shape, role: str, device: str, position: int = 0) -> float:
    """Return the bytes of a micro-batch without parameters and their gradients, on the pipeline's device at
    `position`."""
    linear = device == "cuda" and config.model.dtype != "float32" and attends_by_layout(shape.model.model)
    if config.training.pipeline_parallel_size > 1:
        texts = [each for each in worst_micro_batches(config, linear) if not each.shared]
        return max(_of_stage(config, shape, role, each, device, position) for each in texts)
    tried = [(role, each) for each in worst_micro_batches(config, linear)] if role in PASS_OF else []
    if not tried or micro_batch_tokens(config) > micro_batch_tokens(config, learns=True):
        tried += [(PASS_OF.get(role, role), each) for each in worst_micro_batches(config, linear, learns=False)]
    return max(
        plan_activations(config, shape, does, each, device).peak
        if does in PASS_OF
        else shape.model.work(config, does, each, device).peak
        for does, each in tried
    )


def graph_bytes(config: Config, shapes: Mapping[str, Shape], device: str) -> float:
    """Return the bytes of CUDA graphs of passes: activations of the largest, and a copy of the trained gradients."""
    layer = max(sum(each.layers) / len(each.layers) for each in shapes.values())
    if device == "cpu" or no_graphs_reason(config, layer):
        return 0.0
    share = graph_sizes(config)[-1] / micro_batch_tokens(config)
    pool = share * max(activations(config, shape, role, device) for role, shape in shapes.items())
    gradients = sum(each.parameters for role, each in shapes.items() if role != "reference") * gradient_item(config)
    return pool + WORKSPACES + gradients


def heap_fragmentation(config: Config, shape: Shape, role: str, size: float) -> float:
    """Return the bytes lost to heap fragmentation on a CPU rank with `size` bytes of activations: the size of the small
    blocks without recomputation,
    as recomputation fragments the heap equally.

    torch allocates with `posix_memalign`, which requests more than the block size, so glibc (2.36) can't reuse a freed
    block for one of the same size unless an adjacent block was freed as well.
    """
    stays = replace(config, model=replace(config.model, enable_gradient_checkpointing=False))
    whole = config.training.pipeline_parallel_size == 1
    tried = [each for each in worst_micro_batches(config, False, role in PASS_OF) if whole or not each.shared]
    found = [shape.model.work(stays, role, each, "cpu") for each in tried]
    if whole:
        return max(each.small for each in found)
    return size * max(each.small / max(1, each.peak) for each in found)  # of a stage, for all micro-batches in flight


def largest_activation_plan(
    config: Config, shape: Shape, role: str, device: str, seconds: float = math.inf, host_s: float = math.inf
) -> ActivationPlan:
    """Return the plan of the micro-batch with gradients that has the largest activations; arguments as of
    `plan_activations`."""
    found = [
        plan_activations(config, shape, role, each, device, seconds, host_s)
        for each in worst_micro_batches(config, linear=True)
    ]
    return max(found, key=lambda each: each.layer)


def _of_stage(config: Config, shape: Shape, role: str, texts: SequenceLengths, device: str, position: int) -> float:
    """Return the bytes of the micro-batches in flight, and the additional ones of the running micro-batch.

    A schedule may hold training.activation_memory times the activations of serial 1F1B's fullest device, which holds
    one micro-batch per stage. Chunks count equally, so all may be of the largest one.
    """
    stages = config.training.pipeline_parallel_size
    work, chunks = shape.model.work(config, role, texts, device), parts_on(config, shape, role, position)
    flight = (config.training.activation_memory or 2.0) * stages
    if config.fusion.training == "fused" and config.uses_critic:
        flight /= 2  # the limit applies to both models together
    kept = len(chunks) * max(sum(work.layers[layer] for layer in part.layers) for part in chunks)
    more = _one_layer(config, shape, role, texts, device) if config.model.enable_gradient_checkpointing else 0
    head, head_degree = work.peak - sum(work.layers), _pipelines(config, role).head_degree
    if head_degree > 1:  # broadcast hidden states, their gradient, and its sum on the last stage
        item = 4 if config.model.dtype == "float32" else BF16
        broadcast_bytes = 3 * sum(response for _, response in texts.lengths) * shape.hidden * item
        more = max(more, head / head_degree + broadcast_bytes)
    elif any(part.last for part in chunks):
        more = max(more, head)
    return kept * flight + more


def _one_layer(config: Config, shape: Shape, role: str, texts: SequenceLengths, device: str) -> int:
    whole = replace(config, model=replace(config.model, enable_gradient_checkpointing=False))
    work: Work = shape.model.work(whole, role, texts, device)
    return max(work.layers)


def parts_on(config: Config, shape: Shape, role: str, position: int) -> tuple[Part, ...]:
    """Return the stages of a model on the pipeline's device at `position`."""
    return _on_device(_pipelines(config, role), stage_parts(config, shape, role), position)


@functools.cache
def _on_device(pipelines: Pipelines, stages: tuple[Part, ...], position: int) -> tuple[Part, ...]:
    return tuple(stages[stage] for stage in pipelines.stages_on(position))


def _pipelines(config: Config, role: str) -> Pipelines:
    return pipelines_of(config, "ref" if role == "reference" else role)


def stage_parts(config: Config, shape: Shape, role: str = "actor") -> tuple[Part, ...]:
    """Return the layers and head share of each stage, as ranks split the model at startup. `shape`: that of a
    tensor-parallel rank's share, as in all functions on stages here."""
    return _parts(shape, _pipelines(config, role), logits_fraction(config.data))


def head_share(config: Config, shape: Shape, role: str = "actor") -> float:
    """Return the fraction of a forward pass that each device spends in the head; 0 unless the head is shared."""
    head_degree = _pipelines(config, role).head_degree
    layers, embedding, head = layer_costs(shape, logits_fraction(config.data))
    return head / (sum(layers) + embedding + head) / head_degree if head_degree > 1 else 0.0


def layer_costs(shape: Shape, share: float) -> LayerCosts:
    """Return the costs in multiply-adds per token; `share`: fraction of tokens that reach the head."""
    return [float(size) for size in shape.layers], float(shape.hidden), share * shape.head


@functools.cache
def _parts(shape: Shape, pipelines: Pipelines, share: float) -> tuple[Part, ...]:
    return tuple(parts(pipelines.balanced(layer_costs(shape, share)), pipelines.head_degree))
