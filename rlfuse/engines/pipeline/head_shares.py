"""Vocabulary-parallel head: all devices of a pipeline hold a share of the policy's vocabulary.

The last stage broadcasts hidden states; each device computes its share of the logits and exchanges an online softmax
[4, R]; gradients of the hidden states are summed on the last stage, in the order of `fusion.schedules.shared_heads`.
Waits for the pipeline's devices, at most the executor's limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlfuse.engines.pipeline.layout import Pipelines
from rlfuse.engines.pipeline.loading import EMBEDDING, HEAD
from rlfuse.engines.pipeline.p2p_groups import COLLECTIVE_TIMEOUT_FACTOR

WaitFor = Callable[[Any], None]
"""Function that waits for a collective."""


# Cached: models of equal degree share the groups, and every gloo group starts threads.
@cache
def process_group(*ranks: int, limit: timedelta | None = None) -> Any:
    """Return the process group of `ranks` with timeout `limit`, by default that of the default group; collective."""
    return dist.new_group(list(ranks), limit)


class HeadShares:
    """Head share of this device and the group of its pipeline. All ranks create theirs at the same time. Also serves as
    the `ranks` of an exporter."""

    def __init__(self, pipelines: Pipelines, device: int, timeout: float):
        """Create and connect the group. `device`: index within the block. `timeout`: of the executor, in seconds."""
        self.degree, self.layout, rank = pipelines.stages, pipelines, dist.get_rank()
        limit = timedelta(seconds=COLLECTIVE_TIMEOUT_FACTOR * timeout)
        for ranks in pipelines.mesh(dist.get_world_size()).groups("pp"):
            group = process_group(*ranks, limit=limit)
            if rank in ranks:
                self.group, self._first = group, ranks[0]
        self.index = pipelines.stages_on(device)[0]
        self.last = self._first + pipelines.device(0, pipelines.depth - 1)
        """Rank of the last stage."""
        self.is_writer = rank == self.last
        self._connect()

    def _connect(self) -> None:
        number = torch.zeros(1, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        for exchange in (self.broadcast, self.gather, self.sum):
            exchange(number, lambda work: work.wait())
        number.item()  # wait until the device has run all of them

    @property
    def awaited_rank(self) -> int:
        """Rank to name if a collective times out: that of the last stage, or on that rank another one."""
        return self._first + (self.last == self._first) if self.is_writer else self.last

    def broadcast(self, hidden: Tensor, wait_for: WaitFor) -> None:
        """Broadcast `hidden` from the last stage to all devices, in place."""
        wait_for(dist.broadcast(hidden, self.last, group=self.group, async_op=True))

    def gather(self, statistics: Tensor, wait_for: WaitFor) -> Tensor:
        """Return the statistics [...] of all shares, [shares, ...]."""
        parts = [torch.empty_like(statistics) for _ in range(self.degree)]
        wait_for(dist.all_gather(parts, statistics, group=self.group, async_op=True))
        return torch.stack(parts)

    def sum(self, gradient: Tensor, wait_for: WaitFor) -> None:
        """Sum `gradient` of all devices into that of the last stage."""
        wait_for(dist.reduce(gradient, self.last, group=self.group, async_op=True))

    def gather_whole(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the full tensor from shares along `dim`, on the rank of the last stage; collective over the
        pipeline."""
        parts = [torch.empty_like(tensor) for _ in range(self.degree)] if self.is_writer else None
        dist.gather(tensor.detach().contiguous(), parts, self.last, group=self.group)
        order = [self.layout.device(0, share) for share in range(self.degree)]
        return torch.cat([parts[device] for device in order], dim) if parts else tensor

    def add_tied_gradients(self, models: Mapping[int, nn.Module]) -> None:
        """Set the gradients of tied embedding rows and head shares to their sum."""
        share, rank = models[self.index].get_parameter(HEAD), dist.get_rank()
        first = self._first + self.layout.device(0, 0)
        if rank == first:
            rows = gradient_of(models[0].get_parameter(EMBEDDING)).chunk(self.degree)
            for index, part in enumerate(rows):
                other = self._first + self.layout.device(0, index)
                sent = gradient_of(share) if other == rank else torch.empty_like(part)
                if other != rank:
                    dist.recv(sent, other, self.group)
                part += sent
                sent.copy_(part) if other == rank else dist.send(part, other, self.group)
        else:
            dist.send(gradient_of(share), first, self.group)
            dist.recv(gradient_of(share), first, self.group)


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of `parameter`, zeros if it has none yet."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    return parameter.grad
