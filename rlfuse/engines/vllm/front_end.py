"""Replace parts of vLLM's front end: log-probs as floats, stop texts across the parts of a migrated sample, drafts.

With `decode_scheduler`, `CompletionOutput.logprobs` is a list of floats, one per sampled token, and an aborted request
ends with an output of the engine core that has all its tokens. A continued sample is a request whose prompt ends with
the tokens drawn so far, in which vLLM does not search for stop texts. So these tokens are detokenized again, and
`setup.extend` removes them: a response ends at the same token, no matter which engines drew its parts. With drafts,
vLLM would reject min_p and logit biases, which `worker_extension` applies.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest, output_processor
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.outputs import LogprobsLists

from rlfuse.engines.vllm.request_arguments import drawn_tokens


class SampledLogProbs(LogprobsProcessor):
    """Log-probs of sampled tokens only."""

    def _update_sample_logprobs(self, logprobs_lists: LogprobsLists) -> None:
        self.logprobs.extend(logprobs_lists.logprobs[:, 0].tolist())  # type: ignore[union-attr]  # the sampled token is first


class StepListener(PrometheusStatLogger):
    """Base of listeners to step statistics, in place of vLLM's Prometheus metrics. Subclasses define `record`."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None): ...

    def log_engine_initialized(self) -> None: ...

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None: ...

    def record_admission_rejection(self, reason: str) -> None: ...


def keep_log_probs(fast: bool) -> None:
    """Choose how engines built from now on store log-probs, for which vLLM has no setting."""
    output_processor.LogprobsProcessor = SampledLogProbs if fast else LogprobsProcessor  # type: ignore[misc]


async def abort(engine: Any, request_ids: Iterable[str]) -> None:
    """Abort requests in the engine core, whose last output also ends them here; unknown ids are ignored."""
    known = engine.output_processor.external_req_ids
    await engine.engine_core.abort_requests_async([name for each in request_ids for name in known.get(each, ())])


_from_new_request = IncrementalDetokenizer.from_new_request


def _continue_detokenizer(cls: type, tokenizer: object, request: EngineCoreRequest) -> IncrementalDetokenizer:
    """Detokenize the sample's earlier tokens again; vLLM has no other hook at the start of a request's text."""
    sampling = request.sampling_params
    drawn = drawn_tokens(sampling) if sampling.stop else 0
    if not drawn:
        return _from_new_request(tokenizer, request)
    ids = request.prompt_token_ids
    detokenizer = _from_new_request(tokenizer, replace(request, prompt_token_ids=ids[:-drawn]))
    detokenizer.update(ids[-drawn:], False)
    return detokenizer


IncrementalDetokenizer.from_new_request = classmethod(_continue_detokenizer)
SamplingParams._validate_spec_decode = lambda self, speculative_config: None
