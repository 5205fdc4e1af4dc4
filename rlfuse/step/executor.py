"""Execute a board: query the policy, start its decisions on the engines, and record the results on the board.

Role: the controller runs one `Executor` per step and one per validation. Policies are pure; all side effects are here
and reach engines only through protocols, so the simulator uses the same executor.

    Board -- snapshot --> policy -- decisions --> generate | move | switch | score | accumulate | train | step
      ^                                               |
      +------ finished, evicted, scored, stepped -----+     each wakes the loop

Waits: for any task to report, or for a timeout, so that policies see time pass. A failing task cancels the others and
ends the step with its error. A lost rollout engine is tolerated: its slot has no engine until the next weight push.
Only the last engine is replaced within the step, with the weights that generated the step's other samples.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from rlfuse.errors import EngineLost, WorkerLost
from rlfuse.events import Recorder, Span
from rlfuse.fusion.board import Board
from rlfuse.fusion.decisions import (
    Accumulate,
    Decision,
    Generate,
    Move,
    OptimizerStep,
    Policy,
    Score,
    Snapshot,
    Switch,
    Train,
)
from rlfuse.fusion.mini_batches import optimizers_to_fetch, seconds_until_step
from rlfuse.fusion.stopwatch import POLL_AFTER_S
from rlfuse.protocols import Engines, PassResult, Sampling, Stages, WholeModels
from rlfuse.samples import Partial, Row, Sample
from rlfuse.step.colocation import to_engine, to_ranks
from rlfuse.step.scoring import PASSES, model_of, store_scores

PULSE_S = 0.25
PULSE_SHARE = 0.05
"""Minimum interval between decisions, as a fraction of the time since the last event. Without it, a simulated wait of
days would be checked every `PULSE_S`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """Parameters of all work on one board."""

    step: int
    sampling: Sampling
    on_scored: Callable[[], object] = lambda: None
    """Called after each scoring, to prepare complete groups."""
    row_tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Model -> per-token arrays that its loss reads."""
    fused_into_first_update: tuple[str, ...] = ()
    """Kinds of scoring that the actor's first update computes in its own forward pass."""
    lr_factors: Mapping[str, float] = field(default_factory=dict)
    """Model -> fraction of its full learning rate in this step."""
    can_discard: bool = False
    """Weights are pushed before anything else is generated, so engines may discard theirs after generation."""
    note: Callable[[Mapping[str, float]], None] = lambda values: None
    """Receives the metrics of optimizer steps."""
    on_finished: Callable[[Sample], object] = lambda sample: None
    """Called with each sample that has its response."""


class Executor:
    """Executor of one board. Spans are recorded by `recorder`."""

    def __init__(
        self,
        board: Board,
        engines: Engines,
        policy: Policy,
        context: StepContext,
        recorder: Recorder,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.board, self.engines, self.policy, self.context = board, engines, policy, context
        self.recorder, self.clock = recorder, clock
        self._changed, self._last_change = asyncio.Event(), 0.0
        self.reward_error: Exception | None = None
        """Error of rewards or of advantages. Other running calls finish before it is raised."""
        self.has_updated = False
        """Whether an optimizer step was started."""
        self._scoring: list[asyncio.Task] = []
        self._restarting = False
        self._polled_at, self._polling = clock(), set[int]()

    async def run(self) -> None:
        """Query the policy, start its decisions and wait for a change, until the board is done.

        After a reward error, all other calls finish before it is raised, so engines and ranks stay usable.
        """
        async with asyncio.TaskGroup() as self._tasks:
            while not self.board.done and self.reward_error is None:
                self._changed.clear()
                if not self._restarting and (slot := self.board.slot_table.slot_to_restart) is not None:
                    self._restarting = True
                    self.board.slot_table.occupy(slot)
                    self._tasks.create_task(self._restart_engine(slot))
                for slot, names, carry in self.board.slot_table.start_leaving_drained(self.clock()):
                    self._tasks.create_task(self._evict_from_drained(slot, names, carry))
                self._poll_silent_engines()
                view = self.board.snapshot(self.clock())
                self._fetch_optimizers(view)
                decisions = self.policy(view)
                for decision in decisions:
                    self._start(decision)
                if not decisions and self.board.idle:
                    raise RuntimeError(
                        f"the fusion policy {self.policy.__name__} returned no decision while nothing is running"
                    )
                await self._wait_for_change()
            if self.reward_error is not None:
                for task in self._scoring:
                    task.cancel()
                for slot in range(len(self.engines.rollout)):
                    await self._evict(slot, list(self.board.samples), "tokens")
        if self.reward_error is not None:
            raise self.reward_error

    def _fetch_optimizers(self, view: Snapshot) -> None:
        """Start fetching offloaded optimizers in time for the next optimizer step."""
        models = self.board.mini_batches.values()
        if models and (away := self.engines.trainer.offloaded_optimizers):
            for slot in optimizers_to_fetch(away, seconds_until_step(view, models)):
                self._tasks.create_task(self.engines.trainer.fetch_optimizers(slot))

    async def _wait_for_change(self) -> None:
        """Wait until a task reports, or until the policy should see the time again."""
        loop = asyncio.get_running_loop()
        self._last_change = self._last_change or loop.time()
        idle, step = loop.time() - self._last_change, self.board.slot_table.costs.step_base_s
        pulse = loop.call_later(max(PULSE_S, step, PULSE_SHARE * idle), self._changed.set)
        await self._changed.wait()
        pulse.cancel()
        if loop.time() < pulse.when():
            self._last_change = loop.time()

    def _poll_silent_engines(self) -> None:
        """Periodically ask engines without recent results for their progress."""
        if (now := self.clock()) - self._polled_at >= POLL_AFTER_S:
            self._polled_at = now
            for slot in self.board.slot_table.silent_engines(now):
                if slot not in self._polling:
                    self._polling.add(slot)
                    self._tasks.create_task(self._poll_engine(slot))

    async def _poll_engine(self, slot: int) -> None:
        with suppress(EngineLost):  # handled by `_generate` of its samples
            load = await self.engines.rollout[slot].load()
            self.board.slot_table.record_load(slot, load, self.clock())
            self._changed.set()
        self._polling.discard(slot)

    def _start(self, decision: Decision) -> None:
        names = self.board.slot_table.waiting_samples(decision.groups) if isinstance(decision, Generate) else ()
        self.board.start(decision, self.clock())
        task = self._tasks.create_task(self._effect(decision, names))
        if isinstance(decision, Score) and decision.kind == "reward":
            self._scoring.append(task)

    def _effect(self, decision: Decision, names: Sequence[str]) -> Coroutine[None, None, None]:
        """Return the coroutine of a decision. `names`: samples that a `Generate` admits."""
        match decision:
            case Generate():
                partials = {name: self.board.partials.pop(name) for name in names if name in self.board.partials}
                return self._generate(decision.slot, names, partials)
            case Move():
                return self._move(decision)
            case Switch():
                return self._switch(decision)
            case Score():
                return self._score(decision)
            case Accumulate():
                return self._accumulate(decision)
            case Train():
                return self._train(decision)
            case OptimizerStep():
                return self._step(decision)

    # Generation ------------------------------------------------------------------------------------------------------

    async def _generate(self, slot: int, names: Sequence[str], partials: dict[str, Partial]) -> None:
        samples = self._samples(names)
        with self._span("gen", attributes={"slot": slot}):
            try:
                async for name, result in self.engines.rollout[slot].generate(samples, self.context.sampling, partials):
                    if isinstance(result, Partial):
                        self._evicted(name, result)
                    else:
                        self.board.finished(name, result, self.clock())
                        self.context.on_finished(self.board.samples[name])
                        self._evict_surplus()
                    self._changed.set()
            except EngineLost:
                self.board.engine_lost(slot, self.clock())
        self._changed.set()

    async def _restart_engine(self, slot: int) -> None:
        """Restart the engine of a slot, because no engine is alive."""
        if (actor := self.board.mini_batches.get("actor")) and actor.completed:
            raise WorkerLost(
                "The last rollout engine was lost after the step had updated the actor, so a new engine cannot "
                "generate the remaining samples with the old weights."
            )
        with self._span("restart_engine", attributes={"slot": slot}):
            await self.engines.weights.restart_engine(slot)
        self.board.slot_table.restore_engine(slot)
        self._restarting = False
        self._changed.set()

    def _evicted(self, name: str, partial: Partial) -> None:
        """Record that a sample left its engine, and continue it on its target slot, if any."""
        now = self.clock()
        target = self.board.evicted(name, partial, now)
        if target is not None and self.reward_error is None:
            self._tasks.create_task(self._generate(target, (name,), {name: self.board.arrived(name, target, now)}))

    def _evict_surplus(self) -> None:
        """Evict samples that the step no longer needs; the board keeps their partial responses."""
        for slot, names in self.board.take_surplus():
            self._tasks.create_task(self._evict(slot, names, "tokens"))

    async def _evict(self, slot: int, names: Sequence[str], carry: str) -> None:
        with suppress(EngineLost):  # handled by `_generate` of its samples
            await self.engines.rollout[slot].evict(names, carry)

    async def _evict_from_drained(self, slot: int, names: Sequence[str], carry: str) -> None:
        """Evict samples of a drained slot; they wait again with their partial responses."""
        with self._span("drain", samples=tuple(names), attributes={"slot": slot, "carry": carry}):
            await self._evict(slot, names, carry)

    async def _move(self, decision: Move) -> None:
        with self._span("move", samples=decision.samples) as span:
            span.attributes |= {"source": decision.source, "target": decision.target, "carry": decision.carry}
            await self._evict(decision.source, decision.samples, decision.carry)

    async def _switch(self, decision: Switch) -> None:
        slot, attributes = decision.slot, {"slot": decision.slot, "to": decision.role}
        engine, trainer = self.engines.rollout[slot], self.engines.trainer
        with self._span("switch", attributes=attributes):
            if decision.role == "trainer":
                await to_ranks(engine, trainer, slot, discard=self._can_discard())
            else:
                await to_engine(engine, trainer, slot)
        self.board.switched(slot, decision.role)
        self._changed.set()

    def _can_discard(self) -> bool:
        """Return whether weights are pushed before anything else is generated."""
        return self.context.can_discard and all(sample.response for sample in self.board.samples.values())

    # Scoring and training --------------------------------------------------------------------------------------------

    async def _score(self, decision: Score) -> None:
        samples, is_reward_error = self._samples(decision.samples), decision.kind == "reward"
        try:
            if is_reward_error:
                with self._span("reward", samples=decision.samples):
                    rewards = await self.engines.reward.score(samples)
                for sample, reward in zip(samples, rewards, strict=True):
                    sample.reward = reward
            else:
                models, rows = tuple(map(model_of, decision.kinds)), [sample.row() for sample in samples]
                work = self.engines.trainer.score(models, rows, decision.slot)
                found = await self._run_with_spans(decision.kinds, decision, work)
                for kind, model in zip(decision.kinds, models, strict=True):
                    store_scores(kind, samples, found[model].arrays)
            self.board.scored(decision, self.clock())
            if not self.board.needed.isdisjoint(decision.kinds):
                is_reward_error = True
                self.context.on_scored()
        except Exception as error:
            if not is_reward_error:
                raise
            self.reward_error = self.reward_error or error
        self._changed.set()

    async def _accumulate(self, decision: Accumulate) -> None:
        samples, trainer = self._samples(decision.samples), cast(WholeModels, self.engines.trainer)
        work = trainer.accumulate(decision.models, self._rows(decision.models, samples), decision.slot)
        found = await self._run_with_spans([f"update_{model}" for model in decision.models], decision, work)
        for model in decision.models:
            self._store_fused_scores(model, samples, found[model].arrays)
        self.board.accumulated(decision, self.clock())
        self._changed.set()

    def _rows(self, models: Iterable[str], samples: Sequence[Sample]) -> list[Row]:
        """Return the rows of samples with the arrays that the losses read, except those that this update computes."""
        names = dict.fromkeys(name for model in models for name in self.context.row_tensors[model])
        given = [PASSES[kind][1] for model in models for kind in self._kinds_fused_into(model)]
        return [sample.row(*(name for name in names if name not in given)) for sample in samples]

    def _kinds_fused_into(self, model: str) -> tuple[str, ...]:
        """Return the kinds of scoring that the current update of the model computes itself."""
        return (
            self.context.fused_into_first_update
            if model == "actor" and not self.board.mini_batches[model].completed
            else ()
        )

    def _store_fused_scores(self, model: str, samples: Sequence[Sample], arrays: Sequence[np.ndarray]) -> None:
        for kind in self._kinds_fused_into(model):
            store_scores(kind, samples, arrays)

    async def _train(self, decision: Train) -> None:
        trained = {model: self._samples(names) for model, names in decision.samples.items()}
        rows = {model: self._rows((model,), samples) for model, samples in trained.items()}
        passes = {kind: self._samples(names) for kind, names in decision.passes.items()}
        scored = {model_of(kind): [sample.row() for sample in samples] for kind, samples in passes.items()}
        trainer = cast(Stages, self.engines.trainer)
        with ExitStack() as spans:
            for model, names in decision.samples.items():
                spans.enter_context(self._span(f"update_{model}", samples=names))
            metrics, scores, log_probs = await trainer.train(rows, scored)
        self.context.note(metrics)
        for kind, samples in passes.items():
            store_scores(kind, samples, scores[model_of(kind)])
        for model, samples in trained.items():
            self._store_fused_scores(model, samples, log_probs)
        self.board.trained(decision, self.clock())
        self._changed.set()

    async def _step(self, decision: OptimizerStep) -> None:
        for model in decision.models:
            progress, factor = self.board.mini_batches[model], self.context.lr_factors[model]
            with self._span(f"update_{model}", cause="scored", attributes={"step": True}) as span:
                lengths, skipped = (
                    [sample.trained_tokens(model) for sample in self._samples(names)]
                    for names in (progress.accumulated_samples, progress.skipped_samples)
                )
                span.attributes |= {"rows": len(lengths), "skipped_rows": len(skipped)}
                self.has_updated = True
                self.context.note(await self.engines.trainer.step(model, lengths, factor, skipped))
        self.board.stepped(decision)
        self._changed.set()

    def _span(self, kind: str, **fields: Any) -> AbstractContextManager[Span]:
        return self.recorder.span(kind, **{"step": self.context.step, "cause": self.board.purpose} | fields)

    async def _run_with_spans(
        self, kinds: Sequence[str], decision: Score | Accumulate, work: Awaitable[dict[str, PassResult]]
    ) -> dict[str, PassResult]:
        """Await a call that runs one pass per kind. The span of each pass ends where the next one begins."""
        where = {} if decision.slot is None else {"slot": decision.slot}
        with ExitStack() as stack:
            spans = [
                stack.enter_context(self._span(kind, samples=decision.samples, attributes=dict(where)))
                for kind in kinds
            ]
            found = await work
        for before, span, result in zip(spans, spans[1:], list(found.values())[1:], strict=False):
            before.end = span.start = min(max(result.began, before.start), span.end)
        return found

    def _samples(self, names: Iterable[str]) -> list[Sample]:
        return [self.board.samples[name] for name in names]
