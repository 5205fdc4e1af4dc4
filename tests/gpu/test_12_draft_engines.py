"""Engines on vLLM's V2 model runner: n-grams and earlier responses as drafts change no token and no log-prob.

(12) of README.md. On a CPU the kernels need TRITON_INTERPRET=1; tests/unit/test_acceptance_rule.py runs this file so.
The engines run in this process with asynchronous scheduling. Running samples are preempted, for lack of blocks and by
a cache reset as in weight pushes, and moved.
"""

import numpy as np
import pytest

pytest.importorskip("triton")
pytest.importorskip("vllm")
import torch

VOCABULARY, CONTEXT, RESPONSE, BLOCKS, RESET_AT, ABORT_AT = 200, 128, 40, 14, 6, 8
ABORTED = 1, 3, 5
SAMPLING = (
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"top_p": 0.8},
    {"min_p": 0.1, "top_k": 20},
    {"logit_bias": dict.fromkeys(range(3, 100), -100.0)},
    {"max_tokens": CONTEXT, "ignore_eos": True},
)


@pytest.fixture(scope="module", autouse=True)
def runner(device):
    """Select the V2 model runner; on a CPU let vLLM import its kernels, which it disables there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")
        if device == "cpu":
            import triton
            import vllm.triton_utils
            from triton.language.extra import libdevice
            from triton.runtime import interpreter

            for name, value in {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "GLOO_SOCKET_IFNAME": "lo"}.items():
                patch.setenv(name, value)
            vars(vllm.triton_utils).update(HAS_TRITON=True, triton=triton, tl=triton.language, tldevice=libdevice)
            from vllm.v1.sample.ops import topk_topp_sampler

            topk_topp_sampler.HAS_TRITON = (
                False  # the interpreter does not support this kernel; vLLM falls back to sorting
            )
            load = interpreter.InterpreterBuilder.create_masked_load

            def load_masked(self, pointers, mask, *more):  # the n-gram kernel masks with integers
                return load(self, pointers, interpreter.TensorHandle(mask.data.astype(bool), mask.dtype), *more)

            patch.setattr(interpreter.InterpreterBuilder, "create_masked_load", load_masked)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Save a random Qwen2 without tokenizer that repeats itself: the next token depends mostly on the last one."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("model")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": VOCABULARY, "initializer_range": 0.15}
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**heads, **sizes, eos_token_id=1, tie_word_embeddings=False))
    with torch.no_grad():
        model.get_input_embeddings().weight *= 32
        model.lm_head.weight *= 2
    model.save_pretrained(folder)
    return str(folder)


def engine(model, draft):
    """Return an engine with the draft arguments used on GPUs; `draft`: value of rollout.draft, None: without drafts."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    import rlfuse.engines.vllm.front_end  # noqa: F401  # replaces vLLM's check of parameters
    from rlfuse.config.rollout import RolloutConfig
    from rlfuse.config.schema import ModelConfig
    from rlfuse.engines.vllm.setup import DECODE_SCHEDULER, draft_arguments, engine_arguments

    rollout = RolloutConfig(max_num_seqs=8, kv_cache_memory_mb=4, draft=draft or "ngram")
    arguments = engine_arguments(ModelConfig(path=model, dtype="float32"), rollout, CONTEXT, "cpu")
    arguments |= draft_arguments(8, rollout, "cuda") if draft else {}
    arguments |= {"scheduler_cls": f"{DECODE_SCHEDULER}.AsyncDecodeScheduler", "async_scheduling": True}
    arguments |= {"num_gpu_blocks_override": BLOCKS, "max_num_batched_tokens": 64, "skip_tokenizer_init": True}
    return LLMEngine.from_engine_args(EngineArgs(**arguments | {"disable_log_stats": False}))


def generated(engine, prompts, params, drafts=None, disturbed=False):
    """Return (tokens, log-probs) of each request, and the counts of draft tokens (offered, accepted).

    `drafts`: earlier responses. If `disturbed`, running requests are preempted at one step, and every other one is
    aborted at another and continues as on another engine.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    from rlfuse.engines.vllm.request_arguments import DRAFT, DRAWN

    tokens, scores, steps, moved = [[] for _ in prompts], [[] for _ in prompts], 0, 0
    counts, count = np.zeros(2, int), Scheduler.make_spec_decoding_stats

    def counted(self, stats, num_draft_tokens, num_accepted_tokens, **more):
        counts[:] += num_draft_tokens, num_accepted_tokens
        return count(self, stats, num_draft_tokens, num_accepted_tokens, **more)

    def submit(i):
        each, drawn = params[i].clone(), len(tokens[i])
        each.max_tokens -= drawn
        each.extra_args = {DRAWN: drawn} | ({DRAFT: drafts[i].tobytes()} if drafts else {})
        engine.add_request(f"{i}/{drawn}", {"prompt_token_ids": [*prompts[i], *tokens[i]]}, each)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "make_spec_decoding_stats", counted)
        for i in range(len(prompts)):
            submit(i)
        while engine.has_unfinished_requests():
            steps += 1
            if disturbed and steps == RESET_AT:
                engine.reset_prefix_cache(reset_running_requests=True)
            if disturbed and steps == ABORT_AT:
                known = engine.output_processor.external_req_ids
                engine.engine_core.abort_requests([name for i in ABORTED for name in known.get(f"{i}/0", ())])
            for output in engine.step():
                if output.finished:
                    i, found = int(output.request_id.partition("/")[0]), output.outputs[0]
                    tokens[i] += found.token_ids
                    rows = zip(found.logprobs, found.token_ids, strict=True)
                    scores[i] += [row[token].logprob for row, token in rows]
                    if found.finish_reason == "abort":
                        moved += 1
                        submit(i)
    assert bool(moved) == disturbed
    return tokens, scores, counts


def test_drafts_change_no_token_and_no_log_prob(device, model):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    chance = np.random.default_rng(0)
    prompts = [np.resize(chance.integers(3, VOCABULARY, 8), chance.integers(20, 60)).tolist() for _ in SAMPLING]
    common = {"logprobs": 0, "max_tokens": RESPONSE, "detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY}
    params = [
        SamplingParams(**common | {"seed": None if each.get("temperature") == 0 else i} | each)
        for i, each in enumerate(SAMPLING)
    ]
    expected, log_probs, counts = generated(engine(model, None), prompts, params)
    assert counts.tolist() == [0, 0] and len(expected[-1]) == CONTEXT - len(prompts[-1])
    drafts = [np.array(response * 2, np.int32) for response in expected]  # also beyond the end of the response
    for each in drafts:
        each[11::12] = 3
    for draft, earlier, least in (("ngram", None, 0), ("history", drafts, 0.4)):
        tokens, scores, (offered, accepted) = generated(engine(model, draft), prompts, params, earlier, disturbed=True)
        assert tokens == expected, draft
        for i, each in enumerate(scores):
            np.testing.assert_allclose(each, log_probs[i], atol=1e-5)
        assert offered >= accepted > least * sum(map(len, tokens)), draft
