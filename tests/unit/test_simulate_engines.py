"""Simulated engines: closed forms equal single steps, and impossible requests are rejected."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlfuse.costs.model import Costs
from rlfuse.errors import EngineLost
from rlfuse.protocols import Sampling
from rlfuse.samples import Partial, Prompt, Response, Sample
from rlfuse.simulate.batching import Batch, Sequence, SimulationError
from rlfuse.simulate.clock import run_virtual
from rlfuse.simulate.devices import SimulatedTrainer
from rlfuse.simulate.rollout import Device, SimulatedRollout, Zeros
from rlfuse.simulate.speed import Speed

COSTS = Costs(
    step_base_s=0.02,
    step_per_sequence_s=1e-3,
    step_per_context_token_s=1e-6,
    flat_batch=2,
    max_sequences=4,
    kv_tokens=1000,
    prefill_tokens_per_s=1000.0,
    move_s=0.0,
    kv_bytes_per_token=10.0,
    link_bytes_per_s=1000.0,
)
SAMPLING = Sampling(1.0, 1.0, -1, 10_000)
ZEROS = Zeros(10_000)


def samples(lengths, group=1, prompt_tokens=10):
    tokens = np.zeros(prompt_tokens, np.int32)
    prompts = [Prompt(i // group, tokens, "", (), "", None) for i in range(len(lengths))]
    return [Sample(prompt, 1, i % group, 0) for i, prompt in enumerate(prompts)]


def engine(lengths, group=1, costs=COSTS, speed=1.0):
    device = Device(0, Speed([(0.0, speed)]))
    return SimulatedRollout(device, Batch(costs), lambda s: lengths[s.prompt.index * group + s.rollout_index], ZEROS)


async def collect(rollout, requested, partials=None, at=0.0):
    await asyncio.sleep(at)
    clock = asyncio.get_running_loop().time
    return {name: (result, clock()) async for name, result in rollout.generate(requested, SAMPLING, partials)}


def finish_times(lengths, costs=COSTS, prompt_tokens=10):
    """Return when each sample of one admission finishes, computed step by step."""
    waiting, running, now, ends = list(range(len(lengths))), {}, 0.0, {}
    while waiting or running:
        context = sum(prompt_tokens + done for done in running.values())
        while waiting and len(running) < costs.max_sequences:
            if context + prompt_tokens + len(running) + 1 > costs.kv_tokens:
                break
            running[waiting.pop(0)] = 0
            context += prompt_tokens
            now += prompt_tokens / costs.prefill_tokens_per_s
        now += costs.decode_step(len(running), context)
        running = {i: done + 1 for i, done in running.items()}
        for i in [i for i, done in running.items() if done == lengths[i]]:
            ends[i] = now
            del running[i]
    return ends


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_event_driven_simulation_equals_step_by_step_simulation(lengths):
    rollout, requested = engine(lengths), samples(lengths)
    done = run_virtual(collect(rollout, requested))
    ends = finish_times(lengths)
    for i, sample in enumerate(requested):
        response, when = done[sample.id]
        assert len(response.token_ids) == lengths[i]
        assert when == pytest.approx(ends[i], abs=1e-6)
    assert rollout.device.held == 0 and rollout.batch.context == 0


@given(st.integers(1, 4), st.integers(0, 900), st.integers(1, 30), st.floats(0.01, 0.99))
def test_an_interruption_takes_effect_at_the_end_of_its_step(size, context, steps, part):
    batch = Batch(COSTS)
    batch.running = {str(i): None for i in range(size)}
    batch.context = context
    when = batch.seconds(steps - 1) + part * (batch.seconds(steps) - batch.seconds(steps - 1))
    assert batch.steps_after(when) == steps
    assert batch.steps_after(batch.seconds(steps)) == steps


def test_a_group_shares_its_prefill_and_new_requests_wait_for_the_current_step():
    async def main():
        rollout, requested = engine([10, 10, 10], group=2), samples([10, 10, 10], group=2)
        first = asyncio.create_task(collect(rollout, requested[:2]))
        later = asyncio.create_task(collect(rollout, requested[2:], at=0.035))
        return [*(await first).values(), *(await later).values()], await rollout.drain()

    done, spans = run_virtual(main())
    begin = 0.01 + Batch(COSTS, running={"a": None, "b": None}, context=20).seconds(2)  # its step ends after 0.035
    decode = [span for span in spans if span.kind == "decode"]
    assert decode[0].attributes["prefill_tokens"] == 10 and decode[0].attributes["steps"] == 2
    assert decode[1].start == pytest.approx(begin) and decode[1].attributes["prefill_tokens"] == 10
    assert [len(response.token_ids) for response, _ in done] == [10, 10, 10]


def test_a_full_cache_preempts_the_newest_sequence():
    costs = replace(COSTS, kv_tokens=100)
    rollout = engine([60, 60], costs=costs)
    done = run_virtual(collect(rollout, samples([60, 60])))
    assert rollout.preempted == 1
    first, second = (when for _, when in done.values())
    assert second > first + 0.02 * 10
    assert [len(response.token_ids) for response, _ in done.values()] == [60, 60]


@pytest.mark.parametrize(("carry", "overhead_s"), [("tokens", 14 / 1000), ("kv", 140 / 1000)])
def test_a_moved_sample_continues_after_the_transfer_time(carry, overhead_s):
    async def main():
        requested, clock = samples([20]), asyncio.get_running_loop().time
        source, target = engine([20]), engine([20])
        leaving = asyncio.create_task(collect(source, requested))
        await asyncio.sleep(0.01 + 0.02 * 3.5)
        await source.evict([requested[0].id], carry)
        partial, evicted_at = (await leaving)[requested[0].id]
        assert isinstance(partial, Partial) and len(partial.token_ids) == 4
        assert evicted_at == clock() and source.device.held == 0
        response, ended = (await collect(target, requested, {requested[0].id: partial}))[requested[0].id]
        assert isinstance(response, Response) and len(response.token_ids) == 20
        return ended - evicted_at, target.moved

    took, moved = run_virtual(main())
    assert took == pytest.approx(overhead_s + 16 * 0.02, abs=1e-3)
    assert (moved.samples, moved.bytes) == (1, 140.0 if carry == "kv" else 32.0)


def test_a_lost_engine_fails_its_calls_and_rejects_new_ones():
    async def main():
        rollout, requested = engine([50, 60]), samples([50, 60])
        asyncio.get_running_loop().call_at(0.5, rollout.fail)
        for _ in range(2):
            with pytest.raises(EngineLost, match="rollout/0 is lost"):
                await collect(rollout, requested)
        assert asyncio.get_running_loop().time() == pytest.approx(0.5)
        await rollout.sleep()  # its slot can still become a trainer

    run_virtual(main())


def test_closing_a_generation_early_frees_the_engine():
    async def main():
        rollout, requested = engine([5, 500]), samples([5, 500])
        stream = rollout.generate(requested, SAMPLING)
        await anext(stream)
        await stream.aclose()
        await asyncio.sleep(0.1)
        assert rollout.device.held == 0 and not rollout.batch.running

    run_virtual(main())


def test_a_slot_has_one_role_and_one_kind_of_work():
    async def main():
        rollout, requested = engine([50]), samples([50])
        trainer = SimulatedTrainer([rollout.device], replace(COSTS, switch_s=1.0), ZEROS)
        rows = [replace_response(requested[0], 50).row()]
        with pytest.raises(SimulationError, match="role rollout"):
            await trainer.score(("actor",), rows, 0)
        generating = asyncio.create_task(collect(rollout, requested))
        await asyncio.sleep(0.1)
        with pytest.raises(SimulationError, match="requested to sleep with 1 samples running"):
            await rollout.sleep()
        await generating
        await rollout.sleep()
        await trainer.acquire_device(0)
        with pytest.raises(SimulationError, match="role trainer"):
            await collect(rollout, requested)
        scoring = asyncio.create_task(trainer.score(("actor",), rows, 0))
        await asyncio.sleep(0)
        with pytest.raises(SimulationError, match="current work old_log_prob"):
            await trainer.accumulate(("actor",), rows, 0)
        await scoring
        await trainer.accumulate(("actor",), rows, 0)
        with pytest.raises(SimulationError, match="over 2 rows"):
            await trainer.step("actor", [50, 50])

    run_virtual(main())


def replace_response(sample, tokens):
    sample.response = Response(*ZEROS.take(tokens), "stop", 0, "")
    return sample


def test_the_cache_never_exceeds_its_capacity():
    batch = Batch(replace(COSTS, kv_tokens=30))
    batch.waiting.append(Sequence("a", 0, 10, 40))
    batch.admit()
    with pytest.raises(SimulationError, match="holds 31 tokens of 30"):
        batch.run(21)
