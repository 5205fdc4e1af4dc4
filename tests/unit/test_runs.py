"""Lists of runs, and what killed ones left, beside runs that live."""

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
    """A run's folder; crashed: running, by a process that is gone."""
    folder.mkdir(parents=True)
    said, host = "running" if state == "crashed" else state, host or socket.gethostname()
    times = {"started": time.time() - 100, "ended": time.time() - 40}
    found = status.Status(said, "p/x", "", "", "", host, 1, **(times | {"total": 8} | more))
    status._write(folder, found)
    lock = RunLock()
    lock.acquire(folder)
    if state != "running":
        lock.release()
    elif host != socket.gethostname():
        written_elsewhere(folder)
    rows = [{"step": 0, "val-core/x/acc/mean@1": 0.25}, *({"step": n + 1, **ROW} for n in range(steps))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def written_elsewhere(folder: Path) -> None:
    """Have the lock look like that of another kernel, which can't be seen from here."""
    (folder / run_lock.FILE).unlink()
    (folder / run_lock.FILE).write_text('{"boot": "another"}')


def left_by_a_kill(folder: Path) -> list[Path]:
    """What `rlfuse runs clean` is to remove, beside what it is to leave."""
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


def test_a_run_has_its_figures(tmp_path):
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


def test_a_finished_reward_model_has_its_figures(tmp_path):
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
        file.truncate(1 << 30)  # a gigabyte that takes no room, and minutes to parse
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + json.dumps({"step": 7, **ROW}).encode() + b"\n")
    began = time.process_time()
    assert listing.read(long).step == 7
    assert time.process_time() - began < 20


@pytest.mark.parametrize(
    ("file", "text", "told"),
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
def test_what_is_damaged_is_told_beside_what_is_not(tmp_path, capsys, file, text, told):
    make(tmp_path / "well")
    (make(tmp_path / "ill") / file).write_text(text)
    listing.main([str(tmp_path)])
    *table, last = capsys.readouterr().out.splitlines()
    assert len(table) == 3 and f"{tmp_path}/ill: {file} can't be read" in last and told in last


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="takes the part of another user")
def test_a_folder_that_is_closed_to_the_user_is_passed_over():
    program = "import os, sys; from rlfuse.tools import listing; os.seteuid(65534); listing.main([sys.argv[1]])"
    with tempfile.TemporaryDirectory(dir="/tmp") as top:
        os.chmod(top, 0o755)
        for name, mode in (("closed", 0o700), ("open", 0o755)):
            (Path(top) / name).mkdir(mode)
            (Path(top) / name / "metrics.jsonl").write_text('{"step": 3}\n')
        told = subprocess.run([sys.executable, "-c", program, top], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert "open" in told.stdout and "closed" not in told.stdout


def test_lists_are_filtered_sorted_and_plain_where_nobody_looks(tmp_path, capsys):
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


def test_only_what_nobody_needs_of_a_killed_run_goes(tmp_path):
    killed, alive = make(tmp_path / "killed", state="crashed"), make(tmp_path / "alive", state="running")
    far, ill = make(tmp_path / "far", state="running", host="elsewhere"), make(tmp_path / "ill")
    for each in (alive, far, ill):
        left_by_a_kill(each)
    (ill / status.FILE).write_text("{")
    assert not any(list(leftovers.leftovers_of_run(each)) for each in (alive, far, ill))
    wanted, before = left_by_a_kill(killed), {*killed.rglob("*")}
    assert sorted(each.path for each in leftovers.leftovers_of_run(killed)) == wanted
    assert all(leftovers.remove(path) for path in wanted)
    gone = before - {*killed.rglob("*")}
    assert {path for path in gone if path.parent not in gone} == {*wanted}
    assert (killed / "global_step_1" / MARK).exists() and (killed / "logs" / "file").exists()


def test_a_run_that_was_heard_of_just_now_may_live_under_another_kernel(tmp_path):
    killed = make(tmp_path / "killed", state="crashed")
    left_by_a_kill(killed)
    written_elsewhere(killed)
    assert not [*leftovers.leftovers_of_run(killed)]
    for file in killed.iterdir():
        os.utime(file, (time.time() - 61,) * 2)
    assert len([*leftovers.leftovers_of_run(killed)]) == 5


def test_nothing_is_removed_without_yes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(leftovers, "leftovers_of_machine", list)  # the tests' own machine stays as it is
    wanted = left_by_a_kill(make(tmp_path / "killed", state="crashed"))
    listing.main(["clean", str(tmp_path)])
    assert "5 leftovers, 10 KiB; --yes removes them" in capsys.readouterr().out
    assert all(path.exists() for path in wanted)
    listing.main(["clean", str(tmp_path), "--yes"])
    assert "5 leftovers, 10 KiB removed" in capsys.readouterr().out and not any(path.exists() for path in wanted)
    listing.main(["clean", str(tmp_path)])
    assert "no leftovers" in capsys.readouterr().out


def test_shared_memory_is_removed_with_the_folder_that_records_it_and_never_by_its_name(tmp_path, capsys, monkeypatch):
    memory, temporary = tmp_path / "shm", tmp_path / "tmp"
    memory.mkdir(), temporary.mkdir()
    monkeypatch.setattr(scratch, "SHARED_MEMORY", memory)
    monkeypatch.setattr(scratch, "temporary_root", lambda: temporary)
    monkeypatch.setattr("rlfuse.engines.deepspeed.deepspeed_ops.stale_locks", list)  # of the tests' own machine
    names = [f"{name}{number}" for name in ("sem.mp-", "psm_", "vllm_dist_") for number in range(20)]
    for name in names:
        (memory / name).write_bytes(b"x" * 1024)
        os.utime(memory / name, (0, 0))
    listing.main(["clean", str(tmp_path), "--yes"])  # no process has them mapped
    assert "no leftovers" in capsys.readouterr().out
    folder, held = scratch.make(scratch.RUN, temporary)
    scratch.attach(folder, [memory / "psm_3", memory / "sem.mp-4"])
    listing.main(["clean", str(tmp_path), "--yes"])
    assert "no leftovers" in capsys.readouterr().out  # the run's driver lives
    held.close()
    listing.main(["clean", str(tmp_path), "--yes"])
    assert f"2 KiB  {folder}  (its driver has ended)" in capsys.readouterr().out
    assert {path.name for path in memory.iterdir()} == {*names} - {"psm_3", "sem.mp-4"}


def test_a_run_that_starts_meanwhile_loses_nothing(tmp_path, capsys, monkeypatch):
    path, lock = make(tmp_path / "killed", state="crashed"), RunLock()
    wanted = left_by_a_kill(path)
    monkeypatch.setattr(leftovers, "leftovers_of_machine", lambda: [] if lock.acquire(path) else None)
    listing.main(["clean", str(tmp_path), "--yes"])
    assert "no leftovers" in capsys.readouterr().out and all(each.exists() for each in wanted)
    lock.release()
