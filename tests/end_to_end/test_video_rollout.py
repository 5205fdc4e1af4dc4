"""A real engine on prompts with clips: tokens and log-probs of the video model, shared prefixes, refused prompts.

The model's output layer favours visual placeholders, so only their exclusion keeps them out of responses.
"""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import ray
import torch
from rollouts import (
    Exporter,
    HoldsModel,
    assert_drafts_change_nothing,
    collect,
    drained,
    model_config,
    new_handle,
    release,
    settings,
    write_repeating,
)
from transformers import AutoTokenizer, VideoLlama3ForConditionalGeneration

from rlfuse.cluster.remote import call
from rlfuse.engines.trainer.models import load_policy
from rlfuse.engines.weights.sync import WeightPush
from rlfuse.errors import EngineError
from rlfuse.protocols import Sampling
from rlfuse.samples import Embedding, Partial, Prompt, Sample, Visual, sample_seed
from rlfuse.tasks.small_video_models import IMAGE, VIDEO, write_small_video_llama3
from rlfuse.video.embedding import write_rows
from rlfuse.video.models.video_llama_3 import VideoLlama3
from rlfuse.video.plan import VideoPlan
from rlfuse.video.prompt import VisualTokens, assemble

GREEDY, WARM = Sampling(0.0, 1.0, -1, 40), Sampling(1.0, 1.0, -1, 40)
PLAN = VideoPlan(tuple(map(float, range(10))), 56, 56, 1.0, 4)
VISUAL = VisualTokens(VIDEO, IMAGE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write the text part of a VideoLLaMA3, with input embeddings that bfloat16 represents exactly."""
    whole, text = (path := tmp_path_factory.mktemp("video")) / "whole", path / "text"
    write_small_video_llama3(whole)
    model = VideoLlama3ForConditionalGeneration.from_pretrained(whole)
    embedding, head = model.get_input_embeddings().weight, model.lm_head.weight
    with torch.no_grad():
        embedding.copy_(embedding.bfloat16())
        head[[model.config.image_token_id, model.config.video_token_id]] *= 20
    model.save_pretrained(whole)
    return VideoLlama3.export(whole, text)


@pytest.fixture(scope="module")
def whole(folder):
    return VideoLlama3ForConditionalGeneration.from_pretrained(folder.parent / "whole", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
async def engine(ray_cluster, folder):
    handle = new_handle(20)
    await handle.start(model_config(folder), settings(), 512, "cpu")
    yield handle
    await release(handle)


@pytest.fixture(scope="module")
def trainer(ray_cluster, folder):
    actor = HoldsModel.remote(str(folder))
    yield actor
    ray.kill(actor)


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Return a function that writes an embedding as the cache does, and returns its handle."""
    at = tmp_path_factory.mktemp("embeddings")

    def write(key: str, rows: torch.Tensor) -> Embedding:
        (at / key).touch()
        write_rows(str(at / key), 0, rows)
        return Embedding(key, str(at / key), *rows.shape)

    return write


@pytest.fixture(scope="module")
def ask(folder, clips):
    """Return a function that makes samples of a question about one of several random clips of the same plan."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    seen: dict[int, Embedding] = {}

    def make(clip: int, sibling: int = 0, question: str = "<video>what happens?") -> Sample:
        if clip not in seen:
            rows = torch.randn(PLAN.tokens, 128, generator=torch.Generator().manual_seed(clip))
            seen[clip] = clips(f"clip-{clip}", rows)
        prompt = assemble(tokenizer, question, [PLAN] * question.count("<video>"), VISUAL)
        visual = tuple(Visual(places, seen[clip], "clip.mp4", PLAN) for places in prompt.positions)
        shown_prompt = Prompt(clip, prompt.token_ids, question, (), "test", None, visual=visual)
        return Sample(shown_prompt, 1, sibling, sample_seed(0, 1, clip, sibling))

    return make


def expected(model, sample: Sample, tokens: np.ndarray) -> np.ndarray:
    """Return the response's log-probs by the video model, with placeholders excluded."""
    ids = torch.tensor(np.concatenate([sample.prompt.token_ids, tokens])).long()
    start = len(sample.prompt.token_ids)
    with torch.no_grad():
        rows = model.get_input_embeddings()(ids)
        for each in sample.prompt.visual:
            rows[torch.from_numpy(each.positions).long()] = each.source.read().float()
        logits = model(inputs_embeds=rows[None]).logits[0, start - 1 : -1]
    logits[:, [model.config.image_token_id, model.config.video_token_id]] = -torch.inf
    return logits.log_softmax(-1).gather(1, ids[start:, None])[:, 0].numpy()


async def cached_tokens(engine) -> dict[str, int]:
    return {span.samples[0]: span.attributes["cached_tokens"] for span in await drained(engine, "generate")}


def tokens(responses) -> dict[str, list[int]]:
    return {sample_id: response.token_ids.tolist() for sample_id, response in responses.items()}


async def test_drafts_change_no_token_and_no_placeholder_is_sampled(ray_cluster, folder, whole, ask, tmp_path):
    samples, warm = [ask(60 + i) for i in range(8)], replace(WARM, max_tokens=300)
    samplings = [warm, replace(warm, temperature=0.7, min_p=0.02)]
    repeating = write_repeating(folder, tmp_path / "repeating")
    placeholders = [whole.config.image_token_id, whole.config.video_token_id]
    for responses in await assert_drafts_change_nothing(21, repeating, samples, samplings):
        assert not any(np.isin(response.token_ids, placeholders).any() for response in responses.values())


async def test_log_probs_equal_those_of_the_video_model_and_of_the_trainer(engine, ask, folder, whole):
    samples = [ask(clip, sibling) for clip in range(3) for sibling in range(2)]
    samples.append(ask(3, question="<video>or<video>?"))
    responses = await collect(engine, samples, WARM)
    trainer = load_policy(str(folder), model_config(folder)).eval()
    for one in samples:
        response = responses[one.id]
        found = expected(whole, one, response.token_ids)
        np.testing.assert_allclose(response.log_probs, found, atol=1e-4)
        np.testing.assert_array_equal(found, expected(trainer, one, response.token_ids))
    assert len({tuple(response.token_ids) for response in responses.values()}) == len(samples)


async def test_placeholders_are_never_sampled_although_they_are_most_likely(engine, ask, whole):
    forbidden = [whole.config.image_token_id, whole.config.video_token_id]
    samples = [ask(10 + clip, sibling) for clip in range(4) for sibling in range(4)]
    responses = await collect(engine, samples, WARM) | await collect(engine, [ask(14)], GREEDY)
    assert not np.isin(np.concatenate([response.token_ids for response in responses.values()]), forbidden).any()
    with torch.no_grad():
        ids = torch.tensor(responses[samples[0].id].token_ids).long()
        likeliest = whole(ids[None]).logits[0].argmax(-1)
    assert np.isin(likeliest, forbidden).mean() > 0.3


async def test_log_probs_of_several_images_with_a_clip_equal_those_of_the_model(engine, ask, clips, folder, whole):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plan = VideoPlan((0.0,), 56, 84, 1.0, 6, timestamps=None, is_image=True)
    one, question = ask(31), "<image>or<video>or<image>?"
    prompt = assemble(tokenizer, question, [PLAN, plan, plan], VISUAL)
    rows = [torch.randn(plan.tokens, 128, generator=torch.Generator().manual_seed(100 + i)) for i in range(2)]
    sources = [one.prompt.visual[0].source, *(clips(f"image-{i}", each) for i, each in enumerate(rows))]
    shown = [
        Visual(at, source, "a file", each)
        for at, source, each in zip(prompt.positions, sources, (PLAN, plan, plan), strict=True)
    ]
    visual = tuple(sorted(shown, key=lambda each: each.positions[0]))
    mixed = replace(one, prompt=replace(one.prompt, token_ids=prompt.token_ids, visual=visual))
    response = (await collect(engine, [mixed, ask(32)], GREEDY))[mixed.id]
    np.testing.assert_allclose(response.log_probs, expected(whole, mixed, response.token_ids), atol=1e-4)


async def test_embeddings_of_words_are_equivalent_to_the_words(engine, ask, clips, whole):
    with_clip = ask(30)
    [video] = with_clip.prompt.visual
    words = np.random.default_rng(0).integers(5, 200, PLAN.tokens).astype(np.int32)
    rows = whole.get_input_embeddings().weight.detach()[torch.from_numpy(words).long()]
    as_words = with_clip.prompt.token_ids.copy()
    as_words[video.positions] = words
    clip = replace(with_clip, prompt=replace(with_clip.prompt, visual=(replace(video, source=clips("words", rows)),)))
    text = Sample(replace(with_clip.prompt, index=31, token_ids=as_words, visual=()), 1, 0, with_clip.seed)
    for sampling in (GREEDY, WARM):
        responses = await collect(engine, [clip, text], sampling)
        assert responses[clip.id].token_ids.tolist() == responses[text.id].token_ids.tolist()
        np.testing.assert_allclose(responses[clip.id].log_probs, responses[text.id].log_probs, atol=1e-5)


async def test_prefixes_are_shared_within_a_group_only(engine, ask):
    await engine.drain()
    group, other = [ask(40, sibling) for sibling in range(4)], ask(41)
    together = await collect(engine, [*group, other], WARM)
    cached = await cached_tokens(engine)
    whole_blocks = len(group[0].prompt.token_ids) // 32 * 32
    assert sorted(cached[one.id] for one in group) == [0] + 3 * [whole_blocks]
    assert cached[other.id] == 0
    again = await collect(engine, [group[2]], WARM)
    assert tokens(again)[group[2].id] == tokens(together)[group[2].id]
    question = ask(40, 5, "<video>what happens next?")
    await collect(engine, [question], WARM)
    assert (await cached_tokens(engine))[question.id] >= 32 * 4  # same clip, different question


@pytest.mark.parametrize("sampling", [GREEDY, WARM])
async def test_a_partial_response_continues_with_the_same_tokens(engine, ask, sampling):
    samples = [ask(50, sibling) for sibling in range(3)]
    stayed = await collect(engine, samples, sampling)
    partials = {
        one.id: Partial(stayed[one.id].token_ids[:n], stayed[one.id].log_probs[:n], 0)
        for one, n in zip(samples, (0, 7, 33), strict=True)
    }
    moved = {sample_id: result async for sample_id, result in engine.generate(samples, sampling, partials)}
    assert tokens(moved) == tokens(stayed)
    for one in samples:
        np.testing.assert_allclose(moved[one.id].log_probs, stayed[one.id].log_probs, atol=1e-5)


async def forget_prefixes(engine):
    """Reset the engine's prefix cache; exported KV caches stay."""

    def forget(worker):
        loop = worker._engine.output_handler.get_loop()
        assert asyncio.run_coroutine_threadsafe(worker._engine.reset_prefix_cache(), loop).result(60)

    await engine.actor.__ray_call__.remote(forget)


async def test_kv_caches_of_clips_are_transferred(engine, ask):
    one, other, long = ask(60), ask(61), Sampling(0.0, 1.0, -1, 200)
    stayed = await collect(engine, [one, other], long)
    await engine.drain()
    taking = asyncio.create_task(collect(engine, [one], long))
    while not await drained(engine, "decode"):
        await asyncio.sleep(0.002)
    await engine.evict([one.id], "kv")
    partial = (await taking)[one.id]
    assert isinstance(partial, Partial) and partial.kv_key
    await forget_prefixes(engine)
    await engine.drain()
    moved = {key: result async for key, result in engine.generate([one, other], long, {one.id: partial})}
    assert tokens(moved) == tokens(stayed)
    cached = await cached_tokens(engine)
    assert cached[one.id] > len(one.prompt.token_ids) - 32 and cached[other.id] == 0


# New weights -----------------------------------------------------------------------------------------------------


async def test_text_is_embedded_with_the_current_weights(engine, ask, folder, trainer):
    sync = WeightPush(Exporter(trainer, 1 << 20), [engine], bucket_mb=1)
    model = load_policy(str(folder), model_config(folder)).eval()
    one, running = ask(70), ask(71)
    before = await collect(engine, [one], GREEDY)

    taking = asyncio.create_task(collect(engine, [running], Sampling(1.0, 1.0, -1, 250)))
    while (await engine.load()).running == 0:
        await asyncio.sleep(0.002)
    sync._version = 1
    await sync._serve([engine])  # equal weights: running requests restart with the same result
    response = (await taking)[running.id]
    np.testing.assert_allclose(response.log_probs, expected(model, running, response.token_ids), atol=1e-4)

    await call(trainer.change.remote(0.9), "trainer", "change", 240)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    await sync.push(2)
    await engine.drain()
    after = await collect(engine, [one], GREEDY)
    assert (await cached_tokens(engine))[one.id] == 0
    assert tokens(after) != tokens(before)
    np.testing.assert_allclose(after[one.id].log_probs, expected(model, one, after[one.id].token_ids), atol=1e-4)


# Refusals --------------------------------------------------------------------------------------------------------


def changed(sample: Sample, **fields) -> Sample:
    [clip] = sample.prompt.visual
    return replace(sample, prompt=replace(sample.prompt, visual=(replace(clip, **fields),)))


async def test_prompts_that_do_not_fit_are_refused_at_once(engine, ask, clips):
    one = ask(80)
    long = ask(80, 0, "<video>" + "x" * 400)
    size = len(long.prompt.token_ids)
    narrow = clips("narrow", torch.zeros(PLAN.tokens, 64))
    short = clips("short", torch.zeros(39, 128))
    broken = clips("broken", torch.full((PLAN.tokens, 128), torch.nan))
    gone = replace(one.prompt.visual[0].source, path="/nowhere")
    bare = replace(one, prompt=replace(one.prompt, visual=()))
    for refused, reason in (
        (long, rf"{size} prompt tokens \(40 of them visual\), but prompt and response must fit into 512"),
        (changed(one, source=None), "clip.mp4 has no embedding"),
        (changed(one, source=narrow), "of width 64, but the model's is 128"),
        (changed(one, source=short), "embedding of 39 tokens, a plan of 40 and 40 positions"),
        (changed(one, positions=one.prompt.visual[0].positions[1:]), "a plan of 40 and 39 positions"),
        (changed(one, source=gone), "is not at /nowhere"),
        (changed(one, source=broken), r"the embedding of clip.mp4 \(broken\) contains NaN"),
        (bare, "40 visual placeholders in its prompt, but its clips have 0 positions"),
    ):
        with pytest.raises(EngineError, match=reason):
            await collect(engine, [refused], GREEDY)
    assert len(await collect(engine, [one], GREEDY)) == 1
