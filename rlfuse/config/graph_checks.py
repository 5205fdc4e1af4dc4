"""Which of a trainer's passes are recorded as CUDA graphs, and which settings rule that out. Pure.

Role: one of the checks that `checks.check` goes through; trainer ranks and the memory plan read the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlfuse.config.facts import Facts
from rlfuse.config.parallelism import problem, value_of
from rlfuse.config.schema import Config

KEY = "actor.cuda_graphs"
BLOCKERS = {
    "training.pipeline_parallel_size": (lambda value: value > 1, "stages send activations within a pass"),
    "training.tensor_model_parallel_size": (lambda value: value > 1, "layers wait for other ranks"),
    "training.ulysses_sequence_parallel_size": (lambda value: value > 1, "attention waits for other ranks"),
    "model.enable_activation_offload": (bool, "activations move to the host during a pass"),
    "model.use_remove_padding": (lambda value: not value, "only packed batches have few sizes"),
}
"""Key -> (whether a value rules graphs out, why)."""
SMALLEST, LARGEST = 256, 2048
"""Tokens. A batch is padded to a power of two: above SMALLEST, fewer than half of its tokens are padding. Attention
in a graph is quadratic in all tokens of the batch, so larger batches are launched operation by operation."""
LAUNCH_BOUND_FLOP = {"bfloat16": 1e11, "float32": 1e10}
"""Of a layer's forward pass: a GPU needs less time for fewer than the CPU needs to launch the layer's operations, about
60 of 5 us, at 330 TFLOP/s (bfloat16) or 33 (float32)."""


def graph_blocker(config: Config) -> str | None:
    """Return the first setting that rules graphs out as `KEY=VALUE: why`, or None."""
    if config.sharded_gradients:
        return f"{config.sharding}: ranks exchange gradients or weights during passes"
    found = ((name, value_of(config, name), rule) for name, rule in BLOCKERS.items())
    return next((f"{name}={value}: {why}" for name, value, (blocks, why) in found if blocks(value)), None)


def graph_sizes(config: Config) -> tuple[int, ...]:
    """Return the sizes that batches are padded to, ascending; the last one holds a full micro-batch or is LARGEST."""
    budget = config.actor.ppo_max_token_len_per_gpu
    largest = max(SMALLEST, min(LARGEST, 1 << (budget - 1).bit_length()))
    return tuple(1 << power for power in range(SMALLEST.bit_length() - 1, largest.bit_length()))


def no_graphs_reason(config: Config, layer_parameters: float) -> str | None:
    """Return why passes are not recorded, or None. `layer_parameters`: that a token is multiplied by in one layer."""
    if config.actor.cuda_graphs == "off":
        return f"{KEY}=off"
    if (blocker := graph_blocker(config)) or config.actor.cuda_graphs == "on":
        return blocker
    budget = config.actor.ppo_max_token_len_per_gpu
    limit = min(LARGEST, LAUNCH_BOUND_FLOP[config.model.dtype] / (2 * layer_parameters))
    if budget <= limit:
        return None
    return (
        f"actor.ppo_max_token_len_per_gpu={budget}: micro-batches of this model are bound by launches up to "
        f"{int(limit)} tokens"
    )


def graph_problems(config: Config, facts: Facts) -> Iterator[str]:
    """One line per problem."""
    if config.actor.cuda_graphs != "on":
        return
    if facts.cuda is False:
        yield problem(config, KEY, "needs GPUs", "set auto")
    elif blocker := graph_blocker(config):
        yield problem(config, KEY, f"not possible with {blocker}", "set auto, or that key to its default")
