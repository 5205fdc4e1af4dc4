"""Point-to-point process groups of the stages: one group of two ranks per lane, connected before the first transfer.

An NCCL communicator runs calls in the order of posting, so a send must not share one with earlier receives whose peer
may wait for it. NCCL connects two ranks in their first call and blocks the host meanwhile, so one number is sent
through every lane here, in the same order on all ranks. Waits slightly more than `timeout` seconds. (Not tested on
GPUs.)
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlfuse.engines.pipeline.layout import Pipelines, mesh_of
from rlfuse.fusion.schedules.transfers import Lane, lanes

COLLECTIVE_TIMEOUT_FACTOR = 1.25
"""Multiple of the timeout of other waits at which torch's NCCL watchdog ends the process: their errors are more
specific."""
CHANNELS = 4
"""NCCL channels of a communicator; a waiting receive occupies as many of the device's 100 or more multiprocessors."""


class P2PGroups:
    """Mapping from lanes to the process groups of this rank."""

    def __init__(self, layout: Sequence[Pipelines], timeout: float):
        self.mesh, self.rank = mesh_of(layout, dist.get_world_size()), dist.get_rank()
        blocks, limit = self.mesh.groups("pp"), timedelta(seconds=COLLECTIVE_TIMEOUT_FACTOR * timeout)
        (self._devices,) = (ranks for ranks in blocks if self.rank in ranks)
        self._groups: dict[Lane, Any] = {}
        for lane in (lane for pipelines in layout for lane in lanes(pipelines)):
            for ranks in blocks:  # one block, with the same share of layers
                pair = ranks[lane.sender], ranks[lane.receiver]
                group = dist.new_group(list(pair), limit, pg_options=_options(limit))
                if self.rank in pair:
                    self._groups[lane] = group
        self._connect()

    def __getitem__(self, lane: Lane) -> Any:
        return self._groups[lane]

    def members(self, lane: Lane) -> tuple[int, int]:
        """Return the ranks of sender and receiver, one of which is this rank."""
        return self._devices[lane.sender], self._devices[lane.receiver]

    def _connect(self) -> None:
        number = torch.zeros(1, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        for lane, group in self._groups.items():
            sender, receiver = self.members(lane)
            if self.rank == sender:
                dist.send(number, receiver, group)
            else:
                dist.recv(number, sender, group)
        number.item()  # wait until the device has run all of them

    def close(self) -> None:
        """Destroy the groups in the order of their creation; collective."""
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()


def _options(limit: timedelta) -> Any:
    """Return NCCL options: few channels, and high-priority streams, which no other group takes from torch's pool of
    32."""
    if dist.get_backend() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout, options.config.max_ctas = limit, CHANNELS
    return options
