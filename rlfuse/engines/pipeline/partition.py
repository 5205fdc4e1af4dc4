"""Split a model into consecutive stages of nearly equal cost. Pure functions without torch.

Role: called by ranks when they load, and when devices become slow (`slow_devices`). The first stage has the embedding,
the last one norm and head. Costs are modelled until passes have been measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

from rlfuse.config.schema import DataConfig

LayerCosts = tuple[list[float], float, float]
"""Costs of each layer, of the embedding and of the head, in the same unit."""


@dataclass(frozen=True, slots=True)
class Part:
    """The consecutive layers of one stage."""

    layers: range
    first: bool
    """Has the embedding."""
    last: bool
    """Has the final norm."""
    head: tuple[int, int] | None = None
    """(index, count) of its share of the head; (0, 1) is the whole head."""

    @property
    def shares_head(self) -> bool:
        return self.head is not None and self.head[1] > 1


def parts(layers: Sequence[int], sharers: int = 1) -> list[Part]:
    """Return the stages of a model with this many layers each. The head is on the last stage, or shared by the first
    `sharers` stages."""
    ends = list(accumulate(layers, initial=0))
    first = len(layers) - 1 if sharers == 1 else 0
    heads = {first + share: (share, sharers) for share in range(sharers)}
    return [Part(range(a, b), i == 0, i == len(layers) - 1, heads.get(i)) for i, (a, b) in enumerate(pairwise(ends))]


def balanced(
    layers: Sequence[float],
    embedding: float,
    head: float,
    stages: int,
    rates: Sequence[float] = (),
    most: Sequence[int] = (),
) -> tuple[int, ...]:
    """Return the layers per stage that minimize the time of the slowest stage; among equals, the most even split.

    `layers`: cost of each, in any unit; `embedding` and `head` in the same unit. The last stage may consist of the head
    only, since large vocabularies cost as much as several layers; all others have at least one layer. `rates`: slowdown
    of each stage, a factor of its costs; `most`: maximum layers per stage, by memory. Raises ValueError if there are
    too few layers, or not enough memory.
    """
    count = len(layers)
    rates, most = rates or [1.0] * stages, most or [count] * stages
    if stages < 1 or count < max(1, stages - 1):
        raise ValueError(f"{count} layers can't be split into {stages} stages; use at most {count + 1}.")
    sums = list(accumulate(layers, initial=0.0))

    @cache
    def cut(stage: int, start: int) -> tuple[float, float, tuple[int, ...]]:
        """Return (slowest stage, sum of squares, layers per stage) of the best split of layers from `start` on."""
        first = embedding if stage == 0 else 0.0
        if stage == stages - 1:
            cost = (first + sums[count] - sums[start] + head) * rates[stage]
            return (cost if count - start <= most[stage] else math.inf), cost * cost, (count - start,)
        options = []
        # each later stage except the last needs a layer
        for end in range(start + 1, count - (stages - 2 - stage) + 1):
            cost = (first + sums[end] - sums[start]) * rates[stage] if end - start <= most[stage] else math.inf
            slowest, squares, sizes = cut(stage + 1, end)
            options.append((max(cost, slowest), cost * cost + squares, (end - start, *sizes)))
        return min(options)

    slowest, _, sizes = cut(0, 0)
    if slowest == math.inf:
        raise ValueError(f"{count} layers don't fit: the stages have memory for {tuple(most)} layers.")
    return sizes


def balanced_chunks(
    layers: Sequence[float],
    embedding: float,
    head: float,
    devices: Sequence[int],
    rates: Sequence[float] = (),
    most: Sequence[int] = (),
) -> tuple[int, ...]:
    """Return the layers per stage if a device holds several stages: balances the devices, `devices`: that of each
    stage.

    Assumes equal layers. Each layer is assigned to the device that finishes first, and there to the smaller stage.
    """
    stages, layer = len(devices), sum(layers) / len(layers)
    if len(layers) < stages - 1:
        raise ValueError(f"{len(layers)} layers can't be split into {stages} stages; use at most {len(layers) + 1}.")
    rates, most = rates or [1.0] * stages, most or [len(layers)] * stages
    costs = [layer] * (stages - 1) + [head]
    costs[0] += embedding
    sizes = [1] * (stages - 1) + [0]

    def order(stage: int) -> tuple[float, float, int]:
        load = sum(rates[i] * costs[i] for i in range(stages) if devices[i] == devices[stage])
        return load + rates[stage] * layer, costs[stage], stage

    for _ in range(len(layers) - sum(sizes)):
        stage = min((i for i in range(stages) if sizes[i] < most[i]), key=order, default=stages - 1)
        sizes[stage] += 1
        costs[stage] += layer
    if any(size > limit for size, limit in zip(sizes, most, strict=True)):
        raise ValueError(f"{len(layers)} layers don't fit: the stages have memory for {tuple(most)} layers.")
    return tuple(sizes)


def stage_costs(
    sizes: Sequence[int], layers: Sequence[float], embedding: float, head: float, sharers: int = 1
) -> list[float]:
    """Return the cost of each stage with `sizes` layers; other arguments as in `parts` and `balanced`."""
    return [
        sum(layers[i] for i in part.layers) + embedding * part.first + (head / part.head[1] if part.head else 0.0)
        for part in parts(sizes, sharers)
    ]


def logits_fraction(data: DataConfig) -> float:
    """Return the fraction of a row's positions that predict response tokens, assuming equally filled length limits.

    Example: prompts of up to 512 tokens, responses of up to 1,536: 0.75.
    """
    return data.max_response_length / (data.max_prompt_length + data.max_response_length)


def modelled_costs(config: Any, head_outputs: int, share: float, sharers: int = 1) -> LayerCosts:
    """Return (each layer, embedding, head) in multiply-adds per token, from a Hugging Face text config.

    `head_outputs`: vocabulary size, or 1 for values; `share`: fraction of the positions that reach the head; `sharers`:
    tensor-parallel ranks, each of which has the whole head. Attention scores are omitted: they grow with the sequence
    length, equally in every layer.
    """
    hidden = config.hidden_size
    width = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads  # q and o, k and v
    layer = hidden * width * heads + 3 * hidden * config.intermediate_size
    return [layer / sharers] * config.num_hidden_layers, float(hidden), hidden * head_outputs * share


def measured_costs(sizes: Sequence[int], seconds: Sequence[float], modelled: LayerCosts) -> LayerCosts:
    """Return the costs measured on two or more stages with `sizes` layers, in the unit of the modelled costs.

    Layers count equally and include the embedding. Example: if stages of 4 and 2 layers take 8 and 10 seconds, a layer
    costs 1/9 of the total and the head 1/3.
    """
    layers, embedding, head = modelled
    unit = (sum(layers) + embedding + head) / sum(seconds)
    layer = unit * sum(seconds[:-1]) / sum(sizes[:-1])
    return [layer] * len(layers), 0.0, max(0.0, unit * seconds[-1] - layer * sizes[-1])
