"""`rlfuse whatif` on traces of synthetic jobs: replay, slowdowns and their known causes."""

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from worlds.training_traces import OPTIMIZER, Job, table

from rlfuse.cli import main
from rlfuse.tools.whatif import slowdown
from rlfuse.tools.whatif.causes import Cause
from rlfuse.tools.whatif.command import job_report
from rlfuse.tools.whatif.operations import Replay
from rlfuse.tools.whatif.questions import Answer
from rlfuse.tools.whatif.slowdown import JobSlowdown
from rlfuse.tools.whatif.study_trace import TraceError, operations_of, read

JOBS = [Job(), Job(stages=1), Job(ranks=1), Job(stages=2, micro_batches=1), Job(noise=0.2)]


def analyse(operations):
    return slowdown.Job(operations).slowdown()


CHUNKED = [Job(chunks=2, noise=0.1), Job(stages=2, chunks=3, micro_batches=4, ranks=2)]


@pytest.mark.parametrize("job", JOBS + CHUNKED)
def test_an_unmodified_replay_takes_the_measured_time(job):
    rows = table(job)
    operations = operations_of(rows)
    seconds = Replay(operations).step_seconds(operations.durations())
    np.testing.assert_allclose(seconds, rows.attrs["step_seconds"], rtol=1e-9)


@pytest.mark.slow
def test_a_slow_worker_is_found_among_interleaved_chunks():
    baseline, slow = Job(ranks=8, chunks=2), Job(ranks=8, chunks=2, slow={(1, 6): 2.0})
    truth = np.mean(table(slow).attrs["step_seconds"]) / np.mean(table(baseline).attrs["step_seconds"])
    found = analyse(operations_of(table(slow)))
    workers = np.array(found.workers)
    assert pytest.approx(truth, rel=0.05) == found.S and found.M_W > 0.9
    assert np.unravel_index(workers.argmax(), workers.shape) == (1, 6)


def test_host_delays_are_reported_separately():
    found = analyse(operations_of(table(Job(delay=0.05))))
    assert pytest.approx(1.0, abs=1e-9) == found.S and 0.01 < found.launch_delay < 0.1
    assert (found.S_t, found.workers, found.M_W, found.M_S) == (None, None, None, None)


@pytest.mark.parametrize("slower", [1.16, 1.4, 2.03, 3.0])
@pytest.mark.parametrize("worker", [(0, 0), (2, 5), (3, 7)])
def test_a_slow_worker_is_found_and_its_cost_is_right(slower, worker):
    baseline = Job(ranks=8, noise=0.02)
    slow = Job(ranks=8, noise=0.02, slow={worker: slower})
    truth = np.mean(table(slow).attrs["step_seconds"]) / np.mean(table(baseline).attrs["step_seconds"])
    found = analyse(operations_of(table(slow)))
    assert pytest.approx(truth, rel=0.05) == found.S and found.waste == pytest.approx(1 - 1 / found.S)
    workers = np.array(found.workers)
    assert workers.shape == (4, 8) and np.unravel_index(workers.argmax(), workers.shape) == worker
    if slower >= 1.4:
        assert found.M_W > 0.9 and abs(found.launch_delay) < 1e-9
        assert {*list(found.S_t)[:2]} == {"forward-compute", "backward-compute"}
    assert found.S_t["optimizer"] == pytest.approx(1.0, abs=0.01)


def test_a_last_stage_with_too_much_work_is_found():
    found = analyse(operations_of(table(Job(last_stage=1.6))))
    assert found.S > 1.1 and found.M_S > 0.8 > found.M_W


LENGTHS = Job(ranks=8, stages=2, steps=6, lengths=0.35, noise=0.02)
CAUSES = {
    "machine": [Job(ranks=8, slow={(2, 5): 2.0}), replace(LENGTHS, lengths=0.2, slow={(1, 3): 3.0})],
    "lengths": [
        LENGTHS,
        replace(LENGTHS, stages=4, ranks=4),
        replace(LENGTHS, chunks=2),
        replace(LENGTHS, last_stage=1.25),
    ],
    "stages": [Job(last_stage=1.6), replace(LENGTHS, lengths=0.12, last_stage=1.8)],
    "undetermined": [replace(LENGTHS, lengths=0.0, noise=0.3)],
}


@pytest.mark.parametrize("name, job", [(name, job) for name, jobs in CAUSES.items() for job in jobs])
def test_the_cause_of_a_slowdown_is_reported(name, job):
    found = analyse(operations_of(table(job)))
    assert found.cause.name == name, found
    if name == "lengths":
        assert found.correlation > 0.95 and found.M_L > 0.5 > found.M_W
    if name == "lengths" and job.last_stage > 1:
        assert found.M_S > 0.5, "it includes the lengths of its micro-batches"


def test_forward_and_backward_of_a_micro_batch_are_paired_by_number_or_by_order():
    rows = table(LENGTHS)
    by_number, by_order = (operations_of(each).pairs for each in (rows, rows.drop(columns="mb_id")))
    assert len(by_number) == 6 * 2 * 8 * 8 and (by_number == by_order).all()


def test_several_slow_workers_are_not_attributed_to_the_slowest():
    slow = {(stage, rank): 2.0 for stage in range(4) for rank in range(2)}
    found = analyse(operations_of(table(Job(ranks=8, slow=slow))))
    assert found.S > 1.3 and found.M_W < 0.5, "one of eight slow workers explains little"


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_tables_are_read_unchanged(tmp_path, suffix):
    rows, path = table(Job(slow={(1, 1): 2.0})), tmp_path / f"trace.{suffix}"
    rows.to_parquet(path) if suffix == "parquet" else rows.to_csv(path, index=False)
    assert pytest.approx(analyse(operations_of(rows)).S) == analyse(operations_of(read(path))).S


def test_redundant_columns_are_optional():
    rows = table(Job(slow={(1, 1): 2.0}))
    without = rows.drop(columns=["gmc", "mc", "mb_id", "rank", "seq_id"])
    assert analyse(operations_of(without)) == analyse(operations_of(rows))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda rows: rows.drop(columns="stage"), "missing columns stage; the file has step"),
        (lambda rows: rows.assign(optype="sleeping"), "optype sleeping is unknown; valid: forward-compute"),
        (lambda rows: rows.assign(duration=-1.0), "duration is not a valid number of seconds in 576 of 576 rows"),
        (lambda rows: rows[:0], "has no rows"),
    ],
)
def test_unreadable_tables_are_reported(tmp_path, change, message):
    change(table(Job(stages=2))).to_csv(tmp_path / "ops.csv", index=False)
    with pytest.raises(TraceError, match=message):
        read(tmp_path / "ops.csv")


def test_an_unmatched_transfer_is_reported():
    rows = table(Job(stages=2, ranks=1, steps=1))
    lost = rows.index[(rows.optype == "forward-send") & (rows.seq_id == 3)]
    with pytest.raises(TraceError, match="stage 0 of data rank 0 in step 0: 7 forward-send operations, but 8"):
        operations_of(rows.drop(lost))


def test_the_command_prints_and_writes_results(tmp_path, capsys):
    rows, out = table(Job(ranks=8, slow={(2, 5): 2.0})), tmp_path / "found.json"
    rows.to_csv(tmp_path / "ops.csv", index=False)
    trace = ["whatif", "--trace", str(tmp_path / "ops.csv")]
    assert main([*trace, "--out", str(out)]) == 0
    output = capsys.readouterr().out
    assert "2 steps on 32 workers (4 stages x 8 data ranks)" in output and "stage 2, data rank 5" in output
    assert "likely cause: machine. " in output
    found = json.loads(out.read_text())
    assert {"S", "waste", "M_W", "M_S", "M_L", "S_t", "workers", "cause"} <= found.keys()
    assert max(map(max, found["workers"])) == found["workers"][2][5] and len(found["workers"]) == 4
    assert main(["whatif", "--trace", str(tmp_path / "no.csv")]) == 2


def test_a_table_has_questions_and_a_timeline_like_a_run(tmp_path, capsys):
    rows, out, timeline = table(LENGTHS), tmp_path / "found.json", tmp_path / "timeline.json"
    rows.to_parquet(tmp_path / "ops.parquet")
    options = ["--without", "forward-pp-comm", "--without", "optimizer", "--timeline", str(timeline), "--out", str(out)]
    assert main(["whatif", "--trace", str(tmp_path / "ops.parquet"), *options]) == 0
    assert "likely cause: lengths. forward and backward durations" in capsys.readouterr().out
    answers = {each["question"]: each["change"] for each in json.loads(out.read_text())["questions"]}
    assert answers["all micro-batches equal"] < answers["last stage like the others"] < 0
    steps = rows.attrs["step_seconds"]
    assert answers["optimizer takes no time"] == pytest.approx(-OPTIMIZER * len(steps) / sum(steps))
    assert {"links 2x faster", "forward-pp-comm takes no time"} <= answers.keys()
    events = json.loads(timeline.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"stage 0, data rank 0", "stage 1, data rank 7", "stage 1, data rank 7, ideal"} <= set(names.values())
    lasts = {ideal: max(event["ts"] + event["dur"] for event in events if event["ph"] == "X"
                        and event["args"]["step"] == 0 and names[event["pid"]].endswith("ideal") == ideal)
             for ideal in (False, True)}  # fmt: skip
    assert lasts[False] == pytest.approx(1e6 * steps[0], rel=1e-3) and lasts[True] < 0.9 * lasts[False]
    assert main(["whatif", "--trace", str(tmp_path / "ops.parquet"), "--without", "decode"]) == 2
    assert "--without decode: unknown kind of work; valid: forward-compute" in capsys.readouterr().err


@pytest.mark.parametrize("width", [80, 40])
def test_names_of_workers_and_kinds_are_not_truncated(width):
    names = [f"stage {stage}, data rank {rank}" for stage, rank in ((12, 1023), (7, 8))]
    ranks, stages = 1024, 13
    workers = np.ones((stages, ranks))
    workers[12, 1023], workers[7, 8] = 2.0, 1.5
    S_t = {"embedding-grads-all-reduce": 1.2, "separate-grads-all-reduce": 1.1}
    cause = Cause("machine", "evidence", "advice")
    found = JobSlowdown(S=2, waste=0.5, seconds=2, ideal_seconds=1, launch_delay=0, S_t=S_t, workers=workers.tolist(),
                     M_W=1, M_S=0, M_L=0, cause=cause)  # fmt: skip
    job = SimpleNamespace(steps=1, stages=stages, ranks=ranks)
    question = Answer("policy=a_folder/with/a_long_name/and_a_file.py:a_policy_of_my_own", 1.0, 0.1, "simulation")
    console = Console(width=width, file=io.StringIO())
    for each in job_report(found, job, [question]):
        console.print(each, soft_wrap=isinstance(each, str))
    output = console.file.getvalue()
    assert "…" not in output
    if width == 80:
        assert all(name in output for name in (*names, *S_t))
