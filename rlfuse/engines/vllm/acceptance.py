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

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample


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

        Each round draws one token per request with vLLM's sampler, exactly as a step without drafts; requests whose
        draft was rejected no longer use their generators, and their tokens are dropped. Returns tokens [requests,
        rounds] with `PLACEHOLDER_TOKEN_ID` after the first difference, and log-probs [requests * rounds, ...].
        `draft_probs`: unused. `logits`: [drafts + requests, vocabulary].
        """
        counts = metadata.num_draft_tokens
        drafts = [each.tolist() for each in metadata.draft_token_ids.split(counts)]
        last = metadata.bonus_logits_indices
        first = last - torch.tensor(counts, device=last.device)
        active, log_probs = list(range(len(counts))), []
        columns: list[list[int]] = []
        while active:
            generators = {i: sampling_metadata.generators[i] for i in active if i in sampling_metadata.generators}
            drawn = self.sampler(
                logits=logits[torch.minimum(first + len(columns), last)],
                sampling_metadata=replace(sampling_metadata, generators=generators),
            )
            tokens, place = drawn.sampled_token_ids[:, 0].tolist(), len(columns)
            column = [PLACEHOLDER_TOKEN_ID] * len(counts)
            for i in active:
                column[i] = tokens[i]
            columns.append(column)
            log_probs.append(drawn.logprobs_tensors)
            active = [i for i in active if place < counts[i] and tokens[i] == drafts[i][place]]
        tokens = torch.tensor(columns, dtype=torch.int32, device=logits.device).T.contiguous()
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=_by_request(log_probs))


def _by_request(rounds: list[LogprobsTensors | None]) -> LogprobsTensors | None:
    """Return the log-probs of all rounds, ordered by request and then by round; None if none are requested."""
    wanted = [each[:3] for each in rounds if each is not None]
    stacked = (torch.stack(part, 1).flatten(0, 1) for part in zip(*wanted, strict=True))
    return LogprobsTensors(*stacked) if wanted else None


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
