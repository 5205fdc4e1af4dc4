"""Samples that move between real engines: tokens, transfer of KV caches, decode spans, sleep, and core binding."""

import asyncio
import os
import time
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
from rollouts import children, collect, drained, model_config, new_handle, pid_of, release, sample, settings

from rlfuse.cluster.remote import call
from rlfuse.errors import EngineError
from rlfuse.protocols import Load, Sampling
from rlfuse.samples import Partial, Response

GREEDY = Sampling(0.0, 1.0, -1, 120)
WARM = Sampling(1.0, 1.0, -1, 120)
CUT = Sampling(0.8, 0.9, 20, 120)
OWN: list[Path] = []
"""Folders of the KV caches of these engines; jobs of other tests use others."""
LAST_CORE = (os.cpu_count() or 1) - 1
STALE = Path("/dev/shm/rlfuse-kv-stale")
NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(find_spec("nixl") is None, reason="the package nixl isn't installed")
)


def kv_transports(*transfers):
    """Parametrise a test by the transport of KV caches; each pair of engines starts once."""
    return pytest.mark.parametrize("engines", transfers, indirect=True, scope="module")


@pytest.fixture(scope="module")
async def engines(request, ray_cluster, tiny_model):
    """Start two engines; the second prefills in small chunks and is bound to a core. `request.param`: the transport."""
    STALE.mkdir(exist_ok=True)
    for name in ("lock", "3.0"):
        (STALE / name).touch()
    handles = [new_handle(4), new_handle(5)]
    plain = settings(kv_transfer=request.param)
    chunks = settings(kv_transfer=request.param, engine_kwargs={"max_num_batched_tokens": 64})
    await asyncio.gather(
        handles[0].start(model_config(tiny_model), plain, 512, "cpu"),
        handles[1].start(model_config(tiny_model), chunks, 512, "cpu", core=LAST_CORE),
    )
    for handle in handles:
        folder = handle.actor.__ray_call__.remote(lambda self: self._kv_store.folder)
        OWN.append(await call(folder, handle.name, "name its store", 240))
    assert len(stores()) == 2
    yield handles
    for handle in handles:
        await release(handle)
    assert not stores()


def stores() -> list[Path]:
    return [folder for folder in OWN if folder.exists()]


def remaining_files() -> list[Path]:
    """Return remaining files of KV caches; wait up to a second for sources to remove those that were read."""
    for _ in range(100):
        if not (files := [file for store in stores() for file in store.iterdir() if not _lives_with_engine(file)]):
            break
        time.sleep(0.01)
    return files


def _lives_with_engine(file: Path) -> bool:
    """Return whether the file lives as long as the engine: its lock, sockets and semaphores."""
    return file.name == "lock" or file.is_socket() or file.name.startswith("sem.mp-")


def assert_same(results, expected):
    assert results.keys() == expected.keys()
    for sample_id, response in expected.items():
        result = results[sample_id]
        assert isinstance(result, Response)
        assert result.token_ids.tolist() == response.token_ids.tolist()
        np.testing.assert_allclose(result.log_probs, response.log_probs, atol=1e-5)
        assert (result.finish_reason, result.text) == (response.finish_reason, response.text)
        assert result.weight_version == response.weight_version


async def generate(engine, samples, sampling, partials=None):
    return {sample_id: result async for sample_id, result in engine.generate(samples, sampling, partials)}


async def evict_after(engine, samples, sampling, after: float, carry: str, partials=None):
    """Evict all samples after this many seconds."""
    taking = asyncio.create_task(generate(engine, samples, sampling, partials))
    await asyncio.sleep(after)
    await engine.evict([one.id for one in samples], carry)
    return await taking


async def until_decoded(engine, tokens: int):
    """Wait until the samples have about this many tokens each; drain the engine's events before they start."""
    steps = 0
    while steps < tokens:
        await asyncio.sleep(0.005)
        steps += sum(span.attributes["steps"] for span in await drained(engine, "decode"))


async def evict_at(engine, samples, sampling, tokens: int, carry: str):
    """Evict the samples when they have about this many tokens each."""
    await engine.drain()
    taking = asyncio.create_task(generate(engine, samples, sampling))
    await until_decoded(engine, tokens)
    await engine.evict([one.id for one in samples], carry)
    return await taking


async def long_samples(engine, index: int, count: int):
    """Return samples with prompts of 100 tokens and responses of at least 100, and these responses."""
    samples = [sample(index + i, length=100) for i in range(5 * count)]
    responses = await collect(engine, samples, WARM)
    long = [one for one in samples if len(responses[one.id].token_ids) >= 100][:count]
    return long, {one.id: responses[one.id] for one in long}


@pytest.mark.parametrize("carry", ["tokens", "kv"])
@pytest.mark.parametrize("sampling", [GREEDY, WARM, CUT], ids=["greedy", "warm", "cut"])
@kv_transports("shm", NIXL)
async def test_moved_samples_end_as_without_moves(engines, sampling, carry):
    samples = [sample(100 + i, length=20 + i) for i in range(20)]  # 16 run, 4 wait
    expected = await collect(engines[0], samples, sampling)
    times = np.random.default_rng(len(carry))
    done, partials = {}, {}
    for hop in range(6):
        rest = [one for one in samples if one.id not in done]
        if hop == 5:
            results = await generate(engines[1], rest, sampling, partials)
        else:
            results = await evict_after(engines[hop % 2], rest, sampling, times.uniform(0.02, 0.2), carry, partials)
        for sample_id, result in results.items():
            (partials if isinstance(result, Partial) else done)[sample_id] = result
    assert_same(done, expected)
    assert partials and not remaining_files()


@kv_transports("shm", NIXL)
async def test_a_moved_kv_cache_extends_a_cached_prefix(engines):
    first, second = engines
    long, expected = await long_samples(first, 600, 1)
    await collect(second, long, replace(WARM, max_tokens=1))  # complete blocks of the prompt stay in its prefix cache
    partials = await evict_at(first, long, WARM, 60, "kv")
    assert partials[long[0].id].kv_key
    assert_same(await generate(second, long, WARM, partials), expected)


@kv_transports("shm", NIXL)
async def test_waiting_samples_and_those_at_their_limit(engines):
    first, second = engines
    samples = [sample(130 + i, length=20) for i in range(20)]
    expected = await collect(first, samples, WARM)
    results = await evict_at(first, samples, WARM, 3, "kv")
    partials = {sample_id: result for sample_id, result in results.items() if isinstance(result, Partial)}
    none = [sample_id for sample_id, partial in partials.items() if not len(partial.token_ids)]
    assert none and all(partials[sample_id].kv_key is None for sample_id in none)
    rest = [one for one in samples if one.id in partials]
    assert_same(results | await generate(second, rest, WARM, partials), expected)

    one, response = samples[0], expected[samples[0].id]
    whole = Partial(response.token_ids, response.log_probs, 0)
    at_limit = replace(WARM, max_tokens=len(response.token_ids))
    [(_, same)] = (await generate(second, [one], at_limit, {one.id: whole})).items()
    assert same.finish_reason == "length" and same.token_ids.tolist() == response.token_ids.tolist()
    assert await second.load() == Load(0, 0, 0.0)


@kv_transports("shm", NIXL)
async def test_samples_that_finish_while_they_are_evicted(engines):
    samples = [sample(160 + i, length=20) for i in range(16)]
    sampling = replace(WARM, max_tokens=12)
    expected = await collect(engines[0], samples, sampling)
    for attempt in range(8):
        results = {}
        async for sample_id, result in engines[0].generate(samples, sampling):
            results[sample_id] = result
            if len(results) == 2 * attempt + 1:
                await engines[0].evict([one.id for one in samples], ("tokens", "kv")[attempt % 2])
        partials = {sample_id: result for sample_id, result in results.items() if isinstance(result, Partial)}
        assert len(results) - len(partials) > 2 * attempt
        rest = [one for one in samples if one.id in partials]
        assert_same(results | await generate(engines[1], rest, sampling, partials), expected)
    await engines[0].evict(["1/999/0"])  # unknown or finished: a no-op
    with pytest.raises(EngineError, match="carry='disk': use tokens or kv"):
        await engines[0].evict([], "disk")
    assert not remaining_files()


@kv_transports("shm", NIXL)
async def test_the_kv_cache_is_loaded_from_the_other_engine(engines):
    first, second = engines
    samples, expected = await long_samples(first, 200, 4)
    partials = await evict_at(first, samples, WARM, 40, "kv")
    assert all(partial.kv_key for partial in partials.values())
    ready = [file for store in stores() for file in store.glob("*.tokens")]
    assert len(ready) == len(partials)
    await second.drain()
    assert_same(await generate(second, samples, WARM, partials), expected)
    for span in await drained(second, "generate"):
        carried = len(partials[span.samples[0]].token_ids)
        assert span.attributes["carried_tokens"] == carried > 20
        # Complete blocks of 32, including generated tokens. None of it can be in this engine's prefix cache.
        assert (100 + carried - 2) // 32 * 32 <= span.attributes["cached_tokens"] < 100 + carried
        assert span.tokens == len(expected[span.samples[0]].token_ids) - carried
    assert not remaining_files()


@kv_transports("shm", NIXL)
async def test_a_missing_or_stale_kv_cache_is_recomputed(engines):
    first, second = engines
    samples, expected = await long_samples(first, 230, 3)
    partials = await evict_at(first, samples, WARM, 20, "kv")
    keys = [partials[one.id].kv_key for one in samples]
    Path(f"{keys[0].partition('@')[2]}.0").unlink(
        missing_ok=True
    )  # does not exist with nixl: the transferred cache is used
    for file in Path(keys[1].partition("@")[2]).parent.glob(f"{Path(keys[1]).name}.*"):
        file.unlink()
    partials[samples[2].id] = replace(partials[samples[2].id], kv_key="7@" + keys[2].partition("@")[2])
    await second.drain()
    assert_same(await generate(second, samples, WARM, partials), expected)
    cached = {span.samples[0]: span.attributes["cached_tokens"] for span in await drained(second, "generate")}
    assert cached[samples[1].id] == cached[samples[2].id] == 0
    assert not remaining_files() and not STALE.exists()


@kv_transports("shm", NIXL)
async def test_new_weights_invalidate_kv_caches_of_the_old_ones(engines):
    first, second = engines
    samples, expected = await long_samples(first, 500, 3)
    partials = await evict_at(first, samples, WARM, 20, "kv")
    assert all(partial.kv_key for partial in partials.values())
    began = time.perf_counter()
    await asyncio.gather(*(engine.begin_update() for engine in engines))
    held = time.perf_counter() - began
    assert not remaining_files()  # with nixl: nor blocks of the engine, for which the update would have to wait
    for engine in engines:
        await engine.finish_update(0)
    print(f"{1000 * held:.0f} ms to pause")
    await second.drain()
    assert_same(await generate(second, samples, WARM, partials), expected)
    assert {span.attributes["cached_tokens"] for span in await drained(second, "generate")} == {0}


@pytest.mark.parametrize("carry", ["tokens", "kv"])
@kv_transports("shm", NIXL)
async def test_moving_is_immediate(engines, carry, record_property):
    first, second = engines
    seconds = []
    for trial in range(5):
        samples = [sample(250 + 10 * trial + i + 100 * (carry == "kv"), length=40) for i in range(4)]
        await first.drain()
        taking = asyncio.create_task(generate(first, samples, replace(WARM, max_tokens=400)))
        await until_decoded(first, 20)
        began = time.perf_counter()
        await first.evict([one.id for one in samples], carry)
        partials = {key: value for key, value in (await taking).items() if isinstance(value, Partial)}
        rest = [one for one in samples if one.id in partials]
        one_more = replace(WARM, max_tokens=1 + min(len(partial.token_ids) for partial in partials.values()))
        stream = second.generate(rest, one_more, partials)
        async for _ in stream:  # the first with one more token
            break
        seconds.append(time.perf_counter() - began)
        await stream.aclose()
    assert not remaining_files()  # except samples already at their limit, which load nothing
    record_property("seconds", seconds)
    print(f"{carry}: {[round(1000 * one) for one in seconds]} ms from evict to a new token elsewhere")
    assert len(seconds) == 5


@kv_transports("shm")
async def test_decode_spans_cover_intervals_of_continuous_decoding(engines):
    engine = engines[0]
    while await engine.load() != Load(0, 0, 0.0):  # discard spans of earlier tests
        await asyncio.sleep(0.05)
    await engine.drain()
    began = time.time()
    await collect(engine, [sample(400, length=50)], replace(GREEDY, max_tokens=150))
    await asyncio.sleep(0.5)
    await collect(engine, [sample(401 + i, length=50) for i in range(3)], replace(GREEDY, max_tokens=40))
    wall = time.time() - began
    spans = await engine.drain()
    stretches = [span for span in spans if span.kind == "decode"]
    assert sum(span.tokens for span in stretches) == sum(span.tokens for span in spans if span.kind == "generate")
    assert sum(span.attributes["prefill_tokens"] for span in stretches) == 200
    assert {span.attributes["batch"] for span in stretches} <= {1, 2, 3}
    for span in stretches:
        assert span.where == "rollout/4" and span.step == 1
        assert span.tokens == span.attributes["batch"] * span.attributes["steps"] <= 3 * 64
        assert 50 <= span.attributes["context"] <= 4 * 224 and span.seconds > 0
    assert all(before.end <= after.start + 1e-6 for before, after in pairwise(stretches))
    assert began - 0.1 < stretches[0].start and stretches[-1].end < began + wall + 0.1
    assert wall / 100 < sum(span.seconds for span in stretches) < wall - 0.4  # excluding the time between the two


@kv_transports("shm")
async def test_an_engine_sleeps_only_when_nothing_is_generated(engines):
    engine = engines[0]
    one = sample(420)
    expected = await collect(engine, [one], WARM)
    taking = asyncio.create_task(generate(engine, [sample(421)], replace(GREEDY, max_tokens=400)))
    while not (await engine.load()).running:
        await asyncio.sleep(0.005)
    with pytest.raises(EngineError, match=r"rollout/4 can't sleep while 1 samples are being generated"):
        await engine.sleep()
    await engine.evict([sample(421).id])
    await taking
    await engine.sleep()
    with pytest.raises(EngineError, match=r"rollout/4 is asleep; wake it"):
        await generate(engine, [one], WARM)
    await engine.wake()
    assert_same(await generate(engine, [one], WARM), expected)


@kv_transports("shm")
async def test_an_engine_stays_on_its_core(engines, tiny_model):
    for handle, cores in zip(engines, (set(os.sched_getaffinity(0)), {LAST_CORE}), strict=True):
        actor = psutil.Process(await pid_of(handle))
        children = actor.children(recursive=True)
        assert children
        threads = [thread.id for process in (actor, *children) for thread in process.threads()]
        assert {core for thread in threads for core in os.sched_getaffinity(thread)} == cores
    other = new_handle(6)
    with pytest.raises(EngineError, match=r"core=999: this host has cores 0 to"):
        await other.start(model_config(tiny_model), settings(), 64, "cpu", core=999)
    ray.kill(other.actor)


@kv_transports("shm")
async def test_an_engine_process_inherits_no_connection_and_no_file_of_its_actor(engines):
    """The process is a fork of its actor; an inherited connection would stay open after the actor's end."""
    for handle in engines:
        actor = await pid_of(handle)
        [core] = children(actor)
        assert psutil.Process(core).cmdline()[0] == "VLLM::EngineCore"
        ours, theirs = ({os.readlink(file) for file in Path(f"/proc/{pid}/fd").glob("*")} for pid in (actor, core))
        streams = {os.readlink(f"/proc/{actor}/fd/{number}") for number in range(3)}
        assert len([file for file in ours if file.startswith("socket:")]) > 4
        assert {file.partition(":")[0] for file in ours & theirs - streams} <= {"/dev/null", "pipe", "anon_inode"}


@kv_transports(NIXL)
async def test_samples_resume_without_delay_when_the_source_engine_was_killed(engines):
    first, second = engines
    samples, expected = await long_samples(first, 520, 3)
    partials = await evict_at(first, samples, WARM, 20, "kv")
    for child in psutil.Process(await pid_of(first)).children(recursive=True):
        child.kill()
    await second.drain()
    assert_same(await generate(second, samples, WARM, partials), expected)
    assert not [file for store in stores() for file in store.glob("*.tokens")]
