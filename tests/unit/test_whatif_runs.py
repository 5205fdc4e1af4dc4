"""`rlfuse whatif` on runs: replays match, slow slots are found, causes are distinguished."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from rlfuse.cli import main
from rlfuse.costs.model import Costs
from rlfuse.costs.rates import Rates
from rlfuse.events import Span, read_events
from rlfuse.health.detection import Alarm
from rlfuse.health.monitor import write_alarms
from rlfuse.health.signals import SLOWNESS
from rlfuse.run_folder.reader import open_run
from rlfuse.simulate.runner import simulate, simulate_later_step
from rlfuse.simulate.workload import Scoring, Training, workload_from_costs
from rlfuse.tools.whatif.causes import Evidence, likely_cause
from rlfuse.tools.whatif.operations import NO_GROUP
from rlfuse.tools.whatif.questions import Simulated, analyse_run, answers
from rlfuse.tools.whatif.run_operations import Piece, operations
from rlfuse.tools.whatif.slowdown import Run

ROOT = Path(__file__).parents[2]
RECORDED = {
    "text": ROOT / "notebooks/data/run",
    "pipelines": Path(__file__).parent / "recorded_runs/pipelines",
    "video": Path(__file__).parent / "recorded_runs/video",
}
"""Real runs on two cores: fused PPO; pipeline stages of actor and critic; clips encoded on two ranks."""


@cache
def examined(name):
    return analyse_run(open_run(RECORDED[name]))


@pytest.fixture(scope="module")
def workload():
    lengths = np.clip(np.random.default_rng(0).lognormal(4, 0.5, 128), 8, 600).astype(int)
    scoring, training = (
        Scoring(kinds=("old_log_prob", "ref", "values")),
        Training(mini_batches=4, models=("critic", "actor")),
    )
    return workload_from_costs(
        Costs(), 4, tuple(lengths.tolist()), group=4, prompt_tokens=16, scoring=scoring, training=training
    )


def analysed(run):
    step = next(span for span in run.spans if span.kind == "step")
    return Run(operations([(step, [span for span in run.spans if span is not step])]), run.spans)


# Replay --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDED)
def test_an_unmodified_replay_takes_the_measured_time(name):
    found = examined(name).slowdown
    assert 0 <= found.launch_delay < 0.05, f"measured {found.measured}, replayed {found.seconds}"
    assert pytest.approx(found.S_machine * found.S_skew) == found.S and found.S_skew >= 1


def test_planning_spans_are_not_work_of_a_rank():
    spans = [span for span in read_events(RECORDED["text"] / "events.jsonl") if span.step == 2]
    step = next(span for span in spans if span.kind == "step")
    rest = [span for span in spans if span is not step]
    plans = [Span("plan", "trainer", s.start, s.end, 2) for s in rest if (s.kind, s.where) == ("ref", "driver")]
    without, found = (operations([(step, each)]).pieces for each in (rest, rest + plans))
    assert plans and [(each.kind, each.worker) for each in found] == [(each.kind, each.worker) for each in without]


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDED)
def test_operations_depend_only_on_ended_operations(name):
    pieces = examined(name).analysis.recorded.pieces
    assert all(before.end <= piece.start + 1e-3 for piece in pieces for before in piece.waits)
    assert {piece.kind for piece in pieces} >= {
        "decode",
        "reward",
        "forward",
        "backward",
        "optimizer",
        "update_weights",
    }


def test_stages_wait_for_each_other_and_ranks_step_together():
    pieces = examined("pipelines").analysis.recorded.pieces
    second = [each for each in pieces if each.kind == "forward" and each.stage == 1]
    waiting = [each for each in second if any(before.kind == "forward" and before.stage == 0 for before in each.waits)]
    assert len(waiting) >= 0.9 * len(second) > 0, "clock skew: a few start before the end"
    steps = [each for each in pieces if each.kind == "optimizer"]
    assert {len([1 for other in steps if (other.step, other.group) == (each.step, each.group)]) for each in steps} == {
        2
    }


def test_ranks_compute_a_split_head_in_lockstep():
    spans = [span for span in read_events(RECORDED["pipelines"] / "events.jsonl") if span.step == 3]
    step = next(span for span in spans if span.kind == "step")
    last = next(s for s in spans if s.kind == "backward" and s.attributes["model"] == "actor" and s.attributes["stage"])
    heads = [
        replace(last, kind="head", where=f"trainer/{rank}", start=last.start - 2e-5, end=last.start - 1e-5)
        for rank in (0, 1)
    ]
    pieces = operations([(step, [*(span for span in spans if span is not step), *heads])]).pieces
    assert len({each.group for each in pieces if each.kind == "head"} - {NO_GROUP}) == 1
    assert sum(each.kind == "head" for each in pieces) == 2


# Slow machines -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("slower, slot", [(1.5, 0), (2.0, 2), (3.0, 3)])
def test_a_slow_slot_is_found_and_its_cost_is_right(workload, slower, slot):
    slowed = replace(workload, slot_speed=tuple(1 / slower if number == slot else 1.0 for number in range(4)))
    run = simulate(slowed, "serial", rates=Rates(4, measured=False))
    truth = run.result.step_s / simulate(workload, "serial").result.step_s
    found = analysed(run).slowdown()
    assert found.S_machine == pytest.approx(truth, rel=0.05) and next(iter(found.workers)) == f"slot {slot}"
    assert found.rates[f"slot {slot}"] == pytest.approx(slower, rel=0.05)
    assert found.M_W > 0.9 and found.cause.name == "machine" and f"slot {slot}" in found.cause.evidence


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["serial", "stream"])
def test_the_cost_of_a_slow_slot_is_right_with_measured_rates(workload, policy):
    run = simulate_later_step(replace(workload, slot_speed=(1, 1, 0.5, 1)), policy)
    truth = run.result.step_s / simulate(workload, policy).result.step_s
    found = analysed(run).slowdown(Simulated([workload], policy).resimulated_ratio)
    assert found.S_machine == pytest.approx(truth, rel=0.05) and found.rates["slot 2"] == pytest.approx(2, rel=0.05)


@pytest.mark.slow
def test_no_cause_is_reported_without_slow_machines(workload):
    found = analysed(simulate(workload, "adaptive")).slowdown()
    assert found.S < 1.03 and (found.cause, found.S_t, found.M_W, found.M_S) == (None,) * 4
    assert found.rates == pytest.approx(dict.fromkeys(found.rates, 1.0), rel=0.02)


@pytest.mark.slow
def test_a_long_tail_is_not_attributed_to_a_machine(workload):
    lengths = list(workload.lengths())
    lengths[-1] = 2000
    found = analysed(simulate(replace(workload, response_tokens=tuple(map(int, lengths))), "serial")).slowdown()
    assert found.cause.name == "tail" and found.S_skew > 1.2 > 1.03 > found.S_machine


# Causes --------------------------------------------------------------------------------------------------------------


def evidence_of(forward, backward):
    """Return evidence of two alternating workers; a typical forward takes 1 s, a backward 2 s."""
    pieces = []
    for number, seconds in enumerate(np.stack([forward, backward], axis=1).ravel()):
        kind, micro_batch = ("forward", "backward")[number % 2], number // 2
        span = Span(kind, "trainer/0", 0.0, float(seconds), samples=(f"1/{micro_batch}/0",))
        worker = f"slot {micro_batch % 2}"
        pieces.append(Piece(kind=kind, worker=worker, start=0.0, end=float(seconds), span=span, number=number))
    recorded, typical = np.array([piece.end for piece in pieces]), np.tile([1.0, 2.0], len(forward))

    def share(part, ideal):
        return float((recorded - ideal)[part].sum() / (recorded - ideal).sum())

    return Evidence(pieces, recorded, typical, typical, ["slot 0"], share)


def cause(forward, backward):
    found = {"S": 1.3, "S_machine": 1.1, "S_skew": 1.2, "steps": 4, "rates": {"slot 0": 1.0}, "M_W": 0.2}
    return likely_cause(found, evidence_of(forward, backward))


def test_lengths_pauses_and_noise_are_distinguished():
    random = np.random.default_rng(1)
    lengths, noise = random.lognormal(0, 0.4, 64), random.normal(1, 0.02, 64)
    assert cause(lengths, 2 * lengths * noise).name == "lengths"
    paused = np.where(np.arange(64) % 9 == 0, 6.0, noise)
    result = cause(paused, 2 * noise)
    assert result.name == "gc" and "8 forwards on 2 workers" in result.evidence and "trainer.gc_freq" in result.advice
    assert cause(noise, 2 * random.normal(1, 0.02, 64)).name == "undetermined"


# Questions, the command, the report ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_questions_are_answered_by_simulation(workload):
    analysis = analysed(simulate(workload, "stream"))
    by_question = {
        each.question: each for each in answers(analysis, Simulated([workload], "stream"), ["ref"], ["serial"])
    }
    truth = simulate(workload, "serial").result.step_s
    assert by_question["policy=serial"].seconds == pytest.approx(truth, rel=0.05)
    faster = [
        by_question[name].change
        for name in ("one more slot", "without the longest 5 % of responses", "ref takes no time")
    ]
    assert max(faster) < -0.005 and by_question["rewards take no time"].change == pytest.approx(0.0, abs=0.01)


@pytest.mark.slow
def test_the_command_prints_writes_and_draws(tmp_path, capsys):
    out, timeline = tmp_path / "found.json", tmp_path / "ideal.json"
    arguments = ["whatif", str(RECORDED["text"]), "--without", "reward", "--out", str(out), "--timeline", str(timeline)]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert "2 steps (2 to 12)" in output and "one more slot" in output and "rewards take no time" in output
    found = json.loads(out.read_text())
    assert {"S", "S_machine", "S_skew", "waste", "workers", "launch_delay", "questions"} <= found.keys()
    events = json.loads(timeline.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"slot 0", "slot 0, ideal", "slot 1", "slot 1, ideal"} <= names


@pytest.mark.slow
def test_alarms_of_the_run_are_printed_with_their_start(tmp_path, capsys):
    for name in ("config.yaml", "events.jsonl"):
        (tmp_path / name).write_text((RECORDED["video"] / name).read_text())
    slow = Alarm("rollout/1", SLOWNESS, 2.0, 1.0, 0.7, 0.3, ("rollout/0",), 1.7e9, 3, 1.7e9 + 60, (1.7e9, 1.7e9 + 60))
    write_alarms(tmp_path, [slow, replace(slow, ended=1.7e9 + 90)])
    assert main(["whatif", str(tmp_path), "--out", str(tmp_path / "found.json")]) == 0
    output = capsys.readouterr().out
    assert "slow worker: rollout/1: started at 2023-11-1" in output and "(step 3), until 2023-11-1" in output
    assert [alarm["worker"] for alarm in json.loads((tmp_path / "found.json").read_text())["alarms"]] == ["rollout/1"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "needs either a run folder, or --trace with a table of another job"),
        (["{run}", "--trace", "ops.csv"], "needs either a run folder, or --trace"),
        (["{run}", "--steps", "0"], "--steps 0: must be at least 1"),
        (["--trace", "ops.csv", "--policy", "serial"], "--policy: requires a run folder"),
        (["{run}", "--without", "forward-compute"], "unknown kind of work; valid: data, encode"),
        (["{run}", "--policy", "hasty"], "hasty"),
        (["{empty}"], "is not a run folder"),
    ],
)
def test_invalid_arguments_are_reported(arguments, message, tmp_path, capsys):
    words = [each.format(run=RECORDED["text"], empty=tmp_path) for each in arguments]
    assert main(["whatif", *words]) == 2 and message in capsys.readouterr().err


@pytest.mark.slow
def test_only_steps_on_the_ranks_of_the_last_step_are_analysed(tmp_path):
    rows = [json.loads(line) for line in (RECORDED["text"] / "events.jsonl").read_text().splitlines()]
    last = max(row["step"] for row in rows if row["kind"] == "step")
    rows += [row | {"where": "trainer/2"} for row in rows if row["where"] == "trainer/1" and row["step"] < last]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
    config = (RECORDED["text"] / "config.yaml").read_text()
    for slots, known in ((2, True), (4, False)):
        text = re.sub("n_gpus_per_node: 2", f"n_gpus_per_node: {slots}", config)
        (tmp_path / "config.yaml").write_text(text)
        run = analyse_run(open_run(tmp_path))
        assert [step.step for step, _ in run.steps] == [last]
        assert (run.simulated is not None) == known, "no step ran on four slots"
    assert len(list(answers(run.analysis, run.simulated))) == 2


@pytest.mark.slow
def test_a_report_without_the_policy_file_has_everything_else(tmp_path):
    for file in RECORDED["text"].glob("*.json*"):
        (tmp_path / file.name).write_text(file.read_text())
    config = (RECORDED["text"] / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(re.sub("policy: [a-z]+", "policy: gone.py:mine", config))
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert 'id="slow"' not in page and 'id="timelines"' in page
