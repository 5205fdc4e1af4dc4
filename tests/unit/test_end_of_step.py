"""Order of events at the end of a step in the real controller: devices, rows, checkpoint, and requested stops."""

import asyncio
from contextlib import contextmanager
from signal import SIGTERM
from types import SimpleNamespace

import pytest

from rlfuse.config.schema import Config
from rlfuse.errors import NodeLeft, NotSaved
from rlfuse.protocols import DeviceSharing
from rlfuse.step.controller import Controller
from rlfuse.step.drafts import Drafts
from rlfuse.stopping import Stopped, Stopping


class Parts:
    """Record a controller's calls between two steps in `order`; SIGTERM arrives after the call `stop_at`."""

    lost = False
    due_at, full_after = (2, 3), None

    def __init__(self, stop_at):
        self.order, self.stop_at, self.stopping = [], stop_at, Stopping(0.0, print)
        self.step = self.written = self.writing = 0
        self.recorder, self.spans = self, []
        self.rates, self.costs = SimpleNamespace(current=[1.0, 1.5]), None

    def record(self, word):
        self.order.append(word)
        if word == self.stop_at:
            self.stopping.by = SIGTERM

    @contextmanager
    def span(self, kind, step, **_):
        yield

    async def sleep(self, *_):
        self.record("asleep")

    async def wake(self, *_):
        self.record("awake")

    sharing = DeviceSharing()

    async def acquire_device(self, slot):
        self.record("ranks on")

    async def release_device(self, slot):
        self.record("ranks off")

    async def push(self, version):
        self.record(f"push {version}")

    async def collect(self, step):
        return self.spans

    def add(self, values):
        assert values == {}, "these workers have no monitor"

    def log_step(self, step, board, spans):
        assert spans is self.spans
        self.record(f"rows {step}")

    def is_due(self, step):
        return step in self.due_at

    def check_disk_space(self, step):
        if step == self.full_after:
            raise NotSaved(f"no room after step {step}")

    def remember(self, step):
        """Do nothing: there is no state."""

    async def write(self, step, required=False):
        self.record(f"write {step}")
        self.writing = step

    def publish(self):
        if self.written != self.step:
            self.record(f"publish {self.written}")
            self.step = self.written

    async def publish_written(self):
        await self.settle()

    async def settle(self):
        self.written = self.writing
        self.publish()

    def learn(self, board, spans):
        """Do nothing: there are no costs to learn."""

    def folder(self, step):
        return f"saved {step}" if step == self.step else None

    async def replan(self, rates, saved):
        assert rates is self.rates.current
        self.record(f"replan {saved}")


class RecordingController(Controller):
    """Controller whose steps and validations only record their names."""

    async def learn(self, step):
        self.journal.record(f"learn {step}")

    async def validate(self, step):
        self.journal.record(f"validate {step}")


ROWS_1 = "learn 1, push 1, rows 1"
STEP_1 = f"{ROWS_1}, replan None"
SAVE_2 = "asleep, ranks on, write 2"
BACK = "replan saved 2, ranks off, awake"
SAVED_2 = f"{STEP_1}, learn 2, push 2, validate 2, {SAVE_2}"
LAST = "learn 3, push 3, validate 3, asleep, ranks on, write 3, rows 3, publish 3"


@pytest.mark.parametrize(
    ("stop_at", "order", "left"),
    [
        ("", f"{SAVED_2}, rows 2, publish 2, {BACK}, {LAST}", None),
        ("learn 1", f"{ROWS_1}, asleep, ranks on, write 1, publish 1", 1),
        ("replan None", f"{STEP_1}, asleep, ranks on, write 1, publish 1", 1),
        ("learn 2", f"{STEP_1}, learn 2, push 2, {SAVE_2}, rows 2, publish 2", 2),
        ("validate 2", f"{SAVED_2}, rows 2, publish 2", 2),
        ("write 2", f"{SAVED_2}, rows 2, publish 2", 2),
        ("rows 2", f"{SAVED_2}, rows 2, publish 2", 2),
        ("replan saved 2", f"{SAVED_2}, rows 2, publish 2, {BACK}", 2),
        ("write 3", f"{SAVED_2}, rows 2, publish 2, {BACK}, {LAST}", None),
    ],
)
def test_rows_precede_the_publication_and_engines_wake_only_for_another_step(stop_at, order, left):
    parts = Parts(stop_at)
    controller = controller_of(parts)
    if left is None:
        asyncio.run(controller.train(0))
    else:
        with pytest.raises(Stopped, match=f"SIGTERM: stopped after step {left}, which is saved"):
            asyncio.run(controller.train(0))
    assert ", ".join(parts.order) == order


@pytest.mark.parametrize(
    ("done", "order"),
    [
        (0, f"{ROWS_1}, asleep, ranks on, write 1, publish 1"),
        (1, f"learn 2, push 2, validate 2, {SAVE_2}, rows 2, publish 2"),
    ],
)
def test_a_relocated_job_validates_and_saves_before_it_leaves_the_node(done, order):
    parts, left = Parts(""), NodeLeft("node b leaves", ("b",))
    parts.stopping.relocation = left
    parts.step = parts.written = parts.writing = done
    with pytest.raises(NodeLeft) as raised:
        asyncio.run(controller_of(parts).train(done))
    assert raised.value is left
    assert ", ".join(parts.order) == order


@pytest.mark.parametrize("visual", [(), ("a clip",)])
def test_clips_of_the_next_validation_or_step_are_prefetched(visual):
    controller, prefetched = controller_of(Parts("")), []
    clips = SimpleNamespace(prefetch=lambda prompts, holder: prefetched.append((prompts, holder)))
    held_out, upcoming = [SimpleNamespace(visual=visual)], ["upcoming"]
    controller.engines = SimpleNamespace(clips=clips)
    controller.groups = SimpleNamespace(held_out=held_out, selection=SimpleNamespace(upcoming=lambda: upcoming))
    for step, holder in ((1, "training"), (2, "training"), (2, "testing"), (3, "testing")):
        controller._prefetch(step, holder)
    second = held_out if visual else upcoming
    assert prefetched == [(upcoming, "training"), (second, "training"), (upcoming, "testing")]


def test_a_checkpoint_is_written_early_and_no_step_starts_that_cannot_be_saved():
    parts = Parts("")
    parts.due_at, parts.full_after = (1,), 2
    with pytest.raises(NotSaved, match="no room after step 2"):
        asyncio.run(controller_of(parts).train(0))
    saved = "learn 1, push 1, asleep, ranks on, write 1, rows 1, publish 1, replan saved 1, ranks off, awake"
    assert ", ".join(parts.order) == f"{saved}, learn 2, push 2, validate 2, rows 2, replan None"


class Full(Parts):
    """Fail to write the first two checkpoints, as on a full disk."""

    async def write(self, step, required=False):
        self.record(f"no room {step}")
        self.failed = getattr(self, "failed", 0) + 1
        if self.failed > 2:
            self.writing = step


def test_a_failed_checkpoint_cancels_the_relocation(capsys):
    parts = Full("")
    parts.stopping.relocation = NodeLeft("node b leaves", ("b",))
    asyncio.run(controller_of(parts).train(0))
    order = ", ".join(parts.order)
    failed = "asleep, ranks on, no room 1, ranks off, awake, learn 2, push 2, validate 2, asleep, ranks on, no room 2"
    assert order.startswith(f"{ROWS_1}, {failed}, rows 2, replan None, ranks off, awake, learn 3")
    assert not parts.stopping.is_requested and parts.step == 3
    assert "Checkpoint of step 1 failed; node drain cancelled. Free disk space and retry." in capsys.readouterr().out


def controller_of(parts):
    """Return a controller of three steps with these parts, which saves and validates every second step."""
    config = Config()
    config.trainer.save_freq = config.trainer.test_freq = 2
    return RecordingController(
        config=config,
        engines=SimpleNamespace(rollout=[parts], trainer=parts, weights=parts),
        policy=None,
        groups=SimpleNamespace(drafts=Drafts()),
        advantages=None,
        tuning=parts,
        draining=None,
        journal=parts,
        metrics=parts,
        checkpoints=parts,
        stopping=parts.stopping,
        total_steps=3,
    )
