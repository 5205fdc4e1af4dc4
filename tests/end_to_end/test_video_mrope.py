"""A small Qwen2.5-VL with embeddings from outside: a real engine and trainer agree, at every frame rate and after
training; caches, refusals."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
import trainer_probe
from pipelines import Anywhere
from rollouts import collect, drained, model_config, new_handle, settings
from transformers import Qwen2_5_VLForConditionalGeneration

from rlfuse.engines.trainer.trainer_group import TrainerGroup
from rlfuse.engines.weights.sync import WeightPush
from rlfuse.errors import EngineError
from rlfuse.protocols import Sampling
from rlfuse.samples import Embedding, Partial, Prompt, Sample, Visual, sample_seed
from rlfuse.tasks.small_video_models import SmallModel, write_small_qwen25_vl
from rlfuse.video.checkpoints import join_checkpoint
from rlfuse.video.embedding import write_rows
from rlfuse.video.images import ImageFacts, plan_image
from rlfuse.video.models.base import m_rope
from rlfuse.video.plan import SEED_TIMES, Geometry, VideoPlan
from rlfuse.video.processor_sampling import PixelBounds

PAIRS = Geometry(temporal_patch=2)
WARM = Sampling(1.0, 1.0, -1, 24)


def plan_at(fps: float) -> VideoPlan:
    """8 frames of 112 x 56 pixels: 4 temporal patches of 8 tokens."""
    return VideoPlan(tuple(i / fps for i in range(8)), 112, 56, fps, 8, Geometry(temporal_patch=2), timestamps=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_small_qwen25_vl(tmp_path_factory.mktemp("models") / "qwen25-vl", SmallModel(tied=True))


@pytest.fixture(scope="module")
def model(folder):
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
async def engine(ray_cluster, folder):
    handle = new_handle(22)
    await handle.start(model_config(folder), settings(), 512, "cpu")
    yield handle
    await handle.stop()
    ray.kill(handle.actor)


@pytest.fixture(scope="module")
def ask(model, tmp_path_factory):
    at = tmp_path_factory.mktemp("embeddings")

    def make(clip: int, fps: float = 2.0, sibling: int = 0, version: str = "a") -> Sample:
        plan, path = plan_at(fps), at / f"{clip}-{fps}-{version}"
        if not path.exists():
            path.touch()
            rows = torch.randn(plan.tokens, 128, generator=torch.Generator().manual_seed(clip + len(version)))
            write_rows(str(path), 0, rows)
        config, text = model.config, np.random.default_rng(clip).integers(2, 200, 40)
        ids = [config.vision_start_token_id, *[config.video_token_id] * plan.tokens, config.vision_end_token_id]
        source = Embedding(path.name, str(path), plan.tokens, 128)
        shown = Visual(np.arange(21, 21 + plan.tokens), source, "clip.mp4", plan)
        prompt = Prompt(clip, np.array([*text[:20], *ids, *text[20:]], np.int32), "", (), "test", None, visual=(shown,))
        return Sample(prompt, 1, sibling, sample_seed(0, 1, clip, sibling))

    return make


def expected(model, sample: Sample, tokens: np.ndarray) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate([sample.prompt.token_ids, tokens])).long()
    visual, start = sample.prompt.visual, len(sample.prompt.token_ids)
    at = torch.from_numpy(m_rope(model.config).positions(len(ids), visual))[:, None]
    with torch.no_grad():
        rows = model.get_input_embeddings()(ids)
        for each in visual:
            rows[torch.from_numpy(each.positions)] = each.source.read().float()
        logits = model(inputs_embeds=rows[None], position_ids=at).logits[0, start - 1 : -1]
    logits[:, [model.config.image_token_id, model.config.video_token_id]] = -torch.inf
    return logits.log_softmax(-1).gather(1, ids[start:, None])[:, 0].numpy()


async def test_log_probs_are_those_of_the_model_at_every_frame_rate(engine, ask, model):
    samples = [ask(i, fps) for i, fps in enumerate((2.0, 1.0, 0.7, 5.0))]
    responses = await collect(engine, samples, WARM)
    for one in samples:
        response = responses[one.id]
        np.testing.assert_allclose(response.log_probs, expected(model, one, response.token_ids), atol=1e-4)


async def test_log_probs_of_images_beside_a_clip_are_those_of_the_model(engine, ask, model):
    """Two images of different sizes, a clip and another image, in one prompt."""
    clip, config = ask(50), model.config
    [shown] = clip.prompt.visual
    ids, visual = list(range(5, 15)), []
    for number, (height, width) in enumerate(((56, 84), (112, 56), (0, 0), (28, 28))):
        one = shown
        if height:
            plan = plan_image(ImageFacts(height, width), PixelBounds(min_pixels=784, max_pixels=10**6), PAIRS)
            path = Path(shown.source.path).with_name(f"image-{number}")
            path.touch()
            write_rows(str(path), 0, torch.randn(plan.tokens, 128, generator=torch.Generator().manual_seed(number)))
            one = Visual(None, Embedding(path.name, str(path), plan.tokens, 128), f"{number}.png", plan)
        pad = config.image_token_id if height else config.video_token_id
        ids.append(config.vision_start_token_id)
        visual.append(replace(one, positions=np.arange(len(ids), len(ids) + one.plan.tokens)))
        ids += [pad] * one.plan.tokens + [config.vision_end_token_id, 7, 8, 9]
    prompt = replace(clip.prompt, token_ids=np.array(ids, np.int32), visual=tuple(visual))
    mixed = replace(clip, prompt=prompt)
    response = (await collect(engine, [mixed, ask(51)], WARM))[mixed.id]
    np.testing.assert_allclose(response.log_probs, expected(model, mixed, response.token_ids), atol=1e-4)


async def test_siblings_share_and_other_clips_and_towers_do_not(engine, ask):
    await engine.drain()
    group = [ask(10, sibling=sibling) for sibling in range(3)]
    stayed = await collect(engine, group, WARM)
    await collect(engine, [replace(ask(11), sibling=5), replace(ask(10, version="next"), sibling=6)], WARM)
    cached = {span.samples[0]: span.attributes["cached_tokens"] for span in await drained(engine, "generate")}
    assert sorted(cached[one.id] for one in group) == [0, 64, 64]
    assert cached["1/11/5"] == 0 and cached["1/10/6"] == 0
    one = group[1]
    partial = Partial(stayed[one.id].token_ids[:9], stayed[one.id].log_probs[:9], 0)
    moved = {key: response async for key, response in engine.generate([one], WARM, {one.id: partial})}
    assert moved[one.id].token_ids.tolist() == stayed[one.id].token_ids.tolist()


async def test_a_plan_with_timestamps_is_refused(engine, ask):
    one = ask(20)
    [clip] = one.prompt.visual
    visual = (replace(clip, plan=replace(clip.plan, timestamps=SEED_TIMES)),)
    with pytest.raises(EngineError, match=r"clip\.mp4 can't go to vLLM: .*without timestamps"):
        await collect(engine, [replace(one, prompt=replace(one.prompt, visual=visual))], WARM)


# Training ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
async def trainer(folder, slots):
    config = trainer_probe.settings(str(folder), budget=4096)
    config.trainer.n_gpus_per_node, config.rollout.update_weights_bucket_mb = 1, 1
    group = (await TrainerGroup.start(config, Anywhere(slots.group, 1, "cpu"), optimizer_steps=10))[0]
    yield group
    ray.kill(group.ranks[0])


def rows_of(samples, responses):
    """With something to train on."""

    def row(one):
        response = replace(one, response=responses[one.id])
        ones = np.ones(len(response.response.token_ids), np.float32)
        names = ("advantages", "ref_log_probs", "values", "returns")
        response.tensors |= {name: ones for name in names} | {"old_log_probs": response.response.log_probs}
        return response.row(*response.tensors)

    return [row(one) for one in samples]


async def test_what_was_trained_is_what_generates_and_becomes_a_whole_model_again(
    engine, trainer, ask, model, folder, tmp_path
):
    samples = [ask(30, 2.0), ask(30, 2.0, 1), ask(31, 0.7)]
    before = await collect(engine, samples, WARM)
    rows = rows_of(samples, before)
    old = [expected(model, one, before[one.id].token_ids) for one in samples]
    for found, wanted in zip(await trainer.log_probs("ref", rows), old, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    for name in ("actor", "critic"):
        await trainer.accumulate(name, rows)
        await trainer.step(name, trainer_probe.lengths(rows))
    await WeightPush(trainer, [engine], bucket_mb=1).push(1)
    await trainer.save(tmp_path)

    whole = join_checkpoint(tmp_path / "actor" / "huggingface", folder, tmp_path / "whole")
    trained = Qwen2_5_VLForConditionalGeneration.from_pretrained(whole, dtype=torch.float32).eval()
    after = await collect(engine, samples, WARM)
    scored = await trainer.log_probs("actor", rows_of(samples, after))
    for one, found, was in zip(samples, scored, old, strict=True):
        tokens = after[one.id].token_ids
        np.testing.assert_allclose(found, expected(trained, one, tokens), atol=1e-5)
        np.testing.assert_allclose(after[one.id].log_probs, found, atol=1e-4)
        assert np.abs(expected(trained, one, before[one.id].token_ids) - was).max() > 0.01
