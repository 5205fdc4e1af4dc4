"""vLLM's environment, engine arguments and sampling parameters; conversion of its outputs and statistics.

vLLM is imported inside functions only, because `rollout_env` must be set in a process before the first import.
`rollout.engine_kwargs` overrides every argument.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

import numpy as np
import psutil

from rlfuse import clock
from rlfuse.cluster import cuda, scratch
from rlfuse.config.facts import EXPERTS
from rlfuse.config.quantization import UNQUANTIZED_LAYERS
from rlfuse.config.rollout import HISTORY, RolloutConfig
from rlfuse.config.schema import ModelConfig
from rlfuse.engines.memory.estimate import Memory
from rlfuse.engines.memory.residency import ENGINE
from rlfuse.engines.rollout.engine_actor import Request
from rlfuse.engines.rollout.step_meter import EngineStep
from rlfuse.engines.vllm.gpu_settings import engine_settings, gpu_arguments
from rlfuse.engines.vllm.importing import CPU_ENVIRONMENT, ENVIRONMENT
from rlfuse.engines.vllm.kv_cache import DRAFT_TOKENS, HISTORY_TOKENS
from rlfuse.engines.vllm.request_arguments import DRAFT, DRAWN, HISTORY_ENGINE, join_drafts
from rlfuse.engines.vllm.support import NIXL_ON_GPUS
from rlfuse.engines.weights.sync import MIB, resolve_transfer
from rlfuse.errors import EngineError
from rlfuse.events import Span
from rlfuse.protocols import Sampling
from rlfuse.samples import Partial

DECODE_SCHEDULER = "rlfuse.engines.vllm.decode_scheduler"
HISTORY_PROPOSER = "rlfuse.engines.vllm.history.HistoryProposer"
KERNEL_ARGUMENTS = frozenset(
    {"attention_backend", "attention_config", "enable_flashinfer_autotune", "hf_overrides", "kernel_config"}
    | {
        "linear_backend",
        "moe_backend",
        "optimization_level",
        "quantization",
        "quantization_config",
        "speculative_config",
    }
)
"""Keys of rollout.engine_kwargs that affect which FlashInfer kernels are used."""


def rollout_env(
    device: str, transfer: str = "auto", dtype: str | None = None, slots: Sequence[int] = (0,)
) -> dict[str, str]:
    """Return the environment of the actor, which the engine's processes inherit. `dtype`: of the engine's weights."""
    transfer = resolve_transfer(transfer, device)
    if device == "cpu":
        return dict(CPU_ENVIRONMENT)
    env = ENVIRONMENT | cuda.environment(engine_settings(dtype))
    if len(slots) > 1:  # tensor-parallel workers are Ray actors in the slots' bundles
        env["VLLM_RAY_BUNDLE_INDICES"] = ",".join(map(str, slots))
        env["VLLM_RAY_PER_WORKER_GPUS"] = str(cuda.SHARE)
        env["VLLM_USE_RAY_V2_EXECUTOR_BACKEND"] = "1"  # the default executor has no async scheduling
    if transfer == "ipc":
        env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # CUDA IPC handles are pickled between actor and engine
    return env


def engine_arguments(
    model: ModelConfig, rollout: RolloutConfig, max_model_len: int, device: str, tail_speculation: int = 0
) -> dict[str, Any]:
    """Return the job's AsyncEngineArgs, except vLLM's config objects."""
    from transformers import AutoConfig

    from rlfuse.engines.vllm.prompts import prompt_arguments

    served = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    arguments: dict[str, Any] = {
        "model": model.path,
        "dtype": model.dtype,
        "trust_remote_code": model.trust_remote_code,
        "load_format": "safetensors",  # pickled weights can execute code
        "max_model_len": max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "seed": 0,
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature, as the trainer computes them
        "disable_log_stats": True,
        "worker_extension_cls": "rlfuse.engines.vllm.worker_extension.WorkerExtension",
        "quantization": rollout.quantization,
        "quantization_config": {"ignore": [*UNQUANTIZED_LAYERS]} if rollout.quantization else None,
    }
    if rollout.tensor_model_parallel_size > 1:
        # On GPUs its workers are Ray actors in our bundles, see placement. On CPU hosts vLLM does not support Ray
        # workers, but would select them inside a placement group; there they are child processes.
        arguments["distributed_executor_backend"] = "ray" if device == "cuda" else "mp"
    if device == "cuda":
        arguments |= gpu_arguments(rollout, max_model_len)
        experts = any(getattr(served.get_text_config(), name, None) for name in EXPERTS)
        if not (experts or rollout.quantization or KERNEL_ARGUMENTS & set(rollout.engine_kwargs)):
            # vLLM would import FlashInfer and run its largest batch to tune kernels that this model does not use.
            arguments["enable_flashinfer_autotune"] = False
    else:
        arguments |= {
            "enforce_eager": True,
            # In bytes, because vLLM's fraction of "available memory" is wrong on hosts with hot-plugged memory.
            "kv_cache_memory_bytes": rollout.kv_cache_memory_mb * MIB // rollout.tensor_model_parallel_size,
            "block_size": 32,  # with the default of 128, short prompts would have no block to share
        }
    arguments |= draft_arguments(tail_speculation, rollout, device)
    arguments |= prompt_arguments(served, max_model_len) | rollout.engine_kwargs
    return {"scheduler_cls": _scheduler(rollout, arguments, device)} | arguments


def draft_arguments(threshold: int, rollout: RolloutConfig, device: str) -> dict[str, Any]:
    """Return the arguments for speculative decoding: while at most `threshold` samples are decoded, or, with
    rollout.draft=history, for all samples that have earlier responses.

    Drafts do not change tokens (`acceptance`); `support` checks at startup what excludes them.
    """
    most, tokens = rollout.max_num_seqs, DRAFT_TOKENS
    if rollout.draft == HISTORY:
        threshold, tokens = most, HISTORY_TOKENS
    if not threshold:
        return {}
    schedule = [(1, min(threshold, most), tokens)]
    if threshold < most:
        schedule.append((threshold + 1, most, 0))
    drafts = {"num_speculative_tokens": tokens, "num_speculative_tokens_per_batch_size": schedule}
    # The GPU variant lets vLLM keep scheduling one step ahead of the device; `worker_extension` replaces its class.
    ngram = {"method": "ngram_gpu" if device == "cuda" else "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    if rollout.draft == "suffix":
        return {"speculative_config": {"method": "suffix"} | drafts}
    if rollout.draft == HISTORY:
        proposer = {"method": "custom_class", "model": HISTORY_PROPOSER} if device == "cpu" else ngram
        return {"speculative_config": proposer | drafts, "additional_config": {HISTORY_ENGINE: True}}
    return {"speculative_config": ngram | drafts}


def memory_arguments(memory: Memory) -> dict[str, Any]:
    """Return an engine's arguments from the memory plan of its GPU."""
    given: dict[str, Any] = {}
    if memory.kv_cache_bytes is not None:
        given["kv_cache_memory_bytes"] = memory.kv_cache_bytes
    if not memory.alternates:
        given["enable_sleep_mode"] = False
    if given:
        # With a given cache size, vLLM only checks at startup that this fraction of the device is free.
        given["gpu_memory_utilization"] = max(1e-4, round(memory.size_of(ENGINE) / memory.budget.bytes, 4))
    return given


def _scheduler(rollout: RolloutConfig, arguments: dict[str, Any], device: str) -> str | None:
    """Return the class name of the scheduler; None: vLLM's default."""
    if rollout.scheduler == "vllm":
        return None
    if device == "cpu":
        return f"{DECODE_SCHEDULER}.DecodeScheduler"
    if arguments.get("async_scheduling") is None:  # vLLM decides
        return None
    return f"{DECODE_SCHEDULER}.{'Async' * arguments['async_scheduling']}DecodeScheduler"


def holds_tokens(arguments: dict[str, Any]) -> bool:
    """Return whether the engine uses a scheduler of `decode_scheduler`."""
    return str(arguments["scheduler_cls"]).startswith(DECODE_SCHEDULER)


def token_bytes(vllm_config: Any) -> int:
    """Return the bytes of a token's keys and values on all ranks of the engine."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    rank = model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
    return 2 * rank * parallel.world_size * model.dtype.itemsize


def resolve_kv_transfer(setting: str, device: str) -> str:
    """Return the connector for `rollout.kv_transfer` on `cpu` or `cuda`."""
    if setting == "nixl" and device == "cuda":
        raise ValueError(f"rollout.kv_transfer=nixl: {NIXL_ON_GPUS}; set rollout.kv_transfer=auto")
    return "shm" if setting == "auto" else setting


def build(
    arguments: dict[str, Any], rollout: RolloutConfig, device: str, on_step: Callable[[Any, Any], None]
) -> tuple[Any, Any]:
    """Return AsyncLLM and the store of its KV caches, which is None with a custom connector. `on_step` is called with
    the statistics of each step."""
    from vllm.config import KVTransferConfig, WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from rlfuse.engines.vllm.front_end import StepListener, keep_log_probs
    from rlfuse.engines.vllm.kv_transfer.store import KVCacheStore, connector_arguments

    class Probe(StepListener):
        def record(self, scheduler_stats=None, iteration_stats=None, mm_cache_stats=None, engine_idx=0):
            on_step(scheduler_stats, iteration_stats)

    if unknown := set(arguments) - {field.name for field in fields(AsyncEngineArgs)}:
        raise ValueError(
            f"rollout.engine_kwargs has unknown arguments {sorted(unknown)}; use fields of vLLM's AsyncEngineArgs"
        )
    connector = connector_arguments(resolve_kv_transfer(rollout.kv_transfer, device))
    connectors = {
        "weight_transfer_config": WeightTransferConfig(backend=resolve_transfer(rollout.weight_transfer, device)),
        "kv_transfer_config": KVTransferConfig(**connector),
    }
    chosen = AsyncEngineArgs(**(connectors | arguments))
    keep_log_probs(fast=holds_tokens(arguments))
    if "kv_transfer_config" in arguments:
        return AsyncLLM.from_engine_args(chosen, stat_loggers=[Probe]), None
    store = KVCacheStore()
    os.environ["VLLM_RPC_BASE_PATH"] = str(store.folder)  # for sockets, which vLLM does not remove
    try:
        engine = AsyncLLM.from_engine_args(chosen, stat_loggers=[Probe])
    except BaseException:
        store.close()
        raise
    scratch.attach(store.folder, scratch.held_by(psutil.Process().children(recursive=True)))
    return engine, store


def sampling_params(
    request: Request,
    sampling: Sampling,
    max_tokens: int,
    kv_params: dict[str, str],
    logit_bias: dict[int, float] | None,
    drafts: Sequence[np.ndarray] = (),
) -> Any:
    """Return vLLM's SamplingParams for at most `max_tokens` more tokens of the request. `drafts`: see `Sample`."""
    import rlfuse.engines.vllm.front_end  # noqa: F401  (patches stop texts of continued samples)

    parameters = _shared_params(sampling).clone()
    parameters.max_tokens, parameters.logit_bias = max_tokens, logit_bias
    parameters.seed = request.seed if sampling.temperature > 0 else None
    parameters.extra_args = {DRAWN: len(request.partial.token_ids), "kv_transfer_params": kv_params}
    if drafts:
        parameters.extra_args[DRAFT] = join_drafts(drafts)
    return parameters


@cache
def _shared_params(sampling: Sampling) -> Any:
    """Return the SamplingParams shared by all requests with this sampling, validated once."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=list(sampling.stop),
        include_stop_str_in_output=True,  # the tokens contain it, so tokens and log-probs match
        logprobs=0,  # of the drawn token only
        skip_special_tokens=False,  # a special token may be a stop text
        detokenize=bool(sampling.stop),  # otherwise once at the end, with the tokenizer
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # vLLM writes the same values for all requests
    )


def extend(partial: Partial, output: Any, version: int, record: Span) -> tuple[Partial, str]:
    """Return `partial` extended by vLLM's output, and the finish reason; fill in the span `record`. `version`: of the
    weights, if vLLM reports none."""
    drawn = output.outputs[0]
    if drawn.finish_reason not in ("stop", "length", "abort"):
        raise EngineError(f"{record.where}: vLLM ended a request with finish_reason={drawn.finish_reason!r}")
    log_probs = drawn.logprobs or []
    token_ids = drawn.token_ids[
        len(drawn.token_ids) - len(log_probs) :
    ]  # without those that `front_end` detokenized again
    if log_probs and isinstance(log_probs[0], dict):  # the format of vLLM's front end
        log_probs = [entry[token].logprob for entry, token in zip(log_probs, token_ids, strict=True)]
    versions = [int(span.version) for span in drawn.weight_versions or []] or [version]
    record.tokens = len(token_ids)
    record.attributes["finish_reason"] = "evicted" if drawn.finish_reason == "abort" else drawn.finish_reason
    record.attributes["cached_tokens"] = output.num_cached_tokens or 0
    if output.metrics is not None and record.tokens:
        record.attributes["first_token_s"] = round(output.metrics.first_token_latency, 4)
    if len(versions) > 1:
        record.attributes["weight_versions"] = versions
    drawn_ids, drawn_log_probs = np.asarray(token_ids, np.int32), np.asarray(log_probs, np.float32)
    return partial.extended(drawn_ids, drawn_log_probs, versions[0]), drawn.finish_reason


def engine_step(scheduler: Any, iteration: Any) -> EngineStep:
    """Convert vLLM's statistics; those of `decode_scheduler` also count held tokens."""
    drafts = scheduler.spec_decoding_stats
    drafted = (drafts.num_draft_tokens, drafts.num_accepted_tokens) if drafts else (0, 0)
    first = [] if iteration is None else iteration.time_to_first_tokens_iter
    now = clock.now() if iteration is None else clock.from_wall_clock(iteration.iteration_timestamp)
    waited_s = max([0.0, *first])
    if (counted := scheduler.iteration_details) is not None:
        length_s, begun = counted.elapsed_ms / 1e3, counted.num_ctx_requests
        prefilled, tokens = counted.num_ctx_tokens, counted.num_generation_tokens
        return EngineStep(now, counted.num_generation_requests, length_s, begun, waited_s, prefilled, tokens, *drafted)
    if iteration is None:
        return EngineStep(now, 0, 0.0, 0, 0.0, 0, 0)
    gaps = iteration.inter_token_latencies_iter
    prefilled, tokens = iteration.prompt_token_stats.computed, iteration.num_generation_tokens
    return EngineStep(now, len(gaps), min(gaps, default=0.0), len(first), waited_s, prefilled, tokens, *drafted)
