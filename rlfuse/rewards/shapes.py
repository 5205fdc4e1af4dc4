"""Calling a user's reward function in the shape it was written for: verl's, TRL's or OpenRLHF's.

Role: `RewardFunction`, made by `functions.load_function` and called by the reward worker, or directly in a notebook.
Invariants:
- the shape is chosen by parameter names, and a function is given only the columns it names, unless it has `**kwargs`;
- ordinary functions run on the calling thread (some set `signal.alarm`, which only the main thread may);
- whatever it raises, SystemExit included, is a `RewardFailure` with the user's traceback.

Concurrency: what an async function returns is awaited on one event loop in a thread of its own, which lives as long as
the process so that a function may keep an HTTP session. Calls for several items are awaited together:

    caller's thread: call, call, ... --awaitables--> loop thread: gather, each within timeout_s --results--> caller
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from rlfuse.rewards.items import Item, Outcome, RewardError
from rlfuse.rewards.results import failure, read_dict, read_list, read_single, spread
from rlfuse.samples import RewardFailure

SHAPES = """\
  verl      def f(data_source, solution_str, ground_truth, extra_info=None) -> number, or dict with "score"
  TRL       def f(prompts, completions, **columns) -> list of numbers or None, one for each completion
  OpenRLHF  def f(queries, prompts, labels, **kwargs) -> dict with "rewards\""""

# The parameter that only this shape has. TRL and OpenRLHF share `prompts`.
TELLING = {"solution_str": "verl", "queries": "openrlhf", "completions": "trl"}
GIVEN = {
    "verl": {"data_source", "solution_str", "ground_truth", "extra_info"},
    "trl": {"prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra"},
    "openrlhf": {"queries", "prompts", "labels"},
}
# Columns that a TRL data set may hold and TRL does not hand on.
WITHHELD = {"prompt", "completion"}


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A user's function with its shape."""

    name: str
    shape: str
    """verl | trl | openrlhf."""
    call: Callable[..., Any]
    source: str | Callable[..., Any]
    """Where another process loads it from: absolute path or module with `:function`, or the callable itself."""
    named: dict[str, bool]
    """Its parameters by name; True where it has no default."""
    takes_all: bool
    """It has `**kwargs`."""
    is_async: bool

    @property
    def batched(self) -> bool:
        return self.shape != "verl"

    def score(self, items: Sequence[Item], timeout_s: float | None = None) -> list[Outcome]:
        """One outcome for each item, in order. `timeout_s` bounds each item's call of an async verl function;
        nothing in this process can bound an ordinary one."""
        ready = [item for item in items if not self._lacks(item)]
        outcomes = iter(self._score(ready, timeout_s) if ready else ())
        return [self._lacks(item) or next(outcomes) for item in items]

    def _score(self, items: list[Item], timeout_s: float | None) -> list[Outcome]:
        if not self.batched:
            results = self._results([self._single(item) for item in items], timeout_s)
            return [r if isinstance(r, RewardFailure) else read_single(self.name, r) for r in results]
        log = _Log(len(items))
        [result] = self._results([self._batch(items, log)], None)
        if isinstance(result, RewardFailure):
            return [result] * len(items)
        if self.shape == "openrlhf":
            return read_dict(self.name, result, len(items))
        return read_list(self.name, result, log.entries())

    def _results(self, calls: list[dict[str, Any]], timeout_s: float | None) -> list[Any]:
        """What each call returned, or its failure."""
        results = [self._start(arguments) for arguments in calls]
        waiting = [result for result in results if inspect.isawaitable(result)]
        settled = iter(_on_loop(self._settle_all(waiting, timeout_s)) if waiting else ())
        return [next(settled) if inspect.isawaitable(result) else result for result in results]

    def _start(self, arguments: dict[str, Any]) -> Any:
        try:
            return self.call(**arguments)
        except (Exception, SystemExit) as error:
            return failure(self.name, error)

    async def _settle_all(self, waiting: list[Awaitable[Any]], timeout_s: float | None) -> list[Any]:
        return await asyncio.gather(*(self._settle(awaitable, timeout_s) for awaitable in waiting))

    async def _settle(self, awaitable: Awaitable[Any], timeout_s: float | None) -> Any:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await awaitable
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if limit.expired():
                return timed_out(self.name, timeout_s)
            return failure(self.name, error)

    def _lacks(self, item: Item) -> RewardFailure | None:
        """A failure if the item's row has not a column that the function can't do without."""
        for name, required in self.named.items():
            if required and name not in GIVEN[self.shape] and not _has(item, name):
                found = sorted({*item.columns, "data_source", "ground_truth"})
                return RewardFailure(self.name, f"parameter {name!r} is no column of the row; its columns: {found}")
        return None

    def _single(self, item: Item) -> dict[str, Any]:
        given = {
            "data_source": item.data_source,
            "solution_str": item.response,
            "ground_truth": item.ground_truth,
            "extra_info": item.columns.get("extra_info") or {},
        }
        columns = {name: item.column(name) for name in self._columns([item])}
        return {**columns, **self._wanted(given)}

    def _batch(self, items: list[Item], log: _Log) -> dict[str, Any]:
        if self.shape == "openrlhf":
            given = {
                "queries": [item.prompt_text + item.response for item in items],
                "prompts": [item.prompt_text for item in items],
                "labels": [item.ground_truth for item in items],
            }
        else:
            given = {
                "prompts": [item.prompt for item in items],
                "completions": [_completion(item) for item in items],
                "completion_ids": [item.response_ids for item in items],
                "trainer_state": SimpleNamespace(global_step=items[0].step),
                "log_metric": log.metric,
                "log_extra": log.extra,
            }
        # A row of a mixed data set may lack a column of the others; data sets show that as None.
        columns = {
            name: [item.column(name) if _has(item, name) else None for item in items] for name in self._columns(items)
        }
        return {**columns, **self._wanted(given)}

    def _wanted(self, given: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in given.items() if self.takes_all or name in self.named}

    def _columns(self, items: list[Item]) -> list[str]:
        """The columns to hand over: those that the function names, or all."""
        present = {"data_source": None, "ground_truth": None}
        for item in items:
            present.update(dict.fromkeys(item.columns))
        return [
            name
            for name in present
            if name in self.named or (self.takes_all and name not in WITHHELD | GIVEN[self.shape])
        ]


def adapt(name: str, call: Callable[..., Any], source: str | Callable[..., Any]) -> RewardFunction:
    """Recognise a callable's shape by its parameter names."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward function {name}: its parameters can't be read ({error}); wrap it in a def") from None
    named = {p.name: p.default is p.empty for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    shape = next((shape for telling, shape in TELLING.items() if telling in named), None)
    if shape is None:
        raise RewardError(
            f"reward function {name} has the parameters ({', '.join(str(p) for p in parameters)}), which fit no known "
            f"shape. Name them as in one of:\n{SHAPES}"
        )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)
    return RewardFunction(name, shape, call, source, named, takes_all, is_async)


def timed_out(name: str, seconds: float) -> RewardFailure:
    """The failure of a call that was given up."""
    return RewardFailure(name, f"{name} took longer than {seconds:g} s (reward.timeout_s) and was stopped")


class _Log:
    """What a TRL function logs while it scores one batch."""

    def __init__(self, length: int):
        self._length = length
        self._extras: dict[str, Any] = {}
        self._metrics: dict[str, list[float]] = {}

    def extra(self, column: str, values: list[Any]) -> None:
        """A column with one entry for each sample."""
        self._extras[column] = values

    def metric(self, name: str, value: float) -> None:
        """A number for the batch; called several times, the mean."""
        self._metrics.setdefault(name, []).append(float(value))

    def entries(self) -> list[dict[str, Any]]:
        logs: list[dict[str, Any]] = [{} for _ in range(self._length)]
        for name, values in self._metrics.items():
            spread(logs, name, sum(values) / len(values))
        for column, values in self._extras.items():
            spread(logs, column, values)
        return logs


def _completion(item: Item) -> str | list[dict[str, str]]:
    """As TRL has it: text for a plain prompt, an assistant message for a chat."""
    return item.response if isinstance(item.prompt, str) else [{"role": "assistant", "content": item.response}]


def _has(item: Item, name: str) -> bool:
    return name in item.columns or name in ("data_source", "ground_truth")


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="async reward functions").start()
    return loop


def _on_loop(coroutine: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result()
