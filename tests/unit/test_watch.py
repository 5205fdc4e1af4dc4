"""`rlfuse watch` on a run of another process: step lines, live view and final message."""

import io
import json
import socket
import threading
import time

import pytest
from rich.console import Console

from rlfuse.config.schema import Config
from rlfuse.events import Recorder
from rlfuse.observe.terminal import Terminal
from rlfuse.run_folder import status
from rlfuse.run_folder.run_lock import RunLock
from rlfuse.run_folder.status import Status
from rlfuse.tools import watch


def running(folder, **changes):
    fields = {"state": "running", "name": "p/n", "command": "", "commit": "", "sweep": "", "host": socket.gethostname()}
    fields |= {"pid": 1, "started": time.time()} | changes
    (folder / status.FILE).write_text(json.dumps(fields))
    return Status(**fields)


def rows(folder, *steps):
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "critic/score/mean": step / 10}) + "\n" for step in steps)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(watch, "REFRESH_S", 0.01)


@pytest.mark.parametrize("tty", [True, False])
def test_lines_and_view_until_the_end(tmp_path, quick, monkeypatch, tty):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    now = running(tmp_path)
    rows(tmp_path, 0, *range(1, 9))
    console = Console(file=io.StringIO(), force_terminal=tty, width=100)
    output = console.file.getvalue
    quiet = Console(file=io.StringIO())
    terminal = Terminal(Config(), 10, 8, Recorder("driver"), tmp_path, quiet)
    with terminal._recorder.span("step"):
        terminal._publish()
        watcher = threading.Thread(target=watch.watch, args=(tmp_path, now, console))
        watcher.start()
        wait_for(lambda: "step 8/10  reward 0.800" in output())
        assert "step 3/10" not in output(), "only the last few steps"
        if tty:
            wait_for(lambda: "training step" in output())
        rows(tmp_path, 9)
        wait_for(lambda: "step 9/10  reward 0.900" in output())
    terminal.close()
    running(tmp_path, state="failed", error="it broke")
    watcher.join(60)
    assert "p/n failed: it broke" in output() and not watcher.is_alive()


def wait_for(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_run_that_restarted_between_two_polls_is_read_again(tmp_path):
    rows(tmp_path, *range(9))
    reader, path = watch._Rows(tmp_path / "metrics.jsonl"), tmp_path / "metrics.jsonl"
    assert len([*reader.more()]) == 9
    path.write_text("".join(json.dumps({"step": step, "longer": "x" * step}) + "\n" for step in range(9)))
    assert [row["step"] for row in [*reader.more(), *reader.more()]] == [*range(9)]
    path.write_text("damaged\n" + path.read_text())
    reader._read = 0
    assert len([*reader.more()]) == 9 and [*reader.more()] == []


def test_a_silent_run_shows_its_last_update(tmp_path):
    now = running(tmp_path, host="elsewhere")
    Terminal(Config(), 10, 8, Recorder("driver"), tmp_path, Console(file=io.StringIO())).close()
    live = tmp_path / "live.json"
    assert watch._view(tmp_path, now).phase == "starting"
    live.write_text(json.dumps(json.loads(live.read_text()) | {"at": time.time() - 75}))
    assert watch._view(tmp_path, now).phase == "starting  ·  on elsewhere, last seen 1:15 ago"
    live.write_text("{")
    assert watch._view(tmp_path, now) is None


def test_a_finished_run_is_reported_at_once(tmp_path, capsys):
    running(tmp_path)
    lock = RunLock()
    lock.acquire(tmp_path)
    lock.release()
    watch.main([str(tmp_path)])
    assert "was killed: its process ended without an error" in capsys.readouterr().out
    running(tmp_path, state="finished")
    summary = {
        "steps": 3,
        "resumed_after": 2,
        "seconds": 9.6,
        "median_step_s": 1.52,
        "fusion": "serial",
        "label": "exact",
        "faults": {},
    }
    summary |= {"reward_first": 0.1, "reward_last": 0.2, "reward_window": 1, "val_name": "val-core/x/acc"}
    summary |= {"val_before": None, "val_after": 0.5}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "config.yaml").write_text(CONFIG)
    watch.main([str(tmp_path)])
    output = capsys.readouterr().out
    assert "1 step of 1.5 s (median) in 10 s, resumed after step 2, fusion=serial (exact)" in output
    assert "0.100 -> 0.200   (first and last step)" in output and "held out      0.500   (val-core/x/acc)" in output


CONFIG = "{trainer: {nnodes: 1, n_gpus_per_node: 1}, rollout: {tensor_model_parallel_size: 1}}"


def test_ctrl_c_closes_the_view_and_leaves_the_run_unchanged(tmp_path, monkeypatch, capsys):
    running(tmp_path)
    before = (tmp_path / status.FILE).read_bytes()
    monkeypatch.setattr(watch, "watch", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    watch.main([str(tmp_path)])
    assert "View closed; the run continues" in capsys.readouterr().out
    assert (tmp_path / status.FILE).read_bytes() == before
