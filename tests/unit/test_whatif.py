"""What uneven workers cost: replay, slowdowns and their causes, on jobs whose truth is known."""

import json

import numpy as np
import pytest
from training_traces import Job, table

from rlfuse.cli import main
from rlfuse.whatif.replay import Replay
from rlfuse.whatif.slowdown import analyse
from rlfuse.whatif.study_trace import TraceError, operations_of, read

JOBS = [Job(), Job(stages=1), Job(ranks=1), Job(stages=2, micro_batches=1), Job(noise=0.2)]
CHUNKED = [Job(chunks=2, noise=0.1), Job(stages=2, chunks=3, micro_batches=4, ranks=2)]


@pytest.mark.parametrize("job", JOBS + CHUNKED)
def test_an_unmodified_replay_takes_what_the_steps_took(job):
    rows = table(job)
    operations = operations_of(rows)
    seconds = Replay(operations).step_seconds(operations.own_seconds())
    np.testing.assert_allclose(seconds, rows.attrs["step_seconds"], rtol=1e-9)


@pytest.mark.slow
def test_a_slow_worker_is_found_among_interleaved_chunks():
    whole, slow = Job(ranks=8, chunks=2), Job(ranks=8, chunks=2, slow={(1, 6): 2.0})
    truth = np.mean(table(slow).attrs["step_seconds"]) / np.mean(table(whole).attrs["step_seconds"])
    found = analyse(operations_of(table(slow)))
    workers = np.array(found.workers)
    assert pytest.approx(truth, rel=0.05) == found.S and found.M_W > 0.9
    assert np.unravel_index(workers.argmax(), workers.shape) == (1, 6)


def test_delays_of_the_host_are_told_apart():
    found = analyse(operations_of(table(Job(delay=0.05))))
    assert pytest.approx(1.0, abs=1e-9) == found.S and 0.01 < found.launch_delay < 0.1
    assert (found.S_t, found.workers, found.M_W, found.M_S) == (None, None, None, None)


@pytest.mark.parametrize("slower", [1.16, 1.4, 2.03, 3.0])
@pytest.mark.parametrize("worker", [(0, 0), (2, 5), (3, 7)])
def test_a_slow_worker_is_found_and_its_cost_is_right(slower, worker):
    whole = Job(ranks=8, noise=0.02)
    slow = Job(ranks=8, noise=0.02, slow={worker: slower})
    truth = np.mean(table(slow).attrs["step_seconds"]) / np.mean(table(whole).attrs["step_seconds"])
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


def test_more_than_one_slow_worker_need_not_be_the_slowest():
    slow = {(stage, rank): 2.0 for stage in range(4) for rank in range(2)}
    found = analyse(operations_of(table(Job(ranks=8, slow=slow))))
    assert found.S > 1.3 and found.M_W < 0.5, "one of eight slow ones explains little"


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_tables_are_read_as_they_were_written(tmp_path, suffix):
    rows, path = table(Job(slow={(1, 1): 2.0})), tmp_path / f"trace.{suffix}"
    rows.to_parquet(path) if suffix == "parquet" else rows.to_csv(path, index=False)
    assert pytest.approx(analyse(operations_of(rows)).S) == analyse(operations_of(read(path))).S


def test_columns_that_tell_nothing_new_may_be_absent():
    rows = table(Job(slow={(1, 1): 2.0}))
    without = rows.drop(columns=["gmc", "mc", "mb_id", "rank", "seq_id"])
    assert analyse(operations_of(without)) == analyse(operations_of(rows))


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda rows: rows.drop(columns="stage"), "no column stage; it has step"),
        (lambda rows: rows.assign(optype="sleeping"), "optype sleeping is not known; valid: forward-compute"),
        (lambda rows: rows.assign(duration=-1.0), "duration is no number of seconds in 576 of 576 rows"),
        (lambda rows: rows[:0], "has no rows"),
    ],
)
def test_what_can_not_be_read_is_told(tmp_path, change, says):
    change(table(Job(stages=2))).to_csv(tmp_path / "ops.csv", index=False)
    with pytest.raises(TraceError, match=says):
        read(tmp_path / "ops.csv")


def test_a_transfer_without_its_partner_is_told():
    rows = table(Job(stages=2, ranks=1, steps=1))
    lost = rows.index[(rows.optype == "forward-send") & (rows.seq_id == 3)]
    with pytest.raises(TraceError, match="stage 0 of data rank 0 in step 0: 7 forward-send for 8 computations"):
        operations_of(rows.drop(lost))


def test_the_command_tells_and_writes_what_it_found(tmp_path, capsys):
    rows, out = table(Job(ranks=8, slow={(2, 5): 2.0})), tmp_path / "found.json"
    rows.to_csv(tmp_path / "ops.csv", index=False)
    (tmp_path / "meta.yaml").write_text("dp_size: 8\npp_size: 4\ntp_size: 2\nworld_size: 64\n")
    trace = ["whatif", "--trace", str(tmp_path / "ops.csv")]
    assert main([*trace, "--meta", str(tmp_path / "meta.yaml"), "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "2 steps on 32 workers (4 stages x 8 data ranks)" in told and "stage 2, data rank 5" in told
    found = json.loads(out.read_text())
    assert {"S", "waste", "M_W", "M_S", "S_t", "workers"} <= found.keys()
    assert max(map(max, found["workers"])) == found["workers"][2][5] and len(found["workers"]) == 4
    (tmp_path / "meta.yaml").write_text("dp_size: 16\n")
    assert main([*trace, "--meta", str(tmp_path / "meta.yaml")]) == 2
    assert "dp_size=16, and the table has 8 ranks; is it of another job?" in capsys.readouterr().err
    assert main(["whatif", "--trace", str(tmp_path / "no.csv")]) == 2
