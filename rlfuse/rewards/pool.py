"""The reward of a batch of samples, from functions and a model in processes that may crash or hang.

Role: implements `RewardScorer` for the controller. The driver's side of reward workers: it cuts a batch into calls,
feeds them to whichever process is free, and composes the outcomes.
Invariants:
- each call of a function has a process to itself and is bounded in time; a process that exceeds it is killed, and a new
  one is started while the outcome is already on its way. A function that proved quick gets several samples in a call;
- a failed call gives a `RewardFailure`, never a number. It costs only the samples of that call, and a call with several
  that raised or lost its process is repeated one by one, so that it costs only the bad one. The exception is a batched
  function that took too long: all of its batch fails, because repeating each could take as long again;
- a process that can't be started (again) is an `EngineError` for every waiting and later `score`, not a failed sample.

Concurrency, all on the driver's event loop; each seat is a task with one worker process and one call under way:

    score() --put, waits while full--> functions queue (2 calls a seat) --> seat reward/0 --> RewardWorker process
                                                                       \\-> seat reward/1 --> RewardWorker process
            --put, waits while full--> model queue (2 calls) -----------> seat reward/model -> RewardModelWorker process
    score() <--futures, one for each call------------------------------- seats

A seat waits for its process to be ready, then for a call, then for the answer or the time limit; whatever happens it
resolves the call's future, so that `score` is always unblocked.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import ray

from rlfuse.engines.protocols import EngineError
from rlfuse.observe.events import Span
from rlfuse.rewards.compose import check_weights, compose
from rlfuse.rewards.functions import MODEL_PART, RewardFunction, Spec, check_functions
from rlfuse.rewards.items import Item, Outcome, RewardError, item_of_sample
from rlfuse.rewards.model import ModelSpec, RewardModelWorker, check_model
from rlfuse.rewards.seat import Call, Seat
from rlfuse.rewards.worker import RewardWorker, pack
from rlfuse.samples import Reward, RewardFailure, Sample

# Items of an async verl function that are awaited together in one call, for instance requests to a judge.
ASYNC_ITEMS = 32
# An async function bounds its own items; only where it blocks its event loop is the process killed, this much later.
ASYNC_GRACE_S = 5.0
# A plain function gets as many samples in a call as it is likely to finish in this time: a call has 4 ms of its own.
CALL_S = 0.05
# Items of one call of the reward model: enough to fill a batch, few enough to bound what a crash repeats.
MODEL_ITEMS = 32


class RewardPool:
    """Reward functions in `num_workers` processes and, with `model_path`, a reward model in one more."""

    def __init__(
        self,
        functions: Sequence[Spec] = (),
        weights: Sequence[float] = (),
        model_path: str | None = None,
        num_workers: int = 1,
        timeout_s: float = 30.0,
        *,
        engine_timeout_s: float = 1800.0,
        prompt_key: str = "prompt",
        device: str = "cpu",
        dtype: str = "float32",
        trust_remote_code: bool = False,
        model_options: dict[str, Any] | None = None,
    ):
        """Loads the functions here, in the driver, and starts nothing.

        `timeout_s` bounds one call of a function, `engine_timeout_s` a process's start and one call of the model.
        `device`, `dtype` and `trust_remote_code` are of the model; `model_options` are Ray's options for its actor,
        for instance where it is placed.
        """
        _check_numbers(num_workers, timeout_s)
        self._functions = {function.name: function for function in check_functions(functions)}
        self._names = [*self._functions, *([MODEL_PART] if model_path else [])]
        self._weights = check_weights(weights, self._names)
        self._model = ModelSpec(model_path, device, dtype, trust_remote_code) if model_path else None
        self._model_options = model_options or {}
        if self._model:
            check_model(self._model)
        self._timeout_s, self._engine_timeout_s = timeout_s, engine_timeout_s
        self._workers = num_workers if self._functions else 0
        self._prompt_key = prompt_key
        self._pace: dict[str, float] = {}  # seconds per sample, the slowest call of the last batch
        self._seats: list[Seat] = []
        self._queues: list[asyncio.Queue[Call]] = []
        self._tasks: list[asyncio.Task] = []

    @property
    def names(self) -> list[str]:
        """The reward's parts, in the order of their weights."""
        return list(self._names)

    async def start(self) -> None:
        """Start all processes; EngineError with the user's traceback if one can't be."""
        functions = asyncio.Queue(2 * max(self._workers, 1))
        models = asyncio.Queue(2)
        self._queues = [functions, models]
        self._seats = [self._function_seat(i, functions) for i in range(self._workers)]
        if self._model:
            self._seats.append(self._model_seat(models))
        try:
            await asyncio.gather(*(seat.start() for seat in self._seats))
        except BaseException:
            await self.close()
            raise
        self._tasks = [asyncio.create_task(seat.serve(), name=seat.where) for seat in self._seats]

    async def score(self, samples: Sequence[Sample]) -> list[Reward | RewardFailure]:
        """One result for each sample, in order."""
        if not self._tasks:
            raise EngineError("the reward pool has no processes: score() belongs between start() and close()")
        items = [item_of_sample(sample, self._prompt_key) for sample in samples]
        parts = [self._calls(items), self._model_calls(items)]
        calls = [call for part in parts for call in part]
        try:
            feeding = asyncio.gather(
                *(self._feed(queue, part) for queue, part in zip(self._queues, parts, strict=True))
            )
            await asyncio.gather(feeding, *(call.answer for call in calls))
        finally:
            for call in calls:
                call.answer.cancel()
        self._pace |= _pace(calls)
        outcomes: dict[str, list[Outcome]] = {name: [None] * len(items) for name in self._names}
        for call in calls:
            for position, outcome in zip(call.positions, call.answer.result(), strict=True):
                outcomes[call.name][position] = outcome
        return [compose(self._names, self._weights, row) for row in zip(*outcomes.values(), strict=True)]

    async def drain(self) -> list[Span]:
        """The spans of all seats since the last drain: `reward` for each call, `restart` for each process replaced."""
        return sorted((span for seat in self._seats for span in seat.recorder.drain()), key=lambda span: span.start)

    async def close(self) -> None:
        """Kill all processes; a `score` under way gets an EngineError."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for seat in self._seats:
            await seat.close()
        self._sweep()

    async def _feed(self, queue: asyncio.Queue[Call], calls: list[Call]) -> None:
        for call in calls:
            if self._tasks:
                await queue.put(call)
            else:
                call.fail(_closed())
        if not self._tasks:  # closed while this waited for room: nobody else will look into the queue again
            self._sweep()

    def _sweep(self) -> None:
        """Fail all that waits, which also makes room for whoever waits to put more in, to find the pool closed."""
        for queue in self._queues:
            while not queue.empty():
                queue.get_nowait().fail(_closed())

    def _calls(self, items: list[Item]) -> list[Call]:
        """verl's functions get one sample a call or as many as are quick, async ones several, batched ones all."""
        calls = []
        for function in self._functions.values():
            quick = int(CALL_S / self._pace.get(function.name, math.inf))
            size = len(items) if function.batched else ASYNC_ITEMS if function.is_async else max(1, quick)
            calls += _cut(function.name, items, size, self._limit(function), self._timeout_s, function.batched)
        return calls

    def _model_calls(self, items: list[Item]) -> list[Call]:
        if not self._model:
            return []
        # By length, so that a call's items pad each other little.
        order = sorted(range(len(items)), key=lambda i: len(items[i].prompt_text) + len(items[i].response))
        limit = self._engine_timeout_s
        cut = _cut(MODEL_PART, [items[i] for i in order], MODEL_ITEMS, limit, limit, batched=True)
        for call in cut:
            call.positions = [order[position] for position in call.positions]
        return cut

    def _limit(self, function: RewardFunction) -> float:
        bounds_itself = function.is_async and not function.batched
        return self._timeout_s + (ASYNC_GRACE_S if bounds_itself else 0.0)

    def _function_seat(self, index: int, queue: asyncio.Queue[Call]) -> Seat:
        # No CPU is asked for: a share that doesn't fit would leave the actor pending for ever, without a word.
        actor = ray.remote(RewardWorker).options(num_cpus=0, max_restarts=0)
        sources = {name: pack(function) for name, function in self._functions.items()}
        return Seat(f"reward/{index}", queue, lambda: actor.remote(sources, self._timeout_s), self._engine_timeout_s)

    def _model_seat(self, queue: asyncio.Queue[Call]) -> Seat:
        options = {"num_cpus": 0, "max_restarts": 0, **self._model_options}
        actor = ray.remote(RewardModelWorker).options(**options)
        return Seat("reward/model", queue, lambda: actor.remote(self._model), self._engine_timeout_s)


def _cut(name: str, items: list[Item], size: int, limit_s: float, told_s: float, batched: bool) -> list[Call]:
    starts = range(0, len(items), max(size, 1))
    cuts = [range(start, min(start + size, len(items))) for start in starts]
    return [Call(name, [items[i] for i in cut], list(cut), limit_s, told_s, batched) for cut in cuts]


def _pace(calls: list[Call]) -> dict[str, float]:
    """Seconds per sample of each function in its slowest call; a call that had to be repeated says nothing."""
    paces: dict[str, float] = {}
    for call in calls:
        if call.seconds:
            paces[call.name] = max(paces.get(call.name, 0.0), call.seconds / len(call.items))
    return paces


def _closed() -> EngineError:
    return EngineError("the reward pool was closed while samples were waiting")


def _check_numbers(num_workers: int, timeout_s: float) -> None:
    if num_workers < 1:
        raise RewardError(f"reward.num_workers is {num_workers}; it has to be at least 1")
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise RewardError(f"reward.timeout_s is {timeout_s}; it has to be a finite number of seconds above 0")
