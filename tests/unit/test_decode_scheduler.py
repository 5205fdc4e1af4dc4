"""The decode scheduler of rollout engines has the same steps, state and tokens as vLLM's scheduler.

Real schedulers of both kinds process the same events with a model that samples by seed and position.
"""

import itertools
import random
from collections import deque
from copy import deepcopy
from dataclasses import fields
from functools import cache

import numpy as np
import pytest
import torch

from rlfuse.engines.vllm.request_arguments import DRAFT, HISTORY_ENGINE, drafts_from_history, has_draft

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]  # one process: importing vLLM is slow

EOS, STOP, VOCABULARY, BLOCK, DRAFTS = 1, 7, 300, 16, 3
REQUESTS, EVERY = 28, 4
"""Requests of a run; after half of them, a new one arrives every `EVERY` steps."""


def draw(seed, position, likely_end):
    """Return a token and its log-prob, which depend only on seed and position."""
    generator = random.Random(seed * 100_003 + position)
    token = generator.choice((EOS, STOP)) if generator.random() < likely_end else generator.randrange(8, VOCABULARY)
    return token, np.float32(-10 * generator.random())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import Qwen2Config

    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCABULARY}
    config = Qwen2Config(num_hidden_layers=1, max_position_embeddings=512, **sizes)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    return str(folder)


@cache
def configuration(model, drafts):
    from vllm.engine.arg_utils import EngineArgs

    speculative = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 4}
    return EngineArgs(
        model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=256, max_num_seqs=16, block_size=BLOCK,
        max_num_batched_tokens=512, kv_cache_memory_bytes=1 << 20, enforce_eager=True, enable_prefix_caching=True,
        speculative_config=speculative if drafts else None,
        additional_config={HISTORY_ENGINE: True} if drafts == "history" else {},
    ).create_engine_config()  # fmt: skip


def build(model, kind, is_async, blocks=400, seqs=16, batched=512, drafts=False):
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = deepcopy(configuration(model, drafts))
    config.scheduler_config.async_scheduling, config.cache_config.num_gpu_blocks = is_async, blocks
    config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens = seqs, batched
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    blocks_of_all = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    manager = StructuredOutputManager(config)
    scheduler = kind(config, blocks_of_all, manager, block_size=BLOCK, log_stats=True)
    scheduler.use_v2_model_runner = is_async
    scheduler._stop_tokens = StopTable()
    return scheduler


class StopTable:
    """Return the stop tokens of one stop string, as the table of a byte-level tokenizer does."""

    ends, incomplete = frozenset(range(8, VOCABULARY, 6)), frozenset(range(8, VOCABULARY, 30))

    def find(self, stop):
        from rlfuse.engines.vllm.stop_tokens import StopTokens

        return StopTokens(self.ends, self.incomplete) if stop == ("known",) else None


class Grammar:
    """Accept all tokens, in place of a compiled grammar."""

    def accept_tokens(self, request_id, tokens):
        return True

    def is_terminated(self):
        return False


def request(number, prompt, structured=False, image=False, **sampling):
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    if structured:
        sampling["structured_outputs"] = StructuredOutputsParams(regex="a*")
    params = SamplingParams(**{"logprobs": 0, "max_tokens": 60, "seed": number} | sampling)
    params.update_from_generation_config({}, EOS)
    seen = MultiModalFeatureSpec(None, "image", f"image {number % 3}", PlaceholderRange(4, 12))
    built = Request(
        f"r{number}", prompt, params, None, mm_features=[seen] if image else None, arrival_time=float(number),
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )  # fmt: skip
    if structured:
        built.structured_output_request.grammar = Grammar()
    return built


class Core:
    """vLLM's engine core with a model that samples by seed and position: the same steps, aborts and pauses."""

    def __init__(self, scheduler, likely_end):
        self.scheduler, self.likely_end, self.queue = scheduler, likely_end, deque()
        self.depth = 2 if scheduler.use_v2_model_runner else 1
        self.steps, self.version, self.trace = 0, 0, []
        self.tokens, self.ends = {}, {}
        """Request -> (token, log-prob, version of the weights) of each token; request -> (finish reason, step)."""

    def step(self):
        scheduler = self.scheduler
        if scheduler.has_requests():
            output = scheduler.schedule()
            if output.total_num_scheduled_tokens:
                self.steps += 1
                self.trace.append((self.steps, scheduled(output)))
            self.queue.append((output, self.model(output)))
            if len(self.queue) < self.depth and scheduler.has_requests():
                return
        if self.queue:
            output, found = self.queue.popleft()
            self.receive(scheduler.update_from_output(output, found))
            if output.total_num_scheduled_tokens:
                self.trace.append(state(scheduler))
        self.draft()

    def model(self, output):
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, ModelRunnerOutput

        if not output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        sampled, rows, starts = [], [], [0]
        for name in output.num_scheduled_tokens:
            one, drafts = self.scheduler.requests[name], output.scheduled_spec_decode_tokens.get(name, [])
            first, drawn = one.num_computed_tokens - len(drafts), []
            if not one.is_prefill_chunk:
                for place in range(len(drafts) + 1):
                    drawn.append(draw(one.sampling_params.seed, first + place, self.likely_end))
                    if place < len(drafts) and drafts[place] != drawn[-1][0]:
                        break
            sampled.append([token for token, _ in drawn])
            rows += drawn or [(0, np.float32(0))] * (not output.scheduled_spec_decode_tokens)
            starts.append(len(rows))
        ids = np.array([[token, token + 1, 5] for token, _ in rows], np.int32)
        log_probs = np.array([[log_prob, -1, -2] for _, log_prob in rows], np.float32)
        several = starts if output.scheduled_spec_decode_tokens else None
        return ModelRunnerOutput(
            list(output.num_scheduled_tokens),
            {name: row for row, name in enumerate(output.num_scheduled_tokens)},
            sampled_token_ids=sampled,
            logprobs=LogprobsLists(ids, log_probs, np.ones(len(rows), np.int32), several),
        )

    def draft(self):
        """Draft the next tokens correctly, except every third."""
        from vllm.v1.outputs import DraftTokenIds

        if self.scheduler.num_spec_tokens:
            running = [each for each in self.scheduler.running if not each.is_prefill_chunk]
            drafts = [[self.guess(each, each.num_tokens + place) for place in range(DRAFTS)] for each in running]
            if drafts_from_history(self.scheduler.vllm_config):
                drafts = [
                    each if has_draft(one.sampling_params) else [] for each, one in zip(drafts, running, strict=True)
                ]
            self.scheduler.update_draft_token_ids(DraftTokenIds([each.request_id for each in running], drafts))

    def guess(self, each, position):
        return draw(each.sampling_params.seed, position, self.likely_end)[0] if position % 3 else 0

    def receive(self, outputs):
        from vllm.v1.engine import FinishReason

        for each in outputs.values():
            for output in each.outputs:
                if output.request_id in self.ends:
                    continue  # the frontend ignores it too
                known = self.tokens.setdefault(output.request_id, [])
                if output.new_token_ids:
                    log_probs = output.new_logprobs.logprobs[:, 0].tolist()
                    assert len(log_probs) == len(output.new_token_ids)
                    assert output.new_logprobs.logprob_token_ids[:, 0].tolist() == output.new_token_ids
                    known += [(*found, self.version) for found in zip(output.new_token_ids, log_probs, strict=True)]
                if output.finish_reason is not None:
                    is_aborted = output.finish_reason == FinishReason.ABORT
                    self.ends[output.request_id] = str(output.finish_reason), None if is_aborted else self.steps

    def abort(self, names):
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
        from vllm.v1.request import RequestStatus

        ABORT = FinishReason.ABORT
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        if not hasattr(self.scheduler, "held"):  # vLLM's frontend finishes them with the tokens so far
            self.receive(
                {0: EngineCoreOutputs(outputs=[EngineCoreOutput(each, [], finish_reason=ABORT) for each in names])}
            )

    def push(self):
        """Push new weights: pause, finish running steps, reset the prefix cache, and resume."""
        from vllm.v1.core.sched.interface import PauseState

        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while self.queue or self.scheduler.has_requests():
            self.step()
        self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.version += 1
        self.scheduler.set_pause_state(PauseState.UNPAUSED)


def scheduled(output):
    """Return all fields of a step's output that the model runner receives."""
    found = {field.name: getattr(output, field.name) for field in fields(output)}
    found["scheduled_new_reqs"] = [
        (
            new.req_id,
            list(new.prompt_token_ids),
            new.block_ids,
            new.num_computed_tokens,
            new.prefill_token_ids and list(new.prefill_token_ids),
        )
        for new in output.scheduled_new_reqs
    ]
    found["scheduled_cached_reqs"] = vars(output.scheduled_cached_reqs)
    found["num_scheduled_tokens"] = list(output.num_scheduled_tokens.items())
    return {name: repr(value) if name == "ec_manager_metadata" else value for name, value in found.items()}


def state(scheduler):
    """Return the state of requests and KV-cache blocks after a step."""
    manager = scheduler.kv_cache_manager
    requests = [
        (name, each.status.name, each.num_computed_tokens, each.num_output_placeholders, each.num_in_flight_tokens,
         each.num_stale_output_tokens, list(each._all_token_ids), each.block_hashes, manager.get_block_ids(name),
         manager.coordinator.single_type_managers[0].num_cached_block.get(name), each.is_prefill_chunk)
        for name, each in scheduler.requests.items()
    ]  # fmt: skip
    queues = [[each.request_id for each in queue] for queue in (scheduler.running, scheduler.waiting)]
    return requests, queues, manager.block_pool.get_num_free_blocks(), sorted(scheduler.prev_step_scheduled_req_ids)


def run(scheduler, sampling, aborts=False, pushes=False, likely_end=0.01):
    """Run all requests, each with one of four prompts, and return the `Core` with their tokens and ends."""
    core, chance = Core(scheduler, likely_end), random.Random(5)
    prompts = [[chance.randrange(8, VOCABULARY) for _ in range(chance.randrange(20, 90))] for _ in range(4)]
    arrivals = [(0 if n < REQUESTS // 2 else EVERY * n, n) for n in range(REQUESTS)]
    events = deque(arrivals)
    aborting = {20, 45, 46, 80} if aborts else set()
    pushing = {15, 60, 61} if pushes else set()
    while events or core.queue or scheduler.has_requests():
        idle = not (core.queue or scheduler.has_requests())
        while events and (events[0][0] <= core.steps or idle):
            number, idle = events.popleft()[1], False
            scheduler.add_request(request(number, prompts[number % 4][:], **sampling(number)))
        if core.steps in aborting:
            aborting.discard(core.steps)
            core.abort([name for place, name in enumerate(scheduler.requests) if place % 3 == 0])
        if core.steps in pushing:
            pushing.discard(core.steps)
            core.push()
        core.step()
    return core


SCENARIOS = {
    "decoding": ({}, {}, {}),
    "few run, many wait": ({"seqs": 5}, {}, {}),
    "chunked prefill": ({"batched": 40}, {}, {}),
    "preemption": ({"blocks": 40}, {}, {}),
    "stop tokens and lengths": (
        {},
        {"likely_end": 0.05},
        {"stop_token_ids": [STOP], "max_tokens": 30, "min_tokens": 4},
    ),
    "the longest sequence": ({}, {"likely_end": 0.0}, {"max_tokens": 400}),
    "stop texts": ({}, {}, lambda n: {"stop": ["a"], "detokenize": True} if n % 5 == 0 else {}),
    "stop texts, preemption and aborts": ({"blocks": 40}, {"aborts": True}, {"stop": ["known"], "detokenize": True}),
    "other log-probs": ({}, {}, lambda n: {"logprobs": 2} if n % 7 == 0 else {}),
    "aborted": ({}, {"aborts": True}, {}),
    "aborted while some are preempted": ({"blocks": 40}, {"aborts": True}, {}),
    "new weights": ({}, {"pushes": True}, {}),
    "new weights, preemption and aborts": ({"blocks": 40, "batched": 60}, {"pushes": True, "aborts": True}, {}),
    "grammars": ({}, {}, lambda n: {"structured": n % 4 == 0}),
    "images": ({}, {}, lambda n: {"image": n % 4 == 0}),
    "drafts": ({"drafts": True}, {"aborts": True, "pushes": True}, {}),
    "some earlier responses": (
        {"drafts": "history"},
        {"aborts": True, "pushes": True},
        lambda n: {"extra_args": {DRAFT: b""}} if n < 3 else {},
    ),
}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_steps_state_and_tokens_equal_those_of_vllm_scheduler(model, monkeypatch, scenario, is_async):
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from rlfuse.engines.vllm.decode_scheduler import AsyncDecodeScheduler, DecodeScheduler

    engine, events, sampling = SCENARIOS[scenario]
    if is_async and "drafts" in engine:
        pytest.skip("drafts of an asynchronous engine stay in its model runner")
    short, found = [], []
    theirs, ours = (AsyncScheduler, AsyncDecodeScheduler) if is_async else (Scheduler, DecodeScheduler)
    decode = DecodeScheduler._schedule_decode
    monkeypatch.setattr(DecodeScheduler, "_schedule_decode", lambda *given: short.append(1) or decode(*given))
    for kind in (theirs, ours):
        scheduler = build(model, kind, is_async, **engine)
        scheduler.max_num_encoder_input_tokens, scheduler.encoder_cache_manager = 256, EncoderCacheManager(256)
        found.append(run(scheduler, sampling if callable(sampling) else lambda n: sampling, **events))
    expected, core = found
    assert len(expected.ends) == REQUESTS and core.tokens == expected.tokens and core.ends == expected.ends
    for ours, theirs in zip(core.trace, expected.trace, strict=True):
        assert ours == theirs
    assert (
        scenario in ("drafts", "stop texts", "other log-probs", "grammars", "images") or len(short) > core.steps / 3
    ), (len(short), core.steps)
    assert not core.scheduler.held and not core.scheduler._outbox


def test_tokens_are_sent_with_the_first_and_the_last_token(model):
    from rlfuse.engines.vllm.decode_scheduler import AsyncDecodeScheduler

    core, messages = Core(build(model, AsyncDecodeScheduler, True), 0.0), []
    receive = core.receive
    core.receive = lambda outputs: messages.extend(each.outputs for each in outputs.values()) or receive(outputs)
    for number in range(4):
        core.scheduler.add_request(request(number, list(range(8, 40)), max_tokens=20 + number))
    while core.queue or core.scheduler.has_requests():
        core.step()
    sizes = [[len(output.new_token_ids) for output in outputs] for outputs in messages if outputs]
    assert sizes == [[1] * 4, [19], [20], [21], [22]]


def test_a_token_that_may_complete_a_stop_string_is_sent_immediately(model):
    from rlfuse.engines.vllm.decode_scheduler import AsyncDecodeScheduler

    core, messages = Core(build(model, AsyncDecodeScheduler, True), 0.0), []
    receive = core.receive
    core.receive = lambda outputs: messages.extend(each.outputs for each in outputs.values()) or receive(outputs)
    core.scheduler.add_request(request(1, list(range(8, 40)), max_tokens=200, stop=["known"], detokenize=True))
    while core.queue or core.scheduler.has_requests():
        core.step()
    groups = [output.new_token_ids for outputs in messages for output in outputs]
    sent_immediately = set(range(8, VOCABULARY)), StopTable.ends
    for before, group in itertools.pairwise(groups[:-1]):
        watched = sent_immediately[before[-1] not in StopTable.incomplete]
        assert group[-1] in watched and not watched.intersection(group[:-1])
    assert sum(map(len, groups)) == 200 and len(groups) < 60


@pytest.mark.parametrize(
    "device, rollout, expected",
    [
        ("cpu", {}, "DecodeScheduler"),
        ("cuda", {}, "AsyncDecodeScheduler"),
        ("cuda", {"engine_kwargs": {"async_scheduling": False}}, "DecodeScheduler"),
        ("cuda", {"engine_kwargs": {"async_scheduling": None}}, None),
        ("cuda", {"engine_kwargs": {"speculative_config": {"method": "suffix"}}}, None),
        ("cuda", {"engine_kwargs": {"scheduler_cls": "mine.Scheduler"}}, "mine.Scheduler"),
        ("cuda", {"scheduler": "vllm"}, None),
        ("cpu", {"scheduler": "vllm"}, None),
    ],
)
def test_a_key_selects_the_scheduler_and_frontend_of_vllm(model, device, rollout, expected):
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.engine import output_processor

    from rlfuse.config.rollout import RolloutConfig
    from rlfuse.config.schema import ModelConfig
    from rlfuse.engines.vllm.front_end import keep_log_probs
    from rlfuse.engines.vllm.setup import engine_arguments, holds_tokens

    arguments = engine_arguments(ModelConfig(path=model), RolloutConfig(**rollout), 256, device)
    is_ours, name = holds_tokens(arguments), arguments["scheduler_cls"]
    assert (resolve_obj_by_qualname(name).__name__ if is_ours else name) == expected
    keep_log_probs(fast=is_ours)
    kept = output_processor.LogprobsProcessor.__name__
    keep_log_probs(fast=False)
    assert kept == ("SampledLogProbs" if is_ours else "LogprobsProcessor")


def test_async_engines_verify_drafts_only_of_requests_with_an_earlier_response(model):
    from rlfuse.engines.vllm.decode_scheduler import AsyncDecodeScheduler

    core = Core(build(model, AsyncDecodeScheduler, True, drafts="history"), likely_end=0.0)
    for number in range(4):
        extra = {"extra_args": {DRAFT: b"1234"}} if number < 2 else {}
        core.scheduler.add_request(request(number, [9] * 20, **extra))
    core.step()
    placeholders = {name: len(each.spec_token_ids) for name, each in core.scheduler.requests.items()}
    assert placeholders == {"r0": DRAFTS, "r1": DRAFTS, "r2": 0, "r3": 0}
    output = core.scheduler.schedule()
    assert {name: len(drafts) for name, drafts in output.scheduled_spec_decode_tokens.items()} == {"r0": 3, "r1": 3}
    assert output.num_scheduled_tokens == {"r0": 4, "r1": 4, "r2": 1, "r3": 1}
