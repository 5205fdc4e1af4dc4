"""Extend vLLM's workers: random generators that continue a sample, and a cheaper decode step on GPUs.

Imported in every worker process, because the engine names `WorkerExtension` as its `worker_extension_cls`.

A seeded request draws once per token, so its generator's state follows from the seed and the number of tokens. vLLM's
V1 model runner (CPU hosts) has a torch generator per request; it is advanced here by the tokens that other engines
drew: one 32-bit number per draw on CPUs, four Philox offsets on GPUs. The V2 model runner (GPUs) derives each draw from
seed and position. vLLM can undo a draw (chunks of a long prompt draw unused tokens) only on GPUs; `CountedGenerator`
adds this on CPUs.

In the V2 model runner, the parameters of all requests (15 arrays) are copied to the device only after a request was
added instead of at every step, and the ranks of sampled tokens are not computed, because nothing reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample import logprob
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from rlfuse.engines.vllm.receiver import ReceiverExtension

DRAWN = "rlfuse_drawn"
"""Key of `SamplingParams.extra_args`: tokens at the end of the prompt that are part of the response."""
PHILOX_PER_DRAW = 4
BUILT_IN_PROCESSORS = 3
"""Number of vLLM's built-in logits processors; custom ones may need to run at each step."""


class CountedGenerator(torch.Generator):
    """CPU generator that can undo draws."""

    request: CachedRequestState

    def reposition(self) -> None:
        """Set the state after the request's tokens."""
        self.manual_seed(self.request.sampling_params.seed)
        if draws := drawn(self.request) + len(self.request.output_token_ids):
            torch.randint(0, 1 << 31, (draws,), generator=self)

    def get_offset(self) -> int:
        """Return any number; vLLM only passes it to `set_offset`."""
        return PHILOX_PER_DRAW

    def set_offset(self, offset: int) -> None:
        """Undo the last draw, which produced no token."""
        self.reposition()


def drawn(request: CachedRequestState) -> int:
    """Return the number of response tokens at the end of the request's prompt."""
    return (request.sampling_params.extra_args or {}).get(DRAWN, 0)


def position(request: CachedRequestState) -> None:
    """Advance a new request's generator by the tokens that its sample already has."""
    if request.generator.device.type == "cpu":
        request.generator = CountedGenerator()
        request.generator.request = request
        request.generator.reposition()
    else:
        request.generator.set_offset(PHILOX_PER_DRAW * drawn(request))


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
