"""Functions of vLLM that rlfuse replaces, copies or relies on are unchanged in the installed version."""

import hashlib
import importlib
import inspect
import textwrap
from unittest import mock

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]  # its import is slow: one process

SCHEDULER = {
    "vllm.v1.core.sched.scheduler.Scheduler": (
        "schedule _make_cached_request_data _update_after_schedule update_from_output _update_request_with_output "
        "_preempt_request finish_requests set_pause_state has_requests add_request reset_prefix_cache"
    ),
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler": "_update_after_schedule _update_request_with_output",
    "vllm.v1.core.kv_cache_manager.KVCacheManager": "allocate_slots cache_blocks take_new_block_ids",
    "vllm.v1.core.sched.utils": "check_stop",
    "vllm.v1.request.Request": "append_output_token_ids update_block_hashes",
    "vllm.v1.engine.core.EngineCore": "step step_with_batch_queue _process_aborts_queue _attach_weight_version",
    "vllm.v1.engine.core.EngineCoreProc": "pause_scheduler _pause_complete has_work",
    "vllm.v1.engine.logprobs.LogprobsProcessor": "_update_sample_logprobs",
    "vllm.v1.engine.output_processor.OutputProcessor": "abort_requests process_outputs",
    "vllm.v1.metrics.loggers.StatLoggerManager": "__init__",
}
"""Functions that `decode_scheduler` and `front_end` replace, copy or rely on; rollout.scheduler=vllm uses vLLM's."""

SAMPLER = {
    "vllm.v1.worker.gpu.sample.sampler.Sampler": "__init__ add_request apply_staged_writes",
    "vllm.v1.worker.gpu.sample.states.SamplingStates": "add_request apply_staged_writes",
    "vllm.v1.worker.gpu.sample.penalties.PenaltiesState": "add_request apply_staged_writes",
    "vllm.v1.worker.gpu.sample.logit_bias.LogitBiasState": "add_request apply_staged_writes",
    "vllm.v1.worker.gpu.sample.bad_words.BadWordsState": "add_request apply_staged_writes",
    "vllm.v1.worker.gpu.sample.thinking_budget.ThinkingBudgetState": "add_request apply_staged_writes",
    "vllm.v1.worker.gpu.sample.trace_replay.TraceReplayState": "add_request apply_staged_writes",
    "vllm.v1.worker.gpu.sample.logprob.LogprobTokenIdsState": "add_request apply_staged_writes",
    "vllm.v1.worker.gpu.sample.logprob": "compute_topk_scores",
}
"""Functions of the sampler that stage and copy request parameters (changed only by `add_request`) or count ranks."""
STOP_TEXTS = {
    "vllm.v1.engine.detokenizer.BaseIncrementalDetokenizer": "update",
    "vllm.v1.engine.detokenizer.FastIncrementalDetokenizer": "__init__ decode_next _protected_step",
    "vllm.v1.engine.detokenizer": "uses_fast_detokenizer check_stop_strings",
}
"""Functions by which the front end finds stop strings."""
V2 = "vllm.v1.worker.gpu"
DRAFTS = {
    "vllm.v1.sample.rejection_sampler.RejectionSampler": "forward parse_output",
    "vllm.v1.sample.logits_processor": "build_logitsprocs",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": (
        "_sample _calc_spec_decode_metadata _bookkeeping_sync propose_draft_token_ids _input_fits_in_drafter"
    ),
    f"{V2}.sample.sampler.Sampler": "sample _sample_random apply_sampling_params",
    f"{V2}.spec_decode.rejection_sampler.RejectionSampler": "__call__ _verify _verify_in_chunks _get_logprobs_tensors",
    f"{V2}.spec_decode.rejection_sampler_utils": "rejection_sample",
    f"{V2}.model_runner.GPUModelRunner": "sample",
}
"""Functions that `acceptance` and `proposer` replace, and the readers of their results."""
CPU_SAMPLER = {"vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler": "forward_cpu"}
"""Functions that `acceptance.sample_on_cpu` copies."""
HISTORY = {
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler": "_update_after_schedule",
    f"{V2}.model_runner.GPUModelRunner": "add_requests sample_tokens",
    f"{V2}.spec_decode.ngram.speculator.NgramGPUSpeculator": "propose",
}
"""Callers of `history_speculator`, and functions that it replaces."""


@pytest.mark.parametrize(
    "replaced, known",
    [
        (SCHEDULER, "b165f8e7c7f80c51"),
        (SAMPLER, "b94cc6d77a1914cb"),
        (STOP_TEXTS, "f3a866115adb662d"),
        (DRAFTS, "eaaeacc80c23682f"),
        (CPU_SAMPLER, "a0d320ea964013d2"),
        (HISTORY, "b9209786462563ea"),
    ],
    ids=["scheduler", "sampler", "stop texts", "drafts", "CPU sampler", "earlier responses"],
)
def test_the_source_of_replaced_functions_is_unchanged(replaced, known):
    # After an upgrade of vLLM: compare with the previous version, adapt the replacements, renew the digest.
    from rlfuse.engines.vllm import acceptance
    from rlfuse.engines.vllm import worker_extension as steps

    originals = {"add_request": steps._add_request, "apply_staged_writes": steps._apply_staged_writes}
    digest, runner = hashlib.sha256(), steps.gpu_model_runner.GPUModelRunner
    names = "propose_draft_token_ids", "_input_fits_in_drafter"
    drafts = mock.patch.multiple(runner, **{name: getattr(steps, f"_{name.strip('_')}") for name in names})
    cpu_sampler = mock.patch.object(steps.TopKTopPSampler, "forward_cpu", acceptance._forward_cpu)
    with mock.patch.multiple(steps.Sampler, **originals), drafts, cpu_sampler:
        for place, names in replaced.items():
            holder = resolved(place)
            for each in names.split():
                digest.update(textwrap.dedent(inspect.getsource(getattr(holder, each))).encode())
    assert digest.hexdigest()[:16] == known


def resolved(place):
    """Import the module or class of a dotted name."""
    module, _, name = place.rpartition(".")
    return getattr(importlib.import_module(module), name) if name[0].isupper() else importlib.import_module(place)


def test_replacements_of_rejection_sampling_have_the_signatures_of_vllm():
    from rlfuse.engines.vllm.acceptance import EqualitySampler, accept_equal

    original = resolved(f"{V2}.spec_decode.rejection_sampler_utils").rejection_sample
    parameters = inspect.signature(original).parameters
    ours = inspect.signature(accept_equal).parameters
    assert list(parameters)[: len(ours)] == list(ours), "the other parameters are for watermarks, which are off"
    assert {name for name in parameters if name not in ours} == {
        "contexts", "watermarking", "watermarking_skip_mask", "watermark_key"
    }  # fmt: skip
    assert resolved(f"{V2}.spec_decode.rejection_sampler").rejection_sample is accept_equal
    base = resolved("vllm.v1.sample.rejection_sampler.RejectionSampler")
    assert (
        inspect.signature(EqualitySampler.forward).parameters.keys()
        == inspect.signature(base.forward).parameters.keys()
    )
    assert callable(resolved("vllm.sampling_params.SamplingParams")._validate_spec_decode)
