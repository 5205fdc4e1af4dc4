"""Drafts in vLLM's V2 model runner: its sampler returns the same tokens and log-probs without and with any drafts.

(11) of README.md. On a CPU the kernels need TRITON_INTERPRET=1; tests/unit/test_acceptance_rule.py runs this file so.
"""

import os
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")
pytest.importorskip("vllm")
import torch

VOCABULARY, PROMPT, DRAFTS, LOGPROBS = 300, 20, 4, "processed_logprobs"
SAMPLING = {
    "temperature 1": {},
    "temperature 0.7": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 7, "temperature": 0.7},
    "min_p": {"min_p": 0.1},
    "excluded tokens": {"logit_bias": {3: -np.inf, 5: -np.inf}},
    "all": {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
}


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Let vLLM import its kernels, which it disables on hosts without a GPU."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        import triton
        import vllm.triton_utils
        from triton.language.extra import libdevice

        vars(vllm.triton_utils).update(HAS_TRITON=True, triton=triton, tl=triton.language, tldevice=libdevice)
        from vllm.v1.sample.ops import topk_topp_sampler

        topk_topp_sampler.HAS_TRITON = False  # the interpreter does not support this kernel; vLLM falls back to sorting
    import rlfuse.engines.vllm.worker_extension  # noqa: F401  # replaces vLLM's rule


@pytest.fixture
def sampler(device, monkeypatch):
    """Return V2's sampler with one request per entry of `SAMPLING`; each has sampled its first token."""
    from vllm import SamplingParams
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    if device == "cpu":
        zeros = torch.zeros
        monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)
        monkeypatch.setattr(
            buffer_utils.torch, "zeros", lambda *size, pin_memory=False, **options: zeros(*size, **options)
        )
    requests = len(SAMPLING)
    config = SimpleNamespace(
        reasoning_config=None, scheduler_config=SimpleNamespace(max_num_seqs=requests), speculative_config=None,
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY, max_model_len=64),
    )  # fmt: skip
    states = RequestState(requests, 64, 64, DRAFTS, VOCABULARY, torch.device(device))
    made = Sampler(config, requests, VOCABULARY, torch.device(device), states, LOGPROBS, DRAFTS)
    for number, each in enumerate(SAMPLING.values()):
        states.prompt_len.np[number] = states.prefill_len.np[number] = PROMPT
        made.add_request(number, SamplingParams(seed=100 + number, logprobs=0, max_tokens=40, **each))
    states.prompt_len.copy_to_uva()
    states.prefill_len.copy_to_uva()
    made.apply_staged_writes()
    return made


def batch(device, inputs, first):
    """Return the batch of a step in which request i has the input tokens `inputs[i]` from position `first`."""
    counts = np.array([len(each) for each in inputs])
    ends, local = np.concatenate([[0], counts.cumsum()]), np.concatenate([np.arange(count) for count in counts])
    owners, count = np.repeat(np.arange(len(inputs)), counts), int(counts.sum())
    lengths = torch.tensor(first + counts, dtype=torch.int32)
    return SimpleNamespace(
        num_reqs=len(inputs),
        input_ids=torch.tensor(np.concatenate(inputs), dtype=torch.int32, device=device),
        positions=torch.tensor(first + local, device=device),
        logits_indices=torch.arange(count, device=device),
        expanded_idx_mapping=torch.tensor(owners, dtype=torch.int32, device=device),
        expanded_local_pos=torch.tensor(local, dtype=torch.int32, device=device),
        idx_mapping=torch.arange(len(inputs), dtype=torch.int32, device=device),
        idx_mapping_np=np.arange(len(inputs)),
        cu_num_logits=torch.tensor(ends, dtype=torch.int32, device=device),
        cu_num_logits_np=ends,
        seq_lens=lengths.to(device),
        seq_lens_cpu_upper_bound=lengths,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunks", [False, True], ids=["one chunk", "chunks"])
def test_drafts_change_no_token_and_no_log_prob(device, sampler, monkeypatch, dtype, chunks):
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler as module

    requests, chance = len(SAMPLING), np.random.default_rng(7)
    logits = 3 * torch.randn(requests, DRAFTS + 1, VOCABULARY, generator=torch.Generator().manual_seed(3))
    logits = logits.to(device, dtype)
    one_by_one = [
        sampler(logits[:, place].contiguous(), batch(device, np.zeros((requests, 1), int), PROMPT + place))
        for place in range(DRAFTS + 1)
    ]
    expected = torch.cat([each.sampled_token_ids for each in one_by_one], 1).cpu().numpy()
    log_probs = torch.cat([each.logprobs_tensors.logprobs for each in one_by_one], 1).cpu().numpy()

    if chunks:
        monkeypatch.setattr(module, "get_max_chunk_logits", lambda vocabulary: 2 * DRAFTS)
    spec = SimpleNamespace(
        num_speculative_tokens=DRAFTS, enable_adaptive_verification=False, rejection_sample_method="standard"
    )
    verify, accepted = module.RejectionSampler(sampler, spec, torch.device(device)), 0
    for _ in range(6):
        drafted = chance.integers(0, DRAFTS + 1, requests)
        wrong = chance.random((requests, DRAFTS)) < 0.3
        drafts = np.where(wrong, chance.integers(-1, VOCABULARY, (requests, DRAFTS)), expected[:, :DRAFTS])
        inputs = [[0, *drafts[i, : drafted[i]]] for i in range(requests)]
        rows = torch.cat([logits[i, : drafted[i] + 1] for i in range(requests)])
        found = verify(rows, batch(device, inputs, PROMPT))
        ends, scores = np.cumsum(drafted + 1), found.logprobs_tensors.logprobs.cpu().numpy()[:, 0]
        for i, each in enumerate(found.sampled_token_ids.cpu().numpy()):
            equal = drafts[i, : drafted[i]] == expected[i, : drafted[i]]
            count = int(equal.cumprod().sum()) + 1
            assert found.num_sampled[i] == count and found.num_rejected[i] == drafted[i] + 1 - count
            assert each[:count].tolist() == expected[i, :count].tolist()
            first = ends[i] - drafted[i] - 1
            np.testing.assert_array_equal(scores[first : first + count], log_probs[i, :count])
            accepted += count - 1
    assert accepted > 30
