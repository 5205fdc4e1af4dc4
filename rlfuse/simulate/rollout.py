"""A simulated rollout engine: the protocol of a vLLM engine over continuous batching on a virtual clock.

generate --> link (kv) --> waiting --> admitted, prefilled --> decoding --> response
                              ^------------ pre-empted <----------+-----> evicted: partial
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from rlfuse.errors import EngineLost
from rlfuse.events import Span
from rlfuse.protocols import Load, Part, Sampling
from rlfuse.samples import Partial, Response, Sample
from rlfuse.simulate.batching import Batch, Sequence, SimulationError
from rlfuse.simulate.speed import Speed

TOKEN_BYTES = 8  # a token that moves without its cache: an id and a log-prob


@dataclass(slots=True)
class Device:
    """State of a slot, shared by its engine and its trainer rank."""

    index: int
    speed: Speed = field(default_factory=Speed)
    decoding: Speed = field(default_factory=Speed)  # speed of decoding steps
    asleep: bool = False  # True if its engine sleeps
    role: str = "rollout"  # `rollout`, `trainer` or `switching`
    held: int = 0  # samples on its engine
    work: str = ""  # current work of its rank; empty if idle


@dataclass(slots=True)
class MovedSamples:
    """Samples and bytes received from other engines."""

    samples: int = 0
    bytes: float = 0.0


class Zeros:
    """Token ids and log-probs of simulated responses: views of two arrays of zeros."""

    def __init__(self, longest: int):
        self._ids, self._log_probs = np.zeros(longest, np.int32), np.zeros(longest, np.float32)

    def take(self, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        return self._ids[:tokens], self._log_probs[:tokens]


@dataclass(slots=True, eq=False)
class _Held:
    sample: Sample
    sequence: Sequence
    results: asyncio.Queue
    since: float
    where: str = "batch"  # `link` while its cache is transferred, `batch`, or `leaving`


@dataclass(slots=True)
class _Departure:
    """Samples to evict; `evicted` receives them with their partials, or is None if no caller waits for them."""

    names: list[str]
    carry: str
    evicted: asyncio.Future | None


class SimulatedRollout:
    """Engine of one slot. `length_of`: response length of a sample, unless `Sampling.max_tokens` is smaller."""

    def __init__(self, device: Device, batch: Batch, length_of: Callable[[Sample], int], zeros: Zeros):
        self.device, self.batch, self.moved, self.preempted = device, batch, MovedSamples(), 0
        self.name, self.version, self.lost = f"rollout/{device.index}", 0, False
        self._length_of, self._zeros = length_of, zeros
        self._held: dict[str, _Held] = {}
        self._departures: list[_Departure] = []
        self._timer: asyncio.TimerHandle | None = None
        self._start, self._steps = 0.0, 0  # start and number of the current steps; 0 steps: prefill
        self._since, self._prefill = -1.0, 0  # start and prefill tokens of work not yet in a span
        self._link_free = 0.0
        self._spans: list[Span] = []

    async def generate(
        self, samples: Iterable[Sample], sampling: Sampling, partials: Mapping[str, Partial] | None = None
    ) -> AsyncIterator[tuple[str, Response | Partial]]:
        """Yield (sample id, response or partial) as they finish. Raises EngineLost when the engine fails."""
        self._check("generate")
        results: asyncio.Queue = asyncio.Queue()
        names = {sample.id for sample in samples}
        for sample in samples:
            self._receive(sample, sampling.max_tokens, (partials or {}).get(sample.id), results)
        self._interrupt()
        try:
            while names:
                name, result = await results.get()
                if isinstance(result, EngineLost):
                    raise result
                names.discard(name)
                yield name, result
        finally:
            if names and not self.lost:
                self._departures.append(_Departure(list(names), "tokens", None))
                self._interrupt()

    async def evict(self, sample_ids: Iterable[str], carry: str = "tokens") -> None:
        """Evict samples at the end of the step in progress and return `move_s` later; finished ones are skipped."""
        self._check("evict")
        names = [name for name in sample_ids if name in self._held]
        if not names:
            return
        evicted = asyncio.get_running_loop().create_future()
        self._departures.append(_Departure(names, carry, evicted))
        self._interrupt()
        gone = await evicted
        await asyncio.sleep(self.batch.costs.move_s)
        for held, partial in gone:
            held_still = self._held.get(held.sequence.name) is held  # False if it was taken by another call meanwhile
            if held_still:
                self._deliver(held, partial)

    async def load(self) -> Load:
        batch, now = self.batch, asyncio.get_running_loop().time()
        begun = batch.steps_after(self.device.decoding.done(self._start, now)) if self._steps else 0
        steps = batch.step + min(self._steps, begun)
        return Load(len(batch.running), len(batch.waiting), batch.context / batch.costs.kv_tokens, steps)

    async def sleep(self, discard: bool = False) -> None:
        if self.device.held:
            raise SimulationError(f"{self.name} was requested to sleep with {self.device.held} samples running")
        self.device.asleep = True

    async def wake(self, part: Part | None = None) -> None:
        self.device.asleep = self.lost

    async def drain(self, collect: bool = False) -> list[Span]:
        """Return a `decode` span per sequence of steps with one batch, and a `generate` span per finished sample."""
        spans, self._spans = self._spans, []
        return spans

    def fail(self) -> None:
        self.lost = self.device.asleep = True
        error = EngineLost(f"{self.name} is lost (`failures` of the workload)")
        if self._timer is not None:
            self._timer.cancel()
        for results in {id(held.results): held.results for held in self._held.values()}.values():
            results.put_nowait(("", error))
        for departure in self._departures:
            if departure.evicted is not None and not departure.evicted.done():
                departure.evicted.set_exception(error)
        self._held.clear()
        self.device.held = 0

    def replace(self) -> None:
        self.batch, self.lost, self.device.asleep = Batch(self.batch.costs), False, False
        self._departures, self._timer, self._steps = [], None, 0
        self._since, self._prefill, self._link_free = -1.0, 0, 0.0

    def _check(self, action: str) -> None:
        if self.lost:
            raise EngineLost(f"{self.name} is lost and cannot {action}")
        if self.device.role != "rollout" or self.device.asleep:
            raise SimulationError(f"{self.name} was requested to {action} while its slot has role {self.device.role}")

    def _receive(self, sample: Sample, most: int, partial: Partial | None, results: asyncio.Queue) -> None:
        if sample.id in self._held:
            raise SimulationError(f"{self.name} received sample {sample.id}, which it already has")
        loop = asyncio.get_running_loop()
        total, prompt_tokens = min(self._length_of(sample), most), len(sample.prompt.token_ids)
        sequence = Sequence(sample.id, sample.prompt.index, prompt_tokens, total)
        held = self._held[sample.id] = _Held(sample, sequence, results, loop.time())
        self.device.held += 1
        if partial is None:
            self.batch.waiting.append(sequence)
            return
        sequence.done, sequence.cached = len(partial.token_ids), partial.kv_key is not None
        self.moved.samples += 1
        if not sequence.cached:
            self.moved.bytes += TOKEN_BYTES * sequence.done
            self.batch.waiting.append(sequence)
            return
        costs, held.where = self.batch.costs, "link"
        size = sequence.tokens * costs.kv_bytes_per_token
        self.moved.bytes += size
        self._link_free = max(self._link_free, loop.time()) + size / costs.link_bytes_per_s
        loop.call_at(self._link_free, self._arrive, held)

    def _arrive(self, held: _Held) -> None:
        if self._held.get(held.sequence.name) is held and held.where == "link":
            held.where = "batch"
            self.batch.waiting.append(held.sequence)
            self._interrupt()

    def _deliver(self, held: _Held, result: Response | Partial) -> None:
        del self._held[held.sequence.name]
        self.device.held -= 1
        held.results.put_nowait((held.sequence.name, result))

    def _finish(self, sequence: Sequence, now: float) -> None:
        held, length = self._held[sequence.name], sequence.total
        reason = "stop" if length == self._length_of(held.sample) else "length"
        self._deliver(held, Response(*self._zeros.take(length), reason, self.version, ""))
        which, attributes = (held.sample.step, (sequence.name,)), {"prompt_tokens": sequence.prompt_tokens}
        self._spans.append(Span("generate", self.name, held.since, now, *which, length, "admitted", attributes))

    def _interrupt(self) -> None:
        """Schedule `_turn` for the end of the step in progress, or at once if idle. A prefill is not interrupted."""
        loop = asyncio.get_running_loop()
        when = loop.time()
        if self._timer is not None:
            speed = self.device.decoding
            steps = self.batch.steps_after(speed.done(self._start, when)) if self._steps else 0
            if steps >= self._steps:
                return
            self._steps, when = steps, speed.end(self._start, self.batch.seconds(steps))
            self._timer.cancel()
        self._timer = loop.call_at(when, self._turn)

    def _turn(self) -> None:
        now, batch = asyncio.get_running_loop().time(), self.batch
        self._timer = None
        if self._steps:
            self._record(now)
        for sequence in batch.run(self._steps) if self._steps else ():
            self._finish(sequence, now)
        self._evict_departing()
        self._steps = 0
        prefill = batch.admit()
        self._prefill += prefill
        if prefill:
            self._begin(now, 0, batch.costs.prefill(prefill))
        elif batch.running:
            self.preempted += batch.preempt()
            steps = batch.steps_until_change()
            self._begin(now, steps, batch.seconds(steps))
        elif self._prefill:
            self._record(now)

    def _begin(self, now: float, steps: int, cost: float) -> None:
        self._start, self._steps = now, steps
        self._since = now if self._since < 0 else self._since
        speed = self.device.decoding if steps else self.device.speed
        self._timer = asyncio.get_running_loop().call_at(speed.end(now, cost), self._turn)

    def _record(self, now: float) -> None:
        size = len(self.batch.running)
        attributes = {
            "steps": self._steps,
            "batch": size,
            "context": self.batch.context + size * max(0, self._steps - 1) / 2,
            "prefill_tokens": self._prefill,
        }
        tokens = self._steps * size
        self._spans.append(Span("decode", self.name, self._since, now, tokens=tokens, attributes=attributes))
        self._since, self._prefill = -1.0, 0

    def _evict_departing(self) -> None:
        departures, self._departures = self._departures, []
        for departure in departures:
            evicted = []
            for name in departure.names:
                held = self._held.get(name)
                if held is None or held.where == "leaving":
                    continue
                ran = held.where == "batch" and self.batch.remove(held.sequence)
                held.where = "leaving"
                key = f"{self.name}/{name}" if ran and departure.carry == "kv" else None
                tokens = self._zeros.take(held.sequence.done)
                evicted.append((held, Partial(*tokens, self.version, kv_key=key)))
            if departure.evicted is not None and not departure.evicted.done():
                departure.evicted.set_result(evicted)
                continue
            for held, _ in evicted:
                del self._held[held.sequence.name]
                self.device.held -= 1
