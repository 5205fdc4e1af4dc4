"""The head of a policy whose vocabulary all devices of a pipeline share.

Role: a pipeline rank makes one `HeadShares` per such model; the executor calls it at an `H` of the schedule. The last
stage sends hidden states to all devices; each computes its share of the logits and exchanges an online softmax [4, R];
gradients of the hidden states are summed on the last stage. `fusion.schedules.shared_heads` has the order. NCCL
connects before a schedule runs, as in `lanes`. Waits for the devices of the pipeline, at most the executor's limit.
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

Arrived = Callable[[Any], None]
"""Waits for a collective."""


# Cached: models of equal degree share the groups, and every gloo group starts threads.
@cache
def group_of(*ranks: int, limit: timedelta | None = None) -> Any:
    """Of these ranks, whose calls wait so long at most, else as the default group's; all ranks call."""
    return dist.new_group(list(ranks), limit)


class HeadShares:
    """This device among those of its pipeline. All ranks make theirs at the same time. An exporter's `ranks`."""

    def __init__(self, pipelines: Pipelines, device: int, timeout: float):
        """`device`: within the block. `timeout`: the executor's, in seconds."""
        self.degree, self.layout, rank = pipelines.stages, pipelines, dist.get_rank()
        limit = timedelta(seconds=COLLECTIVE_TIMEOUT_FACTOR * timeout)
        for ranks in pipelines.mesh(dist.get_world_size()).groups("pp"):
            group = group_of(*ranks, limit=limit)
            if rank in ranks:
                self.group, self._first = group, ranks[0]
        self.index = pipelines.stages_on(device)[0]
        self.last = self._first + pipelines.device(0, pipelines.depth - 1)
        """The rank that has the last stage."""
        self.is_writer = rank == self.last
        self._connect()

    def _connect(self) -> None:
        number = torch.zeros(1, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        for exchange in (self.broadcast, self.gather, self.sum):
            exchange(number, lambda work: work.wait())
        number.item()  # the device has been through all of them

    @property
    def awaited(self) -> int:
        """The rank to name where a wait for the others is in vain: the last stage's, there another one's."""
        return self._first + (self.last == self._first) if self.is_writer else self.last

    def broadcast(self, hidden: Tensor, arrived: Arrived) -> None:
        """Into `hidden` on every device, what it is on the last stage's."""
        arrived(dist.broadcast(hidden, self.last, group=self.group, async_op=True))

    def gather(self, statistics: Tensor, arrived: Arrived) -> Tensor:
        """[...] -> [shares, ...]"""
        parts = [torch.empty_like(statistics) for _ in range(self.degree)]
        arrived(dist.all_gather(parts, statistics, group=self.group, async_op=True))
        return torch.stack(parts)

    def sum(self, gradient: Tensor, arrived: Arrived) -> None:
        """Into `gradient` on the last stage's device, those of all."""
        arrived(dist.reduce(gradient, self.last, group=self.group, async_op=True))

    def gather_whole(self, tensor: Tensor, dim: int) -> Tensor:
        """From the shares of a tensor, cut along `dim`, on the last stage's rank; every rank of the pipeline calls."""
        parts = [torch.empty_like(tensor) for _ in range(self.degree)] if self.is_writer else None
        dist.gather(tensor.detach().contiguous(), parts, self.last, group=self.group)
        order = [self.layout.device(0, share) for share in range(self.degree)]
        return torch.cat([parts[device] for device in order], dim) if parts else tensor

    def add_tied_gradients(self, models: Mapping[int, nn.Module]) -> None:
        """Rows of the embedding and shares of a head that are one tensor both get the sum of their gradients."""
        share, rank = models[self.index].get_parameter(HEAD), dist.get_rank()
        first = self._first + self.layout.device(0, 0)
        if rank == first:
            rows = gradient_of(models[0].get_parameter(EMBEDDING)).chunk(self.degree)
            for index, own in enumerate(rows):
                other = self._first + self.layout.device(0, index)
                sent = gradient_of(share) if other == rank else torch.empty_like(own)
                if other != rank:
                    dist.recv(sent, other, self.group)
                own += sent
                sent.copy_(own) if other == rank else dist.send(own, other, self.group)
        else:
            dist.send(gradient_of(share), first, self.group)
            dist.recv(gradient_of(share), first, self.group)


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """What is summed so far, if only zeros."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    return parameter.grad
