"""Traces follow the rules of the trace event format, for a manually written step and simulated steps."""

import gzip
import json
from collections import defaultdict

import pytest
import yaml

from rlfuse.cli import main as rlfuse
from rlfuse.events import EventLog, Span
from rlfuse.simulate.runner import simulate
from rlfuse.simulate.workload import parse
from rlfuse.tools.trace import trace


def check(document):
    """Check the trace event format; return the flows as id -> events."""
    events = json.loads(json.dumps(document, allow_nan=False))["traceEvents"]
    tracks, flows, named = defaultdict(list), defaultdict(list), set()
    timed = [event for event in events if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    for event in events:
        assert {"ph", "name", "pid", "tid", "ts"} <= event.keys()
        assert all(isinstance(event[key], int) for key in ("pid", "tid", "ts")) and event["ts"] >= 0
        assert event["ph"] in "XCMstf"
        if event["ph"] == "X":
            assert isinstance(event["dur"], int) and event["dur"] > 0
            tracks[event["pid"], event["tid"]].append(event)
        elif event["ph"] == "C":
            assert event["args"] and all(type(value) in (int, float) for value in event["args"].values())
        elif event["ph"] == "M" and event["name"] == "thread_name":
            named.add((event["pid"], event["tid"]))
        elif event["ph"] in "stf":
            flows[event["id"]].append(event)
    assert tracks.keys() <= named
    for slices in tracks.values():
        open_ends = []
        for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
            end = event["ts"] + event["dur"]
            while open_ends and open_ends[-1] <= event["ts"]:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], f"{event} overlaps another on its track without being in it"
            open_ends.append(end)
    for arrow in flows.values():
        kinds = [event["ph"] for event in arrow]
        assert kinds[0] == "s" and kinds[-1] == "f" and set(kinds[1:-1]) <= {"t"}
        assert len({(event["name"], event["cat"]) for event in arrow}) == 1
        for event in arrow:
            around = [
                each
                for each in tracks[event["pid"], event["tid"]]
                if each["ts"] <= event["ts"] < each["ts"] + each["dur"]
            ]
            assert around, f"{event} lies in no slice"
    return flows


def example_spans(at=1e9):
    def span(where, kind, start, end, *samples, **attributes):
        return Span(kind, where, at + start, at + end, 1, samples, attributes=attributes)

    return [
        span("driver", "step", 0, 10),
        span("driver", "gen", 0, 4, slot=0),
        span("driver", "gen", 1, 5, slot=1),
        span("rollout/0", "generate", 0, 3, "1/0/0"),
        span("rollout/0", "generate", 0.5, 4, "1/0/1"),
        span("rollout/0", "decode", 0.5, 3, batch=1, context=20.5),
        span("rollout/0", "decode", 3, 4, batch=1, context=30),
        span("rollout/1", "decode", 2, 2, batch=1, context=4),  # of zero duration
        span("rollout/1", "generate", 2, 2, "1/1/0"),
        span("reward/0", "reward", 4.5, 5, "1/0/0", "1/0/1", "1/1/0"),
        span("trainer/0", "forward", 6, 7, "1/0/0", "1/0/1", model="actor"),
        span("trainer/0", "backward", 7, 8, "1/0/0", "1/0/1", model="actor"),
        span("trainer/1", "backward", 5.5, 5.6, "1/1/0", model="actor"),
        span("trainer/0", "optimizer", 8, 9, model="actor"),
        span("trainer/1", "optimizer", 8, 9, model="actor"),
        span("trainer", "schedule", 6, 9),
        Span("start", "elsewhere", at, at + 1),
    ]


def test_the_trace_of_an_example_step():
    document = trace(example_spans())
    flows = check(document)
    assert len(flows) == 3
    for arrow in flows.values():
        places = [(event["pid"], event["ph"]) for event in arrow]
        slot = 11 if "1/1/0" in arrow[0]["args"]["sample"] else 10
        assert places == [(slot, "s"), (2, "t"), (slot, "t"), (slot, "f")]
    events = document["traceEvents"]
    waiting = [(e["ts"], e["args"]) for e in events if e["ph"] == "C" and e["pid"] == 10 and e["name"] == "samples"]
    assert waiting == [
        (500_000, {"running": 1, "waiting": 1}),
        (3_000_000, {"running": 1, "waiting": 0}),
        (4_000_000, {"running": 0, "waiting": 0}),
    ]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert {(1, "gen 1"), (1, "gen 2"), (1, "step"), (10, "samples 2"), (10, "rank"), (11, "engine")} <= names


def test_flow_arrows_are_monotonic_despite_clock_skew():
    spans = [
        Span("reward", "reward/0", 0, 1, 1, ("1/0/0",)),
        Span("backward", "trainer/0", 0.5, 2, 1, ("1/0/0",), attributes={"model": "actor"}),
        Span("generate", "rollout/0", 3, 4, 1, ("1/0/0",)),
    ]
    (arrow,) = check(trace(spans)).values()
    assert [event["ts"] for event in arrow] == [500_000, 500_000]
    assert not check(trace(spans[1:])), "a flow needs two events"


WORKLOAD = parse(
    {
        "slots": 3,
        "response_tokens": {"lognormal": {"median": 60, "sigma": 1.0}, "cap": 300, "count": 48},
        "engine": {"flat_batch": 8, "max_sequences": 12},
        "scoring": {"tokens_per_s": 3000},
        "training": {"tokens_per_s": 2000, "mini_batches": 2},
        "switch_s": 0.2,
        "kv_bytes_per_token": 1000,
        "link_bytes_per_s": 1e9,
    }
)


@pytest.fixture(scope="module")
def simulated():
    return simulate(WORKLOAD, "rlhfuse").spans


def test_a_simulated_step_is_valid_and_its_counters_add_up(simulated):
    document = trace(simulated)
    assert len(check(document)) == 48
    counted = [event["args"] for event in document["traceEvents"] if event["name"] == "samples"]
    assert max(args["running"] for args in counted) == 12


def test_the_command_writes_steps_of_a_run(tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    assert rlfuse(["trace", str(folder)]) == 2
    assert "config.yaml" in capsys.readouterr().err
    groups = {"trainer": {"nnodes": 1, "n_gpus_per_node": 2}, "rollout": {"tensor_model_parallel_size": 1}}
    (folder / "config.yaml").write_text(yaml.safe_dump(groups))
    log = EventLog(folder / "events.jsonl")
    for step in (1, 2, 3):
        spans = example_spans(at=1e9 + 20 * step)
        for span in spans:
            span.step = step
        log.write(spans)
    log.close()
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"kind":"step","whe')  # the run is still writing
    assert rlfuse(["trace", str(folder)]) == 0
    with gzip.open(folder / "trace.json.gz", "rt") as file:
        assert len(check(json.load(file))) == 3 * 3, "also for steps that ran again after a resume"
    out = tmp_path / "two.json"
    assert rlfuse(["trace", str(folder), "--steps", "2", "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    check(document)
    assert {e["args"]["step"] for e in document["traceEvents"] if e["ph"] == "X"} == {2}
    capsys.readouterr()
    assert rlfuse(["trace", str(folder), "--steps", "7-9"]) == 2
    assert "steps 1 to 3" in capsys.readouterr().err
    assert rlfuse(["trace", str(folder), "--steps", "x"]) == 2
