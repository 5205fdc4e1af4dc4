"""Parsing of schedule problems, with one line per error."""

import copy

import pytest
from published_schedules import parse

from rlfuse.fusion.schedules.problem import ScheduleError

PROBLEM = {
    "devices": 4,
    "models": [
        {"name": "actor", "stages": 4, "micro_batches": 8, "forward": 5, "backward": 10, "activation": [4, 3, 2, 1]},
        {
            "name": "critic",
            "stages": 2,
            "pipelines": 2,
            "micro_batches": 4,
            "forward": 4,
            "backward": [8, 9],
            "direction": "up",
            "weight_gradient": 0.25,
        },
    ],
}


def test_direction_and_pipeline_determine_the_device_of_a_stage():
    problem = parse(PROBLEM)
    actor, critic = problem.models
    assert [problem.device(actor, 0, stage) for stage in range(4)] == [0, 1, 2, 3]
    assert [problem.device(critic, pipeline, stage) for pipeline in range(2) for stage in range(2)] == [1, 0, 3, 2]


def test_chunks_in_v_placement_share_their_stage():
    problem = parse(PROBLEM | {"chunks_per_device": 2, "split_backward": True})
    actor, critic = problem.models
    assert [problem.device(critic, 1, chunk) for chunk in range(4)] == [3, 2, 2, 3]
    assert [problem.activation(actor, chunk) for chunk in range(8)] == [2, 1.5, 1, 0.5, 0.5, 1, 1.5, 2]
    assert problem.duration(critic, 0, 3, "W") == 1.0 and problem.duration(critic, 0, 3, "B") == 3.0
    assert problem.duration(critic, 0, 2, "F") == 2.0


def test_interleaved_chunks_have_separate_times():
    actor = {"name": "actor", "stages": 2, "micro_batches": 4, "forward": [1, 2, 3, 9], "backward": 8, "activation": 1}
    problem = parse({"devices": 2, "models": [actor], "chunks_per_device": 2, "placement": "interleaved"})
    (model,) = problem.models
    assert [problem.device(model, 0, chunk) for chunk in range(4)] == [0, 1, 0, 1]
    assert [problem.duration(model, 0, chunk, "F") for chunk in range(4)] == [1, 2, 3, 9]
    assert problem.duration(model, 0, 3, "B") == 4 and problem.memory_unit == 2
    unsplit = problem.variant(split_backward=False, chunks_per_device=1)
    assert [unsplit.duration(unsplit.models[0], 0, stage, "F") for stage in range(2)] == [4, 11]


def test_memory_is_relative_to_serial_1f1b_or_absolute():
    assert parse(PROBLEM).memory_unit == 4 * 4
    assert parse(PROBLEM | {"memory_cap": 1.5}).memory_limit == 24
    assert parse(PROBLEM | {"memory_cap": 1.5, "memory_per_device": 20}).memory_limit == 20


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["models"], [], "models=[]"),
        (["models", 0, "stages"], 2, "set pipelines * stages = devices"),
        (["models", 0, "forward"], [1, 2], "has 2 values for stages=4: give one per stage, or a number"),
        (["models", 1, "name"], "actor", "must differ"),
        (["rates"], [1, 2], "rates has 2 values for devices=4: give one per device, or none"),
    ],
)
def test_errors_contain_field_value_and_fix(path, value, message):
    data = copy.deepcopy(PROBLEM)
    place = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(ScheduleError) as error:
        parse(data)
    assert message in str(error.value)
