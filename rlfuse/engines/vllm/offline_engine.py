"""Run vLLM inside a reward process, in the calling thread: a judge, or a reward model under a head.

Engines are cached per settings for the life of the process, since vLLM's engines of a process share groups. Not run on
GPUs yet.
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
NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is made of."""

    model: str
    dtype: str = "auto"
    max_model_len: int | None = None
    kv_cache_memory_mb: int = 256
    trust_remote_code: bool = False
    engine_kwargs: str = "{}"
    pooling: bool = False


def environment(device: str, dtype: str | None = None) -> dict[str, str]:
    """Of a process that will build one, best set before it starts; `dtype`: of its weights, once it is known."""
    from rlfuse.engines.vllm.setup import rollout_env

    return rollout_env(device, dtype=dtype) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}


def engine(settings: EngineSettings) -> OfflineEngine:
    """Return the engine with these settings; RewardError for unknown arguments, or a model that vLLM can't serve."""
    files = Path(settings.model).glob("*") if Path(settings.model).is_dir() else ()
    return _engine(settings, max((file.stat().st_mtime_ns for file in files), default=0))


@functools.cache
def _engine(settings: EngineSettings, written: int) -> OfflineEngine:
    """`written`: modification time of the model's files, as a notebook may train it again."""
    import torch

    from rlfuse.engines.vllm.importing import import_vllm

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = json.loads(settings.engine_kwargs).get("dtype", settings.dtype)
    for name, value in environment(device, dtype).items():
        os.environ.setdefault(name, value)
    with warnings.catch_warnings():  # vLLM's imports, which go on while it builds, warn of other libraries' plans
        warnings.simplefilter("ignore")
        import_vllm()
        return OfflineEngine(_build(settings, device))


def _build(settings: EngineSettings, device: str) -> Any:
    from transformers import AutoConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from rlfuse.engines.vllm.engine_fork import forking
    from rlfuse.engines.vllm.prompts import prompt_arguments

    more = json.loads(settings.engine_kwargs)
    if unknown := set(more) - {field.name for field in fields(EngineArgs)}:
        raise RewardError(f"engine_kwargs has {sorted(unknown)}, which vLLM's EngineArgs has not")
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
        # The cache is given in bytes, but vLLM starts only where this share is free, beside engine or ranks.
        arguments["gpu_memory_utilization"] = 0.01
    try:
        config = AutoConfig.from_pretrained(settings.model, trust_remote_code=settings.trust_remote_code)
        if settings.pooling:
            arguments["runner"] = "pooling"
            _know_classifier(config)
        longest = (arguments | more)["max_model_len"] or getattr(config.get_text_config(), "max_position_embeddings", 0)
        arguments |= prompt_arguments(config, longest)
        arguments |= more
        with forking(device, arguments):
            return LLMEngine.from_engine_args(EngineArgs(**arguments))
    except Exception as error:
        raise RewardError(f"vLLM can't serve {settings.model}: {type(error).__name__}: {error}") from error


def _know_classifier(config: Any) -> None:
    """Register a whole video model under a head of its own: vLLM looks for it in the text part."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.adapters import as_seq_cls_model

    from rlfuse.video.models.base import family_of

    family, name = family_of(config), (config.architectures or [""])[0]
    if family is not None and name not in ModelRegistry.models:
        whole = ModelRegistry.models[family.model_class.__name__].load_model_cls()
        ModelRegistry.register_model(name, as_seq_cls_model(whole))


class OfflineEngine:
    """vLLM's LLMEngine, driven by the calling thread."""

    def __init__(self, llm: Any):
        from rlfuse.engines.vllm.prompts import Prompts

        self._llm, model = llm, llm.model_config
        self.tokenizer, self.context, self.model_config = llm.get_tokenizer(), model.max_model_len, model.hf_config
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.prompts = Prompts(model.hf_config, llm.vllm_config.scheduler_config.max_num_batched_tokens)

    def log_probs(self, prompts: Sequence[dict[str, Any]], token_ids: list[int]) -> list[list[float]]:
        """Return for each prompt the log-probs of these tokens as its first response token."""
        from vllm import SamplingParams

        one = SamplingParams(temperature=0.0, max_tokens=1, logprob_token_ids=token_ids, detokenize=False)
        firsts = [output.outputs[0].logprobs[0] for output in self._run(prompts, one)]
        return [[first[token].logprob for token in token_ids] for first in firsts]

    def logits(self, prompts: Sequence[dict[str, Any]]) -> list[list[float]]:
        """Return the raw logits of each prompt's classes, without vLLM's activation."""
        from vllm import PoolingParams

        outputs = self._run(prompts, PoolingParams(task="classify", use_activation=False))
        return [output.outputs.data.float().tolist() for output in outputs]

    def _run(self, prompts: Sequence[dict[str, Any]], params: Any) -> list[Any]:
        """Return vLLM's last output for each prompt, in order; no request stays in the engine if a step raises."""
        names, found = [f"reward-{next(NUMBERS)}" for _ in prompts], {}
        try:
            for name, prompt in zip(names, prompts, strict=True):
                self._llm.add_request(name, prompt, params)
            while self._llm.has_unfinished_requests():
                found |= {output.request_id: output for output in self._llm.step() if output.finished}
        except BaseException:
            self._llm.abort_request(names)
            raise
        return [found[name] for name in names]
