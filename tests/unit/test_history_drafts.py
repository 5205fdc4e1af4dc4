"""Drafts from earlier responses: proposals of the V1 model runner, and equal proposals of the V2 speculator."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest

from rlfuse.engines.vllm.request_arguments import DRAFT, DRAWN, SEPARATOR, draft_of, join_drafts

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]  # one process, as importing vLLM is slow

LIMIT, LONGEST = 12, 64


@pytest.mark.parametrize(
    ("response", "drafts"),
    [
        ([], [1, 2, 3, 4]),
        ([1, 2], [3, 4, 5, 6]),
        ([1, 2, 3, 4, 5, 6], [7, 8]),
        ([1, 2, 3, 4, 5, 6, 7, 8], []),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], []),
        ([1, 9], [3]),
        ([9] * 7, [8]),
        ([9] * 12, []),
        ([1, 9, 3, 4, 5, 6], [7, 8]),
        ([1, 2, 9, 3, 4], [5, 6, 7]),
        ([1, 4, 5], [6, 7, 8]),
        ([9, 9, 9, 9, 9, 9, 9, 9, 9, 1, 2], [3, 4, 5]),
    ],
    ids=str,
)
def test_draft_continues_after_the_longest_match_of_recent_tokens(response, drafts):
    from rlfuse.engines.vllm.history import CONTEXT, continuation

    draft, recent = np.arange(1, 9, dtype=np.int32), np.array(response[-CONTEXT:], np.int32)
    assert continuation(draft, len(response), recent, 4).tolist() == drafts


@pytest.mark.parametrize(
    ("response", "count"),
    [([7] * 20, 30), ([*[7] * 19, 8], 1), ([*[7] * 18, 8, 7], 2), ([*[7] * 16, 8, 7, 7, 7], 4)],
    ids=["all agree", "none", "one", "three"],
)
def test_short_matches_give_short_drafts(response, count):
    """Use a draft whose only match is at the end of the response."""
    from rlfuse.engines.vllm.history import CONTEXT, continuation

    draft, recent = np.arange(100, 200, dtype=np.int32), np.array(response[-CONTEXT:], np.int32)
    agreed = next(number for number in range(21) if response[::-1][number : number + 1] != [7])
    draft[20 - agreed : 20] = 7
    assert continuation(draft, 20, recent, 30).tolist() == draft[20 : 20 + count].tolist()


def test_nearest_of_equally_long_matches_is_used():
    from rlfuse.engines.vllm.history import continuation

    draft = np.array([1, 2, 3, 4, 1, 2, 5, 6, 1, 2, 7, 8], np.int32)
    for length, following in ((4, 3), (7, 5), (9, 7), (900, 7)):
        assert continuation(draft, length, np.array([9, 1, 2], np.int32), 1).tolist() == [following]


def test_longest_match_among_responses_is_used_and_drafts_end_with_their_response():
    from rlfuse.engines.vllm.history import continuation

    draft = np.array([1, 2, 3, 4, SEPARATOR, 8, 2, 3, 5, 6, SEPARATOR, 7, 7], np.int32)
    for response, following in (
        ([1, 2], [3, 4]),
        ([2, 3], [4]),
        ([8, 2, 3], [5, 6]),
        ([7, 3, 5], [6]),
        ([4], [2]),
    ):
        assert continuation(draft, len(response), np.array(response, np.int32), 9).tolist() == following


def test_earlier_responses_are_joined():
    responses = [np.array(each, np.int64) for each in ([1, 2], [3], [])]
    joined = draft_of(SimpleNamespace(extra_args={DRAFT: join_drafts(responses)}))
    assert joined.tolist() == [1, 2, SEPARATOR, 3, SEPARATOR] and not len(draft_of(SimpleNamespace(extra_args=None)))


class States:
    """The fields of V2's `RequestState` that a speculator reads."""

    def __init__(self, requests):
        import torch

        self.max_num_reqs, self.max_model_len = requests, LONGEST
        self.prompt_len = SimpleNamespace(np=np.zeros(requests, np.int32))
        self.total_len = SimpleNamespace(gpu=torch.zeros(requests, dtype=torch.int32))
        self.all_token_ids = SimpleNamespace(gpu=torch.zeros((requests, LONGEST), dtype=torch.int32))


def test_v2_speculator_drafts_like_the_v1_proposer():
    """Use random responses that partly follow their drafts, continue samples of other engines, and reuse slots."""
    import torch

    from rlfuse.engines.vllm.history import HistoryProposer
    from rlfuse.engines.vllm.history_speculator import HistorySpeculator, set_draft

    chance, requests, drafted = np.random.default_rng(1), 8, 0
    states = States(requests)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=LIMIT),
        model_config=SimpleNamespace(max_model_len=LONGEST),
    )
    speculator, proposer = HistorySpeculator(config, torch.device("cpu"), states), HistoryProposer(config)
    for _ in range(200):
        order = chance.permutation(requests)[: chance.integers(1, requests + 1)]
        expected, last = [], torch.full((requests, 1), 99, dtype=torch.int64)
        for index in order:
            prompt, draft = chance.integers(1, 5, chance.integers(1, 9)), chance.integers(1, 5, chance.integers(0, 50))
            draft[20:][chance.random(len(draft[20:])) < 0.1] = SEPARATOR
            response = chance.integers(1, 5, chance.integers(1, 25))
            same = np.flatnonzero(chance.random(min(len(draft), len(response))) < 0.8)
            response[same] = abs(draft[same])
            drawn = int(chance.integers(0, len(response)))
            extra = {DRAWN: drawn} | ({DRAFT: draft.astype(np.int32).tobytes()} if len(draft) else {})
            params, tokens = SimpleNamespace(extra_args=extra), [*prompt.tolist(), *response.tolist()]
            begun = len(prompt) + drawn
            states.prompt_len.np[index], states.total_len.gpu[index] = begun, len(tokens)
            states.all_token_ids.gpu[index, : len(tokens)] = torch.tensor(tokens)
            set_draft(speculator, int(index), params)
            request = SimpleNamespace(
                sampling_params=params, prompt_token_ids=tokens[:begun], output_token_ids=tokens[begun:]
            )
            expected.append(proposer.propose(request, LIMIT))
        batch = SimpleNamespace(num_reqs=len(order), idx_mapping=torch.tensor(order, dtype=torch.int32))
        sampled = torch.ones(len(order), dtype=torch.int32)
        sampled[-1] = 0  # a chunk of a prompt
        drafts = speculator.propose(batch, *[None] * 4, sampled, None, last, *[None] * 3)
        assert drafts.shape == (len(order), LIMIT) and drafts.dtype == torch.int64
        for found, each, count in zip(drafts.tolist(), expected, sampled.tolist(), strict=True):
            each = each if count else []
            assert found == each + [99] * (LIMIT - len(each))
            drafted += len(each)
    assert drafted > 500
    assert (speculator.propose(batch, *[None] * 4, sampled, None, last, *[None] * 3, dummy_run=True) == 99).all()


def test_v2_model_runner_builds_and_calls_the_speculator():
    """Check its source and signatures, as it only runs on GPUs."""
    from vllm.v1.worker.gpu.spec_decode import ngram, speculator  # noqa: F401
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    from rlfuse.engines.vllm import worker_extension
    from rlfuse.engines.vllm.history_speculator import HistorySpeculator
    from rlfuse.engines.vllm.request_arguments import HISTORY_ENGINE

    def names(function):
        return list(inspect.signature(function).parameters)

    assert names(HistorySpeculator.propose) == names(BaseSpeculator.propose)
    assert not HistorySpeculator.__abstractmethods__
    from vllm.v1.worker.gpu import model_runner

    assert model_runner.init_speculator is worker_extension._speculator
    source = " ".join(inspect.getsource(model_runner.GPUModelRunner).split())
    assert "self.speculator = init_speculator( self.vllm_config, self.device, self.req_states )" in source
    assert source.index("self.req_states.add_request(") < source.index("self.sampler.add_request(req_index, new_req")
    assert "self.req_states.draft_tokens[input_batch.idx_mapping] = draft_tokens" in source
    config = SimpleNamespace(
        additional_config={HISTORY_ENGINE: True}, speculative_config=SimpleNamespace(num_speculative_tokens=LIMIT)
    )
    states = States(2)
    built = worker_extension._speculator(config, "cpu", states)
    assert isinstance(built, HistorySpeculator) and worker_extension._speculators[states] is built
