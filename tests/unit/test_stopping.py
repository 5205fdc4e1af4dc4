"""Ctrl-C, SIGTERM and SIGHUP to a process that runs a job: checkpoints, messages and exit statuses."""

import asyncio
import os
import pty
import signal
import subprocess
import sys
from signal import SIGHUP, SIGINT, SIGTERM
from types import SimpleNamespace

import pytest
from test_journal import Writer

from rlfuse import stopping
from rlfuse.application import run_command
from rlfuse.cluster.child_processes import keep_hangup_from_children
from rlfuse.config.schema import Config
from rlfuse.errors import PREEMPTED, EngineError
from rlfuse.observe.run_log import RunLog
from rlfuse.observe.tracking import read_metrics
from rlfuse.run.checkpointing import Checkpointing
from rlfuse.run.offline.training import Training
from rlfuse.run_folder import checkpoints
from rlfuse.step.protocols import NoHealth
from rlfuse.stopping import ONCE_S, Stopped, Stopping


@pytest.fixture(autouse=True)
def no_signal_yet(monkeypatch):
    monkeypatch.setattr(stopping, "_last", None)


async def press(number, after=0.0):
    await asyncio.sleep(after)
    os.kill(os.getpid(), number)
    await asyncio.sleep(0.01)


async def run_with_signal(work, number=SIGTERM, step=3, grace_s=60.0):
    """Run `work` with a signal at its start; return the messages to the user."""
    messages = []
    listening = Stopping(grace_s, messages.append)
    listening.step = step

    async def begin():
        os.kill(os.getpid(), number)
        await work(listening)

    default = signal.signal(SIGINT, signal.default_int_handler)  # shells let background jobs ignore it
    before = [signal.getsignal(each) for each in (SIGINT, SIGTERM)]
    try:
        await listening.listen_during(begin())
    finally:
        assert [signal.getsignal(each) for each in (SIGINT, SIGTERM)] == before
        signal.signal(SIGINT, default)
        assert signal.signal(SIGHUP, signal.SIG_DFL) == (signal.SIG_IGN if number == SIGHUP else signal.SIG_DFL)
    return messages


async def forever(_):
    await asyncio.sleep(60)


@pytest.mark.parametrize("number", [SIGINT, SIGTERM, SIGHUP])
async def test_a_run_stops_after_a_step_that_ends_in_time(number):
    async def steps(listening):
        while not listening.is_requested:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        raise Stopped("left after step 3", listening.by)

    with pytest.raises(Stopped, match="left after step 3") as stopped:
        await run_with_signal(steps, number)
    assert stopped.value.by == number == stopping.stop_signal()


@pytest.mark.parametrize("number, words", [
    (SIGINT, "press Ctrl-C again"), (SIGTERM, "preemption_grace_s=60"), (SIGHUP, "preemption_grace_s=60"),
])  # fmt: skip
async def test_work_that_completes_after_a_signal_is_a_success(number, words):
    (message,) = await run_with_signal(lambda _: asyncio.sleep(0.01), number)
    assert "stopping with a checkpoint after step 3" in message and words in message


@pytest.mark.parametrize("number", [SIGINT, SIGTERM, SIGHUP])
@pytest.mark.parametrize("step, words", [(3, "its work is lost"), (None, "first step: nothing to save")])
async def test_work_that_does_not_end_in_time_is_cancelled(number, step, words):
    async def signal_again(_):
        if number == SIGINT:
            await press(SIGINT, ONCE_S + 0.05)
        await forever(_)

    with pytest.raises(Stopped, match=words) as stopped:
        await run_with_signal(signal_again, number, step, grace_s=0.01)
    assert stopped.value.by == number


async def test_a_signal_forwarded_by_a_wrapper_counts_once(monkeypatch):
    monkeypatch.setattr(stopping, "ONCE_S", 60.0)

    async def forwarded(_):
        await press(SIGINT)
        await asyncio.sleep(0.05)

    assert len(await run_with_signal(forwarded, SIGINT)) == 1


async def test_sigterm_after_ctrl_c_starts_the_grace_period_and_the_first_signal_is_reported():
    async def both(_):
        await press(SIGTERM)
        await press(SIGTERM)
        await forever(_)

    with pytest.raises(Stopped, match=r"not finished and saved within trainer\.preemption_grace_s=0\.05") as stopped:
        await run_with_signal(both, SIGINT, grace_s=0.05)
    assert stopped.value.by == SIGINT


@pytest.mark.slow
def test_work_that_ignores_cancellation_is_interrupted():
    async def ignores_cancellation(_):
        with pytest.raises(asyncio.CancelledError):
            await press(SIGINT, ONCE_S + 0.05)
        await press(SIGINT, ONCE_S + 0.05)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run_with_signal(ignores_cancellation, SIGINT))


@pytest.mark.parametrize("number", [SIGINT, SIGHUP])  # background jobs of scripts, nohup
async def test_an_ignored_signal_stays_ignored(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        await Stopping(1.0, print).listen_during(press(number))
        assert signal.getsignal(number) is signal.SIG_IGN
        if number == SIGHUP:
            keep_hangup_from_children()
            assert SIGHUP not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.signal(number, before)


IN_A_TERMINAL = """
import asyncio, signal, subprocess, sys, time
from rlfuse.cluster.child_processes import keep_hangup_from_children
from rlfuse.stopping import Stopped, Stopping

keep_hangup_from_children()
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

async def steps(listening):
    listening.step = 3
    print("under way", flush=True)
    await asyncio.wait({asyncio.ensure_future(announced.wait())}, timeout=120)
    assert time.monotonic() - began < 60, "only the signal wakes the loop"
    await asyncio.sleep(0.1)  # the step ends; its checkpoint is written by the children
    print("output to a closed terminal", flush=True)
    raise listening.stop_error(3)

def say(text):
    announced.set()
    print(text, flush=True)

began, announced, listening = time.monotonic(), asyncio.Event(), Stopping(60.0, say)
try:
    asyncio.run(listening.listen_during(steps(listening)))
except Stopped as end:
    with open(sys.argv[1], "w") as file:
        file.write(f"{end} {child.poll()}")
child.communicate(b"\\n")
"""


@pytest.mark.slow
def test_a_closed_terminal_stops_the_run_after_its_step_without_killing_children(tmp_path):
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, "-c", IN_A_TERMINAL, str(tmp_path / "result")])
    output = b""
    while b"under way\r\n" not in output:
        output += os.read(terminal, 1000)
    os.close(terminal)  # the kernel sends SIGHUP to the session leader and the foreground process group
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    message = "SIGHUP (the terminal was closed): stopped after step 3, which is saved."
    assert (tmp_path / "result").read_text() == f"{message} None"


@pytest.mark.parametrize("number", [SIGINT, SIGTERM, SIGHUP])
async def test_workers_ended_by_the_same_signal_are_no_failure(number):
    async def loses_a_worker(_):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(60))
            raise EngineError("trainer/1 died")

    with pytest.raises(Stopped, match="before step 3 was saved: trainer/1 died"):
        await run_with_signal(loses_a_worker, number)


@pytest.mark.parametrize("number, status", [(SIGTERM, 75), (SIGHUP, 75), (SIGINT, 130)])
def test_the_exit_status_depends_on_the_signal(number, status, capsys):
    def leave():
        raise Stopped("stopped after step 3, which is saved.", number)

    assert run_command(leave) == status
    assert capsys.readouterr().err == "stopped after step 3, which is saved.\n"


class Learner:
    """An offline task that receives Ctrl-C in its second step."""

    steps, held_out = 0, ()

    def __init__(self):
        self.trainer, self.synced_after = self, []

    async def sync_reference(self):
        self.synced_after.append(self.steps)

    async def learn(self, examples, lr_factor):
        self.steps += 1
        if self.steps == 2:
            os.kill(os.getpid(), SIGINT)
        await asyncio.sleep(0)
        return {"reward_model/loss": 0.5}


async def test_an_offline_task_is_saved_after_the_step_of_ctrl_c(tmp_path):
    config, learner = Config(), Learner()
    config.ref.sync_ref_model, config.ref.ref_model_sync_steps = True, 2
    config.trainer.logger = []
    log = RunLog(config, {}, tmp_path, total_steps=5, start=0)

    async def save(folder, weights):
        (folder / "weights").write_text("w")

    source = SimpleNamespace(epoch=0, next_batch=list)
    training = Training(
        config=config,
        task=learner,
        source=source,
        log=log,
        health=NoHealth(),
        checkpointing=Checkpointing(
            log, config, start=0, save=save, writer=Writer(), state=lambda _: {}, first_bytes=1
        ),
    )
    default = signal.signal(SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(Stopped, match="Ctrl-C: stopped after step 2, which is saved"):
            await log.stopping.listen_during(training.run(0))
    finally:
        signal.signal(SIGINT, default)
        log.close()
    assert [path.name for path in checkpoints.complete(tmp_path)] == ["global_step_2"]
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert learner.synced_after == [2]


INTO_A_PIPE = """
import asyncio, sys
from rlfuse.application import run_command
from rlfuse.stopping import Stopping

async def steps(listening):
    listening.step = 3
    while not listening.is_requested:
        print("under way", flush=True)
        await asyncio.sleep(0.01)
    raise listening.stop_error(3)

listening = Stopping(60.0, print)
sys.exit(run_command(lambda: asyncio.run(listening.listen_during(steps(listening)))))
"""


@pytest.mark.slow
def test_a_closed_output_pipe_stops_the_run_after_its_step():
    # The pipe is closed, for example, when a notebook kernel restarts.
    process = subprocess.Popen([sys.executable, "-c", INTO_A_PIPE], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"under way\n"
    process.stdout.close()
    assert process.wait(60) == PREEMPTED
