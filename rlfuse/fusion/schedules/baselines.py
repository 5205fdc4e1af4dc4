"""What trainers do today: each model's pipeline by itself, one model after the other.

Role: rows to compare with, the makespan and the memory that everything is relative to (serial 1F1B), and schedules that
the search starts from and never falls behind.

- `gpipe` (arXiv 1811.06965): all forwards, then all backwards.
- `1f1b` (PipeDream-flush, arXiv 2006.09503): stage s of S runs S - s forwards ahead, then one backward, one forward.
- `interleaved` (Megatron-LM, arXiv 2104.04473): two chunks of each stage, chunk c on device c mod S, in groups of S
  micro-batches; needs micro-batches in multiples of S.
- `zb-h1` (Zero Bubble, arXiv 2401.10241): 1F1B with B and W split; W of stage s comes s micro-batches late, which
  fills the bubbles of the end at the memory of 1F1B's first stage.
- `zb-v` (arXiv 2405.15362): two chunks in a V, B and W split, memory of 1F1B; here by list scheduling, which reaches
  the paper's bubble of half a stage per device.

Each needs its own division of the work, so it is timed on a variant of the problem (`variant`); with a barrier the next
model starts when all devices are through with the one before.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Literal

from rlfuse.fusion.schedules.bound import bound
from rlfuse.fusion.schedules.list_scheduling import fits
from rlfuse.fusion.schedules.operations import Kind, Operation, Rows
from rlfuse.fusion.schedules.problem import Model, Problem, ScheduleError
from rlfuse.fusion.schedules.rules import Draws
from rlfuse.fusion.schedules.schedule import Timed, timed
from rlfuse.fusion.schedules.shop import LOOSE, compiled, named

Baseline = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]
BASELINES: tuple[Baseline, ...] = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
DRAWS = 60
"""Of list schedules for a model's ZB-V; more gain nothing on the published instances."""
Line = list[tuple[Kind, int]]
"""(kind, chunk) of what a stage runs, micro-batches implied: first in, first out."""


def baseline(problem: Problem, name: Baseline, *, barrier: bool) -> float | None:
    """Makespan of the models one after the other; None where the method can't run the problem."""
    chunked = name in ("interleaved", "zb-v")
    problem = problem.variant(split_backward=name.startswith("zb"), chunks_per_device=2 if chunked else 1)
    if name == "interleaved" and any(model.micro_batches % model.stages for model in problem.models):
        return None
    try:
        parts = [_rows(problem, model, name) for model in problem.models]
    except ScheduleError:
        return None

    def duration(each: Operation) -> float:
        """Chunk c of interleaved 1F1B is of stage c mod S; of a V, of stage 2 S - 1 - c."""
        model = problem.model(each.model)
        stage = each.stage % model.stages if name == "interleaved" else each.stage
        return problem.duration(model, stage, each.kind)

    def makespan(rows: Rows) -> float:
        return max(row[-1].end for row in timed(problem, rows, duration))

    return sum(map(makespan, parts)) if barrier else makespan(joined(parts))


def serial_1f1b(problem: Problem) -> float:
    """Makespan of 1F1B with a barrier between the models, backward whole."""
    return max(row[-1].end for row in serial_1f1b_rows(problem))


def serial_1f1b_rows(problem: Problem) -> tuple[tuple[Timed, ...], ...]:
    """The same with all its times."""
    problem = problem.variant(split_backward=False, chunks_per_device=1)
    rows: list[tuple[Timed, ...]] = [()] * problem.devices
    now = 0.0
    for model in problem.models:
        part = timed(problem, _rows(problem, model, "1f1b"))
        later = [tuple(Timed(each.operation, now + each.start, now + each.end) for each in row) for row in part]
        rows = [row + more for row, more in zip(rows, later, strict=True)]
        now = max(row[-1].end for row in rows)
    return tuple(rows)


def one_by_one(problem: Problem) -> Iterator[tuple[str, Rows]]:
    """Every baseline that is a schedule of the problem as it is divided, models without a barrier."""
    chunked = {problem.chunks(model) for model in problem.models}
    if chunked == {1}:
        for name in ("gpipe", "1f1b", *(["zb-h1"] if problem.split_backward else [])):
            yield f"serial {name}", joined([_rows(problem, model, name) for model in problem.models])
    name = "serial zb-v" if chunked == {2} and problem.split_backward else "serial list"
    with contextlib.suppress(ScheduleError):  # too little memory for it
        yield name, joined([_listed(problem.only(model)) for model in problem.models])


def joined(parts: list[Rows]) -> Rows:
    """One model's rows after the other's."""
    return tuple(tuple(each for row in rows for each in row) for rows in zip(*parts, strict=True))


def _rows(problem: Problem, model: Model, name: Baseline) -> Rows:
    """One model alone."""
    if name == "zb-v":
        return _listed(problem.only(model))
    rows: list[tuple[Operation, ...]] = [()] * problem.devices
    for pipeline in range(model.pipelines):
        for stage in range(model.stages):
            if name == "interleaved":
                line, places = _interleaved(model, stage), (stage, stage + model.stages)
            else:
                line, places = LINES[name](model, stage, problem.split_backward), (stage,)
            line = [part for part in line if part[0] in problem.kinds(model)]  # some models only score
            rows[problem.device(model, pipeline, stage)] = _operations(model, pipeline, places, line)
    return tuple(rows)


@functools.lru_cache(16)
def _listed(problem: Problem) -> Rows:
    """Of one model, in the memory of 1F1B if the problem allows no less."""
    shop, limit = compiled(problem), min(problem.memory_limit, problem.memory_unit)
    if not fits(shop, limit):
        raise ScheduleError(
            f"memory: a device has to hold a micro-batch of each of its chunks, {limit:g} is too little"
        )
    draws, target = Draws(shop, 0), bound(shop) * (1 + LOOSE)
    for _ in range(DRAWS):
        if draws.draw(limit, lambda makespan, peak: (makespan, peak)).makespan <= target:
            break
    return named(problem, draws.best[0].order)


def _operations(model: Model, pipeline: int, stages: tuple[int, ...], line: Line) -> tuple[Operation, ...]:
    seen: dict[tuple[Kind, int], int] = {}
    operations = []
    for kind, chunk in line:
        micro_batch = seen.get((kind, chunk), 0)
        seen[kind, chunk] = micro_batch + 1
        operations.append(Operation(model.name, pipeline, stages[chunk], micro_batch, kind))
    return tuple(operations)


# Lines of one stage --------------------------------------------------------------------------------------------------


def _gpipe(model: Model, stage: int, split: bool) -> Line:
    backward: Line = [("B", 0), ("W", 0)] if split else [("B", 0)]
    return [("F", 0)] * model.micro_batches + backward * model.micro_batches


def _one_f_one_b(model: Model, stage: int, split: bool) -> Line:
    backward: Line = [("B", 0), ("W", 0)] if split else [("B", 0)]
    ahead, count = min(model.stages - stage, model.micro_batches), model.micro_batches
    return [("F", 0)] * ahead + [*backward, ("F", 0)] * (count - ahead) + backward * ahead


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


def _interleaved(model: Model, stage: int) -> Line:
    """Megatron's order for the device of a stage."""
    stages, total = model.stages, 2 * model.micro_batches
    chunk = [i % (2 * stages) // stages for i in range(total)]
    ahead = min((stages - stage - 1) * 2 + stages, total)
    line: Line = [("F", chunk[i]) for i in range(ahead)]
    for i in range(ahead, total):
        line += [("F", chunk[i]), ("B", 1 - chunk[i - ahead])]
    return line + [("B", 1 - chunk[i]) for i in range(total - ahead, total)]


LINES: dict[str, Callable[[Model, int, bool], Line]] = {"gpipe": _gpipe, "1f1b": _one_f_one_b, "zb-h1": _zb_h1}
