"""Base class of `TrainerRank` and `PipelineRank`: process group, device moves, events and liveness of one rank.

Each subclass runs as a Ray actor.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from typing import Any

import psutil
import ray
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rlfuse.cluster import watchdog
from rlfuse.cluster.child_processes import bind
from rlfuse.cluster.cuda import collective_limit_s
from rlfuse.cluster.garbage import GarbageCollector
from rlfuse.cluster.host_memory import resident_mib
from rlfuse.cluster.rank_store import StoreServer
from rlfuse.config.schema import Config
from rlfuse.engines.trainer.cost_measurement import matmul_rate
from rlfuse.engines.trainer.cuda_graphs import PassGraphs
from rlfuse.engines.trainer.liveness import WATCH, Progress, Pulse
from rlfuse.engines.trainer.offloading import (
    fetch_optimizer,
    offloaded_bytes,
    release_cached,
    start_pinning,
    to_device,
    to_host,
)
from rlfuse.engines.trainer.sharded_model import ShardedModel, sharded_model
from rlfuse.errors import EngineError
from rlfuse.events import Recorder, Span
from rlfuse.protocols import DeviceSharing

FREE_TIMEOUT_S = 30.0
"""Seconds to wait for a killed process to release its device memory."""


def requires_models(method: Callable) -> Callable:
    """Decorate a rank method that uses its models: raise EngineError while they are offloaded from the device."""

    @wraps(method)
    def checked(self: Rank, *arguments: Any, **named: Any) -> Any:
        if self.is_offloaded:
            raise EngineError(
                f"trainer/{self.rank} cannot run {method.__name__}: its models are offloaded. Acquire the device first."
            )
        return method(self, *arguments, **named)

    return checked


class Rank(StoreServer):
    """One of `world` trainer processes, bound to CPU core `core` if given.

    Call `load_extensions`, then `join`, before anything else.
    """

    graphs: PassGraphs | None = None
    """CUDA graphs of the decoder passes; None where they are off."""

    def __init__(self, config: Config, rank: int, world: int, device: str, core: int | None = None):
        self.config, self.rank, self.world, self.device = config, rank, world, device
        self.recorder = Recorder(f"trainer/{rank}")
        os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # else libraries unpickle any object from checkpoints
        watchdog.register(self.recorder.where, self.recorder)
        self.garbage = GarbageCollector(self.recorder, self._used_mib)
        self.progress = Progress(device, collectives)
        self.recorder.listeners.append(self.progress.record_activity)
        if config.trainer.deterministic:  # operations without a deterministic implementation raise
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # would fill buffers of 2 GB on every call
        self.engines: dict[str, Any] = {}
        self.extra_modules: list[torch.nn.Module] = []
        self.is_offloaded, self.sharing = False, DeviceSharing()
        bind(core)  # threads started later inherit the binding; Ray's already run

    @property
    def limit_s(self) -> float:
        """Time limit of a collective. On GPUs a timeout ends the process, so it is shorter than the driver's limit."""
        return self.config.cluster.timeout_s if self.device == "cpu" else collective_limit_s(self.config)

    def load_extensions(self) -> str | None:
        """Load the backend's operations, compiling them if needed; return the reason if this has to be retried."""
        return self.backend.load_extensions(self.config, self.device)

    @property
    def backend(self) -> type[ShardedModel]:
        return sharded_model(self.config.actor.strategy)

    def _used_mib(self) -> int:
        """Return the MiB of host and device memory that this process uses."""
        return resident_mib() + (0 if self.device == "cpu" else torch.cuda.memory_allocated() >> 20)

    def meeting_place(self) -> str | None:
        """Return the rendezvous file of the ranks on one machine; None if they use a store in rank 0's memory.

        Other users can modify neither, because ranks connect to and unpickle from the addresses found there.
        """
        if self.config.cluster.ray_address is None:
            return f"{tempfile.mkdtemp()}/ranks"
        self.open_store()
        return None

    def join(self, place: str | ray.actor.ActorHandle) -> None:
        """Initialise the process group through a file or rank 0's store; wait for the other ranks at most `limit_s`."""
        self.garbage.freeze()  # freezes imported objects: backends may run a full collection for each model
        self.progress.set_call_thread()
        os.environ |= {"RANK": str(self.rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(self.world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # otherwise libraries query MPI
        if interface := interface_of(ray.util.get_node_ip_address()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        limit = timedelta(seconds=self.limit_s)
        if self.device == "cpu":
            os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # otherwise torch keeps 2,000 Python stacks
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        # Defaults of groups that backends create later; torch's are 30 minutes (gloo) and 10 minutes (nccl).
        distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = limit
        backend = "gloo" if self.device == "cpu" else "nccl"
        if isinstance(place, str):
            store: dist.Store = dist.FileStore(place, self.world)
            store.set_timeout(limit)
        else:
            store = self.use_store(self.rank, place, limit)
        device = None if self.device == "cpu" else torch.device(self.device, torch.cuda.current_device())
        dist.init_process_group(backend, None, limit, self.world, self.rank, store, device_id=device)
        self.backend.join(backend, limit)

    def switch(self, role: str) -> float:
        """Load models to the device (`trainer`) or offload them to the host (`rollout`). No-op on CPU hosts.

        Returns the estimated seconds to load the optimizer states that stay offloaded, at the speed of the weights; 0
        if none do.
        """
        offload = role != "trainer" and self.device != "cpu"
        with self.recorder.span("switch", cause="role", attributes={"to": role}):
            if offload == self.is_offloaded:
                return 0.0
            self.is_offloaded = True  # also if the move fails halfway
            models = [*self.engines.values(), *self.extra_modules]
            before, began = sum(map(offloaded_bytes, models)), time.monotonic()
            for model in models:
                to_host(model) if offload else self._load_to_device(model)
            self.is_offloaded = offload
            if offload:
                release_cached(self.sharing.max_cached_bytes)
                start_pinning(self.sharing.pinned_host_bytes - sum(map(offloaded_bytes, models)))
        left, seconds = sum(map(offloaded_bytes, models)), time.monotonic() - began
        fetched = not offload and self.config.actor.optimizer_residency == "forecast"
        return seconds * left / (before - left) if fetched and left else 0.0

    def device_bytes(self) -> int:
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory

    def share(self, sharing: DeviceSharing) -> None:
        """Apply `sharing` from now on; limits this rank's memory if the engine stays resident."""
        self.sharing = sharing
        if sharing.alternates and self.graphs:
            self.graphs.stop("models are offloaded for the engine and return to other addresses")
        if sharing.max_rank_bytes is not None:
            torch.cuda.set_per_process_memory_fraction(min(1.0, sharing.max_rank_bytes / self.device_bytes()))
        if self.config.actor.optimizer_residency == "step":
            for engine in self.engines.values():
                to_host(engine, optimizer_alone=True)
        torch.cuda.empty_cache()  # the engine that starts next measures free memory

    def make_room(self) -> None:
        """Release cached memory that the engine's weights need during a push."""
        if self.device != "cpu":
            release_cached(self.sharing.max_cached_bytes_in_push)

    @ray.method(concurrency_group=WATCH)
    def fetch_optimizers(self) -> None:
        """Start loading optimizer states while another call runs, the critic's first: it steps before the actor."""
        for engine in reversed([*self.engines.values()]):
            fetch_optimizer(engine, self.limit_s)

    @contextmanager
    def stepping(self, model: str) -> Iterator[Span]:
        """Record the span of an optimizer step, with the optimizer states of `model` on the device."""
        with self.optimizer_on_device(model), self.recorder.span("optimizer", cause=f"update_{model}") as span:
            span.attributes["model"] = model
            yield span

    @contextmanager
    def optimizer_on_device(self, model: str) -> Iterator[None]:
        """Keep the optimizer states of `model` on the device for the block, and afterwards where the residency
        allows."""
        engine = self.engines[model]
        if size := offloaded_bytes(engine):
            attributes = {"model": model, "bytes": size}
            with self.recorder.span("optimizer_wait", cause=f"update_{model}", attributes=attributes):
                to_device(engine)
        yield
        if self.device != "cpu" and self.config.actor.optimizer_residency == "step":
            to_host(engine, optimizer_alone=True)

    def _load_to_device(self, model: Any) -> None:
        """Load `model` to the device; retry while the memory of a killed engine is not yet free."""
        until = time.monotonic() + FREE_TIMEOUT_S
        while True:
            try:
                return to_device(model, optimizer=self.config.actor.optimizer_residency == "training")
            except torch.OutOfMemoryError:
                if time.monotonic() > until:
                    raise
            torch.cuda.empty_cache()
            time.sleep(0.5)

    @ray.method(concurrency_group=WATCH)
    def pulse(self) -> Pulse:
        """Return this rank's liveness; answered while another call runs."""
        return self.progress.pulse()

    def probe(self) -> float | None:
        """Return FLOP/s of large matrix products in the model's dtype; None if the device lacks the memory now."""
        try:
            return matmul_rate(getattr(torch, self.config.model.dtype), self.device)
        except torch.OutOfMemoryError:
            return None
        finally:
            if self.is_offloaded:  # the engine needs the memory
                torch.cuda.empty_cache()

    def drain(self, collect: bool = False) -> list[Span]:
        if collect:
            self.garbage.collect()
        return self.recorder.drain()


def collectives() -> dict[str, int]:
    """Return process group -> number of collectives this rank has joined, for groups that count them."""
    names, found = distributed_c10d._world.pg_names, {}
    for group in list(names):
        with suppress(RuntimeError):
            found[names[group]] = group._get_sequence_number_for_group()
    return found


def interface_of(address: str) -> str | None:
    """Return this host's network interface with the address; None if there is none."""
    for name, own in psutil.net_if_addrs().items():
        if any(each.address == address for each in own):
            return name
    return None
