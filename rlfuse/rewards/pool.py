"""The reward of a batch of samples, from functions and a model in processes that may crash or hang.

Role: implements `RewardScorer` for the controller. The driver's side of reward workers: wave by wave (gates first, see
`compose`) it cuts a batch into calls, feeds them to whichever process is free, and composes the outcomes.
Invariants:
- each call of a function has a process to itself and is bounded in time; a process that exceeds it is killed, and a new
  one is started while the outcome is already on its way. A function that proves quick gets more samples in each call;
- how a batch is cut, and in which order calls end, changes no reward;
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
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlfuse.cluster.nodes import here
from rlfuse.config.rewards import Given, RewardEntry, is_model
from rlfuse.engines.protocols import EngineError
from rlfuse.observe.events import Span
from rlfuse.rewards.compose import Outcomes, compose, unscored, view, wanted, waves
from rlfuse.rewards.entries import load_entries
from rlfuse.rewards.items import Item, RewardError, item_of_sample
from rlfuse.rewards.model import ModelSpec, RewardModelWorker, check_model
from rlfuse.rewards.seat import Call, Seat
from rlfuse.rewards.shapes import RewardFunction
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
        functions: Sequence[Given | RewardFunction] = (),
        weights: Sequence[float] = (),
        model_path: str | None = None,
        num_workers: int = 1,
        timeout_s: float = 30.0,
        memory_mb: int | None = None,
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
        self.entries, self._functions = load_entries(functions, weights, model_path)
        asked = tuple(entry.name for entry in self.entries if is_model(entry.path))
        self._model = ModelSpec(model_path, asked, device, dtype, trust_remote_code) if model_path else None
        self._model_options = model_options or {}
        if self._model:
            check_model(self._model)
        self._timeout_s, self._memory_mb, self._engine_timeout_s = timeout_s, memory_mb, engine_timeout_s
        self._workers = num_workers if self._functions else 0
        self._prompt_key = prompt_key
        self._pace: dict[str, float] = {}  # seconds per sample, lately
        self._seats: list[Seat] = []
        self._queues: list[asyncio.Queue[Call]] = []  # functions', the model's
        self._tasks: list[asyncio.Task] = []

    def check_sources(self, sources: Sequence[str]) -> None:
        """RewardError if a data_source has no reward: to be asked with those of the data, before anything starts."""
        if missing := unscored(self.entries, sources):
            raise RewardError(
                f"reward.functions: no entry scores data_source {', '.join(map(repr, missing[:8]))}"
                + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
                + ". Add them to the sources of an entry, or add one for them; an entry without sources scores all."
            )

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
        known: list[Outcomes] = [{} for _ in items]
        for wave in waves(self.entries):
            asked = [
                asyncio.ensure_future(self._ask(entry, items, wanted(entry, items, known), known)) for entry in wave
            ]
            try:
                await asyncio.gather(*asked)
            finally:
                for one in asked:
                    one.cancel()
        return [compose(self.entries, item.data_source, found) for item, found in zip(items, known, strict=True)]

    async def _ask(
        self, entry: RewardEntry, items: list[Item], positions: list[int], known: Sequence[Outcomes]
    ) -> None:
        """Write what `entry` says of the items at these positions into `known`."""
        calls = []
        try:
            for call in self._calls(entry, items, positions):
                calls.append(call)
                await self._put(self._queues[is_model(entry.path)], call)
            await asyncio.gather(*(call.answer for call in calls))
        finally:
            for call in calls:
                call.answer.cancel()
        for call in calls:
            for position, outcome in zip(call.positions, call.answer.result(), strict=True):
                known[position][entry.name] = outcome

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

    async def _put(self, queue: asyncio.Queue[Call], call: Call) -> None:
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

    def _calls(self, entry: RewardEntry, items: list[Item], positions: list[int]) -> Iterator[Call]:
        """Calls of one entry, each cut when there is room for it, by what is known then of the function's pace.

        verl's functions get one sample a call or as many as are quick, async ones several, batched ones all.
        """
        function, limit = self._functions.get(entry.name), self._limit(entry)
        if function is None:  # by length, so that a call's items pad each other little
            positions = sorted(positions, key=lambda i: len(items[i].prompt_text) + len(items[i].response))
        start = 0
        while start < len(positions):
            chosen = positions[start : start + self._size(function, len(positions))]
            start += len(chosen)
            told = self._timeout_s if function else limit
            call = Call(
                entry.name,
                [view(entry, items[position]) for position in chosen],
                chosen,
                limit,
                told,
                batched=function is None or function.batched,
            )
            call.answer.add_done_callback(lambda _, call=call: self._learn(call))
            yield call

    def _size(self, function: RewardFunction | None, most: int) -> int:
        if function is None:
            return MODEL_ITEMS
        if function.batched:
            return most
        return ASYNC_ITEMS if function.is_async else max(1, int(CALL_S / self._pace.get(function.name, math.inf)))

    def _learn(self, call: Call) -> None:
        """A function's pace: of its latest call, but never more than twice as fast as it was believed to be.

        So a call has at most twice the samples of the one before, should the next ones be slow. A call that had to be
        repeated says nothing.
        """
        if call.seconds:
            pace = call.seconds / len(call.items)
            self._pace[call.name] = max(pace, self._pace.get(call.name, 0.0) / 2)

    def _limit(self, entry: RewardEntry) -> float:
        """Seconds after which a call's process is killed."""
        function = self._functions.get(entry.name)
        if function is None:
            return self._engine_timeout_s
        return self._timeout_s + (ASYNC_GRACE_S if function.is_async else 0.0)

    def _function_seat(self, index: int, queue: asyncio.Queue[Call]) -> Seat:
        # No CPU is asked for: a share that doesn't fit would leave the actor pending for ever, without a word.
        # On the driver's node: there the functions' files have been found.
        beside = NodeAffinitySchedulingStrategy(here(), soft=False)
        actor = ray.remote(RewardWorker).options(num_cpus=0, max_restarts=0, scheduling_strategy=beside)
        sources = [pack(function) for function in self._functions.values()]
        where, limits = f"reward/{index}", (self._timeout_s, self._memory_mb)
        return Seat(where, queue, lambda: actor.remote(where, sources, *limits), self._engine_timeout_s)

    def _model_seat(self, queue: asyncio.Queue[Call]) -> Seat:
        options = {"num_cpus": 0, "max_restarts": 0, **self._model_options}
        actor = ray.remote(RewardModelWorker).options(**options)
        return Seat("reward/model", queue, lambda: actor.remote(self._model), self._engine_timeout_s)


def _closed() -> EngineError:
    return EngineError("the reward pool was closed while samples were waiting")


def _check_numbers(num_workers: int, timeout_s: float) -> None:
    if num_workers < 1:
        raise RewardError(f"reward.num_workers is {num_workers}; it has to be at least 1")
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise RewardError(f"reward.timeout_s is {timeout_s}; it has to be a finite number of seconds above 0")
