"""Accounting of idle time: constructed cases, and simulated steps compared with the simulator's own counts."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlfuse.events import Span, union
from rlfuse.fusion.decisions import Settings
from rlfuse.observe.idle import account, intervals_by_slot, split_by
from rlfuse.observe.metrics import memory_metrics
from rlfuse.simulate.runner import simulate
from rlfuse.simulate.workload import parse


def on(where, kind, start, end, **attributes):
    return Span(kind, where, start, end, attributes=attributes)


def test_every_cause_of_idle_time():
    spans = [
        on("driver", "start", 1, 9),
        on("driver", "update_weights", 10, 12),
        on("rollout/0", "update_weights", 10, 11),
        on("driver", "step", 12, 60),
        on("driver", "data", 12, 13),
        on("driver", "gen", 14, 25, slot=0),
        on("driver", "gen", 14, 20, slot=1),
        on("rollout/0", "decode", 15, 25),
        on("rollout/1", "decode", 14, 20),
        on("driver", "switch", 20, 21, slot=1),
        on("trainer/1", "old_log_prob", 22, 30),
        on("driver", "reward", 25, 33),
        on("driver", "schedule", 0, 1),  # not a pipeline span
        on("trainer", "schedule", 34, 40),
        on("trainer/0", "forward", 34, 38),
        on("trainer/0", "backward", 38, 40),
        on("trainer/1", "weight_gradients", 36, 37),
        on("driver", "update_actor", 40, 44),
        on("trainer/0", "optimizer", 41, 43),
        on("trainer/1", "optimizer", 41, 43),
        on("driver", "testing", 60, 70),
        on("driver", "gen", 60, 70, slot=0),
        on("rollout/0", "decode", 60, 69),
        on("rollout/0", "decode", 80, 90),  # after the window
        on("driver", "save_checkpoint", 70, 72),
    ]
    found = [
        {name: sum(b - a for a, b in intervals) for name, intervals in slot.items()}
        for slot in intervals_by_slot(spans, 0, 75, slots=2)
    ]
    shared = {"idle/start_up": 10, "idle/data": 1, "busy/optimizer": 2, "busy/save_checkpoint": 2}
    assert found[0] == shared | {
        "busy/update_weights": 1,
        "idle/weights": 1,
        "busy/generate": 10,
        "idle/imbalance": 5,  # while slot 1 scores
        "idle/reward": 3,
        "busy/train": 6,
        "busy/testing": 9,
        "idle/calls": 1 + 2 + 1,  # to the engine, around the optimizer step, back from validation
        "idle/controller": 1 + 1 + 16 + 3,
    }
    assert found[1] == shared | {
        "idle/weights": 2,
        "busy/generate": 6,
        "idle/switch": 1,
        "idle/tail": 1 + 10,  # includes the wait for validation responses
        "busy/old_log_prob": 8,
        "idle/reward": 3,
        "busy/train": 1,
        "idle/bubble": 5,
        "idle/calls": 2,
        "idle/controller": 1 + 1 + 16 + 3,
    }
    both = account(spans, 0, 75, slots=2)
    assert sum(both.busy.values()) + sum(both.idle.values()) == pytest.approx(75)
    assert both.metrics()["busy/train"] == 3.5 and both.metrics()["idle/start_up"] == 10


def test_ranks_of_one_engine_have_the_same_intervals():
    spans = [on("rollout/1", "decode", 0, 2), on("trainer/3", "backward", 2, 4), on("driver", "gen", 0, 2, slot=1)]
    slots = intervals_by_slot(spans, 0, 4, slots=4, width=2)
    assert [slot.get("busy/generate", []) for slot in slots] == [[], [], [(0, 2)], [(0, 2)]]
    assert slots[2]["idle/imbalance"] == [(2, 4)] and slots[3]["busy/train"] == [(2, 4)]


def test_drained_slots_are_idle_except_in_collective_work():
    spans = [
        on("driver", "drained", 0, 9, slot=1),
        on("driver", "gen", 0, 4, slot=0),
        on("rollout/0", "decode", 0, 4),
        on("driver", "update_weights", 4, 6),
        on("trainer/1", "optimizer", 6, 7),
    ]
    slots = intervals_by_slot(spans, 0, 10, slots=2)
    assert slots[1] == {
        "idle/drained": [(0, 4), (7, 9)],
        "idle/weights": [(4, 6)],
        "busy/optimizer": [(6, 7)],
        "idle/controller": [(9, 10)],
    }
    assert "idle/drained" not in slots[0]


def test_waits_for_optimizer_state_are_separate_from_updates():
    spans = [
        on("driver", "update_actor", 0, 10, step=True),
        on("trainer/0", "optimizer_wait", 1, 4, model="actor"),
        on("trainer/0", "optimizer", 4, 9),
        on("trainer/1", "optimizer_wait", 1, 2, model="actor"),
        on("trainer/1", "optimizer", 4, 9),
    ]
    first, second = intervals_by_slot(spans, 0, 10, slots=2)
    assert first["idle/switch"] == [(1, 4)] and second["idle/switch"] == [(1, 2)]
    assert first["busy/optimizer"] == second["busy/optimizer"] == [(4, 9)]
    assert memory_metrics(spans) == {"timing_s/optimizer_wait": 3.0} and memory_metrics(spans[2:3]) == {}


def test_empty_window_has_no_time():
    assert account([on("rollout/0", "decode", 0, 2)], 1, 1, slots=1).metrics() == {}


ends = st.integers(0, 30)
intervals = st.lists(st.tuples(ends, ends)).map(
    lambda pairs: union(Span("x", "y", min(pair), max(pair)) for pair in pairs)
)


@pytest.mark.slow
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(intervals, intervals)
def test_split_by_partitions_the_intervals(what, by):
    def points(intervals):
        return {point for a, b in intervals for point in range(a, b)}

    inside, outside = split_by(what, by)
    assert points(inside) == points(what) & points(by) and points(outside) == points(what) - points(by)
    assert all(b > a for a, b in inside + outside)


WORKLOAD = parse(
    {
        "slots": 4,
        "response_tokens": {"lognormal": {"median": 60, "sigma": 1.0}, "cap": 400, "count": 96},
        "prompt_tokens": 50,
        "engine": {"flat_batch": 16, "max_sequences": 64},
        "scoring": {"tokens_per_s": 3000},
        "training": {"tokens_per_s": 2000, "mini_batches": 4},
        "switch_s": 0.2,
        "kv_bytes_per_token": 1000,
        "link_bytes_per_s": 1e9,
    }
)


@pytest.mark.parametrize("policy", ["serial", "stream", "rlhfuse", "adaptive"])
def test_simulated_steps_are_accounted_for(policy):
    run = simulate(WORKLOAD, policy, Settings(threshold=0.2))
    step = next(span for span in run.spans if span.kind == "step")
    found = account(run.spans, step.start, step.end, WORKLOAD.slots)
    busy, idle = sum(found.busy.values()), sum(found.idle.values())
    assert busy + idle == pytest.approx(step.seconds, rel=0.01)
    assert busy == pytest.approx(run.result.busy_share * step.seconds, rel=0.01), "differs from the simulator's count"
    assert found.idle["switch"] == pytest.approx(0.2, rel=0.01)
    assert found.idle.get("controller", 0.0) < 0.01 * step.seconds, "every wait of a simulated step has a cause"


def test_fusion_reduces_idle_time_in_the_tail():
    tails = {}
    for policy in ("serial", "adaptive"):
        run = simulate(WORKLOAD, policy, Settings(threshold=0.2))
        step = next(span for span in run.spans if span.kind == "step")
        tails[policy] = account(run.spans, step.start, step.end, WORKLOAD.slots).idle.get("tail", 0.0)
    assert tails["adaptive"] < 0.5 * tails["serial"]
