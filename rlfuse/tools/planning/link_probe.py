"""Measure latency and bandwidth between all nodes of a Ray cluster (`rlfuse calibrate --links`).

Pairs are measured in rounds in which each node occurs once at most, over gloo, or NCCL on GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from statistics import median

import numpy as np
import ray
import torch
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import distributed

from rlfuse.cluster.nodes import Node
from rlfuse.cluster.rank_store import STORE, StoreServer
from rlfuse.errors import EngineError

SIZES = (1 << 10, 1 << 18, 1 << 22, 1 << 25)
REPEATS = 5  # measurements per size, after one warm-up; the median counts
ROUND_S = 180.0
Link = tuple[float, float]  # (latency in seconds, bytes per second)


def rounds_of(count: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs that cover all pairs of `count` nodes (circle method for round-robin)."""
    ring = [*range(count), *([-1] if count % 2 else [])]
    found = []
    for _ in range(len(ring) - 1):
        pairs = zip(ring[: len(ring) // 2], reversed(ring), strict=False)
        found.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return [each for each in found if each]


def measure(nodes: Sequence[Node], device: str, print_line: Callable[[str], None]) -> dict[tuple[int, int], Link]:
    """Return the links by pair of node indices. Raises EngineError, naming pairs that did not respond."""
    options = {"num_cpus": 0, "num_gpus": 1 if device == "cuda" else 0}
    remote = ray.remote(concurrency_groups={STORE: 1})(_End)
    ends = [
        remote.options(**options, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote()
        for node in nodes
    ]
    found: dict[tuple[int, int], Link] = {}
    try:
        rounds = rounds_of(len(nodes))
        for number, pairs in enumerate(rounds, 1):
            for pair, seconds in _round(ends, nodes, pairs, device).items():
                found[pair] = _fitted(seconds)
            print_line(f"{number} of {len(rounds)} rounds: {len(found)} pairs measured")
    finally:
        for end in ends:
            ray.kill(end)
    return found


def _round(ends: Sequence, nodes: Sequence[Node], pairs: Sequence[tuple[int, int]], device: str) -> dict:
    names = ", ".join(f"{nodes[a]} and {nodes[b]}" for a, b in pairs)
    try:
        ray.get([ends[a].open_store.remote() for a, _ in pairs], timeout=ROUND_S)
        calls = {
            pair: [ends[each].exchange.remote(rank, ends[pair[0]], device) for rank, each in enumerate(pair)]
            for pair in pairs
        }
        return {pair: ray.get(call, timeout=ROUND_S)[0] for pair, call in calls.items()}
    except (RayError, TimeoutError) as error:
        why = str(error).strip().splitlines()
        raise EngineError(
            f"links between {names}: no response within {ROUND_S:g} s ({why[-1] if why else type(error).__name__}); "
            "check that these nodes can reach each other on all ports"
        ) from error


def _fitted(seconds: Sequence[float]) -> Link:
    weights = 1 / np.array(seconds)
    columns = np.stack([np.ones(len(SIZES)), np.array(SIZES, float)], axis=1) * weights[:, None]
    first, byte = np.linalg.lstsq(columns, np.ones(len(SIZES)), rcond=None)[0]
    return max(0.0, float(first)), 1 / max(float(byte), 1e-15)


class _End(StoreServer):
    def exchange(self, rank: int, first: ray.actor.ActorHandle, device: str) -> list[float]:
        backend, limit = ("nccl" if device == "cuda" else "gloo"), timedelta(seconds=ROUND_S / 2)
        store = self.use_store(rank, first, limit)
        distributed.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=limit)
        try:
            return [self._seconds(torch.ones(size // 4, device=device), 1 - rank) for size in SIZES]
        finally:
            distributed.destroy_process_group()

    def _seconds(self, mine: torch.Tensor, peer: int) -> float:
        theirs, taken = torch.empty_like(mine), []
        for _ in range(REPEATS + 1):
            distributed.barrier()
            began = time.perf_counter()
            sends = [
                distributed.P2POp(distributed.isend, mine, peer),
                distributed.P2POp(distributed.irecv, theirs, peer),
            ]
            for work in distributed.batch_isend_irecv(sends):
                work.wait()
            if mine.is_cuda:
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
        return median(taken[1:])
