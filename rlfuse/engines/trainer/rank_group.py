"""The driver's side of trainer ranks, whatever they hold: their start, calls, steps, and turns on the device.

Role: base of `TrainerGroup`, `PipelineTrainer` and `RewardModelTrainer`. A rollout slot spans
`rollout.tensor_model_parallel_size` ranks, which share its rate. Invariants: calls on single slots run concurrently, a
call of all ranks runs alone; a failure is reported once, a dead rank before those that waited for it; a rank that hangs
in a `WATCHED` call is killed within about cluster.heartbeat_s. Waits for ranks at most cluster.timeout_s.
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
"""Up to these bytes glibc keeps what a rank frees. By default it hands a micro-batch's activations back to the system
and takes them anew; the page faults are 5 % of a split backward's time. Only the main arena heeds that, and Ray has a
rank's calls on a thread beside the main one, as `pulse` is answered on another."""
NO_TORCH_COMPILE = {"TORCHDYNAMO_DISABLE": "1"}
"""For ranks on CPUs. Optimizers that are imported and not used ask for a compilation, and torch would import its
compiler: a seventh of a rank's start."""
WATCHED = ("score", "accumulate", "run", "step")
"""Calls in which a rank shows often that it gets on."""
CHECKS_PER_HEARTBEAT = 8
"""At each rank in `cluster.heartbeat_s`, while it is at one of these."""
T = TypeVar("T")


class RankGroup:
    """Every method sends its call to the ranks concerned and waits for all of them, at most cluster.timeout_s."""

    def __init__(self, config: Config, ranks: Sequence[ray.actor.ActorHandle]):
        self.config, self.ranks, self._lock = config, list(ranks), _SharedExclusiveLock()
        self.recorder = Recorder("trainer")
        self._accumulated: dict[str, list[int]] = {model: [] for model in self.models}
        """Model -> trainable tokens of each row since its last step."""
        self._completed_calls: set[tuple[int, str]] = set()
        """(rank, call) that have ended well once: each rank compiles for itself."""
        self._roles: dict[int, str] = {}
        """Slot -> what its ranks were told last, once they have done it."""
        self.sharing = DeviceSharing()
        self.offloaded_optimizers: dict[int, float] = {}
        """Slot whose ranks are there but for what only optimizer steps read -> seconds that this takes to come."""
        self.rates = (1.0,) * len(self.ranks)
        """By rank: how many times longer than expected it takes."""

    @property
    def models(self) -> tuple[str, ...]:
        """What is trained."""
        return ("actor", "critic") if self.config.uses_critic else ("actor",)

    async def measure(self) -> dict[str, Any]:
        """Time what plans and utilisation go by, while nothing else runs on the slots; returns facts to log.

        `peak_flops`: FLOP/s of all ranks together, measured at the same time; missing where a device has no room.
        """
        speeds = await self._all("probe", "time fixed work")
        return {} if None in speeds else {"peak_flops": sum(speeds)}

    async def device_bytes(self) -> int:
        """Return the memory of the smallest device."""
        return min(await self._all("device_bytes", "report its device's memory"))

    async def share(self, sharing: DeviceSharing) -> None:
        """From now on the ranks share their devices like this."""
        await self._all("share", "share its device", sharing)
        self.sharing = sharing

    async def acquire_device(self, slot: int) -> None:
        await self._switch(slot, "trainer", "take its device")

    async def release_device(self, slot: int) -> None:
        """The slot's ranks move their models to host memory; until `acquire_device` nothing may be asked of them."""
        await self._switch(slot, "rollout", "leave its device")

    async def make_room(self, slot: int) -> None:
        """The slot's ranks release cached memory that the engine's weights need during a push."""
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
        """They set out, beside whatever the ranks compute; a step waits for them."""
        self.offloaded_optimizers.pop(slot, None)
        await all_of([self._ask(rank, "fetch_optimizers", "fetch its optimizers") for rank in self._ranks(slot)])

    async def replan(self, rates: Sequence[float], saved: Path | None = None) -> None:
        """Calls of several ranks are shared out by these rates of slots from now on; none: as if all were alike."""
        width = self.config.rollout.tensor_model_parallel_size
        self.rates = tuple(rates[rank // width] if rates else 1.0 for rank in range(len(self.ranks)))

    async def step(self, model: str, lengths: Sequence[int], lr_factor: float = 1.0) -> dict[str, float]:
        """One optimizer step; the mini-batch's mean diagnostics, `lr` and `grad_norm` as `model/name`.

        `lr_factor`: share of the full learning rate. ValueError unless `lengths` are the trainable tokens of the rows
        accumulated since the last step, in any order.
        """
        if not (accumulated := self._accumulated[model]):
            raise ValueError(f"Nothing was accumulated for the {model} since its last step: accumulate rows first.")
        if sorted(lengths) != sorted(accumulated):
            raise ValueError(
                f"A step of the {model} over {len(lengths)} rows ({sum(lengths)} response tokens), but since its last "
                f"one {len(accumulated)} ({sum(accumulated)}) were accumulated: accumulate every row of it once."
            )
        self._accumulated[model] = []
        count = loss_divisor(lengths, self.config.actor.loss_agg_mode, self.config.data.max_response_length)
        sums = await self._all("step", f"update the {model}", model, count, lr_factor)
        return step_metrics(model, sums, count, lengths)

    async def probe(self) -> list[float | None]:
        """FLOP/s of large matrix products, of each slot's slowest rank; every rank computes alone."""
        speeds = await self._all("probe", "time fixed work")
        slots = [[speeds[rank] for rank in self._ranks(slot)] for slot in range(len(speeds) // len(self._ranks(0)))]
        return [None if None in each else min(each) for each in slots]

    async def drain(self, collect: bool = False) -> list[Span]:
        of_ranks = await self._all("drain", "hand over its events", collect)
        return [*self.recorder.drain(), *chain.from_iterable(of_ranks)]

    def discard_gradients(self) -> None:
        """The run ends within a step: what it accumulated is not waited for, and only `save` may follow."""
        self._accumulated = {model: [] for model in self._accumulated}

    def _check_no_gradients(self, done: str) -> None:
        """ValueError while a model holds gradients, which checkpoints do not have."""
        for model, lengths in self._accumulated.items():
            if lengths:
                raise ValueError(
                    f"No checkpoint can be {done} now: the {model} holds gradients of {len(lengths)} rows, which "
                    "checkpoints do not have. Step first."
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
            asked = {
                rank: asyncio.ensure_future(self._ask(rank, method, action, *arguments(rank)))
                for rank in self._ranks(slot)
            }
            work = all_of([*asked.values()])
            return await (self._watched(work, asked, action) if method in WATCHED else work)

    async def _watched(self, work: Awaitable[T], asked: Mapping[int, asyncio.Future], action: str) -> T:
        """The result of a call; WorkerLost as soon as a rank hangs in it."""
        task, watch = asyncio.ensure_future(work), asyncio.ensure_future(self._watch(asked, action))
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise watch.result()
            self._completed_calls.update((rank, action) for rank in asked)
            return task.result()
        finally:
            for each in (task, watch):
                each.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def _watch(self, asked: Mapping[int, asyncio.Future], action: str) -> WorkerLost:
        """Return once one of these ranks hangs, with what to raise; it is killed."""
        limit, first = (
            self.config.cluster.heartbeat_s,
            any((rank, action) not in self._completed_calls for rank in asked),
        )
        judge, looked, pulses = HangDetector(limit, first), time.monotonic(), dict[int, Any]()
        try:
            while True:
                await asyncio.sleep(limit / CHECKS_PER_HEARTBEAT)
                at_it = [rank for rank, answer in asked.items() if not answer.done()]
                for rank in at_it:
                    if rank not in pulses:
                        pulses[rank] = asyncio.wrap_future(self.ranks[rank].pulse.remote().future())
                if at_it:
                    await asyncio.wait([pulses[rank] for rank in at_it], timeout=limit / CHECKS_PER_HEARTBEAT)
                before, looked = looked, time.monotonic()
                # Those that come later are heard at the next look: a rank that computes in Python answers slowly.
                answers = {rank: _pulse_or_error(pulses.pop(rank) if pulses[rank].done() else None) for rank in at_it}
                heard = {rank: pulse for rank, pulse in answers.items() if not isinstance(pulse, Exception)}
                hung = judge.check(looked - before, heard)
                if hung is not None:
                    return self._kill_hung_rank(hung, judge, action, [rank for rank in heard if rank != hung])
        finally:
            for each in pulses.values():
                each.cancel()

    def _kill_hung_rank(self, rank: int, judge: HangDetector, action: str, others: Sequence[int]) -> WorkerLost:
        """What to raise for a rank that hangs; it is killed, so that another can have its slot."""
        name = f"trainer/{rank}"
        waiting = [f"trainer/{other}" for other in others if detector.is_waiting_for(other, [rank])]
        wait = f"\nFor it {', '.join(waiting)} waited." if waiting else ""
        message = f"{name} hangs: asked to {action} it {detector.describe_hang(rank)}{wait}{watchdog.evidence(name)}"
        ray.kill(self.ranks[rank])
        return WorkerLost("\n".join(filter(None, [message, process_logs.log_hint(name)])))

    def _ask(self, rank: int, method: str, action: str, *arguments: Any) -> Awaitable[Any]:
        reference = getattr(self.ranks[rank], method).remote(*arguments)
        return call(reference, f"trainer/{rank}", action, self.config.cluster.timeout_s)


def _pulse_or_error(asked: asyncio.Future | None) -> Any:
    """The pulse, None if it has not come; the error of a rank that can't tell, as its call will tell more."""
    return asked and (asked.exception() or asked.result())


OnRanksJoined = Callable[[RankGroup], Awaitable[None]]


def warn_if_unfused(facts: dict[str, Any]) -> dict[str, Any]:
    """Return a rank's facts without the reason why it has no fused kernels, which is shown to the user."""
    if why := facts.pop("unfused", ""):
        watchdog.say(
            f"Log-probs are computed by PyTorch, which takes more time and memory: Triton could not run ({why}). "
            "Install Triton and a C compiler (gcc) on the nodes of trainer ranks."
        )
    return facts


class _SharedExclusiveLock:
    """Many shared turns at a time, or one alone; whoever waits to be alone keeps later ones out."""

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
    """One actor of this kind of rank on every slot; they have met one another."""
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
    """Mean diagnostics of a step as `model/name`, from each rank's sums and what is the same on all ranks."""
    names = {name: None for sums, _ in ranks for name in sums}
    totals = {name: sum(sums.get(name, 0.0) for sums, _ in ranks) for name in names}
    return {
        f"{model}/{name}": value
        for name, value in (mean_diagnostics(totals, count, sum(lengths)) | ranks[0][1]).items()
    }


def check_written(problems: Sequence[str | None]) -> None:
    """NotSaved if a rank could not write; `problems`: of each rank."""
    if message := [f"trainer/{rank}: {problem}" for rank, problem in enumerate(problems) if problem]:
        raise NotSaved(message[0])
