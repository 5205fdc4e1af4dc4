"""What an engine's front end does otherwise than vLLM's own where `decode_scheduler` schedules.

Role: used by `vllm_setup.build` and `RolloutWorker`, in the actor's process. Waits for nothing.
Invariants: `CompletionOutput.logprobs` is a list of floats, one per sampled token, where vLLM makes a dictionary and an
object for each; an aborted request ends with the output of the engine core, which has all its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.engine import output_processor
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.outputs import LogprobsLists


class SampledLogProbs(LogprobsProcessor):
    """Keeps the log-probs of the sampled tokens alone."""

    def _update_sample_logprobs(self, logprobs_lists: LogprobsLists) -> None:
        self.logprobs.extend(logprobs_lists.logprobs[:, 0].tolist())  # type: ignore[union-attr]  # the sampled is first


class StepListener(PrometheusStatLogger):
    """Takes the place of vLLM's Prometheus metrics, which count every token and are not read. Subclasses `record`."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None): ...

    def log_engine_initialized(self) -> None: ...

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None: ...

    def record_admission_rejection(self, reason: str) -> None: ...


def keep_log_probs(fast: bool) -> None:
    """Choose how engines that are built from now on keep log-probs: vLLM has no setting for it."""
    output_processor.LogprobsProcessor = SampledLogProbs if fast else LogprobsProcessor  # type: ignore[misc]


async def abort(engine: Any, request_ids: Iterable[str]) -> None:
    """Abort requests in the engine core only, whose last output ends them here too; unknown ones are ignored."""
    known = engine.output_processor.external_req_ids
    await engine.engine_core.abort_requests_async([name for each in request_ids for name in known.get(each, ())])
