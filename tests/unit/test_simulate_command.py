"""`rlfuse simulate`: input files, table, JSON, pictures, and one-line errors."""

import dataclasses
import json
import re

import numpy as np
import pytest
import yaml

from rlfuse.cli import main
from rlfuse.config.input_files import WorkloadError
from rlfuse.config.schema import Config
from rlfuse.events import EventLog, Span
from rlfuse.observe.step_picture import Timeline, activity, draw
from rlfuse.simulate.runner import simulate_later_step
from rlfuse.simulate.workload import parse
from rlfuse.tools.simulate.recorded import read_run

FIELDS = {"policy", "generation_s", "generation_and_scoring_s", "step_s", "oracle_s", "busy_share", "moved_samples"}
FIELDS |= {"moved_bytes", "samples_finished", "bound_by"}
WORKLOAD = {
    "slots": 4,
    "response_tokens": {"lognormal": {"median": 60, "sigma": 1.0}, "cap": 300, "count": 64},
    "prompt_tokens": 50,
    "scoring": {"tokens_per_s": 2000},
    "training": {"tokens_per_s": 2000, "mini_batches": 2},
    "switch_s": 0.1,
}
SCORING = {"tokens_per_s": 2000, "by_update": True}  # as in a job, whose first update computes old log-probs


@pytest.fixture
def workload(tmp_path):
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(WORKLOAD))
    return str(path)


@pytest.mark.slow
def test_all_policies_in_a_table_a_list_and_a_picture(workload, tmp_path, capsys):
    out, picture = tmp_path / "result.json", tmp_path / "picture.png"
    assert main(["simulate", workload, "--threshold", "0.2", "--out", str(out), "--picture", str(picture)]) == 0
    results = json.loads(out.read_text())
    assert [result["policy"] for result in results] == ["serial", "stream", "rlhfuse", "adaptive"]
    assert all(result.keys() >= FIELDS and result["samples_finished"] == 64 for result in results)
    assert len({result["oracle_s"] for result in results}) == 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "1.00x" in printed and "lower bound of any schedule: " in printed
    assert "speedup vs serial" in printed and "time / lower bound" in printed


def test_one_policy_is_one_object(workload, tmp_path):
    out = tmp_path / "result.json"
    assert main(["simulate", workload, "--policy", "serial", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["policy"] == "serial"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs a WORKLOAD.json; --example shows one"),
        (["W", "--policy", "adaptiv"], "--policy adaptiv: unknown policy; did you mean adaptive?"),
        (["W", "--threshold", "2"], "--threshold 2.0: must be a share of the samples, between 0 and 1"),
        (["W", "--out", "no/such/folder/x.json"], "does not exist; create it first"),
        (["nothing.json"], "nothing.json: No such file"),
    ],
)
def test_errors_are_one_line(arguments, message, workload, capsys):
    assert main(["simulate", *(workload if word == "W" else word for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def record_run(folder, steps=2, policy="stream", deterministic=False, **more):
    """Write a run folder like that of a real job, with events of simulated steps; return the step times."""
    config = Config()
    config.model.path, config.data.train_files, config.fusion.policy = "model", ["data"], policy
    config.trainer.deterministic = deterministic
    config.algorithm.adv_estimator, config.trainer.n_gpus_per_node = "grpo", 4
    config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.data.max_response_length = 64, 32, 300
    (folder / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(config)))
    log, measured = EventLog(folder / "events.jsonl"), []
    for step in range(1, steps + 1):
        like = parse(WORKLOAD | {"seed": step, "scoring": SCORING} | more)
        run = simulate_later_step(like, policy, use_measured_rates=not deterministic)
        measured.append(run.result.step_s)
        for span in run.spans:
            span.start, span.end, span.step = span.start + 1000 * step, span.end + 1000 * step, step
        log.write(run.spans)
    log.close()
    return measured


@pytest.mark.slow
@pytest.mark.parametrize("policy, deterministic", [("serial", False), ("serial", True), ("stream", False)])
@pytest.mark.parametrize("speeds", [[1, 1, 1, 1], [1, 0.4, 1, 1], [1, 1, 0.65, 1]])
def test_recorded_steps_are_simulated_in_the_measured_time(tmp_path, policy, deterministic, speeds):
    measured = record_run(tmp_path, 3, policy, deterministic, slot_speed=speeds)
    recording = read_run(tmp_path)
    simulated = [
        simulate_later_step(step.workload, policy, use_measured_rates=recording.use_measured_rates)
        for step in recording.steps
    ]
    np.testing.assert_allclose([run.result.step_s for run in simulated], measured, rtol=0.05)
    rates = recording.rates or (1,) * len(speeds)
    np.testing.assert_allclose(1 / np.array(rates), speeds, rtol=0.1)


def test_timelines_need_only_spans():
    spans = [
        Span("generate", "rollout/0", 10.0, 14.0, samples=("1/0/0",)),
        Span("generate", "rollout/0", 10.0, 12.0, samples=("1/1/0",)),
        Span("forward", "trainer/1", 13.0, 15.0),
        Span("switch", "driver", 12.0, 13.0, attributes={"slot": 1}),
        Span("decode", "driver", 0.0, 1.0),
    ]
    bars = {
        (bar.slot, bar.what, bar.start, bar.end, bar.batch) for bar in activity(Timeline("", "", spans[:4], 10, 4.5))
    }
    assert bars == {
        (0, "generating", 0.0, 2.0, 2),
        (0, "generating", 2.0, 4.0, 1),
        (1, "switching", 2.0, 3.0, 0.0),
        (1, "training", 3.0, 4.5, 0.0),
    }
    with pytest.raises(ValueError, match="nothing to draw"):
        draw([Timeline("", "", spans[4:], 0, 1)], "nowhere.png")


@pytest.mark.parametrize("text", ["a: " + "[" * 500, "a: {", "\0"], ids=["deep", "open", "no text"])
def test_an_unreadable_config_is_reported_with_its_path(text, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(WorkloadError, match=re.escape(f"{tmp_path / 'config.yaml'}: ")):
        read_run(tmp_path)
