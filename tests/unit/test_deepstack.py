"""Qwen3-VL with DeepStack features: prompts equal those of the Hugging Face processor, log-probs and gradients those of
the Hugging Face model from pixels, in every batch layout."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_models import Clip
from test_mrope import as_in_vllm
from transformers import AutoProcessor, AutoTokenizer, Qwen3VLForConditionalGeneration

from rlfuse.config.schema import ModelConfig
from rlfuse.engines.trainer.attention import attends_by_layout
from rlfuse.engines.trainer.model_inputs import collate
from rlfuse.engines.trainer.models import load_critic, load_policy, packs_exactly, response_logits, response_values
from rlfuse.engines.vllm.prompts import Prompts
from rlfuse.samples import Embedding, Row, Visual
from rlfuse.tasks.small_video_models import SmallModel, write_small_qwen3_vl
from rlfuse.video.embedding import write_rows
from rlfuse.video.images import ImageMetadata, plan_image
from rlfuse.video.models.base import m_rope
from rlfuse.video.models.qwen3_vl import Qwen3VL
from rlfuse.video.plan import VideoPlan
from rlfuse.video.processor_sampling import PixelBounds
from rlfuse.video.towers import Tower
from rlfuse.video.video_model import VideoModel

pytest.importorskip("torchvision", reason="the model's own processor needs it")
SETTINGS = ModelConfig(dtype="float32", enable_gradient_checkpointing=False)
TEXT = "Look <image> and <video> then <image>. Or <video>?"
WAYS = [dict(packed=True), dict(packed=False), dict(packed=True, shared=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_small_qwen3_vl(tmp_path_factory.mktemp("models") / "whole", SmallModel(layers=3))


@pytest.fixture(scope="module")
def whole(folder):
    return Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def policy(folder):
    return load_policy(str(folder), SETTINGS).eval()


def pixels(count, height, width):
    generator = torch.Generator().manual_seed(height)
    return torch.randint(0, 256, (count, height, width, 3), dtype=torch.uint8, generator=generator)


PICTURES = [pixels(1, 64, 32), pixels(7, 96, 64), pixels(1, 32, 96), pixels(4, 64, 128)]


@pytest.fixture(scope="module")
def shown(folder):
    """Return (token ids, visuals with their tower features in float32) of a prompt with two images and two clips."""
    model, tower = VideoModel.from_pretrained(str(folder)), Tower(folder)
    bounds, geometry = PixelBounds(min_pixels=1, max_pixels=10**6), model.geometry
    times = tuple(i / 2 for i in (*range(7), 6))
    clip = VideoPlan(times, 96, 64, 2.0, 6, geometry, Qwen3VL.timestamps)
    other = VideoPlan((0.0, 0.5, 1.0, 1.5), 64, 128, 2.0, 8, geometry, Qwen3VL.timestamps)
    images = [plan_image(ImageMetadata(*sides), bounds, geometry) for sides in ((64, 32), (32, 96))]
    plans = [images[0], clip, images[1], other]
    prompt = model.prompt(AutoTokenizer.from_pretrained(folder), TEXT, plans)
    with torch.no_grad():
        features = [tower.encode(each) for each in PICTURES]
    visual = tuple(
        Visual(places, Clip(str(number), rows), plan=plan)
        for number, (places, rows, plan) in enumerate(zip(prompt.positions, features, plans, strict=True))
    )
    return prompt.token_ids, visual


@pytest.fixture(scope="module")
def inputs(folder):
    """Return the output of the model's Hugging Face processor for the same prompt."""
    marked = {f"<{kind}>": f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")}
    text = TEXT
    for marker, words in marked.items():
        text = text.replace(marker, words)
    clips = [each.permute(0, 3, 1, 2) for each in PICTURES[1::2]]
    metadata = [
        {"total_num_frames": count, "fps": 2.0, "duration": count / 2, "frames_indices": list(range(count))}
        for count in map(len, clips)
    ]
    return AutoProcessor.from_pretrained(folder)(
        text=[text], images=[PICTURES[0][0].permute(2, 0, 1), PICTURES[2][0].permute(2, 0, 1)], videos=clips,
        video_metadata=metadata, do_resize=False, do_sample_frames=False, return_tensors="pt",
    )  # fmt: skip


def test_prompt_and_positions_equal_those_of_transformers(whole, shown, inputs):
    ids, visual = shown
    assert ids.tolist() == inputs["input_ids"][0].tolist()
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw")
    expected, _ = whole.model.get_rope_index(**{name: inputs[name] for name in names})
    np.testing.assert_array_equal(m_rope(whole.config).positions(len(ids), visual), expected[:, 0])
    clip = visual[1]
    for wrong in (replace(clip, plan=replace(clip.plan, timestamps=None)), replace(clip, positions=clip.positions[1:])):
        with pytest.raises(ValueError, match=r"of grid \(4, 6, 4\) has (24|6) contiguous tokens, got \d+ at"):
            m_rope(whole.config).positions(len(ids), [visual[0], wrong])


@pytest.mark.slow
def test_positions_of_several_clips_equal_those_of_vllm(whole, shown):
    from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration as Served

    ids, visual = shown
    features = [as_in_vllm(each, Qwen3VL.engine_written_span(whole.config, ids, each)[0]) for each in visual]
    expected, _ = Served._get_mrope_input_positions(ids.tolist(), features, whole.config)
    np.testing.assert_array_equal(m_rope(whole.config).positions(len(ids), visual), expected)


def rows_of(shown) -> list[Row]:
    """Return three responses to the prompt, one to a text prompt, and two to another text prompt."""
    ids, visual = shown
    rng, text = np.random.default_rng(0), np.arange(40, 60, dtype=np.int32)
    answers = [rng.integers(5, 200, length).astype(np.int32) for length in (5, 9, 4, 7, 6, 3)]
    prompts = [(ids, visual)] * 3 + [(text, ())] + [(text[::-1], ())] * 2
    return [Row(prompt, answer, {}, "", clips) for (prompt, clips), answer in zip(prompts, answers, strict=True)]


def expected_logits(whole, row: Row, inputs) -> torch.Tensor:
    """Return the logits [T, V] of one row by the Hugging Face model, from pixels."""
    ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids])).long()[None]
    seen = {}
    if row.visual:
        kinds = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, len(row.response_ids)))
        seen = {name: inputs[name] for name in inputs if "pixel" in name or "grid" in name}
        seen["mm_token_type_ids"] = kinds
    logits = whole(input_ids=ids, **seen).logits[0]
    return logits[len(row.prompt_ids) - 1 : -1]


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_logits_and_gradients_equal_those_of_the_whole_model(folder, whole, shown, inputs, way, recomputed):
    policy = load_policy(str(folder), replace(SETTINGS, enable_gradient_checkpointing=recomputed)).train()
    assert attends_by_layout(policy) and packs_exactly(policy, 200, torch.float32, "cpu")
    graded = [
        replace(each, source=Clip(each.source.key, each.source.rows.clone().requires_grad_())) for each in shown[1]
    ]
    rows = rows_of((shown[0], tuple(graded)))
    words = torch.ones(whole.config.text_config.vocab_size, dtype=torch.bool)
    words[[whole.config.image_token_id, whole.config.video_token_id]] = False
    expected = torch.cat([expected_logits(whole, row, inputs) for row in rows])[:, words]
    found = response_logits(policy, collate(rows, **way, rope=m_rope(policy.config)))[:, words]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for model, logits in ((whole, expected), (policy, found)):
        model.zero_grad()
        logits.sin().sum().backward()
    for name, parameter in policy.named_parameters():
        wanted = whole.get_parameter(name).grad
        assert (parameter.grad - wanted).norm() <= 1e-5 * wanted.norm(), name
    levels = torch.cat([each.source.rows.grad for each in graded]).split(128, dim=1)
    assert len(levels) == 3 and all(level.norm() > 0 for level in levels)
    tower = Tower(folder, trainable=True)  # gradients continue through all levels into the tower
    for frames, each in zip(PICTURES, graded, strict=True):
        tower.encode(frames).backward(each.source.rows.grad)
    for name, parameter in tower.module.named_parameters():
        wanted = whole.model.get_parameter(name).grad
        assert (parameter.grad - wanted).norm() <= 1e-4 * wanted.norm(), name


@torch.no_grad()
def test_text_batches_and_slices_without_a_clip_have_no_features(whole, policy, shown, inputs):
    rows = [row for row in rows_of(shown) if not row.visual]
    expected = torch.cat([expected_logits(whole, row, inputs) for row in rows])
    found = response_logits(policy, collate(rows, True, rope=m_rope(policy.config)))
    torch.testing.assert_close(found[:, :200], expected[:, :200], atol=1e-5, rtol=1e-5)
    parts = [SimpleNamespace(degree=4, index=index, attend=None) for index in range(4)]
    sheet = collate(rows_of(shown), True, shared=True, rope=m_rope(policy.config))
    cut = [collate(rows_of(shown), True, part=part, shared=True, rope=m_rope(policy.config)) for part in parts]
    width, together = cut[0].inputs["input_ids"].shape[1], []
    for number, batch in enumerate(cut):
        together += [(at + number * width, features) for at, features in batch.visual]
    assert not cut[-1].visual
    (places, features), (expected_places, expected) = (
        map(torch.cat, zip(*each, strict=True)) for each in (together, sheet.visual)
    )
    assert torch.equal(places, expected_places) and torch.equal(features, expected)


@pytest.mark.slow
@torch.no_grad()
def test_a_critic_receives_the_features_like_the_policy(folder, whole, shown, inputs):
    critic, rows = load_critic(str(folder), SETTINGS).eval(), rows_of(shown)
    critic.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    captured = []
    hook = whole.lm_head.register_forward_pre_hook(lambda _, hidden: captured.append(hidden[0][0]))
    for row in rows:
        expected_logits(whole, row, inputs)
    hook.remove()
    hidden = [each[len(row.prompt_ids) - 1 : -1] for each, row in zip(captured, rows, strict=True)]
    found = response_values(critic, collate(rows, True, rope=m_rope(critic.config)))
    torch.testing.assert_close(found, critic.score(torch.cat(hidden))[:, 0], atol=1e-4, rtol=1e-5)


@torch.no_grad()
def test_features_of_too_few_layers_are_refused(policy, shown):
    ids, visual = shown
    narrow = replace(visual[0], source=Clip("narrow", visual[0].source.rows[:, :128]))
    [row, *_] = rows_of((ids, (narrow, *visual[1:])))
    with pytest.raises(ValueError, match=r"shape \[2, 128\] do not fit 2 positions of width 384"):
        response_logits(policy, collate([row], True, rope=m_rope(policy.config)))


def test_the_engine_receives_one_placeholder_per_visual_that_it_expands(whole, shown, tmp_path):
    """Check one placeholder for each clip, together with its timestamps, and one for each image."""
    ids, visual = shown
    cached = []
    for each in visual:
        (path := tmp_path / each.source.key).touch()
        write_rows(str(path), 0, each.source.rows)
        cached.append(replace(each, source=Embedding(each.source.key, str(path), *each.source.rows.shape)))
    prompts, config = Prompts(whole.config, 4096), whole.config
    prompts.check("1/2/3", ids, cached)
    found = prompts.prompt(np.concatenate([ids, [7, 8]]), cached)
    for kind, plan_ids in (("image", config.image_token_id), ("video", config.video_token_id)):
        assert found["prompt_token_ids"].count(plan_ids) == sum(each.plan.modality == kind for each in visual)
    ids = found["prompt_token_ids"]
    assert ids.count(config.vision_start_token_id) == 4 and ids[-2:] == [7, 8]
    clips = found["multi_modal_data"]["video"]
    assert clips["video_embeds"].shape == (40, 384) and clips["video_grid_thw"].tolist() == [[4, 6, 4], [2, 4, 8]]
    assert [each.tolist() for each in clips["timestamps"]] == [[0.25, 1.25, 2.25, 3.0], [0.25, 1.25]]
    assert found["multi_modal_data"]["image"].keys() == {"image_embeds", "image_grid_thw"}
    with pytest.raises(ValueError, match=r"an embedding of width 128, but the model's is 384"):
        prompts.check("1/2/3", ids, [replace(each, source=replace(each.source, hidden=128)) for each in cached])
