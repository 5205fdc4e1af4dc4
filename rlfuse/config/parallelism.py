"""Check the parallelism of the trainer and the offloading of activations. Pure part of `checks`."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator

from rlfuse.config.declare import as_typed
from rlfuse.config.facts import Facts
from rlfuse.config.schema import Config


def value_of(config: Config, name: str) -> object:
    """Return the value of a key by its full name."""
    return operator.attrgetter(name)(config)


def problem(config: Config, name: str, valid: str, remedy: str) -> str:
    """Return a message: `name` with its value, the valid range and the remedy."""
    return f"{name}={as_typed(value_of(config, name))}: {valid}; {remedy}"


def divisors(number: int) -> list[int]:
    """Return all divisors, ascending; above 10^12, only those up to 10^6 and their complements."""
    small = [each for each in range(1, math.isqrt(min(number, 10**12)) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def pipeline_problems(config: Config, facts: Facts) -> Iterator[str]:
    """Yield the problems of pipeline parallelism."""
    stages, name, slots = config.training.pipeline_parallel_size, "training.pipeline_parallel_size", config.slots
    several, shared_layers = "training.virtual_pipeline_model_parallel_size", "training.tensor_model_parallel_size"
    width = max(1, config.training.tensor_model_parallel_size)
    chunks = config.training.virtual_pipeline_model_parallel_size
    if chunks > 1 and (stages <= 1 or config.fusion.training == "serial"):
        yield problem(config, several, f"needs {name} above 1 and fusion.training=fused", "set both, or set this to 1")
    shared, vocabulary = "training.vocabulary_parallel", facts.vocabulary or stages
    if config.training.vocabulary_parallel and stages <= 1:
        yield problem(
            config, shared, f"needs {name} above 1: the head is sharded over pipeline stages", "set it to false"
        )
    elif config.training.vocabulary_parallel and vocabulary % stages:
        valid = f"{name}={stages} must divide the {vocabulary} tokens of {config.model.path}"
        common = math.gcd(stages, vocabulary)
        yield problem(config, shared, valid, "set it to false" + (f", or {name}={common}" if common > 1 else ""))
    if stages <= 1:
        return
    most = min(stages, facts.layers or stages)
    fitting = f"{name}={max(degree for degree in divisors(max(1, slots // width)) if degree <= most)}"
    if slots >= width and slots // width % stages:
        groups = f" / {width} ({shared_layers}={width} ranks are one device)" if width > 1 else ""
        yield problem(config, name, f"must divide the {slots}{groups} slots", f"set {fitting}")
    if facts.layers and stages * chunks > facts.layers:
        valid = f"needs one layer per stage ({stages * chunks}), but {config.model.path} has {facts.layers} layers"
        if chunks > 1 and stages <= facts.layers:
            valid = f"times {name}={stages} is the number of stages, but {config.model.path} has {facts.layers} layers"
            yield problem(config, several, valid, f"set {several}={facts.layers // stages}")
        else:
            yield problem(config, name, valid, f"set {fitting}" + (f" and {several}=1" if chunks > 1 else ""))
    if config.actor.zero_stage != 1:
        yield problem(config, "actor.zero_stage", "must be 1 with pipeline parallelism", "set actor.zero_stage=1")
    if config.rollout.weight_transfer == "ipc":
        valid = "not supported with pipeline parallelism, where a stage and an engine may be on different GPUs"
        yield problem(config, "rollout.weight_transfer", valid, "set rollout.weight_transfer=auto")


def strategy_problems(config: Config, facts: Facts) -> Iterator[str]:
    """Yield settings that the trainer backend does not support."""
    training, model, name = config.training, config.model, "actor.strategy"
    if config.actor.strategy != "fsdp2":
        if config.actor.offload_optimizer and config.actor.zero_stage == 0:
            valid = "needs actor.zero_stage to be 1, 2 or 3"
            yield problem(config, "actor.offload_optimizer", valid, "set actor.zero_stage=1, or false here")
        return
    for key, given, default in (
        ("cluster.device", config.cluster.device == "cuda", "cpu"),
        ("training.pipeline_parallel_size", training.pipeline_parallel_size > 1, "1"),
        ("training.tensor_model_parallel_size", training.tensor_model_parallel_size > 1, "1"),
        ("training.ulysses_sequence_parallel_size", training.ulysses_sequence_parallel_size > 1, "1"),
        ("model.enable_activation_offload", model.enable_activation_offload, "false"),
        ("actor.offload_optimizer", config.actor.offload_optimizer, "false"),
        ("video.freeze_vision_tower", not config.video.freeze_vision_tower, "true"),
        ("actor.grad_accum_dtype", config.actor.grad_accum_dtype != "float32", "float32"),
        ("model.trust_remote_code", model.trust_remote_code and config.trainer.task == "reward_model", "false"),
    ):
        if given:
            yield problem(config, key, f"not supported by {name}=fsdp2", f"set {default}, or {name}=deepspeed")


def sequence_parallel_problems(config: Config, facts: Facts) -> Iterator[str]:
    """Yield the problems of sequence parallelism."""
    degree, name = config.training.ulysses_sequence_parallel_size, "training.ulysses_sequence_parallel_size"
    width = max(1, config.training.tensor_model_parallel_size)
    slots, heads = config.slots // width, facts.attention_heads and facts.attention_heads // width
    if degree <= 1 or slots < 1:
        return
    common = math.gcd(slots, heads) if heads else slots
    if degree & (degree - 1) or common % degree:
        of = f" and the {heads} attention heads of {config.model.path}" if heads else ""
        of += f" (training.tensor_model_parallel_size={width} ranks share a model)" if width > 1 else ""
        valid = f"must be a power of two that divides the {slots} slots{of}"
        yield problem(config, name, valid, f"set {name}={min(common & -common, 1 << degree.bit_length() - 1)}")
    if config.training.pipeline_parallel_size > 1:
        valid = "can't be combined with pipeline parallelism"
        yield problem(config, name, valid, "set it or training.pipeline_parallel_size to 1")


def tensor_parallel_problems(config: Config, facts: Facts) -> Iterator[str]:
    """Yield the problems of tensor parallelism."""
    training, name, zero = config.training, "training.tensor_model_parallel_size", config.actor.zero_stage
    width, local, heads = training.tensor_model_parallel_size, config.trainer.n_gpus_per_node, facts.attention_heads
    if width <= 1 or local < 1:
        return
    common = math.gcd(local, heads) if heads else local
    if common % width:
        of = f"the {heads} attention heads of {config.model.path} and " if heads else ""
        valid = f"must divide {of}the {local} slots of a node, because tensor parallelism does not span nodes"
        yield problem(config, name, valid, f"set {name}={math.gcd(common, width)}")
    if zero > 1 and training.pipeline_parallel_size <= 1:  # otherwise reported by `pipeline_problems`
        valid = f"ZeRO {zero} can't shard weights that {name}={width} already shards"
        yield problem(config, "actor.zero_stage", valid, "set actor.zero_stage=1")
    if training.vocabulary_parallel and training.pipeline_parallel_size > 1:
        valid = f"can't be combined with {name}={width}"
        yield problem(config, "training.vocabulary_parallel", valid, f"set it to false, or {name}=1")


KEY = "model.enable_activation_offload"


def activation_problems(config: Config, facts: Facts) -> Iterator[str]:
    """Yield the problems of activation offloading."""
    model, stages = config.model, config.training.pipeline_parallel_size
    width = config.training.tensor_model_parallel_size
    if not model.enable_activation_offload:
        return
    if stages > 1:
        yield (
            f"{KEY}=true: can't be combined with training.pipeline_parallel_size={stages}, where "
            "training.activation_memory limits the activations; reset one of the two to its default"
        )
    if width > 1:
        yield (
            f"{KEY}=true: can't be combined with training.tensor_model_parallel_size={width}, because each rank "
            "decides on its own which layers it recomputes; reset one of the two to its default"
        )
    if facts.cuda is False and model.activation_host_mb:
        yield (
            f"model.activation_host_mb={model.activation_host_mb}: must be 0 or null on CPU hosts, whose device "
            "memory is host memory; set model.activation_disk_mb"
        )
