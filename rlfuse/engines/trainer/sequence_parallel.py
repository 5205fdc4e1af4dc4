"""DeepSpeed Ulysses over consecutive trainer ranks: each holds a slice of a micro-batch's tokens and runs all layers.

Role: a trainer rank makes one `SequenceParallel` when it has met the others, and takes from it its `Part` of a
micro-batch of some degree; where layers are shared, too, the ranks of a part hold the same share. In attention they
trade: an all-to-all gives each rank whole sequences of some heads, another one gives the slices back (Jacobs et al.
2023, arXiv 2309.14509).
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
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor

from rlfuse.engines.trainer.attention import Segment, attend


class SequenceParallel:
    """Groups of 2, 4, ... up to `largest` models, each on `width` consecutive ranks, that follow one another.

    Every rank makes one, at the same time.
    """

    def __init__(self, rank: int, world: int, largest: int, timeout: timedelta, width: int = 1):
        self._parts: dict[int, Part] = {}
        degree = 2
        while degree <= largest:
            for first, share in product(range(0, world, degree * width), range(width)):
                ranks = range(first + share, first + degree * width, width)
                group = dist.new_group(ranks, timeout=timeout)
                if rank in ranks:
                    self._parts[degree] = Part(degree, ranks.index(rank), group)
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
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """`attention.attend` for slices [B, tokens / degree, heads, d]; heads of `query` divide by the degree."""
        copies = self.degree // math.gcd(key.shape[2], self.degree)
        if copies > 1:
            key, value = (x.repeat_interleave(copies, dim=2) for x in (key, value))
        if sinks is not None:  # of the heads that this rank gets
            sinks = sinks.chunk(self.degree)[self.index]
        return self._exchange(query, key, value, 0, None, segments, scale, window, softcap, sinks)

    def whole(self, flat: Tensor, own: Tensor, size: int) -> Tensor:
        """[r] at the places `own` of all `size`, from every rank; the gradient of others' places stays with them."""
        return _Whole.apply(flat, own, size, self.group)


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
