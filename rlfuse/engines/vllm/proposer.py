"""Interface of proposers of draft tokens that know their request, for vLLM's V1 model runner.

vLLM calls a custom proposer without the requests and without the number of drafts that its schedule allows;
`worker_extension` replaces this call by `propose_drafts`. Invariant: drafts affect tokens only by rounding
(`acceptance`), so a proposer may be wrong and need not be deterministic. V2 (GPUs) has speculators on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu_input_batch import CachedRequestState


class Proposer(ABC):
    """Base class. Engine arguments: speculative_config={"method": "custom_class", "model": "module.Class",
    "num_speculative_tokens": maximum per step, ...}."""

    def __init__(self, vllm_config: VllmConfig):
        self.max_model_len = vllm_config.model_config.max_model_len

    @abstractmethod
    def propose(self, request: CachedRequestState, limit: int) -> list[int]:
        """Return up to `limit` tokens that may follow the request's tokens; may be empty.

        `request`: `prompt_token_ids` (of a continued sample: ends with the `worker_extension.drawn(request)` response
        tokens that other engines drew), `output_token_ids` (drawn here, including this step), `req_id`,
        `sampling_params` with `seed` and `extra_args`. Called after each step in which the request got tokens.
        """

    def load_model(self, model: Any) -> None:  # noqa: B027 - no proposer has one
        """Do nothing; vLLM calls this at startup, but a proposer has no model."""


def propose_drafts(runner: Any, scheduler_output: SchedulerOutput, sampled: list[list[int]]) -> list[list[int]]:
    """Return the drafts of each request of the batch, in its order. `runner`: a V1 model runner with a `Proposer`;
    `sampled`: tokens that the requests got in this step."""
    proposer, batch = runner.drafter, runner.input_batch
    limits = proposer.max_model_len - batch.num_tokens_no_spec[: len(sampled)]
    limits = limits.clip(max=scheduler_output.num_spec_tokens_to_schedule).tolist()
    return [
        proposer.propose(runner.requests[name], limit) if tokens and limit > 0 else []
        for name, tokens, limit in zip(batch.req_ids, sampled, limits, strict=True)
    ]
