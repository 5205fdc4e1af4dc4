"""An executor for vLLM that computes nothing, to measure an engine's scheduling and output processing.

Imported by name in vLLM's processes (`distributed_executor_backend="null_executor.NullExecutor"`). Tokens and log-probs
depend only on a request's seed and position. `as_on_gpus` enables asynchronous scheduling and vLLM's second model
runner on CPU hosts, as on GPUs.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, LogprobsLists, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

FIRST, VOCABULARY = 3, 1000
"""Range of sampled tokens; none of them ends a response."""


def as_on_gpus() -> None:
    import vllm.config.vllm as vllm_config
    from vllm.platforms.cpu import CpuPlatform

    vllm_config.HAS_TRITON = True
    check = CpuPlatform.check_and_update_config.__func__

    def checked(cls: type, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(checked)


class NullWorker(WorkerBase):
    """Implements the methods that executors call; also the `worker_cls` of vLLM's executor for separate processes."""

    def __init__(self, vllm_config: Any, **_: Any) -> None:
        from vllm.platforms import current_platform

        self.vllm_config, self.rank = vllm_config, 0
        self.seeds: dict[str, int] = {}
        self.lengths: dict[str, int] = {}
        current_platform.update_block_size_for_backend(vllm_config)

    def init_device(self) -> None: ...

    def load_model(self) -> None: ...

    def check_health(self) -> None: ...

    def shutdown(self) -> None: ...

    def initialize_from_config(self, kv_cache_config: Any) -> None: ...

    def set_kv_cache_layout(self, name: str) -> None: ...

    def get_kv_connector_handshake_metadata(self) -> None: ...

    def reset_mm_cache(self) -> None: ...

    def reset_encoder_cache(self) -> None: ...

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        model, parallel = self.vllm_config.model_config, self.vllm_config.parallel_config
        spec = FullAttentionSpec(
            block_size=self.vllm_config.cache_config.block_size,
            num_kv_heads=model.get_num_kv_heads(parallel),
            head_size=model.get_head_size(),
            dtype=model.dtype,
        )
        return {f"model.layers.{i}.self_attn.attn": spec for i in range(model.get_num_layers(parallel))}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBNHC"]

    def determine_available_memory(self) -> int:
        return self.vllm_config.cache_config.kv_cache_memory_bytes

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        for name in scheduler_output.finished_req_ids:
            self.seeds.pop(name, None)
            self.lengths.pop(name, None)
        for new in scheduler_output.scheduled_new_reqs:
            self.seeds[new.req_id] = new.sampling_params.seed or 0
            self.lengths[new.req_id] = len(new.prefill_token_ids)
        self.scheduled = scheduler_output
        return None if scheduler_output.total_num_scheduled_tokens else EMPTY_MODEL_RUNNER_OUTPUT

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput:
        scheduled, cached = self.scheduled, self.scheduled.scheduled_cached_reqs
        names = list(scheduled.num_scheduled_tokens)
        new = {each.req_id: each.num_computed_tokens for each in scheduled.scheduled_new_reqs}
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True)) | new
        rows = []
        for name, count in scheduled.num_scheduled_tokens.items():
            end = computed[name] + count
            token = FIRST + (self.seeds[name] * 31 + end * 17) % VOCABULARY
            rows.append([token] if end >= self.lengths[name] else [])
        ids = np.zeros((len(names), 1), np.int32)
        ids[:, 0] = [row[0] if row else 0 for row in rows]
        log_probs = ids.astype(np.float32) / -VOCABULARY
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=rows,
            logprobs=LogprobsLists(ids, log_probs, np.ones(len(names), np.int32)),
            kv_connector_output=KVConnectorOutput(),
        )


class NullExecutor(Executor):
    """Runs `NullWorker` in the process of the engine core."""

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def _init_executor(self) -> None:
        self.worker = NullWorker(self.vllm_config)

    def check_health(self) -> None: ...

    def shutdown(self) -> None: ...

    def collective_rpc(
        self, method: Any, timeout=None, args=(), kwargs=None, non_block=False, single_value=False
    ) -> Any:
        answer = [getattr(self.worker, method)(*args, **(kwargs or {}))]
        return _done(answer) if non_block else answer

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        found = self.worker.execute_model(scheduler_output)
        return _done(found) if non_block else found

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        output = self.worker.sample_tokens(grammar_output)
        return _done(output) if non_block else output


def _done(value: Any) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future
