"""Accept draft tokens by equality with the seeded draw, so that speculative decoding changes no token.

A token is `argmax(logits + Gumbel(seed, position))`, after temperature, min_p, top_k and top_p. Invariants:
- a draft is accepted if and only if it equals that token; vLLM's rule is equal in distribution, but draws other tokens;
- a request draws one number per token of its response, as without drafts, so it can continue on another engine;
- log-probs are of the verifying pass;
- V1: no sampling parameter depends on earlier tokens of the response (penalties, min_tokens, bad words); `setup` sets
  none, and `support` refuses custom logits processors.
`worker_extension` installs both rules: `EqualitySampler` for the V1 model runner, `accept_equal` for V2.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessor, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

PHILOX_PER_DRAW = 4
MAX_LOGITS = 2**26
"""Maximum number of logits that are sampled at once, because the sampler needs several copies of them."""
PER_REQUEST = ("temperature", "top_p", "top_k")
"""Fields of `SamplingMetadata` with one number per request."""
ACTIVE = {MinPLogitsProcessor: "min_p_count", LogitBiasLogitsProcessor: "biases", MinTokensLogitsProcessor: "min_toks"}
"""Built-in logits processor -> attribute that is empty if no request uses it."""


class EqualitySampler(RejectionSampler):
    """Sampler of drafted steps in the V1 model runner."""

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Draw the tokens of each request until one differs from its draft.

        vLLM's sampler draws a token from every row, as in a step without drafts. The generators of requests with a
        rejected draft then return to where they were after the last token that counts. `draft_probs`: unused. `logits`:
        [drafts + requests, vocabulary]. Returns tokens [requests, most tokens of a request] with
        `PLACEHOLDER_TOKEN_ID` after the first difference, and log-probs [requests * tokens, ...].
        """
        if not metadata.max_spec_len:
            return self.sampler(logits=logits, sampling_metadata=sampling_metadata)
        drafted = torch.tensor(metadata.num_draft_tokens, device=logits.device)
        last, generators = metadata.bonus_logits_indices, sampling_metadata.generators
        states = {i: each.get_state() for i, each in generators.items() if metadata.num_draft_tokens[i]}
        drawn = self._draw(logits, drafted, sampling_metadata)
        drafts = torch.full_like(drawn.sampled_token_ids[:, 0], PLACEHOLDER_TOKEN_ID)
        drafts[metadata.target_logits_indices] = metadata.draft_token_ids.to(drafts.dtype)
        places = torch.arange(metadata.max_spec_len + 1, device=logits.device)
        rows = torch.minimum((last - drafted)[:, None] + places, last[:, None])
        accepted = (drawn.sampled_token_ids[:, 0] == drafts)[rows]  # False where a request has no draft
        counts = accepted.int().cumprod(1).sum(1) + 1
        numbers = counts.tolist()
        for i, state in states.items():
            if numbers[i] <= metadata.num_draft_tokens[i]:
                generators[i].set_state(state)
                advance(generators[i], numbers[i])
        rows, places = rows[:, : max(numbers)], places[: max(numbers)]
        tokens = drawn.sampled_token_ids[rows, 0].masked_fill_(places >= counts[:, None], PLACEHOLDER_TOKEN_ID)
        log_probs = drawn.logprobs_tensors
        if log_probs is not None:
            log_probs = LogprobsTensors(*(part[rows.flatten()] for part in log_probs[:3]))
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=log_probs)

    def _draw(self, logits: torch.Tensor, drafted: torch.Tensor, sampling_metadata: SamplingMetadata) -> SamplerOutput:
        """Draw a token from every row; returns tokens [rows, 1] and log-probs [rows, ...]."""
        requests = torch.arange(len(drafted), device=logits.device).repeat_interleave(drafted + 1)
        places = torch.arange(len(logits), device=logits.device) - (drafted + 1).cumsum(0)[requests]
        size = max(1, MAX_LOGITS // logits.shape[1])
        parts = [
            self.sampler(logits=each, sampling_metadata=_of_rows(sampling_metadata, rows, place, len(drafted)))
            for each, rows, place in zip(logits.split(size), requests.split(size), places.split(size), strict=True)
        ]
        tokens, log_probs = torch.cat([each.sampled_token_ids for each in parts]), None
        if parts[0].logprobs_tensors is not None:
            log_probs = LogprobsTensors(
                *map(torch.cat, zip(*(each.logprobs_tensors[:3] for each in parts), strict=True))
            )
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=log_probs)


class _RowProcessor:
    """A logits processor of requests that is applied to rows, to one row of every request at a time."""

    def __init__(self, processor: LogitsProcessor, requests: torch.Tensor, places: torch.Tensor, count: int):
        self._processor, self._requests, self._places, self._count = processor, requests, places, count
        self.is_argmax_invariant = processor.is_argmax_invariant

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for place in self._places.unique():
            rows = (self._places == place).nonzero()[:, 0]
            requests, batch = self._requests[rows], logits.new_zeros(self._count, logits.shape[1])
            batch[requests] = logits[rows]
            logits[rows] = self._processor.apply(batch)[requests]
        return logits


def _of_rows(metadata: SamplingMetadata, requests: torch.Tensor, places: torch.Tensor, count: int) -> SamplingMetadata:
    """Return the metadata of rows from that of requests, whose penalties and lists of words rlfuse never sets.

    `requests`, `places`: int64 [rows], the request of each row, ascending, and its place in the request; `count`: of
    requests.
    """
    active = [each for each in metadata.logitsprocs.all if getattr(each, ACTIVE.get(type(each), ""), True)]
    owners = enumerate(requests.tolist())
    return replace(
        metadata,
        **{name: None if (of := getattr(metadata, name)) is None else of[requests] for name in PER_REQUEST},
        generators={row: metadata.generators[i] for row, i in owners if i in metadata.generators},
        logitsprocs=LogitsProcessors(_RowProcessor(each, requests, places, count) for each in active),
    )


_forward_cpu = TopKTopPSampler.forward_cpu


def sample_on_cpu(
    self: TopKTopPSampler,
    logits: torch.Tensor,
    generators: dict[int, torch.Generator],
    k: torch.Tensor | None,
    p: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draw as vLLM's `TopKTopPSampler.forward_cpu`, with one call for consecutive rows of a generator.

    One call per row would take most of the sampler's time in a step with drafts.
    """
    if self.use_fp64_gumbel or self.logprobs_mode != "processed_logprobs":
        return _forward_cpu(self, logits, generators, k, p)
    logits = apply_top_k_top_p(logits, k, p)
    seeds = torch.randint(0, 1 << 31, (len(logits),))
    parts = [
        torch.randint(0, 1 << 31, (len(list(rows)),), generator=generator)
        for generator, rows in groupby(generators.values())
    ]
    if parts:
        seeds[list(generators)] = torch.cat(parts)
    drawn = torch.ops._C.fused_gumbel_argmax(logits.to(torch.float32), seeds)
    return drawn, logits.log_softmax(dim=-1, dtype=torch.float32)


def advance(generator: torch.Generator, draws: int) -> None:
    """Advance a request's generator by this number of tokens, as vLLM's sampler does."""
    if generator.device.type != "cpu":
        generator.set_offset(generator.get_offset() + PHILOX_PER_DRAW * draws)
    elif draws:
        torch.randint(0, 1 << 31, (draws,), generator=generator)


def accept_equal(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    pos: torch.Tensor,
    idx_mapping: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    num_speculative_steps: int,
    synthetic_conditional_rates: torch.Tensor | None = None,
    use_fp64: bool = False,
    use_block_verification: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of each request and how many of them count, in place of V2's `rejection_sample`.

    `target_logits`: [rows, vocabulary], after all sampling parameters; rows of a request are consecutive, from
    `cu_num_logits[i]` to `cu_num_logits[i + 1]`. `draft_sampled`: the input token of each row, so row r verifies the
    draft of row r + 1; -1 is never accepted. Returns tokens [requests, num_speculative_steps + 1] and counts
    [requests]. Source: `vllm.v1.worker.gpu.sample.sampler.Sampler`, whose draw it repeats for every row.
    """
    drawn = gumbel_sample(
        target_logits,
        expanded_idx_mapping,
        temperature,
        seed,
        pos,
        apply_temperature=False,
        is_drafting=False,
        use_fp64=use_fp64,
    )
    rows = cu_num_logits[:-1, None] + torch.arange(num_speculative_steps + 1, device=drawn.device)
    last = drawn.shape[0] - 1
    tokens, drafts = drawn[rows.clamp(max=last)], draft_sampled[(rows + 1).clamp(max=last)]
    accepted = (tokens == drafts) & (rows + 1 < cu_num_logits[1:, None])
    counts = accepted.int().cumprod(1, dtype=torch.int32).sum(1, dtype=torch.int32) + 1
    return tokens, counts
