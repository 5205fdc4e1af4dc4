"""What every kind of trainer rank is: a process on a device that meets the others and records what it does.

Role: the part that `TrainerRank` and `PipelineRank` have in common; Ray makes an actor of either.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import deepspeed
import ray
import torch

from rlfuse.config.schema import Config
from rlfuse.engines.optimizing import to_device, to_host
from rlfuse.observe.events import Recorder, Span


class Rank:
    """One of `world` processes, bound to `core` if given: `join` meets the others."""

    def __init__(self, config: Config, rank: int, world: int, device: str, core: int | None = None):
        self.config, self.rank, self.world, self.device = config, rank, world, device
        self.recorder = Recorder(f"trainer/{rank}")
        self.engines: dict[str, Any] = {}
        self.beside: list[torch.nn.Module] = []
        if core is not None:
            for thread in os.listdir("/proc/self/task"):  # Ray's threads run already; later ones inherit
                os.sched_setaffinity(int(thread), {core})

    def address(self) -> tuple[str, int]:
        """Where this rank's host is, and a port that is free there: rank 0 tells it to the others."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def join(self, host: str, port: int) -> None:
        """Meet the other ranks; waits for all of them, at most cluster.timeout_s."""
        os.environ |= {"RANK": str(self.rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(self.world)}
        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        limit = timedelta(seconds=self.config.cluster.timeout_s)
        if self.device == "cpu":
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        deepspeed.init_distributed("gloo" if self.device == "cpu" else "nccl", timeout=limit, verbose=False)

    def switch(self, role: str) -> None:
        """Take the device (`trainer`) or leave it (`rollout`). On CPU hosts there is nothing to move."""
        with self.recorder.span("switch", cause="role", attributes={"to": role}):
            for model in (*self.engines.values(), *self.beside) if self.device != "cpu" else ():
                to_device(model, self.device) if role == "trainer" else to_host(model)

    def drain(self) -> list[Span]:
        """Spans since the last call."""
        return self.recorder.drain()
