"""Decode steps of vLLM's V2 model runner without unneeded work: state and results equal those of vLLM."""

import random
from types import SimpleNamespace

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]  # its import is slow: one process

REQUESTS, VOCABULARY = 8, 50


@pytest.fixture
def sampler(monkeypatch):
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.gpu.sample import sampler as module
    from vllm.v1.worker.gpu.states import RequestState

    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)
    monkeypatch.setattr(buffer_utils.torch, "zeros", unpinned(torch.zeros))
    config = SimpleNamespace(
        reasoning_config=None, scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS), speculative_config=None,
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY, max_model_len=64),
    )  # fmt: skip
    device = torch.device("cpu")
    states = RequestState(REQUESTS, 64, 64, 0, VOCABULARY, device)
    return module.Sampler(config, REQUESTS, VOCABULARY, device, states)


def unpinned(zeros):
    return lambda *sizes, pin_memory=False, **options: zeros(*sizes, **options)


def copies(holder, found):
    """Collect the host arrays of a sampler state with their device copies in `found`."""
    from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

    for name, each in vars(holder).items():
        if isinstance(each, UvaBackedTensor):
            found[type(holder).__name__, name] = each
    return found


def test_the_device_has_the_parameters_of_all_requests_at_every_step(sampler, monkeypatch):
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

    import rlfuse.engines.vllm.worker_extension as steps

    found = {}
    for holder in (sampler.sampling_states, sampler.logprob_token_ids_state, *sampler.logits_processors):
        copies(holder, found)
    assert len(found) > 10
    counted, copy = [], UvaBackedTensor.copy_to_uva
    monkeypatch.setattr(UvaBackedTensor, "copy_to_uva", lambda self, n=None: counted.append(1) or copy(self, n))
    chance = random.Random(3)
    copied = []
    for step in range(60):
        added = step in (0, 1, 2, 17, 18, 40)
        if added:
            for _ in range(2):
                sampler.add_request(
                    chance.randrange(REQUESTS),
                    SamplingParams(temperature=chance.random() + 0.1, seed=step, min_p=0.1, logprobs=0),
                )
        counted.clear()
        sampler.apply_staged_writes()
        copied.append(bool(counted))
        assert copied[-1] == added
        for place, each in found.items():
            assert torch.equal(each.gpu, each.cpu), place
    sampler.logits_processors.append(SimpleNamespace(apply_staged_writes=lambda: counted.append("custom")))
    assert len(sampler.logits_processors) > steps.BUILT_IN_PROCESSORS
    sampler.apply_staged_writes()
    assert "custom" in counted


def test_log_probs_are_computed_without_ranks(monkeypatch):
    from vllm.v1.worker.gpu.sample import logprob

    import rlfuse.engines.vllm.worker_extension  # noqa: F401

    logits = torch.randn(4, VOCABULARY)
    monkeypatch.setattr(logprob, "compute_token_logprobs", lambda logits, ids: logits.log_softmax(-1).gather(-1, ids))
    sampled = torch.tensor([3, 1, 4, 49])
    found = logprob.compute_topk_scores(logits, 0, sampled)
    assert found.logprob_token_ids.tolist() == sampled[:, None].tolist()
    assert torch.equal(found.logprobs, logits.log_softmax(-1).gather(-1, sampled[:, None]))
    assert found.selected_token_ranks.shape == (4,)
