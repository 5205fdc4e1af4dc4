"""Which layers make a stage: cuts a model into consecutive stages of nearly equal cost. Pure; no torch.

Role: called by ranks when they load, and where devices turned slow (`slow_devices`). Embedding goes to the first stage,
norm and head to the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

LayerCosts = tuple[list[float], float, float]
"""Of each layer, the embedding and the head, in one unit."""


@dataclass(frozen=True, slots=True)
class Part:
    """The consecutive layers of one stage."""

    layers: range
    first: bool
    """Has the embedding."""
    last: bool
    """Has the final norm and the head."""


def parts(layers: Sequence[int]) -> list[Part]:
    """The stages of a model, given how many layers each has."""
    ends = list(accumulate(layers, initial=0))
    return [Part(range(a, b), i == 0, i == len(layers) - 1) for i, (a, b) in enumerate(pairwise(ends))]


def balanced(
    layers: Sequence[float],
    embedding: float,
    head: float,
    stages: int,
    rates: Sequence[float] = (),
    most: Sequence[int] = (),
) -> tuple[int, ...]:
    """Layers per stage such that the slowest stage is as fast as can be, and of those the most even cut.

    `layers`: cost of each, in any unit; `embedding` and `head` in the same unit. The last stage may be the head alone,
    as wide vocabularies cost several layers; all others have at least one layer. `rates`: of each stage, by which a
    slow device's costs are multiplied; `most`: layers that each stage has memory for. ValueError with too few layers,
    or with memory for fewer.
    """
    count = len(layers)
    rates, most = rates or [1.0] * stages, most or [count] * stages
    if stages < 1 or count < max(1, stages - 1):
        raise ValueError(f"{count} layers can't make {stages} stages: take at most {count + 1} stages.")
    sums = list(accumulate(layers, initial=0.0))

    @cache
    def cut(stage: int, start: int) -> tuple[float, float, tuple[int, ...]]:
        """(slowest stage, sum of squares, layers per stage) of the best cut of layers from `start` on."""
        first = embedding if stage == 0 else 0.0
        if stage == stages - 1:
            cost = (first + sums[count] - sums[start] + head) * rates[stage]
            return (cost if count - start <= most[stage] else math.inf), cost * cost, (count - start,)
        options = []
        # each later stage but the last needs a layer, too
        for end in range(start + 1, count - (stages - 2 - stage) + 1):
            cost = (first + sums[end] - sums[start]) * rates[stage] if end - start <= most[stage] else math.inf
            slowest, squares, sizes = cut(stage + 1, end)
            options.append((max(cost, slowest), cost * cost + squares, (end - start, *sizes)))
        return min(options)

    slowest, _, sizes = cut(0, 0)
    if slowest == math.inf:
        raise ValueError(f"{count} layers don't fit stages that have memory for {tuple(most)} of them.")
    return sizes


def stage_costs(sizes: Sequence[int], layers: Sequence[float], embedding: float, head: float) -> list[float]:
    """Cost of each stage, where they have so many layers; otherwise as in `balanced`."""
    return [sum(layers[i] for i in part.layers) + embedding * part.first + head * part.last for part in parts(sizes)]


def modelled_costs(config: Any, head_outputs: int, kept: float = 0.5) -> LayerCosts:
    """(each layer, embedding, head) in multiply-adds per token, from a Hugging Face text config.

    `head_outputs`: vocabulary size, or 1 for values. `kept`: share of positions that reach the head, since only those
    that predict response tokens do. Attention scores are left out: they grow with sequences, alike in every layer.
    """
    hidden = config.hidden_size
    width = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads  # q and o, k and v
    layer = hidden * width * heads + 3 * hidden * config.intermediate_size
    return [float(layer)] * config.num_hidden_layers, float(hidden), float(hidden * head_outputs * kept)
