"""A tower trained with the actor: real clips, encoder ranks and DeepSpeed ranks, against the whole Hugging Face model."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from trainer_probe import Probe, distance, make_rows, settings
from transformers import VideoLlama3ForConditionalGeneration

from rlfuse.cluster.placement import worker_environment
from rlfuse.engines.trained_tower import TowerSettings
from rlfuse.samples import Visual
from rlfuse.tasks.clips import draw_scene, write_clip
from rlfuse.video.checkpoints import export_text_model, write_small_video_llama3
from rlfuse.video.decode_pool import DecodePool
from rlfuse.video.encoder_handle import Place
from rlfuse.video.encoder_rank import EncoderSettings
from rlfuse.video.encoding import Clip, SequenceParallelEncoder
from rlfuse.video.placeholders import placeholder_ids
from rlfuse.video.plan import FixedSampling, plan_video
from rlfuse.video.store import CacheSettings
from rlfuse.video.towers import Tower

FRAMES = (7, 5)
"""Of the two clips; a frame is 4 tokens, two frames are encoded at a time, six decoded."""


class TowerProbe(Probe):
    """Takes configurations of a trained tower."""

    async def take(self, config):
        def reload(rank, config, tower):
            rank.config = config
            rank.setup(10, tower)

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
    """Configurations in which the tower learns."""
    text = str(export_text_model(folder, tmp_path_factory.mktemp("models") / "text"))

    def make(stage=1, budget=64, degree=1, **more):
        config = settings(text, stage, budget=budget, **more)
        config.video.freeze_tower, config.training.ulysses_sequence_parallel_size = False, degree
        return config

    return make


@pytest.fixture(scope="module")
async def started(slots, trained, tower_settings):
    """An encoder rank and two trainer ranks, started side by side."""
    environment = worker_environment("cpu")
    place = Place({"num_cpus": 0, "runtime_env": {"env_vars": environment}})
    cache = CacheSettings(1 << 24)
    encoder = SequenceParallelEncoder(
        tower_settings.encoder, cache, tower_settings.pool.decode, [place], 120.0, environment
    )
    (group, _), _ = await asyncio.gather(
        TowerProbe.start(trained(degree=2), slots, 10, tower=tower_settings), encoder.start()
    )
    group.tower = tower_settings
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
    assert [clip.plan.tokens for clip in found] == [4 * frames for frames in FRAMES]
    return found


async def rows_of(encoder, clips, holder="test"):
    """Six rows: two show the first clip behind one prompt, one behind another, two the second; one shows none."""
    embeddings = await encoder.encode(clips, holder)
    rows = make_rows(6, seed=1)
    placeholder = 259  # of the small model, see `byte_tokenizer`

    def show(row, prompt, which):
        clip, count = clips[which], clips[which].plan.tokens
        ids = np.concatenate([prompt, np.full(count, placeholder), prompt[::-1]]).astype(np.int32)
        at = np.arange(len(prompt), len(prompt) + count, dtype=np.int32)
        return replace(row, prompt_ids=ids, visual=(Visual(at, embeddings[which], clip.path, clip.plan),))

    shared = rows[0].prompt_ids
    return [
        show(rows[0], shared, 0), show(rows[1], shared, 0), show(rows[2], rows[2].prompt_ids, 0),
        show(rows[3], rows[3].prompt_ids, 1), show(rows[4], rows[3].prompt_ids, 1), rows[5],
    ]  # fmt: skip


def around(rows, log_probs):
    """Old and reference log-probs that lie about where the policy's are."""
    names = ("old_log_probs", "ref_log_probs")
    return [
        replace(row, tensors=row.tensors | {name: row.tensors[name] + 4 + array for name in names})
        for row, array in zip(rows, log_probs, strict=True)
    ]


def reference(folder, rows):
    """{name as the policy has it: gradient} of the whole model by plain autograd, one sequence at a time."""
    model, tower = VideoLlama3ForConditionalGeneration.from_pretrained(folder), Tower(folder)
    losses = []
    for row in rows:
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64))[None]
        embedded = model.get_input_embeddings()(ids)
        for visual in row.visual:
            frames = DecodePool_decode(visual)
            patches, grid = tower._patches(tower.pixels.normalise(frames))
            seen = {"pixel_values_videos": patches, "video_grid_thw": grid, "video_merge_sizes": torch.tensor([2])}
            features = model.get_video_features(**seen).pooler_output[0]
            features = features + (features.bfloat16().float() - features).detach()
            embedded = embedded.index_copy(1, torch.from_numpy(visual.positions).long(), features[None])
        logits = model(inputs_embeds=embedded).logits[0, len(row.prompt_ids) - 1 : -1]
        logits = logits.index_fill(-1, torch.tensor(placeholder_ids(model.config)), -torch.inf)
        log_p = logits.log_softmax(-1)
        logp = log_p.gather(-1, ids[0, len(row.prompt_ids) :, None])[:, 0]
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


def DecodePool_decode(visual):
    from rlfuse.video.decoding import decode

    return torch.from_numpy(decode(visual.path, visual.plan))


def policy_name(name):
    if name.startswith(("model.vision_model.", "model.projector.")):
        return name.replace("model.", "tower.", 1)
    return name.replace("language_model.", "")


@pytest.mark.parametrize("stage, degree", [(0, 1), (1, 2), (2, 1), (3, 2)])
async def test_gradients_are_those_of_the_whole_model(started, trained, folder, clips, stage, degree):
    group, encoder = started
    await group.take(trained(stage, 48 if degree == 1 else 24, degree))
    rows = await rows_of(encoder, clips)
    rows = around(rows, await group.log_probs("actor", rows))
    metrics = await group.update("actor", rows)
    gradients = await group.gradients()
    expected = reference(folder, rows)
    assert any(name.startswith("tower.") for name in expected)
    for name, gradient in expected.items():
        print(name, (gradients[name] - gradient).norm() / gradient.norm())
    assert distance(gradients, expected) < 1e-5
