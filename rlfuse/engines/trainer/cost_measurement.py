"""What sequence parallelism costs on these ranks, and their speed: passes of the real model, timed at start-up.

Role: every trainer rank calls `measure_costs` at the same time; the driver plans with one rank's result. Passes are
timed while all ranks run one and while only some do, as ranks on CPU hosts may share cores; the minimum counts.
Waits: for the other ranks in every measurement, at most the process group's time-out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from rlfuse.config.facts import EXPERTS, EXPERTS_USED
from rlfuse.engines.trainer.attention import Segment, attend
from rlfuse.engines.trainer.sequence_parallel_packing import Costs, Overhead

Forward = Callable[[int, int], None]
"""(tokens, degree): this rank's part of a pass of one row, without gradients; returns when the device is done."""

SHORT_ROW_TOKENS = 16
"""Tokens of a row that takes little more than its start."""
LONG_ROW_S, MAX_LONG_ROW_TOKENS = 0.1, 2048
"""What a long row should take, and its most tokens: enough to be timed, not so much that a start-up shows it."""
MIN_MEASURE_S, MIN_REPEATS, MAX_REPEATS = 0.4, 4, 10
"""A measurement is repeated until it has taken so long, but at least and at most so many times."""


def measure_costs(
    forward: Forward,
    degrees: Sequence[int],
    text: PreTrainedConfig,
    token: float,
    dtype: torch.dtype,
    device: str,
    lockstep: bool,
    width: int = 1,
) -> Costs:
    """Costs of passes by `forward` at these degrees.

    `token`: about the seconds that one takes on this rank. `lockstep`: no rank runs a pass without others (ZeRO 3, or
    layers cut over `width` ranks).
    """
    watch = Stopwatch(device)
    longest = min(MAX_LONG_ROW_TOKENS, getattr(text, "max_position_embeddings", MAX_LONG_ROW_TOKENS))
    long = (
        min(longest, max(4 * SHORT_ROW_TOKENS, int(LONG_ROW_S / watch.most(token))))
        // SHORT_ROW_TOKENS
        * SHORT_ROW_TOKENS
    )
    slower = (1.0,) if lockstep else watch.measure_contention(lambda: forward(long, 1))
    pair = watch.seconds(lambda: _attention(text, long, dtype, device)) / (long**2 / 2) * text.num_hidden_layers / width
    taken = {d: [watch.seconds(lambda d=d, n=n: forward(n, d)) for n in (SHORT_ROW_TOKENS, long)] for d in degrees}
    return fit_costs(taken, (SHORT_ROW_TOKENS, long), pair, slower)


class Stopwatch:
    """Of all ranks together: each calls its methods in the same order."""

    def __init__(self, device: str):
        self._device = device

    def most(self, number: float) -> float:
        """The largest over ranks, the same on all of them."""
        found = torch.tensor(number, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def seconds(self, work: Callable[[], None], ranks: int | None = None) -> float:
        """How long the slowest of the first `ranks` (None: all) takes while all of them are at it."""
        mine, best, spent, count = ranks is None or dist.get_rank() < ranks, math.inf, 0.0, 0
        while count < MIN_REPEATS or (spent < MIN_MEASURE_S and count < MAX_REPEATS):
            dist.barrier()
            began = time.perf_counter()
            if mine:
                work()
            taken = self.most(mine * (time.perf_counter() - began))
            best, spent, count = min(best, taken), spent + taken, count + 1
        return best

    def measure_contention(self, work: Callable[[], None]) -> tuple[float, ...]:
        """How many times longer `work` takes when 1, 2, ... and all ranks are at it; measured at powers of two."""
        world = dist.get_world_size()
        counts = [1 << power for power in range(world.bit_length())]
        counts += [world] * (counts[-1] < world)
        seconds = np.maximum.accumulate([self.seconds(work, count) for count in counts])
        return tuple(np.interp(range(1, world + 1), counts, seconds / seconds[0]).tolist())


def _attention(text: PreTrainedConfig, tokens: int, dtype: torch.dtype, device: str) -> None:
    """That of one layer to one sequence."""
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    query, key = (
        torch.ones(1, tokens, count, width, dtype=dtype, device=device) for count in (heads, text.num_key_value_heads)
    )
    float(attend(query, key, key, (Segment(0, tokens),), None, None)[0, 0, 0, 0])


def matmul_parameters(
    sizes: Mapping[str, int], lookups: Collection[str], head: str | None, text: PreTrainedConfig
) -> tuple[int, int]:
    """Parameters that a token is multiplied by: (of the layers, of the head, which only response tokens reach).

    `sizes`: of the model's tensors. Embeddings are `lookups` and no products; a tied one is the `head`. A token passes
    through some of the experts.
    """
    layers = {name: size for name, size in sizes.items() if name != head and name not in lookups}
    experts = sum(size for name, size in layers.items() if "experts" in name.split("."))
    used, count = (
        next((v for name in names if (v := getattr(text, name, None))), 1) for names in (EXPERTS_USED, EXPERTS)
    )
    return sum(layers.values()) - round(experts * (1 - used / count)), 0 if head is None else sizes[head]


def fit_costs(
    taken: dict[int, Sequence[float]], sizes: tuple[int, int], pair: float, slower: tuple[float, ...]
) -> Costs:
    """Costs from seconds by degree of a short and a long row, all ranks at work; `pair`: seconds of a pair of tokens.

    What a cut pass takes beyond its share of the whole one's work is its overhead: a start, and some for each token.
    """
    short, long = sizes

    def line(degree: int, token: float) -> tuple[float, float]:
        """(start, seconds for each token) beyond work in which a token takes so long."""
        left = [t - (token * n + pair * n**2 / 2) / degree for t, n in zip(taken[degree], sizes, strict=True)]
        slope = max((left[1] - left[0]) / (long - short), 0.0)
        return max(left[0] - slope * short, 0.0), slope

    token = line(1, 0.0)[1] or taken[1][1] / long
    overheads = {degree: Overhead(*(seconds / token for seconds in line(degree, token))) for degree in taken}
    return Costs(pair / token, overheads, slower)


def matmul_rate(dtype: torch.dtype, device: str) -> float:
    """FLOP/s of square matrix products on this rank, the best of a few: the peak that utilisation is relative to."""
    size = 512 if device == "cpu" else 8192
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best, began, repeats = math.inf, time.perf_counter(), 0
    while repeats < 5 or time.perf_counter() - began < 0.1:  # other processes may interrupt a short measurement
        start = time.perf_counter()
        product = left @ right
        float(product[0, 0])  # waits for the device
        best, repeats = min(best, time.perf_counter() - start), repeats + 1
    return 2 * size**3 / best
