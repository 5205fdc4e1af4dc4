"""New weights, from the trainer to every rollout engine, in buckets.

Role: `WeightPush` is the controller's `WeightSync`. It runs on the driver and moves no tensor itself: it tells the
trainer which bucket to hand over and the engines where to find it.

    trainer (all ranks gather, rank 0 writes) --bucket i+1--> /dev/shm/rlfuse-weights-*/ --bucket i--> every engine
                  at most two buckets exist on a node: one being written (and copied there), one being loaded

Invariants:
- engines are paused and their caches cleared before the first bucket reaches them, and resume only with all weights;
  the versions that they then report are compared with the one asked for;
- a bucket's file is complete on every node before any engine hears of it and is deleted, never rewritten; its folders
  are gone when `push` returns or raises; a bucket goes to each node once, however many engines it has;
- an engine that is lost, before or in the middle of a push, is replaced, and the push is repeated for it alone;
- after another error the engines may hold parts of two versions and stay paused: restart them. Only a first bucket that
  can't be written leaves them as they were.
Called by the controller after an optimizer step, and by the execution that has lost its last engine. Waits for the
slowest engine per bucket, for the trainer's next bucket and for engines that start; all bound their calls in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import accumulate
from typing import Any, Protocol

from rlfuse.engines.protocols import EngineError, EngineLost
from rlfuse.engines.weights_depot import Depot, DepotHandle
from rlfuse.engines.weights_device import merge_ipc, nccl_join

MIB = 1 << 20


class WeightExporter(Protocol):
    """The trainer's side, all ranks as one. Every method is bounded in time and raises `EngineError`."""

    async def bucket_plan(self) -> list[list[str]]:
        """All tensors of the actor in buckets, see `plan_buckets`."""

    async def export_bucket(self, names: list[str], path: str) -> None:
        """Write these tensors as safetensors under checkpoint names; every rank enters, `writer` writes, complete on
        return."""

    def writer(self, names: list[str]) -> int:
        """The rank on whose node `export_bucket` writes."""


class DeviceWeightExporter(WeightExporter, Protocol):
    """What `nccl` and `ipc` need besides, each a thin call of `weights_device` on the ranks' own devices."""

    async def nccl_address(self) -> tuple[str, int]:
        """Where rank 0 can wait for the engines: its host and a free port."""

    async def open_nccl(self, host: str, port: int, world_size: int) -> None:
        """`open_nccl` on rank 0."""

    async def describe(self, names: list[str]) -> dict[str, Any]:
        """`describe` on rank 0."""

    async def send_nccl(self, names: list[str]) -> None:
        """`send_nccl` on rank 0; every rank enters to gather."""

    async def share_ipc(self, names: list[str]) -> list[dict[str, Any]]:
        """`share_ipc` of every rank that shares a GPU with an engine; the ranks keep the tensors."""

    async def release_ipc(self) -> None:
        """The ranks let go of what `share_ipc` kept."""


class WeightReceiver(Protocol):
    """A rollout engine as weight sync sees it, implemented by `rollout.RolloutHandle`."""

    name: str
    devices: int
    restarts: int
    """Times that it was replaced."""

    async def stand(self) -> None:
        """Wait for the engine that takes the place of a lost one. Whatever else is asked of one raises EngineLost."""

    async def begin_update(self) -> None: ...

    async def receive(self, info: dict[str, Any]) -> None: ...

    async def finish_update(self, version: int) -> None: ...

    async def version(self) -> int: ...

    async def join_transfer(self, info: dict[str, Any]) -> None: ...


def plan_buckets(sizes: Sequence[tuple[str, int]], bucket_bytes: int) -> list[list[str]]:
    """Names in their order, cut into buckets of at most `bucket_bytes`; a larger tensor gets a bucket of its own."""
    buckets: list[list[str]] = []
    room = -1
    for name, size in sizes:
        if size > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(name)
        room -= size
    return buckets


def resolve_transfer(setting: str, device: str) -> str:
    """`rollout.weight_transfer` with auto resolved for the device: `cpu` or `cuda`."""
    if setting == "auto":
        # A slot's trainer rank and engine share a GPU: NCCL refuses two ranks on one device, CUDA IPC is made for it.
        return "ipc" if device == "cuda" else "shm"
    if setting not in ("shm", "nccl", "ipc"):
        raise ValueError(f"rollout.weight_transfer={setting!r}: choose auto, shm, nccl or ipc")
    if device != "cuda" and setting != "shm":
        raise ValueError(f"rollout.weight_transfer={setting} needs GPUs, this run's device is {device}: choose shm")
    return setting


class WeightPush:
    """Pushes the trainer's weights to all engines, one bucket after the other."""

    def __init__(
        self,
        exporter: WeightExporter,
        engines: Sequence[WeightReceiver],
        bucket_mb: int,
        transfer: str = "shm",
        depots: Sequence[DepotHandle] = (),
    ):
        """`depots`: one for each node; by default this process's."""
        self.exporter, self.engines, self.bucket_mb, self.transfer = exporter, list(engines), bucket_mb, transfer
        self.depots = list(depots) or [DepotHandle(engines, Depot())]
        self._largest = 0  # bytes of the largest bucket written so far: the plan has names only
        self._version = 0
        self._joined: list[tuple[str, int]] = []

    async def push(self, version: int) -> None:
        """All engines hold the trainer's present weights as `version` when this returns."""
        self._version = version
        await self._push(self.engines)

    async def renew(self, slot: int) -> None:
        """The slot's engine, another one if it is lost, holds the present weights as the version of the last push."""
        await self._push([self.engines[slot]])

    async def _push(self, engines: list[WeightReceiver]) -> None:
        plan = await self.exporter.bucket_plan()
        if not plan:
            raise EngineError("trainer listed no weights to push: bucket_plan() was empty")
        move = {"shm": self._through_memory, "nccl": self._through_nccl, "ipc": self._through_ipc}[self.transfer]
        while engines:
            await asyncio.gather(*(engine.stand() for engine in engines))
            audience = _Audience(engines)
            await move(plan, audience)
            await audience.each(lambda engine: engine.finish_update(self._version))
            self._check(await audience.each(lambda engine: engine.version()))
            engines = [engine for engine in engines if engine not in audience.engines]

    def _check(self, held: dict[str, int]) -> None:
        wrong = [f"{name} has {version}" for name, version in held.items() if version != self._version]
        if wrong:
            raise EngineError(
                f"weights were pushed as version {self._version}, but {', '.join(wrong)}. Restart the run from its "
                "last checkpoint (trainer.resume_mode=auto): those engines generate with other weights."
            )

    # Shared memory -----------------------------------------------------------------------------------------------

    async def _through_memory(self, plan: list[list[str]], audience: _Audience) -> None:
        depot_of = {engine.name: depot for depot in self.depots for engine in depot.engines}
        await asyncio.gather(*(depot.open() for depot in self.depots))
        writing = asyncio.create_task(self._write(plan[0], 0))
        try:
            await writing  # before engines pause: they go on as they were if this fails
            await audience.each(lambda engine: engine.begin_update())
            for i in range(len(plan)):
                await writing
                if i + 1 < len(plan):
                    writing = asyncio.create_task(self._write(plan[i + 1], i + 1))
                await audience.each(lambda engine, i=i: engine.receive({"path": depot_of[engine.name].path(i)}))
                await asyncio.gather(*(depot.ask("remove", depot.path(i)) for depot in self.depots))
        finally:
            writing.cancel()  # of no effect unless an engine failed
            await asyncio.gather(writing, return_exceptions=True)
            await asyncio.gather(*(depot.ask("close") for depot in self.depots), return_exceptions=True)

    async def _write(self, names: list[str], index: int) -> None:
        """A bucket on every node."""
        first = self._source(names)
        if await first.ask("free") < self._largest:
            raise await self._no_room(first, self._largest)
        async with self._room(first):
            await self.exporter.export_bucket(names, first.path(index))
        self._largest = max(self._largest, await first.ask("size", first.path(index)))
        if others := [depot for depot in self.depots if depot is not first]:
            bucket = first.share(index)
            await asyncio.gather(*(self._copy(depot, index, bucket) for depot in others))

    def _source(self, names: list[str]) -> DepotHandle:
        """Of the node where the bucket is written."""
        if len(self.depots) == 1:
            return self.depots[0]
        return next(depot for depot in self.depots if self.exporter.writer(names) in depot.slots)

    async def _copy(self, depot: DepotHandle, index: int, bucket: Any) -> None:
        async with self._room(depot):
            await depot.ask("write", depot.path(index), bucket)

    @asynccontextmanager
    async def _room(self, depot: DepotHandle) -> AsyncIterator[None]:
        """Full memory gets figures."""
        try:
            yield
        except (EngineError, OSError) as error:
            if "no space left" in str(error).lower():
                raise await self._no_room(depot, self.bucket_mb * MIB) from error
            raise

    async def _no_room(self, depot: DepotHandle, needed: int) -> EngineError:
        free = await depot.ask("free")
        return EngineError(
            f"trainer could not write a bucket of weights to {depot.place}: it needs up to {-(-needed // MIB)} MiB, "
            f"{free // MIB} MiB are free, and two buckets exist at a time. Lower rollout.update_weights_bucket_mb (now "
            f"{self.bucket_mb}) or give {depot.place} more room (docker: --shm-size)."
        )

    # Devices: not run without GPUs, see weights_device -------------------------------------------------------------

    async def _through_nccl(self, plan: list[list[str]], audience: _Audience) -> None:
        members = [(engine.name, engine.restarts) for engine in audience.engines]
        if self._joined != members:
            await self._join(audience.engines)
            self._joined = members
        await audience.each(lambda engine: engine.begin_update())
        for names in plan:
            update = await self.exporter.describe(names)
            receiving = audience.each(lambda engine, update=update: engine.receive(update))
            await asyncio.gather(self.exporter.send_nccl(names), receiving)

    async def _join(self, engines: Sequence[WeightReceiver]) -> None:
        host, port = await self.exporter.nccl_address()
        *offsets, world = accumulate((engine.devices for engine in engines), initial=1)  # 0 is the trainer
        joins = [
            engine.join_transfer(nccl_join(host, port, offset, world))
            for engine, offset in zip(engines, offsets, strict=True)
        ]
        await asyncio.gather(self.exporter.open_nccl(host, port, world), *joins)

    async def _through_ipc(self, plan: list[list[str]], audience: _Audience) -> None:
        await audience.each(lambda engine: engine.begin_update())
        for names in plan:
            update = merge_ipc(await self.exporter.share_ipc(names))
            await audience.each(lambda engine, update=update: engine.receive(update))
            await self.exporter.release_ipc()


class _Audience:
    """The engines of one push. Those that are lost in the course of it leave; they have to be served again."""

    def __init__(self, engines: Sequence[WeightReceiver]):
        self.engines = list(engines)

    async def each(self, ask: Callable[[WeightReceiver], Awaitable[Any]]) -> dict[str, Any]:
        """The answer of each by name, or the first failure at once: it names its worker."""

        async def one(engine: WeightReceiver) -> tuple[bool, Any]:
            try:
                return True, await ask(engine)
            except EngineLost:
                return False, None

        asked = self.engines
        answers = await asyncio.gather(*map(one, asked))
        self.engines = [engine for engine, (here, _) in zip(asked, answers, strict=True) if here]
        return {engine.name: answer for engine, (here, answer) in zip(asked, answers, strict=True) if here}
