"""Measurement of the costs of sequence parallelism and of rank speeds, with passes of the real model at startup.

All trainer ranks call `measure_costs` concurrently. Passes are timed with all ranks and with some ranks active, as
ranks on CPU hosts may share cores; the minimum counts.
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
"""Function of (tokens, degree): runs this rank's part of a forward pass of one row and waits for the device."""

SHORT_ROW_TOKENS = 16
"""Tokens of the short row, whose time is mostly overhead."""
LONG_ROW_S, MAX_LONG_ROW_TOKENS = 0.1, 2048
"""Target seconds of the long row, and its maximum tokens: enough for timing, with little effect on startup."""
MIN_MEASURE_S, MIN_REPEATS, MAX_REPEATS = 0.4, 4, 10
"""Total seconds after which a measurement ends, and its minimum and maximum repeats."""


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
    """Return the costs of passes by `forward` at these degrees.

    `token`: approximate seconds per token on this rank. `lockstep`: passes are collective (ZeRO 3, or tensor
    parallelism over `width` ranks).
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
    """Stopwatch shared by all ranks, which call its methods in the same order."""

    def __init__(self, device: str):
        self._device = device

    def most(self, number: float) -> float:
        """Return the maximum of `number` over ranks."""
        found = torch.tensor(number, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def seconds(self, work: Callable[[], None], ranks: int | None = None) -> float:
        """Return the seconds of the slowest of the first `ranks` (None: all) while these run `work` concurrently."""
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
        """Return the slowdown factors of `work` on 1, 2, ..., all ranks at once; interpolated between powers of two."""
        world = dist.get_world_size()
        counts = [1 << power for power in range(world.bit_length())]
        counts += [world] * (counts[-1] < world)
        seconds = np.maximum.accumulate([self.seconds(work, count) for count in counts])
        return tuple(np.interp(range(1, world + 1), counts, seconds / seconds[0]).tolist())


def _attention(text: PreTrainedConfig, tokens: int, dtype: torch.dtype, device: str) -> None:
    """Run one layer's attention on one sequence and wait for the device."""
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    query, key = (
        torch.ones(1, tokens, count, width, dtype=dtype, device=device) for count in (heads, text.num_key_value_heads)
    )
    float(attend(query, key, key, (Segment(0, tokens),), None, None)[0, 0, 0, 0])


def matmul_parameters(
    sizes: Mapping[str, int], lookups: Collection[str], head: str | None, text: PreTrainedConfig
) -> tuple[int, int]:
    """Return the parameters that a token is multiplied by: (in the layers, in the head, which sees response tokens
    only).

    `sizes`: elements of the model's tensors. Embeddings (`lookups`) do not count; a tied one counts as the `head`. Of
    experts only the fraction used per token counts.
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
    """Fit costs to `taken`: degree -> seconds of a short and a long row; `pair`: seconds per token pair.

    The overhead of a degree is the time beyond its share of the work: a constant and a time per token.
    """
    short, long = sizes

    def line(degree: int, token: float) -> tuple[float, float]:
        """Return (constant, seconds per token) in addition to compute at `token` seconds per token."""
        left = [t - (token * n + pair * n**2 / 2) / degree for t, n in zip(taken[degree], sizes, strict=True)]
        slope = max((left[1] - left[0]) / (long - short), 0.0)
        return max(left[0] - slope * short, 0.0), slope

    token = line(1, 0.0)[1] or taken[1][1] / long
    overheads = {degree: Overhead(*(seconds / token for seconds in line(degree, token))) for degree in taken}
    return Costs(pair / token, overheads, slower)


def matmul_rate(dtype: torch.dtype, device: str) -> float:
    """Return the best measured FLOP/s of square matrix products on this rank: the peak for utilisation."""
    size = 512 if device == "cpu" else 8192
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best, began, repeats = math.inf, time.perf_counter(), 0
    while repeats < 5 or time.perf_counter() - began < 0.1:  # other processes may interrupt a short measurement
        start = time.perf_counter()
        product = left @ right
        float(product[0, 0])  # waits for the device
        best, repeats = min(best, time.perf_counter() - start), repeats + 1
    return 2 * size**3 / best
