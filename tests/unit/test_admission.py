"""Requests to vLLM's engine core equal those that vLLM builds from a raw prompt, with fewer validations."""

import numpy as np
import pytest

from rlfuse.engines.rollout.engine_actor import EMPTY_PARTIAL, Request
from rlfuse.engines.vllm.setup import sampling_params
from rlfuse.protocols import Sampling

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]  # one process: importing vLLM is slow

EOS, OTHER_END, ROOM = 1, 5, 12


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    from transformers import GenerationConfig, Qwen2Config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.input_processor import InputProcessor

    from rlfuse.tasks.vocabulary import build_tokenizer

    folder, tokenizer = tmp_path_factory.mktemp("model"), build_tokenizer()
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": len(tokenizer)}
    config = Qwen2Config(num_hidden_layers=1, max_position_embeddings=512, **sizes)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=[EOS, OTHER_END]).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    arguments = EngineArgs(model=str(folder), dtype="float32", max_model_len=256, kv_cache_memory_bytes=1 << 20)
    input_processor = InputProcessor(arguments.create_engine_config())
    yield input_processor
    input_processor.renderer.shutdown()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, 1.0, -1, ROOM),
        Sampling(0.7, 0.9, 20, ROOM, min_p=0.05, stop=(" 12", " =")),
        Sampling(0.0, 0.9, 20, ROOM, min_p=0.05),
    ],
)
@pytest.mark.parametrize("logit_bias", [None, {7: -100.0}])
def test_requests_equal_those_of_vllm_and_are_validated_once(processor, monkeypatch, sampling, logit_bias):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from rlfuse.engines.vllm.prompts import Prompts
    from rlfuse.engines.vllm.request_arguments import DRAWN

    checked, check = [], SamplingParams._verify_args
    monkeypatch.setattr(SamplingParams, "_verify_args", lambda self: checked.append(1) or check(self))
    prompts = Prompts(processor.model_config.hf_config, 512)
    ids = [np.arange(10, 20 + n, dtype=np.int32) for n in range(4)]
    found = []
    for number, prompt in enumerate(ids):
        request = Request(f"s{number}", 1, 100 + number, prompt, EMPTY_PARTIAL)
        parameters = sampling_params(request, sampling, ROOM - number, {"save": f"/{number}"}, logit_bias)
        prompts.check(request.id, prompt, ())
        shown = prompts.prompt(request.ids(), ())
        found.append(processor.process_inputs(request.id, shown, parameters, ("generate",), arrival_time=1.0))
    assert len(checked) <= 1
    for number, prompt in enumerate(ids):
        expected_parameters = SamplingParams(
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p,
            stop=list(sampling.stop), include_stop_str_in_output=True, max_tokens=ROOM - number,
            seed=100 + number if sampling.temperature else None, logit_bias=logit_bias, logprobs=0,
            skip_special_tokens=False, detokenize=bool(sampling.stop), output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={DRAWN: 0, "kv_transfer_params": {"save": f"/{number}"}},
        )  # fmt: skip
        raw = {"prompt_token_ids": prompt.tolist()}
        expected = processor.process_inputs(f"s{number}", raw, expected_parameters, ("generate",), arrival_time=1.0)
        assert expected.sampling_params.stop_token_ids == [OTHER_END]
        expected.sampling_params.skip_clone = True
        assert found[number] == expected
