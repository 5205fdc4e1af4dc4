"""Replacement of a lost rollout engine by its handle; the actors are fakes that answer on demand."""

import asyncio
import threading
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from ray.exceptions import ActorDiedError

from rlfuse.engines.rollout import rollout_handle
from rlfuse.engines.rollout.liveness import Pulse
from rlfuse.engines.rollout.rollout_handle import RolloutHandle
from rlfuse.errors import EngineError, EngineFailed, EngineLost
from rlfuse.events import Recorder
from rlfuse.protocols import Sampling
from rlfuse.samples import Prompt, Response, Sample

ONE = Sample(Prompt(0, np.array([1], np.int32), "p", (), "source", None), 1, 0, 0)
TWO = Sample(ONE.prompt, 1, 1, 0)
SAMPLING = Sampling(1.0, 1.0, -1, 8)
RESPONSE = Response(np.array([1], np.int32), np.zeros(1, np.float32), "stop", 0, "w1")


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    """Create actors locally, without a Ray head."""

    async def create_locally(create):
        return create()

    monkeypatch.setattr(rollout_handle, "from_head", create_locally)


class Reference:
    def __init__(self):
        self.result = Future()

    def future(self):
        return self.result


class Stream:
    """Result of `generate`: each item is a reference."""

    def __init__(self):
        self.items = asyncio.Queue()

    async def __anext__(self):
        return await self.items.get()


class Actor:
    """A fake actor: calls listed in `answers` return at once, others wait; a kill fails all waiting calls."""

    def __init__(self):
        self.answers = {"start": {}, "pulse": Pulse(0.0, "a step"), "begin_update": None, "finish_update": None}
        self.answers |= {"receive": None, "version": 3, "evict": None, "sleep": None, "wake": None}
        self.calls, self.waiting, self.streams = [], [], []
        self.generate = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.stream))

    def __getattr__(self, method):
        return SimpleNamespace(remote=partial(self.call, method))

    def call(self, method, *arguments):
        self.calls.append(method)
        reference = Reference()
        if method in self.answers:
            answer = self.answers[method]
            (reference.result.set_exception if isinstance(answer, Exception) else reference.result.set_result)(answer)
        else:
            self.waiting.append(reference)
        return reference

    def stream(self, requests, sampling):
        self.streams.append(Stream())
        return self.streams[-1]

    def finish(self, stream, *samples):
        reference = Reference()
        reference.result.set_result([(sample.id, RESPONSE) for sample in samples])
        self.streams[stream].items.put_nowait(reference)

    def die(self):
        for reference in self.waiting:
            reference.result.set_exception(ActorDiedError())
        for stream in self.streams:
            reference = Reference()
            reference.result.set_exception(ActorDiedError())
            stream.items.put_nowait(reference)


class Engine:
    """A started handle and its actors so far."""

    def __init__(self, monkeypatch, **settings):
        self.actors, self.messages, self.recorder = [], [], Recorder("driver")
        monkeypatch.setattr(rollout_handle.ray, "kill", lambda actor: actor.die())
        settings = {"max_restarts": 2, "recorder": self.recorder, "say": self.messages.append} | settings
        self.handle = RolloutHandle(self.create, "rollout/1", 5.0, **settings)

    def create(self):
        self.actors.append(Actor())
        return self.actors[-1]

    async def generate(self, *samples):
        return [name async for name, _ in self.handle.generate(samples, SAMPLING)]

    async def push(self):
        await self.handle.wait_ready()
        await self.handle.begin_update()
        await self.handle.receive({})
        await self.handle.finish_update(3)


@pytest.fixture
async def engine(monkeypatch):
    engine = Engine(monkeypatch)
    await engine.handle.start(None, None, 64, "cpu")
    return engine


async def within_limit(task):
    return await asyncio.wait_for(task, 60)


async def test_calls_to_a_dead_engine_fail_until_its_replacement_has_weights(engine):
    first, second = asyncio.create_task(engine.generate(ONE)), asyncio.create_task(engine.generate(TWO))
    await asyncio.sleep(0)
    engine.actors[0].die()
    for task in (first, second):
        with pytest.raises(EngineLost, match="rollout/1 died during the call to generate 1 samples"):
            await within_limit(task)
    await engine.handle.wait_ready()
    with pytest.raises(EngineLost):
        await engine.generate(ONE)  # the replacement has no weights yet
    await engine.push()
    assert await engine.handle.version() == 3 and engine.actors[0].calls == ["start"]
    repeated = asyncio.create_task(engine.generate(ONE))
    await asyncio.sleep(0)
    engine.actors[1].finish(0, ONE)
    assert await within_limit(repeated) == [ONE.id]
    lost, restart = engine.recorder.drain()
    assert (lost.kind, lost.where, lost.samples) == ("lost", "rollout/1", (ONE.id, TWO.id))
    assert (restart.kind, restart.where) == ("restart", "rollout/1") and "died" in restart.cause
    assert "its 2 unfinished samples will be regenerated. A replacement is starting." in engine.messages[0]


async def test_an_unresponsive_ray_head_delays_only_the_replacement(engine, monkeypatch):
    # Ray waits a minute for the head, then ends the process, so a run must not wait inside Ray.
    create, began, go = engine.handle._create, threading.Event(), threading.Event()

    def hang():
        began.set()
        go.wait(10)
        return create()

    engine.handle._create = hang
    monkeypatch.setattr(rollout_handle, "from_head", asyncio.to_thread)
    engine.handle._lose(engine.actors[0], "rollout/1: no answer")
    while not began.is_set():
        await asyncio.sleep(0.001)
    assert not go.is_set(), "the event loop runs while Ray does not answer"
    go.set()
    await engine.push()
    assert len(engine.actors) == 2


async def test_responses_of_a_lost_engine_are_discarded(engine):
    old = asyncio.create_task(engine.generate(ONE, TWO))
    await asyncio.sleep(0)
    engine.handle._lose(engine.actors[0], "rollout/1: no answer")
    engine.actors[0].finish(0, ONE)
    with pytest.raises(EngineLost):
        await within_limit(old)
    await engine.push()
    assert len(engine.actors) == 2 and engine.handle.restarts == 1


async def test_a_replacement_engine_does_not_receive_the_rest_of_a_push(engine):
    await engine.handle.begin_update()
    engine.handle._lose(engine.actors[0], "rollout/1: no answer")
    with pytest.raises(EngineLost, match="lost during the push: load a bucket"):
        await engine.handle.receive({})
    with pytest.raises(EngineLost):
        await engine.handle.begin_update()
    await engine.push()
    assert engine.actors[1].calls == ["start", "begin_update", "receive", "finish_update"]


async def test_an_engine_is_replaced_at_most_max_restarts_times(engine):
    for number in range(2):
        engine.handle._lose(engine.actors[number], f"rollout/1: loss {number}")
        await engine.push()
    engine.handle._lose(engine.actors[2], "rollout/1: the last loss")
    with pytest.raises(EngineError, match=r"the last loss\nrollout/1 is not replaced: 2 restarts reached .*=2"):
        await engine.handle.wait_ready()
    engine.handle._lose(engine.actors[2], "a repeated report")
    assert [span.kind for span in engine.recorder.drain()].count("lost") == 3 and len(engine.actors) == 3


async def test_an_engine_that_fails_twice_with_the_same_error_is_not_replaced(engine):
    for number, head in enumerate((16, 17)):
        failed = EngineFailed(f"rollout/1: vLLM's engine process failed with an exception.\nValueError: size {head}")
        assert isinstance(engine.handle._to_engine_lost(failed, engine.actors[number]), EngineLost)
        assert ("replacement is starting" in engine.messages[2 * number]) == (number == 0)
        if number == 0:
            await engine.push()
    with pytest.raises(
        EngineError, match=r"size 17\nrollout/1 is not replaced: its replacement failed with the same error\."
    ):
        await engine.handle.wait_ready()
    assert len(engine.actors) == 2 and engine.handle.restarts == 1


async def test_different_errors_and_kills_are_retried_up_to_the_limit(engine):
    for number, error in enumerate((EngineFailed("ValueError: one"), EngineLost("killed"), EngineLost("killed"))):
        engine.handle._to_engine_lost(error, engine.actors[number])
        if number < 2:
            await engine.push()
    with pytest.raises(EngineError, match=r"2 restarts reached .*=2"):
        await engine.handle.wait_ready()


async def test_a_replacement_on_a_shared_device_starts_with_the_next_push(monkeypatch):
    engine = Engine(monkeypatch, starts_immediately=False)
    await engine.handle.start(None, None, 64, "cuda")
    engine.handle._lose(engine.actors[0], "rollout/1: no answer")
    await engine.handle.sleep()
    await engine.handle.wake()
    assert await engine.handle.drain() == [] and len(engine.actors) == 1
    await engine.push()
    assert len(engine.actors) == 2


@pytest.mark.parametrize(
    ("pulse", "words"),
    [
        (None, r"no answer for 0.2 s \(cluster.heartbeat_s\); last known activity: a step"),
        (
            Pulse(9.0, "a step of 2 samples"),
            "no progress for 0.2 s .* with 1 unfinished samples; .* a step of 2 samples",
        ),
    ],
)
async def test_silent_and_stalled_engines_are_lost_and_slow_ones_are_not(monkeypatch, pulse, words):
    engine = Engine(monkeypatch, heartbeat_s=0.2)
    await engine.handle.start(None, None, 64, "cpu")
    slow = asyncio.create_task(engine.generate(ONE))
    while engine.actors[0].calls.count("pulse") < 10:  # twice the limit
        await asyncio.sleep(0.005)
    assert not slow.done()
    if pulse is None:
        del engine.actors[0].answers["pulse"]
    else:
        engine.actors[0].answers["pulse"] = pulse
    with pytest.raises(EngineLost, match=words):
        await within_limit(slow)
    await engine.handle.stop()


async def test_a_replacement_engine_sleeps_before_it_has_weights(engine):
    # Otherwise, ranks would use the device at the same time.
    task = asyncio.create_task(engine.generate(ONE))
    await asyncio.sleep(0)
    engine.actors[0].die()
    with pytest.raises(EngineLost):
        await within_limit(task)
    await engine.handle.wait_ready()
    await engine.handle.sleep()
    await engine.handle.wake("weights")
    assert engine.actors[1].calls[-2:] == ["sleep", "wake"] and "sleep" not in engine.actors[0].calls
    assert engine.handle.lost


async def test_redundant_sleep_and_wake_calls_are_not_sent(engine):
    async def count_calls(action):
        before = len(engine.actors[-1].calls)
        await action
        return len(engine.actors[-1].calls) - before

    handle = engine.handle
    assert await count_calls(handle.wake()) == await count_calls(handle.wake("weights")) == 0, "it starts awake"
    assert [await count_calls(handle.sleep()) for _ in range(2)] == [1, 0]
    assert [await count_calls(handle.wake("weights")) for _ in range(2)] == [1, 0]
    assert [await count_calls(handle.wake()) for _ in range(2)] == [1, 0]
    await handle.sleep()
    handle._lose(engine.actors[0], "rollout/1: no answer")
    await engine.push()
    assert await count_calls(handle.wake()) == 0 and await count_calls(handle.sleep()) == 1, (
        "its replacement also starts awake"
    )


async def test_a_replacement_that_dies_at_startup_is_replaced_up_to_the_limit(engine):
    create, deaths = engine.handle._create, [True, False, True]

    def create_next():
        actor = create()
        actor.answers["start"] = ActorDiedError() if deaths.pop(0) else {}
        return actor

    engine.handle._create, engine.handle._max_restarts = create_next, 3
    engine.handle._lose(engine.actors[0], "rollout/1: the first loss")
    await engine.push()
    assert len(engine.actors) == 3 and await engine.handle.version() == 3
    lost, *restarts = engine.recorder.drain()
    assert (lost.kind, ["error" in span.attributes for span in restarts]) == ("lost", [True, False])
    engine.handle._lose(engine.actors[2], "rollout/1: the second loss")
    with pytest.raises(EngineError, match=r"the second loss\nrollout/1 is not replaced: 3 restarts reached .*=3"):
        await engine.handle.wait_ready()


async def test_a_replacement_that_did_not_start_receives_no_calls(engine):
    task = asyncio.create_task(engine.generate(ONE))
    await asyncio.sleep(0)
    engine.handle._create = lambda: 1 / 0
    engine.actors[0].die()
    with pytest.raises(EngineLost):
        await within_limit(task)
    with pytest.raises(ZeroDivisionError):
        await engine.handle.wait_ready()
    calls = list(engine.actors[0].calls)
    await engine.handle.sleep()
    await engine.handle.wake()
    assert engine.actors[0].calls == calls
