"""Ulysses sequence parallelism: consecutive trainer ranks run all layers on a slice each of a micro-batch's tokens.

In attention an all-to-all gives each rank whole sequences of some heads, another one gives the slices back (Jacobs et
al. 2023, arXiv 2309.14509). Key-value heads that the degree does not divide are repeated as little as makes them
divisible. To backends every rank is data-parallel, and the sum over ranks is the gradient.
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
    """Process groups of 2, 4, ... up to the mesh's `sp` consecutive models; all ranks create it at the same time."""

    def __init__(self, mesh: ParallelMesh, rank: int, timeout: timedelta):
        self._parts: dict[int, SequenceSlice] = {}
        for degree in degrees_up_to(mesh.sp)[1:]:
            for ranks in mesh.at_degree(degree).groups("sp"):
                group = dist.new_group(ranks, timeout=timeout)
                if rank in ranks:
                    self._parts[degree] = SequenceSlice(degree, ranks.index(rank), group)

    def part(self, degree: int) -> SequenceSlice | None:
        """Return this rank's slice of a micro-batch of this degree; None for degree 1."""
        return self._parts[degree] if degree > 1 else None


class SequenceSlice:
    """Slice `index` of `degree`, with the process group of all slices."""

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
        """Compute `attention.attend` for slices [B, tokens / degree, heads, d]; the degree divides the heads of
        `query`."""
        copies = self.degree // math.gcd(key.shape[2], self.degree)
        if copies > 1:
            key, value = (x.repeat_interleave(copies, dim=2) for x in (key, value))
        if sinks is not None:  # those of this rank's heads
            sinks = sinks.chunk(self.degree)[self.index]
        query, key, value = (_Exchange.apply(x, self, 2, 1) for x in (query, key, value))
        return _Exchange.apply(attend(query, key, value, segments, scale, window, softcap, sinks), self, 1, 2)

    def exchange(self, tensor: Tensor, split: int, join: int) -> Tensor:
        """Send the i-th part of a tensor along `split` to rank i; concatenate the received parts along `join`."""
        sent = torch.stack(tensor.chunk(self.degree, split))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return torch.cat(received.unbind(), join)

    def gather_slices(self, flat: Tensor, indices: Tensor, size: int) -> Tensor:
        """Gather the ranks' [r] entries at indices `indices` to [size]; each rank's gradient covers only its own
        entries."""
        return _GatherSlices.apply(flat, indices, size, self.group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, part: SequenceSlice, split: int, join: int) -> Tensor:
        ctx.part, ctx.back = part, (join, split)
        return part.exchange(tensor, split, join)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.part.exchange(gradient, *ctx.back), None, None, None


class _GatherSlices(torch.autograd.Function):
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
