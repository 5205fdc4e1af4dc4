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

DRAFT_TOKENS = 4


def arguments(threshold: int, max_num_seqs: int, device: str) -> dict[str, Any]:
    """vLLM's arguments to draft while at most `threshold` samples are decoded; none for 0.

    Raises ValueError for a threshold below 0.
    """
    if threshold < 0:
        raise ValueError(f"fusion.tail_speculation={threshold}: give a number of samples, or 0 to turn it off")
    if not threshold:
        return {}
    schedule = [(1, min(threshold, max_num_seqs), DRAFT_TOKENS)]
    if threshold < max_num_seqs:
        schedule.append((threshold + 1, max_num_seqs, 0))
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
