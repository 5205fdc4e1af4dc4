"""Generation: one vLLM engine per rollout slot, as a Ray actor and the driver's handle of it.

Role: `RolloutWorker` becomes an asyncio actor around vLLM's AsyncLLM; `RolloutHandle` implements the controller's
`RolloutEngine` and the weight sync's `WeightReceiver` over it.

    controller -> RolloutHandle.generate -> [Ray stream] <- RolloutWorker.generate <- [queue] <- one task per sample
                  waits for the next item                   waits for any task                      |
                                                                  vLLM's scheduler <- [requests] <--+   engine process

Invariants:
- each sample is a request of its own with its own seed, so neither the batch nor the engine changes what is sampled;
  samples handed over together run together and share their prompt's KV blocks;
- log-probs are of the drawn tokens at the sampling temperature (of the truncated distribution if top_p / top_k cut);
- a response carries the version of the weights that drew its tokens. If weights changed underneath (the push pauses
  and then recomputes requests in flight under the new weights), it carries the oldest, and its span names all;
- every remote call is bounded by `timeout_s`; a dead actor or engine process raises at once.
Who unblocks whom: `generate` ends when its last sample did; `abort` and the consumer's leaving end samples early.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import ray

from rlfuse.cluster.remote import call, explain
from rlfuse.config.schema import ModelConfig, RolloutConfig
from rlfuse.engines.protocols import EngineError, Load, Sampling
from rlfuse.engines.rollout_start import ErrorOutput, engine_arguments, memory_hint
from rlfuse.engines.weights import resolve_transfer
from rlfuse.observe.events import Recorder, Span
from rlfuse.samples import Response, Sample


@dataclass(frozen=True, slots=True)
class Request:
    """What an engine needs of a sample."""

    id: str
    step: int
    seed: int
    prompt_ids: np.ndarray


class RolloutWorker:
    """The actor's side. Create it as an asyncio actor: num_cpus=0, a high max_concurrency and `rollout_env`."""

    def __init__(self, slot: int):
        self.name = f"rollout/{slot}"
        self._recorder = Recorder(self.name)
        self._engine: Any = None
        self._tokenizer: Any = None
        self._errors: ErrorOutput | None = None
        self._active: set[str] = set()
        self._stats: Any = None
        self._version = 0
        self._update: Span | None = None

    async def start(self, model: ModelConfig, rollout: RolloutConfig, max_model_len: int, device: str) -> dict:
        """Build the engine inside the running loop; returns facts to log."""
        began, self._errors = time.perf_counter(), ErrorOutput()
        try:
            with self._recorder.span("start", cause="run"):
                self._engine = self._build(model, rollout, max_model_len, device)
        except Exception as error:
            why = self._errors.reason() or str(error)
            raise EngineError(f"{self.name} could not start vLLM for {model.path}.{memory_hint()}\n{why}") from error
        self._tokenizer = self._engine.get_tokenizer()
        await self._engine.update_weight_version(str(self._version))
        cache = self._engine.vllm_config.cache_config
        return {"start_s": time.perf_counter() - began, "kv_tokens": cache.num_gpu_blocks * cache.block_size}

    def _build(self, model: ModelConfig, rollout: RolloutConfig, max_model_len: int, device: str) -> Any:
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.metrics.loggers import StatLoggerBase

        worker = self

        class Probe(StatLoggerBase):
            def __init__(self, vllm_config: Any, engine_index: int = 0): ...

            def record(self, scheduler_stats=None, iteration_stats=None, mm_cache_stats=None, engine_idx=0):
                worker._stats = scheduler_stats or worker._stats

            def log_engine_initialized(self) -> None: ...

        transfer = WeightTransferConfig(backend=resolve_transfer(rollout.weight_transfer, device))
        if unknown := set(rollout.engine_kwargs) - {field.name for field in fields(AsyncEngineArgs)}:
            raise ValueError(f"rollout.engine_kwargs has {sorted(unknown)}, which vLLM's AsyncEngineArgs has not")
        arguments = {"weight_transfer_config": transfer} | engine_arguments(model, rollout, max_model_len, device)
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[Probe])

    async def stop(self) -> None:
        """End the engine's processes."""
        if self._engine is not None:
            self._engine.shutdown()

    @contextmanager
    def _engine_alive(self) -> Iterator[None]:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except EngineDeadError:
            reason = self._errors.reason() if self._errors else ""
            raise EngineError(
                f"{self.name}: vLLM's engine process died. Out of memory is the usual cause: lower "
                f"rollout.max_num_seqs or the KV cache (rollout.kv_cache_memory_mb, on GPUs "
                f"rollout.gpu_memory_utilization).{memory_hint()}\n{reason}".rstrip()
            ) from None  # vLLM's own traceback ends in "see above"

    # Generation ----------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[tuple[str, Response]]:
        """(sample id, response) of each request, in finishing order."""
        ids = self._admit(requests)
        tasks = [asyncio.create_task(self._complete(request, sampling)) for request in requests]
        try:
            for finished in asyncio.as_completed(tasks):
                yield await finished
        finally:
            for task in tasks:
                task.cancel()  # vLLM ends the request of a cancelled task
            await asyncio.gather(*tasks, return_exceptions=True)
            self._active -= ids

    def _admit(self, requests: Sequence[Request]) -> set[str]:
        """Count the samples as active, or refuse them all."""
        limit = self._engine.model_config.max_model_len
        ids = {request.id for request in requests}
        if len(ids) < len(requests) or ids & self._active:
            twice = sorted(ids & self._active) or "some twice in one call"
            raise ValueError(f"samples are being generated already ({twice}): hand each sample over once")
        for request in requests:
            if len(request.prompt_ids) >= limit:
                raise ValueError(
                    f"sample {request.id} has {len(request.prompt_ids)} prompt tokens, the engine holds {limit} with "
                    "the response: raise data.max_prompt_length or shorten the prompt"
                )
        self._active |= ids
        return ids

    async def _complete(self, request: Request, sampling: Sampling) -> tuple[str, Response]:
        """One sample from prompt to response."""
        attributes = {"prompt_tokens": len(request.prompt_ids)}
        span = self._recorder.span(
            "generate", step=request.step, samples=(request.id,), cause="admitted", attributes=attributes
        )
        try:
            with self._engine_alive(), span as record:
                prompt = {"prompt_token_ids": request.prompt_ids.tolist()}
                parameters = self._parameters(request, sampling)
                async for output in self._engine.generate(prompt, parameters, request.id):
                    final = output  # the only one: parameters ask for the final output
                response, versions = self._response(final.outputs[0])
                record.tokens = len(response.token_ids)
                record.attributes["finish_reason"] = response.finish_reason
                if final.metrics is not None and record.tokens:
                    record.attributes["first_token_s"] = round(final.metrics.first_token_latency, 4)
                if len(versions) > 1:
                    record.attributes["weight_versions"] = versions
                return request.id, response
        finally:
            self._active.discard(request.id)

    def _parameters(self, request: Request, sampling: Sampling) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        room = self._engine.model_config.max_model_len - len(request.prompt_ids)
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=min(sampling.max_tokens, room),
            seed=request.seed if sampling.temperature > 0 else None,
            logprobs=0,  # of the drawn token alone
            detokenize=False,  # once at the end instead of after every token, and exactly as the tokenizer decodes
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _response(self, output: Any) -> tuple[Response, list[int]]:
        """vLLM's completion as a response, with the versions that drew its tokens, oldest first."""
        if output.finish_reason not in ("stop", "length", "abort"):
            raise EngineError(f"{self.name}: vLLM ended a request with finish_reason={output.finish_reason!r}")
        drawn = [entry[token].logprob for entry, token in zip(output.logprobs or [], output.token_ids, strict=True)]
        versions = [int(span.version) for span in output.weight_versions or []] or [self._version]
        response = Response(
            np.asarray(output.token_ids, np.int32),
            np.asarray(drawn, np.float32),
            output.finish_reason,
            versions[0],
            self._tokenizer.decode(output.token_ids, skip_special_tokens=True),
        )
        return response, versions

    async def abort(self, sample_ids: Sequence[str]) -> None:
        """End these samples; returns when they have ended."""
        with self._engine_alive():
            # Again until gone: a sample that vLLM is only just admitting is not yet known to it by its id.
            while pending := [sample_id for sample_id in sample_ids if sample_id in self._active]:
                await self._engine.abort(pending)
                await asyncio.sleep(0.01)

    async def load(self) -> Load:
        """As of vLLM's last step; nothing when no sample is active."""
        if self._stats is None or not self._active:
            return Load(0, 0, 0.0)
        stats = self._stats
        return Load(stats.num_running_reqs, stats.num_waiting_reqs, float(stats.kv_cache_usage))

    async def drain(self) -> list[Span]:
        return self._recorder.drain()

    # Weights -------------------------------------------------------------------------------------------------------

    async def join_transfer(self, info: dict[str, Any]) -> None:
        """Join the trainer's process group (nccl)."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        with self._engine_alive():
            await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def begin_update(self) -> None:
        """Freeze requests in flight, forget everything computed with the old weights, expect buckets."""
        with self._engine_alive():
            self._update = Span("update_weights", self.name, time.time(), cause="optimizer")
            await self._engine.pause_generation(mode="keep", clear_cache=True)
            await self._engine.start_weight_update()

    async def receive(self, info: dict[str, Any]) -> None:
        """Load one bucket."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        with self._engine_alive():
            await self._engine.update_weights(WeightTransferUpdateRequest(update_info=info))

    async def finish_update(self, version: int) -> None:
        """All buckets are here: generate with them, as `version`."""
        with self._engine_alive():
            await self._engine.finish_weight_update(weight_version=str(version))
            await self._engine.reset_prefix_cache()
            await self._engine.reset_encoder_cache()
            await self._engine.resume_generation()
        self._version = version
        if self._update is not None:
            self._update.end, self._update.attributes["version"] = time.time(), version
            self._recorder.add(self._update)

    async def version(self) -> int:
        """The version that the engine process itself reports."""
        with self._engine_alive():
            return int(await self._engine.get_weight_version())


class RolloutHandle:
    """The driver's side of one engine. `devices`: how many it spans (tensor parallel)."""

    def __init__(self, actor: ray.actor.ActorHandle, name: str, timeout_s: float, devices: int = 1):
        self.actor, self.name, self.timeout_s, self.devices = actor, name, timeout_s, devices

    async def start(self, model: ModelConfig, rollout: RolloutConfig, max_model_len: int, device: str) -> dict:
        """Start the engine; `max_model_len` is the longest prompt plus the longest response."""
        return await self._call("start", "start its engine", model, rollout, max_model_len, device)

    async def generate(self, samples: Sequence[Sample], sampling: Sampling) -> AsyncIterator[tuple[str, Response]]:
        """(sample id, response) for each sample, in finishing order; leaving early ends the rest."""
        requests = [Request(sample.id, sample.step, sample.seed, sample.prompt.token_ids) for sample in samples]
        action = f"generate {len(requests)} samples"
        stream = self.actor.generate.options(num_returns="streaming").remote(requests, sampling)
        open_ids = {request.id for request in requests}
        try:
            while open_ids:
                sample_id, response = await self._next(stream, action)
                open_ids.discard(sample_id)
                yield sample_id, response
        finally:
            if open_ids:
                self.actor.abort.remote(sorted(open_ids))

    async def _next(self, stream: Any, action: str) -> tuple[str, Response]:
        try:
            reference = await asyncio.wait_for(anext(stream), self.timeout_s)
        except StopAsyncIteration:
            raise EngineError(f"{self.name} ended its stream before it finished to {action}") from None
        except Exception as error:
            raise explain(error, self.name, action, self.timeout_s) from error
        return await call(reference, self.name, action, self.timeout_s)

    async def abort(self, sample_ids: Sequence[str]) -> None:
        """End these samples now; `generate` yields them with what they have."""
        await self._call("abort", f"abort {len(sample_ids)} samples", list(sample_ids))

    async def load(self) -> Load:
        """What the engine holds right now."""
        return await self._call("load", "report its load")

    async def drain(self) -> list[Span]:
        """Spans since the last call."""
        return await self._call("drain", "hand over its events")

    async def stop(self) -> None:
        """End the engine's processes; the actor stays."""
        await self._call("stop", "stop its engine")

    async def join_transfer(self, info: dict[str, Any]) -> None:
        """Join the trainer's process group (nccl)."""
        await self._call("join_transfer", "join the trainer's process group", info)

    async def begin_update(self) -> None:
        """Pause and clear caches."""
        await self._call("begin_update", "pause for new weights")

    async def receive(self, info: dict[str, Any]) -> None:
        """Load one bucket."""
        await self._call("receive", "load a bucket of weights", info)

    async def finish_update(self, version: int) -> None:
        """Resume with the new weights."""
        await self._call("finish_update", f"take weights as version {version}", version)

    async def version(self) -> int:
        """The version of the engine's weights."""
        return await self._call("version", "report its weights' version")

    async def _call(self, method: str, action: str, *arguments: Any) -> Any:
        return await call(getattr(self.actor, method).remote(*arguments), self.name, action, self.timeout_s)
