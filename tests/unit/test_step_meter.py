"""The meter of engine steps, with statistics in vLLM's format."""

from types import SimpleNamespace

import pytest

from rlfuse.engines.rollout.step_meter import StepMeter
from rlfuse.engines.vllm.setup import engine_step
from rlfuse.events import Recorder


def step(meter, now, usage, decoding=0, started=0, running=1):
    """Record one engine step of 1 s; `usage`: share of the KV cache used after it."""
    read = engine_step(
        SimpleNamespace(iteration_details=None, spec_decoding_stats=None),
        SimpleNamespace(
            iteration_timestamp=now,
            inter_token_latencies_iter=[1.0] * decoding,
            time_to_first_tokens_iter=[1.0] * started,
            num_generation_tokens=decoding + started,
            prompt_token_stats=SimpleNamespace(computed=50 * started),
        ),
    )
    meter.record(read, usage, idle=not running)


@pytest.fixture
def meter():
    return StepMeter(Recorder("rollout/0"), kv_tokens=1000)


def test_the_cache_of_a_finished_sample_counts_in_its_last_step(meter):
    step(meter, 100.0, usage=0.2, started=2)
    step(meter, 101.0, usage=0.1, decoding=2)  # one of them ended and freed its cache
    meter.close()
    prefill, decode = meter._recorder.drain()
    assert (prefill.attributes["context"], decode.attributes["context"]) == (200, 200)
    assert (decode.start, decode.end, decode.tokens) == pytest.approx((100.0, 101.0, 2))


def test_samples_aborted_between_two_steps_count_in_neither(meter):
    step(meter, 100.0, usage=0.9, started=2)
    step(meter, 110.0, usage=0.1, started=1)  # the two were aborted between steps, which statistics omit
    meter.close()
    before, after = meter._recorder.drain()
    assert (before.attributes["context"], after.attributes["context"]) == (900, 100)
    assert (after.start, after.end) == pytest.approx((109.0, 110.0))


def test_tokens_that_the_engine_outputs_later_count_in_their_steps(meter):
    for _ in range(3):
        details = SimpleNamespace(
            num_ctx_requests=0, num_ctx_tokens=0, num_generation_requests=2, num_generation_tokens=2, elapsed_ms=20.0
        )
        drafts = SimpleNamespace(num_draft_tokens=4, num_accepted_tokens=3)
        stats = SimpleNamespace(iteration_details=details, spec_decoding_stats=drafts)
        assert meter.record(engine_step(stats, None), 0.5, idle=False)
    details.num_generation_requests = 0
    assert not meter.record(engine_step(stats, None), 0.5, idle=False), "no request had a token"
    meter.close()
    [span] = meter._recorder.drain()
    assert (span.tokens, span.attributes["steps"], span.attributes["context"]) == (6, 3, 500)
    assert (span.attributes["drafted"], span.attributes["accepted"]) == (12, 9)
    assert span.end - span.start >= 0.04
