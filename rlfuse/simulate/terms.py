"""Cost terms of systems that this project does not have: one coefficient each, and who published what of it.

Role: a workload's `terms` and `parts`. `Workload` applies them where it tells its costs, its slots' speeds and what is
lost with an engine; `simulate --explain` lists them. Pure.
Invariants: as they are by default they change nothing, to the last bit; no figure but a published one stands here, with
where it is printed, and where a source has none of the coefficient itself there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from typing import Annotated

from rlfuse.config.input_files import LARGEST, AtLeastOne, AtLeastZero, Count, number
from rlfuse.fusion.costs import Costs

MOST_PARTS = 0.99
"""Of a slot's work, all parts together: what is left has a rate."""
Share = Annotated[float, number(most=1)]
Part = Annotated[float, number(most=MOST_PARTS)]
Remaining = Annotated[float, number(above=True, most=1)]


@dataclass(frozen=True, slots=True)
class Parts:
    """What slots' work consists of, as shares of its seconds without any term; the rest no term changes."""

    tensor_parallel: Part = 0.0
    """Exchanges between tensor-parallel devices: of prefill, decoding steps, passes and training."""
    all_to_all: Part = 0.0
    """Tokens on their way to experts and back: likewise."""
    attention: Part = 0.0
    """Attention between the tokens of a sequence: of prefill, passes and training. A decoding step's is
    `engine.step_per_context_token_s`."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Of systems that this project does not have; by default none of them."""

    tensor_parallel_overlap: Share = 0.0
    """Share of `parts.tensor_parallel` that is hidden behind products."""
    nano_batches: AtLeastOne = 1.0
    """How many times as fast an engine decodes what comes beside reading its weights, as computing, memory and links
    work at the same time: sequences beyond `engine.flat_batch`, and context."""
    all_to_all_speedup: AtLeastOne = 1.0
    """How many times as fast `parts.all_to_all` is where it goes before other traffic."""
    all_to_all_bytes: Remaining = 1.0
    """Share of the bytes of `parts.all_to_all` that is sent, the rest compressed away. Changes numbers."""
    kv_resident: Remaining = 1.0
    """Share of each sample's KV cache that is on the device and read; the rest waits in the host's memory. Changes
    numbers."""
    attention_density: Remaining = 1.0
    """Share of `parts.attention` that is computed. Changes numbers."""
    full_attention: Share = 1.0
    """Share of layers with attention to all tokens, the others being linear: of `parts.attention`, of the KV cache and
    of reading it. Another model."""
    interference: AtLeastZero = 0.0
    """Share by which all work of slots takes longer for what else runs on their devices."""
    fault_radius: Count = 1
    """Slots that are lost with one that fails: all of its domain, which are consecutive slots."""

    def costs(self, costs: Costs, parts: Parts) -> Costs:
        """What work costs with these terms, where it costs so much without."""
        sent = self.all_to_all_bytes / self.all_to_all_speedup
        exchange = parts.tensor_parallel * self.tensor_parallel_overlap + parts.all_to_all * (1 - sent)
        attention = parts.attention * (1 - self.attention_density * self.full_attention)
        decoding, others = 1 - exchange, 1 - exchange - attention  # what is left of their seconds
        held = self.kv_resident * self.full_attention
        return replace(
            costs,
            step_base_s=costs.step_base_s * decoding,
            step_per_sequence_s=costs.step_per_sequence_s * decoding / self.nano_batches,
            step_per_context_token_s=costs.step_per_context_token_s * held / self.nano_batches,
            kv_tokens=self.room(costs.kv_tokens),
            kv_bytes_per_token=costs.kv_bytes_per_token * self.full_attention,
            prefill_tokens_per_s=costs.prefill_tokens_per_s / others,
            score_tokens_per_s=costs.score_tokens_per_s / others,
            train_tokens_per_s=costs.train_tokens_per_s / others,
        )

    def room(self, kv_tokens: int) -> int:
        """Tokens that an engine's cache has room for, which holds so many whole ones."""
        held = self.kv_resident * self.full_attention
        if held == 1:
            return kv_tokens
        return int(min(kv_tokens / held, LARGEST)) if held else int(LARGEST)

    def speed(self) -> float:
        """Factor on that of every slot."""
        return 1 / (1 + self.interference)

    def domain(self, slot: int, slots: int) -> range:
        """The slots, of so many, that are lost with this one."""
        first = slot - slot % self.fault_radius
        return range(first, min(first + self.fault_radius, slots))

    def problems(self, parts: Parts) -> Iterator[str]:
        """Why they can't stand beside these parts."""
        if (together := sum(astuple(parts))) > MOST_PARTS:
            yield f"parts are {together:g} together: shares of the same work, at most {MOST_PARTS}; lower them"
        for name, source in SOURCES.items():
            if getattr(self, name) != getattr(Terms(), name) and not source.acts_on(parts):
                yield (
                    f"terms.{name}={getattr(self, name):g}: changes nothing while parts.{source.part} is 0; give that "
                    "share of the slots' work, or leave the term out"
                )


@dataclass(frozen=True, slots=True)
class Source:
    """Who published a term."""

    says: str
    figure: float | None = None
    """Of the term, as printed there."""
    part: str = ""
    """Of `Parts`, the only thing that the term changes."""

    def acts_on(self, parts: Parts) -> bool:
        """Whether there is anything for the term to change."""
        return not self.part or bool(getattr(parts, self.part))


SOURCES = {
    "tensor_parallel_overlap": Source(
        "Flux (arXiv 2406.06858), abstract: up to 96 % of the exchange within a fused kernel", 0.96, "tensor_parallel"
    ),
    "nano_batches": Source(
        "NanoFlow (arXiv 2408.12757), abstract: 1.91 times the throughput of the best serving system before", 1.91
    ),
    "all_to_all_speedup": Source(
        "Lina (arXiv 2210.17223), abstract: training steps up to 1.73 times as fast; none of the exchange alone",
        part="all_to_all",
    ),
    "all_to_all_bytes": Source(
        "LSH-MoE (arXiv 2411.08446), abstract: training 1.28 to 2.2 times as fast where exchanges are 45 % of it; none "
        "of the bytes alone",
        part="all_to_all",
    ),
    "kv_resident": Source(
        "PQCache (arXiv 2407.12820), first version of July 2024: quality is kept with a fifth of the tokens in "
        "attention",
        0.2,
    ),
    "attention_density": Source(
        "DSV (arXiv 2502.07590), abstract: training up to 3.02 times as fast where attention is up to 95 % of it; none "
        "of the density alone",
        part="attention",
    ),
    "full_attention": Source("SpikingBrain (arXiv 2509.05276), abstract: its model of 7B is a linear one", 0.0),
    "interference": Source(
        "MuxFlow (arXiv 2303.13803), abstract: shared GPUs are 76 % utilized instead of 26 %; none of the slowdown"
    ),
    "fault_radius": Source(
        "InfinitePOD (arXiv 2502.03885), abstract: 64 devices in TPUv4's cubes; with its own links, those of a node", 64
    ),
}
"""Term -> where it is from."""
