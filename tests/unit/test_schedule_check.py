"""Times of schedule rows, and the independent check of schedules."""

from dataclasses import replace

import pytest
from published_schedules import INSTANCES, parse, problem

from rlfuse.fusion.schedules.baselines import baseline, baseline_orders, serial_1f1b
from rlfuse.fusion.schedules.operations import Operation
from rlfuse.fusion.schedules.problem import ScheduleError
from rlfuse.fusion.schedules.schedule import Schedule, check, timed
from rlfuse.fusion.schedules.shop import to_rows

MODEL = {"name": "m", "stages": 2, "micro_batches": 2, "forward": 1, "backward": 2}
SMALL = parse({"devices": 2, "communication": 0.5, "memory_cap": 1.0, "models": [MODEL]})


def one_f_one_b(small=SMALL):
    rows = to_rows(small, dict(baseline_orders(small))["serial 1f1b"])
    return Schedule(timed(small, rows), 0.0, serial_1f1b(small), 1.0, "1f1b")


def with_changed_times(schedule, device, place, **times):
    row = list(schedule.rows[device])
    row[place] = row[place]._replace(**times)
    rows = list(schedule.rows)
    rows[device] = tuple(row)
    return replace(schedule, rows=tuple(rows))


@pytest.mark.slow
def test_times_follow_data_devices_and_communication():
    schedule = one_f_one_b()
    assert [(each.operation.kind, each.start) for each in schedule.rows[1]] == [
        ("F", 1.5),
        ("B", 2.5),
        ("F", 4.5),
        ("B", 5.5),
    ]
    assert schedule.makespan == 10.0  # 7.5, 0.5 communication, 2 of work
    check(SMALL, schedule)


def test_measured_durations_delay_dependent_operations():
    rows = one_f_one_b().operations
    slow = timed(SMALL, rows, lambda each: 3.0 if each.kind == "B" else 1.0)
    assert max(row[-1].end for row in slow) == 1.5 + 1 + 3 + 1 + 3 + 0.5 + 3


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            lambda good: with_changed_times(good, 1, 0, start=1.0, end=2.0),
            "starts at 1, before the result of F of m[0] stage 0 micro-batch 0 at",
        ),
        (lambda good: with_changed_times(good, 1, 1, end=4.0), "takes 1.5, but 2 in the problem"),
        (lambda good: with_changed_times(good, 0, 0, start=-1.0, end=0.0), "must be at least 0"),
        (
            lambda good: with_changed_times(good, 0, 1, start=0.5, end=1.5),
            "m[0] stage 0 micro-batch 1 starts at 0.5, while",
        ),
        (lambda good: replace(good, rows=good.rows[::-1]), "but its stage is on device"),
        (lambda good: replace(good, rows=good.rows[:1]), "for devices=2: give one per device"),
        (lambda good: replace(good, rows=(good.rows[0][:-1], good.rows[1])), "lacks 1 operations: B of m[0] stage 0"),
        (lambda good: replace(good, rows=(good.rows[0] * 2, good.rows[1])), "scheduled twice"),
    ],
)
def test_the_check_reports_errors(broken, message):
    with pytest.raises(ScheduleError) as error:
        check(SMALL, broken(one_f_one_b()))
    assert message in str(error.value)


def test_the_check_counts_memory():
    tight = replace(SMALL, memory_cap=0.5)
    with pytest.raises(ScheduleError, match="a device holds 2, but the limit is 1"):
        check(tight, one_f_one_b())


def test_a_deadlock_message_lists_the_waiting_operations():
    first, second = one_f_one_b().operations
    with pytest.raises(ScheduleError) as error:
        timed(SMALL, (first, (second[1], second[0], *second[2:])))
    assert "deadlock" in str(error.value)
    assert "B of m[0] stage 1 micro-batch 0 waits for F of m[0] stage 1 micro-batch 0" in str(error.value)


def test_operations_of_another_problem_are_rejected():
    with pytest.raises(ScheduleError, match="not part of the problem: F of m"):
        timed(SMALL, ((Operation("m", 0, 7, 0, "F"),), ()))


@pytest.mark.parametrize("number", range(12))
def test_baselines_have_their_published_makespans(number):
    given_problem = problem(number)
    each = INSTANCES[number]
    assert baseline(given_problem, "1f1b", barrier=True) == each.serial_1f1b
    work = sum(3 * m * f for m, f in zip(each.micro_batches, each.forward, strict=True))
    bubble = sum((n - 1) * f for n, f in zip(each.stages, each.forward, strict=True))
    assert each.serial_1f1b == work + 3 * bubble
    assert baseline(given_problem, "interleaved", barrier=True) == work + 1.5 * bubble
    assert baseline(given_problem, "zb-h1", barrier=True) == work + bubble


@pytest.mark.parametrize("chunks", [2, 3])
def test_more_chunks_shorten_the_bubble_of_interleaved_schedules(chunks):
    # Megatron-LM's schedule divides the bubble by the chunks; the search starts from its order.
    model = MODEL | {"stages": 4, "micro_batches": 8}
    interleaved = parse({"devices": 4, "models": [model], "chunks_per_device": chunks, "placement": "interleaved"})
    order = next(order for name, order in baseline_orders(interleaved) if name == "serial interleaved")
    rows = timed(interleaved, to_rows(interleaved, order))
    assert max(row[-1].end for row in rows) == pytest.approx(8 * 3 + 3 * 3 / chunks)


def test_zb_v_halves_the_bubble_and_interleaving_needs_whole_groups():
    given_problem = problem(5)
    assert baseline(given_problem, "zb-v", barrier=True) == 168 + 24.5
    odd = parse({"devices": 2, "models": [MODEL | {"micro_batches": 3}]})
    assert baseline(odd, "interleaved", barrier=True) is None
