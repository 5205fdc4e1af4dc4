"""Generation: one vLLM engine per rollout slot, as a Ray actor.

Role: `RolloutWorker` becomes an asyncio actor around vLLM's AsyncLLM; the driver has a `RolloutHandle` of it.

    controller -> RolloutHandle.generate -> [Ray stream] <- RolloutWorker.generate <- [queue] <- one task per sample
                  waits for the next item                   waits for any task                      |
                                                                  vLLM's scheduler <- [requests] <--+   engine process

Invariants:
- each sample is a request of its own with its own seed, so neither the batch nor the engine changes what is sampled;
  samples handed over together run together and share their prompt's KV blocks;
- log-probs are of the drawn tokens at the sampling temperature (of the truncated distribution if top_p / top_k cut);
- a prompt's clip comes as a handle and becomes numbers here (`prompts`); no response holds a visual placeholder;
- a sample that is evicted and goes on elsewhere gets the same tokens as if it had stayed: those that it has become the
  end of its prompt, `seeded_generators` positions its generator, and by `kv_transfer` its KV cache may come along;
- a response carries the version of the weights that drew its tokens. If weights changed underneath (the push pauses
  and then recomputes requests in flight under the new weights), it carries the oldest, and its span names all;
- a dead engine process raises `EngineLost` at once; how long anything may take is bounded by the handle, which also
  asks for the `pulse` of an engine that may have stopped without a word.
Who unblocks whom: `generate` ends when its last sample did; `evict` ends samples early, also when the consumer leaves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import psutil

from rlfuse import clock
from rlfuse.cluster import cuda, watchdog
from rlfuse.cluster.child_processes import bind, restore_child_signals
from rlfuse.cluster.garbage import GarbageCollector, importing
from rlfuse.config.schema import Config, ModelConfig, RolloutConfig
from rlfuse.engines.rollout.engine_actor import TOGETHER_S, Capabilities, Request
from rlfuse.engines.rollout.liveness import Liveness, Pulse, children_cpu
from rlfuse.engines.rollout.step_meter import StepMeter
from rlfuse.engines.vllm import engine_death
from rlfuse.engines.vllm.engine_fork import forking
from rlfuse.engines.vllm.importing import import_vllm
from rlfuse.engines.vllm.setup import (
    build,
    engine_arguments,
    engine_step,
    extend,
    holds_tokens,
    rollout_env,
    sampling_params,
    token_bytes,
)
from rlfuse.engines.vllm.support import unserved
from rlfuse.engines.weights.sync import resolve_transfer
from rlfuse.errors import EngineError
from rlfuse.events import Recorder, Span
from rlfuse.protocols import PARTS, Load, Part, Sampling
from rlfuse.samples import Partial, Response


class RolloutWorker:
    """The actor's side. Create it as an asyncio actor: num_cpus=0, a high max_concurrency and `rollout_env`."""

    capabilities = Capabilities(kv_move=True, embeds=True)

    def __init__(self, slot: int):
        self.name = f"rollout/{slot}"
        self._recorder = Recorder(self.name)
        self._garbage = GarbageCollector(self._recorder)
        watchdog.register(self.name, self._recorder)
        restore_child_signals()  # how the engine's process ended
        self._engine: Any = None
        self._tokenizer: Any = None
        self._errors: engine_death.ErrorOutput | None = None
        self._below: list[Any] = []
        self._prompts: Any = None
        self._active: dict[str, asyncio.Task] = {}
        self._kv_bases: dict[str, str] = {}
        """Active sample -> where its KV cache would be put."""
        self._kv_store: Any = None
        self._meter: StepMeter | None = None
        self._liveness: Liveness | None = None
        self._asleep: set[Part] = set()
        self._frozen = self._discarded = self._restorable = False
        self._holds_tokens = False
        self._asked = 0
        """Calls of the engine under way, but for those that generate."""
        self._calls = 0
        self._stats: Any = None
        self._steps = 0
        self._version = 0
        self._update: Span | None = None

    @staticmethod
    def environment(config: Config, device: str) -> dict[str, str]:
        found = rollout_env(device, config.rollout.weight_transfer, cuda.engine_dtype(config))
        return found | (cuda.environment(cuda.deterministic_settings(config)) if device == "cuda" else {})

    @staticmethod
    def unserved(config: Config) -> list[str]:
        return unserved(config)

    async def start(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        max_model_len: int,
        device: str,
        tail_speculation: int = 0,
        core: int | None = None,
    ) -> dict:
        """Build the engine inside the running loop; returns facts to log. See `RolloutHandle.start`."""
        began, self._errors, self._device = time.perf_counter(), engine_death.ErrorOutput(), device
        core = core if device == "cpu" else None
        try:
            with self._recorder.span("start", cause="run"):
                bind(core)  # first, so that the engine's processes inherit it
                await self.prepare(model)
                from rlfuse.engines.vllm.prompts import Prompts
                from rlfuse.video.placeholders import placeholder_ids

                arguments = engine_arguments(model, rollout, max_model_len, device, tail_speculation)
                self._holds_tokens = holds_tokens(arguments)
                with forking(device, arguments):
                    self._engine, self._kv_store = build(arguments, rollout, device, self._note)
                bind(core)
        except Exception as error:
            raise engine_death.no_start(self.name, model.path, self._errors, error) from error
        self._below = engine_death.processes(self._engine)
        self._tokenizer = self._engine.get_tokenizer()
        await self._engine.update_weight_version(str(self._version))
        if resolve_transfer(rollout.weight_transfer, device) == "ipc":
            from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

            await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info={"packed": True}))
        self._limit = self._engine.model_config.max_model_len
        batched_tokens = self._engine.vllm_config.scheduler_config.max_num_batched_tokens
        self._prompts = Prompts(self._engine.model_config.hf_config, batched_tokens)
        cache = self._engine.vllm_config.cache_config
        kv_tokens = (cache.num_gpu_blocks - 1) * cache.block_size  # no sample gets vLLM's first block, its null block
        self._meter, self._liveness = StepMeter(self._recorder, kv_tokens), Liveness(children_cpu)
        if device == "cuda":
            # A push has nothing for a vision tower and a draft model.
            unpushed = (
                placeholder_ids(self._engine.model_config.hf_config) or "speculative_config" in rollout.engine_kwargs
            )
            self._restorable = not unpushed and not any(await self._engine.collective_rpc("unpushed_tensors"))
        bytes_per_token = token_bytes(self._engine.vllm_config)
        return {"start_s": time.perf_counter() - began, "kv_tokens": kv_tokens, "kv_bytes_per_token": bytes_per_token}

    async def prepare(self, model: ModelConfig) -> None:
        """Import what `start` needs. Takes about ten seconds and does not touch the device."""
        with importing():
            import rlfuse.engines.vllm.prompts  # noqa: F401
            from rlfuse.video.models.base import bring_along

            bring_along(model.video_family)
            import_vllm()

    def _note(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """vLLM calls this after every engine step."""
        self._stats = scheduler_stats or self._stats
        if self._meter is None or scheduler_stats is None:
            return
        idle = not scheduler_stats.num_running_reqs and not scheduler_stats.num_waiting_reqs
        if self._meter.record(engine_step(scheduler_stats, iteration_stats), scheduler_stats.kv_cache_usage, idle):
            self._steps += 1
            self._liveness.did(f"a step of {scheduler_stats.num_running_reqs} samples")

    async def pulse(self) -> Pulse:
        """Whether the engine gets on with what it was asked for."""
        self._garbage.guard()
        generating = bool(self._active) and not self._frozen
        return self._liveness.judge(busy=generating or self._asked > 0)

    async def stop(self) -> None:
        if self._engine is not None:
            with suppress(psutil.NoSuchProcess):  # vLLM kills what has just ended by itself
                self._engine.shutdown()
        if self._kv_store is not None:
            self._kv_store.close()

    @contextmanager
    def _engine_alive(self) -> Iterator[None]:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except EngineDeadError:
            # vLLM's own traceback ends in "see above".
            raise engine_death.engine_died(self.name, self._errors, self._below) from None

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """The engine is asked for something that it should answer soon."""
        self._asked += 1
        try:
            with self._engine_alive():
                yield
            self._liveness.did(what)
        finally:
            self._asked -= 1

    # Generation ----------------------------------------------------------------------------------------------------

    async def generate(
        self, requests: Sequence[Request], sampling: Sampling
    ) -> AsyncIterator[list[tuple[str, Response | Partial]]]:
        """(sample id, response) of each request in finishing order, or what it has when evicted; a few at a time."""
        self._calls += 1
        self._admit(requests)
        tasks = {request.id: asyncio.create_task(self._complete(request, sampling)) for request in requests}
        self._active |= tasks
        try:
            waiting = set(tasks.values())
            while waiting:
                _, running = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if running:
                    await asyncio.sleep(TOGETHER_S)
                finished = {task for task in waiting if task.done()}
                waiting -= finished
                yield [task.result() for task in finished]
        finally:
            for task in tasks.values():
                task.cancel()  # vLLM ends the request of a cancelled task
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            for sample_id, task in tasks.items():
                if self._active.get(sample_id) is task:  # cancelled before it began; else the sample may be back again
                    del self._active[sample_id]

    def _admit(self, requests: Sequence[Request]) -> None:
        """Refuse them all, or none."""
        if self._asleep:
            raise RuntimeError(f"{self.name} is asleep: wake it before {len(requests)} samples are handed over")
        if self._discarded:
            raise RuntimeError(f"{self.name} discarded its weights: push new ones before {len(requests)} samples come")
        ids = {request.id for request in requests}
        if twice := sorted(ids & self._active.keys()) or ["some in one call"] * (len(ids) < len(requests)):
            raise ValueError(f"samples are being generated already ({twice}): hand each sample over once")
        for request in requests:
            if (length := len(request.prompt_ids)) >= self._limit:
                seen = sum(len(each.positions) for each in request.visual)
                visual = f" ({seen} of them visual)" if seen else ""
                raise ValueError(
                    f"sample {request.id} has {length} prompt tokens{visual}, the engine holds {self._limit} with the "
                    "response: raise data.max_prompt_length or shorten the prompt"
                )
            self._prompts.check(request.id, request.prompt_ids, request.visual)

    async def _complete(self, request: Request, sampling: Sampling) -> tuple[str, Response | Partial]:
        """One sample, from its prompt or what it came with, to its response or what it leaves with."""
        attributes = {"prompt_tokens": len(request.prompt_ids), "carried_tokens": len(request.partial.token_ids)}
        span = self._recorder.span(
            "generate", step=request.step, samples=(request.id,), cause="admitted", attributes=attributes
        )
        self._recorder.step = request.step
        try:
            with self._engine_alive(), span as record:
                room = min(sampling.max_tokens, self._limit - len(request.prompt_ids)) - len(request.partial.token_ids)
                if room < 1:
                    return request.id, self._response(request.partial, "length")
                params, ids = self._kv_transfer_params(request), request.ids()
                parameters = sampling_params(request, sampling, room, params, self._prompts.logit_bias)
                prompt = self._prompts.prompt(ids, request.visual)
                async for output in self._engine.generate(prompt, parameters, request.id):
                    final = output  # the only one: parameters ask for the final output
                if final.prompt_token_ids != ids.tolist():
                    raise EngineError(
                        f"{self.name}: vLLM made {len(final.prompt_token_ids)} prompt tokens of the {len(ids)} of "
                        f"sample {request.id}: its model and the video plan disagree"
                    )
                partial, reason = extend(request.partial, final, self._version, record)
                if reason != "abort":
                    return request.id, self._response(partial, reason)
                return request.id, replace(partial, kv_key=await self._kv_key(request.id))
        finally:
            self._active.pop(request.id, None)
            if base := self._kv_bases.pop(request.id, None):
                self._kv_store.end_request(base)
            if self._kv_store is not None:
                self._kv_store.drop(request.partial.kv_key)

    def _response(self, partial: Partial, reason: str) -> Response:
        text = self._tokenizer.decode(partial.token_ids.tolist(), skip_special_tokens=True)
        return Response(partial.token_ids, partial.log_probs, reason, partial.weight_version, text, partial.trainable)

    # Moving --------------------------------------------------------------------------------------------------------

    async def evict(self, sample_ids: Sequence[str], carry: str, calls: int) -> None:
        """End these samples of the first so many `calls` of `generate`; returns when they have ended."""
        if carry not in ("tokens", "kv"):
            raise ValueError(f"carry={carry!r}: choose tokens or kv")
        while self._calls < calls:  # this call has overtaken that of `generate`, which will be here soon
            await asyncio.sleep(0.001)
        with self._engine_alive():
            pending = {self._active[sample_id]: sample_id for sample_id in sample_ids if sample_id in self._active}
            if carry == "kv":
                for base in filter(None, map(self._kv_bases.get, pending.values())):
                    self._kv_store.want(base)
            while pending:
                # Again until gone: a sample that vLLM is only just admitting is not yet known to it by its id.
                await self._abort(pending.values())
                await asyncio.wait(pending, timeout=0.01)
                pending = {task: sample_id for task, sample_id in pending.items() if not task.done()}

    async def _abort(self, sample_ids: Iterable[str]) -> None:
        if self._holds_tokens:
            from rlfuse.engines.vllm.front_end import abort

            await abort(self._engine, sample_ids)
        else:
            await self._engine.abort(list(sample_ids))

    def _kv_transfer_params(self, request: Request) -> dict[str, str]:
        """For vLLM's connector: where the request's KV cache is to be put when it is wanted, and from where loaded."""
        if self._kv_store is None:
            return {}
        self._kv_bases[request.id] = self._kv_store.new_base()
        load = self._kv_store.expect(request.partial.kv_key, self._version)
        return {"save": self._kv_bases[request.id]} | ({"load": load} if load else {})

    async def _kv_key(self, sample_id: str) -> str | None:
        """The key of an aborted sample's KV cache, if it was wanted and there was something to put away."""
        base = self._kv_bases.get(sample_id)
        if base is None or not self._kv_store.wanted(base):
            return None
        await self._engine.get_weight_version()  # answered after the abort, which had no answer
        return await self._kv_store.collect(base, self._version)

    async def sleep(self, discard: bool = False) -> None:
        """Give the device's memory up, unless that is done; refused while samples are active.

        `discard`: the weights, too, where a push restores all that the engine computes with.
        """
        if count := len(self._active):
            raise RuntimeError(f"{self.name} can't sleep while {count} samples are generated: evict or await them")
        if self._device == "cuda" and "weights" not in self._asleep:  # on CPU hosts there is no memory to give up
            with self._asking("to fall asleep"):
                self._discarded |= discard and self._restorable
                await self._engine.sleep(level=2 if self._discarded else 1)
        self._asleep = set(PARTS)

    async def wake(self, part: Part | None = None) -> None:
        """Take it back, or only a part, unless that is done: the weights as they were, no KV cache of anything."""
        waking = self._asleep & ({part} if part else self._asleep)
        if self._device == "cuda" and waking:
            with self._asking("to wake"):
                await self._engine.wake_up(tags=[part] if part else None)  # a tag that is awake would stop the others
        self._asleep -= waking

    async def load(self) -> Load:
        """As of vLLM's last step; nothing when no sample is active."""
        if (stats := self._stats) is None or not self._active:
            return Load(0, 0, 0.0)
        return Load(stats.num_running_reqs, stats.num_waiting_reqs, float(stats.kv_cache_usage), self._steps)

    async def drain(self, collect: bool = False) -> list[Span]:
        if self._meter is not None:
            self._meter.close()
        if collect:
            self._garbage.collect()
        return self._recorder.drain()

    # Weights -------------------------------------------------------------------------------------------------------

    async def begin_update(self) -> None:
        """Freeze requests in flight, forget everything computed with the old weights, expect buckets."""
        if "weights" in self._asleep:
            raise RuntimeError(f"{self.name} has its weights asleep: wake them before new ones are pushed")
        with self._asking("a pause for new weights"):
            self._frozen = True
            self._update = Span("update_weights", self.name, clock.now(), cause="optimizer")
            self._meter.pause()
            if self._kv_store is not None:
                await self._kv_store.invalidate()
            await self._engine.pause_generation(mode="keep", clear_cache=True)
            await self._engine.start_weight_update()

    async def receive(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        with self._asking("a bucket of new weights"):
            await self._engine.update_weights(WeightTransferUpdateRequest(update_info=info))

    async def finish_update(self, version: int) -> None:
        """All buckets are here: generate with them, as `version`."""
        with self._asking("the last of new weights"):
            await self._engine.finish_weight_update(weight_version=str(version))
            await self._engine.reset_prefix_cache()
            await self._engine.reset_encoder_cache()
            self._meter.pause()
            await self._engine.resume_generation()  # of nothing, where the KV cache is asleep: `_admit` sees to that
        self._version, self._frozen, self._discarded = version, False, False
        if self._update is not None:
            self._update.end, self._update.attributes["version"] = clock.now(), version
            self._recorder.add(self._update)

    async def version(self) -> int:
        """The version that the engine process itself reports."""
        with self._engine_alive():
            return int(await self._engine.get_weight_version())
