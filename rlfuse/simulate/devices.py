"""Simulated trainer ranks, rewards and weight updates, behind the controller's protocols.

A slot does one kind of work at a time, and trains only in role `trainer` with an empty engine; violations raise
SimulationError.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rlfuse.costs.model import Costs
from rlfuse.events import Span
from rlfuse.protocols import DeviceSharing, PassResult
from rlfuse.samples import Reward, Row, Sample
from rlfuse.simulate.batching import SimulationError
from rlfuse.simulate.rollout import Device, SimulatedRollout, Zeros
from rlfuse.step.colocation import to_engine
from rlfuse.step.scoring import KIND_OF


class SimulatedTrainer:
    """One rank per device. `scored` and `trained` count passes over each sample, per kind and model."""

    pipelined = False
    offloaded_optimizers: Mapping[int, float] = {}  # empty: included in the costs of switch and step

    def __init__(
        self,
        devices: Sequence[Device],
        costs: Costs,
        zeros: Zeros,
        lockstep: bool = False,
        lockstep_backward: bool = False,
        by_update: bool = False,
    ):
        self.sharing = DeviceSharing()  # moves are included in `Costs.switch_s`
        self.devices, self.costs, self._zeros, self._by_update = list(devices), costs, zeros, by_update
        self.lockstep, self.lockstep_backward = lockstep, lockstep_backward
        self.scored: dict[str, Counter[str]] = defaultdict(Counter)
        self.trained: dict[str, Counter[str]] = defaultdict(Counter)
        self._rates: Sequence[float] = [1.0] * len(self.devices)
        self._accumulated: dict[str, list[Row]] = {}
        self._spans: list[Span] = []

    async def score(self, models: Sequence[str], rows: Sequence[Row], slot: int | None = None) -> dict[str, PassResult]:
        now = asyncio.get_running_loop().time
        return {
            model: PassResult(began=now(), arrays=await self._score(KIND_OF[model], rows, slot)) for model in models
        }

    async def _score(self, kind: str, rows: Sequence[Row], slot: int | None) -> list[np.ndarray]:
        self._check_lockstep(kind, slot, self.lockstep)
        async with self._busy(kind, rows, slot) as call:
            await asyncio.sleep(self.costs.score_call_s)
            await call.work(self._tokens(rows, slot), 1 / self.costs.score_tokens_per_s)
        self.scored[kind].update(row.id for row in rows)
        return [self._zeros.take(len(row.response_ids))[1] for row in rows]

    async def accumulate(
        self, models: Sequence[str], rows: Sequence[Row], slot: int | None = None
    ) -> dict[str, PassResult]:
        now = asyncio.get_running_loop().time
        return {model: PassResult(began=now(), arrays=await self._accumulate(model, rows, slot)) for model in models}

    async def _accumulate(self, model: str, rows: Sequence[Row], slot: int | None) -> list[np.ndarray]:
        self._check_lockstep("backward", slot, self.lockstep_backward)
        async with self._busy("backward", rows, slot, model) as call:
            await asyncio.sleep(self.costs.train_call_s)
            await call.work(self._tokens(rows, slot), 1 / self.costs.train_tokens_per_s)
        self._accumulated.setdefault(model, []).extend(rows)
        return self._log_probs_of_update(model, rows)

    async def sync_reference(self) -> None: ...

    def _log_probs_of_update(self, model: str, rows: Sequence[Row]) -> list[np.ndarray]:
        first = self._by_update and model == "actor" and not self.trained[model]
        return [self._zeros.take(len(row.response_ids))[1] for row in rows] if first else []

    def _check_lockstep(self, kind: str, slot: int | None, lockstep: bool) -> None:
        if lockstep and slot is not None:
            raise SimulationError(f"slot {slot} was requested to run {kind} alone, but it needs all ranks")

    async def step(
        self, model: str, lengths: Sequence[int], lr_factor: float = 1.0, skipped: Sequence[int] = ()
    ) -> dict[str, float]:
        rows = self._accumulated.pop(model, [])
        once = Counter(row.id for row in rows)
        counted = sorted([*(row.trained_tokens(model) for row in rows), *skipped])
        if counted != sorted(lengths) or (once and max(once.values()) > 1):
            raise SimulationError(
                f"step of {model} over {len(lengths)} rows, but {len(rows)} rows of {len(once)} samples were "
                f"accumulated since its last step and {len(skipped)} skipped"
            )
        async with self._busy("optimizer", (), None, model):
            await asyncio.sleep(self.costs.optimizer_s)
        self.trained[model].update(once)
        return {}

    def _tokens(self, rows: Sequence[Row], slot: int | None) -> list[float]:
        """Return the tokens of the slot, or of each slot: split by rates, with the longest row unsplit."""
        tokens = [row.tokens for row in rows]
        if slot is not None:
            return [sum(tokens)]
        total_inverse_rate, fastest = sum(1 / rate for rate in self._rates), min(self._rates)
        longest = [max(tokens, default=0) if rate == fastest else 0 for rate in self._rates]
        return [
            max(sum(tokens) / rate / total_inverse_rate, least)
            for rate, least in zip(self._rates, longest, strict=True)
        ]

    @asynccontextmanager
    async def _busy(self, kind: str, rows: Sequence[Row], slot: int | None, model: str = ""):
        """Mark one device, or all, as busy; record a span for each until its work is done."""
        devices = self.devices if slot is None else [self.devices[slot]]
        start, call = asyncio.get_running_loop().time(), _Call(devices)
        for device in devices:
            if device.role != "trainer" or device.held or device.work:
                raise SimulationError(
                    f"slot {device.index} was requested to run {kind} with role {device.role}, {device.held} samples "
                    f"on its engine and current work {device.work or 'none'}"
                )
            device.work = kind
        try:
            yield call
        finally:
            end = asyncio.get_running_loop().time()
            samples, attributes = tuple(row.id for row in rows), {"model": model} if model else {}
            for device, (until, tokens) in zip(devices, call.done or [(end, 0)] * len(devices), strict=True):
                device.work = ""
                where, until = f"trainer/{device.index}", min(until, end)
                self._spans.append(
                    Span(kind, where, start, until, samples=samples, tokens=tokens, attributes=dict(attributes))
                )

    async def probe(self) -> list[float | None]:
        now = asyncio.get_running_loop().time()
        return [device.speed.done(now, now + 1) for device in self.devices]

    async def fetch_optimizers(self, slot: int) -> None: ...

    async def acquire_device(self, slot: int) -> None:
        await self._switch(self.devices[slot], "rollout", "trainer")

    async def release_device(self, slot: int) -> None:
        await self._switch(self.devices[slot], "trainer", "rollout")

    async def _switch(self, device: Device, before: str, after: str) -> None:
        if device.role == after:
            return
        awake = after == "trainer" and not device.asleep
        if device.role != before or device.held or device.work or awake:
            raise SimulationError(
                f"slot {device.index} was requested to switch to {after} with role {device.role}, its engine "
                f"{'asleep' if device.asleep else 'awake'}, {device.held} samples on it and current work "
                f"{device.work or 'none'}"
            )
        start, device.role = asyncio.get_running_loop().time(), "switching"
        await asyncio.sleep(self.costs.switch_s)
        device.role = after
        self._spans.append(Span("switch", f"trainer/{device.index}", start, asyncio.get_running_loop().time()))

    async def replan(self, rates: Sequence[float], saved: Path | None = None) -> None:
        self._rates = list(rates) if rates else [1.0] * len(self.devices)

    saves_in_background = False

    async def save(self, folder: Path, wait: bool = True) -> None: ...

    async def is_saving(self) -> bool:
        return False

    async def saved(self) -> None: ...

    async def save_metadata(self, folder: Path) -> None: ...

    def discard_gradients(self) -> None: ...

    async def load(self, folder: Path) -> None: ...

    async def drain(self, collect: bool = False) -> list[Span]:
        spans, self._spans = self._spans, []
        return spans


class SimulatedStages(SimulatedTrainer):
    """Ranks that hold pipeline stages. `bubbles`: idle time of a schedule over its working time."""

    pipelined = True

    def __init__(self, devices: Sequence[Device], costs: Costs, zeros: Zeros, bubbles: float, by_update: bool):
        super().__init__(devices, costs, zeros, lockstep=True, lockstep_backward=True, by_update=by_update)
        self._bubbles = bubbles

    async def train(
        self, rows: Mapping[str, Sequence[Row]], scored: Mapping[str, Sequence[Row]]
    ) -> tuple[dict[str, float], dict[str, list[np.ndarray]], list[np.ndarray]]:
        """Simulate one schedule; deferred passes add time only if they exceed its bubbles."""
        trained = [row for model in rows for row in rows[model]]
        async with self._busy("backward", trained, None, "+".join(rows)) as call:
            await asyncio.sleep(self.costs.train_call_s)
            tokens = sum(map(self._tokens_per_rank, rows.values()))
            work = tokens / self.costs.train_tokens_per_s
            passes = sum(map(self._tokens_per_rank, scored.values())) / self.costs.score_tokens_per_s
            cost = work + max(work * self._bubbles, passes)
            await call.work([tokens] * len(self.devices), cost / tokens if tokens else 0.0)
        for model, each in rows.items():
            self._accumulated.setdefault(model, []).extend(each)
        for model, each in scored.items():
            self.scored[KIND_OF[model]].update(row.id for row in each)
        scores = {m: [self._zeros.take(len(row.response_ids))[1] for row in each] for m, each in scored.items()}
        return {}, scores, self._log_probs_of_update("actor", rows.get("actor", ()))

    def _tokens_per_rank(self, rows: Sequence[Row]) -> float:
        tokens = [row.tokens for row in rows]
        return max(sum(tokens) / len(self.devices), max(tokens, default=0))

    def _tokens(self, rows: Sequence[Row], slot: int | None) -> list[float]:
        return [self._tokens_per_rank(rows)] * len(self.devices)


@dataclass(slots=True)
class _Call:
    devices: Sequence[Device]
    done: list[tuple[float, int]] = field(default_factory=list)  # (end time, tokens) of each device

    async def work(self, tokens: Sequence[float], token_s: float) -> None:
        now = asyncio.get_running_loop().time()
        self.done = [
            (device.speed.end(now, share * token_s), round(share))
            for device, share in zip(self.devices, tokens, strict=True)
        ]
        await asyncio.sleep(max(end for end, _ in self.done) - now)


class SimulatedReward:
    """A reward function that takes no time and gives every sample the same reward."""

    def __init__(self) -> None:
        self.scored: Counter[str] = Counter()
        self._reward = Reward(1.0)

    async def score(self, samples: Sequence[Sample]) -> list[Reward]:
        self.scored.update(sample.id for sample in samples)
        return [self._reward] * len(samples)

    async def drain(self, collect: bool = False) -> list[Span]:
        return []


class SimulatedWeights:
    """Weight updates: every engine receives them after `seconds`, once its rank has released the device."""

    def __init__(
        self, rollouts: Sequence[SimulatedRollout], trainer: SimulatedTrainer, seconds: float, restart_s: float
    ):
        self._rollouts, self._trainer, self._seconds, self._restart_s = rollouts, trainer, seconds, restart_s

    async def push(self, version: int) -> None:
        await asyncio.gather(*(to_engine(each, self._trainer, slot) for slot, each in enumerate(self._rollouts)))
        await asyncio.sleep(self._seconds)
        for rollout in self._rollouts:
            rollout.version = version

    async def restart_engine(self, slot: int) -> None:
        """Replace the engine of a slot after `restart_s` seconds; called when all engines are lost."""
        await self._trainer.release_device(slot)
        await asyncio.sleep(self._restart_s)
        self._rollouts[slot].replace()
