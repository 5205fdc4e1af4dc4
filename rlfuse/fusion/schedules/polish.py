"""Shorten a schedule with CP-SAT: interval variables, no-overlap per device, memory as a cumulative constraint."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor, gcd, lcm

import numpy as np

from rlfuse.fusion.schedules.shop import LOOSE, NONE, F, Shop, backward_of, starts

FINEST = 10_000  # times are integers in units of at least 1 / FINEST of the longest


def polish(
    shop: Shop,
    order: np.ndarray,
    shorter_than: float,
    at_least: float,
    limit: float,
    seconds: tuple[float, float],
    seed: int,
) -> np.ndarray | None:
    """A better order within the memory limit, or None where CP-SAT finds none in time: of the wall, and its own."""
    from ortools.sat.python import cp_model  # takes most of a second to import

    unit = _unit(np.concatenate([shop.duration, shop.lag]))
    long, lag = _scaled(shop.duration, unit), _scaled(shop.lag, unit)
    latest = ceil(shorter_than * unit * (1 - LOOSE)) - 1
    model = cp_model.CpModel()
    begin = [model.new_int_var(0, latest, "") for _ in shop.class_of]
    end = model.new_int_var(min(latest, floor(at_least * unit)), latest, "")
    _order(model, shop, begin, long, lag, end)
    if np.isfinite(limit):
        _memory(model, shop, begin, long, limit)
    model.minimize(end)
    for variable, hint in zip(begin, starts(shop, order), strict=True):
        model.add_hint(variable, round(hint * unit))
    solver = cp_model.CpSolver()
    solver.parameters.catch_sigint_signal = False  # it would leave SIGINT deadly to the run, whoever handles it
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_time_in_seconds, solver.parameters.max_deterministic_time = seconds
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    at = np.array([solver.value(variable) for variable in begin])
    device = shop.device[shop.class_of]
    rows = (np.flatnonzero(device == each) for each in range(shop.devices))
    return np.stack([row[np.argsort(at[row], kind="stable")] for row in rows])


def _order(model, shop: Shop, begin: list, long: np.ndarray, lag: np.ndarray, end) -> None:
    intervals: list[list] = [[] for _ in range(shop.devices)]
    for own, (first, count, before) in enumerate(zip(shop.first, shop.micro_batches, shop.before, strict=True)):
        size = int(long[own])
        for number in range(first, first + count):
            intervals[shop.device[own]].append(model.new_fixed_size_interval_var(begin[number], size, ""))
            if before != NONE:
                previous = begin[shop.first[before] + number - first]
                model.add(begin[number] >= previous + int(long[before] + lag[own]))
            if number > first:
                model.add(begin[number] >= begin[number - 1] + size)
        model.add(end >= begin[first + count - 1] + size)
    for each in intervals:
        model.add_no_overlap(each)


def _memory(model, shop: Shop, begin: list, long: np.ndarray, limit: float) -> None:
    """Activations lie from the start of their F to the end of their last backward."""
    unit = _unit(shop.acquires)
    lives: list[tuple[list, list]] = [([], []) for _ in range(shop.devices)]
    for own in np.flatnonzero((shop.kind == F) & (shop.acquires > 0)):
        backward = backward_of(shop, own)
        last = int(backward if shop.leaf[backward] == NONE else shop.leaf[backward])
        size = int(_scaled(shop.acquires[own : own + 1], unit)[0])
        for micro_batch in range(shop.micro_batches[own]):
            start = begin[shop.first[own] + micro_batch]
            stop = begin[shop.first[last] + micro_batch] + int(long[last])
            life = model.new_int_var(0, int(long.sum() * shop.micro_batches.max()), "")
            lives[shop.device[own]][0].append(model.new_interval_var(start, life, stop, ""))
            lives[shop.device[own]][1].append(size)
    for intervals, sizes in lives:
        model.add_cumulative(intervals, sizes, floor(limit * unit * (1 + LOOSE)))


def _unit(values: np.ndarray) -> float:
    """How many steps make 1, so that all values are whole, or nearly."""
    fractions = [Fraction(float(value)).limit_denominator(FINEST) for value in np.unique(values)]
    denominator = lcm(*(each.denominator for each in fractions))
    if denominator > FINEST:
        return FINEST / float(values.max())
    divisor = gcd(*(int(each * denominator) for each in fractions)) or 1
    return denominator / divisor


def _scaled(values: np.ndarray, unit: float) -> np.ndarray:
    return np.ceil(values * unit - 1e-6).astype(np.int64)
