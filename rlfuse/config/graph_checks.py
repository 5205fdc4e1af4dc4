"""Decide which trainer passes are captured as CUDA graphs, and which settings rule that out. Pure.

Role: `graph_problems` is one of the checks of `checks.check`; trainer ranks and the memory plan use the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlfuse.config.facts import Facts
from rlfuse.config.parallelism import problem, value_of
from rlfuse.config.schema import Config

KEY = "actor.cuda_graphs"
BLOCKERS = {
    "training.pipeline_parallel_size": (lambda value: value > 1, "stages send activations during a pass"),
    "training.tensor_model_parallel_size": (lambda value: value > 1, "layers wait for other ranks"),
    "training.ulysses_sequence_parallel_size": (lambda value: value > 1, "attention waits for other ranks"),
    "model.enable_activation_offload": (bool, "activations move to the host during a pass"),
    "model.use_remove_padding": (lambda value: not value, "only packed batches have few sizes"),
}
"""Key -> (predicate of the values that rule graphs out, reason)."""
SMALLEST, LARGEST = 256, 2048
"""Graph sizes in tokens. A batch is padded to a power of two; above SMALLEST, less than half of it is padding. In a
graph, attention is quadratic in all tokens of the batch, so larger batches run without a graph."""
LAUNCH_BOUND_FLOP = {"bfloat16": 1e11, "float32": 1e10}
"""FLOP of a layer's forward pass below which launching its operations (about 60, 5 us each) takes the CPU longer than
computing them takes the GPU, at 330 TFLOP/s (bfloat16) or 33 (float32)."""


def graph_blocker(config: Config) -> str | None:
    """Return the first setting that rules graphs out as `KEY=VALUE: why`, or None."""
    if config.sharded_gradients:
        return f"{config.sharding}: ranks exchange gradients or weights during passes"
    found = ((name, value_of(config, name), rule) for name, rule in BLOCKERS.items())
    return next((f"{name}={value}: {why}" for name, value, (blocks, why) in found if blocks(value)), None)


def graph_sizes(config: Config) -> tuple[int, ...]:
    """Return the padded batch sizes in tokens, ascending; the last holds a full micro-batch or is LARGEST."""
    budget = config.actor.ppo_max_token_len_per_gpu
    largest = max(SMALLEST, min(LARGEST, 1 << (budget - 1).bit_length()))
    return tuple(1 << power for power in range(SMALLEST.bit_length() - 1, largest.bit_length()))


def no_graphs_reason(config: Config, layer_parameters: float) -> str | None:
    """Return why passes are not captured, or None. `layer_parameters`: parameters used per token in one layer."""
    if config.actor.cuda_graphs == "off":
        return f"{KEY}=off"
    if (blocker := graph_blocker(config)) or config.actor.cuda_graphs == "on":
        return blocker
    budget = config.actor.ppo_max_token_len_per_gpu
    limit = min(LARGEST, LAUNCH_BOUND_FLOP[config.model.dtype] / (2 * layer_parameters))
    if budget <= limit:
        return None
    return (
        f"actor.ppo_max_token_len_per_gpu={budget}: micro-batches of this model are limited by kernel launches only "
        f"up to {int(limit)} tokens"
    )


def graph_problems(config: Config, facts: Facts) -> Iterator[str]:
    """Yield one line per problem of actor.cuda_graphs=on."""
    if config.actor.cuda_graphs != "on":
        return
    if facts.cuda is False:
        yield problem(config, KEY, "needs GPUs", "set actor.cuda_graphs=auto")
    elif blocker := graph_blocker(config):
        yield problem(
            config, KEY, f"not possible with {blocker}", "set actor.cuda_graphs=auto, or reset that key to its default"
        )
