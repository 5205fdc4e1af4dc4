"""Draft verification changes no token and no log-prob in vLLM's V1 model runner, nor in V2 in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]  # one process: importing vLLM is slow

VOCABULARY, DRAFTS = 60, 5
SAMPLING = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"top_p": 0.8},
    {"top_k": 7},
    {"min_p": 0.1},
    {"logit_bias": {3: -100.0, 5: -100.0}},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.02, "logit_bias": {7: -100.0}},
]


def input_batch(drawn):
    """Return a V1 `InputBatch` with one request per entry of `SAMPLING`, each with `drawn` response tokens."""
    import torch
    from vllm import SamplingParams
    from vllm.config import DeviceConfig, VllmConfig
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

    import rlfuse.engines.vllm.worker_extension  # noqa: F401  (replaces the functions)
    from rlfuse.engines.vllm.request_arguments import DRAWN

    config, device = VllmConfig(device_config=DeviceConfig("cpu")), torch.device("cpu")
    config.speculative_config = object()
    batch = InputBatch(
        max_num_reqs=len(SAMPLING), max_model_len=64, max_num_batched_tokens=64, device=device, vocab_size=VOCABULARY,
        block_sizes=[32], max_num_blocks_per_req=[2], num_spec_tokens=DRAFTS,
        logitsprocs=gpu_model_runner.build_logitsprocs(config, device, False, False, ()),
    )  # fmt: skip
    for number, each in enumerate(SAMPLING):
        params = SamplingParams(
            seed=number if each.get("temperature") != 0 else None, logprobs=0, extra_args={DRAWN: 2}, **each
        )
        generator = torch.Generator() if params.seed is not None else None
        tokens = list(range(8, 8 + drawn))
        batch.add_request(
            CachedRequestState(f"r{number}", [1, 2, 3, 4], [], params, generator, ([0],), 4 + drawn, tokens)
        )
    batch.refresh_metadata()
    return batch


def verify(logits, drafts, drawn):
    """Return (tokens, log-probs) of each request by the rule of V1, for `logits` [requests, DRAFTS + 1, vocabulary]."""
    import torch
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    from rlfuse.engines.vllm.acceptance import EqualitySampler

    counts = [len(each) for each in drafts]
    ends = np.cumsum(np.array(counts) + 1)
    rows = torch.cat([logits[i, : count + 1] for i, count in enumerate(counts)])
    flat = torch.tensor([token for each in drafts for token in each], dtype=torch.int32)
    last, totals = torch.tensor(ends - 1), (torch.tensor(np.cumsum(counts)), torch.tensor(ends))
    targets = torch.tensor([row for row in range(len(rows)) if row not in ends - 1], dtype=torch.long)
    metadata = SpecDecodeMetadata(flat, counts, *totals, targets, last, torch.arange(len(rows)))
    batch = input_batch(drawn)
    sampler = Sampler("processed_logprobs")
    found = EqualitySampler(sampler)(metadata, None, rows, batch.sampling_metadata)
    if found.sampled_token_ids.shape[1] == 1:  # as the model runner reads a step without drafts
        return found.sampled_token_ids.tolist(), found.logprobs_tensors.logprobs[:, :1].tolist(), batch
    tokens, lists = EqualitySampler.parse_output(found.sampled_token_ids, VOCABULARY, (), found.logprobs_tensors)
    return tokens, [lists.slice_request(i, len(each)).logprobs[:, 0].tolist() for i, each in enumerate(tokens)], batch


@pytest.mark.parametrize("rows", [None, 5], ids=["all rows at once", "5 rows at once"])
def test_the_v1_rule_changes_no_token_and_no_log_prob(rows, monkeypatch):
    import torch

    from rlfuse.engines.vllm import acceptance

    if rows:
        monkeypatch.setattr(acceptance, "MAX_LOGITS", rows * VOCABULARY)
    logits = 3 * torch.randn(len(SAMPLING), DRAFTS + 1, VOCABULARY, generator=torch.Generator().manual_seed(3))
    steps = [verify(logits[:, place:], [[]] * len(SAMPLING), place) for place in range(DRAFTS + 1)]
    expected = np.array([tokens for tokens, _, _ in steps])[..., 0].T
    log_probs = np.array([scores for _, scores, _ in steps])[..., 0].T
    assert not np.isin(expected[6], [3, 5]).any() and 7 not in expected[7]

    chance, accepted = np.random.default_rng(5), 0
    for _ in range(20):
        wrong = chance.random(expected.shape) < 0.2
        guesses = np.where(wrong, chance.integers(0, VOCABULARY, expected.shape), expected)
        drafts = [guesses[i, : chance.integers(0, DRAFTS + 1)].tolist() for i in range(len(SAMPLING))]
        tokens, scores, batch = verify(logits, drafts, 0)
        for i, each in enumerate(drafts):
            count = int((np.array(each) == expected[i, : len(each)]).cumprod().sum()) + 1
            assert tokens[i] == expected[i, :count].tolist()
            np.testing.assert_array_equal(np.float32(scores[i]), np.float32(log_probs[i, :count]))
            accepted += count - 1
            if (generator := batch.generators.get(i)) is not None:  # it continues after the tokens drawn so far
                state = generator.get_state()
                generator.request.output_token_ids += tokens[i]
                generator.reposition()
                assert torch.equal(generator.get_state(), state)
    assert accepted > 200


def test_custom_logits_processors_are_refused_with_drafts():
    """Refuse them since V1 does not update earlier tokens between the tokens of a draft."""
    import torch
    from vllm.config import DeviceConfig, VllmConfig
    from vllm.v1.sample.logits_processor import STR_SPEC_DEC_REJECTS_LOGITSPROCS
    from vllm.v1.worker import gpu_model_runner

    import rlfuse.engines.vllm.worker_extension  # noqa: F401  (replaces the function)

    config = VllmConfig(device_config=DeviceConfig("cpu"))
    config.speculative_config = object()
    with pytest.raises(ValueError, match=STR_SPEC_DEC_REJECTS_LOGITSPROCS):
        gpu_model_runner.build_logitsprocs(config, torch.device("cpu"), False, False, ("custom.Processor",))


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
def test_rows_with_one_generator_sample_the_same_tokens_as_vllm(mode):
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    from rlfuse.engines.vllm.acceptance import _forward_cpu, sample_on_cpu

    logits, sampler = torch.randn(40, VOCABULARY), TopKTopPSampler(mode)
    owners = [3, 3, 3, None, 5, *[7] * 30, None, 8, 8]
    found = []
    for draw in (_forward_cpu, sample_on_cpu):
        torch.manual_seed(0)
        by_owner = {owner: torch.Generator().manual_seed(owner) for owner in {*owners} - {None}}
        generators = {row: by_owner[owner] for row, owner in enumerate(owners) if owner is not None}
        tokens, scores = draw(sampler, logits.clone(), generators, None, torch.full((40,), 0.9))
        found.append((tokens, scores, *(by_owner[owner].get_state() for owner in sorted(by_owner))))
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))
    tokens, _ = sample_on_cpu(sampler, logits.clone(), {}, None, None)
    assert tokens.shape == (40,)


@pytest.mark.parametrize("name", ["test_11_drafts.py", "test_12_draft_engines.py"])
def test_the_v2_rule_under_triton_interpreter(name):
    """Run in a separate process, since TRITON_INTERPRET is read when Triton is imported."""
    file = Path(__file__).parent.parent / "gpu" / name
    command = sys.executable, "-m", "pytest", file, "-q", "-n0", "-p", "no:cacheprovider"
    variables = {"TRITON_INTERPRET": "1", "RLFUSE_TEST_DEVICE": "cpu", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout + done.stderr
