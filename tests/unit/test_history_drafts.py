"""Drafts from earlier responses: proposals of the V1 model runner, and equal proposals of the V2 speculator."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest

from rlfuse.engines.vllm.request_arguments import DRAFT, DRAWN, SEPARATOR, draft_of, join_drafts

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]  # one process, as importing vLLM is slow

LIMIT, LONGEST = 12, 64
CONFIG = SimpleNamespace(
    speculative_config=SimpleNamespace(num_speculative_tokens=LIMIT),
    model_config=SimpleNamespace(max_model_len=LONGEST),
)


def drafted(draft, response, limit):
    """Return the tokens that continue the response."""
    from rlfuse.engines.vllm.history import continuation

    return continuation(np.array(draft, np.int32), np.array(response, np.int32), limit)[0].tolist()


def history_proposer():
    from rlfuse.engines.vllm.history import HistoryProposer

    return HistoryProposer(CONFIG)


def decoding(name, params, response, sampled, limit=LIMIT):
    from rlfuse.engines.vllm.proposer import Decoding

    return Decoding(name, params, response, sampled, limit)


@pytest.mark.parametrize(
    ("response", "drafts"),
    [
        ([], [1, 2, 3, 4]),
        ([1, 2], [3, 4, 5, 6]),
        ([1, 2, 3, 4, 5, 6], [7, 8]),
        ([1, 2, 3, 4, 5, 6, 7, 8], []),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], []),
        ([1, 9], [3, 4, 5, 6]),
        ([9] * 7, [9]),
        ([9, 7] * 6, [9, 7]),
        ([1, 9, 3, 4, 5, 6], [7, 8]),
        ([1, 2, 9, 3, 4], [5, 6, 7, 8]),
        ([1, 4, 5], [6, 7, 8]),
        ([9, 7, 9, 7, 9, 9, 9, 9, 9, 1, 2], [3, 4, 5, 6]),
    ],
    ids=str,
)
def test_draft_continues_after_the_longest_match_of_recent_tokens(response, drafts):
    assert drafted(range(1, 9), response, 4) == drafts


@pytest.mark.parametrize(
    ("draft", "response", "following"),
    [
        ([1, 2, 3, 4], [5, 6, 1, 7, 5, 6], [1, 7, 5, 6]),  # two tokens agree in the response
        ([1, 2, 3, 4], [5, 6, 1, 7, 8, 6], []),  # one
        ([6, 2, 3, 4], [5, 6, 1, 7, 5, 6], [1, 7, 5, 6]),
        ([5, 6, 3, 4], [5, 6, 1, 7, 5, 6], [3, 4]),  # as many in the earlier response
        ([5, 6, 3, 4], [7, 5, 6, 1, 7, 5, 6], [1, 7, 5, 6]),
        ([1, 2, 3, 4], [5, 6, 1, 5, 6, 2, 5, 6], [2, 5, 6]),  # the latest place
    ],
    ids=str,
)
def test_draft_continues_in_the_response_itself_after_a_longer_match(draft, response, following):
    assert drafted(draft, response, 4) == following


def test_nearest_of_equally_long_matches_is_used():
    from rlfuse.engines.vllm.history import best_place

    draft, recent = np.array([1, 2, 3, 4, 1, 2, 5, 6, 1, 2, 7, 8]), np.array([9, 1, 2])
    for length, place in ((4, 2), (7, 6), (9, 10), (900, 10)):
        assert best_place(draft, recent, length) == (place, 2)


def test_longest_match_among_responses_is_used_and_drafts_end_with_their_response():
    draft = [1, 2, 3, 4, SEPARATOR, 8, 2, 3, 5, 6, SEPARATOR, 7, 7]
    for response, following in (
        ([1, 2], [3, 4]),
        ([2, 3], [4]),
        ([8, 2, 3], [5, 6]),
        ([7, 3, 5], [6]),
        ([4], [2, 3, 4]),
    ):
        assert drafted(draft, response, 9) == following


def test_draft_lengths_follow_acceptance_and_are_longer_for_few_requests():
    from rlfuse.engines.vllm.draft_lengths import DraftLengths

    lengths = DraftLengths(3, 8)
    assert lengths.choose(20) == [5, 5, 5]
    for _ in range(200):
        lengths.observe(0, 8, 8)
        lengths.observe(1, 8, 3)
        lengths.observe(2, 8, 0)
        lengths.observe(2, 0, 0)
        found = lengths.choose(10)
    assert found == [8, 3, 0]
    uncertain, counts = DraftLengths(1, 8), []
    for step in range(200):
        uncertain.observe(0, 8, step % 2 * 8)
        uncertain.choose(10)
    for requests in (1, 10, 100):
        counts += uncertain.choose(requests)
    assert counts == [8, 8, 0]


def test_proposer_learns_from_the_tokens_of_the_next_step():
    proposer, draft = history_proposer(), np.arange(100, 140)
    params = SimpleNamespace(extra_args={DRAFT: join_drafts([draft])})
    wrong, lengths = np.arange(40, dtype=np.int32), []
    for step in range(35):  # the first request follows its draft, the second never does
        requests = [decoding("a", params, draft.astype(np.int32)[: step + 1], 1 + sum(lengths[-2:-1]))]
        requests.append(decoding("b", params, wrong[: step + 1], 1))
        requests.append(decoding("c", SimpleNamespace(extra_args=None), wrong[: step + 1], 1))
        requests.append(decoding("d", params, wrong[:0], 0, limit=0))
        *found, without, in_prompt = proposer.propose(requests)
        lengths += map(len, found)
        assert found[0] == draft[step + 1 :][: len(found[0])].tolist() and without == in_prompt == []
    assert lengths[0] > 0 < lengths[1]
    assert lengths[40] == LIMIT and lengths[-1] == 0


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

    from rlfuse.engines.vllm.history_speculator import HistorySpeculator, set_draft

    chance, requests, count_drafted, states = np.random.default_rng(1), 8, 0, States(8)
    speculator = HistorySpeculator(CONFIG, torch.device("cpu"), states)
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
            expected.append(drafted(draft, response, LIMIT))
        batch = SimpleNamespace(num_reqs=len(order), idx_mapping=torch.tensor(order, dtype=torch.int32))
        sampled = torch.ones(len(order), dtype=torch.int32)
        sampled[-1] = 0  # a chunk of a prompt
        drafts = speculator.propose(batch, *[None] * 4, sampled, None, last, *[None] * 3)
        assert drafts.shape == (len(order), LIMIT) and drafts.dtype == torch.int64
        for found, each, count in zip(drafts.tolist(), expected, sampled.tolist(), strict=True):
            each = each if count else []
            assert found == each + [99] * (LIMIT - len(each))
            count_drafted += len(each)
    assert count_drafted > 500
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
