"""Cost model of a step: seconds of each kind of work on a typical slot.

A decoding step of b sequences with c cached tokens takes `step_base_s + step_per_sequence_s * max(0, b - flat_batch) +
step_per_context_token_s * c`: decoding is bound by reading the weights until the batch exceeds `flat_batch`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of each kind of work. Defaults: a small model on one CPU core; `costs.fit` replaces them by measured
    ones."""

    step_base_s: float = 0.01
    step_per_sequence_s: float = 1e-4
    step_per_context_token_s: float = 0.0
    flat_batch: int = 8
    max_sequences: int = 256  # maximum sequences that an engine decodes at once
    kv_tokens: int = 1 << 30  # capacity of an engine's KV cache
    max_tokens: int = 1 << 20  # longest response
    prefill_tokens_per_s: float = 20_000.0
    score_tokens_per_s: float = 10_000.0  # one pass without gradients
    score_call_s: float = 0.0  # fixed cost of each call of a pass
    train_tokens_per_s: float = 3_000.0  # forward and backward of one model
    train_call_s: float = 0.0
    optimizer_s: float = 0.0  # an optimizer step, all ranks together
    switch_s: float = 0.0  # switching a slot between engine and trainer
    move_s: float = 0.02  # moving samples between engines, without prefill or KV transfer
    kv_bytes_per_token: float = 1.0
    link_bytes_per_s: float = 0.0  # between two slots' KV caches; 0: caches cannot be moved
    step_s: float = 0.0  # per training step: weight push, data, bookkeeping

    def decode_step(self, batch: float, context: float) -> float:
        """Return the seconds of one decoding step of `batch` sequences with `context` cached tokens in total."""
        beyond = max(0.0, batch - self.flat_batch)
        return self.step_base_s + self.step_per_sequence_s * beyond + self.step_per_context_token_s * context

    def prefill(self, tokens: float) -> float:
        return tokens / self.prefill_tokens_per_s

    def scoring(self, tokens: float, calls: float = 1) -> tuple[float, float]:
        """Return the seconds of one pass over `tokens`: fixed costs of its calls, and its work, which scales with the
        slot's rate."""
        return calls * self.score_call_s, tokens / self.score_tokens_per_s

    def training(self, tokens: float, calls: float = 1) -> tuple[float, float]:
        """Return the same for forward and backward of one model."""
        return calls * self.train_call_s, tokens / self.train_tokens_per_s

    def batch_within(self, seconds: float) -> int:
        """Return the largest batch whose decoding step without context takes at most `seconds`; at least 1."""
        if self.step_per_sequence_s <= 0:
            return self.max_sequences
        beyond = (seconds - self.step_base_s) / self.step_per_sequence_s
        return max(1, min(self.max_sequences, int(self.flat_batch + beyond))) if beyond >= 0 else 1

    def carry(self, tokens: float) -> tuple[Literal["kv", "tokens"], float]:
        """Return the faster way to move a sample of `tokens` tokens, and its seconds."""
        prefill = self.prefill(tokens)
        if self.link_bytes_per_s <= 0:
            return "tokens", self.move_s + prefill
        transfer = tokens * self.kv_bytes_per_token / self.link_bytes_per_s
        return ("kv", self.move_s + transfer) if transfer < prefill else ("tokens", self.move_s + prefill)
