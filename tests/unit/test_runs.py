"""`rlfuse runs`: the list of runs, and removal of the leftovers of killed runs."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rlfuse.cluster import scratch
from rlfuse.errors import RunError
from rlfuse.observe.offline_summary import summarise_offline
from rlfuse.run_folder import run_lock, status
from rlfuse.run_folder.run_lock import RunLock
from rlfuse.tools import leftovers, listing

ROW = {"critic/score/mean": 0.5, "fusion/exact": 1.0, "fusion/staleness": 0.0}
MARK = "COMPLETE"


def make(folder: Path, state="finished", steps=3, host=None, **more) -> Path:
    """Write a run folder; `crashed` is a running one whose process ended."""
    folder.mkdir(parents=True)
    saved_state, host = "running" if state == "crashed" else state, host or socket.gethostname()
    times = {"started": time.time() - 100, "ended": time.time() - 40}
    found = status.Status(saved_state, "p/x", "", "", "", host, 1, **(times | {"total": 8} | more))
    status._write(folder, found)
    lock = RunLock()
    lock.acquire(folder)
    if state != "running":
        lock.release()
    elif host != socket.gethostname():
        mark_as_remote(folder)
    rows = [{"step": 0, "val-core/x/acc/mean@1": 0.25}, *({"step": n + 1, **ROW} for n in range(steps))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def mark_as_remote(folder: Path) -> None:
    """Make the lock look like that of a host that is not visible here."""
    (folder / run_lock.FILE).unlink()
    (folder / run_lock.FILE).write_text('{"boot": "another"}')


def write_leftovers(folder: Path) -> list[Path]:
    """Write leftovers and files to keep; return the paths that `rlfuse runs clean` has to remove."""
    for name in ("global_step_1", "global_step_2.partial", "global_step_4", "global_step_5.partial"):
        (folder / name / "actor").mkdir(parents=True)
        (folder / name / "actor" / "weights").write_bytes(b"x" * 5000)
    for name in ("global_step_1", "global_step_5.partial"):
        (folder / name / MARK).touch()
    for name in ("text_parts/model", "stacks/processes", "logs", "wandb"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").touch()
    (folder / "stacks" / "dump.txt").touch()
    (folder / ".summary.json.part").touch()
    found = ("global_step_2.partial", "global_step_4", "text_parts", "stacks/processes", ".summary.json.part")
    return sorted(folder / name for name in found)


def test_a_run_is_listed_with_its_metrics(tmp_path):
    path = make(tmp_path / "rlfuse" / "one", state="crashed", ended=None)
    (path / "global_step_2").mkdir()
    (path / "global_step_2" / "weights").write_bytes(b"x" * 3000)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "x')  # killed in the middle of a row
    (found,) = [listing.read(each, tmp_path) for each in listing.find(tmp_path)]
    assert (found.name, found.state, found.step, found.total) == ("rlfuse/one", "crashed", 3, 8)
    assert (found.reward, found.validation, found.label) == (0.5, 0.25, "exact")
    assert found.seconds == pytest.approx(100, abs=5) and found.checkpoints == 3000 and 300 < found.size < 3000
    assert found.problems == []
    assert [each.name for each in map(listing.read, listing.find(path))] == ["one"]


def test_a_finished_reward_model_is_listed_with_its_metrics(tmp_path):
    path = make(tmp_path / "one")
    (path / "metrics.jsonl").write_text('{"step": 3, "reward_model/acc": 0.75, "val-core/reward_model/acc": 0.5}\n')
    summarise_offline(path, "reward_model", 12.0)
    (found,) = [listing.read(each, tmp_path) for each in listing.find(tmp_path)]
    assert found.problems == [] and (found.state, found.reward, found.validation) == ("finished", 0.75, 0.5)
    (path / status.FILE).unlink()
    found = listing.read(path)
    assert found.problems == [] and (found.state, found.seconds) == ("finished", 12.0)


def test_one_mismatched_step_marks_the_run(tmp_path):
    path = make(tmp_path / "one")
    text = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text(text.replace("fusion/exact", "fusion/mismatched", 1))
    assert listing.read(path).label == "mismatched"


@pytest.mark.slow
def test_hundreds_of_long_runs_are_read_by_their_ends(tmp_path):
    long = make(tmp_path / "long")
    with (long / "metrics.jsonl").open("ab") as file:
        file.truncate(1 << 30)  # a sparse gigabyte that takes minutes to parse
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + json.dumps({"step": 7, **ROW}).encode() + b"\n")
    began = time.process_time()
    assert listing.read(long).step == 7
    assert time.process_time() - began < 20


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("metrics.jsonl", "[]\n", "is not a JSON object"),
        ("metrics.jsonl", '{"step": "x"}\n', "metrics.jsonl"),
        ("metrics.jsonl", "\0" * 50 + "\n", "Error"),
        ("metrics.jsonl", '{"step": 1, "critic/score/mean": "high"}\n', "high"),
        (status.FILE, "{", "status.json"),
        (status.FILE, '{"state": "running"}', "keys are missing"),
        (status.FILE, "[" * 100_000, "nested too deep"),
        ("summary.json", "{}", "seconds"),
    ],
)
def test_damaged_runs_are_reported_next_to_valid_ones(tmp_path, capsys, file, text, message):
    make(tmp_path / "well")
    (make(tmp_path / "ill") / file).write_text(text)
    listing.main([str(tmp_path)])
    *table, last = capsys.readouterr().out.splitlines()
    assert len(table) == 3 and f"{tmp_path}/ill: {file} can't be read" in last and message in last


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user")
def test_a_folder_without_read_permission_is_skipped():
    program = "import os, sys; from rlfuse.tools import listing; os.seteuid(65534); listing.main([sys.argv[1]])"
    with tempfile.TemporaryDirectory(dir="/tmp") as top:
        os.chmod(top, 0o755)
        for name, mode in (("closed", 0o700), ("open", 0o755)):
            (Path(top) / name).mkdir(mode)
            (Path(top) / name / "metrics.jsonl").write_text('{"step": 3}\n')
        result = subprocess.run([sys.executable, "-c", program, top], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "open" in result.stdout and "closed" not in result.stdout


def test_lists_are_filtered_and_sorted_and_plain_without_a_terminal(tmp_path, capsys):
    make(tmp_path / "p" / "second", steps=5)
    make(tmp_path / "p" / "first", state="crashed", steps=1)
    make(tmp_path / "far", state="running", host="elsewhere", ended=None)
    (tmp_path / ".trash").mkdir()
    make(tmp_path / ".trash" / "hidden")
    listing.main([str(tmp_path), "--sort", "step"])
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["run", "state", "step"] and [line.split()[0] for line in lines] == [
        "p/first", "far", "p/second"
    ]  # fmt: skip
    assert "running, last seen 0 s ago on elsewhere" in lines[1]
    listing.main([str(tmp_path), "--state", "crashed", "--state", "failed", "--json"])
    (only,) = json.loads(capsys.readouterr().out)
    assert (only["name"], only["step"], only["state"]) == ("p/first", 1, "crashed")
    listing.main([str(tmp_path), "--state", "stopped"])
    assert "no run of stopped" in capsys.readouterr().out
    with pytest.raises(RunError, match="nowhere: no such folder"):
        listing.main([str(tmp_path / "nowhere")])


def test_only_leftovers_of_killed_runs_are_removed(tmp_path):
    killed, alive = make(tmp_path / "killed", state="crashed"), make(tmp_path / "alive", state="running")
    remote, damaged = make(tmp_path / "far", state="running", host="elsewhere"), make(tmp_path / "ill")
    for each in (alive, remote, damaged):
        write_leftovers(each)
    (damaged / status.FILE).write_text("{")
    assert not any(list(leftovers.leftovers_of_run(each)) for each in (alive, remote, damaged))
    leftover_paths, before = write_leftovers(killed), {*killed.rglob("*")}
    assert sorted(each.path for each in leftovers.leftovers_of_run(killed)) == leftover_paths
    assert all(leftovers.remove(path) for path in leftover_paths)
    removed = before - {*killed.rglob("*")}
    assert {path for path in removed if path.parent not in removed} == {*leftover_paths}
    assert (killed / "global_step_1" / MARK).exists() and (killed / "logs" / "file").exists()


def test_a_run_with_recent_writes_may_be_alive_on_another_host(tmp_path):
    killed = make(tmp_path / "killed", state="crashed")
    write_leftovers(killed)
    mark_as_remote(killed)
    assert not [*leftovers.leftovers_of_run(killed)]
    for file in killed.iterdir():
        os.utime(file, (time.time() - 61,) * 2)
    assert len([*leftovers.leftovers_of_run(killed)]) == 5


def test_nothing_is_removed_without_yes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(leftovers, "leftovers_of_machine", list)  # leave the machine that runs the tests unchanged
    leftover_paths = write_leftovers(make(tmp_path / "killed", state="crashed"))
    listing.main(["clean", str(tmp_path)])
    assert "5 leftovers, 10 KiB; --yes removes them" in capsys.readouterr().out
    assert all(path.exists() for path in leftover_paths)
    listing.main(["clean", str(tmp_path), "--yes"])
    assert "5 leftovers, 10 KiB removed" in capsys.readouterr().out and not any(
        path.exists() for path in leftover_paths
    )
    listing.main(["clean", str(tmp_path)])
    assert "no leftovers" in capsys.readouterr().out


def test_shared_memory_is_removed_with_the_folder_that_records_it_not_by_name(tmp_path, capsys, monkeypatch):
    memory, temporary = tmp_path / "shm", tmp_path / "tmp"
    memory.mkdir(), temporary.mkdir()
    monkeypatch.setattr(scratch, "SHARED_MEMORY", memory)
    monkeypatch.setattr(scratch, "temporary_root", lambda: temporary)
    monkeypatch.setattr("rlfuse.engines.deepspeed.deepspeed_ops.stale_locks", list)  # of this machine
    names = [f"{name}{number}" for name in ("sem.mp-", "psm_", "vllm_dist_") for number in range(20)]
    for name in names:
        (memory / name).write_bytes(b"x" * 1024)
        os.utime(memory / name, (0, 0))
    listing.main(["clean", str(tmp_path), "--yes"])  # no process maps them
    assert "no leftovers" in capsys.readouterr().out
    folder, held = scratch.make(scratch.RUN, temporary)
    scratch.attach(folder, [memory / "psm_3", memory / "sem.mp-4"])
    listing.main(["clean", str(tmp_path), "--yes"])
    assert "no leftovers" in capsys.readouterr().out  # the driver of the run is alive
    held.close()
    listing.main(["clean", str(tmp_path), "--yes"])
    assert f"2 KiB  {folder}  (its driver has ended)" in capsys.readouterr().out
    assert {path.name for path in memory.iterdir()} == {*names} - {"psm_3", "sem.mp-4"}


def test_a_run_that_starts_during_clean_loses_nothing(tmp_path, capsys, monkeypatch):
    path, lock = make(tmp_path / "killed", state="crashed"), RunLock()
    leftover_paths = write_leftovers(path)
    monkeypatch.setattr(leftovers, "leftovers_of_machine", lambda: [] if lock.acquire(path) else None)
    listing.main(["clean", str(tmp_path), "--yes"])
    assert "no leftovers" in capsys.readouterr().out and all(each.exists() for each in leftover_paths)
    lock.release()
