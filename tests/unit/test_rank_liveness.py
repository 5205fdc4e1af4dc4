"""Detection of hung trainer ranks from their pulses, and pulses of threads that sleep or compute."""

import asyncio
import threading
import time

import pytest

from rlfuse.config.schema import Config
from rlfuse.engines.trainer import rank_group
from rlfuse.engines.trainer.liveness import COLD_START_FACTOR, HangDetector, Progress, Pulse

LIMIT, TICK = 60.0, 7.5
ASLEEP = ('File "mine.py", line 3 in my_loss', 'File "rlfuse/engines/trainer/trainer_rank.py", line 9 in accumulate')
REDUCES = ('File "site-packages/torch/distributed/distributed_c10d.py", line 9 in all_reduce', *ASLEEP[1:])


def run_detector(*ranks, first=False, ticks=60):
    """Return (rank that hangs, seconds until detection, detector); a rank is a function from seconds to its pulse."""
    detector = HangDetector(LIMIT, first)
    for tick in range(1, ticks + 1):
        pulses = {i: pulse for i, rank in enumerate(ranks) if (pulse := rank(tick * TICK)) != "done"}
        hung = detector.check(TICK, pulses)
        if hung is not None:
            return hung, tick * TICK, detector
    return None, ticks * TICK, detector


def computing(joined=0):
    return lambda now: Pulse(int(now), "ended forward", ASLEEP, {"0": joined})


def idle(stack=ASLEEP, since=0.0, joined=0, **more):
    return lambda now: Pulse(int(min(now, since)), "began backward", stack, {"0": joined}, **more)


def silent_from(since):
    return lambda now: Pulse(int(now), "began forward", ASLEEP) if now < since else None


def done_at(rank, pulse_in):
    return lambda now: rank(now) if now < pulse_in else "done"


@pytest.mark.parametrize(
    "ranks, hung, earliest",
    [
        ([computing(), idle()], 1, LIMIT),
        ([computing(), silent_from(30.0)], 1, 30 + LIMIT - TICK),
        ([idle(REDUCES, joined=4), idle(since=30, joined=3)], 1, 30 + LIMIT),
        ([idle(REDUCES), silent_from(30.0)], 1, 30 + LIMIT - TICK),
        ([idle(ASLEEP, joined=4), idle(ASLEEP, since=90, joined=3)], 1, 90 + LIMIT),
        ([idle(REDUCES, joined=4), idle(REDUCES, since=60, joined=3)], 1, 60 + COLD_START_FACTOR * LIMIT),
        ([idle(REDUCES, since=90), idle(REDUCES, since=15)], 1, 90 + COLD_START_FACTOR * LIMIT),
        ([idle(REDUCES)], 0, COLD_START_FACTOR * LIMIT),
        ([done_at(computing(), 400.0), idle(REDUCES)], 1, 400.0),
        ([idle(REDUCES), computing()], None, None),
        ([idle(joined=4), computing(joined=3)], None, None),
        ([computing(), computing()], None, None),
    ],
    ids=[
        "asleep",
        "stopped",
        "waited for",
        "waited for, stopped",
        "fewer collectives",
        "all wait",
        "all wait equally",
        "alone",
        "peers done",
        "waits",
        "is ahead",
        "all work",
    ],
)
def test_the_hung_rank_is_reported_instead_of_ranks_that_wait_for_it(ranks, hung, earliest):
    found, after, detector = run_detector(*ranks)
    assert found == hung
    if hung is not None:
        assert earliest <= after <= earliest + 2 * TICK
        assert "(cluster.heartbeat_s=60)" in detector.describe_hang(hung)


def test_the_description_of_a_hang_has_the_last_activity_and_the_stack():
    _, _, detector = run_detector(idle(REDUCES, joined=1), idle())
    assert detector.describe_hang(1).startswith(
        "has made no progress for 60.0 s (cluster.heartbeat_s=60); last activity: began b"
    )
    assert 'Its stack, innermost call first:\n  File "mine.py", line 3 in my_loss\n' in detector.describe_hang(1)
    assert detector.is_waiting_for(0, [1]) and not detector.is_waiting_for(1, [0])
    _, _, detector = run_detector(silent_from(30.0))
    message = detector.describe_hang(0)
    assert message.startswith("has not answered for 60.0 s (cluster") and "Its stack at its last answer" in message
    _, _, detector = run_detector(lambda now: None)
    assert detector.describe_hang(0) == "has not answered for 60.0 s (cluster.heartbeat_s=60)"


def test_the_first_call_on_a_gpu_has_a_longer_limit_for_compilation():
    assert run_detector(idle(on_gpu=True), first=True)[1] >= COLD_START_FACTOR * LIMIT
    assert run_detector(idle(on_gpu=True))[1] < 2 * LIMIT and run_detector(idle(), first=True)[1] < 2 * LIMIT


async def test_the_first_call_of_each_rank_has_the_longer_limit(monkeypatch):
    first = []

    class RecordingDetector(HangDetector):
        def __init__(self, limit_s, begins):
            first.append(begins)
            super().__init__(limit_s, begins)

    monkeypatch.setattr(rank_group, "HangDetector", RecordingDetector)
    group = rank_group.RankGroup(Config(), [None, None])
    for ranks in ((0,), (1,), (0, 1), (0,)):
        calls = {rank: asyncio.ensure_future(asyncio.sleep(0.01)) for rank in ranks}
        await group._watched(asyncio.gather(*calls.values()), calls, "score")
    assert first == [True, True, False, False]


def test_a_paused_driver_does_not_count_the_pause_as_silence():
    detector = HangDetector(LIMIT)
    detector.check(TICK, {0: computing()(1), 1: computing()(1)})
    assert detector.check(10 * LIMIT, {0: None, 1: computing()(1)}) is None
    assert detector.check(TICK, {0: computing()(2), 1: computing()(2)}) is None
    assert detector.check(10 * LIMIT, {0: None, 1: computing()(2)}) is None
    assert detector.check(LIMIT / 2, {0: None, 1: computing()(3)}) == 0


class CallThread:
    """A thread that runs one function repeatedly, like the call thread of a rank."""

    def __init__(self):
        self.progress, self.work, self.started = Progress("cpu"), spins, threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        assert self.started.wait(60)

    def run(self):
        self.progress.set_call_thread()
        self.started.set()
        while self.work:
            self.work()

    def pulse_in(self, work):
        """Return the pulse once the thread runs `work`."""
        self.work, until = work, time.monotonic() + 60
        while not (pulse := self.progress.pulse()).stack[0].endswith(f"in {work.__name__}"):
            assert time.monotonic() < until
            time.sleep(0.01)
        return pulse

    def end(self):
        self.work = None
        self.thread.join(60)


def spins():
    sum(range(3_000_000))


def sleeps():
    time.sleep(2)


@pytest.mark.slow
def test_cpu_time_counts_as_activity_and_sleep_does_not():
    thread = CallThread()
    before, until = thread.pulse_in(spins), time.monotonic() + 60  # may still wait for a core
    while time.sleep(0.1) or thread.pulse_in(spins).activity <= before.activity:
        assert time.monotonic() < until
    before, until = thread.pulse_in(sleeps), time.monotonic() + 60  # may not be asleep yet
    while time.sleep(0.1) or (after := thread.pulse_in(sleeps)).activity != before.activity:
        before = after
        assert time.monotonic() < until
    thread.end()
    assert f'File "{__file__}", line ' in after.stack[0] and not after.is_waiting


@pytest.mark.slow
def test_on_gpus_layers_and_gradients_count_as_activity_and_cpu_time_does_not():
    torch = pytest.importorskip("torch")
    progress = Progress("cuda")
    progress.set_call_thread()
    layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
    model = torch.nn.ModuleDict({"layers": layers})
    progress.follow(model)
    begun = progress.pulse().activity
    spins()
    assert progress.pulse().activity == begun
    value = torch.ones(1, 2)
    for layer in layers:
        value = layer(value)
    assert progress.pulse().activity == begun + 3
    value.sum().backward()
    assert progress.pulse().activity == begun + 3 + 6
    progress.record_activity("ended forward")
    assert progress.pulse().activity == begun + 10 and progress.pulse().last.startswith("ended forward at ")
