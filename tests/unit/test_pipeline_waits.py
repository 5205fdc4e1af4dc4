"""Waits during a schedule: with NCCL the host never blocks on a peer, and runs ahead by a few operations at most.

CUDA events and NCCL works are fakes, as they need a GPU; gloo's waits run in tests/end_to_end.
"""

import itertools
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from rlfuse.engines.pipeline import schedule_executor
from rlfuse.engines.pipeline.head_shares import HeadShares, process_group
from rlfuse.engines.pipeline.layout import Pipelines
from rlfuse.engines.pipeline.p2p_groups import COLLECTIVE_TIMEOUT_FACTOR
from rlfuse.engines.pipeline.schedule_executor import ScheduleExecutor
from rlfuse.engines.pipeline.waits import RUN_AHEAD, HostWaits, StreamWaits
from rlfuse.errors import EngineError
from rlfuse.fusion.schedules.operations import Operation


class Device:
    """Fake device that completes work on request; each event is one second after the previous one."""

    def __init__(self):
        self.recorded, self.done = 0, 0

    def event(self, enable_timing=False):
        return Event(self, enable_timing)


class Event:
    def __init__(self, device, timing):
        self.device, self.timing = device, timing

    def record(self):
        self.place = self.device.recorded = self.device.recorded + 1

    def query(self):
        return self.place <= self.device.done

    def synchronize(self):
        self.device.done = self.place

    def elapsed_time(self, later):
        assert self.timing and later.timing and later.query(), "time requested before the event completed"
        return 1000.0 * (later.place - self.place)


class Work:
    """Fake NCCL work, whose wait must not have a timeout, as that would block the host."""

    def __init__(self):
        self.completed, self.ordered = False, False

    def wait(self, *timeout):
        assert not timeout, "this blocks the host until the peer has sent"
        self.ordered = True

    def is_completed(self):
        return self.completed


@pytest.fixture
def device(monkeypatch):
    fake = Device()
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    return fake


def lost(purpose, rank, error):
    return EngineError(f"waited {purpose} on trainer/{rank}, in vain: {error}")


def test_waiting_for_an_input_does_not_block_the_host(device):
    run, work = StreamWaits(60.0, lost), Work()
    run.wait_received(work, "for the input", 1)
    assert work.ordered and not work.completed


def test_host_runs_ahead_of_the_device_by_a_few_operations(device):
    run = StreamWaits(60.0, lost)
    for _ in range(RUN_AHEAD):
        run.mark_end(run.now(), "for the end", 0)
    assert device.done < device.recorded - 1  # none was waited for
    first = device.done + 1
    device_continues = threading.Timer(0.05, lambda: setattr(device, "done", first))
    device_continues.start()
    run.mark_end(run.now(), "for the end", 0)
    assert device.done == first  # it only waited for the oldest
    device.done = device.recorded
    run.finish()


def test_stalled_device_is_reported_with_operation_and_peer(device):
    run = StreamWaits(0.05, lost)
    with pytest.raises(
        EngineError, match="for the end of actor B on trainer/3, in vain: the operation is not complete"
    ):
        for _ in range(RUN_AHEAD + 1):
            run.mark_end(run.now(), "for the end of actor B", 3)


def test_row_finishes_when_all_sends_are_complete_and_then_has_times(device):
    run, work = StreamWaits(0.05, lost), Work()
    moments = [run.now() for _ in range(3)]
    run.track_send(work, torch.zeros(1), "to hand over the result", 2)
    run.mark_end(moments[-1], "for the end", 0)
    device.done = device.recorded
    with pytest.raises(EngineError, match="to hand over the result on trainer/2"):
        run.finish()
    work.completed = True
    run.finish()
    seconds = [run.seconds(moment) for moment in moments]
    assert [b - a for a, b in itertools.pairwise(seconds)] == pytest.approx([1.0, 1.0])


def test_completed_sends_are_released(device):
    run, first = StreamWaits(60.0, lost), Work()
    run.track_send(first, torch.zeros(1), "", 1)
    first.completed = True
    run.track_send(Work(), torch.zeros(1), "", 1)
    assert len(run._sending) == 1


def test_failed_gloo_send_is_reported_at_the_end_of_the_row():
    class Broken:
        def wait(self, timeout):
            assert timeout.total_seconds() == 60
            raise RuntimeError("Connection closed by peer\nat some line")

    run = HostWaits(60.0, lost)
    run.track_send(Broken(), torch.zeros(1), "to hand over the result of critic F", 1)
    with pytest.raises(EngineError, match=r"to hand over the result of critic F on trainer/1.*closed by peer"):
        run.finish()


def test_gloo_times_are_host_times(monkeypatch):
    run = HostWaits(60.0, lost)
    monkeypatch.setattr("rlfuse.clock.now", lambda: 12.5)
    assert run.seconds(run.now()) == 12.5
    run.finish()


class Calls(TorchDispatchMode):
    """Record the names of collectives in order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(func.__name__.removesuffix("_.default"))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def of_four():
    """Return a function that makes this process one of four ranks with fake peers."""

    def join(rank):
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())

    process_group.cache_clear()
    yield join
    dist.destroy_process_group()
    process_group.cache_clear()


@pytest.mark.parametrize("rank", range(4))
def test_head_groups_are_connected_before_the_schedule_runs(of_four, monkeypatch, rank):
    """Run each collective once at setup, as with NCCL the first call blocks the host; check the group timeouts."""
    of_four(rank)
    new_group, limits = dist.new_group, []
    monkeypatch.setattr(dist, "new_group", lambda ranks, limit: limits.append(limit) or new_group(ranks, limit))
    with Calls() as calls:
        shares = HeadShares(Pipelines("actor", 2, direction="up", vocabulary=True), rank % 2, 60.0)
    assert calls.names == ["broadcast", "allgather", "reduce"]
    assert limits == [timedelta(seconds=60.0 * COLLECTIVE_TIMEOUT_FACTOR)] * 2
    assert (shares.index, shares.last) == (1 - rank % 2, rank - rank % 2)


class RecordedWaits:
    """Waits that return immediately and record (purpose, rank)."""

    def __init__(self, recorded):
        self.now, self.seconds, self.finish = lambda: 0.0, float, lambda: None
        self.wait_received = lambda work, purpose, rank: recorded.append((purpose.split(",")[0], rank))
        self.track_send, self.mark_end = (
            lambda *_: None,
            lambda moment, purpose, rank: self.wait_received(None, purpose, rank),
        )


class Scoring:
    """Fake stage of a policy in a scoring pass."""

    dtype, device = torch.float32, "cpu"
    shape = head_shape = lambda *_: (1, 1)

    def __init__(self):
        self.head_input = {0: torch.ones(1, 1)}

    def forward(self, *_):
        return torch.ones(1, 1)

    def head(self, micro_batch, hidden, training, gather, answers):
        gather(hidden)


@pytest.mark.parametrize("rank, other", [(0, 1), (1, 0)])
def test_waits_at_a_shared_head_are_for_the_other_device(of_four, monkeypatch, rank, other):
    """Check both directions: the other devices wait for that of the last stage, and it waits for them."""
    of_four(rank)
    waits = []
    monkeypatch.setattr(schedule_executor, "WAITS", {"fake": lambda *_: RecordedWaits(waits)})
    executor = ScheduleExecutor((Pipelines("actor", 2, vocabulary=True),), 60.0)
    rows = [tuple(Operation("actor", 0, stage, 0, kind) for kind in "FH") for stage in (0, 1)]
    executor.run(tuple(rows), {("actor", rank): Scoring()})
    assert {peer for purpose, peer in waits if "head" in purpose} == {other}
    assert [purpose for purpose, _ in waits][-1] == "for the end of actor head"
