"""A decode step of vLLM's second model runner without two things that nothing here reads.

Role: imported in vLLM's workers with `seeded_generators.WorkerExtension`; replaces functions of vLLM's sampler.
Invariant: tokens and log-probs are vLLM's own.
- Parameters of all requests (fifteen arrays) are copied for the device at every step. They change only when a
  request is added, so they are copied only then.
- The rank of each sampled token is counted over the whole vocabulary: a kernel that reads all logits again. Ranks are
  arbitrary numbers here; `decode_scheduler` sends zeros, and `vllm_setup.extend` reads none.
Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample import logprob
from vllm.v1.worker.gpu.sample.sampler import Sampler

BUILT_IN_PROCESSORS = 3
"""Logits processors of every sampler. Custom ones may have something to do at each step."""

_add_request, _apply_staged_writes = Sampler.add_request, Sampler.apply_staged_writes


def _added_request(self: Any, req_idx: int, sampling_params: SamplingParams) -> None:
    self.is_copied = False
    _add_request(self, req_idx, sampling_params)


def _apply_new_writes(self: Any) -> None:
    if not getattr(self, "is_copied", False) or len(self.logits_processors) > BUILT_IN_PROCESSORS:
        _apply_staged_writes(self)
    self.is_copied = True


class NoKernel:
    """Launches nothing where a Triton kernel would be launched on a grid."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: None


Sampler.add_request, Sampler.apply_staged_writes = _added_request, _apply_new_writes
logprob._ranks_kernel = NoKernel()
