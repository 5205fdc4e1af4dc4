"""Frames, sizes and prompts of clips match the processors of the models."""

import itertools
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from rlfuse.errors import VideoError
from rlfuse.tasks.small_video_models import VIDEO, VISION_END, VISION_START, byte_tokenizer
from rlfuse.video.compression import compress_tokens
from rlfuse.video.models.qwen2_5_vl import Qwen25VL
from rlfuse.video.models.qwen3_vl import Qwen3VL
from rlfuse.video.models.video_llama_3 import VideoLlama3
from rlfuse.video.plan import SEED_TIMES, ClipMetadata, Geometry, VideoPlan, plan_video
from rlfuse.video.processor_sampling import smart_resize
from rlfuse.video.prompt import VisualTokens, assemble
from rlfuse.video.towers import Pixels

pytest.importorskip("torchvision", reason="the models' processors need it")
FAMILIES = {"video_llama_3": VideoLlama3, "qwen2_5_vl": Qwen25VL, "qwen3_vl": Qwen3VL}
FRAMED = f"Look:\n{VISION_START}{{}}{VISION_END}What?"
SHOWN = {"video_llama_3": "Look:\n{}\nWhat?", "qwen2_5_vl": FRAMED, "qwen3_vl": FRAMED}
CAPPED = {"cap_pixels_per_frame": True, "max_video_tokens": 200}
EXTRA = {
    "video_llama_3": [{}, {"use_token_compression": False}],
    "qwen2_5_vl": [{}, CAPPED],
    "qwen3_vl": [{}, CAPPED | {"max_video_tokens": 9}],
}
PIXELS = Pixels((0.5,) * 3, (0.5,) * 3, 1 / 255)
"""Defaults of VideoLLaMA3's processor, used if a checkpoint sets none."""
FEW_PIXELS = {"shortest_edge": 28 * 28, "longest_edge": 64 * 28 * 28}


def processor_of(kind, **settings):
    from transformers import (
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
        VideoLlama3ImageProcessor,
        VideoLlama3Processor,
        VideoLlama3VideoProcessor,
    )

    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [VISION_START, VISION_END, "<|image_pad|>", VIDEO]})
    if kind == "qwen2_5_vl":
        return Qwen2_5_VLProcessor(Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor(**settings))
    if kind == "qwen3_vl":
        return Qwen3VLProcessor(Qwen2VLImageProcessor(), tokenizer, Qwen3VLVideoProcessor(**settings))
    frames = VideoLlama3VideoProcessor(**settings)
    return VideoLlama3Processor(VideoLlama3ImageProcessor(), tokenizer, frames)


@pytest.mark.parametrize("kind", FAMILIES)
def test_frames_match_the_processor(kind):
    family = FAMILIES[kind]
    sampling, whole = family.sampling, processor_of(kind)
    processor = whole.video_processor
    geometry = Geometry(temporal_patch=family.temporal_patch)
    from transformers.video_utils import VideoMetadata

    for total, fps in itertools.product((2, 7, 61, 1001, 30_000), (1.0, 24.0, 30_000 / 1001, 60.0)):
        facts = ClipMetadata(total / fps, fps, 56, 84, total)
        limits = {"min_frames": sampling.min_frames, "max_frames": sampling.max_frames, "fps": sampling.fps}
        metadata = VideoMetadata(total_num_frames=total, fps=fps)
        more = {"temporal_patch_size": family.temporal_patch} if kind != "qwen3_vl" else {}
        expected = processor.sample_frames(metadata, **more, **limits).tolist()
        plan = plan_video(facts, sampling, geometry=geometry, timestamps=family.timestamps)
        assert plan.fps == pytest.approx(len(expected) / total * fps)
        expected += expected[-1:] * (-len(expected) % family.temporal_patch)
        assert plan.times == tuple(frame / fps for frame in expected)
        if kind == "qwen3_vl":  # exactly, as the prompt rounds them to tenths
            assert plan.patch_times == whole._calculate_timestamps(expected, fps)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "extra"), [(kind, each) for kind in FAMILIES for each in EXTRA[kind]])
@pytest.mark.parametrize(
    ("height", "width", "seconds"), [(56, 84, 3.2), (20, 41, 5.0), (100, 300, 9.0), (300, 200, 30.1)]
)
@pytest.mark.parametrize("size", [FEW_PIXELS, {"shortest_edge": 16 * 28 * 28, "longest_edge": 90 * 28 * 28}])
def test_prompts_and_sizes_match_the_processor(kind, extra, height, width, seconds, size):
    family, fps = FAMILIES[kind], 5.0
    limits = {"min_frames": 4, "max_frames": 13, "fps": 1.0}
    processor = processor_of(kind, size=size, **limits, **extra)
    pixels = torch.zeros(int(seconds * fps), 3, height, width, dtype=torch.uint8)
    metadata = {"total_num_frames": len(pixels), "fps": fps, "duration": seconds}
    inputs = processor(
        text=[SHOWN[kind].format(VIDEO)], videos=[pixels], video_metadata=[metadata], do_sample_frames=True,
        return_tensors="pt", **limits,
    )  # fmt: skip
    sampling = family.sampling.with_processor_settings({"size": size, **limits, **extra})
    facts = ClipMetadata(len(pixels) / fps, fps, height, width, len(pixels))
    geometry = Geometry(16 if kind == "qwen3_vl" else 14, temporal_patch=family.temporal_patch)
    plan = plan_video(facts, sampling, geometry=geometry, timestamps=family.timestamps)
    if getattr(sampling, "use_token_compression", False):
        plan = compress_tokens(plan, [np.zeros((plan.frames, plan.height, plan.width, 3), np.uint8)], PIXELS)
    assert list(plan.grid) == inputs["video_grid_thw"][0].tolist()
    prompt = assemble(processor.tokenizer, SHOWN[kind].format("<video>"), [plan], VisualTokens(VIDEO, "<|image_pad|>"))
    assert prompt.token_ids.tolist() == inputs["input_ids"][0].tolist()


@pytest.mark.parametrize("kind", FAMILIES)
def test_prompts_with_several_clips_match_the_processor(kind):
    """Compare tokens and grids of clips of different lengths, frame rates and sizes."""
    family, limits = FAMILIES[kind], {"min_frames": 4, "max_frames": 13, "fps": 1.0}
    if kind == "video_llama_3":  # compression depends on pixels, see below
        limits["use_token_compression"] = False
    processor = processor_of(kind, size=FEW_PIXELS, **limits)
    clips = [(30, 5.0, 56, 84), (61, 10.0, 100, 300), (7, 2.0, 84, 56)]
    text = "then ".join([SHOWN[kind]] * 3)
    inputs = processor(
        text=[text.format(*[VIDEO] * 3)], videos=[torch.zeros(n, 3, h, w, dtype=torch.uint8) for n, _, h, w in clips],
        video_metadata=[{"total_num_frames": n, "fps": fps, "duration": n / fps} for n, fps, *_ in clips],
        do_sample_frames=True, return_tensors="pt", **limits,
    )  # fmt: skip
    sampling = family.sampling.with_processor_settings({"size": FEW_PIXELS, **limits})
    geometry = Geometry(16 if kind == "qwen3_vl" else 14, temporal_patch=family.temporal_patch)
    facts = [ClipMetadata(n / fps, fps, height, width, n) for n, fps, height, width in clips]
    plans = [plan_video(each, sampling, geometry=geometry, timestamps=family.timestamps) for each in facts]
    assert [list(plan.grid) for plan in plans] == inputs["video_grid_thw"].tolist()
    visual = VisualTokens(VIDEO, "<|image_pad|>")
    prompt = assemble(processor.tokenizer, text.format(*["<video>"] * 3), plans, visual)
    assert prompt.token_ids.tolist() == inputs["input_ids"][0].tolist()
    assert [len(places) for places in prompt.positions] == [plan.tokens for plan in plans]


def noise(frames, *, level=1, share=1.0, seed=0):
    """Return gray frames [frames, 56, 84, 3] in uint8, a share of whose pixels changes by `level` per frame."""
    rng = np.random.default_rng(seed)
    changes = (rng.random((frames, 56, 84, 3)) < share) * level
    return (100 + changes.cumsum(axis=0) % 100).astype(np.uint8)


def moving(frames, size=28, step=28):
    """Return frames of a white square on black that moves to the right by `step` pixels per frame."""
    clip = np.zeros((frames, 56, 84, 3), np.uint8)
    for number in range(frames):
        clip[number, :size, number * step % 84 :][:, :size] = 255
    return clip


CLIPS = {
    "one frame": noise(1),
    "still": noise(1).repeat(7, axis=0),
    "two pictures": np.concatenate([noise(1).repeat(3, axis=0), moving(1).repeat(4, axis=0)]),
    "noise": noise(5),
    "a little noise": noise(9, share=0.05),
    "noise about the threshold": noise(9, share=0.023),
    "rare noise": noise(9, share=0.001),
    "one pixel": np.where(np.arange(56 * 84 * 3 * 4).reshape(4, 56, 84, 3) == 56 * 84 * 3 + 5, 255, 7).astype(np.uint8),
    "a square of a token": moving(6),
    "a square between tokens": moving(6, step=14),
    "a small square": moving(9, size=3, step=1),
    "a flash": np.full((6, 56, 84, 3), [[[[0]]], [[[0]]], [[[0]]], [[[255]]], [[[0]]], [[[0]]]], np.uint8),
}


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("name", CLIPS)
def test_repeated_tokens_are_dropped_as_by_the_processor(name, blocks):
    frames, family = CLIPS[name], VideoLlama3
    processor = processor_of("video_llama_3", size={"shortest_edge": 28 * 28, "longest_edge": 10**7})
    inputs = processor(
        text=[SHOWN["video_llama_3"].format(VIDEO)], videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
        video_metadata=[{"total_num_frames": len(frames), "fps": 1.0, "frames_indices": list(range(len(frames)))}],
        return_tensors="pt",
    )  # fmt: skip
    times = tuple(map(float, range(len(frames))))
    whole, parts = VideoPlan(times, 56, 84, 1.0, 6, timestamps=family.timestamps), min(blocks, len(frames))
    plan = compress_tokens(whole, np.array_split(frames, parts), PIXELS)
    wanted = inputs["video_compression_mask"].numpy()
    assert plan.tokens == wanted.sum() and (plan.kept or b"\1" * len(wanted)) == wanted.tobytes()
    text = SHOWN["video_llama_3"].format("<video>")
    prompt = assemble(processor.tokenizer, text, [plan], VisualTokens(VIDEO, "<|image_pad|>"))
    assert prompt.token_ids.tolist() == inputs["input_ids"][0].tolist()
    assert (plan.hash == replace(plan, kept=None).hash) == (plan.kept is None) == bool(wanted.all())


@pytest.mark.parametrize(("chosen", "tokens"), [({}, 216_000), ({"cap_pixels_per_frame": True}, 109_200)])
def test_long_clip_of_qwen25_vl_has_the_token_count_of_its_processor(chosen, tokens):
    """Use 300 s of 720p, whose pixels the processor only limits with cap_pixels_per_frame."""
    facts, geometry = ClipMetadata(300.0, 30.0, 720, 1280, 9000), Geometry(temporal_patch=2)
    sampling = Qwen25VL.sampling.with_processor_settings(chosen)
    plan = plan_video(facts, sampling, geometry=geometry, timestamps=None)
    processor = processor_of("qwen2_5_vl", **chosen).video_processor
    pixels = torch.zeros(1, plan.frames, 3, 720, 1280, dtype=torch.uint8, device="meta")
    cap = {"cap_pixels_per_frame": processor.cap_pixels_per_frame}
    resized = processor.resize(pixels, processor.size, processor.resample, 28, **cap)
    assert plan.tokens == tokens and resized.shape[-2:] == (plan.height, plan.width)


@pytest.mark.parametrize("kind", FAMILIES)
def test_default_settings_match_the_processor(kind):
    defaults, processor = FAMILIES[kind].sampling, processor_of(kind).video_processor
    assert (defaults.min_pixels, defaults.max_pixels) == (processor.size.shortest_edge, processor.size.longest_edge)
    for name in {each.name for each in fields(defaults)} - {"min_pixels", "max_pixels", "fps"}:
        assert getattr(defaults, name) == (getattr(processor, name) or False), name


def test_checkpoint_settings_override_family_defaults():
    family = VideoLlama3.sampling
    assert (
        family.with_processor_settings({})
        == family
        == family.with_processor_settings({"fps": None, "size": {"height": 4}})
    )
    changed = family.with_processor_settings(
        {"fps": 3, "max_frames": 9, "size": {"shortest_edge": 5, "longest_edge": 7}, "patch_size": 14}
    )
    assert changed == replace(family, fps=3, max_frames=9, min_pixels=5, max_pixels=7)
    assert family.with_processor_settings({"size": {"shortest_edge": 5}, "min_pixels": 6}).min_pixels == 6
    assert (
        Qwen25VL.sampling.with_processor_settings({"cap_pixels_per_frame": False}).frame_pixel_limit(10_000)
        == 768 * 28**2
    )


def test_seed_vl_timestamps_do_not_change_the_plan_hash():
    facts = ClipMetadata(3.0, 24.0, 56, 56)
    default, seed = (
        plan_video(facts, VideoLlama3.sampling, timestamps=each) for each in (VideoLlama3.timestamps, SEED_TIMES)
    )
    assert default.hash == seed.hash
    assert [piece.text for piece in default.pieces][:2] == ["Time 0.0s:", ",Time 0.8s:"]
    assert [piece.text for piece in seed.pieces][:2] == ["[0.0 second]", "[0.8 second]"]


def test_clips_that_the_processor_does_not_support():
    one = ClipMetadata(0.04, 24.0, 56, 56, 1)
    plan = plan_video(one, Qwen25VL.sampling, geometry=Geometry(temporal_patch=2), timestamps=None)
    assert plan.times == (0.0, 0.0)
    slides = ClipMetadata(60.0, 0.05, 56, 56, 3, ((0.0, 5.0), (5.0, 40.0), (40.0, 60.0)))
    assert plan_video(slides, VideoLlama3.sampling, timestamps=VideoLlama3.timestamps).times == (0.0, 5.0, 40.0)
    with pytest.raises(VideoError, match="has 4000 x 10 pixels; the longer side may be at most 200 times"):
        smart_resize(10, 4000, 28, 1, 10**9)
