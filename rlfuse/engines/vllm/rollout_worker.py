"""Generation: one vLLM engine per rollout slot, as a Ray actor.

    controller -> RolloutHandle.generate -> [Ray stream] <- RolloutWorker.generate <- one task per sample
                  waits for the next item                   waits for any task              |
                                                          vLLM's scheduler <- [requests] <--+   engine process

Invariants:
- each sample is a request with a seed of its own, so neither the batch nor the engine changes what is sampled; samples
  of one call share their prompt's KV blocks;
- log-probs are of the drawn tokens at the sampling temperature, of the truncated distribution with top_p or top_k;
- an evicted sample gets the same tokens elsewhere: those it has become the end of its prompt, `worker_extension`
  positions its generator, and `kv_transfer` may move its KV cache;
- a response has the version of the weights that drew its tokens, the oldest if they changed; its span names all.
A dead engine process raises `EngineLost` immediately. `RolloutHandle` bounds every call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import psutil

from rlfuse.cluster import cuda
from rlfuse.cluster.child_processes import bind, restore_child_signals
from rlfuse.cluster.garbage import importing
from rlfuse.config.schema import Config, ModelConfig, RolloutConfig
from rlfuse.engines.memory.estimate import Memory
from rlfuse.engines.rollout.engine_actor import Capabilities, Request
from rlfuse.engines.rollout.engine_base import EngineBase
from rlfuse.engines.rollout.liveness import children_cpu
from rlfuse.engines.rollout.step_meter import StepMeter
from rlfuse.engines.vllm import engine_death
from rlfuse.engines.vllm.engine_fork import forking
from rlfuse.engines.vllm.gpu_settings import deterministic_settings, engine_dtype
from rlfuse.engines.vllm.importing import import_vllm
from rlfuse.engines.vllm.setup import (
    build,
    engine_arguments,
    engine_step,
    extend,
    holds_tokens,
    memory_arguments,
    rollout_env,
    sampling_params,
    token_bytes,
)
from rlfuse.engines.vllm.support import unsupported_reasons
from rlfuse.engines.weights.sync import resolve_transfer
from rlfuse.errors import EngineError
from rlfuse.protocols import Load, Part, Sampling
from rlfuse.samples import Partial, Response


class RolloutWorker(EngineBase):
    """An `EngineActor`; create it with num_cpus=0, a high max_concurrency and `rollout_env`."""

    capabilities = Capabilities(can_move_kv=True, embeds=True)

    def __init__(self, slot: int):
        super().__init__(slot, children_cpu)
        restore_child_signals()  # how the engine's process ended
        self._engine: Any = None
        self._errors: engine_death.ErrorOutput | None = None
        self._below: list[Any] = []
        self._prompts: Any = None
        self._kv_store: Any = None
        self._frozen = self._discarded = self._restorable = False
        self._holds_tokens = False
        self._asked = 0
        """Calls of the engine in progress, except those that generate."""
        self._stats: Any = None

    @staticmethod
    def environment(config: Config, device: str, slots: Sequence[int] = (0,)) -> dict[str, str]:
        found = rollout_env(device, config.rollout.weight_transfer, engine_dtype(config), slots)
        if device == "cuda":
            found |= cuda.environment(cuda.deterministic_settings(config))
            found |= {each.name: each.value for each in deterministic_settings(config)}
        return found

    @staticmethod
    def unsupported_reasons(config: Config, trains: bool = True) -> list[str]:
        return unsupported_reasons(config, trains)

    @staticmethod
    def sized(rollout: RolloutConfig, memory: Memory) -> tuple[RolloutConfig, bool]:
        given = memory_arguments(memory) | rollout.engine_kwargs
        # With a given cache, vLLM does not measure the memory that ranks leave free.
        together = not memory.alternates and bool(given.get("kv_cache_memory_bytes"))
        return replace(rollout, engine_kwargs=given), together

    async def start(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        max_model_len: int,
        device: str,
        tail_speculation: int = 0,
        core: int | None = None,
    ) -> dict:
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
            raise engine_death.start_error(self.name, model.path, self._errors, error) from error
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
        self._meter = StepMeter(self._recorder, kv_tokens)
        if device == "cuda":
            # A push has nothing for a vision tower and a draft model.
            unpushed = (
                placeholder_ids(self._engine.model_config.hf_config) or "speculative_config" in rollout.engine_kwargs
            )
            self._restorable = not unpushed and not any(await self._engine.collective_rpc("unpushed_tensors"))
        bytes_per_token = token_bytes(self._engine.vllm_config)
        return {"start_s": time.perf_counter() - began, "kv_tokens": kv_tokens, "kv_bytes_per_token": bytes_per_token}

    async def prepare(self, model: ModelConfig) -> None:
        """Import what `start` needs: takes ten seconds and does not touch the device."""
        with importing():
            import rlfuse.engines.vllm.prompts  # noqa: F401
            from rlfuse.video.models.base import register_custom_family

            register_custom_family(model.video_family)
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

    def _is_busy(self) -> bool:
        return (bool(self._active) and not self._frozen) or self._asked > 0

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
            raise engine_death.death_error(self.name, self._errors, self._below) from None

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Count a call that the engine should answer soon."""
        self._asked += 1
        try:
            with self._engine_alive():
                yield
            self._liveness.did(what)
        finally:
            self._asked -= 1

    # Generation ----------------------------------------------------------------------------------------------------

    def _admit(self, requests: Sequence[Request]) -> None:
        super()._admit(requests)
        if self._discarded:
            raise RuntimeError(f"{self.name} discarded its weights: push new ones before {len(requests)} samples come")
        for request in requests:
            self._prompts.check(request.id, request.prompt_ids, request.visual)

    def _begin(self, request: Request, sampling: Sampling) -> asyncio.Task:
        task = self._active[request.id] = asyncio.create_task(self._complete(request, sampling))
        return task

    async def _leave(self, begun: Collection[asyncio.Future]) -> None:
        for task in begun:
            task.cancel()  # vLLM ends the request of a cancelled task
        await asyncio.gather(*begun, return_exceptions=True)
        for sample_id in [name for name, task in self._active.items() if task in begun]:
            del self._active[sample_id]  # cancelled before it began

    async def _complete(self, request: Request, sampling: Sampling) -> Response | Partial:
        """Generate one sample from its prompt, or continue its partial response."""
        attributes = {"prompt_tokens": len(request.prompt_ids), "carried_tokens": len(request.partial.token_ids)}
        span = self._recorder.span(
            "generate", step=request.step, samples=(request.id,), cause="admitted", attributes=attributes
        )
        self._recorder.step = request.step
        try:
            with self._engine_alive(), span as record:
                if (room := self._room(request, sampling)) < 1:
                    return self._response(request.partial, "length")
                store, ids = self._kv_store, request.ids()
                params = store.parameters(request.id, request.partial.kv_key, self._version) if store else {}
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
                    return self._response(partial, reason)
                return replace(partial, kv_key=await self._kv_key(request.id))
        finally:
            self._active.pop(request.id, None)
            if self._kv_store is not None:
                self._kv_store.end(request.id, request.partial.kv_key)

    # Moving --------------------------------------------------------------------------------------------------------

    async def _evict(self, sample_ids: list[str], carry: str) -> None:
        with self._engine_alive():
            pending = {self._active[sample_id]: sample_id for sample_id in sample_ids}
            if carry == "kv" and self._kv_store is not None:
                for sample_id in sample_ids:
                    self._kv_store.want(sample_id)
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

    async def _kv_key(self, sample_id: str) -> str | None:
        """Return the key of an aborted sample's KV cache; None if it was not wanted, or there is none."""
        if self._kv_store is None or not self._kv_store.wanted(sample_id):
            return None
        await self._engine.get_weight_version()  # answered after the abort, which had no answer
        return await self._kv_store.collect(sample_id, self._version)

    async def _free_device(self, discard: bool) -> None:
        """Drop the KV cache, and the weights if a push restores all tensors; else move these to the host."""
        if self._device == "cuda" and "weights" not in self._asleep:
            with self._asking("to fall asleep"):
                self._discarded |= discard and self._restorable
                await self._engine.sleep(level=2 if self._discarded else 1)

    async def _take_device(self, part: Part | None) -> None:
        if self._device == "cuda":
            with self._asking("to wake"):
                await self._engine.wake_up(tags=[part] if part else None)  # a tag that is awake would stop the others

    async def load(self) -> Load:
        if (stats := self._stats) is None or not self._active:
            return Load(0, 0, 0.0)
        return Load(stats.num_running_reqs, stats.num_waiting_reqs, float(stats.kv_cache_usage), self._steps)

    # Weights -------------------------------------------------------------------------------------------------------

    async def begin_update(self) -> None:
        if "weights" in self._asleep:
            raise RuntimeError(f"{self.name} has its weights asleep; wake them before pushing new ones")
        with self._asking("a pause for new weights"):
            self._frozen = True
            self._pause()
            if self._kv_store is not None:
                await self._kv_store.invalidate()
            await self._engine.pause_generation(mode="keep", clear_cache=True)
            await self._engine.start_weight_update()

    async def receive(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        with self._asking("a bucket of new weights"):
            await self._engine.update_weights(WeightTransferUpdateRequest(update_info=info))

    async def finish_update(self, version: int) -> None:
        with self._asking("the last of new weights"):
            await self._engine.finish_weight_update(weight_version=str(version))
            await self._engine.reset_prefix_cache()
            await self._engine.reset_encoder_cache()
            self._meter.pause()
            await self._engine.resume_generation()  # of nothing, where the KV cache is asleep: `_admit` sees to that
        self._frozen = self._discarded = False
        self._updated(version)

    async def version(self) -> int:
        """Return the version that the engine process reports."""
        with self._engine_alive():
            return int(await self._engine.get_weight_version())
