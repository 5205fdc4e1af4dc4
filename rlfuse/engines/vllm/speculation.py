"""Tail speculation: while few samples are left, an engine drafts tokens from what the sample itself has said before.

Role: vLLM's arguments for it, used by `rollout.vllm_setup.engine_arguments`. Waits for nothing.
Invariants:
- with more samples than the threshold nothing is drafted, and tokens are those of an engine without speculation;
- greedy tokens are always those. Drawn ones have the same distribution but are others: to accept or refuse a draft
  takes random numbers, so where a sample is generated and beside how many others then changes what is drawn.

Drafts are n-grams found again in prompt and response: no draft model, nothing to keep up to date with the weights.
"""

from __future__ import annotations

from typing import Any

from rlfuse.config.schema import ModelConfig, RolloutConfig

DRAFT_TOKENS = 4


def arguments(threshold: int, model: ModelConfig, rollout: RolloutConfig, visual: bool, device: str) -> dict[str, Any]:
    """vLLM's arguments to draft while at most `threshold` samples are decoded; none for 0.

    ValueError for a threshold below 0, and where vLLM can't: with several pipeline stages or data-parallel ranks,
    beside a `speculative_config`, or for a model that is `visual`: that has visual placeholders.
    """
    if threshold < 0:
        raise ValueError(f"fusion.tail_speculation={threshold}: give a number of samples, or 0 to turn it off")
    if not threshold:
        return {}
    if clash := {"speculative_config", "pipeline_parallel_size", "data_parallel_size"} & set(rollout.engine_kwargs):
        raise ValueError(
            f"fusion.tail_speculation={threshold} doesn't go with rollout.engine_kwargs.{min(clash)}: drop one of them"
        )
    if visual:
        raise ValueError(
            f"fusion.tail_speculation={threshold} doesn't go with {model.path}: vLLM can't keep its visual "
            "placeholders from being drawn while it drafts. Set it to 0"
        )
    most = rollout.max_num_seqs
    schedule = [(1, min(threshold, most), DRAFT_TOKENS)]
    if threshold < most:
        schedule.append((threshold + 1, most, 0))
    return {
        "speculative_config": {
            # The GPU's variant lets vLLM go on scheduling a step ahead of the device.
            "method": "ngram_gpu" if device == "cuda" else "ngram",
            "num_speculative_tokens": DRAFT_TOKENS,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
            "num_speculative_tokens_per_batch_size": schedule,
        }
    }
