"""How a rollout engine is started: its environment, vLLM's arguments, and why a start failed.

Role: pure settings from the job's configuration, used by `rollout.RolloutWorker` and by whoever creates that actor.
Imports vLLM nowhere at the top: `rollout_env` must stand in the process before its first import.
Invariant: `rollout.engine_kwargs` has the last word on every argument.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from rlfuse.config.schema import ModelConfig, RolloutConfig
from rlfuse.engines.weights import MIB, resolve_transfer


def rollout_env(device: str, transfer: str = "auto") -> dict[str, str]:
    """Environment of the actor (as `runtime_env={"env_vars": ...}`); the engine's own processes inherit it."""
    env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "TOKENIZERS_PARALLELISM": "false"}
    if resolve_transfer(transfer, device) == "ipc":
        env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # CUDA IPC handles are pickled between actor and engine
    if device == "cuda":
        return env
    return env | {
        "TORCHDYNAMO_DISABLE": "1",  # no compilation of the sampler: first generate 6 s -> 0.4 s
        "OMP_NUM_THREADS": "1",  # engines and trainer share the cores; more threads fight (0.2 s -> 5 s once)
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine core and worker in one process: 20 s -> 11 s to start
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # tensor parallel on one NUMA node refuses to start otherwise
    }


def engine_arguments(model: ModelConfig, rollout: RolloutConfig, max_model_len: int, device: str) -> dict[str, Any]:
    """vLLM's AsyncEngineArgs for this job; `weight_transfer` stands in for vLLM's object of that name."""
    arguments: dict[str, Any] = {
        "model": model.path,
        "dtype": model.dtype,
        "trust_remote_code": model.trust_remote_code,
        "max_model_len": max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "seed": 0,
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature, as the trainer computes them
        "disable_log_stats": True,
        "worker_extension_cls": "rlfuse.engines.weights_receiver.ReceiverExtension",
    }
    if device == "cuda":
        arguments["gpu_memory_utilization"] = rollout.gpu_memory_utilization
        if rollout.tensor_model_parallel_size > 1:  # its workers are Ray actors in our bundles, see placement
            arguments["distributed_executor_backend"] = "ray"
    else:
        arguments |= {
            "enforce_eager": True,
            # Given outright: vLLM's share of "available memory" misjudges hosts whose memory is hot-plugged.
            "kv_cache_memory_bytes": rollout.kv_cache_memory_mb * MIB // rollout.tensor_model_parallel_size,
            "block_size": 32,  # default 128 would leave short prompts without a block to share
        }
    return arguments | rollout.engine_kwargs


class ErrorOutput:
    """What this process and its children write to stderr from now on, where stderr is a file (as under Ray).

    vLLM reports a failed engine process as "see root cause above": this is the above.
    """

    def __init__(self) -> None:
        self._file = Path(os.readlink("/proc/self/fd/2"))
        self._start = self._file.stat().st_size if self._file.is_file() else 0

    def reason(self) -> str:
        """The lines that name exceptions, else those that sound like a crash, without vLLM's prefixes; may be empty."""
        if not self._file.is_file():
            return ""
        with self._file.open("rb") as file:
            file.seek(self._start)
            text = file.read()[-65536:].decode(errors="replace")
        lines = [re.sub(r"^.*?\[\w+\.py:\d+\] ?|^\(\S+ pid=\d+\) ?", "", line) for line in text.splitlines()]
        lines = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
        named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b.*:", line)]
        crash = [line for line in lines if re.search(r"fatal|fault|terminate|killed|abort|no space", line, re.I)]
        return "\n".join((named or crash)[-4:])


def memory_hint(root: Path = Path("/dev/shm")) -> str:
    """A sentence if shared memory, which engine processes talk through, is nearly full."""
    free = shutil.disk_usage(root).free // MIB
    if free >= 64:
        return ""
    return f" {root} has only {free} MiB left: remove what fills it or give it more room (docker: --shm-size)."
