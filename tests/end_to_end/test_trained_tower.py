"""A vision tower trained with the actor on real clips, an image, encoder and DeepSpeed ranks, against Hugging Face."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file
from trainer_probe import Probe, distance, lengths, make_rows, only_the_policy_loss, scores_of, settings
from transformers import AutoModelForCausalLM, VideoLlama3ForConditionalGeneration

from rlfuse.cluster.worker_environment import worker_environment
from rlfuse.engines.trainer.sequence_parallel_packing import Costs, Overhead
from rlfuse.engines.trainer.vision_tower import TowerSettings
from rlfuse.errors import EngineError
from rlfuse.samples import Visual
from rlfuse.tasks.clips import draw_scene, write_clip, write_image
from rlfuse.tasks.small_video_models import VIDEO, byte_tokenizer, write_small_video_llama3
from rlfuse.video.cache import CacheSettings
from rlfuse.video.decode_pool import DecodePool
from rlfuse.video.decoding import decode
from rlfuse.video.encoder_handle import EncoderPlacement
from rlfuse.video.encoder_rank import EncoderSettings
from rlfuse.video.encoding import Clip, SequenceParallelEncoder
from rlfuse.video.images import ImageMetadata, plan_image, read
from rlfuse.video.models.video_llama_3 import VideoLlama3
from rlfuse.video.placeholders import placeholder_ids
from rlfuse.video.plan import FixedSampling, Geometry, plan_video
from rlfuse.video.processor_sampling import PixelBounds
from rlfuse.video.towers import Tower

FRAMES = (7, 5)
"""Frames of the two clips; 4 tokens per frame, two frames per encoder call, six per decoder call."""


class TowerProbe(Probe):
    """Trainer with a trained tower that can load one configuration after the other."""

    async def take(self, config):
        def reload(rank, config, tower):
            rank.config = config
            rank.setup(tower)

        self.config = config
        self._accumulated = {"actor": [], "critic": []}
        await asyncio.gather(*(rank.__ray_call__.remote(reload, config, self.tower) for rank in self.ranks))
        return self


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_small_video_llama3(tmp_path_factory.mktemp("models") / "whole")


@pytest.fixture(scope="module")
def tower_settings(folder):
    encoder = EncoderSettings(str(folder), step=2, block_bytes=6 * 56 * 56 * 3)
    return TowerSettings(encoder, DecodePool(timeout_s=30.0))


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """Return a function that makes configurations with a trained tower."""
    text = str(VideoLlama3.export(folder, tmp_path_factory.mktemp("models") / "text"))

    def make(stage=1, budget=64, degree=1, alone=True, **more):
        config = settings(text, stage, budget=budget, alone=alone, **more)
        config.video.freeze_vision_tower, config.training.ulysses_sequence_parallel_size = False, degree
        return config

    return make


@pytest.fixture(scope="module")
async def started(slots, trained, tower_settings):
    """Start an encoder rank and two trainer ranks concurrently."""
    environment = worker_environment("cpu")
    place = EncoderPlacement({"num_cpus": 0, "runtime_env": {"env_vars": environment}})
    cache = CacheSettings(1 << 24)
    encoder = SequenceParallelEncoder(
        tower_settings.encoder, cache, tower_settings.pool.decode, [place], 120.0, environment
    )
    (group, _), _ = await asyncio.gather(
        TowerProbe.start(trained(degree=2), slots, tower=tower_settings), encoder.start()
    )
    group.tower = tower_settings
    group.costs = Costs(
        overheads=dict.fromkeys((2, 4), Overhead(start=1e9))
    )  # use the smallest degree that a row needs
    yield group, encoder
    for rank in group.ranks:
        ray.kill(rank)
    await encoder.close()


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    files = tmp_path_factory.mktemp("clips")
    pool, found = DecodePool(), []
    for number, frames in enumerate(FRAMES):
        path = str(files / f"{number}.mp4")
        write_clip(draw_scene(np.random.default_rng(number), 10.0, 12.0), Path(path))
        [facts] = pool.probe([path])
        found.append(Clip(str(number), path, plan_video(facts, FixedSampling(frames, 4))))
    pool.close()
    write_image(draw_scene(np.random.default_rng(2), 10.0, 12.0), image := files / "2.png")
    plan = plan_image(ImageMetadata(28, 28), PixelBounds(min_pixels=1, max_pixels=10**6), Geometry(merge=1))
    found.append(Clip("2", str(image), plan))
    assert [clip.plan.tokens for clip in found] == [*(4 * frames for frames in FRAMES), 4]
    return found


def show(rows, clips, embeddings):
    """Return rows: three with the first clip, two of which share a prompt; two with the second clip and an image; one
    without media."""
    placeholder = byte_tokenizer().convert_tokens_to_ids(VIDEO)

    def one(row, prompt, which):
        visual, end = [], len(prompt)
        for clip, embedding in [(clips[each], embeddings[each]) for each in which]:
            begin, end = end, end + clip.plan.tokens
            visual.append(Visual(np.arange(begin, end, dtype=np.int32), embedding, clip.path, clip.plan))
        ids = np.concatenate([prompt, np.full(end - len(prompt), placeholder), prompt[::-1]]).astype(np.int32)
        return replace(row, prompt_ids=ids, visual=tuple(visual))

    first, _, second, third, _, _ = (row.prompt_ids for row in rows)
    shown = zip(rows, (first, first, second, third, third), ([0], [0], [0], [1, 2], [1, 2]), strict=False)
    return [*(one(*each) for each in shown), rows[5]]


@pytest.fixture(scope="module")
async def rows(started, trained, clips):
    """Return rows with embeddings of the initial tower, and old and reference log-probs near the policy's."""
    group, encoder = started
    rows = show(make_rows(6, seed=1), clips, await encoder.encode(clips, "test"))
    await group.take(trained())
    names = ("old_log_probs", "ref_log_probs")
    return [
        replace(row, tensors=row.tensors | {name: row.tensors[name] + 4 + array for name in names})
        for row, array in zip(rows, await scores_of(group, "actor", rows), strict=True)
    ]


def log_probs_of(model, tower, row):
    """Return float32 log-probs [T] and [T, vocabulary] of the response by the whole model.

    Features are rounded as in caches, with a straight-through gradient.
    """
    ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64))[None]
    embedded = model.get_input_embeddings()(ids)
    for visual in row.visual:
        frames = torch.from_numpy((read if visual.plan.is_image else decode)(visual.path, visual.plan).copy())
        patches, grid = tower._patches(tower.pixels.normalise(frames), visual.plan.merge)
        merge = torch.tensor([visual.plan.merge])
        seen = {"pixel_values_videos": patches, "video_grid_thw": grid, "video_merge_sizes": merge}
        features = model.get_video_features(**seen).pooler_output[0]
        features = features + (features.bfloat16().float() - features).detach()
        embedded = embedded.index_copy(1, torch.from_numpy(visual.positions).long(), features[None])
    logits = model(inputs_embeds=embedded).logits[0, len(row.prompt_ids) - 1 : -1]
    log_p = logits.index_fill(-1, torch.tensor(placeholder_ids(model.config)), -torch.inf).log_softmax(-1)
    return log_p.gather(-1, ids[0, len(row.prompt_ids) :, None])[:, 0], log_p


def reference(model, folder, rows):
    """Return {name in the policy: gradient} by plain autograd, one sequence at a time."""
    tower, losses = Tower(folder), []
    for row in rows:
        logp, log_p = log_probs_of(model, tower, row)
        t = {name: torch.from_numpy(array) for name, array in row.tensors.items()}
        ratio = (logp - t["old_log_probs"]).exp()
        plain, clipped = -t["advantages"] * ratio, -t["advantages"] * ratio.clamp(0.8, 1.2)
        surrogate = torch.maximum(plain, clipped)
        surrogate = torch.where(t["advantages"] < 0, torch.minimum(surrogate, -3.0 * t["advantages"]), surrogate)
        entropy = -(log_p.exp() * log_p.clamp(min=-1e9)).sum(-1)
        log_r = t["ref_log_probs"] - logp
        losses.append(surrogate - 0.01 * entropy + 0.1 * (log_r.exp() - log_r - 1))
    (sum(each.sum() for each in losses) / sum(map(len, losses))).backward()
    return {policy_name(name): p.grad for name, p in model.named_parameters() if p.grad is not None}


def policy_name(name):
    if name.startswith(("model.vision_model.", "model.projector.")):
        return name.replace("model.", "tower.", 1)
    return name.replace("language_model.", "")


@pytest.fixture(scope="module")
def expected(folder, rows):
    return reference(VideoLlama3ForConditionalGeneration.from_pretrained(folder), folder, rows)


@pytest.mark.parametrize("stage, budget, degrees", [(0, 48, {1}), (1, 30, {1, 2}), (3, 30, {1, 2})])
async def test_gradients_equal_those_of_the_whole_model(started, trained, rows, expected, stage, budget, degrees):
    """Whole and sharded rows, shared and separate prompts, ranks with clips, without clips, and with a filler."""
    group, _ = started
    await group.take(trained(stage, budget, max(degrees)))
    await group.drain()
    for part in (rows[:1], rows[1:]):
        await group.accumulate(("actor",), part)
    metrics = await group.step("actor", lengths(rows))
    gradients = await group.gradients()
    assert {name for name in expected if name.startswith("tower.")} and distance(gradients, expected) < 1e-5
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert metrics["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert {span.attributes["degree"] for span in await group.drain() if span.kind == "backward"} == degrees


@pytest.mark.parametrize("stage", [1, 3])
async def test_rows_without_advantage_can_be_skipped(started, trained, rows, stage):
    """Skip all rows, then only those with the first clip."""
    group, _ = started
    zero = [replace(row, tensors=row.tensors | {"advantages": 0 * row.tensors["advantages"]}) for row in rows]
    found = []
    for skip in (False, True):
        await group.take(only_the_policy_loss(trained(stage, 30, 2)))
        norms = []
        for number in (6, 3):
            batch = [*zero[:number], *rows[number:]]
            skipped = batch[:number] if skip else []
            if kept := batch[len(skipped) :]:
                await group.accumulate(("actor",), kept)
            metrics = await group.step("actor", lengths(batch), skipped=lengths(skipped))
            norms.append(metrics["actor/grad_norm"])
        found.append((norms, await group.gradients()))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5) and found[1][0][0] == 0 < found[1][0][1]
    assert distance(found[1][1], found[0][1]) < 1e-5


@pytest.mark.parametrize("stage", [1, 3])
async def test_ratios_are_one_until_the_tower_is_updated_and_correct_afterwards(
    started, trained, rows, folder, tmp_path, stage
):
    group, _ = started
    config = trained(stage, clip=0.5)
    config.actor.optim.lr = 2e-5  # keeps ratios near 1
    await group.take(config)
    old = await scores_of(group, "actor", rows)
    rows = [replace(row, tensors=row.tensors | {"old_log_probs": array}) for row, array in zip(rows, old, strict=True)]
    metrics = await group.update("actor", rows)
    assert metrics["actor/ppo_kl"] == metrics["actor/pg_clipfrac"] == 0.0
    first = await group.gradients()
    await group.save(tmp_path)
    whole = updated_model(folder, tmp_path / "actor" / "huggingface")
    now = await scores_of(group, "actor", rows)
    tower = Tower(folder)
    for row, have, before in zip(rows, now, old, strict=True):
        np.testing.assert_allclose(have, log_probs_of(whole, tower, row)[0].detach(), atol=1e-4)
        assert np.abs(have - before).max() > 1e-2
    await group.update("actor", rows)  # another mini-batch of the same step, whose clips are encoded by the new tower
    second = {name: moment - 0.9 * first[name] for name, moment in (await group.gradients()).items()}
    expected = reference(whole, folder, rows)
    clip = min(1.0, 0.5 / float(torch.stack([gradient.norm() for gradient in expected.values()]).norm()))
    assert distance(second, {name: gradient * clip for name, gradient in expected.items()}) < 2e-5


def updated_model(folder, trained):
    """Return the whole model with the text part and tower of a checkpoint."""
    whole = VideoLlama3ForConditionalGeneration.from_pretrained(folder)
    text = AutoModelForCausalLM.from_pretrained(trained)
    whole.model.language_model, whole.lm_head = text.model, text.lm_head
    missing = whole.load_state_dict(load_file(trained / "tower.safetensors"), strict=False)
    assert not missing.unexpected_keys
    return whole


async def test_a_tower_can_be_transferred_and_resumed(started, trained, rows, clips, tmp_path):
    """Encoder ranks load the new tower, older embeddings are refused, and training resumes bitwise."""
    group, encoder = started
    await group.take(trained(alone=False))
    await group.update("critic", rows)
    await group.update("actor", rows)
    scores = [await scores_of(group, "actor", rows), await scores_of(group, "ref", rows)]
    updates = await group.save_tower(tmp_path / "tower")
    assert updates == 1
    for call in (group.score(("ref",), rows), group.score(("critic",), rows), group.accumulate(("actor",), rows)):
        with pytest.raises(EngineError, match="after 0 updates, but rows need those of the tower after 1 updates"):
            await call
    group._accumulated["actor"] = []
    await encoder.update_tower(tmp_path / "tower", updates)
    embeddings = dict(zip((clip.path for clip in clips), await encoder.encode(clips, "test"), strict=True))
    rows = [
        replace(row, visual=tuple(replace(each, source=embeddings[each.path]) for each in row.visual)) for row in rows
    ]
    # The cache now equals what trainers encode themselves; the KL reference is still the initial tower.
    np.testing.assert_equal([await scores_of(group, "actor", rows), await scores_of(group, "ref", rows)], scores)
    await group.save(tmp_path / "checkpoint")

    async def more():
        metrics = await group.update("actor", rows) | await group.update("critic", rows)
        return metrics, await scores_of(group, "actor", rows), await scores_of(group, "ref", rows)

    expected = await more()
    await group.take(trained(alone=False))
    await group.load(tmp_path / "checkpoint")
    np.testing.assert_equal(await more(), expected)
