"""The schedule search: valid schedules between the lower bound and the baselines, deterministic for a seed."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published_schedules import INSTANCES, parse, problem

from rlfuse.fusion.schedules.baselines import baseline_orders
from rlfuse.fusion.schedules.bound import lower_bound
from rlfuse.fusion.schedules.list_scheduling import Draws
from rlfuse.fusion.schedules.local_search import anneal, exchange, exchangeable, state_of, tabu, through
from rlfuse.fusion.schedules.problem import ScheduleError
from rlfuse.fusion.schedules.schedule import check, peaks, timed
from rlfuse.fusion.schedules.search import FINISHING_S, _Search, search
from rlfuse.fusion.schedules.shop import compile_problem, makespan, peak, timed_rows, to_rows

NEVER = np.zeros(1, np.bool_)
QUICK = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def problems(draw, largest=4):
    """Draw a problem of one to three models with unequal stages, communication, split backward, V and memory caps."""
    devices = draw(st.integers(1, largest))
    times = st.integers(1, 12).map(lambda value: value / 4)

    def model(name):
        pipelines = draw(st.sampled_from([k for k in range(1, devices + 1) if devices % k == 0]))
        stages = devices // pipelines
        each = st.one_of(times, st.lists(times, min_size=stages, max_size=stages))
        return {
            "name": name,
            "stages": stages,
            "pipelines": pipelines,
            "micro_batches": draw(st.integers(1, 4)),
            "forward": draw(each),
            "backward": draw(st.one_of(each, st.none())),
            "activation": draw(each),
            "direction": draw(st.sampled_from(["up", "down"])),
            "weight_gradient": draw(st.sampled_from([0.25, 0.5])),
            "chunks_per_device": draw(st.sampled_from([None, None, 1, 2, 3])),
        }

    return parse(
        {
            "devices": devices,
            "split_backward": draw(st.booleans()),
            "memory_cap": draw(st.sampled_from([None, 1.0, 1.3])),
            "communication": draw(st.sampled_from([0.0, 0.0, 0.3])),
            "chunks_per_device": draw(st.sampled_from([1, 1, 2])),
            "placement": draw(st.sampled_from(["v", "interleaved"])),
            "models": [model(f"model {i}") for i in range(draw(st.integers(1, 3)))],
        }
    )


@pytest.mark.slow
@QUICK
@given(problems())
def test_results_are_valid_and_between_the_bound_and_the_best_baseline(given_problem):
    try:
        found = search(given_problem, time_limit=0.1, method="auto")
    except ScheduleError as error:
        assert "raise memory_cap" in str(error)
        assert all(
            max(peaks(given_problem, timed(given_problem, to_rows(given_problem, order)))) > given_problem.memory_limit
            for _, order in baseline_orders(given_problem)
        )
        return
    check(given_problem, found)
    assert found.makespan >= found.lower_bound * (1 - 1e-9)
    assert found.memory_peak * given_problem.memory_unit <= given_problem.memory_limit * (1 + 1e-6)
    for _, order in baseline_orders(given_problem):
        rows = timed(given_problem, to_rows(given_problem, order))
        if max(peaks(given_problem, rows)) <= given_problem.memory_limit:
            assert found.makespan <= max(row[-1].end for row in rows) * (1 + 1e-9)


@pytest.mark.slow
@QUICK
@given(problems(), st.integers(0, 100))
def test_compiled_and_named_schedules_have_the_same_times_and_memory(given_problem, seed):
    shop = compile_problem(given_problem)
    order = Draws(shop, seed).draw(float("inf"), lambda length, most: (length,)).order
    rows = to_rows(given_problem, order)
    found = timed(given_problem, rows)
    assert timed_rows(given_problem, order) == found
    assert max(peaks(given_problem, found)) == pytest.approx(peak(shop, order))


@pytest.mark.slow
@QUICK
@given(problems(), st.integers(0, 100))
def test_an_exchange_updates_heads_and_tails_and_its_makespan_is_predicted(given_problem, seed):
    shop, rng = compile_problem(given_problem), np.random.default_rng(seed)
    state = state_of(shop, Draws(shop, seed).draw(float("inf"), lambda length, most: (length,)).order)
    for _ in range(30):
        device, place = rng.integers(shop.devices), rng.integers(max(1, shop.row_length - 1))
        u, v = state.order[device, place], state.order[device, (place + 1) % shop.row_length]
        if place + 1 == shop.row_length or not exchangeable(shop, state, u, v):
            continue
        before, predicted = makespan(shop, state.order), through(shop, state, u, v)
        exchange(shop, state, u, v)
        after, recomputed = makespan(shop, state.order), state_of(shop, state.order)
        assert after == pytest.approx(predicted) or predicted < after <= before + 1e-9
        assert state.head == pytest.approx(recomputed.head) and state.tail == pytest.approx(recomputed.tail)


@QUICK
@given(problems(), st.integers(0, 100))
def test_annealing_respects_the_makespan_and_reports_its_result(given_problem, seed):
    shop = compile_problem(given_problem)
    state = state_of(shop, Draws(shop, seed).draw(float("inf"), lambda length, most: (length,)).order)
    longest, goal = makespan(shop, state.order) * 1.05, 0.8 * peak(shop, state.order)
    remaining = anneal(shop, state, longest, goal, 2000, 0.5, 0.05, seed, NEVER)
    assert makespan(shop, state.order) <= longest * (1 + 1e-9)
    assert (remaining == 0) == (peak(shop, state.order) <= goal * (1 + 1e-8))


@QUICK
@given(problems(), st.integers(0, 100))
def test_tabu_search_respects_memory_and_reports_its_makespan(given_problem, seed):
    shop = compile_problem(given_problem)
    listed = Draws(shop, seed).draw(float("inf"), lambda length, most: (length,))
    order, length = tabu(shop, state_of(shop, listed.order), 0.0, listed.peak, 300, 5, seed, NEVER)
    assert makespan(shop, order) == pytest.approx(length) and length <= listed.makespan * (1 + 1e-9)
    assert peak(shop, order) <= listed.peak * (1 + 1e-8)


# Comparison with all schedules ----------------------------------------------------------------------------------------


def best_of_all(given_problem):
    """Return the minimum makespan over all orders of all devices that are FIFO, with F before B before W."""
    shop = compile_problem(given_problem)
    best = np.inf
    for strings in itertools.product(*(list(rows_of(shop, device)) for device in range(shop.devices))):
        seen = np.zeros(len(shop.micro_batches), int)
        order = np.empty((shop.devices, shop.row_length), np.int64)
        for device, string in enumerate(strings):
            for place, name in enumerate(string):
                order[device, place] = shop.first[name] + seen[name]
                seen[name] += 1
        length = makespan(shop, order)
        if length < best and peak(shop, order) <= given_problem.memory_limit * (1 + 1e-9):
            best = length
    return best


def rows_of(shop, device):
    """Yield every row of classes in which none is ahead of its predecessor on this device."""
    classes = shop.of_device[device].tolist()
    before = {
        name: max((k for k in classes if shop.lane[k] == shop.lane[name] and k < name), default=None)
        for name in classes
    }

    def extend(row):
        if len(row) == shop.row_length:
            yield row
        for name in classes:
            done, source = row.count(name), before[name]
            if done < shop.micro_batches[name] and (source is None or row.count(source) > done):
                yield from extend((*row, name))

    return extend(())


def tiny(devices, split, counts, cap=None, **more):
    models = [
        {"name": f"m{i}", "stages": devices, "micro_batches": count, "direction": direction, **cost}
        for i, (count, direction, cost) in enumerate(
            zip(
                counts,
                ("down", "up"),
                ({"forward": 1, "backward": 2}, {"forward": 1.5, "backward": 2.5}),
                strict=False,
            )
        )
    ]
    return parse({"devices": devices, "split_backward": split, "memory_cap": cap, "models": models} | more)


@pytest.mark.parametrize(
    "given_problem",
    [
        tiny(2, False, (2,)),
        tiny(2, False, (2,), communication=0.5),
        tiny(2, False, (1, 1)),
        tiny(2, False, (2, 1)),
        pytest.param(tiny(2, False, (2, 1), cap=1.0), marks=pytest.mark.slow),
        tiny(2, True, (2,)),
        tiny(2, True, (1, 1), cap=1.0),
        tiny(1, False, (2, 2), cap=1.0),
        tiny(2, False, (1,), chunks_per_device=2),
    ],
)
def test_tiny_problems_are_solved_to_the_optimum(given_problem):
    best = best_of_all(given_problem)
    assert lower_bound(given_problem) <= best
    assert search(given_problem, time_limit=5).makespan == pytest.approx(best)


# Published instances --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(12))
def test_the_bound_equals_the_published_bound(number):
    assert lower_bound(problem(number)) == INSTANCES[number].lower_bound


@pytest.mark.parametrize("number", [0, 1, 2, 5, 7, 11])
def test_whole_backward_reaches_the_bound(number):
    found = search(problem(number), time_limit=30)
    assert found.makespan == found.lower_bound == INSTANCES[number].lower_bound
    assert found.serial_1f1b == INSTANCES[number].serial_1f1b


@pytest.mark.slow
def test_split_backward_reaches_its_bound_in_the_memory_of_1f1b():
    found = search(problem(8, split_backward=True, memory_cap=1.0), time_limit=30)
    assert found.makespan == found.lower_bound == 158 and found.memory_peak <= 1.0 + 1e-9


# Determinism and limits -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_equal_seeds_give_equal_schedules():
    given_problem = problem(2, split_backward=True, memory_cap=1.0)
    first, second = (search.__wrapped__(given_problem, time_limit=60, method="list", seed=seed) for seed in (3, 3))
    assert first.rows == second.rows and first.method == second.method


def test_a_schedule_is_searched_once():
    assert search(problem(5), seed=7) is search(problem(5), seed=7)


def test_too_little_memory_for_one_micro_batch_is_an_error():
    with pytest.raises(ScheduleError, match=r"serial 1F1B needs 15\.6. Raise memory_cap"):
        search(problem(2, memory_cap=0.05))


def wide(devices, micro_batches, **fields):
    """Return a problem of two models with opposite directions."""
    model = {"stages": devices, "micro_batches": micro_batches, "forward": 1, "backward": 2}
    models = [model | {"name": "actor"}, model | {"name": "critic", "direction": "up"}]
    return parse({"devices": devices, "models": models, "memory_cap": 1.0} | fields)


@pytest.mark.slow
@pytest.mark.parametrize(
    "large",
    [
        wide(64, 64, split_backward=True, chunks_per_device=2),
        wide(2, 10_000),
    ],
    ids=["64 devices", "10,000 micro-batches"],
)
def test_the_time_limit_holds_for_large_problems_in_every_step(large):
    began, limit = time.process_time(), 0.5
    found = search(large, time_limit=limit)
    spent = time.process_time() - began
    assert found.makespan < found.serial_1f1b
    assert spent < limit + 4 * FINISHING_S * large.operations, "about 55 s if all baselines were completed"


def test_annealing_and_tabu_search_stop_on_request():
    given_problem = problem(6, memory_cap=1.0)
    shop, stop = compile_problem(given_problem), np.ones(1, np.bool_)
    order = Draws(shop, 0).draw(float("inf"), lambda length, most: (length,)).order
    state = state_of(shop, order)
    assert anneal(shop, state, np.inf, 1.0, 10**12, 0.5, 0.05, 0, stop) > 0
    assert np.array_equal(tabu(shop, state, 0.0, np.inf, 10**12, 5, 0, stop)[0], order)


def test_the_alarm_of_a_search_stops_compiled_loops():
    given_problem = problem(6, memory_cap=1.0)
    search_state = _Search(given_problem, 0.2, 0)
    with search_state.alarm():
        search_state.draw()
        tabu(
            search_state.shop,
            state_of(search_state.shop, search_state.order),
            0.0,
            np.inf,
            10**9,
            5,
            0,
            search_state.stop,
        )
    assert search_state.stop[0] and search_state.is_over()
