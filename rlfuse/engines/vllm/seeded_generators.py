"""Random generators of requests that go on where another engine stopped.

Role: imported inside every vLLM worker process, because the engine names `WorkerExtension` as its
`worker_extension_cls`; importing adds the count of tokens already drawn to vLLM's way of seeding a request.

A seeded request draws exactly once for each of its tokens. So its generator's state is a function of seed and number of
tokens, and nothing but that number has to travel: a token that an engine drew and nobody took away is drawn again.
- vLLM's first model runner (CPU hosts): a torch generator per request, advanced here by `drawn` draws. One draw is one
  32-bit number on CPUs and four Philox offsets on GPUs, top-k and top-p or not.
- vLLM's second model runner (the usual one on GPUs) derives each draw from seed and position: nothing to do.

Invariant: a draw that vLLM takes back (the chunks of a long prompt draw too, for nothing) leaves no trace. vLLM itself
can take back only on GPUs, on a CPU it would end the engine.
Waits for nothing.
"""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu_input_batch import CachedRequestState

import rlfuse.engines.vllm.sampler_steps  # noqa: F401
from rlfuse.engines.vllm.receiver import ReceiverExtension

DRAWN = "rlfuse_drawn"
"""Key of `SamplingParams.extra_args`: how many tokens of the sample's stream are at the end of its prompt."""
PHILOX_PER_DRAW = 4


class CountedGenerator(torch.Generator):
    """A CPU generator that can forget draws: positioned by how many tokens its request has."""

    request: CachedRequestState

    def reposition(self) -> None:
        """To where the request's tokens have brought it."""
        self.manual_seed(self.request.sampling_params.seed)
        if draws := drawn(self.request) + len(self.request.output_token_ids):
            torch.randint(0, 1 << 31, (draws,), generator=self)

    def get_offset(self) -> int:
        """No use but as vLLM's argument of `set_offset`."""
        return PHILOX_PER_DRAW

    def set_offset(self, offset: int) -> None:
        """vLLM takes the last draw back: it was no token."""
        self.reposition()


def drawn(request: CachedRequestState) -> int:
    """Tokens that the sample had when it came here."""
    return (request.sampling_params.extra_args or {}).get(DRAWN, 0)


def position(request: CachedRequestState) -> None:
    """Bring a new request's generator to where its sample is."""
    if request.generator.device.type == "cpu":
        request.generator = CountedGenerator()
        request.generator.request = request
        request.generator.reposition()
    else:
        request.generator.set_offset(PHILOX_PER_DRAW * drawn(request))


class WorkerExtension(ReceiverExtension):
    """Mixin: naming it makes vLLM import this module and those above in its workers."""


_post_init = CachedRequestState.__post_init__


def _positioned_post_init(self: CachedRequestState) -> None:
    """vLLM has no hook where a request's generator is made, only this one right behind it."""
    _post_init(self)
    if self.generator is not None:
        position(self)


CachedRequestState.__post_init__ = _positioned_post_init
