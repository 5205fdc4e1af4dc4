"""The micro-batches that need the most memory, and how much: what the data may bring within the limits, at its worst.

Role: `memory` asks for the activations of a role on a device. Pure but for `Shape.model`, which runs the trainer's own
pass without memory.
Invariant: packing fills micro-batches by tokens, whatever they are. So the worst may be the longest samples, which need
the most attention and can't be cut below one sample; short prompts, where nearly every token predicts and has logits;
or the answers to one prompt, each of which attends to keys and values of its own copy. All of them are tried.
Gradients run over a mini-batch, passes without them over a whole batch; a free slot may be handed all of either, ranks
that go together share it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace

from rlfuse.config.graph_checks import graph_sizes, why_no_graphs
from rlfuse.config.schema import Config
from rlfuse.engines.pipeline.layout import Pipelines, pipelines_of
from rlfuse.engines.pipeline.partition import LayerCosts, Part, parts, share_with_logits
from rlfuse.engines.trainer.attention import attends_by_layout
from rlfuse.engines.trainer.gradient_memory import gradient_bytes
from rlfuse.planning.activation_tiers import Leaving, leaving
from rlfuse.planning.model_sizes import Shape
from rlfuse.planning.tracing import Texts, Work
from rlfuse.video.embedding import BF16

WORKSPACES = 128 << 20
"""Bytes of cuBLAS's workspaces for the two streams that record: 32 MiB for each stream and thread on Hopper."""
PASS_OF = {"actor": "reference", "critic": "values"}
"""What a model that is trained is also asked for, without gradients; a reference computes log-probs as an actor."""


def micro_batch_tokens(config: Config, learns: bool = False) -> int:
    """Of the largest micro-batch on one rank: the budget, or one sequence that is longer even when it is cut.

    `learns`: of those with gradients.
    """
    return max(_filled(config, learns), -(-_longest(config) // config.training.ulysses_sequence_parallel_size))


def _longest(config: Config) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def _prompts(config: Config, learns: bool) -> int:
    """That gradients, or passes without them, are asked for at once."""
    return config.actor.ppo_mini_batch_size if learns else config.data.train_batch_size


def _sharers(config: Config, learns: bool) -> int:
    """Holders of a model among which every call is divided: all that wait for each other, else those of one slot."""
    training = config.training
    width = training.tensor_model_parallel_size
    if config.lockstep_backward if learns else config.lockstep:
        return config.slots // training.pipeline_parallel_size // width
    return config.rollout.tensor_model_parallel_size // width


def _filled(config: Config, learns: bool) -> int:
    """Tokens of a micro-batch of several samples: as many of the longest as one rank gets of a call at most."""
    longest, most = _longest(config), config.actor.ppo_micro_batch_size_per_gpu
    siblings = config.rollout.n if config.training.pipeline_parallel_size == 1 else 1  # that stay on one rank
    units = _prompts(config, learns) * config.rollout.n // siblings
    share = -(-units // _sharers(config, learns)) * siblings
    return min(config.actor.ppo_max_token_len_per_gpu, share * longest, most * longest if most else 1 << 60)


def worst(config: Config, linear: bool, learns: bool = True) -> list[Texts]:
    """Micro-batches of which one needs the most memory; `linear`: attention keeps no scores.

    Then the longest samples need no more than others of as many tokens. `learns`: those with gradients.
    """
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    tokens, filled = micro_batch_tokens(config, learns), _filled(config, learns)
    most = _prompts(config, learns) * config.rollout.n
    most = min(most, config.actor.ppo_micro_batch_size_per_gpu or most)
    short = min(prompt, max(1, -(-filled // most) - response))  # so few samples fill it with longer ones only
    found = [_rows(config, filled, short, most)]
    if not linear or tokens > filled:
        found.append(_rows(config, tokens, prompt, most))
    siblings = config.rollout.n if config.actor.ppo_micro_batch_size_per_gpu is None else 1
    if siblings > 1 and (each := min(response, (filled - prompt) // siblings)) > 0:
        found.append(Texts(((prompt, each),) * siblings, shared=True))
    return [texts for texts in found if texts.lengths]


def _rows(config: Config, tokens: int, prompt: int, most: int) -> Texts:
    """Samples with the longest response and such a prompt, the last one cut, or one that is a slice of a sample."""
    response = config.data.max_response_length
    whole = min(tokens // (prompt + response), most)
    left = tokens - whole * (prompt + response) if whole < most else 0
    predicted = min(response, left - 1)
    rest = ((left - predicted, predicted),) if left > 1 else ()
    return Texts(((prompt, response),) * whole + rest)


def embeddings(config: Config, shape: Shape) -> int:
    """Bytes of the visual embeddings of a micro-batch whose prompts are nothing but clips: as they are read, and once
    more in the order of the batch where they feed several layers (`models.visual_embeddings`)."""
    prompts = max(each.prompts for learns in (False, True) for each in worst(config, False, learns))
    return prompts * shape.embedded * BF16 * (2 if shape.embedded > shape.hidden else 1)


def activations(config: Config, shape: Shape, role: str, device: str, position: int = 0) -> float:
    """Bytes that a micro-batch needs beside parameters and their gradients, on the pipeline's device at `position`."""
    linear = device == "cuda" and config.model.dtype != "float32" and attends_by_layout(shape.model.model)
    if config.training.pipeline_parallel_size > 1:
        texts = [each for each in worst(config, linear) if not each.shared]
        return max(_of_stage(config, shape, role, each, device, position) for each in texts)
    tried = [(role, each) for each in worst(config, linear)] if role in PASS_OF else []
    if not tried or micro_batch_tokens(config) > micro_batch_tokens(config, learns=True):
        tried += [(PASS_OF.get(role, role), each) for each in worst(config, linear, learns=False)]
    return max(
        leaving(config, shape, does, each, device).peak
        if does in PASS_OF
        else shape.model.work(config, does, each, device).peak
        for does, each in tried
    )


def graph_bytes(config: Config, shapes: Mapping[str, Shape], device: str) -> float:
    """Bytes of passes that are recorded: activations of the largest, and a copy of the trained models' gradients."""
    layer = max(sum(each.layers) / len(each.layers) for each in shapes.values())
    if device == "cpu" or why_no_graphs(config, layer):
        return 0.0
    share = graph_sizes(config)[-1] / micro_batch_tokens(config)
    pool = share * max(activations(config, shape, role, device) for role, shape in shapes.items())
    wide = gradient_bytes(0, config.model.dtype, config.actor.grad_accum_dtype, 1)
    return pool + WORKSPACES + wide * sum(each.parameters for role, each in shapes.items() if role != "reference")


def holes(config: Config, shape: Shape, role: str, size: float) -> float:
    """Bytes between activations of so many in the heap of a CPU host's rank: as many again as blocks in it take, were
    nothing run again; what is, leaves holes twice.

    `posix_memalign`, by which torch has its blocks, asks for more than their size, so that glibc (2.36) finds no room
    for a block where one of the same size was freed, unless one beside it was, too.
    """
    stays = replace(config, model=replace(config.model, enable_gradient_checkpointing=False))
    whole = config.training.pipeline_parallel_size == 1
    tried = [each for each in worst(config, False, role in PASS_OF) if whole or not each.shared]
    found = [shape.model.work(stays, role, each, "cpu") for each in tried]
    if whole:
        return max(each.small for each in found)
    return size * max(each.small / max(1, each.peak) for each in found)  # a stage's, of all that are in flight


def leaves(
    config: Config, shape: Shape, role: str, device: str, seconds: float = math.inf, host_s: float = math.inf
) -> Leaving:
    """What becomes of the activations of the micro-batch with gradients that leaves the most; rates as of `leaving`."""
    found = [leaving(config, shape, role, each, device, seconds, host_s) for each in worst(config, linear=True)]
    return max(found, key=lambda each: each.layer)


def _of_stage(config: Config, shape: Shape, role: str, texts: Texts, device: str, position: int) -> float:
    """What micro-batches in flight keep, and what one needs besides while it is there.

    A schedule may hold training.activation_memory times what serial 1F1B's fullest device does: all its stages'. Chunks
    count alike, so all that is held may be of the largest one.
    """
    stages = config.training.pipeline_parallel_size
    work, chunks = shape.model.work(config, role, texts, device), parts_on(config, shape, role, position)
    flight = (config.training.activation_memory or 2.0) * stages
    if config.fusion.training == "fused" and config.uses_critic:
        flight /= 2  # the limit is for both models together
    kept = len(chunks) * max(sum(work.layers[layer] for layer in part.layers) for part in chunks)
    more = _one_layer(config, shape, role, texts, device) if config.model.enable_gradient_checkpointing else 0
    head, sharers = work.peak - sum(work.layers), _pipelines(config, role).sharers
    if sharers > 1:  # hidden states as handed out, their gradient, and its sum where the last stage is
        item = 4 if config.model.dtype == "float32" else BF16
        handed = 3 * sum(response for _, response in texts.lengths) * shape.hidden * item
        more = max(more, head / sharers + handed)
    elif any(part.last for part in chunks):
        more = max(more, head)
    return kept * flight + more


def _one_layer(config: Config, shape: Shape, role: str, texts: Texts, device: str) -> int:
    """What the layer keeps that is run again for its backward pass."""
    whole = replace(config, model=replace(config.model, enable_gradient_checkpointing=False))
    work: Work = shape.model.work(whole, role, texts, device)
    return max(work.layers)


def parts_on(config: Config, shape: Shape, role: str, position: int) -> tuple[Part, ...]:
    """A model's stages on this device."""
    return _on_device(_pipelines(config, role), stage_parts(config, shape, role), position)


@functools.cache
def _on_device(pipelines: Pipelines, stages: tuple[Part, ...], position: int) -> tuple[Part, ...]:
    return tuple(stages[stage] for stage in pipelines.stages_on(position))


def _pipelines(config: Config, role: str) -> Pipelines:
    return pipelines_of(config, "ref" if role == "reference" else role)


def stage_parts(config: Config, shape: Shape, role: str = "actor") -> tuple[Part, ...]:
    """Which layers, and which share of the head, make each stage, as ranks cut the model when a run starts.

    `shape`: of a rank's share of the layers, as all that tell of stages here.
    """
    return _parts(shape, _pipelines(config, role), share_with_logits(config.data))


def head_share(config: Config, shape: Shape, role: str = "actor") -> float:
    """Of a forward pass, what each device takes of the head; 0 unless they share it."""
    sharers = _pipelines(config, role).sharers
    layers, embedding, head = layer_costs(shape, share_with_logits(config.data))
    return head / (sum(layers) + embedding + head) / sharers if sharers > 1 else 0.0


def layer_costs(shape: Shape, share: float) -> LayerCosts:
    """In multiply-adds per token, of which this `share` reaches the head."""
    return [float(size) for size in shape.layers], float(shape.hidden), share * shape.head


@functools.cache
def _parts(shape: Shape, pipelines: Pipelines, share: float) -> tuple[Part, ...]:
    return tuple(parts(pipelines.balanced(layer_costs(shape, share)), pipelines.sharers))
