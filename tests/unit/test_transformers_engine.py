"""The transformers rollout backend: tokens depend only on seed and position, log-probs equal a forward pass."""

import asyncio
import gc
import inspect
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast, Qwen2Config

from rlfuse.config.rollout import RolloutConfig
from rlfuse.config.schema import Config, ModelConfig
from rlfuse.engines.rollout.engine_actor import BACKENDS, EMPTY_PARTIAL, EngineActor, Request, engine_actor
from rlfuse.engines.transformers.decode_batch import draw
from rlfuse.engines.transformers.transformers_engine import TransformersEngine
from rlfuse.errors import EngineError, EngineFailed
from rlfuse.protocols import Load, Sampling
from rlfuse.samples import Partial

VOCABULARY, END, LONGEST = 40, 2, 64
PLAIN = Sampling(1.0, 1.0, -1, 24)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a model with heads of size 8, for which vLLM has no CPU kernel."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LONGEST, initializer_range=0.3, eos_token_id=END,
        tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    GenerationConfig(eos_token_id=[END]).save_pretrained(folder)
    words = {f"w{token}": token for token in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), eos_token="w2")
    tokenizer.save_pretrained(folder)
    return ModelConfig(path=str(folder), dtype="float32")


def requests(count, start=0):
    rng = np.random.default_rng(7)
    prompts = [rng.integers(3, VOCABULARY, rng.integers(2, 12)).astype(np.int32) for _ in range(start + count)]
    return [Request(f"1/{k}/0", 1, 100 + k, prompts[k], EMPTY_PARTIAL) for k in range(start, start + count)]


def with_engine(model, work, **settings):
    async def run():
        engine = TransformersEngine(0)
        engine.facts = await engine.start(model, replace(RolloutConfig(), **settings), LONGEST, "cpu")
        try:
            return await work(engine)
        finally:
            await engine.stop()

    return asyncio.run(asyncio.wait_for(run(), 60))


async def generate_all(engine, requested, sampling=PLAIN):
    return {name: result async for some in engine.generate(requested, sampling) for name, result in some}


@pytest.fixture(scope="module")
def batch_responses(model):
    """Return the responses of all samples in one batch."""
    return with_engine(model, lambda engine: generate_all(engine, requests(12)))


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].token_ids.tolist() == other[name].token_ids.tolist(), name
        np.testing.assert_allclose(one[name].log_probs, other[name].log_probs, atol=1e-5)
        assert (one[name].text, one[name].finish_reason) == (other[name].text, other[name].finish_reason)


def test_log_probs_equal_a_forward_pass(model, batch_responses):
    plain = AutoModelForCausalLM.from_pretrained(model.path)
    for request in requests(12):
        response = batch_responses[request.id]
        ids = torch.from_numpy(np.concatenate([request.prompt_ids, response.token_ids]).astype(np.int64))
        scores = plain(ids[None]).logits[0].log_softmax(-1)
        at = range(len(request.prompt_ids) - 1, len(ids) - 1)
        expected = [float(scores[t, ids[t + 1]].detach()) for t in at]
        np.testing.assert_allclose(response.log_probs, expected, atol=1e-5)
        ended = response.token_ids[-1] == END
        assert response.finish_reason == ("stop" if ended else "length") and END not in response.token_ids[:-1]
        assert ended or len(response.token_ids) == PLAIN.max_tokens
    assert len({response.finish_reason for response in batch_responses.values()}) == 2, "both finish reasons occur"


def test_a_baseline_is_decoded_greedily_among_sampled_responses(model, batch_responses):
    requested = [replace(each, is_greedy=number % 3 == 0) for number, each in enumerate(requests(12))]
    mixed = with_engine(model, lambda engine: generate_all(engine, requested))
    greedy = with_engine(model, lambda engine: generate_all(engine, requests(12), replace(PLAIN, temperature=0.0)))
    for each in requested:
        assert_same({each.id: mixed[each.id]}, {each.id: (greedy if each.is_greedy else batch_responses)[each.id]})


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"max_num_seqs": 3}, {"max_num_seqs": 1}, {"kv_cache_memory_mb": 1}], ids=str)
def test_tokens_are_independent_of_batches(model, batch_responses, settings):
    assert_same(with_engine(model, lambda engine: generate_all(engine, requests(12)), **settings), batch_responses)


def test_tokens_are_independent_of_samples_that_join_a_batch(model, batch_responses):
    async def work(engine):
        engine._step = slowed(engine._step)
        parts = [generate_all(engine, requests(4, start)) for start in (0, 4, 8)]
        found = [asyncio.create_task(part) for part in parts[:1]]
        while engine._steps < 2:
            await asyncio.sleep(0.001)
        found += [asyncio.create_task(part) for part in parts[1:]]
        return {name: result for each in await asyncio.gather(*found) for name, result in each.items()}

    assert_same(with_engine(model, work), batch_responses)


def test_an_evicted_sample_continues_with_the_same_tokens(model, batch_responses):
    async def evicted(engine):
        engine._step = slowed(engine._step)
        requested = requests(12)
        task = asyncio.create_task(generate_all(engine, requested))
        while engine._steps < 6:
            await asyncio.sleep(0.001)
        await engine.evict([request.id for request in requested[:6]], "tokens", 1)
        return await task

    first = with_engine(model, evicted)
    partials = {name: result for name, result in first.items() if isinstance(result, Partial)}
    assert partials and all(len(partial.token_ids) for partial in partials.values())
    continued = [replace(request, partial=partials[request.id]) for request in requests(12) if request.id in partials]
    second = with_engine(model, lambda engine: generate_all(engine, continued))
    assert_same(first | second, batch_responses)


def slowed(step):
    def slow(joining):
        time.sleep(0.005)
        return step(joining)

    return slow


def test_new_weights_reach_samples_in_flight(model, batch_responses, tmp_path):
    # After a push during decoding, existing tokens stay and the rest are sampled with the new weights.
    torch.manual_seed(1)
    other = AutoModelForCausalLM.from_config(AutoModelForCausalLM.from_pretrained(model.path).config)
    save_file({name: tensor.data.clone() for name, tensor in other.named_parameters()}, tmp_path / "bucket")

    async def work(engine):
        engine._step = slowed(engine._step)
        task = asyncio.create_task(generate_all(engine, requests(12)))
        while engine._steps < 4:
            await asyncio.sleep(0.001)
        await push(engine, 5)
        before = await task
        return before, await generate_all(engine, requests(12)), await engine.drain(), await engine.version()

    async def push(engine, version):
        await engine.begin_update()
        steps_before = engine._steps
        await asyncio.sleep(0.02)
        assert engine._steps == steps_before, "a step ran while weights changed"
        await engine.receive({"path": str(tmp_path / "bucket")})
        await engine.finish_update(version)

    before, after, spans, version = with_engine(model, work)
    assert version == 5 and {response.weight_version for response in after.values()} == {5}
    crossed = [span for span in spans if span.attributes.get("weight_versions") == [0, 5]]
    assert crossed
    other.save_pretrained(tmp_path / "other")
    for span in crossed:
        (name,) = span.samples
        assert before[name].weight_version == 0
        assert before[name].token_ids[:4].tolist() == batch_responses[name].token_ids[:4].tolist()
    plain = other.eval()
    for request in requests(12):
        ids = torch.from_numpy(np.concatenate([request.prompt_ids, after[request.id].token_ids]).astype(np.int64))
        scores = plain(ids[None]).logits[0].log_softmax(-1)
        found = [float(scores[t, ids[t + 1]].detach()) for t in range(len(request.prompt_ids) - 1, len(ids) - 1)]
        np.testing.assert_allclose(after[request.id].log_probs, found, atol=1e-5)


@pytest.mark.parametrize("broken, message", [("missing", "lacked model.norm.weight"), ("extra", "a.b is not a param")])
def test_a_push_with_other_tensors_is_rejected(model, tmp_path, broken, message):
    tensors = {n: p.data.clone() for n, p in AutoModelForCausalLM.from_pretrained(model.path).named_parameters()}
    if broken == "missing":
        del tensors["model.norm.weight"]
    else:
        tensors["a.b"] = torch.zeros(1)
    save_file(tensors, tmp_path / "bucket")

    async def work(engine):
        await engine.begin_update()
        await engine.receive({"path": str(tmp_path / "bucket")})
        await engine.finish_update(1)

    with pytest.raises(EngineError, match=message.replace(".", r"\.")):
        with_engine(model, work)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [Sampling(0.7, 1.0, -1, 1), Sampling(1.0, 0.6, -1, 1), Sampling(1.0, 1.0, 4, 1), Sampling(1.3, 0.9, 9, 1, 0.05)],
    ids=str,
)
def test_draws_follow_the_distribution(sampling):
    torch.manual_seed(3)
    logits = 2 * torch.randn(16)
    scaled = (logits / sampling.temperature).double()
    order = scaled.softmax(0).argsort(descending=True)
    kept = order if sampling.top_k < 0 else order[: sampling.top_k]
    mass = torch.zeros(16, dtype=torch.double)
    mass[kept] = scaled[kept].softmax(0)
    if sampling.top_p < 1:
        count = int((mass[kept].cumsum(0) < sampling.top_p).sum()) + 1
        mass[kept[count:]] = 0
    mass[mass < sampling.min_p * mass.max()] = 0
    mass = mass / mass.sum()
    draws = [draw(logits, seed, position, sampling) for seed in range(500) for position in range(4)]
    counts = torch.bincount(torch.tensor([token for token, _ in draws]), minlength=16) / len(draws)
    assert not counts[mass == 0].any()
    assert (counts - mass).abs().max() < 5 * (0.25 / len(draws)) ** 0.5
    for token, log_prob in draws[:50]:
        assert log_prob == pytest.approx(float(mass[token].log()), abs=1e-5)
    assert draws[:4] == [draw(logits, 0, position, sampling) for position in range(4)]


def test_greedy_and_stop_texts(model, batch_responses):
    greedy = with_engine(model, lambda engine: generate_all(engine, requests(12), replace(PLAIN, temperature=0.0)))
    plain = AutoModelForCausalLM.from_pretrained(model.path)
    for request in requests(3):
        ids = torch.from_numpy(request.prompt_ids.astype(np.int64))[None]
        expected = plain.generate(ids, do_sample=False, max_new_tokens=24, pad_token_id=0)[0, ids.shape[1] :]
        assert greedy[request.id].token_ids.tolist() == expected.tolist()
    stop = next(text for text in (f"w{token}" for token in batch_responses["1/0/0"].token_ids[2:]) if text != "w2")
    found = with_engine(model, lambda engine: generate_all(engine, requests(1), replace(PLAIN, stop=(stop,))))["1/0/0"]
    words = [f"w{token}" for token in batch_responses["1/0/0"].token_ids]
    assert found.token_ids.tolist() == batch_responses["1/0/0"].token_ids[: words.index(stop) + 1].tolist()
    assert found.finish_reason == "stop"


def test_load_pulse_and_spans_of_an_engine(model):
    async def work(engine):
        assert await engine.load() == Load(0, 0, 0.0)
        task = asyncio.create_task(generate_all(engine, requests(12)))
        while not engine._steps:
            await asyncio.sleep(0)
        load = await engine.load()
        assert (load.running, load.waiting) == (4, 8) and 0 < load.kv_use < 1
        with pytest.raises(ValueError, match="already being generated"):
            await generate_all(engine, requests(1))
        with pytest.raises(RuntimeError, match="can't sleep while 12 samples"):
            await engine.sleep()
        pulse = await engine.pulse()
        await task
        await engine.sleep()
        with pytest.raises(RuntimeError, match="is asleep"):
            await generate_all(engine, requests(1))
        await engine.wake()
        return pulse, await engine.drain(), await generate_all(engine, [])

    pulse, spans, nothing = with_engine(model, work, max_num_seqs=4)
    assert pulse.stalled_s == 0 and nothing == {}
    decoded, samples = ([span for span in spans if span.kind == kind] for kind in ("decode", "generate"))
    assert sum(span.tokens for span in decoded) == sum(span.tokens for span in samples)
    assert max(span.attributes["batch"] for span in decoded) == 4
    assert all(one.end <= other.start + 1e-9 for one, other in pairwise(decoded))


@pytest.mark.slow
def test_a_failed_step_fails_its_samples_with_the_cause(model, caplog):
    async def work(engine):
        def broken(joining):
            raise ZeroDivisionError("no such layer")

        engine._step = broken
        with pytest.raises(EngineFailed, match="a decode step failed: ZeroDivisionError: no such layer"):
            await generate_all(engine, requests(2))
        return await engine.load()

    assert with_engine(model, work) == Load(0, 0, 0.0)
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_cache_too_small_for_one_sample_is_rejected(model):
    with pytest.raises(EngineError, match=r"kv_cache_memory_mb=0: holds 0 tokens.*64; set at least 1"):
        with_engine(model, lambda engine: generate_all(engine, []), kv_cache_memory_mb=0)


def test_samples_that_arrive_during_evictions_are_generated(model, batch_responses):
    # Two evictions wait for the current step, after which the engine briefly has no samples.
    async def work(engine):
        engine._step = slowed(engine._step)
        first, second, third = requests(3)
        tasks = [asyncio.create_task(generate_all(engine, [each])) for each in (first, second)]
        while engine._steps < 3:
            await asyncio.sleep(0)
        evictions = asyncio.gather(*(engine.evict([each.id], "tokens", 2) for each in (first, second)))
        found = await generate_all(engine, [third])
        await evictions
        await asyncio.gather(*tasks)
        return found

    for _ in range(3):
        assert_same(with_engine(model, work), {"1/2/0": batch_responses["1/2/0"]})


def test_a_long_sample_limits_the_batch_size(model):
    # Rows of a batch are padded to the longest, so the cache holds rows x length.
    async def work(engine):
        engine._kv_tokens, held = 100, []
        step = engine._step

        def record_size(joining):
            result = step(joining)
            held.append(engine._batch._mask.numel())
            return result

        engine._step = record_size
        await generate_all(engine, requests(12))
        return held

    assert max(with_engine(model, work)) <= 100


def signature(method):
    """Return names and defaults of parameters, without the one that Ray adds after starting such an actor."""
    parameters = inspect.signature(method).parameters.values()
    return [(each.name, each.default) for each in parameters if each.name != "_ray_trace_ctx"]


@pytest.mark.parametrize("name", BACKENDS)
def test_backends_have_every_method_of_the_port(name):
    # Calls pass through Ray, so the type checker cannot compare these signatures.
    backend = engine_actor(name)
    for method, expected in inspect.getmembers(EngineActor, inspect.isfunction):
        if not method.startswith("_") or method == "__init__":
            assert signature(getattr(backend, method)) == signature(expected), f"{name}.{method}"
    assert backend.capabilities is not None


@pytest.mark.parametrize(
    "key, value",
    [
        ("rollout.tensor_model_parallel_size", 2),
        ("rollout.quantization", "fp8_per_channel"),
        ("rollout.engine_kwargs", {"block_size": 64}),
        ("rollout.disaggregate", "on"),
        ("rollout.kv_transfer", "shm"),
        ("rollout.scheduler", "vllm"),
        ("fusion.tail_speculation", 4),
        ("rollout.draft", "history"),
        ("cluster.device", "cuda"),
    ],
)
def test_unsupported_keys_are_rejected(model, key, value):
    config = Config()
    config.model.path, config.rollout.name = model.path, "transformers"
    assert TransformersEngine.unsupported_reasons(config) == []
    section, leaf = key.split(".")
    setattr(getattr(config, section), leaf, value)
    (message,) = TransformersEngine.unsupported_reasons(config)
    assert message.startswith(f"{key}={value}: rollout.name=transformers does not support this value")


def test_models_with_recurrent_layers_are_rejected(tmp_path):
    from transformers import JambaConfig

    JambaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1
    ).save_pretrained(tmp_path)
    config = Config()
    config.model.path = str(tmp_path)
    (message,) = TransformersEngine.unsupported_reasons(config)
    assert "a jamba has layers of" in message
