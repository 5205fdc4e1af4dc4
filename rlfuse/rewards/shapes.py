"""Calling a user's reward in the shape it was written for: verl's, TRL's or OpenRLHF's, or one that takes samples.

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
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from rlfuse.rewards.items import Item, Outcome, RewardError
from rlfuse.rewards.results import (
    failure,
    headline,
    read_dict,
    read_list,
    read_samples,
    read_single,
    read_singles,
    spread,
    user_traceback,
)
from rlfuse.samples import RewardFailure

SHAPES = """\
  verl       def f(data_source, solution_str, ground_truth, extra_info=None) -> number, or dict with "score"
  verl batch def f(data_sources, solution_strs, ground_truths, extra_infos) -> list of those
  TRL        def f(prompts, completions, **columns) -> list of numbers or None, one for each completion
  OpenRLHF   def f(queries, prompts, labels, **kwargs) -> dict with "rewards"
  samples    def f(samples), or an object with score(samples) -> list of Reward, numbers or None, one for each sample;
             with start() too it is a model, which gets a process of its own and is started there"""

# Parameters that only this shape has. TRL and OpenRLHF share `prompts`.
TELLING = {
    "solution_str": "verl",
    "solution_strs": "verl batch",
    "queries": "openrlhf",
    "completions": "trl",
    "completion_ids": "trl",
    "samples": "samples",
}
GIVEN = {
    "verl": {"data_source", "solution_str", "ground_truth", "extra_info"},
    "verl batch": {"data_sources", "solution_strs", "ground_truths", "extra_infos"},
    "trl": {"prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra"},
    "openrlhf": {"queries", "prompts", "labels"},
    "samples": {"samples"},
}
# Columns that a TRL data set may hold and TRL does not hand on.
WITHHELD = {"prompt", "completion"}


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A user's function with its shape."""

    name: str
    shape: str
    """verl | verl batch | trl | openrlhf | samples."""
    call: Callable[..., Any]
    source: str | Callable[..., Any]
    """Where another process loads it from: absolute path or module with `:function`, URL, or the callable itself."""
    named: dict[str, bool]
    """Its parameters by name; True where it has no default."""
    takes_all: bool
    """It has `**kwargs`."""
    is_async: bool
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments given to it at each call, whatever columns there are."""
    made_by: dict[str, Any] = field(default_factory=dict)
    """Arguments of the class or factory at `source` that made it."""
    start: Callable[[], None] | None = None
    """Of a model, an object with `start()` beside `score(samples)`: to be called before `score`, in the same process.
    It may take long and hold much, so that models get a process each."""

    @property
    def is_model(self) -> bool:
        """Whether it has to be started, in a process of its own."""
        return self.start is not None

    @property
    def batched(self) -> bool:
        return self.shape != "verl"

    def score(self, items: Sequence[Item], timeout_s: float | None = None) -> list[Outcome]:
        """One outcome for each item, in order. `timeout_s` bounds a call of an async function (verl's: each item's);
        nothing in this process can bound an ordinary one."""
        lacking = [self._lacks(item) for item in items]
        ready = [item for item, lacks in zip(items, lacking, strict=True) if not lacks]
        outcomes = iter(self._score(ready, timeout_s) if ready else ())
        return [lacks or next(outcomes) for lacks in lacking]

    def _score(self, items: list[Item], timeout_s: float | None) -> list[Outcome]:
        if not self.batched:
            results = self._results([self._single(item) for item in items], timeout_s)
            return [r if isinstance(r, RewardFailure) else read_single(self.name, r) for r in results]
        log = _Log(len(items))
        [result] = self._results([self._batch(items, log)], timeout_s)
        if isinstance(result, RewardFailure):
            return [result] * len(items)
        if self.shape == "trl":
            return read_list(self.name, result, log.entries())
        read = {"openrlhf": read_dict, "verl batch": read_singles, "samples": read_samples}[self.shape]
        return read(self.name, result, len(items))

    def _results(self, calls: list[dict[str, Any]], timeout_s: float | None) -> list[Any]:
        """What each call returned, or its failure."""
        results = [self._start(arguments) for arguments in calls]
        waiting = [result for result in results if inspect.isawaitable(result)]
        settled = iter(_on_loop(self._settle_all(waiting, timeout_s)) if waiting else ())
        return [next(settled) if inspect.isawaitable(result) else result for result in results]

    def _start(self, arguments: dict[str, Any]) -> Any:
        try:
            return self.call(**(arguments | self.kwargs))
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
        if item.response and not item.response_ids and self.named.get("completion_ids"):
            return RewardFailure(self.name, "parameter 'completion_ids': the row has text only, no response_ids")
        for name, required in self.named.items():
            known = name in GIVEN[self.shape] or name in self.kwargs
            if required and not known and not _has(item, name):
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
        if self.shape == "samples":
            given = {"samples": list(items)}
        elif self.shape == "openrlhf":
            given = {
                "queries": [item.prompt_text + item.response for item in items],
                "prompts": [item.prompt_text for item in items],
                "labels": [item.ground_truth for item in items],
            }
        elif self.shape == "verl batch":
            given = {
                "data_sources": [item.data_source for item in items],
                "solution_strs": [item.response for item in items],
                "ground_truths": [item.ground_truth for item in items],
                "extra_infos": [item.columns.get("extra_info") or {} for item in items],
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


def adapt(
    name: str, found: Any, source: str | Callable[..., Any], kwargs: dict[str, Any] | None = None
) -> RewardFunction:
    """Recognise the shape of a callable by its parameters' names, or of an object by its method `score`.

    A class, and a callable of no shape (a factory), is called with `kwargs` and gives the reward; else the function
    gets them at each call.
    """
    if inspect.isclass(found) or (kwargs and _shape(name, found) is None):
        return replace(adapt(name, _made(name, found, kwargs or {}), source), made_by=dict(kwargs or {}))
    scores = getattr(found, "score", None)
    call = functools.partial(_ask, scores) if callable(scores) else found
    shape = "samples" if callable(scores) else _shape(name, found)
    if shape is None:
        given = ", ".join(str(parameter) for parameter in _parameters(name, found))
        raise RewardError(
            f"reward function {name} has the parameters ({given}), which fit no known shape. Name them as in one "
            f"of:\n{SHAPES}\nor give kwargs with which it makes such a function"
        )
    parameters = _parameters(name, call)
    named = {p.name: p.default is p.empty for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if unknown := [key for key in kwargs or {} if key not in named and not takes_all]:
        raise RewardError(f"reward function {name} has no parameter {', '.join(unknown)}; it has {', '.join(named)}")
    called = (found, scores, type(found).__call__ if callable(found) else None)
    coroutine = any(map(inspect.iscoroutinefunction, called))
    begin = getattr(found, "start", None) if callable(scores) else None
    start = begin if callable(begin) else None
    return RewardFunction(name, shape, call, source, named, takes_all, coroutine, dict(kwargs or {}), start=start)


def _shape(name: str, found: Any) -> str | None:
    if callable(getattr(found, "score", None)):
        return "samples"
    names = {parameter.name for parameter in _parameters(name, found)}
    return next((shape for telling, shape in TELLING.items() if telling in names), None)


def _parameters(name: str, call: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward function {name}: its parameters can't be read ({error}); wrap it in a def") from None


def _made(name: str, factory: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """What a class or a factory makes."""
    try:
        made = factory(**kwargs)
    except RewardError as error:
        raise RewardError(f"reward function {name}: {error}") from error
    except (Exception, SystemExit) as error:
        raise RewardError(
            f"reward function {name}: {name}(**{kwargs}) failed: {headline(error)}. Correct the entry's kwargs.\n"
            f"{user_traceback(error)}"
        ) from error
    if not callable(made) and not hasattr(made, "score"):
        raise RewardError(f"reward function {name}: {name}(**{kwargs}) made {made!r}, which is no function of a shape")
    return made


def _ask(score: Callable[..., Any], samples: list[Item]) -> Any:
    """An object's `score`, whatever its parameter is called."""
    return score(samples)


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
