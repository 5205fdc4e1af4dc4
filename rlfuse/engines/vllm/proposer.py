"""Interface of proposers of draft tokens that know their requests, for vLLM's V1 model runner.

vLLM calls a custom proposer without the requests and without the number of drafts that its schedule allows;
`worker_extension` replaces this call by `propose_drafts`. Invariant: drafts affect tokens only by rounding
(`acceptance`), so a proposer may be wrong and need not be deterministic. V2 (GPUs) has speculators on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput

from rlfuse.engines.vllm.request_arguments import drawn_tokens


class Decoding(NamedTuple):
    """A request after a step."""

    name: str
    params: SamplingParams
    response: np.ndarray
    """int32: its tokens so far, with those that other engines drew; valid until the next step."""
    sampled: int
    """Number of tokens that it got in this step: one more than its accepted drafts; 0 within its prompt."""
    limit: int
    """Maximum number of tokens to draft; 0 if it must get none."""


class Proposer(ABC):
    """Base class. Engine arguments: speculative_config={"method": "custom_class", "model": "module.Class",
    "num_speculative_tokens": maximum per step, ...}."""

    def __init__(self, vllm_config: VllmConfig):
        self.max_model_len = vllm_config.model_config.max_model_len

    @abstractmethod
    def propose(self, requests: Sequence[Decoding]) -> list[list[int]]:
        """Return for each request up to `limit` tokens that may follow its response; may be empty. Called after each
        step, with all requests of the batch."""

    def load_model(self, model: Any) -> None:  # noqa: B027 - no proposer has one
        """Do nothing; vLLM calls this at startup, but a proposer has no model."""


def propose_drafts(runner: Any, scheduler_output: SchedulerOutput, sampled: list[list[int]]) -> list[list[int]]:
    """Return the drafts of each request of the batch, in its order. `runner`: a V1 model runner with a `Proposer`;
    `sampled`: tokens that the requests got in this step."""
    batch, requests = runner.input_batch, []
    for row, (name, tokens) in enumerate(zip(batch.req_ids, sampled, strict=True)):
        params, length = runner.requests[name].sampling_params, int(batch.num_tokens_no_spec[row])
        response = batch.token_ids_cpu[row, int(batch.num_prompt_tokens[row]) - drawn_tokens(params) : length]
        limit = min(runner.drafter.max_model_len - length, scheduler_output.num_spec_tokens_to_schedule)
        requests.append(Decoding(name, params, response, len(tokens), max(0, limit) if tokens else 0))
    return runner.drafter.propose(requests)
