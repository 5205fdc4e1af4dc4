"""What work costs on a slot, in seconds: the model that policies decide by and the simulator runs by.

A decoding step of b sequences holding c tokens takes `step_base_s + step_per_sequence_s * max(0, b - flat_batch) +
step_per_context_token_s * c`: decoding is bound by reading the weights until the batch exceeds `flat_batch`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Costs:
    """Defaults are those of a small model on one CPU core, until a run has measured its own."""

    step_base_s: float = 0.01
    step_per_sequence_s: float = 1e-4
    step_per_context_token_s: float = 0.0
    flat_batch: int = 8
    max_sequences: int = 256  # most sequences that an engine decodes at once
    kv_tokens: int = 1 << 30  # capacity of an engine's KV cache
    max_tokens: int = 1 << 20  # longest response
    prefill_tokens_per_s: float = 20_000.0
    score_tokens_per_s: float = 10_000.0  # one pass without gradients
    score_call_s: float = 0.0  # what each call of a pass costs beside its tokens
    train_tokens_per_s: float = 3_000.0  # forward and backward of one model
    train_call_s: float = 0.0
    optimizer_s: float = 0.0  # an optimizer step, all ranks together
    switch_s: float = 0.0  # changing a slot's role, either way
    move_s: float = 0.02  # taking samples off an engine and handing them over, beside prefill or transfer
    kv_bytes_per_token: float = 1.0
    link_bytes_per_s: float = 0.0  # between two slots' KV caches; 0 where they can't be carried over
    step_s: float = 0.0  # per training step: weights to the engines, data, bookkeeping

    def decode_step(self, batch: float, context: float) -> float:
        beyond = max(0.0, batch - self.flat_batch)
        return self.step_base_s + self.step_per_sequence_s * beyond + self.step_per_context_token_s * context

    def batch_within(self, seconds: float) -> int:
        """Most sequences whose decoding step, context apart, takes no longer than this; at least 1."""
        if self.step_per_sequence_s <= 0:
            return self.max_sequences
        beyond = (seconds - self.step_base_s) / self.step_per_sequence_s
        return max(1, min(self.max_sequences, int(self.flat_batch + beyond))) if beyond >= 0 else 1

    def carry(self, tokens: float) -> tuple[Literal["kv", "tokens"], float]:
        """The faster way to move a sample that holds so many tokens, and its seconds."""
        prefill = tokens / self.prefill_tokens_per_s
        if self.link_bytes_per_s <= 0:
            return "tokens", self.move_s + prefill
        transfer = tokens * self.kv_bytes_per_token / self.link_bytes_per_s
        return ("kv", self.move_s + transfer) if transfer < prefill else ("tokens", self.move_s + prefill)
