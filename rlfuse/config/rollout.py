"""Keys of the group `rollout`: generation engines and sampling parameters, in training and validation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlfuse.config.declare import (
    BATCH,
    RESOURCES,
    SAMPLING,
    SCHEDULING,
    TOLERANCE,
    TRAINED,
    VALIDATION,
    Effect,
    KeyGroup,
    Resume,
    key,
)


@dataclass
class ValKwargs(KeyGroup):
    """Sampling parameters of validation, `rlfuse eval` and `rlfuse generate`."""

    n: int = key(1, VALIDATION, at_least=1)
    """Number of responses per validation prompt."""
    temperature: float = key(0.0, VALIDATION, at_least=0)
    """Sampling temperature; 0 is greedy decoding."""
    top_p: float = key(1.0, VALIDATION, above=0, at_most=1)
    """Nucleus sampling: cumulative probability of the tokens to sample from; 1 disables it."""
    top_k: int = key(-1, VALIDATION, at_least=1, or_minus_one=True)
    """Number of most likely tokens to sample from; -1: all."""
    min_p: float = key(0.0, VALIDATION, at_least=0, at_most=1)
    """Minimum probability of a token, relative to the most likely token; 0 disables it."""


HISTORY = "history"
"""Value of rollout.draft: draft from earlier responses over epochs."""


@dataclass
class RolloutConfig(KeyGroup):
    """Generation: vLLM engines and sampling parameters. Each engine uses tensor_model_parallel_size slots."""

    name: str = key("vllm", TRAINED, choices="vllm | transformers (CPUs; models that vLLM does not support)")
    """Rollout engine."""
    n: int = key(1, BATCH, at_least=1)
    """Number of responses per prompt (the group size)."""
    temperature: float = key(
        1.0,
        SAMPLING,
        above=0,
        remedy="training compares sampled responses; for greedy validation set rollout.val_kwargs.temperature=0",
    )
    """Sampling temperature; the trainer divides its logits by the same value."""
    top_p: float = key(1.0, SAMPLING, above=0, at_most=1)
    """Nucleus sampling: cumulative probability of the tokens to sample from; 1 disables it. Below 1, the engine's
    log-probs are those of the truncated distribution."""
    top_k: int = key(-1, SAMPLING, at_least=1, or_minus_one=True)
    """Number of most likely tokens to sample from; -1: all."""
    min_p: float = key(0.0, SAMPLING, at_least=0, at_most=1)
    """Minimum probability of a token, relative to the most likely token; 0 disables it. As with top_p, log-probs are
    those of the truncated distribution."""
    stop: list[str] = key([], SAMPLING)
    """Stop strings, in training and validation. The tokens up to and including the stop string are kept, scored and
    trained on."""
    tensor_model_parallel_size: int = key(1, SCHEDULING, at_least=1)
    """Tensor-parallel size of each engine; the number of engines is the number of slots divided by it."""
    gpu_memory_utilization: float = key(0.5, RESOURCES, above=0, at_most=1)
    """Fraction of device memory that an engine may use (GPUs). The KV cache is never larger than max_num_seqs samples
    of maximum length need."""
    free_cache_engine: bool | None = key(None, RESOURCES)
    """Free the engine's device memory while the trainer runs (GPUs); null: only if the memory plan shows that both do
    not fit (see `rlfuse plan`)."""
    kv_cache_memory_mb: int = key(256, RESOURCES, unit="MiB", at_least=1)
    """KV cache size of an engine on CPU hosts."""
    max_num_seqs: int = key(256, RESOURCES, at_least=1)
    """Maximum number of sequences that an engine decodes concurrently."""
    weight_transfer: str = key(
        "auto",
        RESOURCES,
        choices="auto (ipc on GPUs unless training is pipelined, else shm) | shm | ipc",
        rejected={"nccl": "NCCL rejects two ranks on one GPU, and a slot's engine and trainer rank share a GPU"},
    )
    """Transport of new weights from the trainer to the engines."""
    kv_transfer: str = key("auto", RESOURCES, choices="auto (shm) | shm | nixl (CPU hosts only)")
    """Transport of the KV cache of a migrated sample to its new engine."""
    disaggregate: str = key(
        "auto", SCHEDULING, choices="auto (if the simulated gain exceeds the measured error) | off | on (one node)"
    )
    """Prefill/decode disaggregation: some engines only prefill and transfer the KV caches to engines that only
    decode."""
    draft: str = key(
        "ngram",
        Resume(Effect.NEXT_STEP, "with history, other random draws; otherwise the same results up to rounding"),
        choices="ngram (repeat what followed the last tokens before) | suffix (the same in all earlier responses; "
        "CPUs; requires arctic-inference) | history (the previous response to the same prompt)",
    )
    """Source of draft tokens. ngram and suffix are used by fusion.tail_speculation and change tokens only by rounding.
    history is used for all samples of prompts seen before: seeds do not depend on the step, so most of the previous
    response is drawn again while the policy has moved little. Each response is an exact sample of the policy, but those
    to a prompt are correlated over epochs. Steps repeated after a crash and `rlfuse eval` draft with every value."""
    draft_store_mb: int = key(256, RESOURCES, unit="MiB", at_least=0)
    """Maximum size of the file of earlier responses that serve as drafts (drafts.bin in the run folder); beyond it the
    oldest are dropped. 0: none are stored."""
    scheduler: str = key("fast", RESOURCES, choices="fast (shorter code path for decode steps) | vllm (vLLM's own)")
    """Scheduler of the engines; tokens and log-probs are identical."""
    update_weights_bucket_mb: int = key(512, RESOURCES, unit="MiB", at_least=1)
    """Bucket size of weight transfers; the trainer allocates at most two buckets."""
    quantization: str | None = key(
        None,
        SAMPLING,
        choices="fp8_per_channel (CPUs; GPUs of compute capability 8.9 or more) | fp8_per_tensor (GPUs only) | "
        "fp8_per_block (GPUs only) | int8_per_channel_weight_only (MoE experts only; GPUs only)",
        rejected={"fp8": "in vLLM this is an 8-bit checkpoint; names of online quantization give the granularity"},
    )
    """Online 8-bit quantization of the engines' linear layers by vLLM, repeated at every weight transfer; null: none.
    Requires algorithm.rollout_correction."""
    on_mismatch: str = key("stop", TOLERANCE, choices="stop | alert")
    """Action if the log-probs of engines and trainer for the same tokens differ after the first weight transfer."""
    engine_kwargs: dict[str, Any] = key({}, SAMPLING)
    """Additional arguments of vLLM's AsyncEngineArgs, by name."""
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)
