"""Stop texts of samples that go on where another engine stopped.

Role: imported by `rollout.vllm_setup.sampling_params` in the engine's front-end process, where vLLM turns tokens into
text and looks for the texts that end a response (`SamplingParams.stop`). To vLLM a sample that goes on is a request
whose prompt ends in the tokens that the sample has, and it looks at no prompt: a text that began before the move would
be missed. So those tokens are read once more as if drawn here.

Invariant: a response ends at the same token wherever its parts were drawn. `extend` takes the tokens read again off.
Waits for nothing.
"""

from __future__ import annotations

from msgspec.structs import replace
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from rlfuse.engines.vllm.seeded_generators import DRAWN

_from_new_request = IncrementalDetokenizer.from_new_request


def _continued(cls: type, tokenizer: object, request: EngineCoreRequest) -> IncrementalDetokenizer:
    """vLLM has no hook where a request's text begins, only this one."""
    sampling = request.sampling_params
    drawn = (sampling.extra_args or {}).get(DRAWN, 0) if sampling.stop else 0
    if not drawn:
        return _from_new_request(tokenizer, request)
    ids = request.prompt_token_ids
    begun = _from_new_request(tokenizer, replace(request, prompt_token_ids=ids[:-drawn]))
    begun.update(ids[-drawn:], False)
    return begun


IncrementalDetokenizer.from_new_request = classmethod(_continued)
