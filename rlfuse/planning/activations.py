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
from dataclasses import replace

from rlfuse.config.schema import Config
from rlfuse.engines.pipeline.partition import balanced, parts
from rlfuse.engines.trainer.attention import attends_by_layout
from rlfuse.planning.model_sizes import Shape
from rlfuse.planning.tracing import Texts, Work

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
    """Ranks or pipelines among which every call is divided: all that wait for each other, else those of one slot."""
    if config.lockstep_backward if learns else config.lockstep:
        return config.slots // config.training.pipeline_parallel_size
    return config.rollout.tensor_model_parallel_size


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


def activations(config: Config, shape: Shape, role: str, device: str, position: int = 0) -> float:
    """Bytes that a micro-batch needs beside parameters and their gradients, on the pipeline's stage at `position`."""
    linear = device == "cuda" and config.model.dtype != "float32" and attends_by_layout(shape.model.model)
    if config.training.pipeline_parallel_size > 1:
        texts = [each for each in worst(config, linear) if not each.shared]
        return max(_of_stage(config, shape, role, each, device, position) for each in texts)
    tried = [(role, each) for each in worst(config, linear)] if role in PASS_OF else []
    if not tried or micro_batch_tokens(config) > micro_batch_tokens(config, learns=True):
        tried += [(PASS_OF.get(role, role), each) for each in worst(config, linear, learns=False)]
    return max(shape.model.work(config, does, each, device).peak for does, each in tried)


def _of_stage(config: Config, shape: Shape, role: str, texts: Texts, device: str, position: int) -> float:
    """What micro-batches in flight keep, and what one needs besides while it is there.

    A schedule may hold training.activation_memory times what serial 1F1B's fullest device does: all its stages'.
    """
    stages = config.training.pipeline_parallel_size
    work, part = shape.model.work(config, role, texts, device), stage_of(shape, role, position, stages)
    flight = (config.training.activation_memory or 2.0) * stages
    if config.fusion.training == "fused" and config.uses_critic:
        flight /= 2  # the limit is for both models together
    kept = sum(work.layers[layer] for layer in part.layers)
    more = _one_layer(config, shape, role, texts, device) if config.model.enable_gradient_checkpointing else 0
    if part.last:
        more = max(more, work.peak - sum(work.layers))
    return kept * flight + more


def _one_layer(config: Config, shape: Shape, role: str, texts: Texts, device: str) -> int:
    """What the layer keeps that is run again for its backward pass."""
    whole = replace(config, model=replace(config.model, enable_gradient_checkpointing=False))
    work: Work = shape.model.work(whole, role, texts, device)
    return max(work.layers)


def stage_of(shape: Shape, role: str, position: int, stages: int):
    """The part of a model on this device; the critic runs against the actor, so its last stage meets the first."""
    return stage_parts(shape, stages)[stages - 1 - position if role == "critic" else position]


@functools.cache
def stage_parts(shape: Shape, stages: int):
    """Which layers make each stage, as ranks cut the model."""
    layers = [float(size) for size in shape.layers]
    return parts(balanced(layers, float(shape.hidden), 0.5 * shape.head, stages))
