"""Logs of the processes of a run, and their use in messages about dead processes."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError

from rlfuse.cluster import host_memory, process_logs, tracebacks, watchdog
from rlfuse.cluster.remote import cause_of_death
from rlfuse.config.schema import Config
from rlfuse.engines.vllm import engine_death
from rlfuse.errors import EngineFailed, EngineLost
from rlfuse.events import Recorder
from rlfuse.run.job import open_job


@pytest.fixture
def logs(tmp_path):
    process_logs.begin(tmp_path / "logs")
    yield tmp_path / "logs"
    process_logs.end()


def run(code: str) -> int:
    return subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode


WRITES = """
import os, subprocess, sys
from rlfuse.cluster import process_logs
process_logs.redirect_output("rollout/0")
print("from Python", flush=True)
os.write(2, b"from native code\\n")
subprocess.run([sys.executable, "-c", "print('from a child')"])
print(os.getpid(), file=open(os.environ["PID"], "w"))
"""


@pytest.mark.slow
def test_output_of_a_process_and_its_children_is_logged_across_restarts(logs, tmp_path, monkeypatch):
    monkeypatch.setenv("PID", str(tmp_path / "pid"))
    pids = []
    for _ in range(2):
        assert run(WRITES) == 0
        pids.append((tmp_path / "pid").read_text().strip())
    lines = (logs / "rollout-0.log").read_text().splitlines()
    assert [line for line in lines if not line.startswith("== ")] == [
        "from Python",
        "from native code",
        "from a child",
    ] * 2
    assert [line.split(" on ")[0] for line in lines[::4]] == [f"== rollout/0: process {pid}" for pid in pids]
    assert process_logs.last_output("rollout/0", pids[1]).split() == [
        "from",
        "Python",
        "from",
        "native",
        "code",
        "from",
        "a",
        "child",
    ]
    assert process_logs.last_output("rollout/0", "1") is None and process_logs.last_output("trainer/0", pids[1]) is None
    assert process_logs.log_hint("rollout/0") == f"logs: {logs} (rollout-0.log has the error)"
    assert process_logs.log_hint("trainer/0") == f"logs: {logs}"


def test_failed_run_reports_the_path_of_its_logs(tmp_path, capsys):
    config = Config()
    config.model.path, config.trainer.default_local_dir, config.trainer.logger = "somewhere", str(tmp_path), ["console"]
    job = open_job(config)

    async def fail():
        process_logs.append("trainer/0", "words to http://me:secret@host")
        raise ValueError("a defect")

    with pytest.raises(ValueError, match="a defect"):
        job.run_until_done(fail(), job.begin(8))
    assert capsys.readouterr().out.splitlines()[-1] == f"logs: {job.folder}/logs"
    assert (job.folder / "logs" / "trainer-0.log").read_text() == "words to http://***@host\n"


def test_evaluation_keeps_logs_only_on_failure(tmp_path):
    for failing in (False, True):
        with suppress(ValueError), process_logs.logs_kept_on_failure(tmp_path / "answers.logs"):
            process_logs.append("rollout/0", "words")
            if failing:
                raise ValueError
        assert (tmp_path / "answers.logs" / "rollout-0.log").exists() == failing and process_logs.folder() is None


def test_log_keeps_its_newest_bytes_and_writers_continue_at_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(process_logs, "MAX_BYTES", 1000)
    monkeypatch.setattr(process_logs, "KEPT_BYTES", 500)
    path, began = tmp_path / "reward-0.log", b"== reward/0: process 7 on here, now\n"
    with path.open("ab", buffering=0) as writer:
        writer.write(began)
        for number in range(100):
            writer.write(b"line %d of many\n" % number)
        process_logs.cut(path, began)
        writer.write(b"the last\n")
    first, notice, *rest = path.read_text().splitlines()
    assert (first, notice) == (began.decode().strip(), "(earlier output was removed)")
    assert rest[-2:] == ["line 99 of many", "the last"] and rest[0].startswith("line ") and path.stat().st_size < 600
    process_logs.cut(path, began)  # no-op, as it is small enough
    assert len(path.read_text().splitlines()) == len(rest) + 2
    path.write_bytes(b"7% done\r" * 200)  # progress bars have no newline
    process_logs.cut(path, began)
    assert path.read_bytes().endswith(b"7% done\r") and path.stat().st_size > 500


ENDED = (
    "The actor died unexpectedly before finishing this task.\n\tpid: {pid}\n\tip: 127.0.0.1\nThe actor is dead because "
    "its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a "
    "connection error code 2. End of file. Some common causes include: (1) the process was killed by the OOM killer"
)
DIES = """
import faulthandler, os, signal, sys
from rlfuse.cluster import watchdog
from rlfuse.events import Recorder
recorder = Recorder("trainer/1")
watchdog.register("trainer/1", recorder)
faulthandler.enable()
with recorder.span("backward"):
    open(os.environ["PID"], "w").write(str(os.getpid()))
    os.kill(os.getpid(), signal.{name})
"""


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "SIGKILL",
            "killed by signal 9 (SIGKILL); the sender is unknown. "
            "Only that, or os._exit, ends a process without a message.",
        ),
        ("SIGSEGV", "it crashed: Fatal Python error: Segmentation fault."),
    ],
)
def test_death_is_reported_with_its_cause_without_guessing(name, why, tmp_path, monkeypatch):
    monkeypatch.setenv("PID", str(tmp_path / "pid"))
    with watchdog.watching(tmp_path, Recorder("driver"), print):
        assert run(DIES.format(name=name)) < 0
        error = ActorDiedError()
        monkeypatch.setattr(ActorDiedError, "__str__", lambda _: ENDED.format(pid=(tmp_path / "pid").read_text()))
        message = cause_of_death(error, "trainer/1")
    lines = message.splitlines()
    assert lines[0].startswith(f"{why} Its last event: began backward with ")
    assert " MiB in memory, " in lines[0] and "Free memory now: " in lines[0] and "out of memory" not in lines[0]
    assert lines[1:] == [f"logs: {tmp_path}/logs (trainer-1.log has the error)"]


@pytest.mark.parametrize("grouped", [True, False])
def test_out_of_memory_is_only_reported_if_the_kills_of_the_control_group_rose(grouped, tmp_path, monkeypatch):
    group, host = tmp_path / "memory.events", tmp_path / "vmstat"
    monkeypatch.setattr(host_memory, "_groups", lambda: [tmp_path] if grouped else [])
    monkeypatch.setattr(host_memory, "VMSTAT", host)

    def write_counts(group_kills, host_kills):
        group.write_text(f"low 0\noom_kill {group_kills}\n")
        host.write_text(f"pgfault 9\noom_kill {host_kills}\n")

    write_counts(3, 10)
    monkeypatch.setattr(host_memory, "AT_START", host_memory._kills())
    assert host_memory.oom_kills() == ""
    write_counts(3, 11)  # may be of another job
    message = engine_death.describe_kill(9)
    assert " The kernel killed a process of this host for lack" in message and "it is out of memory" not in message
    write_counts(5, 13)
    message = engine_death.describe_kill(9)
    assert ("killer has ended 2 processes since the run began: it is out of memory" in message) == grouped
    assert ("killed 3 processes of this host" in message) != grouped


def test_control_groups_v1_and_v2_are_read_from_the_innermost(tmp_path, monkeypatch):
    membership = tmp_path / "cgroup"
    membership.write_text("9:name=systemd:/x\n4:memory:/jobs/a\n0::/slice/b\n")
    for folder, files in {
        "memory/jobs": {"memory.limit_in_bytes": 4 << 30, "memory.usage_in_bytes": 1 << 30},
        "memory/jobs/a": {"memory.limit_in_bytes": (1 << 63) - 4096, "memory.usage_in_bytes": 0},
        "slice": {"memory.max": 2 << 30, "memory.current": 1 << 30, "memory.events": "low 0\noom_kill 3"},
        "slice/b": {"memory.max": "max", "memory.current": 5},
    }.items():
        (tmp_path / folder).mkdir(parents=True)
        for name, value in files.items():
            (tmp_path / folder / name).write_text(f"{value}\n")
    groups = [*host_memory._groups(tmp_path, membership)]
    assert [group.name for group in groups[:2]] == ["a", "jobs"] and tmp_path / "slice" in groups
    monkeypatch.setattr(host_memory, "_groups", lambda: groups)
    assert host_memory._limits() == [(2 << 30, 1 << 30)] and host_memory._kills()[0] == 3


# Engines -------------------------------------------------------------------------------------------------------------

UNSUPPORTED = """\
(EngineCore pid=71) ERROR 11-23 03:40:47 [core.py:1100] EngineCore encountered a fatal error.
(EngineCore pid=71) ERROR 11-23 03:40:47 [core.py:1100] Traceback (most recent call last):
(EngineCore pid=71) ERROR 11-23 03:40:47 [core.py:1100]   File "/v/site-packages/vllm/v1/engine/core.py", line 9, in run
(EngineCore pid=71) ERROR 11-23 03:40:47 [core.py:1100]     self.step()
(EngineCore pid=71) ERROR 11-23 03:40:47 [core.py:1100]   File "/v/site-packages/vllm/cpu_attn.py", line 400, in forward
(EngineCore pid=71) ERROR 11-23 03:40:47 [core.py:1100]     ops.cpu_attention(query)
(EngineCore pid=71) ERROR 11-23 03:40:47 [core.py:1100] RuntimeError: Unsupported CPU attention configuration: 16
ERROR 11-23 03:40:47 [async_llm.py:779] AsyncLLM output_handler failed.
"""
ABOVE = """\
(Worker pid=72) Traceback (most recent call last):
(Worker pid=72)   File "/v/site-packages/vllm/core.py", line 2, in wait
(Worker pid=72) RuntimeError: Worker failed with error 'x', please check the stack trace above for the root cause
"""


def died(tmp_path, text, status):
    log = tmp_path / "stderr"
    log.write_text("RuntimeError: of an earlier engine\n")
    errors = engine_death.ErrorOutput(log)
    with log.open("a") as file:
        file.write(text)
    error = engine_death.death_error("rollout/0", errors, [SimpleNamespace(exitcode=status)])
    return type(error), str(error)


def test_engine_exceptions_are_reported_with_frames_and_kills_with_the_signal(tmp_path):
    assert died(tmp_path, UNSUPPORTED + ABOVE, 1) == (
        EngineFailed,
        """\
rollout/0: vLLM's engine process failed with an exception.
  File "/v/site-packages/vllm/v1/engine/core.py", line 9, in run
    self.step()
  File "/v/site-packages/vllm/cpu_attn.py", line 400, in forward
    ops.cpu_attention(query)
RuntimeError: Unsupported CPU attention configuration: 16""",
    )
    assert "failed with an exception" in died(tmp_path, UNSUPPORTED, -signal.SIGTERM)[1], (
        "vLLM ends the other processes"
    )
    kind, message = died(tmp_path, "", -signal.SIGKILL)
    start = (
        "rollout/0: vLLM's engine process was killed by signal 9 (SIGKILL); the sender is unknown. Free memory now: "
    )
    assert kind is EngineLost and message.startswith(start) and "out of memory" not in message
    killed = (
        "ERROR [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down."
    )
    kind, message = died(tmp_path, f"{killed}\n{UNSUPPORTED}", 1)
    assert kind is EngineLost and message.startswith(start), "the worker with the model was killed"
    kind, message = died(tmp_path, "", -signal.SIGSEGV)
    assert kind is EngineFailed and "engine process crashed with signal 11 (SIGSEGV). Free memory now: " in message
    crash = "terminate called after throwing an instance of 'std::bad_alloc'\nFatal Python error: Aborted\n"
    kind, message = died(tmp_path, UNSUPPORTED + crash, -signal.SIGABRT)
    start = "rollout/0: vLLM's engine process crashed with signal 6 (SIGABRT). It is out of memory. Lower rollout."
    assert kind is EngineFailed and message.startswith(start) and message.endswith("Fatal Python error: Aborted")
    kind, message = died(tmp_path, "torch.OutOfMemoryError: CUDA out of memory. Tried\n", 1)
    assert kind is EngineFailed and "with an exception. It is out of memory. Lower rollout.max_num_seqs" in message


IGNORES = """
import ctypes, os, signal, subprocess, sys, threading
from rlfuse.cluster.child_processes import restore_child_signals
ctypes.CDLL(None).signal(int(signal.SIGCHLD), ctypes.c_void_p(1))  # as Ray does
child = ["-c", "import os; os.kill(os.getpid(), 9)"]
before = subprocess.run([sys.executable, *child]).returncode
thread = threading.Thread(target=restore_child_signals)
thread.start()
thread.join()
sys.exit((before, subprocess.run([sys.executable, *child]).returncode) != (0, -9))
"""


def test_exit_status_of_children_is_available_in_all_threads_of_ray_processes():
    assert run(IGNORES) == 0


def test_shortened_traceback_keeps_user_code_and_the_failing_frame():
    frames = [f'  File "/home/me/a.py", line {n}, in f{n}\n    call()\n' for n in range(9)]
    text = f"Traceback (most recent call last):\n{''.join(frames)}ValueError: one\ntwo\n\nThe above exception was"
    (found,) = tracebacks.found_in(text)
    assert found.error == "ValueError: one\ntwo" and len(found.frames) == 9 and len(found.own) == tracebacks.MAX_FRAMES
    assert [*tracebacks.found_in("RuntimeError: without frames")] == []
    assert os.linesep not in found.own[0].partition("\n")[0]
