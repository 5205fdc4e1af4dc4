"""Rollout backend on transformers, for CPU hosts and models that vLLM does not support.

    generate, evict, receive -> [event loop: waiting, active] -> step in a thread -> tokens -> responses

Samples in flight keep their tokens when weights change, and their caches are recomputed. `generate` waits for its
samples, `evict` and `begin_update` for the current step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.core_model_loading import revert_weight_conversion

from rlfuse import clock
from rlfuse.cluster.child_processes import bind
from rlfuse.config.facts import on_gpus
from rlfuse.config.parallelism import value_of
from rlfuse.config.rollout import RolloutConfig
from rlfuse.config.schema import Config, ModelConfig
from rlfuse.engines.memory.estimate import Memory
from rlfuse.engines.rollout.engine_actor import Capabilities, Request
from rlfuse.engines.rollout.engine_base import EngineBase
from rlfuse.engines.rollout.step_meter import EngineStep, StepMeter
from rlfuse.engines.transformers.decode_batch import ActiveSample, Batch, draw
from rlfuse.errors import EngineError, EngineFailed
from rlfuse.events import Span
from rlfuse.protocols import Load, Sampling
from rlfuse.tensor_files import map_tensors

NAME = "rollout.name=transformers"
SUPPORTED_VALUES = {
    "rollout.tensor_model_parallel_size": 1,
    "rollout.quantization": None,
    "rollout.engine_kwargs": {},
    "rollout.kv_transfer": "auto",
    "rollout.scheduler": "fast",
    "rollout.draft": "ngram",
    "fusion.tail_speculation": 0,
}
"""Keys of which this backend supports one value."""
PREFILL_TOKENS = 8192
"""Maximum padded tokens of a prefill step; a longer prompt gets its own step."""
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers whose caches consist of keys and values, to which rows can be added."""


class TransformersEngine(EngineBase):
    """`EngineActor` on transformers."""

    capabilities = Capabilities(can_move_kv=False, accepts_embeddings=False)

    def __init__(self, slot: int):
        process = psutil.Process()
        super().__init__(slot, lambda: sum(process.cpu_times()[:2]))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decode")
        self._between_steps = asyncio.Lock()
        """Held during a step, and during an update."""
        self._waiting: list[ActiveSample] = []
        self._running: asyncio.Task | None = None
        self._updating = False

    @staticmethod
    def environment(config: Config, device: str, slots: Sequence[int] = (0,)) -> dict[str, str]:
        return {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

    @staticmethod
    def unsupported_reasons(config: Config, trains: bool = True) -> list[str]:
        model = config.model
        given = [key for key, value in SUPPORTED_VALUES.items() if value_of(config, key) != value]
        given += ["rollout.disaggregate"] * (config.rollout.disaggregate == "on")
        given += ["cluster.device"] * (on_gpus(config) is True)
        remedy = f"{NAME} does not support this value; remove it, or set rollout.name=vllm"
        found = [f"{key}={value_of(config, key)}: {remedy}" for key in given]
        try:
            family = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
            with torch.device("meta"):
                built = AutoModelForCausalLM.from_config(family, trust_remote_code=model.trust_remote_code)
        except (OSError, ValueError, KeyError, AttributeError):  # reported by `training_problems`
            return found
        return [
            *found,
            *(
                f"{NAME}: {why}; set rollout.name=vllm, or choose another model"
                for why in _unsupported_model(built, trains)
            ),
        ]

    @staticmethod
    def apply_memory_plan(rollout: RolloutConfig, memory: Memory) -> tuple[RolloutConfig, bool]:
        return rollout, False

    async def prepare(self, model: ModelConfig) -> None:
        """Do nothing: this module imports everything that `start` needs."""

    async def start(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        max_model_len: int,
        device: str,
        tail_speculation: int = 0,
        core: int | None = None,
    ) -> dict[str, Any]:
        began = time.perf_counter()
        if device != "cpu":
            raise EngineError(
                "rollout.name=transformers: runs on CPUs only; set rollout.name=vllm, or cluster.device=cpu"
            )
        bind(core)
        with self._recorder.span("start", cause="run"):
            try:
                self._load(model)
            except Exception as error:
                raise EngineError(
                    f"{self.name} could not load {model.path}: {type(error).__name__}: {error}"
                ) from error
        self._limit, self._max_num_seqs = max_model_len, rollout.max_num_seqs
        token_bytes = self._token_bytes()
        self._kv_tokens = (rollout.kv_cache_memory_mb << 20) // token_bytes
        if self._kv_tokens < max_model_len:
            raise EngineError(
                f"rollout.kv_cache_memory_mb={rollout.kv_cache_memory_mb}: holds {self._kv_tokens} tokens, but the "
                f"longest sample has {max_model_len}; set at least {-(-max_model_len * token_bytes >> 20)}"
            )
        self._meter = StepMeter(self._recorder, self._kv_tokens)
        seconds = time.perf_counter() - began
        return {"start_s": seconds, "kv_tokens": self._kv_tokens, "kv_bytes_per_token": token_bytes}

    def _load(self, model: ModelConfig) -> None:
        options = {"trust_remote_code": model.trust_remote_code}
        self._tokenizer = AutoTokenizer.from_pretrained(model.path, **options)
        found = AutoModelForCausalLM.from_pretrained(
            model.path, dtype=getattr(torch, model.dtype), use_safetensors=True, **options
        )
        self._model = found.eval().requires_grad_(False)
        self._batch = Batch(self._model)
        self._parameters = stored_tensors(self._model)
        ends = (self._model.generation_config.eos_token_id, self._tokenizer.eos_token_id)
        each = (end if isinstance(end, list) else [end] for end in ends)
        self._ends = {token for some in each for token in some if token is not None}

    @torch.inference_mode()
    def _token_bytes(self) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        cache = DynamicCache()
        self._model(input_ids=torch.zeros(1, 1, dtype=torch.long), past_key_values=cache)
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

    async def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
        self._thread.shutdown(wait=False)

    def _is_busy(self) -> bool:
        return bool(self._active) and not self._updating

    # Generation ----------------------------------------------------------------------------------------------------

    def _start_sample(self, request: Request, sampling: Sampling) -> asyncio.Future:
        self._recorder.step = request.step
        row = ActiveSample(
            request,
            sampling,
            self._remaining_tokens(request, sampling),
            asyncio.get_running_loop().create_future(),
            clock.now(),
        )
        if row.room < 1:
            row.done.set_result(self._response(row.partial(self._version), "length"))
        else:
            self._active[request.id] = row
            self._waiting.append(row)
            if self._running is None or self._running.done():
                self._running = asyncio.create_task(self._decode(), name=f"decode {self.name}")
        return row.done

    async def _decode(self) -> None:
        """Run steps until no sample is left."""
        loop = asyncio.get_running_loop()
        while self._active:
            async with self._between_steps:
                if not self._active:  # all were evicted meanwhile
                    return
                try:
                    step = await loop.run_in_executor(self._thread, self._step, self._next_prefill())
                    self._meter.record(step, self._kv_usage, False)
                    self._deliver([row for row in self._batch.rows if row.reason])
                except Exception as error:
                    self._fail(error)
                    return
            await asyncio.sleep(0)

    def _next_prefill(self) -> list[ActiveSample]:
        """Remove and return the waiting samples that fit into the cache, in order. Every row counts as the longest one,
        so no sample is ever preempted."""
        rows, found = self._batch.rows, list[ActiveSample]()
        longest, widest = max((row.longest for row in rows), default=0), 0
        for row in self._waiting[: self._max_num_seqs - len(rows)]:
            longest, widest = max(longest, row.longest), max(widest, row.length)
            count = len(rows) + len(found) + 1
            if longest * count > self._kv_tokens or (found and widest * (len(found) + 1) > PREFILL_TOKENS):
                break
            found.append(row)
        del self._waiting[: len(found)]
        return found

    def _step(self, joining: Sequence[ActiveSample]) -> EngineStep:
        """Generate a token for the samples that join, otherwise for all samples of the batch; runs in the thread."""
        began = clock.now()
        logits = self._batch.prefill(joining) if joining else self._batch.decode()
        rows, now = self._batch.rows[-len(logits) :], clock.now()
        prefilled = sum(row.length for row in joining)
        waited_s = max((now - row.arrived for row in joining), default=0.0)
        for row, each in zip(rows, logits, strict=True):
            self._append(row, each, now)
        counts = (0, now - began, len(rows)) if joining else (len(rows), now - began, 0)
        self._steps += 1
        self._liveness.record_progress(f"a step of {len(rows)} samples")
        return EngineStep(now, *counts, waited_s, prefilled, len(rows))

    def _append(self, row: ActiveSample, logits: torch.Tensor, now: float) -> None:
        request = row.request
        position = len(request.partial.token_ids) + len(row.tokens)
        token, log_prob = draw(logits, request.seed, position, row.sampling)
        row.tokens.append(token)
        row.log_probs.append(log_prob)
        if self._version not in row.versions:
            row.versions.append(self._version)
        if row.first_token_s is None:
            row.first_token_s = now - row.arrived
        if token in self._ends or self._has_stop_text(row):
            row.reason = "stop"
        elif len(row.tokens) == row.room:
            row.reason = "length"

    def _has_stop_text(self, row: ActiveSample) -> bool:
        """Return whether the last token completes a stop text."""
        if not row.sampling.stop:
            return False
        text = self._tokenizer.decode([*row.request.partial.token_ids, *row.tokens], clean_up_tokenization_spaces=False)
        return any(stop in text for stop in row.sampling.stop)

    @property
    def _kv_usage(self) -> float:
        return sum(row.length for row in self._batch.rows) / self._kv_tokens

    def _deliver(self, rows: Sequence[ActiveSample]) -> None:
        """Return the results of rows that are finished, or evicted if they have no finish reason."""
        for row in rows:
            self._active.pop(row.request.id, None)
            if not row.done.done():
                partial = row.partial(self._version)
                row.done.set_result(self._response(partial, row.reason) if row.reason else partial)
            self._record(row)
        left = [row for row in self._batch.rows if row.request.id in self._active]
        self._batch.keep(left)
        if not self._active:
            self._meter.pause()

    def _record(self, row: ActiveSample) -> None:
        request, reason = row.request, row.reason or "evicted"
        prompt, carried = len(request.prompt_ids), len(request.partial.token_ids)
        attributes: dict[str, Any] = dict(
            prompt_tokens=prompt, carried_tokens=carried, finish_reason=reason, cached_tokens=0
        )
        if row.first_token_s is not None:
            attributes["first_token_s"] = round(row.first_token_s, 4)
        if len(row.versions) > 1:
            attributes["weight_versions"] = row.versions
        where, tokens = (self.name, row.arrived, clock.now()), len(row.tokens)
        self._recorder.add(Span("generate", *where, request.step, (request.id,), tokens, "admitted", attributes))

    def _fail(self, error: Exception) -> None:
        """Fail all samples with this error."""
        failure = EngineFailed(f"{self.name}: a decode step failed: {type(error).__name__}: {error}")
        self._waiting.clear()
        self._batch.clear()
        for row in self._active.values():
            if not row.done.done():
                row.done.set_exception(failure)
                row.done.exception()  # mark as retrieved: a call with several samples only raises the first
        self._active.clear()

    # Moving --------------------------------------------------------------------------------------------------------

    async def _stop_unfinished(self, started: Collection[asyncio.Future]) -> None:
        await self._remove([row for row in self._active.values() if row.done in started])

    async def _evict(self, sample_ids: list[str], carry: str) -> None:
        await self._remove([self._active[sample_id] for sample_id in sample_ids])

    async def _remove(self, rows: Sequence[ActiveSample]) -> None:
        """Evict these samples, except finished ones."""
        if all(row.done.done() for row in rows):
            return
        async with self._between_steps:
            rows = [row for row in rows if not row.done.done()]
            self._waiting = [row for row in self._waiting if row not in rows]
            self._deliver(rows)

    async def load(self) -> Load:
        if not self._active:
            return Load(0, 0, 0.0)
        return Load(len(self._batch.rows), len(self._waiting), self._kv_usage, self._steps)

    # Weights -------------------------------------------------------------------------------------------------------

    async def begin_update(self) -> None:
        await self._between_steps.acquire()
        self._updating = True
        self._pause()
        self._waiting = [*self._batch.clear(), *self._waiting]
        self._missing = set(self._parameters)

    async def receive(self, info: dict[str, Any]) -> None:
        for name, tensor in map_tensors(info["path"]):
            if name not in self._parameters:
                raise EngineError(
                    f"{self.name}: the trainer's {name} is not a parameter of {type(self._model).__name__}; "
                    "set rollout.name=vllm"
                )
            self._parameters[name].data.copy_(tensor)
            self._missing.discard(name)

    async def finish_update(self, version: int) -> None:
        if self._missing:
            raise EngineError(
                f"{self.name}: the push lacked {', '.join(sorted(self._missing)[:3])}; set rollout.name=vllm"
            )
        self._updating = False
        self._meter.pause()
        self._finish_update_span(version)
        self._between_steps.release()


def stored_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the parameters, tied ones once, and the buffers that are stored in checkpoints."""
    stored = model.state_dict().keys()
    buffers = {name: each for name, each in model.named_buffers() if name in stored}
    return dict(model.named_parameters()) | buffers


def _unsupported_model(model: PreTrainedModel, trains: bool) -> Iterator[str]:
    """Return why this model cannot be decoded in batches or, if it `trains`, receive new weights."""
    text = model.config.get_text_config()
    others = sorted(set(get_layer_types_and_kwargs(text)[0]) - ATTENTION)
    if others or model._is_stateful:
        yield f"a {text.model_type} has layers of {', '.join(others) or 'a state'}, to which samples cannot be added"
        return
    tensors = stored_tensors(model)
    if trains and revert_weight_conversion(model, dict(tensors)).keys() != tensors.keys():
        yield f"checkpoints of a {text.model_type} use other weight names than its transformers class"
