"""How runs of schedules wait: over NCCL never for a peer, and not further ahead of the device than a few operations.

CUDA's events and NCCL's works are played here, as neither exists without a GPU; gloo's waits run in tests/end_to_end.
"""

import itertools
import threading

import pytest
import torch

from rlfuse.engines.pipeline import waits
from rlfuse.engines.pipeline.waits import RUN_AHEAD, HostWaits, StreamWaits
from rlfuse.errors import EngineError


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
    run.arrived(work, "for the input", 1)
    assert work.ordered and not work.completed


def test_the_host_runs_ahead_of_the_device_by_a_few_operations_only(device):
    run = StreamWaits(60.0, lost)
    for _ in range(RUN_AHEAD):
        run.ended(run.now(), "for the end", 0)
    assert device.done < device.recorded - 1  # none was waited for
    first = device.done + 1
    device_goes_on = threading.Timer(0.05, lambda: setattr(device, "done", first))
    device_goes_on.start()
    run.ended(run.now(), "for the end", 0)
    assert device.done == first  # it waited for the oldest alone
    device.done = device.recorded
    run.finish()


def test_a_device_that_does_not_go_on_is_told_with_operation_and_peer(device):
    run = StreamWaits(0.05, lost)
    with pytest.raises(EngineError, match="for the end of actor B on trainer/3, in vain: the device is still at it"):
        for _ in range(RUN_AHEAD + 1):
            run.ended(run.now(), "for the end of actor B", 3)


def test_the_row_ends_when_all_has_left_and_only_then_are_there_times(device):
    run, work = StreamWaits(0.05, lost), Work()
    moments = [run.now() for _ in range(3)]
    run.left(work, torch.zeros(1), "to hand over the result", 2)
    run.ended(moments[-1], "for the end", 0)
    device.done = device.recorded
    with pytest.raises(EngineError, match="to hand over the result on trainer/2"):
        run.finish()
    work.completed = True
    run.finish()
    seconds = [run.seconds(moment) for moment in moments]
    assert [b - a for a, b in itertools.pairwise(seconds)] == pytest.approx([1.0, 1.0])


def test_a_send_that_has_left_is_not_held(device):
    run, first = StreamWaits(60.0, lost), Work()
    run.left(first, torch.zeros(1), "", 1)
    first.completed = True
    run.left(Work(), torch.zeros(1), "", 1)
    assert len(run._leaving) == 1


def test_a_send_over_gloo_that_fails_is_told_at_the_end_of_the_row():
    class Broken:
        def wait(self, timeout):
            assert timeout.total_seconds() == 60
            raise RuntimeError("Connection closed by peer\nat some line")

    run = HostWaits(60.0, lost)
    run.left(Broken(), torch.zeros(1), "to hand over the result of critic F", 1)
    with pytest.raises(EngineError, match=r"to hand over the result of critic F on trainer/1.*closed by peer"):
        run.finish()


def test_times_over_gloo_are_the_hosts(monkeypatch):
    run = HostWaits(60.0, lost)
    monkeypatch.setattr(waits.time, "time", lambda: 12.5)
    assert run.seconds(run.now()) == 12.5
    run.finish()
