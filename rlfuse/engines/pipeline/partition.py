"""Which layers make a stage: cuts a model into consecutive stages of nearly equal cost. Pure; no torch.

Role: called by ranks when they load, and where devices turned slow (`slow_devices`). Embedding goes to the first stage,
norm and head to the last. Costs are modelled until passes were measured.
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
"""Of each layer, the embedding and the head, in one unit."""


@dataclass(frozen=True, slots=True)
class Part:
    """The consecutive layers of one stage."""

    layers: range
    first: bool
    """Has the embedding."""
    last: bool
    """Has the final norm."""
    head: tuple[int, int] | None = None
    """Which of how many shares of the head it has: (0, 1) is all of it."""

    @property
    def shares_head(self) -> bool:
        return self.head is not None and self.head[1] > 1


def parts(layers: Sequence[int], sharers: int = 1) -> list[Part]:
    """The stages of a model, given how many layers each has; the head is the last one's, or the first `sharers`'."""
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
        raise ValueError(f"{count} layers don't fit: the stages have memory for {tuple(most)} of them.")
    return sizes


def balanced_chunks(
    layers: Sequence[float],
    embedding: float,
    head: float,
    devices: Sequence[int],
    rates: Sequence[float] = (),
    most: Sequence[int] = (),
) -> tuple[int, ...]:
    """As `balanced`, where a device holds several stages, of which `devices` names each: devices are what is balanced.

    All layers count alike: one after the other goes where it is done soonest, and there to the smaller stage.
    """
    stages, layer = len(devices), sum(layers) / len(layers)
    if len(layers) < stages - 1:
        raise ValueError(f"{len(layers)} layers can't make {stages} stages: take at most {len(layers) + 1} stages.")
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
        raise ValueError(f"{len(layers)} layers don't fit: the stages have memory for {tuple(most)} of them.")
    return tuple(sizes)


def stage_costs(
    sizes: Sequence[int], layers: Sequence[float], embedding: float, head: float, sharers: int = 1
) -> list[float]:
    """Cost of each stage, where they have so many layers; otherwise as in `parts` and `balanced`."""
    return [
        sum(layers[i] for i in part.layers) + embedding * part.first + (head / part.head[1] if part.head else 0.0)
        for part in parts(sizes, sharers)
    ]


def logits_fraction(data: DataConfig) -> float:
    """Of a row's positions, those that predict response tokens; prompts and responses fill their limits alike.

    Example: prompts of up to 512 tokens, responses of up to 1,536: 0.75.
    """
    return data.max_response_length / (data.max_prompt_length + data.max_response_length)


def modelled_costs(config: Any, head_outputs: int, share: float, sharers: int = 1) -> LayerCosts:
    """(each layer, embedding, head) in multiply-adds per token, from a Hugging Face text config.

    `head_outputs`: vocabulary size, or 1 for values; `share`: of the positions, which reaches the head; `sharers`:
    ranks that share every layer, of which each has the whole head. Attention scores are left out: they grow with
    sequences, alike in every layer.
    """
    hidden = config.hidden_size
    width = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads  # q and o, k and v
    layer = hidden * width * heads + 3 * hidden * config.intermediate_size
    return [layer / sharers] * config.num_hidden_layers, float(hidden), hidden * head_outputs * share


def measured_costs(sizes: Sequence[int], seconds: Sequence[float], modelled: LayerCosts) -> LayerCosts:
    """The same of two or more stages that have so many layers and took so long, in the unit of what was modelled.

    All layers count alike, what the embedding takes as theirs. Example: stages of 4 and 2 layers take 8 and 10 seconds:
    a layer 1/9 of all, the head 1/3.
    """
    layers, embedding, head = modelled
    unit = (sum(layers) + embedding + head) / sum(seconds)
    layer = unit * sum(seconds[:-1]) / sum(sizes[:-1])
    return [layer] * len(layers), 0.0, max(0.0, unit * seconds[-1] - layer * sizes[-1])
