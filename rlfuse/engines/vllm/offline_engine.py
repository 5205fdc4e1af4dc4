"""Run vLLM synchronously in a reward process: for a judge, or a reward model with a classification head.

Engines are cached by settings for the lifetime of the process, since vLLM's engines in one process share process
groups. Not tested on GPUs.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rlfuse.errors import RewardError

MIB = 2**20
REQUEST_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Model and arguments of an engine."""

    model: str
    dtype: str = "auto"
    max_model_len: int | None = None
    kv_cache_memory_mb: int = 256
    trust_remote_code: bool = False
    engine_kwargs: str = "{}"
    pooling: bool = False


def environment(device: str, dtype: str | None = None) -> dict[str, str]:
    """Return the environment of a process that builds an engine, preferably set before it starts. `dtype`: of the
    weights, if known."""
    from rlfuse.engines.vllm.setup import rollout_env

    return rollout_env(device, dtype=dtype) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}


def engine(settings: EngineSettings) -> OfflineEngine:
    """Return the engine with these settings. Raises RewardError for unknown arguments, or a model that vLLM can't
    serve."""
    files = Path(settings.model).glob("*") if Path(settings.model).is_dir() else ()
    return _engine(settings, max((file.stat().st_mtime_ns for file in files), default=0))


@functools.cache
def _engine(settings: EngineSettings, written: int) -> OfflineEngine:
    """Build an engine. `written`: modification time of the model's files, since a notebook may retrain the model."""
    import torch

    from rlfuse.engines.vllm.importing import import_vllm

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = json.loads(settings.engine_kwargs).get("dtype", settings.dtype)
    for name, value in environment(device, dtype).items():
        os.environ.setdefault(name, value)
    with warnings.catch_warnings():  # vLLM's imports raise deprecation warnings of other libraries
        warnings.simplefilter("ignore")
        import_vllm()
        return OfflineEngine(_build(settings, device))


def _build(settings: EngineSettings, device: str) -> Any:
    from transformers import AutoConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from rlfuse.engines.vllm.engine_fork import forking
    from rlfuse.engines.vllm.prompts import prompt_arguments

    engine_kwargs = json.loads(settings.engine_kwargs)
    if unknown := set(engine_kwargs) - {field.name for field in fields(EngineArgs)}:
        raise RewardError(f"engine_kwargs has unknown arguments {sorted(unknown)}; use fields of vLLM's EngineArgs")
    arguments = {
        "model": settings.model,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "kv_cache_memory_bytes": settings.kv_cache_memory_mb * MIB,
        "trust_remote_code": settings.trust_remote_code,
        "seed": 0,
        "use_tqdm_on_load": False,
    }
    if device == "cpu":
        arguments |= {"enforce_eager": True, "block_size": 32}
    else:
        # The cache size is set in bytes; vLLM still requires this fraction of the device to be free.
        arguments["gpu_memory_utilization"] = 0.01
    try:
        config = AutoConfig.from_pretrained(settings.model, trust_remote_code=settings.trust_remote_code)
        if settings.pooling:
            arguments["runner"] = "pooling"
            _register_classifier(config)
        longest = (arguments | engine_kwargs)["max_model_len"] or getattr(
            config.get_text_config(), "max_position_embeddings", 0
        )
        arguments |= prompt_arguments(config, longest)
        arguments |= engine_kwargs
        with forking(device, arguments):
            return LLMEngine.from_engine_args(EngineArgs(**arguments))
    except Exception as error:
        raise RewardError(f"vLLM can't serve {settings.model}: {type(error).__name__}: {error}") from error


def _register_classifier(config: Any) -> None:
    """Register a video model with a classification head, which vLLM only supports for its text model."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.adapters import as_seq_cls_model

    from rlfuse.video.models.base import family_of

    family, name = family_of(config), (config.architectures or [""])[0]
    if family is not None and name not in ModelRegistry.models:
        whole = ModelRegistry.models[family.model_class.__name__].load_model_cls()
        ModelRegistry.register_model(name, as_seq_cls_model(whole))


class OfflineEngine:
    """vLLM's LLMEngine, stepped by the calling thread."""

    def __init__(self, llm: Any):
        from rlfuse.engines.vllm.prompts import Prompts

        self._llm, model = llm, llm.model_config
        self.tokenizer, self.context, self.model_config = llm.get_tokenizer(), model.max_model_len, model.hf_config
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.prompts = Prompts(model.hf_config, llm.vllm_config.scheduler_config.max_num_batched_tokens)

    def log_probs(self, prompts: Sequence[dict[str, Any]], token_ids: list[int]) -> list[list[float]]:
        """Return for each prompt the log-probs of `token_ids` as the first response token."""
        from vllm import SamplingParams

        one = SamplingParams(temperature=0.0, max_tokens=1, logprob_token_ids=token_ids, detokenize=False)
        firsts = [output.outputs[0].logprobs[0] for output in self._run(prompts, one)]
        return [[first[token].logprob for token in token_ids] for first in firsts]

    def logits(self, prompts: Sequence[dict[str, Any]]) -> list[list[float]]:
        """Return the class logits of each prompt, without vLLM's activation function."""
        from vllm import PoolingParams

        outputs = self._run(prompts, PoolingParams(task="classify", use_activation=False))
        return [output.outputs.data.float().tolist() for output in outputs]

    def _run(self, prompts: Sequence[dict[str, Any]], params: Any) -> list[Any]:
        """Return vLLM's final output for each prompt, in order. Requests are aborted if a step raises."""
        names, found = [f"reward-{next(REQUEST_NUMBERS)}" for _ in prompts], {}
        try:
            for name, prompt in zip(names, prompts, strict=True):
                self._llm.add_request(name, prompt, params)
            while self._llm.has_unfinished_requests():
                found |= {output.request_id: output for output in self._llm.step() if output.finished}
        except BaseException:
            self._llm.abort_request(names)
            raise
        return [found[name] for name in names]
