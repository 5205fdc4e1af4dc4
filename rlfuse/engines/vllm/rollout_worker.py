"""Generation: one vLLM engine per rollout slot, as a Ray actor.

    controller -> RolloutHandle.generate -> [Ray stream] <- RolloutWorker.generate <- one task per sample
                  waits for the next item                   waits for any task              |
                                                          vLLM's scheduler <- [requests] <--+   engine process

Invariants:
- each sample is a request with its own seed, so its tokens do not depend on the batch or the engine; samples of one
  call share their prompt's KV blocks;
- log-probs are of the drawn tokens at the sampling temperature; with top_p or top_k, of the truncated distribution;
- an evicted sample gets the same tokens on another engine: its tokens so far become the end of its prompt,
  `worker_extension` positions its random generator, and `kv_transfer` may move its KV cache;
- a response has the version of the weights that drew its tokens, the oldest if they changed; its span lists all.
A dead engine process raises `EngineLost` immediately. `RolloutHandle` sets a timeout for every call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import psutil

from rlfuse.cluster import cuda
from rlfuse.cluster.child_processes import bind, restore_child_signals
from rlfuse.cluster.garbage import importing
from rlfuse.config.rollout import HISTORY, RolloutConfig
from rlfuse.config.schema import Config, ModelConfig
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
    """vLLM's `EngineActor`; create it with num_cpus=0, a high max_concurrency and `rollout_env`."""

    capabilities = Capabilities(can_move_kv=True, accepts_embeddings=True)

    def __init__(self, slot: int):
        super().__init__(slot, children_cpu)
        restore_child_signals()  # needed for the exit status of the engine process
        self._engine: Any = None
        self._errors: engine_death.ErrorOutput | None = None
        self._processes: list[Any] = []
        self._prompts: Any = None
        self._kv_store: Any = None
        self._is_updating = self._has_discarded_weights = self._restorable = False
        self._holds_tokens = False
        self._draft_vocabulary = 0
        """Number of token ids that drafts may have; 0 if the engine does not draft from earlier responses."""
        self._calls_in_progress = 0
        """Number of calls to the engine in progress, except generation."""
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
    def apply_memory_plan(rollout: RolloutConfig, memory: Memory) -> tuple[RolloutConfig, bool]:
        given = memory_arguments(memory) | rollout.engine_kwargs
        # With a given cache size, vLLM does not profile the memory that ranks leave free.
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
                bind(core)  # first, so that the engine's processes inherit the binding
                await self.prepare(model)
                from rlfuse.engines.vllm.prompts import Prompts
                from rlfuse.video.placeholders import placeholder_ids

                arguments = engine_arguments(model, rollout, max_model_len, device, tail_speculation)
                self._holds_tokens = holds_tokens(arguments)
                with forking(device, arguments):
                    self._engine, self._kv_store = build(arguments, rollout, device, self._record_step)
                bind(core)
        except Exception as error:
            raise engine_death.start_error(self.name, model.path, self._errors, error) from error
        self._processes = engine_death.processes(self._engine)
        self._tokenizer = self._engine.get_tokenizer()
        await self._engine.update_weight_version(str(self._version))
        if resolve_transfer(rollout.weight_transfer, device) == "ipc":
            from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

            await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info={"packed": True}))
        self._limit = self._engine.model_config.max_model_len
        if rollout.draft == HISTORY:
            self._draft_vocabulary = self._engine.model_config.get_vocab_size()
        batched_tokens = self._engine.vllm_config.scheduler_config.max_num_batched_tokens
        self._prompts = Prompts(self._engine.model_config.hf_config, batched_tokens)
        cache = self._engine.vllm_config.cache_config
        kv_tokens = (cache.num_gpu_blocks - 1) * cache.block_size  # vLLM reserves the first block as null block
        self._meter = StepMeter(self._recorder, kv_tokens)
        if device == "cuda":
            # A push does not include vision towers and draft models.
            unpushed = (
                placeholder_ids(self._engine.model_config.hf_config) or "speculative_config" in rollout.engine_kwargs
            )
            self._restorable = not unpushed and not any(await self._engine.collective_rpc("unpushed_tensors"))
        bytes_per_token = token_bytes(self._engine.vllm_config)
        return {"start_s": time.perf_counter() - began, "kv_tokens": kv_tokens, "kv_bytes_per_token": bytes_per_token}

    async def prepare(self, model: ModelConfig) -> None:
        """Import what `start` needs; takes ten seconds and does not use the device."""
        with importing():
            import rlfuse.engines.vllm.prompts  # noqa: F401
            from rlfuse.video.models.base import register_custom_family

            register_custom_family(model.video_family)
            import_vllm()

    def _record_step(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """Record an engine step; vLLM calls this after each one."""
        self._stats = scheduler_stats or self._stats
        if self._meter is None or scheduler_stats is None:
            return
        idle = not scheduler_stats.num_running_reqs and not scheduler_stats.num_waiting_reqs
        if self._meter.record(engine_step(scheduler_stats, iteration_stats), scheduler_stats.kv_cache_usage, idle):
            self._steps += 1
            self._liveness.record_progress(f"a step of {scheduler_stats.num_running_reqs} samples")

    def _is_busy(self) -> bool:
        return (bool(self._active) and not self._is_updating) or self._calls_in_progress > 0

    async def stop(self) -> None:
        if self._engine is not None:
            with suppress(psutil.NoSuchProcess):  # vLLM kills a process that has just exited
                self._engine.shutdown()
        if self._kv_store is not None:
            self._kv_store.close()

    @contextmanager
    def _engine_alive(self) -> Iterator[None]:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except EngineDeadError:
            # vLLM's traceback only refers to an earlier one.
            raise engine_death.death_error(self.name, self._errors, self._processes) from None

    @contextmanager
    def _engine_call(self, what: str) -> Iterator[None]:
        """Count a call to the engine as in progress; `what` describes it."""
        self._calls_in_progress += 1
        try:
            with self._engine_alive():
                yield
            self._liveness.record_progress(what)
        finally:
            self._calls_in_progress -= 1

    # Generation ----------------------------------------------------------------------------------------------------

    def _admit(self, requests: Sequence[Request]) -> None:
        super()._admit(requests)
        if self._has_discarded_weights:
            raise RuntimeError(
                f"{self.name} has discarded its weights; push new ones before submitting {len(requests)} samples"
            )
        for request in requests:
            self._prompts.check(request.id, request.prompt_ids, request.visual)

    def _start_sample(self, request: Request, sampling: Sampling) -> asyncio.Task:
        task = self._active[request.id] = asyncio.create_task(self._complete(request, sampling))
        return task

    async def _stop_unfinished(self, started: Collection[asyncio.Future]) -> None:
        for task in started:
            task.cancel()  # vLLM aborts the request of a cancelled task
        await asyncio.gather(*started, return_exceptions=True)
        for sample_id in [name for name, task in self._active.items() if task in started]:
            del self._active[sample_id]  # cancelled before the task started

    async def _complete(self, request: Request, sampling: Sampling) -> Response | Partial:
        """Generate one sample from its prompt, or continue its partial response."""
        attributes = {"prompt_tokens": len(request.prompt_ids), "carried_tokens": len(request.partial.token_ids)}
        span = self._recorder.span(
            "generate", step=request.step, samples=(request.id,), cause="admitted", attributes=attributes
        )
        self._recorder.step = request.step
        try:
            with self._engine_alive(), span as record:
                if (room := self._remaining_tokens(request, sampling)) < 1:
                    return self._response(request.partial, "length")
                store, ids = self._kv_store, request.ids()
                params = store.parameters(request.id, request.partial.kv_key, self._version) if store else {}
                bias, drafts = self._prompts.logit_bias, self._drafts(request)
                parameters = sampling_params(request, sampling, room, params, bias, drafts)
                prompt = self._prompts.prompt(ids, request.visual)
                async for output in self._engine.generate(prompt, parameters, request.id):
                    final = output  # the only output, because parameters request the final one
                if final.prompt_token_ids != ids.tolist():
                    raise EngineError(
                        f"{self.name}: vLLM has {len(final.prompt_token_ids)} prompt tokens instead of {len(ids)} for "
                        f"sample {request.id}; the model and the video plan differ"
                    )
                partial, reason = extend(request.partial, final, self._version, record)
                if reason != "abort":
                    return self._response(partial, reason)
                return replace(partial, kv_key=await self._kv_key(request.id))
        finally:
            self._active.pop(request.id, None)
            if self._kv_store is not None:
                self._kv_store.forget(request.id, request.partial.kv_key)

    def _drafts(self, request: Request) -> tuple[np.ndarray, ...]:
        """Return the request's drafts if the engine can verify them: a file may have responses of another model."""
        found = (each for each in request.drafts if len(each))
        can_verify = all(each.min() >= 0 and each.max() < self._draft_vocabulary for each in found)
        return request.drafts if can_verify else ()

    # Moving --------------------------------------------------------------------------------------------------------

    async def _evict(self, sample_ids: list[str], carry: str) -> None:
        with self._engine_alive():
            pending = {self._active[sample_id]: sample_id for sample_id in sample_ids}
            if carry == "kv" and self._kv_store is not None:
                for sample_id in sample_ids:
                    self._kv_store.request_save(sample_id)
            while pending:
                # Repeat until they end: vLLM does not yet know the id of a sample that it is admitting.
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
        """Return the key of an aborted sample's KV cache; None if it was not requested or could not be saved."""
        if self._kv_store is None or not self._kv_store.is_save_requested(sample_id):
            return None
        await self._engine.get_weight_version()  # the answer arrives after the abort, which has none
        return await self._kv_store.wait_saved(sample_id, self._version)

    async def _free_device(self, discard: bool) -> None:
        """Drop the KV cache, and the weights if a push restores all tensors; otherwise move the weights to the host."""
        if self._device == "cuda" and "weights" not in self._asleep:
            with self._engine_call("sleep"):
                self._has_discarded_weights |= discard and self._restorable
                await self._engine.sleep(level=2 if self._has_discarded_weights else 1)

    async def _take_device(self, part: Part | None) -> None:
        if self._device == "cuda":
            with self._engine_call("wake"):
                await self._engine.wake_up(tags=[part] if part else None)  # vLLM ignores the other tags if one is awake

    async def load(self) -> Load:
        if (stats := self._stats) is None or not self._active:
            return Load(0, 0, 0.0)
        return Load(stats.num_running_reqs, stats.num_waiting_reqs, float(stats.kv_cache_usage), self._steps)

    # Weights -------------------------------------------------------------------------------------------------------

    async def begin_update(self) -> None:
        if "weights" in self._asleep:
            raise RuntimeError(f"{self.name} has its weights asleep; wake them before pushing new ones")
        with self._engine_call("begin_update"):
            self._is_updating = True
            self._pause()
            if self._kv_store is not None:
                await self._kv_store.invalidate()
            await self._engine.pause_generation(mode="keep", clear_cache=True)
            await self._engine.start_weight_update()

    async def receive(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        with self._engine_call("a bucket of weights"):
            await self._engine.update_weights(WeightTransferUpdateRequest(update_info=info))

    async def finish_update(self, version: int) -> None:
        with self._engine_call("finish_update"):
            await self._engine.finish_weight_update(weight_version=str(version))
            await self._engine.reset_prefix_cache()
            await self._engine.reset_encoder_cache()
            self._meter.pause()
            await self._engine.resume_generation()  # no samples run while the KV cache is asleep, see `_admit`
        self._is_updating = self._has_discarded_weights = False
        self._finish_update_span(version)

    async def version(self) -> int:
        """Return the version that the engine process reports."""
        with self._engine_alive():
            return int(await self._engine.get_weight_version())
