"""What every kind of trainer rank is: a process on a device that meets the others and records what it does.

Role: the part that `TrainerRank` and `PipelineRank` have in common; Ray makes an actor of either.
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
"""For a killed process to give its device memory back."""


def requires_models(method: Callable) -> Callable:
    """A rank's call that reads or changes models: an EngineError while they are away from the device."""

    @wraps(method)
    def checked(self: Rank, *arguments: Any, **named: Any) -> Any:
        if self.is_offloaded:
            raise EngineError(f"trainer/{self.rank} can't {method.__name__}: its models are offloaded first")
        return method(self, *arguments, **named)

    return checked


class Rank(StoreServer):
    """One of `world` processes, bound to `core` if given: `load_extensions`, then `join` meets the others."""

    graphs: PassGraphs | None = None
    """Where passes are recorded."""

    def __init__(self, config: Config, rank: int, world: int, device: str, core: int | None = None):
        self.config, self.rank, self.world, self.device = config, rank, world, device
        self.recorder = Recorder(f"trainer/{rank}")
        os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # libraries would unpickle whatever checkpoints hold
        watchdog.register(self.recorder.where, self.recorder)
        self.garbage = GarbageCollector(self.recorder, self._used_mib)
        self.progress = Progress(device, collectives)
        self.recorder.listeners.append(self.progress.record_activity)
        if config.trainer.deterministic:  # operations without a deterministic implementation raise
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # buffers of 2 GB, each time
        self.engines: dict[str, Any] = {}
        self.extra_modules: list[torch.nn.Module] = []
        self.is_offloaded, self.sharing = False, DeviceSharing()
        bind(core)  # Ray's threads run already; later ones inherit

    @property
    def limit_s(self) -> float:
        """The longest wait for another rank. On GPUs one ends the process, so it comes before the driver gives up."""
        return self.config.cluster.timeout_s if self.device == "cpu" else collective_limit_s(self.config)

    def load_extensions(self) -> str | None:
        """Load the backend's operations, compiled where they are not yet; return what prevents it for now."""
        return self.backend.load_extensions(self.config, self.device)

    @property
    def backend(self) -> type[ShardedModel]:
        return sharded_model(self.config.actor.strategy)

    def _used_mib(self) -> int:
        """Of the host's memory and the device's."""
        return resident_mib() + (0 if self.device == "cpu" else torch.cuda.memory_allocated() >> 20)

    def meeting_place(self) -> str | None:
        """Return the file in which the ranks of one machine find one another; None where they meet in rank 0's memory.

        Other users can change neither: by these ranks learn whom to connect to and unpickle from.
        """
        if self.config.cluster.ray_address is None:
            return f"{tempfile.mkdtemp()}/ranks"
        self.open_store()
        return None

    def join(self, place: str | ray.actor.ActorHandle) -> None:
        """Meet the other ranks in a file, or in the memory of rank 0's actor; waits for them, at most `limit_s`."""
        self.garbage.freeze()  # imports: backends may collect all garbage for each model
        self.progress.set_call_thread()
        os.environ |= {"RANK": str(self.rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(self.world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # else libraries ask MPI
        if interface := interface_of(ray.util.get_node_ip_address()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        limit = timedelta(seconds=self.limit_s)
        if self.device == "cpu":
            os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # else torch keeps the Python stacks of the last 2,000 collectives
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        # Groups that backends make later take these: their collectives would wait 30 minutes (gloo) or 10 (nccl).
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
        """Have the device (`trainer`) or be without it (`rollout`). On CPU hosts there is nothing to move.

        Returns seconds that optimizers which are to be fetched would take to come, as fast as the weights came.
        """
        offload = role != "trainer" and self.device != "cpu"
        with self.recorder.span("switch", cause="role", attributes={"to": role}):
            if offload == self.is_offloaded:
                return 0.0
            self.is_offloaded = True  # also where a move fails halfway
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
        """Share the device like this from now on. Where the engine stays, this rank can't take its memory."""
        self.sharing = sharing
        if sharing.alternates and self.graphs:
            self.graphs.stop("models are offloaded for the engine to the engine, and come back at other addresses")
        if sharing.max_rank_bytes is not None:
            torch.cuda.set_per_process_memory_fraction(min(1.0, sharing.max_rank_bytes / self.device_bytes()))
        if self.config.actor.optimizer_residency == "step":
            for engine in self.engines.values():
                to_host(engine, optimizer_alone=True)
        torch.cuda.empty_cache()  # what loading and optimizers leave: the engine that starts next measures free memory

    def make_room(self) -> None:
        """Release cached memory that the engine's weights need during a push."""
        if self.device != "cpu":
            release_cached(self.sharing.max_cached_bytes_in_push)

    @ray.method(concurrency_group=WATCH)
    def fetch_optimizers(self) -> None:
        """Begin to bring back what only steps read, while another call is under way; critics step before actors."""
        for engine in reversed([*self.engines.values()]):
            fetch_optimizer(engine, self.limit_s)

    @contextmanager
    def stepping(self, model: str) -> Iterator[Span]:
        """An optimizer step of the model, and its span."""
        with self.optimizer_on_device(model), self.recorder.span("optimizer", cause=f"update_{model}") as span:
            span.attributes["model"] = model
            yield span

    @contextmanager
    def optimizer_on_device(self, model: str) -> Iterator[None]:
        """What only steps of the model read is on the device for the length of the block, and stays where it may."""
        engine = self.engines[model]
        if size := offloaded_bytes(engine):
            attributes = {"model": model, "bytes": size}
            with self.recorder.span("optimizer_wait", cause=f"update_{model}", attributes=attributes):
                to_device(engine)
        yield
        if self.device != "cpu" and self.config.actor.optimizer_residency == "step":
            to_host(engine, optimizer_alone=True)

    def _load_to_device(self, model: Any) -> None:
        """Onto the device; the memory of an engine that was killed a moment ago may not be free yet."""
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
        """Answers while another call is under way."""
        return self.progress.pulse()

    def probe(self) -> float | None:
        """FLOP/s of large matrix products in the model's type; None where the device has no room for them now."""
        try:
            return matmul_rate(getattr(torch, self.config.model.dtype), self.device)
        except torch.OutOfMemoryError:
            return None
        finally:
            if self.is_offloaded:  # nothing stays where the engine is
                torch.cuda.empty_cache()

    def drain(self, collect: bool = False) -> list[Span]:
        if collect:
            self.garbage.collect()
        return self.recorder.drain()


def collectives() -> dict[str, int]:
    """Process group -> collectives of it that this rank has joined, of groups that count them."""
    names, found = distributed_c10d._world.pg_names, {}
    for group in list(names):
        with suppress(RuntimeError):
            found[names[group]] = group._get_sequence_number_for_group()
    return found


def interface_of(address: str) -> str | None:
    """The network interface of this host that has the address; None if there is none."""
    for name, own in psutil.net_if_addrs().items():
        if any(each.address == address for each in own):
            return name
    return None
