"""Push new weights from the trainer to all rollout engines, in buckets. `WeightPush` runs on the driver.

    shm  trainer (all ranks gather, rank 0 writes) --bucket i+1--> /dev/shm/rlfuse-weights-*/ --bucket i--> every engine
                 at most two buckets exist on a node: one being written (and copied there), one being loaded
    ipc  trainer (every rank packs bucket i+1 on its GPU) --CUDA IPC handle of bucket i--> the engine on the same GPU

Invariants:
- at the end each slot's engine has its device; a replacement engine starts on a device that the ranks have left;
- tensors of a decoder layer are in one bucket: an engine may build the layer once it has all of them;
- engines pause and drop their caches before the first bucket, resume with all weights, and then report the version;
- a bucket is complete on a node before an engine there receives its path; none is left when `push` returns or raises;
- an engine lost before or during a push is replaced, and the push is repeated for it alone;
- after another error engines may hold parts of two versions and stay paused: restart them. A push can be repeated only
  if its first bucket could not be written.
Waits for the slowest engine per bucket, the trainer's next bucket and starting engines, all with limits.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

from rlfuse.engines.weights.cuda_ipc import merge_ipc
from rlfuse.engines.weights.staging import StagingHandle, WeightStaging
from rlfuse.errors import EngineError, EngineLost
from rlfuse.step.colocation import PushingRanks, Sleeper, to_engine, to_push, to_ranks, vacate_device

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MIB = 1 << 20


class WeightExporter(PushingRanks, Protocol):
    """Interface of the trainer group for pushes. Every method is bounded in time and raises `EngineError`."""

    async def bucket_plan(self) -> list[list[str]]:
        """Return all tensors of the actor in buckets, see `plan_buckets`."""

    async def export_bucket(self, names: list[str], path: str) -> None:
        """Write these tensors as safetensors under checkpoint names; every rank calls this, `writer` writes."""

    def writer(self, names: list[str]) -> int:
        """Return the rank on whose node `export_bucket` writes."""


class WeightReceiver(Sleeper, Protocol):
    """Interface of a rollout engine, implemented by `RolloutHandle`."""

    name: str
    lost: bool
    """True if it has to be replaced, or its replacement has no weights yet."""

    async def wait_ready(self) -> None:
        """Wait for the replacement of a lost engine. All but this, `sleep` and `wake` raise EngineLost."""

    async def begin_update(self) -> None: ...

    async def receive(self, info: dict[str, Any]) -> None: ...

    async def finish_update(self, version: int) -> None: ...

    async def version(self) -> int: ...


class TowerSync(Protocol):
    """Pushes the trainer's vision tower to the encoder ranks, see `tower_push`."""

    async def push(self, version: int) -> None: ...


def plan_buckets(sizes: Sequence[tuple[str, int]], bucket_bytes: int) -> list[list[str]]:
    """Split names, in order, into buckets of at most `bucket_bytes`; a larger layer or tensor gets its own bucket."""
    buckets: list[list[str]] = []
    room = -1
    for _, group in groupby(sizes, key=lambda each: layer_of(each[0])):
        names, bytes_ = zip(*group, strict=True)
        if sum(bytes_) > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1] += names
        room -= sum(bytes_)
    return buckets


def layer_of(name: str) -> str:
    """Return the part of a tensor's name that identifies its decoder layer; else the whole name."""
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else name


def check_pushable(config: PreTrainedConfig) -> None:
    """Raise EngineError if engines cannot take trained weights of this model."""
    text = config.get_text_config()
    if quantized := getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else type(quantized).__name__
        raise EngineError(
            f"its weights are quantized ({method}), and engines with quantized layers cannot load trained weights; "
            "train an unquantized copy"
        )


def resolve_transfer(setting: str, device: str, stages: int = 1) -> str:
    """Resolve auto of `rollout.weight_transfer` for the device, `cpu` or `cuda`, and a pipeline's `stages`."""
    if setting == "auto":
        # CUDA IPC needs both processes on one GPU, but a stage is on another GPU than most engines.
        return "ipc" if device == "cuda" and stages == 1 else "shm"
    if device != "cuda" and setting != "shm":
        raise ValueError(f"rollout.weight_transfer={setting} needs GPUs, but this run's device is {device}. Choose shm")
    return setting


class WeightPush:
    """Pushes the trainer's weights to all engines, bucket by bucket."""

    def __init__(
        self,
        exporter: WeightExporter,
        engines: Sequence[WeightReceiver],
        bucket_mb: int,
        transfer: str = "shm",
        stagings: Sequence[StagingHandle] = (),
        tower: TowerSync | None = None,
    ):
        """Create a push. `stagings`: one per node, by default that of this process; `tower`: push of a trained
        tower."""
        self.exporter, self.engines, self.bucket_mb, self.transfer = exporter, list(engines), bucket_mb, transfer
        self.stagings = list(stagings) or [StagingHandle(engines, WeightStaging())]
        self.tower = tower
        self._largest = 0  # bytes of the largest bucket so far, as the plan has only names
        self._version = 0

    async def push(self, version: int) -> None:
        """Push the current weights as `version`; afterwards all engines have their devices."""
        self._version = version
        await self._push(range(len(self.engines)), self.tower)

    async def restart_engine(self, slot: int) -> None:
        """Push the weights of the last push to this slot's engine, a replacement if it is lost. Called when all engines
        are lost: the other ranks take their devices, too, as some gather weights together."""
        others = [other for other in range(len(self.engines)) if other != slot]
        await asyncio.gather(*(to_ranks(self.engines[other], self.exporter, other) for other in others))
        await self._push([slot])

    async def _push(self, slots: Sequence[int], tower: TowerSync | None = None) -> None:
        left = slots
        while left:
            await asyncio.gather(*(self._prepare(slot) for slot in left))
            served = await self._serve([self.engines[slot] for slot in left])
            left = [slot for slot in left if self.engines[slot] not in served]
        if tower:
            await tower.push(self._version)
        await asyncio.gather(*(to_engine(self.engines[slot], self.exporter, slot) for slot in slots))

    async def _prepare(self, slot: int) -> None:
        """Load the slot's ranks and its engine's weights on the device together."""
        engine = self.engines[slot]
        if engine.lost:
            await vacate_device(self.exporter, slot)
            await engine.wait_ready()
        await to_push(engine, self.exporter, slot)

    async def _serve(self, engines: list[WeightReceiver]) -> list[WeightReceiver]:
        """Return the engines that have the weights; the others were lost."""
        plan = await self.exporter.bucket_plan()
        if not plan:
            raise EngineError("The trainer has no weights to push: bucket_plan() is empty.")
        receivers = _Receivers(engines)
        await {"shm": self._through_memory, "ipc": self._through_ipc}[self.transfer](plan, receivers)
        await receivers.each(lambda engine: engine.finish_update(self._version))
        self._check(await receivers.each(lambda engine: engine.version()))
        return receivers.engines

    def _check(self, held: dict[str, int]) -> None:
        wrong = [f"{name} has {version}" for name, version in held.items() if version != self._version]
        if wrong:
            raise EngineError(
                f"Weights were pushed as version {self._version}, but {', '.join(wrong)}. Restart the run from its "
                "last checkpoint (trainer.resume_mode=auto), as those engines have other weights."
            )

    # Shared memory -----------------------------------------------------------------------------------------------

    async def _through_memory(self, plan: list[list[str]], receivers: _Receivers) -> None:
        staging_of = {engine.name: staging for staging in self.stagings for engine in staging.engines}
        await asyncio.gather(*(staging.open() for staging in self.stagings))
        writing = asyncio.create_task(self._write(plan[0], 0))
        try:
            await writing  # before the engines expect it: if this fails, the push can be repeated
            await receivers.each(lambda engine: engine.begin_update())
            for i in range(len(plan)):
                await writing
                if i + 1 < len(plan):
                    writing = asyncio.create_task(self._write(plan[i + 1], i + 1))
                await receivers.each(lambda engine, i=i: engine.receive({"path": staging_of[engine.name].path(i)}))
                await asyncio.gather(*(staging.ask("remove", staging.path(i)) for staging in self.stagings))
        finally:
            writing.cancel()  # of no effect unless an engine failed
            await asyncio.gather(writing, return_exceptions=True)
            await asyncio.gather(*(staging.ask("close") for staging in self.stagings), return_exceptions=True)

    async def _write(self, names: list[str], index: int) -> None:
        """Write a bucket on every node."""
        first = self._source(names)
        if await first.ask("free") < self._largest:
            raise await self._no_room(first, self._largest)
        async with self._room(first):
            await self.exporter.export_bucket(names, first.path(index))
        self._largest = max(self._largest, await first.ask("size", first.path(index)))
        if others := [staging for staging in self.stagings if staging is not first]:
            bucket = first.share(index)
            await asyncio.gather(*(self._copy(staging, index, bucket) for staging in others))

    def _source(self, names: list[str]) -> StagingHandle:
        """Return the staging of the node where the bucket is written."""
        if len(self.stagings) == 1:
            return self.stagings[0]
        return next(staging for staging in self.stagings if self.exporter.writer(names) in staging.slots)

    async def _copy(self, staging: StagingHandle, index: int, bucket: Any) -> None:
        async with self._room(staging):
            await staging.ask("write", staging.path(index), bucket)

    @asynccontextmanager
    async def _room(self, staging: StagingHandle) -> AsyncIterator[None]:
        """Replace errors about full memory by one with its sizes."""
        try:
            yield
        except (EngineError, OSError) as error:
            if "no space left" in str(error).lower():
                raise await self._no_room(staging, self.bucket_mb * MIB) from error
            raise

    async def _no_room(self, staging: StagingHandle, needed: int) -> EngineError:
        free, where = await staging.ask("free"), staging.location
        return EngineError(
            f"A bucket of weights could not be written to {where}: up to {-(-needed // MIB)} MiB needed, "
            f"{free // MIB} MiB free, with two buckets at a time. Lower rollout.update_weights_bucket_mb (now "
            f"{self.bucket_mb}) or enlarge {where} (docker: --shm-size)."
        )

    # Devices: not run without GPUs, see `cuda_ipc` -----------------------------------------------------------------

    async def _through_ipc(self, plan: list[list[str]], receivers: _Receivers) -> None:
        sharing = asyncio.create_task(self.exporter.share_ipc(plan[0]))
        try:
            await receivers.each(lambda engine: engine.begin_update())
            for following in [*plan[1:], None]:
                update = merge_ipc(await sharing)
                if following:
                    sharing = asyncio.create_task(self.exporter.share_ipc(following))
                await receivers.each(lambda engine, update=update: engine.receive(update))
        finally:
            sharing.cancel()  # of no effect unless an engine failed
            await asyncio.gather(sharing, return_exceptions=True)
            await self.exporter.release_ipc()


class _Receivers:
    """Engines of one push, without those lost during it."""

    def __init__(self, engines: Sequence[WeightReceiver]):
        self.engines = list(engines)

    async def each(self, ask: Callable[[WeightReceiver], Awaitable[Any]]) -> dict[str, Any]:
        """Return each engine's reply by name, or raise the first failure immediately."""

        async def one(engine: WeightReceiver) -> tuple[bool, Any]:
            try:
                return True, await ask(engine)
            except EngineLost:
                return False, None

        engines = self.engines
        answers = await asyncio.gather(*map(one, engines))
        self.engines = [engine for engine, (here, _) in zip(engines, answers, strict=True) if here]
        return {engine.name: answer for engine, (here, answer) in zip(engines, answers, strict=True) if here}
