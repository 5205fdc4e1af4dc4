"""How runs of schedules wait: over NCCL never for a peer, and not further ahead of the device than a few operations.

CUDA's events and NCCL's works are played here, as neither exists without a GPU; gloo's waits run in tests/end_to_end.
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
    """Runs what was put on it when told to; each event is one second of work after the one before."""

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
        assert self.timing and later.timing and later.query(), "an event is asked for its time before it was reached"
        return 1000.0 * (later.place - self.place)


class Work:
    """NCCL's: a wait with a time limit would hold the host."""

    def __init__(self):
        self.completed, self.ordered = False, False

    def wait(self, *timeout):
        assert not timeout, "this blocks the host until the peer has sent"
        self.ordered = True

    def is_completed(self):
        return self.completed


@pytest.fixture
def device(monkeypatch):
    played = Device()
    monkeypatch.setattr(torch.cuda, "Event", played.event)
    return played


def lost(purpose, rank, error):
    return EngineError(f"waited {purpose} on trainer/{rank}, in vain: {error}")


def test_an_input_orders_streams_and_the_host_goes_on(device):
    run, work = StreamWaits(60.0, lost), Work()
    run.wait_received(work, "for the input", 1)
    assert work.ordered and not work.completed


def test_the_host_runs_ahead_of_the_device_by_a_few_operations_only(device):
    run = StreamWaits(60.0, lost)
    for _ in range(RUN_AHEAD):
        run.mark_end(run.now(), "for the end", 0)
    assert device.done < device.recorded - 1  # none was waited for
    first = device.done + 1
    device_goes_on = threading.Timer(0.05, lambda: setattr(device, "done", first))
    device_goes_on.start()
    run.mark_end(run.now(), "for the end", 0)
    assert device.done == first  # it waited for the oldest alone
    device.done = device.recorded
    run.finish()


def test_a_device_that_does_not_go_on_is_told_with_operation_and_peer(device):
    run = StreamWaits(0.05, lost)
    with pytest.raises(
        EngineError, match="for the end of actor B on trainer/3, in vain: the operation is not complete"
    ):
        for _ in range(RUN_AHEAD + 1):
            run.mark_end(run.now(), "for the end of actor B", 3)


def test_the_row_ends_when_all_has_left_and_only_then_are_there_times(device):
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


def test_a_send_that_has_left_is_not_held(device):
    run, first = StreamWaits(60.0, lost), Work()
    run.track_send(first, torch.zeros(1), "", 1)
    first.completed = True
    run.track_send(Work(), torch.zeros(1), "", 1)
    assert len(run._sending) == 1


def test_a_send_over_gloo_that_fails_is_told_at_the_end_of_the_row():
    class Broken:
        def wait(self, timeout):
            assert timeout.total_seconds() == 60
            raise RuntimeError("Connection closed by peer\nat some line")

    run = HostWaits(60.0, lost)
    run.track_send(Broken(), torch.zeros(1), "to hand over the result of critic F", 1)
    with pytest.raises(EngineError, match=r"to hand over the result of critic F on trainer/1.*closed by peer"):
        run.finish()


def test_times_over_gloo_are_the_hosts(monkeypatch):
    run = HostWaits(60.0, lost)
    monkeypatch.setattr("rlfuse.clock.now", lambda: 12.5)
    assert run.seconds(run.now()) == 12.5
    run.finish()


class Calls(TorchDispatchMode):
    """Collectives by name, in order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(func.__name__.removesuffix("_.default"))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def of_four():
    """Makes this process one of four ranks, whose peers answer at once with nothing."""

    def join(rank):
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())

    process_group.cache_clear()
    yield join
    dist.destroy_process_group()
    process_group.cache_clear()


@pytest.mark.parametrize("rank", range(4))
def test_devices_that_share_a_head_are_connected_before_a_schedule_runs(of_four, monkeypatch, rank):
    """Over NCCL the first call of a kind holds the host until all have made theirs; and its watchdog comes last."""
    of_four(rank)
    made, limits = dist.new_group, []
    monkeypatch.setattr(dist, "new_group", lambda ranks, limit: limits.append(limit) or made(ranks, limit))
    with Calls() as calls:
        shares = HeadShares(Pipelines("actor", 2, direction="up", vocabulary=True), rank % 2, 60.0)
    assert calls.names == ["broadcast", "allgather", "reduce"]
    assert limits == [timedelta(seconds=60.0 * COLLECTIVE_TIMEOUT_FACTOR)] * 2
    assert (shares.index, shares.last) == (1 - rank % 2, rank - rank % 2)


class Named:
    """Waits that end at once, and tell whom they were for."""

    def __init__(self, told):
        self.now, self.seconds, self.finish = lambda: 0.0, float, lambda: None
        self.wait_received = lambda work, purpose, rank: told.append((purpose.split(",")[0], rank))
        self.track_send, self.mark_end = (
            lambda *_: None,
            lambda moment, purpose, rank: self.wait_received(None, purpose, rank),
        )


class Scoring:
    """A stage of a policy that scores."""

    dtype, device = torch.float32, "cpu"
    shape = head_shape = lambda *_: (1, 1)

    def __init__(self):
        self.head_input = {0: torch.ones(1, 1)}

    def forward(self, *_):
        return torch.ones(1, 1)

    def head(self, micro_batch, hidden, training, gather, answers):
        gather(hidden)


@pytest.mark.parametrize("rank, other", [(0, 1), (1, 0)])
def test_who_is_awaited_at_a_head_is_another_device(of_four, monkeypatch, rank, other):
    """The last stage's is waited for by the others, and itself waits for them."""
    of_four(rank)
    told = []
    monkeypatch.setattr(schedule_executor, "WAITS", {"fake": lambda *_: Named(told)})
    executor = ScheduleExecutor((Pipelines("actor", 2, vocabulary=True),), 60.0)
    rows = [tuple(Operation("actor", 0, stage, 0, kind) for kind in "FH") for stage in (0, 1)]
    executor.run(tuple(rows), {("actor", rank): Scoring()})
    assert {peer for purpose, peer in told if "head" in purpose} == {other}
    assert [purpose for purpose, _ in told][-1] == "for the end of actor head"
