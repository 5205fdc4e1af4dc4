"""Real vLLM engines in Ray actors: generation, log-probs, weight updates, drafts and failures."""

import asyncio
import itertools
import os
import signal
import sys
import time
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import ray
import torch
from leftovers import weights_left
from rollouts import (
    REPEATING,
    WARM,
    Exporter,
    HoldsModel,
    assert_log_probs_agree,
    children,
    collect,
    drafts,
    drained,
    model_config,
    new_handle,
    pid_of,
    reference_log_probs,
    release,
    sample,
    settings,
)
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rlfuse.cluster.remote import call
from rlfuse.config.schema import Config
from rlfuse.costs.model import Costs
from rlfuse.engines.vllm.importing import SKIPPED_ON_CPUS
from rlfuse.engines.vllm.setup import engine_arguments
from rlfuse.engines.weights import staging as weight_staging
from rlfuse.engines.weights.sync import WeightPush
from rlfuse.errors import EngineError, EngineLost
from rlfuse.events import Recorder
from rlfuse.files import read_rows
from rlfuse.fusion.slot_table import SlotTable
from rlfuse.protocols import Engines, Load, Sampling
from rlfuse.samples import Partial, make_groups
from rlfuse.tools.evaluation.answering import run_until_done
from rlfuse.tools.evaluation.display import Display
from rlfuse.tools.evaluation.responses import Responses


@pytest.fixture(scope="module")
async def engine(ray_cluster, tiny_model):
    handle = new_handle(0)
    facts = await handle.start(model_config(tiny_model), settings(), 512, "cpu")
    null_block = 32  # tokens of the block that vLLM never allocates
    assert (facts["kv_tokens"] + null_block) * 1024 == 32 << 20 and facts["kv_bytes_per_token"] == 1024
    loaded = await handle.actor.__ray_call__.remote(lambda _: set(sys.modules))
    assert "vllm.v1.engine.async_llm" in loaded and not loaded & set(SKIPPED_ON_CPUS) - {
        "ray"
    }  # of the actor's process
    yield handle
    await release(handle)


@pytest.fixture(scope="module")
async def drafting(ray_cluster):
    """Start an engine with drafts; tests restart it with drafts, with failures, and with an unsupported model."""
    handle = new_handle(9)
    yield handle
    await release(handle)


@pytest.fixture(scope="module")
def reference(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


async def test_samples_stream_as_they_finish_with_all_their_fields(engine, tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    await engine.drain()
    short, long = [sample(i) for i in range(4)], sample(9, length=20)
    arrivals = {}

    async def take(samples, most):
        async for sample_id, response in engine.generate(samples, Sampling(1.0, 1.0, -1, most)):
            arrivals[sample_id] = (time.perf_counter(), response)

    await asyncio.gather(take([long], 400), take(short, 8))
    assert max(arrivals[s.id][0] for s in short) < arrivals[long.id][0]
    for one in [*short, long]:
        response = arrivals[one.id][1]
        assert response.token_ids.dtype == np.int32 and response.log_probs.dtype == np.float32
        assert len(response.token_ids) == len(response.log_probs) > 0
        assert np.isfinite(response.log_probs).all() and (response.log_probs <= 0).all()
        assert response.weight_version == 0
        stopped = response.token_ids[-1] == 1
        assert response.finish_reason == ("stop" if stopped else "length")
        assert response.text == tokenizer.decode(response.token_ids, skip_special_tokens=True) != ""
    spans = await drained(engine, "generate")
    assert {span.where for span in spans} == {"rollout/0"}
    assert sorted(span.samples[0] for span in spans) == sorted(arrivals)
    for span in spans:
        assert span.step == 1 and span.tokens == len(arrivals[span.samples[0]][1].token_ids)
        assert span.attributes["prompt_tokens"] in (20, 40) and 0 < span.attributes["first_token_s"] < 60
    assert await engine.drain() == []


async def test_baselines_are_decoded_greedily_among_sampled_responses(engine):
    samples = [replace(sample(i, k), is_baseline=k == 2) for i in range(3) for k in range(3)]
    responses = await collect(engine, samples, Sampling(1.0, 0.9, -1, 12))
    plain = await collect(engine, [each for each in samples if not each.is_baseline], Sampling(1.0, 0.9, -1, 12))
    greedy = [replace(each, is_baseline=False) for each in samples if each.is_baseline]
    greedy = await collect(engine, greedy, Sampling(0.0, 1.0, -1, 12))
    for each in samples:
        alone = (greedy if each.is_baseline else plain)[each.id]
        assert responses[each.id].token_ids.tolist() == alone.token_ids.tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_log_probs_equal_those_of_the_trainer(engine, reference, temperature):
    samples = [sample(i, k) for i in range(3) for k in range(2)]
    responses = await collect(engine, samples, Sampling(temperature, 1.0, -1, 24))
    for one in samples:
        response = responses[one.id]
        expected = reference_log_probs(reference, one, response.token_ids, temperature)
        np.testing.assert_allclose(response.log_probs, expected, atol=1e-4)


async def test_a_response_does_not_depend_on_the_batch(engine):
    samples = [sample(i, k) for i in range(3) for k in range(4)]
    together = await collect(engine, samples)
    backwards = await collect(engine, samples[::-1][:7])
    alone = {}
    for one in samples[:3]:
        alone |= await collect(engine, [one])
    for part in (backwards, alone):
        for sample_id, response in part.items():
            assert response.token_ids.tolist() == together[sample_id].token_ids.tolist()
            assert response.text == together[sample_id].text
    assert len({tuple(response.token_ids) for response in together.values()}) == len(samples)


async def test_greedy_ignores_the_seed(engine):
    greedy = Sampling(0.0, 1.0, -1, 16)
    responses = await collect(engine, [sample(3, k) for k in range(3)], greedy)
    assert len({tuple(response.token_ids) for response in responses.values()}) == 1


async def test_a_stop_string_ends_a_response_across_token_boundaries(engine, tiny_model):
    tokenizer, one = AutoTokenizer.from_pretrained(tiny_model), sample(70)
    whole = (await collect(engine, [one]))[one.id]
    texts = [tokenizer.decode(whole.token_ids[:count], skip_special_tokens=True) for count in range(25)]
    stop = texts[12][len(texts[10]) - 2 : len(texts[11]) + 2]  # spans three tokens, none of them completely
    count = next(number for number, text in enumerate(texts) if stop in text)
    stopping = Sampling(1.0, 1.0, -1, 24, stop=("never", stop))
    for carried in (0, 3, count - 2, count - 1):
        partial = Partial(whole.token_ids[:carried], whole.log_probs[:carried], 0)
        partials = {one.id: partial} if carried else None
        [(_, response)] = [found async for found in engine.generate([one], stopping, partials)]
        assert response.token_ids.tolist() == whole.token_ids[:count].tolist() and response.finish_reason == "stop"
        assert response.text == texts[count] and not response.text.endswith(stop), (
            "the response does not end with a complete token"
        )
        np.testing.assert_allclose(response.log_probs, whole.log_probs[:count], atol=1e-5)
    unstopped = await collect(engine, [one], Sampling(1.0, 1.0, -1, 24, stop=("never",)))
    assert unstopped[one.id].token_ids.tolist() == whole.token_ids.tolist()


async def test_min_p_excludes_unlikely_tokens_and_log_probs_are_renormalised(engine, reference):
    samples = [sample(71, k) for k in range(4)]
    responses = await collect(engine, samples, Sampling(1.0, 1.0, -1, 24, min_p=0.3))
    for one in samples:
        tokens = responses[one.id].token_ids
        ids = torch.tensor(np.concatenate([one.prompt.token_ids, tokens])).long()[None]
        with torch.no_grad():
            likely = torch.softmax(reference(ids).logits[0, len(one.prompt.token_ids) - 1 : -1], -1)
        kept = torch.where(likely >= 0.3 * likely.amax(-1, keepdim=True), likely, 0)
        assert (kept > 0).sum(-1).float().mean() < 100, "min_p excludes no token"
        expected = (kept / kept.sum(-1, keepdim=True)).log().gather(1, ids[0, -len(tokens) :, None])[:, 0]
        np.testing.assert_allclose(responses[one.id].log_probs, expected.numpy(), atol=1e-4)


async def test_responses_are_appended_to_a_truncated_file(engine, tmp_path):
    config = Config()
    config.data.max_response_length, config.rollout.val_kwargs.temperature = 24, 1.0
    samples, path = [sample(72 + i, k, step=0) for i in range(3) for k in range(2)], tmp_path / "responses.jsonl"
    expected = await collect(engine, samples)
    for most in (2, 3):  # the second call finds two responses
        prompts = [group[0].prompt for group in (samples[:2], samples[2:4], samples[4:])[:most]]
        groups = make_groups(prompts, 2, 0, 0)
        responses = Responses(path, scored=False)
        left, display = responses.begin({"model": "tiny"}, groups), Display()
        assert len(left) == (most if most == 2 else 1)
        engines = Engines([engine], None, None, None)
        await run_until_done(config, left, engines, SlotTable(1, Costs()), Recorder("driver"), responses, display)
        responses.close()
    rows = {row["id"]: row for row in read_rows(path)}
    assert {name: row["response"] for name, row in rows.items()} == {name: r.text for name, r in expected.items()}
    assert display.done == 6 and display.tokens == sum(len(expected[s.id].token_ids) for s in samples[4:])


async def test_a_response_ends_at_the_context_length(engine):
    one = sample(4, length=500)
    response = (await collect(engine, [one], Sampling(1.0, 1.0, -1, 400)))[one.id]
    assert len(response.token_ids) <= 12
    with pytest.raises(EngineError, match=r"rollout/0.*512 prompt tokens.*data.max_prompt_length"):
        await collect(engine, [sample(4, length=512)])
    with pytest.raises(EngineError, match="submit each sample once"):
        await collect(engine, [one, one])


async def test_evicted_samples_keep_their_tokens(engine):
    samples = [sample(20 + i, length=10) for i in range(20)]  # 16 run, 4 are queued
    arrived = {}
    await engine.drain()

    async def take():
        async for sample_id, response in engine.generate(samples, Sampling(1.0, 1.0, -1, 500)):
            arrived[sample_id] = response

    taking = asyncio.create_task(take())
    while (load := await engine.load()).running < 16:
        await asyncio.sleep(0.01)
    assert load.waiting > 0 and 0 < load.kv_use <= 1
    began = time.perf_counter()
    await engine.evict([one.id for one in samples])
    await taking
    assert time.perf_counter() - began < 200
    assert set(arrived) == {one.id for one in samples}
    evicted = [result for result in arrived.values() if isinstance(result, Partial)]
    assert len(evicted) >= 10
    assert all(len(result.token_ids) == len(result.log_probs) for result in arrived.values())
    assert any(0 < len(partial.token_ids) < 490 for partial in evicted)
    assert {partial.kv_key for partial in evicted} == {None}
    decoded = sum(span.tokens for span in await drained(engine, "decode"))
    assert decoded == sum(len(result.token_ids) for result in arrived.values()), "a sample lost tokens"
    assert await engine.load() == Load(0, 0, 0.0)


async def test_closing_the_stream_aborts_its_samples(engine):
    async for _ in (stream := engine.generate([sample(40 + i, length=10) for i in range(8)], Sampling(1, 1, -1, 500))):
        break
    await stream.aclose()
    began = time.perf_counter()
    while await engine.load() != Load(0, 0, 0.0):
        assert time.perf_counter() - began < 200
        await asyncio.sleep(0.02)
    assert len(await collect(engine, [sample(0)])) == 1


# New weights -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
async def trainer(ray_cluster, tiny_model):
    actor = HoldsModel.remote(str(tiny_model))
    yield actor
    ray.kill(actor)


async def test_pushed_weights_are_used_for_generation(engine, trainer, tiny_model, monkeypatch):
    samples = [sample(50 + i) for i in range(4)]
    before = await collect(engine, samples)
    exporter = Exporter(trainer, 200_000)
    assert len(await exporter.bucket_plan()) == 4, "buckets for embeddings, head and two layers"
    sync = WeightPush(exporter, [engine], bucket_mb=1)
    await engine.drain()

    await call(trainer.change.remote(0.9), "trainer", "change", 240)
    await sync.push(1)
    changed = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(0.9)
    after = await collect(engine, samples)
    assert await engine.version() == 1
    for one in samples:
        response = after[one.id]
        assert response.weight_version == 1
        assert response.token_ids.tolist() != before[one.id].token_ids.tolist()
        expected = reference_log_probs(changed, one, response.token_ids, 1.0)
        np.testing.assert_allclose(response.log_probs, expected, atol=1e-4)

    await call(trainer.change.remote(1 / 0.9), "trainer", "change", 240)
    await sync.push(2)
    restored = await collect(engine, samples)
    assert [restored[s.id].token_ids.tolist() for s in samples] == [before[s.id].token_ids.tolist() for s in samples]
    assert {response.weight_version for response in restored.values()} == {2}
    assert not weights_left()
    updates = await drained(engine, "update_weights")
    assert [span.attributes["version"] for span in updates] == [1, 2]


async def test_new_weights_apply_to_running_requests(engine, trainer, reference):
    """With a dedicated device, the engine does not sleep."""
    sync = WeightPush(Exporter(trainer, 1 << 20), [engine], bucket_mb=1)
    await engine.drain()
    one = sample(60, length=10)
    taking = asyncio.create_task(collect(engine, [one], Sampling(1.0, 1.0, -1, 480)))
    while (await engine.load()).running == 0:
        await asyncio.sleep(0.005)
    sync._version = 3
    await sync._serve([engine])
    response = (await taking)[one.id]
    assert response.weight_version == 2  # the oldest version that generated a token
    [span] = await drained(engine, "generate")
    assert span.attributes["weight_versions"] == [2, 3]
    expected = reference_log_probs(reference, one, response.token_ids, 1.0)  # although the weights are equal
    np.testing.assert_allclose(response.log_probs, expected, atol=1e-4)


# Tail speculation ------------------------------------------------------------------------------------------------


def test_tail_speculation_drafts_only_below_its_threshold(tiny_model):
    def arguments(threshold, device="cpu", **changes):
        return engine_arguments(model_config(tiny_model), settings(**changes), 64, device, threshold)

    assert "speculative_config" not in arguments(0)
    config = arguments(3)["speculative_config"]
    assert config["method"] == "ngram"
    assert config["num_speculative_tokens_per_batch_size"] == [(1, 3, 4), (4, 16, 0)]
    assert arguments(16)["speculative_config"]["num_speculative_tokens_per_batch_size"] == [(1, 16, 4)]
    assert arguments(3, "cuda")["speculative_config"]["method"] == "ngram_gpu"
    suffix = arguments(3, draft="suffix")["speculative_config"]
    assert suffix == {"method": "suffix", **{name: config[name] for name in config if name.startswith("num_")}}


DRAFTED = {
    "temperature 1": Sampling(1.0, 1.0, -1, 440),
    "temperature 0.7": Sampling(0.7, 1.0, -1, 440),
    "greedy": Sampling(0.0, 1.0, -1, 440),
    "top_p": Sampling(1.0, 0.8, -1, 440),
    "top_k": Sampling(1.0, 1.0, 20, 440),
    "min_p": Sampling(1.0, 1.0, -1, 440, min_p=0.1),
    "all": Sampling(0.7, 0.9, 50, 440, min_p=0.02),
    "stop strings": Sampling(0.7, 1.0, -1, 440, stop=("w11", "8w7", "never")),
    "end of the context": Sampling(0.7, 1.0, -1, 500),
}
MOVED = DRAFTED["all"], Sampling(0.7, 1.0, -1, 440, stop=("8w7", "9w7", "never"))


def assert_same(found, expected, sampling):
    assert found.keys() == expected.keys()
    for sample_id, response in expected.items():
        assert found[sample_id].token_ids.tolist() == response.token_ids.tolist()
        assert (found[sample_id].finish_reason, found[sample_id].text) == (response.finish_reason, response.text)
        assert_log_probs_agree(found[sample_id], response, sampling)


SUFFIX = pytest.mark.skipif(find_spec("arctic_inference") is None, reason="arctic-inference isn't installed")


@pytest.mark.parametrize("draft", ["ngram", pytest.param("suffix", marks=SUFFIX)])
async def test_drafts_change_no_token(draft, engine, drafting, trainer, tiny_model):
    """In float32, kernels for several tokens per sample give the logits of those for one token.

    The policy repeats itself, because the next token depends mostly on the last one.
    """
    await drafting.start(model_config(tiny_model), settings(draft=draft), 512, "cpu", tail_speculation=12)
    exporter = Exporter(trainer, 200_000)
    for name, factor in REPEATING.items():
        await call(trainer.change.remote(factor, name), "trainer", "change", 240)
    await WeightPush(exporter, [engine, drafting], bucket_mb=1).push(6)
    await asyncio.gather(engine.drain(), drafting.drain())

    tokens = 0
    for name, sampling in DRAFTED.items():
        samples = [sample(300 + i, length=20 + i) for i in range(12)]
        expected, found = await collect(engine, samples, sampling), await collect(drafting, samples, sampling)
        assert_same(found, expected, sampling)
        drafted, accepted = await drafts(drafting)
        assert drafted > accepted > 0, name
        tokens += sum(len(response.token_ids) for response in found.values())
    assert tokens > 10_000
    for sampling, carry in itertools.product(MOVED, ("tokens", "kv")):
        texts = await assert_moves_change_nothing(engine, drafting, sampling, carry)
        assert any(stop in text for stop in sampling.stop for text in texts) == bool(sampling.stop)
    crowd = [sample(320 + i) for i in range(16)]  # too many to draft for, until some have finished
    assert_same(await collect(drafting, crowd), await collect(engine, crowd), WARM)

    await drafting.stop()
    for name, factor in REPEATING.items():
        await call(trainer.change.remote(1 / factor, name), "trainer", "change", 240)
    await WeightPush(exporter, [engine], bucket_mb=1).push(7)


async def assert_moves_change_nothing(engine, drafting, sampling, carry):
    """Move samples between the engines; assert that they end as without drafts; return the responses."""
    samples = [sample(340 + i) for i in range(8)]
    expected = await collect(engine, samples, sampling)
    left, partials, done, moved = samples, {}, {}, 0
    await asyncio.gather(engine.drain(), drafting.drain())
    for here in itertools.cycle((drafting, engine)):
        taking = asyncio.create_task(take(here, left, sampling, partials))
        seen = 0
        while seen < 20 * len(left) and not taking.done():
            await asyncio.sleep(0.005)
            seen += sum(span.tokens for span in await drained(here, "decode"))
        await here.evict([one.id for one in left], carry)
        results = await taking
        done |= {name: each for name, each in results.items() if not isinstance(each, Partial)}
        partials = {name: each for name, each in results.items() if isinstance(each, Partial)}
        left, moved = [one for one in samples if one.id in partials], moved + len(partials)
        if not left:
            break
    assert_same(done, expected, sampling)
    assert moved > len(samples)
    return [response.text for response in done.values()]


async def take(engine, samples, sampling, partials):
    return {name: each async for name, each in engine.generate(samples, sampling, partials)}


async def test_a_failed_start_reports_its_cause(drafting, tiny_model, tmp_path):
    with pytest.raises(EngineError, match=r"rollout/9 could not start vLLM for .*nothing\.\n.*'.*/nothing'"):
        await drafting.start(model_config(tmp_path / "nothing"), settings(), 64, "cpu")
    with pytest.raises(
        EngineError, match=r"rollout/9 could not start vLLM for (.|\n)*ValueError: .*KV cache"
    ) as failure:
        await drafting.start(model_config(tiny_model), settings(kv_cache_memory_mb=1), 1024, "cpu")
    assert "root cause" not in str(failure.value).splitlines()[-1]
    with pytest.raises(EngineError, match=r"rollout/9 could not start(.|\n)*rollout.engine_kwargs"):
        await drafting.start(model_config(tiny_model), settings(engine_kwargs={"blocksize": 16}), 64, "cpu")


async def test_tail_speculation_keeps_greedy_tokens(engine, drafting, tiny_model):
    """Also in a process with earlier failed starts, and with vLLM's default scheduler."""
    await drafting.start(model_config(tiny_model), settings(scheduler="vllm"), 512, "cpu", tail_speculation=2)
    samples = [sample(80 + i) for i in range(4)]
    greedy = Sampling(0.0, 1.0, -1, 60)
    expected, tail = await collect(engine, samples, greedy), await collect(drafting, samples[:2], greedy)
    crowd = await collect(drafting, samples, WARM)
    assert {key: value.token_ids.tolist() for key, value in tail.items()} == {
        one.id: expected[one.id].token_ids.tolist() for one in samples[:2]
    }
    undrafted = await collect(engine, samples, WARM)  # four are too many to draft for: sampled tokens are the same too
    assert all(crowd[key].token_ids.tolist() == undrafted[key].token_ids.tolist() for key in undrafted)
    for key, response in undrafted.items():
        np.testing.assert_allclose(crowd[key].log_probs, response.log_probs, atol=1e-5)


# Earlier responses ---------------------------------------------------------------------------------------------------


async def test_earlier_responses_change_no_token_and_most_are_accepted(engine, drafting, tiny_model):
    """Drafts: correct, partly wrong, shifted, of other prompts, too short, too long, and of another vocabulary."""
    await drafting.stop()
    await drafting.start(model_config(tiny_model), settings(draft="history"), 512, "cpu")
    drawn = Sampling(0.7, 0.95, -1, 60)
    samples = [sample(90 + i, k, length=20) for i in range(5) for k in range(2)]
    for name, length in (("min_p", 20), ("stop strings", 20), ("end of the context", 470)):
        others = [sample(400 + i, length=length) for i in range(10)]
        first = await collect(engine, others, DRAFTED[name])
        again = [replace(each, drafts=(first[each.id].token_ids,)) for each in others]
        await drafting.drain()
        assert_same(await collect(drafting, again, DRAFTED[name]), first, DRAFTED[name])
        drafted, accepted = await drafts(drafting)
        assert accepted > 0.9 * drafted > 0, name
    expected = await collect(engine, samples, drawn)
    right = [expected[each.id].token_ids for each in samples]
    wrong = [each.copy() for each in right]
    for each in wrong:
        each[7::11] = 3
    longer = [np.concatenate([each, each]) for each in right]
    kinds = {
        "right": right,
        "longer": longer,
        "wrong in parts": wrong,
        "shorter": [each[:9] for each in right],
        "of other prompts": right[1:] + right[:1],
        "after another response": [(np.full(9, 4, np.int32), each) for each in right],
        "with inserted tokens": [np.insert(each, [3, 9, 9], 3) for each in right],
        "of another vocabulary": [each + 1_000_000 for each in right],
    }
    accepted = {}
    for name, given in kinds.items():
        given = [each if isinstance(each, tuple) else (each,) for each in given]
        await drafting.drain()
        with_drafts = [replace(each, drafts=earlier) for each, earlier in zip(samples, given, strict=True)]
        found = await collect(drafting, with_drafts, drawn)
        for each in samples:
            assert found[each.id].token_ids.tolist() == expected[each.id].token_ids.tolist(), (name, each.id)
            assert_log_probs_agree(found[each.id], expected[each.id], drawn)
            assert found[each.id].finish_reason == expected[each.id].finish_reason
        spans = await drained(drafting, "decode")
        steps = sum(span.attributes["steps"] for span in spans)
        accepted[name] = sum(span.attributes.get("accepted", 0) for span in spans), steps
    await assert_moved_samples_continue_with_drafts(drafting, samples, expected, drawn)
    tokens, length = sum(map(len, right)), max(map(len, right))
    assert accepted["right"][0] > 0.8 * tokens and accepted["right"][1] < length / 4
    for name in ("wrong in parts", "after another response", "with inserted tokens"):
        assert accepted[name][0] > 0.4 * tokens and accepted[name][1] < length / 2, name
    assert accepted["shorter"][0] > 0
    assert accepted["of another vocabulary"] == (0, accepted["of another vocabulary"][1])


async def assert_moved_samples_continue_with_drafts(drafting, samples, expected, drawn):
    begun = {
        each.id: Partial(expected[each.id].token_ids[:5], expected[each.id].log_probs[:5], 0)
        for each in samples
        if len(expected[each.id].token_ids) > 10
    }  # on another engine
    moved = [replace(each, drafts=(expected[each.id].token_ids,)) for each in samples if each.id in begun]
    await drafting.drain()
    found = {name: result async for name, result in drafting.generate(moved, drawn, begun)}
    assert {name: each.token_ids.tolist() for name, each in found.items()} == {
        name: expected[name].token_ids.tolist() for name in begun
    }
    assert sum(span.attributes.get("accepted", 0) for span in await drained(drafting, "decode")) > 3 * len(begun) > 0


# Failures --------------------------------------------------------------------------------------------------------


async def test_an_error_inside_vllm_is_reported_with_its_frames(drafting, tiny_model, tmp_path):
    """No CPU kernel supports a head size of 16; `limits` would have refused it."""
    config = AutoConfig.from_pretrained(tiny_model, hidden_size=64)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    await drafting.stop()
    await drafting.start(model_config(tmp_path), settings(), 512, "cpu")
    with pytest.raises(EngineLost) as failure:
        await collect(drafting, [sample(0)])
    first, *frames, last = str(failure.value).splitlines()
    assert first == "rollout/9: vLLM's engine process failed with an exception."
    assert last.startswith("RuntimeError: Unsupported CPU attention configuration: head_dim=16")
    assert any("cpu_attn.py" in frame for frame in frames) or "_custom_ops.py" in "".join(frames)


async def test_full_shared_memory_ends_the_push_with_sizes_in_the_message(engine, trainer, monkeypatch):
    sync = WeightPush(Exporter(trainer, 200_000), [engine], bucket_mb=1)
    await sync.push(4)
    monkeypatch.setattr(weight_staging.WeightStaging, "free", lambda self: 1000)
    with pytest.raises(EngineError, match=r"up to 1 MiB needed, 0 MiB free.*rollout.update_weights_bucket_mb"):
        await sync.push(5)
    monkeypatch.undo()
    assert await engine.version() == 4
    await sync.push(5)
    assert len(await collect(engine, [sample(0)])) == 1
    assert not weights_left()


async def test_a_killed_engine_process_is_reported_at_once_and_the_engine_lost(engine):
    """Runs last, because it kills the shared engine."""
    pid = await pid_of(engine)
    one = sample(70, length=10)

    async def kill_after_start(*victims):
        await asyncio.sleep(0.3)
        for victim in victims:
            os.kill(victim, signal.SIGKILL)

    killing = asyncio.create_task(kill_after_start(*children(pid)))
    began = time.perf_counter()
    killed = r"rollout/0: vLLM's engine process was killed by signal 9 \(SIGKILL\); the sender is unknown\. Free memory"
    with pytest.raises(EngineLost, match=killed) as failure:
        while True:
            await collect(engine, [one], Sampling(1.0, 1.0, -1, 500))
    await killing
    assert "Traceback" not in str(failure.value)
    for request in (collect(engine, [one]), engine.load(), engine.evict([one.id])):
        with pytest.raises(EngineLost, match=killed):
            await request
    await engine.sleep()
    assert await engine.drain() == []
    with pytest.raises(EngineError, match=r"rollout/0 is not replaced: .*=0"):
        await engine.wait_ready()
    assert time.perf_counter() - began < 200, "the death was found only by the timeout of a call"
