"""A real engine of a small Qwen2.5-VL on embeddings from outside: positions at every frame rate, caches, refusals."""

from dataclasses import replace

import numpy as np
import pytest
import ray
import torch
from test_rollout import collect, drained, model_config, new_handle, settings
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from rlfuse.engines.protocols import EngineError, Sampling
from rlfuse.samples import Partial, Prompt, Sample, Video, sample_seed
from rlfuse.video.checkpoints import byte_tokenizer
from rlfuse.video.embedding import Embedding, write_rows
from rlfuse.video.plan import Geometry, VideoPlan

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
WARM = Sampling(1.0, 1.0, -1, 24)


def plan_at(fps: float) -> VideoPlan:
    """8 frames of 112 x 56 pixels: 4 temporal patches of 8 tokens."""
    return VideoPlan(tuple(i / fps for i in range(8)), 112, 56, fps, 8, Geometry(temporal_patch=2), timestamps=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "qwen25-vl"
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(SPECIAL))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    text = dict(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.15, rope_parameters=rope,
        tie_word_embeddings=False, eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    vision = dict(
        depth=1, hidden_size=64, intermediate_size=64, num_heads=2, out_hidden_size=128, fullatt_block_indexes=[0]
    )
    ids = dict(image_token_id=image, video_token_id=video, vision_start_token_id=start, vision_end_token_id=end)
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(path)
    frames = Qwen2VLVideoProcessor(cap_pixels_per_frame=False)
    processor = Qwen2_5_VLProcessor(Qwen2VLImageProcessor(), tokenizer, frames, chat_template="{{messages}}")
    processor.save_pretrained(path)
    return path


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
        video = Video(
            "clip.mp4", plan, np.arange(21, 21 + plan.tokens), Embedding(path.name, str(path), plan.tokens, 128)
        )
        prompt = Prompt(clip, np.array([*text[:20], *ids, *text[20:]], np.int32), "", (), "test", None, video=video)
        return Sample(prompt, 1, sibling, sample_seed(0, 1, clip, sibling))

    return make


def positions(sample: Sample, length: int, per_second: float) -> torch.Tensor:
    """int64 [3, 1, length], as vLLM has them: text goes on one after the largest position of the clip."""
    video = sample.prompt.video
    start, patches = int(video.positions[0]), video.plan.temporal_patches
    rows, columns = (side // video.plan.geometry.merge for side in video.plan.grid[1:])
    seconds = video.plan.seconds_per_temporal_patch
    clip = [
        (int(t * seconds * per_second), row, column)
        for t in range(patches)
        for row in range(rows)
        for column in range(columns)
    ]
    before = torch.arange(start).expand(3, -1)
    inside = torch.tensor(clip).T + start
    after = torch.arange(length - start - len(clip)).expand(3, -1) + inside.max() + 1
    return torch.cat([before, inside, after], 1)[:, None]


def expected(model, sample: Sample, tokens: np.ndarray) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate([sample.prompt.token_ids, tokens])).long()
    video, start = sample.prompt.video, len(sample.prompt.token_ids)
    at = positions(sample, len(ids), model.config.vision_config.tokens_per_second)
    with torch.no_grad():
        rows = model.get_input_embeddings()(ids)
        rows[torch.from_numpy(video.positions)] = video.embedding.read().float()
        logits = model(inputs_embeds=rows[None], position_ids=at).logits[0, start - 1 : -1]
    logits[:, [model.config.image_token_id, model.config.video_token_id]] = -torch.inf
    return logits.log_softmax(-1).gather(1, ids[start:, None])[:, 0].numpy()


async def test_log_probs_are_those_of_the_model_at_every_frame_rate(engine, ask, model):
    samples = [ask(i, fps) for i, fps in enumerate((2.0, 1.0, 0.7, 5.0))]
    responses = await collect(engine, samples, WARM)
    for one in samples:
        response = responses[one.id]
        np.testing.assert_allclose(response.log_probs, expected(model, one, response.token_ids), atol=1e-4)


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
    video = replace(one.prompt.video, plan=replace(one.prompt.video.plan, timestamps=True))
    with pytest.raises(EngineError, match=r"clip\.mp4 can't go to vLLM: .*timestamps=False"):
        await collect(engine, [replace(one, prompt=replace(one.prompt, video=video))], WARM)
