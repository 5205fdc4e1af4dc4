"""Extend vLLM's workers: random generators that continue a sample, drafts that change no token, a cheaper decode step.

Imported in every worker process, because the engine names `WorkerExtension` as its `worker_extension_cls`.

A seeded request draws once per token, so its generator's state follows from the seed and the number of tokens. vLLM's
V1 model runner (CPU hosts) has a torch generator per request; it is advanced here by the tokens that other engines
drew: one 32-bit number per draw on CPUs, four Philox offsets on GPUs. The V2 model runner (GPUs) derives each draw from
seed and position. vLLM can undo a draw (chunks of a long prompt draw unused tokens) only on GPUs; `CountedGenerator`
adds this on CPUs.

With drafts, vLLM draws other tokens and ignores min_p and logit biases in the V1 model runner; `acceptance` replaces
its rules, and all sampling parameters of `setup` apply. V1 would draft token 0 for all requests if one is near the
maximum length; proposers without a model limit their drafts themselves.

In the V2 model runner, the parameters of all requests (15 arrays) are copied to the device only after a request was
added instead of at every step, and the ranks of sampled tokens are not computed, because nothing reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.sample import logprob
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode import rejection_sampler
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from rlfuse.engines.vllm.acceptance import PHILOX_PER_DRAW, EqualitySampler, accept_equal, advance, sample_on_cpu
from rlfuse.engines.vllm.history_speculator import HistorySpeculator, set_draft
from rlfuse.engines.vllm.proposer import Proposer, propose_drafts
from rlfuse.engines.vllm.receiver import ReceiverExtension
from rlfuse.engines.vllm.request_arguments import drafts_from_history, drawn_tokens

BUILT_IN_PROCESSORS = 3
"""Number of vLLM's built-in logits processors; custom ones may need to run at each step."""
WITHOUT_MODEL = ("ngram", "suffix", "custom_class")
"""Methods of `speculative_config` whose drafts are lists, without KV cache."""


class CountedGenerator(torch.Generator):
    """CPU generator that can undo draws."""

    request: CachedRequestState

    def reposition(self) -> None:
        """Set the state after the request's tokens."""
        self.manual_seed(self.request.sampling_params.seed)
        advance(self, drawn(self.request) + len(self.request.output_token_ids))

    def get_offset(self) -> int:
        """Return any number; vLLM only passes it to `set_offset`."""
        return PHILOX_PER_DRAW

    def set_offset(self, offset: int) -> None:
        """Undo the last draw, which produced no token."""
        self.reposition()


def drawn(request: CachedRequestState) -> int:
    """Return the number of response tokens at the end of the request's prompt."""
    return drawn_tokens(request.sampling_params)


def position(request: CachedRequestState) -> None:
    """Advance a new request's generator by the tokens that its sample already has."""
    if request.generator.device.type == "cpu":
        request.generator = CountedGenerator()
        request.generator.request = request
        request.generator.reposition()
    else:
        advance(request.generator, drawn(request))


class WorkerExtension(ReceiverExtension):
    """Worker extension; naming it makes vLLM import this module in its workers."""


_post_init = CachedRequestState.__post_init__


def _positioned_post_init(self: CachedRequestState) -> None:
    """Position the generator; vLLM has no other hook at its creation."""
    _post_init(self)
    if self.generator is not None:
        position(self)


CachedRequestState.__post_init__ = _positioned_post_init


_add_request, _apply_staged_writes = Sampler.add_request, Sampler.apply_staged_writes


def _added_request(self: Any, req_idx: int, sampling_params: SamplingParams) -> None:
    self.is_copied = False
    _add_request(self, req_idx, sampling_params)
    if (speculator := _speculators.get(self.req_states)) is not None:
        set_draft(speculator, req_idx, sampling_params)


def _apply_new_writes(self: Any) -> None:
    if not getattr(self, "is_copied", False) or len(self.logits_processors) > BUILT_IN_PROCESSORS:
        _apply_staged_writes(self)
    self.is_copied = True


class NoKernel:
    """Replacement of a Triton kernel that launches nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: None


Sampler.add_request, Sampler.apply_staged_writes = _added_request, _apply_new_writes
logprob._ranks_kernel = NoKernel()


_build_logitsprocs = gpu_model_runner.build_logitsprocs
_propose_draft_token_ids = gpu_model_runner.GPUModelRunner.propose_draft_token_ids
_input_fits_in_drafter = gpu_model_runner.GPUModelRunner._input_fits_in_drafter


def _all_logitsprocs(vllm_config: VllmConfig, *args: Any) -> Any:
    """Build the processors as without drafts; `EqualitySampler` applies all of them. vLLM refuses custom ones."""
    *_, custom = args
    if not custom:
        vllm_config = copy(vllm_config)
        vllm_config.speculative_config = None
    return _build_logitsprocs(vllm_config, *args)


def _drafts(self: Any, scheduler_output: SchedulerOutput, sampled: Any, *args: Any) -> Any:
    """Propose drafts; vLLM calls proposers without a model also where the batch is too large to draft."""
    if not scheduler_output.num_spec_tokens_to_schedule and self.speculative_config.method in WITHOUT_MODEL:
        return [[] for _ in sampled]
    if isinstance(self.drafter, Proposer):
        return propose_drafts(self, scheduler_output, sampled)
    return _propose_draft_token_ids(self, scheduler_output, sampled, *args)


def _fits(self: Any, attention: Any) -> bool:
    """Return whether the drafter can run for all requests. `attention`: metadata of the step."""
    without_model = self.speculative_config.method in WITHOUT_MODEL and attention is not None
    return without_model or _input_fits_in_drafter(self, attention)


_init_speculator = model_runner.init_speculator
_speculators: dict[RequestState, HistorySpeculator] = {}
"""Requests of a model runner -> its speculator."""


def _speculator(vllm_config: VllmConfig, device: torch.device, req_states: RequestState) -> Any:
    """Build the speculator of the V2 model runner."""
    if drafts_from_history(vllm_config):
        return _speculators.setdefault(req_states, HistorySpeculator(vllm_config, device, req_states))
    return _init_speculator(vllm_config, device, req_states)


model_runner.init_speculator = _speculator
gpu_model_runner.RejectionSampler = EqualitySampler
gpu_model_runner.build_logitsprocs = _all_logitsprocs
gpu_model_runner.GPUModelRunner.propose_draft_token_ids = _drafts
gpu_model_runner.GPUModelRunner._input_fits_in_drafter = _fits
rejection_sampler.rejection_sample = accept_equal
TopKTopPSampler.forward_cpu = sample_on_cpu
