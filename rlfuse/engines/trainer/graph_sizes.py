"""Which passes are recorded as CUDA graphs, and how many tokens they have: pure functions of a configuration.

Role: trainer ranks and the memory plan read this; it imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

from rlfuse.config.graph_checks import KEY, graph_blocker
from rlfuse.config.schema import Config

SMALLEST, LARGEST = 256, 2048
"""Tokens. A batch is padded to a power of two: above SMALLEST, fewer than half of its tokens are padding. Attention
in a graph is quadratic in all tokens of the batch, so larger batches are launched operation by operation."""
LAUNCH_BOUND_FLOP = {"bfloat16": 1e11, "float32": 1e10}
"""Of a layer's forward pass: a GPU needs less time for fewer than the CPU needs to launch the layer's operations, about
60 of 5 us, at 330 TFLOP/s (bfloat16) or 33 (float32)."""


def graph_sizes(config: Config) -> tuple[int, ...]:
    """Return the sizes that batches are padded to, ascending; the last one holds a full micro-batch or is LARGEST."""
    budget = config.actor.ppo_max_token_len_per_gpu
    largest = max(SMALLEST, min(LARGEST, 1 << (budget - 1).bit_length()))
    return tuple(1 << power for power in range(SMALLEST.bit_length() - 1, largest.bit_length()))


def why_no_graphs(config: Config, layer_parameters: float) -> str | None:
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
