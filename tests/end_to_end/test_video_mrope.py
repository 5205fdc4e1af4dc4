"""Small Qwen2.5-VL and Qwen3-VL models with precomputed embeddings: a real engine and trainer agree at every frame
rate and after training; prefix caches; refused prompts."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
import ray
import torch
import trainer_probe
from pipelines import Anywhere
from rollouts import (
    assert_drafts_change_nothing,
    collect,
    drained,
    model_config,
    new_handle,
    release,
    settings,
    write_repeating,
)
from transformers import AutoModelForImageTextToText, AutoTokenizer

from rlfuse.engines.trainer.trainer_group import TrainerGroup
from rlfuse.engines.weights.sync import WeightPush
from rlfuse.errors import EngineError
from rlfuse.protocols import Sampling
from rlfuse.samples import Embedding, Partial, Prompt, Sample, Visual, sample_seed
from rlfuse.tasks.small_video_models import SmallModel, write_small_qwen3_vl, write_small_qwen25_vl
from rlfuse.video.checkpoints import join_checkpoint
from rlfuse.video.embedding import write_rows
from rlfuse.video.images import ImageMetadata, plan_image
from rlfuse.video.models.base import embedding_width, m_rope
from rlfuse.video.plan import SEED_TIMES, VideoPlan
from rlfuse.video.processor_sampling import PixelBounds
from rlfuse.video.video_model import VideoModel

WARM = Sampling(1.0, 1.0, -1, 24)
WRITERS = {"qwen25_vl": write_small_qwen25_vl, "qwen3_vl": write_small_qwen3_vl}


@pytest.fixture(scope="module", params=WRITERS)
def folder(request, tmp_path_factory):
    return WRITERS[request.param](tmp_path_factory.mktemp("models") / request.param, SmallModel(tied=True))


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
async def engine(ray_cluster, folder):
    handle = new_handle(22)
    await handle.start(model_config(folder), settings(), 512, "cpu")
    yield handle
    await release(handle)


@pytest.fixture(scope="module")
def ask(folder, model, tmp_path_factory):
    at, video = tmp_path_factory.mktemp("embeddings"), VideoModel.from_pretrained(str(folder))
    tokenizer, geometry = AutoTokenizer.from_pretrained(folder), video.geometry

    def shown(key: str, plan: VideoPlan, seed: int) -> Visual:
        if not (path := at / key).exists():
            path.touch()
            size = plan.tokens, embedding_width(model.config)
            write_rows(str(path), 0, torch.randn(size, generator=torch.Generator().manual_seed(seed)))
        source = Embedding(key, str(path), plan.tokens, embedding_width(model.config))
        return Visual(None, source, f"{plan.modality}.of", plan)

    def make(
        number: int, fps: float = 2.0, sibling: int = 0, version: str = "a", prompt: str = "{}<video>{}"
    ) -> Sample:
        """Fill the prompt's markers: images of different sizes, a clip of 4 temporal patches of 8 tokens, and shorter
        clips."""
        sizes, visual = itertools.cycle([(2, 3), (4, 2), (1, 1)]), []
        for kind in re.findall("<(image|video)>", prompt):
            if kind == "video":
                before = sum(not each.plan.is_image for each in visual)
                times = tuple(i / fps for i in range(8 - 2 * before))
                height, width = 4 * geometry.cell, 2 * geometry.cell
                plan = VideoPlan(times, height, width, fps, 8, geometry, video.family.timestamps)
                visual.append(shown(f"{number}-{fps}-{version}{before or ''}", plan, number + len(version) + before))
            else:
                facts = ImageMetadata(*(side * geometry.cell for side in next(sizes)))
                plan = plan_image(facts, PixelBounds(min_pixels=1, max_pixels=10**6), geometry)
                visual.append(shown(f"image-{plan.tokens}", plan, plan.tokens))
        words = ("".join(np.random.default_rng(number + half).choice(list("abcdefgh?"), 20)) for half in (0, 100))
        text = prompt.format(*words)
        made = video.prompt(tokenizer, text, [each.plan for each in visual])
        visual = (replace(each, positions=places) for each, places in zip(visual, made.positions, strict=True))
        shown_prompt = Prompt(number, made.token_ids, text, (), "test", None, visual=tuple(visual))
        return Sample(shown_prompt, 1, sibling, sample_seed(0, 1, number, sibling))

    return make


def expected(model, sample: Sample, tokens: np.ndarray) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate([sample.prompt.token_ids, tokens])).long()
    visual, start = sample.prompt.visual, len(sample.prompt.token_ids)
    at = torch.from_numpy(m_rope(model.config).positions(len(ids), visual))[:, None]
    with torch.no_grad():
        rows, fed = model.get_input_embeddings()(ids), {}
        width = rows.shape[-1]
        if visual:
            places = torch.from_numpy(np.concatenate([each.positions for each in visual])).long()
            features = torch.cat([each.source.read().float() for each in visual])
            rows[places] = features[:, :width]
            if levels := features.split(width, dim=1)[1:]:
                shown = torch.zeros(1, len(ids), dtype=torch.bool).index_fill(1, places, True)
                fed = {"visual_pos_masks": shown, "deepstack_visual_embeds": list(levels)}
        hidden = model.model.language_model(inputs_embeds=rows[None], position_ids=at, **fed).last_hidden_state
        logits = model.lm_head(hidden)[0, start - 1 : -1]
    logits[:, [model.config.image_token_id, model.config.video_token_id]] = -torch.inf
    return logits.log_softmax(-1).gather(1, ids[start:, None])[:, 0].numpy()


async def test_log_probs_equal_those_of_the_model_at_every_frame_rate(engine, ask, model):
    """Also for text before, between and after clips."""
    samples = [ask(i, fps) for i, fps in enumerate((2.0, 1.0, 0.7, 5.0))]
    texts = [ask(i, prompt="{}{}") for i in (5, 6)]
    responses = await collect(engine, [*samples, texts[0]], WARM) | await collect(engine, texts[1:], WARM)
    for one in (*samples, *texts):
        response = responses[one.id]
        np.testing.assert_allclose(response.log_probs, expected(model, one, response.token_ids), atol=1e-4)


async def test_drafts_change_no_token(ray_cluster, folder, ask, tmp_path):
    """Draft tokens get the rotary positions of text after a clip."""
    model = write_repeating(WRITERS[folder.name](tmp_path / "model", SmallModel()), tmp_path / "repeating")
    samples = [ask(60 + i, prompt="{}<video>{}") for i in range(8)]
    samplings = [replace(WARM, max_tokens=300), replace(WARM, max_tokens=300, temperature=0.7)]
    for responses in await assert_drafts_change_nothing(23, model, samples, samplings, "history"):
        assert sum(len(response.token_ids) for response in responses.values()) > 500


async def test_log_probs_of_images_with_a_clip_equal_those_of_the_model(engine, ask, model):
    """Two images of different sizes, a clip and another image, in one prompt."""
    mixed = ask(50, prompt="{}<image>and <image>, then <video>{}<image>?")
    response = (await collect(engine, [mixed, ask(51)], WARM))[mixed.id]
    np.testing.assert_allclose(response.log_probs, expected(model, mixed, response.token_ids), atol=1e-4)


async def test_log_probs_of_several_clips_equal_those_of_the_model(engine, ask, model):
    """Clips of different lengths and rates, and images; the first clip has more temporal than spatial positions."""
    samples = [
        ask(52, 0.7, prompt="{}<video>, <video>{}"),
        ask(53, 2.0, prompt="{}<video><video>{}<video>"),
        ask(54, 5.0, prompt="<video>{}<image><video>{}<image>"),
    ]
    responses = await collect(engine, [*samples, ask(55)], WARM)
    for one in samples:
        assert sum(not each.plan.is_image for each in one.prompt.visual) > 1
        found = responses[one.id]
        np.testing.assert_allclose(found.log_probs, expected(model, one, found.token_ids), atol=1e-4)


async def test_prefixes_are_shared_within_a_group_but_not_across_clips_and_towers(engine, ask):
    await engine.drain()
    group = [ask(10, sibling=sibling) for sibling in range(3)]
    stayed = await collect(engine, group, WARM)
    await collect(engine, [replace(ask(11), rollout_index=5), replace(ask(10, version="next"), rollout_index=6)], WARM)
    cached = {span.samples[0]: span.attributes["cached_tokens"] for span in await drained(engine, "generate")}
    whole_blocks = (len(group[0].prompt.token_ids) - 1) // 32 * 32
    assert sorted(cached[one.id] for one in group) == [0, whole_blocks, whole_blocks]
    assert cached["1/11/5"] == 0 and cached["1/10/6"] == 0
    one = group[1]
    partial = Partial(stayed[one.id].token_ids[:9], stayed[one.id].log_probs[:9], 0)
    moved = {key: response async for key, response in engine.generate([one], WARM, {one.id: partial})}
    assert moved[one.id].token_ids.tolist() == stayed[one.id].token_ids.tolist()


async def test_a_plan_with_other_timestamps_is_refused(engine, ask):
    one = ask(20)
    [clip] = one.prompt.visual
    visual = (replace(clip, plan=replace(clip.plan, timestamps=SEED_TIMES)),)
    with pytest.raises(EngineError, match=r"video\.of can't be passed to vLLM: .* into the prompt: plan the clip with"):
        await collect(engine, [replace(one, prompt=replace(one.prompt, visual=visual))], WARM)


# Training ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
async def trainer(folder, slots):
    config = trainer_probe.settings(str(folder), budget=4096)
    config.trainer.n_gpus_per_node, config.rollout.update_weights_bucket_mb = 1, 1
    group = (await TrainerGroup.start(config, Anywhere(slots.group, 1, "cpu")))[0]
    yield group
    ray.kill(group.ranks[0])


def rows_of(samples, responses):
    """Return rows with training tensors."""

    def row(one):
        response = replace(one, response=responses[one.id])
        ones = np.ones(len(response.response.token_ids), np.float32)
        names = ("advantages", "ref_log_probs", "values", "returns")
        response.tensors |= {name: ones for name in names} | {"old_log_probs": response.response.log_probs}
        return response.row(*response.tensors)

    return [row(one) for one in samples]


async def test_trained_weights_are_used_for_generation_and_exported_as_a_whole_model(
    engine, trainer, ask, model, folder, tmp_path
):
    samples = [ask(30, 2.0), ask(30, 2.0, 1), ask(31, 0.7)]
    before = await collect(engine, samples, WARM)
    rows = rows_of(samples, before)
    old = [expected(model, one, before[one.id].token_ids) for one in samples]
    for found, wanted in zip(await trainer_probe.scores_of(trainer, "ref", rows), old, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    for name in ("actor", "critic"):
        await trainer.accumulate((name,), rows)
        await trainer.step(name, trainer_probe.lengths(rows))
    await WeightPush(trainer, [engine], bucket_mb=1).push(1)
    await trainer.save(tmp_path)

    whole = join_checkpoint(tmp_path / "actor" / "huggingface", folder, tmp_path / "whole")
    trained = AutoModelForImageTextToText.from_pretrained(whole, dtype=torch.float32).eval()
    after = await collect(engine, samples, WARM)
    scored = await trainer_probe.scores_of(trainer, "actor", rows_of(samples, after))
    for one, found, was in zip(samples, scored, old, strict=True):
        tokens = after[one.id].token_ids
        np.testing.assert_allclose(found, expected(trained, one, tokens), atol=1e-5)
        np.testing.assert_allclose(after[one.id].log_probs, found, atol=1e-4)
        assert np.abs(expected(trained, one, before[one.id].token_ids) - was).max() > 0.01
