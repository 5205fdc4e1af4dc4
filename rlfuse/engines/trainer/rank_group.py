"""The driver's side of trainer ranks, whatever they hold: their start, calls, steps, and turns on the device.

Role: `TrainerGroup` (whole models), `PipelineTrainer` (stages) and `RewardModelTrainer` add what they ask their ranks
for. A rollout slot spans `rollout.tensor_model_parallel_size` ranks.
Invariants: calls on single slots run side by side; a call of all ranks runs alone, because collectives need the same
order on every rank. The rows of a step are those that were accumulated since the last one. A failure is told once, and
a dead rank before those that waited for it.
Waits: for other calls' turns and for ranks, each call at most cluster.timeout_s.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import ray

from rlfuse.algorithms.losses import loss_count
from rlfuse.algorithms.objectives import means
from rlfuse.cluster import cuda
from rlfuse.cluster.placement import Slots
from rlfuse.cluster.remote import all_of, call
from rlfuse.config.schema import Config
from rlfuse.engines.trainer.deepspeed_ops import load_everywhere
from rlfuse.errors import NotSaved
from rlfuse.events import Span

KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""Bytes; up to these glibc keeps what a rank frees. By default it hands a micro-batch's activations back to the system
and takes them anew; the page faults are 5 % of a split backward's time."""


class RankGroup:
    """Every method sends its call to the ranks concerned and waits for all of them, at most cluster.timeout_s."""

    def __init__(self, config: Config, ranks: Sequence[ray.actor.ActorHandle]):
        self.config, self.ranks, self._turns = config, list(ranks), _Turns()
        self._accumulated: dict[str, list[int]] = {model: [] for model in self.models}
        """Model -> response tokens of each row since its last step."""

    @property
    def models(self) -> tuple[str, ...]:
        """What is trained."""
        return ("actor", "critic") if self.config.uses_critic else ("actor",)

    async def take_device(self, slot: int) -> None:
        await self._call("switch", "take its device", slot, lambda rank: ("trainer",))

    async def leave_device(self, slot: int) -> None:
        """The slot's ranks move their models to host memory; until `take_device` nothing may be asked of them."""
        await self._call("switch", "leave its device", slot, lambda rank: ("rollout",))

    async def step(self, model: str, lengths: Sequence[int]) -> dict[str, float]:
        """One optimizer step; the mini-batch's mean diagnostics, `lr` and `grad_norm` as `model/name`.

        ValueError unless `lengths` are the response tokens of the rows accumulated since the last step, in any order.
        """
        if not (accumulated := self._accumulated[model]):
            raise ValueError(f"Nothing was accumulated for the {model} since its last step: accumulate rows first.")
        if sorted(lengths) != sorted(accumulated):
            raise ValueError(
                f"A step of the {model} over {len(lengths)} rows ({sum(lengths)} response tokens), but since its last "
                f"one {len(accumulated)} ({sum(accumulated)}) were accumulated: accumulate every row of it once."
            )
        self._accumulated[model] = []
        count = loss_count(lengths, self.config.actor.loss_agg_mode, self.config.data.max_response_length)
        sums = await self._all("step", f"update the {model}", model, count)
        return step_metrics(model, sums, count, lengths)

    async def drain(self) -> list[Span]:
        return [span for spans in await self._all("drain", "hand over its events") for span in spans]

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
        async with self._turns.alone() if slot is None else self._turns.shared():
            return await all_of([self._ask(rank, method, action, *arguments(rank)) for rank in self._ranks(slot)])

    def _ask(self, rank: int, method: str, action: str, *arguments: Any) -> Awaitable[Any]:
        reference = getattr(self.ranks[rank], method).remote(*arguments)
        return call(reference, f"trainer/{rank}", action, self.config.cluster.timeout_s)


class _Turns:
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
    async def alone(self) -> AsyncIterator[None]:
        async with self._gate:
            await self._none_shared.wait()
            yield


async def start_ranks(
    kind: type, config: Config, slots: Slots, cores: Sequence[int] | None
) -> list[ray.actor.ActorHandle]:
    """One actor of this kind of rank on every slot; they have met one another."""
    remote, limit, variables = ray.remote(kind), config.cluster.timeout_s, KEEP_FREED_MEMORY
    if slots.device != "cpu":
        chosen = [*cuda.deterministic_settings(config), *cuda.rank_settings(config, slots.threads)]
        variables = cuda.environment(chosen)
    options = [slots.options(rank, cuda.SHARE, variables) for rank in range(slots.count)]
    ranks = [
        remote.options(**options[rank]).remote(config, rank, slots.count, slots.device, core)
        for rank, core in zip(range(slots.count), cores or [None] * slots.count, strict=True)
    ]
    await load_everywhere(ranks, limit)
    host, port = await call(ranks[0].meeting_place.remote(), "trainer/0", "start", limit)
    await all_of(
        [
            call(rank.join.remote(host, port), f"trainer/{i}", "join the other ranks", limit)
            for i, rank in enumerate(ranks)
        ]
    )
    return ranks


def step_metrics(
    model: str, ranks: Sequence[tuple[dict[str, float], dict[str, float]]], count: float, lengths: Sequence[int]
) -> dict[str, float]:
    """Mean diagnostics of a step as `model/name`, from each rank's sums and what is the same on all ranks."""
    names = {name: None for sums, _ in ranks for name in sums}
    totals = {name: sum(sums.get(name, 0.0) for sums, _ in ranks) for name in names}
    return {f"{model}/{name}": value for name, value in (means(totals, count, sum(lengths)) | ranks[0][1]).items()}


def check_written(problems: Sequence[str | None]) -> None:
    """NotSaved if a rank could not write; `problems`: of each rank."""
    if told := [f"trainer/{rank}: {problem}" for rank, problem in enumerate(problems) if problem]:
        raise NotSaved(told[0])
