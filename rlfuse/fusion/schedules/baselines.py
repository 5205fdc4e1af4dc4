"""Published schedules, one model after the other: 1F1B, interleaved, ZB-H1 and ZB-V.

`1f1b` arXiv 2006.09503, `interleaved` arXiv 2104.04473, `zb-h1` arXiv 2401.10241, `zb-v` arXiv 2405.15362 (here by
list scheduling). The search starts from them and never returns a longer schedule.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np

from rlfuse.fusion.schedules.bound import bound
from rlfuse.fusion.schedules.list_scheduling import Draws, fits
from rlfuse.fusion.schedules.operations import Kind
from rlfuse.fusion.schedules.problem import Model, Problem, ScheduleError
from rlfuse.fusion.schedules.schedule import Timed
from rlfuse.fusion.schedules.shop import KINDS, TOLERANCE, Shop, compile_problem, makespan, stages, timed_rows

Baseline = Literal["1f1b", "interleaved", "zb-h1", "zb-v"]
BASELINES: tuple[Baseline, ...] = ("1f1b", "interleaved", "zb-h1", "zb-v")
DRAWS = 60  # list schedules for a model's ZB-V; more do not help on the published instances
Line = list[tuple[Kind, int]]  # (kind, chunk) of the operations of a stage; micro-batches are first in, first out


def never() -> bool:
    """Return False: there is no time limit."""
    return False


def baseline(problem: Problem, name: Baseline, *, barrier: bool, is_over: Callable[[], bool] = never) -> float | None:
    """Return the makespan of the models one after the other; None if the method does not support the problem."""
    chunks = 2 if name in ("interleaved", "zb-v") else 1
    placement = "interleaved" if name == "interleaved" else "v"
    problem = problem.variant(split_backward=name.startswith("zb"), chunks_per_device=chunks, placement=placement)
    if name == "interleaved" and not _in_groups(problem):
        return None
    try:
        parts = [_order(problem.only(model), name, is_over) for model in problem.models]
    except ScheduleError:
        return None
    if barrier:
        alone = map(problem.only, problem.models)
        return sum(makespan(compile_problem(each), part) for each, part in zip(alone, parts, strict=True))
    return makespan(compile_problem(problem), joined(parts))


def _in_groups(problem: Problem) -> bool:
    return not any(model.micro_batches % model.stages for model in problem.models)


def serial_1f1b(problem: Problem) -> float:
    """Return the makespan of 1F1B with a barrier between the models and unsplit backward passes."""
    seconds = baseline(problem, "1f1b", barrier=True)
    assert seconds is not None, "1F1B is an order of every problem"
    return seconds


def serial_1f1b_rows(problem: Problem) -> tuple[tuple[Timed, ...], ...]:
    """Return that schedule with the times of all operations."""
    problem = problem.variant(split_backward=False, chunks_per_device=1)
    rows: list[tuple[Timed, ...]] = [()] * problem.devices
    now = 0.0
    for model in problem.models:
        alone = problem.only(model)
        part = timed_rows(alone, _order(alone, "1f1b"))
        later = [tuple(Timed(each.operation, now + each.start, now + each.end) for each in row) for row in part]
        rows = [row + more for row, more in zip(rows, later, strict=True)]
        now = max(row[-1].end for row in rows)
    return tuple(rows)


def baseline_orders(problem: Problem, is_over: Callable[[], bool] = never) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, order) of every baseline that fits the chunks of the problem, without a barrier between models."""
    chunked = {problem.chunks(model) for model in problem.models}
    alone = [problem.only(model) for model in problem.models]
    if chunked == {1}:
        yield "serial 1f1b", joined([_order(each, "1f1b") for each in alone])
        if problem.split_backward:
            yield "serial zb-h1", joined([_order(each, "zb-h1") for each in alone])
    if 1 not in chunked and problem.placement == "interleaved" and _in_groups(problem):
        yield "serial interleaved", joined([_order(each, "interleaved") for each in alone])
    v = chunked == {2} and problem.placement == "v"
    chosen = "serial zb-v" if v and problem.split_backward else "serial list"
    with contextlib.suppress(ScheduleError):  # it does not fit into memory
        yield chosen, joined([_list_schedule(each, is_over) for each in alone])


def joined(parts: list[np.ndarray]) -> np.ndarray:
    """Concatenate the orders of single models, renumbered as operations of the whole problem."""
    before = np.cumsum([0] + [part.size for part in parts])
    return np.concatenate([part + first for part, first in zip(parts, before, strict=False)], axis=1)


def _order(problem: Problem, name: Baseline, is_over: Callable[[], bool] = never) -> np.ndarray:
    if name == "zb-v":
        return _list_schedule(problem, is_over)
    shop, (model,) = compile_problem(problem), problem.models
    classes = {place: c for c, place in enumerate(stages(problem, model))}
    order = np.empty((problem.devices, shop.row_length), np.int64)
    for pipeline in range(model.pipelines):
        for stage in range(model.stages):
            places: tuple[int, ...]
            if name == "interleaved":
                line = _interleaved(model, stage, problem.chunks(model), problem.split_backward)
                places = tuple(range(stage, problem.stages(model), model.stages))
            else:
                line, places = LINES[name](model, stage, problem.split_backward), (stage,)
            kinds = problem.kinds(model)  # score-only models have no backward
            row = [classes[places[chunk], KINDS.index(kind)] for kind, chunk in line if kind in kinds]
            order[problem.device(model, pipeline, stage)] = _first_in_first_out(shop, row, pipeline * len(classes))
    return order


def _first_in_first_out(shop: Shop, classes: list[int], offset: int) -> np.ndarray:
    row = np.array(classes) + offset
    order = np.empty(len(row), np.int64)
    for c in set(row.tolist()):
        order[row == c] = shop.first[c] + np.arange(shop.micro_batches[c])
    return order


@functools.lru_cache(16)
def _draws(problem: Problem) -> tuple[Draws, float, float]:
    """Return the list schedules of one model, its makespan's lower bound, and the memory limit (at most 1F1B's)."""
    shop, limit = compile_problem(problem), min(problem.memory_limit, problem.memory_unit)
    if not fits(shop, limit):
        raise ScheduleError(f"memory: the limit {limit:g} is too low for one micro-batch of each chunk of a device")
    return Draws(shop, 0), bound(shop), limit


def _list_schedule(problem: Problem, is_over: Callable[[], bool]) -> np.ndarray:
    """Return the best of `DRAWS` list schedules of one model, or of as many as the time allows (at least one)."""
    draws, least, limit = _draws(problem)
    while not draws.best or not (
        draws.drawn >= DRAWS or draws.best[0].makespan <= least * (1 + TOLERANCE) or is_over()
    ):
        draws.draw(limit, lambda makespan, peak: (makespan, peak))
    return draws.best[0].order


def _one_f_one_b(model: Model, stage: int, split: bool) -> Line:
    backward: Line = [("B", 0), ("W", 0)] if split else [("B", 0)]
    ahead, count = min(model.stages - stage, model.micro_batches), model.micro_batches
    forward: Line = [("F", 0)]
    return forward * ahead + (backward + forward) * (count - ahead) + backward * ahead


def _zb_h1(model: Model, stage: int, split: bool) -> Line:
    ahead, count = min(model.stages - stage, model.micro_batches), model.micro_batches
    line: Line = [("F", 0)] * ahead
    for done in range(count):
        line.append(("B", 0))
        if done >= stage:
            line.append(("W", 0))
        if done < count - ahead:
            line.append(("F", 0))
    return line + [("W", 0)] * min(stage, count)


def _interleaved(model: Model, stage: int, chunks: int, split: bool) -> Line:
    """Return Megatron's order for the device of a stage; each W follows its B."""
    stages, total = model.stages, chunks * model.micro_batches
    chunk = [i % (chunks * stages) // stages for i in range(total)]
    kinds: tuple[Kind, ...] = ("B", "W") if split else ("B",)
    ahead = min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)
    line: Line = [("F", chunk[i]) for i in range(ahead)]
    for i in range(total):
        if i + ahead < total:
            line.append(("F", chunk[i + ahead]))
        line += [(kind, chunks - 1 - chunk[i]) for kind in kinds]
    return line


LINES: dict[str, Callable[[Model, int, bool], Line]] = {"1f1b": _one_f_one_b, "zb-h1": _zb_h1}
