"""Driver-side base class of groups of trainer ranks: start, calls, optimizer steps and device moves.

A rollout slot spans `rollout.tensor_model_parallel_size` ranks. Calls on single slots run concurrently, a call on all
ranks runs exclusively; a failure is raised once, that of a dead rank before those of ranks waiting for it; a rank that
hangs in a `WATCHED` call is killed within about cluster.heartbeat_s. Waits at most cluster.timeout_s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import ray

from rlfuse.algorithms.losses import loss_divisor
from rlfuse.algorithms.objectives import mean_diagnostics
from rlfuse.cluster import cuda, process_logs, watchdog
from rlfuse.cluster.nodes import from_head
from rlfuse.cluster.placement import Slots
from rlfuse.cluster.rank_store import STORE
from rlfuse.cluster.remote import all_of, call
from rlfuse.config.schema import Config
from rlfuse.engines.memory.model_memory import MAX_CACHED_BYTES
from rlfuse.engines.trainer.backends import compile_operations
from rlfuse.engines.trainer.liveness import WATCH, HangDetector
from rlfuse.errors import NotSaved, WorkerLost
from rlfuse.events import Recorder, Span
from rlfuse.protocols import DeviceSharing

MALLOC_SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": str(MAX_CACHED_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_ARENA_MAX": "1",
}
"""Environment in which glibc keeps freed memory up to these bytes. By default it returns a micro-batch's activations to
the system and requests them again; the page faults take 5 % of a split backward's time. The thresholds apply only to
the main arena, and Ray runs a rank's calls on another thread because `pulse` has its own."""
NO_TORCH_COMPILE = {"TORCHDYNAMO_DISABLE": "1"}
"""Environment of ranks on CPUs. Unused optimizers request compilation at import, and torch would import its compiler,
a seventh of a rank's startup time."""
WATCHED = ("score", "accumulate", "evaluate", "run", "step")
"""Calls that are watched for hangs, because ranks report progress often during them."""
CHECKS_PER_HEARTBEAT = 8
"""Liveness checks of each rank per `cluster.heartbeat_s` during these calls."""
T = TypeVar("T")


class RankGroup:
    """Group of trainer ranks; each method calls the ranks concerned and waits at most cluster.timeout_s for all."""

    def __init__(self, config: Config, ranks: Sequence[ray.actor.ActorHandle]):
        self.config, self.ranks, self._lock = config, list(ranks), _SharedExclusiveLock()
        self.recorder = Recorder("trainer")
        self._accumulated: dict[str, list[int]] = {model: [] for model in self.models}
        """Model -> tokens in the loss of each row accumulated since its last step."""
        self._completed_calls: set[tuple[int, str]] = set()
        """(rank, action) pairs that have succeeded once; the first call may compile kernels."""
        self._roles: dict[int, str] = {}
        """Slot -> role of its ranks after the last successful switch."""
        self.sharing = DeviceSharing()
        self.offloaded_optimizers: dict[int, float] = {}
        """Slot whose ranks are on the device without optimizer states -> estimated seconds to load these."""
        self.rates = (1.0,) * len(self.ranks)
        """By rank: duration relative to the expected one."""

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the trained models."""
        return ("actor", "critic") if self.config.uses_critic else ("actor",)

    async def measure(self) -> dict[str, Any]:
        """Measure the speed that plans and utilisation are based on; return facts to log. The slots must be idle.

        `peak_flops`: total FLOP/s of all ranks, measured concurrently; missing if a device lacks the memory.
        """
        speeds = await self._all("probe", "time fixed work")
        return {} if None in speeds else {"peak_flops": sum(speeds)}

    async def device_bytes(self) -> int:
        """Return the memory of the smallest device, in bytes."""
        return min(await self._all("device_bytes", "report its device's memory"))

    async def share(self, sharing: DeviceSharing) -> None:
        """Apply `sharing` on all ranks from now on."""
        await self._all("share", "share its device", sharing)
        self.sharing = sharing

    async def acquire_device(self, slot: int) -> None:
        await self._switch(slot, "trainer", "take its device")

    async def release_device(self, slot: int) -> None:
        """Offload the models of the slot's ranks; they accept no calls that use models until `acquire_device`."""
        await self._switch(slot, "rollout", "leave its device")

    async def make_room(self, slot: int) -> None:
        """Release cached device memory that the engine's weights need during a push."""
        await self._call("make_room", "release cached memory", slot, lambda rank: ())

    async def _switch(self, slot: int, role: str, action: str) -> None:
        if self._roles.get(slot) != role:
            self._roles.pop(slot, None)
            self.offloaded_optimizers.pop(slot, None)
            seconds = max(await self._call("switch", action, slot, lambda rank: (role,)))
            self._roles[slot] = role
            if seconds:
                self.offloaded_optimizers[slot] = seconds

    async def fetch_optimizers(self, slot: int) -> None:
        """Start loading optimizer states while the slot's ranks compute; a step waits for them."""
        self.offloaded_optimizers.pop(slot, None)
        await all_of([self._ask(rank, "fetch_optimizers", "fetch its optimizers") for rank in self._ranks(slot)])

    async def replan(self, rates: Sequence[float], saved: Path | None = None) -> None:
        """Balance work over ranks by these rates of slots from now on; without rates, evenly."""
        width = self.config.rollout.tensor_model_parallel_size
        self.rates = tuple(rates[rank // width] if rates else 1.0 for rank in range(len(self.ranks)))

    async def step(
        self, model: str, lengths: Sequence[int], lr_factor: float = 1.0, skipped: Sequence[int] = ()
    ) -> dict[str, float]:
        """Take one optimizer step; return mean diagnostics, `lr` and `grad_norm` as `model/name`.

        `lr_factor`: fraction of the full learning rate. ValueError unless `lengths` are the tokens in the loss of the
        rows accumulated since the last step and of the `skipped` ones, in any order. Diagnostics are means over the
        accumulated rows. Without tokens, or if all rows are skipped, gradient and loss are 0.
        """
        accumulated = self._accumulated[model]
        if not accumulated and not skipped:
            raise ValueError(
                f"No gradients of the {model} were accumulated since its last step. Call accumulate first."
            )
        if sorted(lengths) != sorted([*accumulated, *skipped]):
            raise ValueError(
                f"Step of the {model} over {len(lengths)} rows ({sum(lengths)} response tokens), but "
                f"{len(accumulated)} rows ({sum(accumulated)} tokens) were accumulated since the last step and "
                f"{len(skipped)} rows ({sum(skipped)} tokens) skipped. Accumulate each other row once."
            )
        if not accumulated:
            await self._accumulate_zero(model)
        self._accumulated[model] = []
        mode, longest = self.config.actor.loss_agg_mode, self.config.data.max_response_length
        count = loss_divisor(lengths, mode, longest) if any(lengths) else 1.0
        sums = await self._all("step", f"update the {model}", model, count, lr_factor)
        if not accumulated:
            sums = [({"pg_loss": 0.0}, facts) for _, facts in sums]  # without diagnostics of fillers
        return step_metrics(model, sums, count, accumulated)

    async def _accumulate_zero(self, model: str) -> None:
        """Add a gradient of 0 on ranks whose step needs a backward pass; all rows of the mini-batch were skipped."""

    async def probe(self) -> list[float | None]:
        """Return FLOP/s of large matrix products by slot: those of its slowest rank; ranks compute independently."""
        speeds = await self._all("probe", "time fixed work")
        slots = [[speeds[rank] for rank in self._ranks(slot)] for slot in range(len(speeds) // len(self._ranks(0)))]
        return [None if None in each else min(each) for each in slots]

    async def drain(self, collect: bool = False) -> list[Span]:
        of_ranks = await self._all("drain", "hand over its events", collect)
        return [*self.recorder.drain(), *chain.from_iterable(of_ranks)]

    async def save_metadata(self, folder: Path) -> None:
        """Write all that `save` writes except weights and optimizer state. NotSaved if a file could not be written."""
        check_written(await self._all("save_metadata", f"write files to {folder}", folder.absolute()))

    async def load(self, folder: Path) -> None:
        """Load what `save` wrote, under this or another layout of ranks."""
        self._check_no_gradients("loaded")
        await self._all("load", f"load the checkpoint {folder}", folder.absolute())

    def discard_gradients(self) -> None:
        """Discard the rows accumulated for an unfinished step; only `save` may follow."""
        self._accumulated = {model: [] for model in self._accumulated}

    def _check_no_gradients(self, done: str) -> None:
        """Raise ValueError if a model has accumulated gradients, which checkpoints do not contain."""
        for model, lengths in self._accumulated.items():
            if lengths:
                raise ValueError(
                    f"Checkpoint cannot be {done}: the {model} has accumulated gradients of {len(lengths)} rows, which "
                    "checkpoints do not contain. Take the step first."
                )

    def _ranks(self, slot: int | None) -> range:
        width = self.config.rollout.tensor_model_parallel_size
        return range(len(self.ranks)) if slot is None else range(slot * width, (slot + 1) * width)

    async def _all(self, method: str, action: str, *arguments: Any) -> list[Any]:
        return await self._call(method, action, None, lambda rank: arguments)

    async def _call(
        self, method: str, action: str, slot: int | None, arguments: Callable[[int], tuple[Any, ...]]
    ) -> list[Any]:
        async with self._lock.exclusive() if slot is None else self._lock.shared():
            requests = {
                rank: asyncio.ensure_future(self._ask(rank, method, action, *arguments(rank)))
                for rank in self._ranks(slot)
            }
            work = all_of([*requests.values()])
            return await (self._watched(work, requests, action) if method in WATCHED else work)

    async def _watched(self, work: Awaitable[T], requests: Mapping[int, asyncio.Future], action: str) -> T:
        """Return the result of a call; raise WorkerLost as soon as a rank hangs in it."""
        task, watch = asyncio.ensure_future(work), asyncio.ensure_future(self._watch(requests, action))
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise watch.result()
            self._completed_calls.update((rank, action) for rank in requests)
            return task.result()
        finally:
            for each in (task, watch):
                each.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def _watch(self, requests: Mapping[int, asyncio.Future], action: str) -> WorkerLost:
        """Wait until one of these ranks hangs, kill it and return the error to raise."""
        limit = self.config.cluster.heartbeat_s
        first = any((rank, action) not in self._completed_calls for rank in requests)
        detector, looked, pulses = HangDetector(limit, first), time.monotonic(), dict[int, Any]()
        try:
            while True:
                await asyncio.sleep(limit / CHECKS_PER_HEARTBEAT)
                running = [rank for rank, answer in requests.items() if not answer.done()]
                for rank in running:
                    if rank not in pulses:
                        pulses[rank] = asyncio.wrap_future(self.ranks[rank].pulse.remote().future())
                if running:
                    await asyncio.wait([pulses[rank] for rank in running], timeout=limit / CHECKS_PER_HEARTBEAT)
                before, looked = looked, time.monotonic()
                # Late answers count at the next check: a rank that computes in Python answers slowly.
                answers = {rank: _pulse_or_error(pulses.pop(rank) if pulses[rank].done() else None) for rank in running}
                received = {rank: pulse for rank, pulse in answers.items() if not isinstance(pulse, Exception)}
                hung = detector.check(looked - before, received)
                if hung is not None:
                    return self._kill_hung_rank(hung, detector, action, [rank for rank in received if rank != hung])
        finally:
            for each in pulses.values():
                each.cancel()

    def _kill_hung_rank(self, rank: int, detector: HangDetector, action: str, others: Sequence[int]) -> WorkerLost:
        """Kill a rank that hangs, so that its slot can be reused; return the error to raise."""
        name = f"trainer/{rank}"
        waiting = [f"trainer/{other}" for other in others if detector.is_waiting_for(other, [rank])]
        wait = f"\nRanks waiting for it: {', '.join(waiting)}." if waiting else ""
        message = (
            f"{name} hangs in the call to {action}: it {detector.describe_hang(rank)}{wait}{watchdog.evidence(name)}"
        )
        ray.kill(self.ranks[rank])
        return WorkerLost("\n".join(filter(None, [message, process_logs.log_hint(name)])))

    def _ask(self, rank: int, method: str, action: str, *arguments: Any) -> Awaitable[Any]:
        reference = getattr(self.ranks[rank], method).remote(*arguments)
        return call(reference, f"trainer/{rank}", action, self.config.cluster.timeout_s)


def _pulse_or_error(request: asyncio.Future | None) -> Any:
    """Return the pulse, None if it has not arrived, or the error of the request; the call itself reports more."""
    return request and (request.exception() or request.result())


OnRanksJoined = Callable[[RankGroup], Awaitable[None]]


def warn_if_unfused(facts: dict[str, Any]) -> dict[str, Any]:
    """Warn if the rank has no fused kernels; return its facts without the reason."""
    if why := facts.pop("unfused", ""):
        watchdog.say(
            f"Fused log-prob kernels are off, as Triton cannot run ({why}); PyTorch uses more time and memory. "
            "Install Triton and a C compiler (gcc) on the nodes of trainer ranks."
        )
    return facts


class _SharedExclusiveLock:
    """Asynchronous lock with any number of shared holders or one exclusive one; a waiting exclusive request goes
    first."""

    def __init__(self) -> None:
        self._gate, self._none_shared, self._shared = asyncio.Lock(), asyncio.Event(), 0
        self._none_shared.set()

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        async with self._gate:
            self._shared += 1
            self._none_shared.clear()
        try:
            yield
        finally:
            self._shared -= 1
            if not self._shared:
                self._none_shared.set()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        async with self._gate:
            await self._none_shared.wait()
            yield


async def start_ranks(
    kind: type, config: Config, slots: Slots, cores: Sequence[int] | None
) -> list[ray.actor.ActorHandle]:
    """Start one actor of class `kind` on every slot and join them into a process group."""
    remote, limit = ray.remote(concurrency_groups={WATCH: 1, STORE: 1})(kind), config.cluster.timeout_s
    variables = NO_TORCH_COMPILE | MALLOC_SETTINGS
    if slots.device != "cpu":
        chosen = [*cuda.deterministic_settings(config), *cuda.rank_settings(config, slots.threads)]
        variables = cuda.environment(chosen)
    options = [slots.options(rank, cuda.SHARE, variables) for rank in range(slots.count)]
    create = [
        partial(remote.options(**options[rank]).remote, config, rank, slots.count, slots.device, core)
        for rank, core in zip(range(slots.count), cores or [None] * slots.count, strict=True)
    ]
    ranks = [await from_head(each) for each in create]
    if compile_all := compile_operations(config):
        await compile_all(ranks, config, slots.device)
    place = await call(ranks[0].meeting_place.remote(), "trainer/0", "start", limit) or ranks[0]
    await all_of(
        [call(rank.join.remote(place), f"trainer/{i}", "join the other ranks", limit) for i, rank in enumerate(ranks)]
    )
    return ranks


def step_metrics(
    model: str, ranks: Sequence[tuple[dict[str, float], dict[str, float]]], count: float, lengths: Sequence[int]
) -> dict[str, float]:
    """Return a step's mean diagnostics as `model/name`, from (sums of this rank, values equal on all ranks) by rank.

    `count`: divisor of losses, over all rows of the mini-batch; `lengths`: tokens in the loss of the accumulated rows.
    Names with a slash, as `rewards/margins`, stay as they are.
    """
    names = {name: None for sums, _ in ranks for name in sums}
    totals = {name: sum(sums.get(name, 0.0) for sums, _ in ranks) for name in names}
    return {
        name if "/" in name else f"{model}/{name}": value
        for name, value in (mean_diagnostics(totals, count, sum(lengths)) | ranks[0][1]).items()
    }


def check_written(problems: Sequence[str | None]) -> None:
    """Raise NotSaved if a rank could not write; `problems`: by rank, None for success."""
    if failed := [f"trainer/{rank}: {problem}" for rank, problem in enumerate(problems) if problem]:
        raise NotSaved(failed[0])
