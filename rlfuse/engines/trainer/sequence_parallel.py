"""Ulysses over consecutive trainer ranks: each holds a slice of a micro-batch's tokens and runs all layers.

Role: a trainer rank makes one `SequenceParallel` when it has met the others, and takes from it its `SequenceSlice` of a
micro-batch of some degree; where layers are shared, too, the ranks of a part hold the same share. In attention they
trade: an all-to-all gives each rank whole sequences of some heads, another one gives the slices back (Jacobs et al.
2023, arXiv 2309.14509).
Key-value heads that the degree does not divide are repeated as little as makes them divisible. To backends every rank
is data-parallel, and the sum over ranks is the gradient.
Waits: for the other ranks of the part, which run the same micro-batches in the same order; at most the time-out.
"""

from __future__ import annotations

import math
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rlfuse.config.parallel_mesh import ParallelMesh
from rlfuse.engines.trainer.attention import Segment, attend
from rlfuse.engines.trainer.sequence_parallel_packing import degrees_up_to


class SequenceParallel:
    """Groups of 2, 4, ... up to the mesh's `sp` models that follow one another.

    Every rank makes one, at the same time.
    """

    def __init__(self, mesh: ParallelMesh, rank: int, timeout: timedelta):
        self._parts: dict[int, SequenceSlice] = {}
        for degree in degrees_up_to(mesh.sp)[1:]:
            for ranks in mesh.at_degree(degree).groups("sp"):
                group = dist.new_group(ranks, timeout=timeout)
                if rank in ranks:
                    self._parts[degree] = SequenceSlice(degree, ranks.index(rank), group)

    def part(self, degree: int) -> SequenceSlice | None:
        """This rank's part of a micro-batch of that degree; None for 1, which needs no other rank."""
        return self._parts[degree] if degree > 1 else None


class SequenceSlice:
    """Slice `index` of `degree`, and the ranks that hold the others."""

    def __init__(self, degree: int, index: int, group: dist.ProcessGroup):
        self.degree, self.index, self.group = degree, index, group

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
        query, key, value = (_Exchange.apply(x, self, 2, 1) for x in (query, key, value))
        return _Exchange.apply(attend(query, key, value, segments, scale, window, softcap, sinks), self, 1, 2)

    def exchange(self, tensor: Tensor, split: int, join: int) -> Tensor:
        """Send the i-th part of a tensor along `split` to the i-th rank; join what comes along `join`, by rank."""
        sent = torch.stack(tensor.chunk(self.degree, split))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return torch.cat(received.unbind(), join)

    def gather_slices(self, flat: Tensor, indices: Tensor, size: int) -> Tensor:
        """[r] at the places `indices` of all `size`, from every rank; the gradient of others' places stays with them."""
        return _Whole.apply(flat, indices, size, self.group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, part: SequenceSlice, split: int, join: int) -> Tensor:
        ctx.part, ctx.back = part, (join, split)
        return part.exchange(tensor, split, join)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.part.exchange(gradient, *ctx.back), None, None, None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, flat: Tensor, indices: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(indices)
        whole = flat.new_zeros(size)
        whole[indices] = flat
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (indices,) = ctx.saved_tensors
        return gradient[indices], None, None, None
