"""Call a custom reward function with the signature it was written for: verl, TRL, OpenRLHF, or a list of samples.

Parameter names select the shape. A function receives only the columns that it names, unless it has `**kwargs`. verl
passes no columns except `extra_info`; in its shapes a column is passed only to a parameter without a default. An
exception or invalid result fails only the samples of that call. Coroutines run on one event loop in a separate thread.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import CoroutineType, SimpleNamespace
from typing import Any

from rlfuse.config.custom_errors import definition_line, headline, user_traceback
from rlfuse.config.secrets import hidden, hidden_text, remember
from rlfuse.errors import RewardError
from rlfuse.rewards.api import interrupts
from rlfuse.rewards.api.items import Item, Outcome, private_copy
from rlfuse.rewards.api.results import failure, log_values, read_outcome, split_results
from rlfuse.rewards.reasoning_tags import without_reasoning
from rlfuse.samples import RewardFailure, Visual

SHAPES = """\
  verl       def f(data_source, solution_str, ground_truth, extra_info=None) -> number, or dict with "score"
  verl batch def f(data_sources, solution_strs, ground_truths, extra_infos) -> list of numbers or such dicts
  TRL        def f(prompts, completions, **columns) -> list of numbers or None, one per completion
  OpenRLHF   def f(queries, prompts, labels, **kwargs) -> dict with "rewards"
  samples    def f(samples), or an object with score(samples) -> list of Reward, numbers or None, one per sample;
             an object with start() as well is a model, which runs in a separate process"""

# Parameters that identify a shape. TRL and OpenRLHF share `prompts`.
SHAPE_OF_PARAMETER = {
    "solution_str": "verl",
    "solution_strs": "verl batch",
    "queries": "openrlhf",
    "completions": "trl",
    "completion_ids": "trl",
    "samples": "samples",
}
SHAPE_PARAMETERS = {
    "verl": {"data_source", "solution_str", "ground_truth", "extra_info", "completion_ids"},
    "verl batch": {"data_sources", "solution_strs", "ground_truths", "extra_infos"},
    "trl": {"prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra"},
    "openrlhf": {"queries", "prompts", "labels"},
    "samples": {"samples"},
}
# Available for every row.
COMMON_COLUMNS = ("data_source", "ground_truth")
# Columns of a TRL data set that TRL does not pass on.
WITHHELD_COLUMNS = {"prompt", "completion"}


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A custom reward function with its shape."""

    name: str
    shape: str
    call: Callable[..., Any]
    source: str | Callable[..., Any]
    """Origin for other processes: absolute path or module with `:function`, URL, or the callable itself."""
    is_required: dict[str, bool]
    """Parameter name -> whether it has no default."""
    takes_kwargs: bool
    kwargs: dict[str, Any] = field(default_factory=dict)
    factory_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the class or factory at `source` that created the function."""
    start: Callable[[], None] | None = None
    """For models only: called once before `score`, in the same process. Models get one process each, because loading
    may be slow and take much memory."""
    unsupported_reason: Callable[[Sequence[Visual]], str | None] | None = None
    """For models only: returns why the model can't process these clips and images, or None. Works before `start`."""
    answer_only: bool = False
    """The function receives the answer after the reasoning, and an empty text if the reasoning is not closed."""
    defined_at: str = ""
    """File and line of the function."""
    returns_awaitable: threading.Event = field(default_factory=threading.Event, compare=False)
    """Set for a coroutine function, and once any other function has returned an awaitable."""

    @property
    def is_async(self) -> bool:
        return self.returns_awaitable.is_set()

    @property
    def is_model(self) -> bool:
        return self.start is not None

    @property
    def is_batched(self) -> bool:
        return self.shape != "verl"

    def score(self, items: Sequence[Item], timeout_s: float | None = None) -> list[Outcome]:
        """Return one outcome per item, in order. `timeout_s` limits calls of async functions only."""
        outcomes = self._attempt(self._outcomes, items, timeout_s)
        return [outcomes] * len(items) if type(outcomes) is RewardFailure else outcomes

    def _outcomes(self, items: Sequence[Item], timeout_s: float | None) -> list[Outcome]:
        shown = [self._attempt(self._shown, item) for item in items]
        ready = [item for item in shown if type(item) is not RewardFailure]
        outcomes = iter(self._score(ready, timeout_s) if ready else ())
        return [item if type(item) is RewardFailure else next(outcomes) for item in shown]

    def _shown(self, item: Item) -> Item | RewardFailure:
        """Return a copy of the item with the columns that the function receives, or a failure if one is missing."""
        item = without_reasoning(item) if self.answer_only else item
        if failed := self._missing_column(item):
            return failed
        columns = item.columns if self.shape == "samples" else {*self._columns([item]), "extra_info"}
        try:
            return private_copy(item, columns)
        except RewardError as error:
            return RewardFailure(self.name, str(error))

    def _score(self, items: list[Item], timeout_s: float | None) -> list[Outcome]:
        if not self.is_batched:
            results = self._results([self._single(item) for item in items], timeout_s)
            return [self._read(item, value) for item, value in zip(items, results, strict=True)]
        log = _Log(len(items))
        [result] = self._results([self._batch(items, log)], timeout_s)
        if type(result) is not RewardFailure:
            result = self._attempt(lambda: split_results(self.shape, result, log.entries()))
        if type(result) is RewardFailure:
            return [result] * len(items)
        return [self._read(item, value, more) for item, (value, more) in zip(items, result, strict=True)]

    def _read(self, item: Item, value: Any, more: dict[str, Any] | None = None) -> Outcome:
        found = self._attempt(read_outcome, self.shape, value, more or {}, item.known_tokens)
        return replace(found, function=self.name) if type(found) is RewardFailure else found

    def _attempt(self, action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except BaseException as error:
            if interrupts.is_interrupted():
                raise
            return failure(self.name, error, self.defined_at)

    def _results(self, calls: list[dict[str, Any]], timeout_s: float | None) -> list[Any]:
        results = [self._attempt(self._start, arguments, timeout_s) for arguments in calls]
        waiting = [result for result in results if type(result) is CoroutineType]
        gathered = iter(_gather(waiting) if waiting else ())
        return [next(gathered) if type(result) is CoroutineType else result for result in results]

    def _start(self, arguments: dict[str, Any], timeout_s: float | None) -> Any:
        result = self.call(**(arguments | self.kwargs))
        if not inspect.isawaitable(result):
            return result
        self.returns_awaitable.set()
        return self._await_with_timeout(result, timeout_s)

    async def _await_with_timeout(self, awaitable: Awaitable[Any], timeout_s: float | None) -> Any:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await awaitable
        except BaseException as error:
            if limit.expired():
                return timeout_failure(self.name, timeout_s)
            return failure(self.name, error, self.defined_at)

    def _missing_column(self, item: Item) -> RewardFailure | None:
        if missing := self.missing(item.columns):
            found = sorted({*item.columns, *COMMON_COLUMNS})
            return RewardFailure(
                self.name, f"parameter {missing[0]!r} is not a column of the row; its columns: {found}"
            )
        return None

    def missing(self, columns: Collection[str]) -> list[str]:
        """Return the required parameters that a row with these columns has no value for."""
        known = {*columns, *COMMON_COLUMNS, *SHAPE_PARAMETERS[self.shape], *self.kwargs}
        return [name for name, required in self.is_required.items() if required and name not in known]

    def _single(self, item: Item) -> dict[str, Any]:
        given = {
            "data_source": item.data_source,
            "solution_str": item.response,
            "ground_truth": item.ground_truth,
            "extra_info": item.columns.get("extra_info") or {},
            "completion_ids": item.response_ids,
        }
        columns = {name: item.column(name) for name in self._columns([item])}
        if "completion_ids" not in self.is_required:  # verl does not pass it, also not as one of **kwargs
            del given["completion_ids"]
        return {**columns, **self._accepted(given)}

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
        # Rows of a mixed data set may lack columns of other rows; data sets represent them as None.
        columns = {
            name: [item.column(name) if _has(item, name) else None for item in items] for name in self._columns(items)
        }
        return {**columns, **self._accepted(given)}

    def _accepted(self, given: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in given.items() if self.takes_kwargs or name in self.is_required}

    def _columns(self, items: list[Item]) -> list[str]:
        """Return the columns to pass: named parameters, or all with `**kwargs`; for verl only required parameters."""
        present = {"data_source": None, "ground_truth": None}
        for item in items:
            present.update(dict.fromkeys(item.columns))
        is_verl = self.shape.startswith("verl")
        by_name = [name for name in self.is_required if self.is_required[name] or not is_verl]
        rest = (
            present.keys() - self.is_required - WITHHELD_COLUMNS - SHAPE_PARAMETERS[self.shape]
            if self.takes_kwargs and not is_verl
            else ()
        )
        return [name for name in present if name in by_name or name in rest]


def adapt(
    name: str, found: Any, source: str | Callable[..., Any], kwargs: dict[str, Any] | None = None
) -> RewardFunction:
    """Return a RewardFunction whose shape is recognised by parameter names or a method `score`.

    A class or factory is called with `kwargs`, which otherwise are passed to each call.
    """
    remember([kwargs, source])
    if inspect.isclass(found) or (kwargs and _shape(name, found) is None):
        return replace(adapt(name, _call_factory(name, found, kwargs or {}), source), factory_kwargs=dict(kwargs or {}))
    scores = getattr(found, "score", None)
    call = functools.partial(_call_score, scores) if callable(scores) else found
    shape = "samples" if callable(scores) else _shape(name, found)
    if shape is None:
        given = ", ".join(str(parameter) for parameter in _parameters(name, found))
        raise RewardError(
            f"reward function {name} has the parameters ({given}), which match no known signature. Use the parameter "
            f"names of one of:\n{SHAPES}\nor set kwargs if it is a factory that returns such a function"
        )
    parameters = _parameters(name, call)
    is_required = {
        p.name: p.default is p.empty for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    takes_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if unknown := [key for key in kwargs or {} if key not in is_required and not takes_kwargs]:
        raise RewardError(
            f"reward function {name} has no parameter {', '.join(unknown)}; it has {', '.join(is_required)}"
        )
    start = getattr(found, "start", None) if callable(scores) else None
    function = RewardFunction(name, shape, call, source, is_required, takes_kwargs, dict(kwargs or {}))
    if _is_coroutine_function(scores if callable(scores) else found):
        function.returns_awaitable.set()
    return replace(
        function,
        start=start if callable(start) else None,
        unsupported_reason=getattr(found, "unsupported_reason", None) if callable(start) else None,
        answer_only=callable(start) or getattr(found, "answer_only", False) is True,
        defined_at=definition_line(scores if callable(scores) else found),
    )


def _is_coroutine_function(call: Any) -> bool:
    while isinstance(call, functools.partial):
        call = call.func
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)


def _shape(name: str, found: Any) -> str | None:
    if callable(getattr(found, "score", None)):
        return "samples"
    names = {parameter.name for parameter in _parameters(name, found)}
    return next((shape for parameter, shape in SHAPE_OF_PARAMETER.items() if parameter in names), None)


def _parameters(name: str, call: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"reward function {name}: its signature can't be inspected ({error}); wrap it in a def"
        ) from None


def _call_factory(name: str, factory: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    try:
        made = factory(**kwargs)
    except RewardError as error:
        raise RewardError(f"reward function {name}: {hidden_text(str(error))}") from error
    except BaseException as error:
        if interrupts.is_interrupted():
            raise
        raise RewardError(
            f"reward function {name}: {name}(**{hidden(kwargs)}) failed: {hidden_text(headline(error))}. Correct the "
            f"entry's kwargs.\n{hidden_text(user_traceback(error))}"
        ) from error
    if not callable(made) and not hasattr(made, "score"):
        call = f"{name}(**{hidden(kwargs)}) returned {hidden_text(repr(made))}"
        raise RewardError(f"reward function {name}: {call}, which is neither callable nor has a method score")
    return made


def _call_score(score: Callable[..., Any], samples: list[Item]) -> Any:
    return score(samples)


def timeout_failure(name: str, seconds: float) -> RewardFailure:
    """Return the failure of a call that exceeded its time limit."""
    return RewardFailure(name, f"{name} took longer than {seconds:g} s (reward.timeout_s) and was stopped")


class _Log:
    """Values that a TRL function logs while it scores one batch."""

    def __init__(self, length: int):
        self._length = length
        self._extras: dict[str, Any] = {}
        self._metrics: dict[str, list[float]] = {}

    def extra(self, column: str, values: list[Any]) -> None:
        """Log a column with one entry per sample."""
        self._extras[column] = values

    def metric(self, name: str, value: float) -> None:
        """Log a number for the batch; repeated calls are averaged."""
        self._metrics.setdefault(name, []).append(float(value))

    def entries(self) -> list[dict[str, Any]]:
        logs: list[dict[str, Any]] = [{} for _ in range(self._length)]
        for name, values in self._metrics.items():
            log_values(logs, name, sum(values) / len(values))
        for column, values in self._extras.items():
            log_values(logs, column, values)
        return logs


def _completion(item: Item) -> str | list[dict[str, str]]:
    return item.response if isinstance(item.prompt, str) else [{"role": "assistant", "content": item.response}]


def _has(item: Item, name: str) -> bool:
    return name in item.columns or name in COMMON_COLUMNS


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:  # KeyboardInterrupt or SystemExit in a task ends run_forever
            with suppress(BaseException):
                loop.run_forever()

    threading.Thread(target=run, daemon=True, name="async reward functions").start()
    return loop


def _gather(waiting: list[CoroutineType]) -> list[Any]:
    async def gather() -> list[Any]:
        return await asyncio.gather(*waiting)

    return asyncio.run_coroutine_threadsafe(gather(), _loop()).result()
