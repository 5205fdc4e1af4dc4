"""Drafts from earlier responses on GPUs, for vLLM's V2 model runner: `history.continuation` on the device.

Each request has a row with its draft at the positions of its response. Drafts have full length, because the scheduler
runs ahead of the device and plans for it. Invariants: no synchronisation with the host; the row is copied when the
request is added. `worker_extension` installs it. Not run on a GPU: a test compares it with
`history.continuation` on the CPU, and its signature with vLLM's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator
from vllm.v1.worker.gpu.states import RequestState

from rlfuse.engines.vllm.history import CONTEXT, MIN_OWN
from rlfuse.engines.vllm.request_arguments import SEPARATOR, draft_of, drawn_tokens

NO_RECENT = -2


class HistorySpeculator(BaseSpeculator):
    """Speculator of requests with an earlier response; drafts of others are not verified (`decode_scheduler`)."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState):
        self.requests = req_states
        self.limit = vllm_config.speculative_config.num_speculative_tokens
        requests, length = req_states.max_num_reqs, req_states.max_model_len
        self.rows = torch.full((requests, length + self.limit), SEPARATOR, dtype=torch.int32, device=device)
        """Draft at its positions in the sequence."""
        self.starts = torch.zeros(requests, dtype=torch.int64, device=device)
        """Position of the first response token."""
        self._steps = torch.arange(self.limit, device=device)
        self._positions = torch.arange(length + self.limit, device=device)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Do nothing: proposing is not captured."""

    def capture(self) -> None:
        """Do nothing."""

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Return the drafts of the batch, int64 [requests, limit]; the last token where there is none, as vLLM's n-gram
        speculator."""
        indices = input_batch.idx_mapping[: input_batch.num_reqs].long()
        last = last_sampled.view(-1)[indices, None].expand(-1, self.limit)
        if dummy_run:
            return last.contiguous()
        rows, length = self.rows[indices], self.requests.total_len.gpu[indices, None].long()
        recent = length - 1 - torch.arange(CONTEXT, device=rows.device)
        starts, recent = self.starts[indices, None], recent.clamp(min=0)
        own = torch.nn.functional.pad(self.requests.all_token_ids.gpu[indices], (0, self.limit), value=SEPARATOR)
        own = torch.where((self._positions >= starts) & (self._positions < length), own, SEPARATOR)
        tokens = own.gather(1, recent)
        same = ((tokens == rows.gather(1, recent)) | (recent < starts)).all(1, keepdim=True)
        tokens = torch.where(recent < starts, NO_RECENT, tokens)
        (start, agreed), (own_start, own_agreed) = (_best_places(each, length, tokens) for each in (rows, own))
        is_own = ~same & (own_agreed >= MIN_OWN) & (own_agreed > agreed)
        start = torch.where(is_own, own_start, torch.where(same | (agreed == 0), length, start))
        places = (start + self._steps).clamp(max=rows.shape[1] - 1)
        drafts = torch.where(is_own, own.gather(1, places), rows.gather(1, places)).long()
        usable = (drafts != SEPARATOR) & (num_sampled > 0)[: len(indices), None]
        usable = usable.int().cumprod(1).bool()
        return torch.where(usable, drafts, last)


def _best_places(rows: torch.Tensor, length: torch.Tensor, recent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where each row has most of the latest tokens before a token, the place nearest to `length`, and how many.

    `rows`: [requests, positions]; `length`: [requests, 1]; `recent`: [requests, CONTEXT], the latest token first. The
    results have the shape of `length`.
    """
    width = rows.shape[1]
    padded = torch.nn.functional.pad(rows, (CONTEXT, 0), value=SEPARATOR)
    running, agreed = rows != SEPARATOR, torch.zeros_like(rows, dtype=torch.int64)
    for back in range(1, CONTEXT + 1):
        running = running & (padded[:, CONTEXT - back : CONTEXT - back + width] == recent[:, back - 1 : back])
        agreed += running
    places = torch.arange(width, device=rows.device)
    distances = 2 * (places - length).abs() + (places > length)
    best = (4 * width * agreed - distances).argmax(1, keepdim=True)
    return best, agreed.gather(1, best)


def set_draft(speculator: HistorySpeculator, index: int, params: SamplingParams) -> None:
    """Copy the draft of a new request to its row."""
    draft, start = draft_of(params), int(speculator.requests.prompt_len.np[index]) - drawn_tokens(params)
    row = np.full(speculator.rows.shape[1], SEPARATOR, np.int32)
    row[start : start + len(draft)] = draft[: len(row) - start]
    speculator.rows[index].copy_(torch.from_numpy(row), non_blocking=True)
    speculator.starts[index] = start
