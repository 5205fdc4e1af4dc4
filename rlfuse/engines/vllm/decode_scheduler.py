"""vLLM's scheduler with a fast path for pure decode steps; the engine core sends a sample's tokens in one message.

vLLM's scheduler checks every request for every feature in each step and sends each token separately. Invariants:
- every `SchedulerOutput`, and the state of requests and blocks after a step, equal those of vLLM's scheduler. It
  handles all steps that do more than decode, and requests that end, were preempted or have events;
- a request's first token is sent immediately, the others when it ends, is aborted, or the engine pauses. With stop
  texts they are also sent when a token may complete one (`stop_tokens`); requests for top-k log-probs send every token.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerIterationDetails
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from rlfuse.engines.vllm.kv_transfer.shared_memory import MigrationConnector
from rlfuse.engines.vllm.request_arguments import drafts_from_history, has_draft
from rlfuse.engines.vllm.stop_tokens import EVERY_TOKEN, NO_TOKEN, StopTokens, StopTokenTable


class HeldTokens:
    """Tokens of a request that have not been sent to the front end yet, from index `sent` on."""

    __slots__ = ("end", "is_plain", "log_probs", "request", "sent", "stop_ids", "stop_text_ids", "stop_tokens")

    def __init__(self, request: Request, max_model_len: int, stop_tokens: StopTokens | None):
        sampling = request.sampling_params
        self.request, self.sent = request, len(request._output_token_ids)
        self.log_probs: list[float] = []
        self.stop_ids = {sampling.eos_token_id, *(sampling.stop_token_ids or ())}
        self.stop_tokens = stop_tokens
        self.stop_text_ids: Container[int] = NO_TOKEN
        """Tokens that may complete a stop text as the next token."""
        self.update_stop_text_ids(request._output_token_ids)
        self.end = min(max_model_len, request.num_prompt_tokens + request.max_tokens)
        """Length at which the request ends, in tokens of prompt and response."""
        checked = request.mm_features or request.structured_output_request or sampling.repetition_detection
        self.is_plain = not (checked or has_draft(sampling))
        """True if it decodes without encoder outputs, grammars, drafts and other checks."""

    def update_stop_text_ids(self, tokens: Sequence[int]) -> None:
        """Update `stop_text_ids` after `tokens` have been sent."""
        if self.stop_tokens is not None:
            self.stop_text_ids = self.stop_tokens.after(tokens[-1]) if tokens else EVERY_TOKEN

    def release(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """Move all held tokens into `output` and return it."""
        tokens = self.request._output_token_ids[self.sent :]
        output.new_token_ids = tokens
        if tokens:
            column, count = (len(tokens), 1), len(tokens)
            output.new_logprobs = LogprobsLists(
                np.array(tokens, np.int32).reshape(column),
                np.array(self.log_probs, np.float32).reshape(column),
                np.zeros(count, np.int32),  # ranks, which nothing reads
            )
            self.update_stop_text_ids(tokens)
        self.sent, self.log_probs = self.sent + len(tokens), []
        return output


class DecodeScheduler(Scheduler):
    """Scheduler of engines without asynchronous scheduling, as on CPU hosts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held: dict[str, HeldTokens] = {}
        self._outbox: list[tuple[int, EngineCoreOutput]] = []
        """(client, output) to send with the next step."""
        self._last_output = 0.0
        """Time of the last step that had tokens, on vLLM's clock."""
        self._is_async = isinstance(self, AsyncScheduler)
        self._drafts_from_history = drafts_from_history(self.vllm_config)
        self._has_fast_path = self._supports_fast_path()

    def _supports_fast_path(self) -> bool:
        manager, *others = self.kv_cache_manager.coordinator.single_type_managers
        return not (
            others
            or type(manager) is not FullAttentionManager
            or not manager.block_size == self.hash_block_size == self.block_size
            or (self.num_spec_tokens and not self._drafts_from_history)
            or self.lora_config
            or self.use_pp
            or self.dcp_world_size > 1
            or self.parallel_config.data_parallel_size > 1
            or self.needs_kv_cache_zeroing
            or self.return_sampling_mask
            or self.enable_kv_cache_events
            or self.observability_config.enable_logging_iteration_details
            or self.ec_connector is not None
            or self.aux_output_connector is not None
            or not isinstance(self.connector, MigrationConnector | None)
        )

    # Before the model runs -------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule a step; uses the fast path if each request gets one token and no request can be admitted."""
        requests = self._decoding_requests() if self._has_fast_path else None
        return super().schedule(throttle_prefills) if requests is None else self._schedule_decode(requests)

    def _decoding_requests(self) -> list[Request] | None:
        """Return the requests that get a token; None if the step needs vLLM's scheduler."""
        slots = self.max_num_active_reqs - len(self.running) - self.num_waiting_for_streaming_input
        if (
            ((self.waiting or self.kv_holding_waiting) and slots > 0)
            or self._inflight_prefills
            or self.reset_preempted_req_ids
            or self._pause_state != PauseState.UNPAUSED
            or len(self.running) > self.max_num_scheduled_tokens
        ):
            return None
        requests, new_blocks, block = [], 0, self.block_size
        held_tokens, in_last_step = self.held, self.prev_step_scheduled_req_ids
        for request in self.running:
            held, computed = held_tokens.get(request.request_id), request.num_computed_tokens
            placeholders = request.num_output_placeholders
            if (
                held is None
                or not held.is_plain
                or request.is_prefill_chunk
                or len(request._all_token_ids) + placeholders - computed != 1
                or not (self.use_v2_model_runner or request.request_id in in_last_step)
            ):
                return None
            if placeholders and computed + 2 - placeholders >= held.end:
                continue  # the running step samples its last token
            requests.append(request)
            new_blocks += computed % block == 0
        return requests if requests and new_blocks <= self.kv_cache_manager.block_pool.get_num_free_blocks() else None

    def _schedule_decode(self, requests: list[Request]) -> SchedulerOutput:
        self.current_step += 1
        manager, last = self.kv_cache_manager, self.block_size - 1
        blocks: list[tuple[list[int], ...] | None] = []
        for request in requests:
            place = request.num_computed_tokens % self.block_size
            if place and (place != last or request.num_output_placeholders):
                blocks.append(None)
            else:  # it needs a new block, or its last block is full and can be cached
                blocks.append(manager.allocate_slots(request, 1).get_block_ids(allow_none=True))
        manager.take_new_block_ids()
        names = [request.request_id for request in requests]
        computed = [request.num_computed_tokens for request in requests]
        sampled = [len(request._output_token_ids) + request.num_output_placeholders for request in requests]
        output = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(names, set(), [], {}, blocks, computed, sampled),
            num_scheduled_tokens=dict.fromkeys(names, 1),
            total_num_scheduled_tokens=len(names),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=self.encoder_cache_manager.get_freed_mm_hashes(),
            preempted_req_ids=self.reset_preempted_req_ids,
            ec_manager_metadata=self.encoder_cache_manager.get_manager_metadata(),
            num_spec_tokens_to_schedule=self._draft_limit(len(names)),
        )
        if self.connector is not None:
            output.kv_connector_metadata = self._build_kv_connector_meta(self.connector, output)
        self.sched_step_seq += self.defer_block_free
        self._mark_scheduled(requests)
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids = set(names)
        return output

    def _draft_limit(self, requests: int) -> int:
        """Return the number of tokens to draft for each request after a step of so many requests."""
        return self.num_spec_tokens if self.dynamic_sd_lookup is None else self.dynamic_sd_lookup[requests]

    def _mark_scheduled(self, requests: Iterable[Request]) -> None:
        for request in requests:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            if self.defer_block_free:
                request.last_sched_seq = self.sched_step_seq
            if self._is_async:
                request.num_output_placeholders += 1
                if self.use_v2_model_runner:
                    request.next_decode_eligible_step = self.current_step + 1

    # After the model ran ---------------------------------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Return vLLM's outputs without the held tokens."""
        scheduled = scheduler_output.num_scheduled_tokens
        if self._has_fast_path and _is_plain(model_runner_output):
            others = self._append_tokens(scheduled, model_runner_output)
        else:
            others = scheduled
        details = SchedulerIterationDetails(0, 0, 0, len(scheduled) - len(others), len(scheduled) - len(others), 0.0)
        outputs = super().update_from_output(
            replace(scheduler_output, num_scheduled_tokens=others), model_runner_output
        )
        for each in outputs.values():
            each.outputs = [output for output in each.outputs if self._must_send(output, details)]
        if self._pause_state != PauseState.UNPAUSED:
            self._release_all()
        for client, output in reversed(
            self._outbox
        ):  # must precede the last output of a request that ends in this step
            each = outputs.setdefault(client, EngineCoreOutputs())
            each.outputs = [output, *each.outputs]
        self._outbox = []
        for each in outputs.values():
            if each.scheduler_stats is not None:
                each.scheduler_stats.iteration_details = details
                if details.num_ctx_requests or details.num_generation_requests:
                    details.elapsed_ms, self._last_output = 1e3 * (each.timestamp - self._last_output), each.timestamp
        return outputs

    def _append_tokens(self, scheduled: dict[str, int], output: ModelRunnerOutput) -> dict[str, int]:
        """Append the tokens of requests that continue decoding; return the scheduled tokens of the others, for vLLM."""
        sampled, rows = output.sampled_token_ids, output.req_id_to_index
        log_probs, others = output.logprobs.logprobs[:, 0].tolist(), {}
        held_tokens, block, is_async = self.held, self.block_size, self._is_async
        for name, count in scheduled.items():
            held, row = held_tokens.get(name), rows[name]
            if held is not None and held.is_plain and count == 1 and len(tokens := sampled[row]) == 1:
                request, token = held.request, tokens[0]
                known = request._all_token_ids
                length = len(known)
                if (
                    token not in held.stop_ids
                    and token not in held.stop_text_ids
                    and length + 1 < held.end
                    and request.status == RequestStatus.RUNNING
                    and not request.num_stale_output_tokens
                    and not request.events
                ):
                    request.num_in_flight_tokens -= 1
                    request._output_token_ids.append(token)
                    known.append(token)
                    held.log_probs.append(log_probs[row])
                    if (length + 1) % block == 0:
                        request.update_block_hashes()
                    if is_async:
                        request.num_output_placeholders -= 1
                        if length % block == 0:
                            self.kv_cache_manager.cache_blocks(request, length)
                    continue
            others[name] = count
        return others

    def _must_send(self, output: EngineCoreOutput, details: SchedulerIterationDetails) -> bool:
        """Return whether to send `output` now; if so, add all held tokens of its request."""
        held, ends = self.held.get(output.request_id), output.finish_reason is not None
        if output.prefill_stats is not None:
            details.num_ctx_requests += 1
            details.num_ctx_tokens += output.prefill_stats.num_computed_tokens
        else:
            details.num_generation_requests += 1
        details.num_generation_tokens += len(output.new_token_ids)
        if held is None:
            request = self.requests.get(output.request_id)
            if request is not None and not ends:
                self._hold(request)
            return True
        if output.new_logprobs is not None:
            held.log_probs += output.new_logprobs.logprobs[:, 0].tolist()
        may_stop = any(token in held.stop_text_ids for token in output.new_token_ids)
        if not (ends or may_stop or output.events is not None):
            return False
        held.release(output)
        if ends:
            del self.held[output.request_id]
        return True

    def _hold(self, request: Request) -> None:
        """Hold the request's tokens from now on, if none must be sent immediately."""
        sampling = request.sampling_params
        if sampling is None or sampling.num_logprobs != 0 or request.resumable:
            return
        stop_tokens = self._stop_tokens.find(tuple(sampling.stop)) if sampling.stop else None
        if stop_tokens is not None or not sampling.stop:
            self.held[request.request_id] = HeldTokens(request, self.max_model_len, stop_tokens)

    @cached_property
    def _stop_tokens(self) -> StopTokenTable:
        """Built for the first request with stop texts; takes one second for 150,000 tokens."""
        model = self.vllm_config.model_config
        return StopTokenTable(None if model.skip_tokenizer_init else cached_tokenizer_from_config(model))

    # Aborts and pauses -----------------------------------------------------------------------------------------------

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """Finish requests as vLLM does; tokens of aborted requests are sent with the next step."""
        finished = super().finish_requests(request_ids, finished_status)
        if finished_status == RequestStatus.FINISHED_ABORTED:
            for request in finished:
                output = EngineCoreOutput(request.request_id, [], finish_reason=request.get_finished_reason())
                if held := self.held.pop(request.request_id, None):
                    held.release(output)
                self._outbox.append((request.client_index, output))
        return finished

    def set_pause_state(self, pause_state: PauseState) -> None:
        super().set_pause_state(pause_state)
        if pause_state != PauseState.UNPAUSED:
            self._release_all()

    def _release_all(self) -> None:
        for name, held in self.held.items():
            if held.log_probs:
                self._outbox.append((held.request.client_index, held.release(EngineCoreOutput(name, []))))

    def has_requests(self) -> bool:
        return bool(self._outbox) or super().has_requests()


class AsyncDecodeScheduler(DecodeScheduler, AsyncScheduler):
    """Scheduler of engines with asynchronous scheduling, as on GPUs."""

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Update the requests as vLLM does; those without an earlier response have no drafts to verify."""
        super()._update_after_schedule(scheduler_output)
        for name in scheduler_output.num_scheduled_tokens if self._drafts_from_history else ():
            if not has_draft((request := self.requests[name]).sampling_params):
                request.spec_token_ids = []


def _is_plain(output: ModelRunnerOutput) -> bool:
    """Return whether each request has one log-prob and at most one token, without errors."""
    transferred = output.kv_connector_output
    return bool(
        output.sampled_token_ids
        and output.logprobs is not None
        and output.logprobs.cu_num_generated_tokens is None
        and not output.num_nans_in_logits
        and not (transferred and (transferred.failed_recving or transferred.invalid_block_ids))
    )
