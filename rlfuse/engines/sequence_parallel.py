"""DeepSpeed Ulysses over consecutive trainer ranks: each holds a slice of a micro-batch's tokens and runs all layers.

Role: a trainer rank makes one `SequenceParallel` when it has met the others, and takes from it its `Part` of a
micro-batch of some degree. In attention the ranks of a part trade: an all-to-all gives each rank whole sequences of
some heads, another one gives the slices back (Jacobs et al. 2023, arXiv 2309.14509).
What is DeepSpeed's: `deepspeed.sequence.layer.DistributedAttention`, the differentiable all-to-all around a local
attention. Its `UlyssesSPAttentionHF` is registered once per process with one group, one batch size and one model, so
that the degree could not vary; it gathers positions again in every layer, drops padding masks, and refuses key-value
heads that neither divide the degree nor are divided by it. Here such heads are repeated the least that makes them
divisible. DeepSpeed's engines know of no sequence parallelism: to them every rank is data-parallel, and the sum over
ranks that they take is the gradient (with an mpu, ZeRO 3 would average it and ZeRO 0 to 2 would not).
Waits: for the other ranks of the part, which run the same micro-batches in the same order; at most the time-out.
"""

from __future__ import annotations

import math
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor
from transformers import PretrainedConfig

from rlfuse.engines.attention import Segment, attend
from rlfuse.engines.degrees import Costs


class SequenceParallel:
    """Groups of 2, 4, ... up to `largest` consecutive ranks; every rank makes one, at the same time."""

    def __init__(self, rank: int, world: int, largest: int, timeout: timedelta):
        self._parts: dict[int, Part] = {}
        degree = 2
        while degree <= largest:
            for first in range(0, world, degree):
                group = dist.new_group(range(first, first + degree), timeout=timeout)
                if first <= rank < first + degree:
                    self._parts[degree] = Part(degree, rank - first, group)
            degree *= 2

    def part(self, degree: int) -> Part | None:
        """This rank's part of a micro-batch of that degree; None for 1, which needs no other rank."""
        return self._parts[degree] if degree > 1 else None


class Part:
    """Slice `index` of `degree`, and the ranks that hold the others."""

    def __init__(self, degree: int, index: int, group: dist.ProcessGroup):
        self.degree, self.index, self.group = degree, index, group
        self._exchange = DistributedAttention(attend, group, scatter_idx=2, gather_idx=1)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: tuple[Segment, ...],
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        """`attention.attend` for slices [B, tokens / degree, heads, d]; heads of `query` divide by the degree."""
        copies = self.degree // math.gcd(key.shape[2], self.degree)
        if copies > 1:
            key, value = (x.repeat_interleave(copies, dim=2) for x in (key, value))
        return self._exchange(query, key, value, 0, None, segments, scale, window)

    def whole(self, flat: Tensor, own: Tensor, size: int) -> Tensor:
        """[r] at the places `own` of all `size`, from every rank; the gradient of others' places stays with them."""
        return _Whole.apply(flat, own, size, self.group)

    def exchange_speed(self, device: str, megabytes: int = 4, repeats: int = 3) -> tuple[float, float]:
        """Seconds that an all-to-all takes to start, and bytes per second that leave a rank; all of the part call."""

        def best(size: int) -> float:
            given, taken = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
            seconds = []
            for _ in range(repeats):
                dist.barrier(self.group)
                start = time.perf_counter()
                dist.all_to_all_single(taken, given, group=self.group)
                int(taken[0])  # waits for the device
                seconds.append(time.perf_counter() - start)
            return min(seconds)

        size = megabytes << 20
        start = best(self.degree)
        return start, size * (1 - 1 / self.degree) / max(best(size) - start, 1e-9)


def measured_costs(
    text: PretrainedConfig, parameters: int, flops: float, itemsize: int, part: Part, device: str
) -> Costs:
    """Of passes of a model with this text configuration: its shape says the work, `flops` and an all-to-all the rate.

    All ranks of the part call; which one's result is taken does not matter, but all must plan by the same.
    """
    heads, layers = text.num_attention_heads, text.num_hidden_layers
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    start, speed = part.exchange_speed(device)
    token, pair = 2 * parameters / flops, 4 * layers * heads * width / flops
    sent = 2 * layers * (heads + text.num_key_value_heads) * width * itemsize
    return Costs(pair / token, sent / speed / token, 4 * layers * start / token)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, flat: Tensor, own: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(own)
        whole = flat.new_zeros(size)
        whole[own] = flat
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (own,) = ctx.saved_tensors
        return gradient[own], None, None, None
