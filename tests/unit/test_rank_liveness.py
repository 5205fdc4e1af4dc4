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


def scene(*ranks, first=False, ticks=60):
    """(who hangs, after how many seconds, the judge). Each rank: a function of the seconds that gives its pulse."""
    judge = HangDetector(LIMIT, first)
    for tick in range(1, ticks + 1):
        pulses = {i: pulse for i, rank in enumerate(ranks) if (pulse := rank(tick * TICK)) != "done"}
        hung = judge.check(TICK, pulses)
        if hung is not None:
            return hung, tick * TICK, judge
    return None, ticks * TICK, judge


def works(joined=0):
    return lambda now: Pulse(int(now), "ended forward", ASLEEP, {"0": joined})


def stands(stack=ASLEEP, since=0.0, joined=0, **more):
    return lambda now: Pulse(int(min(now, since)), "began backward", stack, {"0": joined}, **more)


def stopped(since):
    return lambda now: Pulse(int(now), "began forward", ASLEEP) if now < since else None


def ends(rank, at):
    return lambda now: rank(now) if now < at else "done"


@pytest.mark.parametrize(
    "ranks, hung, earliest",
    [
        ([works(), stands()], 1, LIMIT),
        ([works(), stopped(30.0)], 1, 30 + LIMIT - TICK),
        ([stands(REDUCES, joined=4), stands(since=30, joined=3)], 1, 30 + LIMIT),
        ([stands(REDUCES), stopped(30.0)], 1, 30 + LIMIT - TICK),
        ([stands(ASLEEP, joined=4), stands(ASLEEP, since=90, joined=3)], 1, 90 + LIMIT),
        ([stands(REDUCES, joined=4), stands(REDUCES, since=60, joined=3)], 1, 60 + COLD_START_FACTOR * LIMIT),
        ([stands(REDUCES, since=90), stands(REDUCES, since=15)], 1, 90 + COLD_START_FACTOR * LIMIT),
        ([stands(REDUCES)], 0, COLD_START_FACTOR * LIMIT),
        ([ends(works(), 400.0), stands(REDUCES)], 1, 400.0),
        ([stands(REDUCES), works()], None, None),
        ([stands(joined=4), works(joined=3)], None, None),
        ([works(), works()], None, None),
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
def test_who_hangs_is_named_and_not_who_waits(ranks, hung, earliest):
    found, after, judge = scene(*ranks)
    assert found == hung
    if hung is not None:
        assert earliest <= after <= earliest + 2 * TICK
        assert "(cluster.heartbeat_s=60)" in judge.describe_hang(hung)


def test_what_is_told_is_where_it_stands_or_stood():
    _, _, judge = scene(stands(REDUCES, joined=1), stands())
    assert judge.describe_hang(1).startswith(
        "has made no progress for 60.0 s (cluster.heartbeat_s=60); last activity: began b"
    )
    assert 'Its stack, innermost call first:\n  File "mine.py", line 3 in my_loss\n' in judge.describe_hang(1)
    assert judge.is_waiting_for(0, [1]) and not judge.is_waiting_for(1, [0])
    _, _, judge = scene(stopped(30.0))
    told = judge.describe_hang(0)
    assert told.startswith("has not answered for 60.0 s (cluster") and "Its stack at its last answer" in told
    _, _, judge = scene(lambda now: None)
    assert judge.describe_hang(0) == "has not answered for 60.0 s (cluster.heartbeat_s=60)"


def test_a_first_call_may_compile_on_a_gpu():
    assert scene(stands(on_gpu=True), first=True)[1] >= COLD_START_FACTOR * LIMIT
    assert scene(stands(on_gpu=True))[1] < 2 * LIMIT and scene(stands(), first=True)[1] < 2 * LIMIT


async def test_each_rank_may_compile_in_a_first_call_of_its_own(monkeypatch):
    first = []

    class Noted(HangDetector):
        def __init__(self, limit_s, begins):
            first.append(begins)
            super().__init__(limit_s, begins)

    monkeypatch.setattr(rank_group, "HangDetector", Noted)
    group = rank_group.RankGroup(Config(), [None, None])
    for ranks in ((0,), (1,), (0, 1), (0,)):
        asked = {rank: asyncio.ensure_future(asyncio.sleep(0.01)) for rank in ranks}
        await group._watched(asyncio.gather(*asked.values()), asked, "score")
    assert first == [True, True, False, False]


def test_a_driver_that_was_stopped_takes_that_for_no_silence():
    judge = HangDetector(LIMIT)
    judge.check(TICK, {0: works()(1), 1: works()(1)})
    assert judge.check(10 * LIMIT, {0: None, 1: works()(1)}) is None
    assert judge.check(TICK, {0: works()(2), 1: works()(2)}) is None
    assert judge.check(10 * LIMIT, {0: None, 1: works()(2)}) is None
    assert judge.check(LIMIT / 2, {0: None, 1: works()(3)}) == 0


class Calls:
    """A thread that does one thing after the other, as a rank's does."""

    def __init__(self):
        self.progress, self.work, self.here = Progress("cpu"), spins, threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        assert self.here.wait(60)

    def run(self):
        self.progress.set_call_thread()
        self.here.set()
        while self.work:
            self.work()

    def at(self, work):
        """Return the pulse once the thread does this."""
        self.work, until = work, time.monotonic() + 60
        while not (told := self.progress.pulse()).stack[0].endswith(f"in {work.__name__}"):
            assert time.monotonic() < until
            time.sleep(0.01)
        return told

    def end(self):
        self.work = None
        self.thread.join(60)


def spins():
    sum(range(3_000_000))


def sleeps():
    time.sleep(2)


@pytest.mark.slow
def test_computing_is_a_sign_of_life_and_sleeping_is_none():
    calls = Calls()
    before, until = calls.at(spins), time.monotonic() + 60  # it may still queue for a core
    while time.sleep(0.1) or calls.at(spins).activity <= before.activity:
        assert time.monotonic() < until
    before, until = calls.at(sleeps), time.monotonic() + 60  # the same, to fall asleep
    while time.sleep(0.1) or (after := calls.at(sleeps)).activity != before.activity:
        before = after
        assert time.monotonic() < until
    calls.end()
    assert f'File "{__file__}", line ' in after.stack[0] and not after.is_waiting


@pytest.mark.slow
def test_on_gpus_a_spinning_thread_is_none_but_every_layer_and_gradient_is():
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
