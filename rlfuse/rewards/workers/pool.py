r"""Score batches of samples with functions and models in worker processes that may crash or hang (`RewardScorer`).

    score() --put, waits while full--> queue of functions (2 calls per worker) --> handles --> RewardWorker processes
            --put, waits while full--> queue of a model, shared by all `score` calls --> handle --> its process
    score() <--futures, one per call---------------------------------------- handles

A process runs one call at a time; one that exceeds its time limit is killed and replaced. A failed call is a
`RewardFailure`; a batch that raised or lost its process is repeated sample by sample, a batch that timed out is not.
If a process cannot start, every waiting `score` raises `EngineError`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import ray

from rlfuse.cluster.nodes import this_node_id
from rlfuse.cluster.placement import Slots, reward_device, reward_options
from rlfuse.cluster.remote import on_node
from rlfuse.config.rewards import MODEL_PART, RewardConfig, RewardEntry, is_model
from rlfuse.engines.vllm.offline_engine import environment
from rlfuse.errors import EngineError, RewardError
from rlfuse.events import Span
from rlfuse.rewards.api.combine import Outcomes, compose, covers, positions_to_score, uncovered_sources, waves
from rlfuse.rewards.api.entries import load_entries
from rlfuse.rewards.api.items import Item, item_of_sample
from rlfuse.rewards.api.shapes import RewardFunction
from rlfuse.rewards.workers.reward_worker import RewardWorker, pack
from rlfuse.rewards.workers.reward_worker_handle import Call, RewardWorkerHandle, pool_closed_error
from rlfuse.samples import Prompt, Reward, RewardFailure, Sample

MAX_WAITING_BATCHES = 2
"""Batches queued before `put` blocks, so that the next one is complete when the model finishes the current one."""


class ModelCallQueue:
    """Queue of a model's handle that merges calls into batches: up to `size` calls, or those of `age_s` seconds."""

    def __init__(self, size: int, age_s: float):
        self._size, self._age_s = size, age_s
        self._waiting: asyncio.Queue[tuple[float, Call]] = asyncio.Queue(MAX_WAITING_BATCHES * size)
        self._taken: list[Call] = []

    async def put(self, call: Call) -> None:
        await self._waiting.put((asyncio.get_running_loop().time(), call))

    async def get(self) -> Call:
        while not (calls := [call for call in self._taken if not call.answer.done()]):  # skip cancelled ones
            self._taken = await self._take()
        self._taken = [call for call in calls if call.name != calls[0].name]
        return merge_calls([call for call in calls if call.name == calls[0].name])

    async def _take(self) -> list[Call]:
        since, first = await self._waiting.get()
        calls = [first]
        try:
            async with asyncio.timeout_at(since + self._age_s):
                while len(calls) < self._size:
                    calls.append((await self._waiting.get())[1])
        except TimeoutError:
            pass
        except BaseException:
            for call in calls:
                call.fail(pool_closed_error())
            raise
        return calls

    def empty(self) -> bool:
        return not self._taken and self._waiting.empty()

    def get_nowait(self) -> Call:
        return self._taken.pop() if self._taken else self._waiting.get_nowait()[1]


def merge_calls(calls: Sequence[Call]) -> Call:
    """Merge calls for one label of a model into one call.

    Its answer is split over them, and it is cancelled when all of them are done.
    """
    items = [item for call in calls for item in call.items]
    positions = [position for call in calls for position in call.positions]
    merged = replace(calls[0], items=items, positions=positions)

    def split_answer(answer: asyncio.Future) -> None:
        if answer.cancelled():
            return
        error, start = answer.exception(), 0
        for call in calls:
            if error is not None:
                call.fail(error)
            elif not call.answer.done():
                call.answer.set_result(answer.result()[start : start + len(call.items)])
            start += len(call.items)

    def cancel_if_done(_: asyncio.Future) -> None:
        if all(call.answer.done() for call in calls):
            merged.answer.cancel()

    merged.answer.add_done_callback(split_answer)
    for call in calls:
        call.answer.add_done_callback(cancel_if_done)
    return merged


ASYNC_ITEMS = 32
"""Items of an async verl function that are awaited concurrently in one call, for instance requests to a judge."""
ASYNC_GRACE_S = 5.0
"""Async items have their own time limit; the process is killed this much later if a function blocks its event loop."""
CALL_S = 0.05
"""Target duration of one call of a plain function; each call has an overhead of 4 ms."""


class RewardPool:
    """Pool of `reward.num_workers` processes for reward functions and one process per model or judge."""

    def __init__(
        self,
        reward: RewardConfig,
        trust_remote_code: bool = False,
        engine_timeout_s: float = 1800.0,
        prompt_key: str = "prompt",
        video_family: str | None = None,
        required: bool = True,
    ):
        """Load the reward functions. Raises RewardError.

        `engine_timeout_s`: limit for the start of a process and for one call of a model. `required`: whether having no
        function is an error; without one the pool has no processes, and nothing is scored.
        """
        _check_numbers(reward.num_workers, reward.timeout_s)
        self.entries, self._functions = load_entries(
            reward.functions,
            reward.weights,
            reward.model_path,
            required,
            backend=reward.model_backend,
            dtype=reward.model_dtype,
            trust_remote_code=trust_remote_code,
            engine_kwargs=reward.engine_kwargs,
            head=reward.model_head,
            head_kwargs=reward.model_head_kwargs,
        )
        self._models = _by_process(self.entries, self._functions)
        self._plain = [name for name, function in self._functions.items() if not function.is_model]
        self._workers = reward.num_workers if self._plain else 0
        self._settings, self._engine_timeout_s, self._prompt_key = reward, engine_timeout_s, prompt_key
        self._family = video_family
        self._pace: dict[str, float] = {}  # seconds per sample, recent
        self._handles: list[RewardWorkerHandle] = []
        self._queues: dict[
            str, asyncio.Queue[Call] | ModelCallQueue
        ] = {}  # by function name; plain functions share one
        self._tasks: list[asyncio.Task] = []

    def check_prompts(self, prompts: Sequence[Prompt], max_failure_rate: float = 0.0) -> None:
        """Raise RewardError if a data_source has no reward function, or too many rows lack a required column."""
        if not self.entries:
            return
        if missing := uncovered_sources(self.entries, [prompt.data_source for prompt in prompts]):
            raise RewardError(
                f"reward.functions: no entry scores data_source {', '.join(map(repr, missing[:8]))}"
                + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
                + ". Add them to `sources` of an entry, or add an entry; an entry without `sources` scores all rows."
            )
        checks = (
            lambda entry: self._missing_columns(entry, prompts, max_failure_rate),
            lambda entry: self._unsupported_visual(entry, prompts),
        )
        problems = [problem for entry in self.entries for check in checks if (problem := check(entry))]
        if problems:
            raise RewardError("\n".join(problems))

    def _missing_columns(self, entry: RewardEntry, prompts: Sequence[Prompt], max_failure_rate: float) -> str | None:
        function, rows = self._functions[entry.name], [each for each in prompts if covers(entry, each.data_source)]
        lacking = [(row, names) for row in rows if (names := function.missing(row.columns.keys() - {self._prompt_key}))]
        if len(lacking) <= max_failure_rate * len(rows):
            return None
        row, names = lacking[0]
        return (
            f"reward function {entry.name}: {len(lacking)} of {len(rows)} rows have no column for parameter "
            f"{', '.join(map(repr, names))}; row {row.index} has {', '.join(sorted(row.columns))}. Rename the "
            "parameter or the column, give the parameter a default, or set it in the entry's kwargs."
        )

    def _unsupported_visual(self, entry: RewardEntry, prompts: Sequence[Prompt]) -> str | None:
        unsupported_reason = self._functions[entry.name].unsupported_reason
        if unsupported_reason is None:
            return None
        shown = (each for each in prompts if each.visual and covers(entry, each.data_source))
        found = ((row.index, why) for row in shown if (why := unsupported_reason(row.visual)))
        return next((f"{entry.name}, row {index}: {why}" for index, why in found), None)

    @property
    def has_models(self) -> bool:
        """Whether it has processes of reward models or judges."""
        return bool(self._models)

    async def start(self, slots: Slots | None = None) -> None:
        """Start all processes. `slots`: slots whose GPUs models may share; None for CPU only."""
        shared = asyncio.Queue(2 * max(self._workers, 1))
        self._queues = dict.fromkeys(self._plain, shared)
        for names in self._models.values():
            self._queues |= dict.fromkeys(names, ModelCallQueue(self._settings.batch_items, self._settings.batch_age_s))
        self._handles = [self._function_worker(i, shared) for i in range(self._workers)]
        self._handles += [self._model_worker(i, model, slots) for i, model in enumerate(self._models)]
        try:
            await asyncio.gather(*(handle.start() for handle in self._handles))
        except BaseException:
            await self.close()
            raise
        self._tasks = [asyncio.create_task(handle.serve(), name=handle.where) for handle in self._handles]

    async def score(self, samples: Sequence[Sample]) -> list[Reward | RewardFailure]:
        if not self._tasks:
            raise EngineError("the reward pool is not running: call score() between start() and close()")
        items = [item_of_sample(sample, self._prompt_key) for sample in samples]
        known: list[Outcomes] = [{} for _ in items]
        for wave in waves(self.entries):
            tasks = [
                asyncio.ensure_future(self._ask(entry, items, positions_to_score(entry, items, known), known))
                for entry in wave
            ]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
        return [compose(self.entries, item.data_source, found) for item, found in zip(items, known, strict=True)]

    async def _ask(
        self, entry: RewardEntry, items: list[Item], positions: list[int], known: Sequence[Outcomes]
    ) -> None:
        calls = []
        try:
            for call in self._calls(entry, items, positions):
                calls.append(call)
                await self._put(self._queues[entry.name], call)
            await asyncio.gather(*(call.answer for call in calls))
        finally:
            for call in calls:
                call.answer.cancel()
        for call in calls:
            for position, outcome in zip(call.positions, call.answer.result(), strict=True):
                known[position][entry.name] = outcome

    async def drain(self, collect: bool = False) -> list[Span]:
        """Return all spans since the last drain. `collect`: run garbage collection in idle processes."""
        drained = await asyncio.gather(*(handle.drain(collect) for handle in self._handles))
        return sorted((span for spans in drained for span in spans), key=lambda span: span.start)

    async def close(self) -> None:
        """Kill all processes; a running `score` raises EngineError."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for handle in self._handles:
            await handle.close()
        self._fail_waiting()

    async def _put(self, queue: asyncio.Queue[Call] | ModelCallQueue, call: Call) -> None:
        if self._tasks:
            await queue.put(call)
        else:
            call.fail(pool_closed_error())
        if not self._tasks:  # closed while `put` waited: no handle reads the queue any more
            self._fail_waiting()

    def _fail_waiting(self) -> None:
        """Fail all waiting calls, which also unblocks callers that wait in `put`."""
        for queue in self._queues.values():
            while not queue.empty():
                queue.get_nowait().fail(pool_closed_error())

    def _calls(self, entry: RewardEntry, items: list[Item], positions: list[int]) -> Iterator[Call]:
        """Yield calls lazily, as the queue accepts them.

        A call has all items for batched functions, ASYNC_ITEMS for async ones, about CALL_S seconds of items for
        other verl functions, and one item for models, whose calls `ModelCallQueue` merges.
        """
        function = self._functions[entry.name]
        timeout_s = self._engine_timeout_s if function.is_model else self._settings.timeout_s
        if function.is_model:  # by length, for little padding
            positions = sorted(positions, key=lambda i: len(items[i].prompt_text) + len(items[i].response))
        start = 0
        while start < len(positions):
            chosen = positions[start : start + self._size(function, len(positions))]
            start += len(chosen)
            limit_s = timeout_s + (ASYNC_GRACE_S if function.is_async and not function.is_model else 0.0)
            call = Call(
                entry.name, [items[position] for position in chosen], chosen, limit_s, timeout_s, function.is_batched
            )
            call.answer.add_done_callback(lambda _, call=call: self._update_pace(call))
            yield call

    def _size(self, function: RewardFunction, count: int) -> int:
        if function.is_model:
            return 1
        if function.is_batched:
            return count
        return ASYNC_ITEMS if function.is_async else max(1, int(CALL_S / self._pace.get(function.name, math.inf)))

    def _update_pace(self, call: Call) -> None:
        """Update seconds per sample; a fast call at most halves them, because the next samples may be slow."""
        if call.returns_awaitable:
            self._functions[call.name].returns_awaitable.set()
        if call.seconds:
            pace = call.seconds / len(call.items)
            self._pace[call.name] = max(pace, self._pace.get(call.name, 0.0) / 2)

    def _function_worker(self, index: int, queue: asyncio.Queue[Call]) -> RewardWorkerHandle:
        actor = on_node(RewardWorker, this_node_id())  # the driver's node, where the files of the functions exist
        sources, where = [pack(self._functions[name]) for name in self._plain], f"reward/{index}"
        create = partial(actor.remote, where, sources, self._settings.timeout_s, self._settings.memory_mb)
        return RewardWorkerHandle(where, queue, create, self._engine_timeout_s)

    def _model_worker(self, index: int, model: str, slots: Slots | None) -> RewardWorkerHandle:
        names, where = self._models[model], f"reward/{model.removeprefix('reward_')}"
        on = reward_device(self._settings.device, slots.device if slots else "cpu")
        options = reward_options(index, len(self._models), slots, on, environment(on)) | {"max_restarts": 0}
        actor = ray.remote(RewardWorker).options(**options)
        sources = [pack(self._functions[name]) for name in names]
        create = partial(actor.remote, where, sources, self._engine_timeout_s, family=self._family)
        return RewardWorkerHandle(where, self._queues[names[0]], create, self._engine_timeout_s)


def _by_process(entries: Sequence[RewardEntry], functions: dict[str, RewardFunction]) -> dict[str, list[str]]:
    models: dict[str, list[str]] = {}
    for entry in entries:
        if functions[entry.name].is_model:
            models.setdefault(MODEL_PART if is_model(entry.path) else entry.name, []).append(entry.name)
    return models


def _check_numbers(num_workers: int, timeout_s: float) -> None:
    """Check values that replay and notebooks do not check elsewhere."""
    if num_workers < 1:
        raise RewardError(f"reward.num_workers is {num_workers}; it must be at least 1")
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise RewardError(f"reward.timeout_s is {timeout_s}; it must be a finite number of seconds above 0")
