"""Settings of a row's clip or image: frames and sizes equal those of qwen-vl-utils."""

import pytest

from rlfuse.errors import VideoError
from rlfuse.video.clip_metadata import ClipMetadata
from rlfuse.video.images import ImageMetadata, plan_image
from rlfuse.video.media_settings import ClipSettings, ImageSettings
from rlfuse.video.models.qwen2_5_vl import Qwen25VL
from rlfuse.video.models.qwen3_vl import Qwen3VL
from rlfuse.video.models.video_llama_3 import VideoLlama3
from rlfuse.video.plan import FixedSampling, Geometry, SeedSampling, plan_video
from rlfuse.video.processor_sampling import PixelBounds

CELL = 28 * 28
TEN = (100, 10.0, 240, 320)
"""A clip's frames, rate, height and width."""
FEW = (8, 2.0, 1080, 1920)
USUAL = (280, 392)
ALL = list(range(100))

# Computed with qwen-vl-utils 0.0.14: frames by `calculate_video_frame_range`, `smart_nframes` and `torch.linspace`, and
# sizes as in `fetch_video`.
OF_QWEN_VL_UTILS = [
    ({"video_start": 2.0, "video_end": 4.0}, TEN, [20, 27, 33, 40], USUAL),
    ({"video_start": 7.5}, TEN, [75, 83, 91, 99], USUAL),
    ({"video_end": 1.5}, TEN, [0, 5, 10, 15], USUAL),
    ({"fps": 0.5}, TEN, [0, 33, 66, 99], USUAL),
    ({"nframes": 6}, TEN, [0, 20, 40, 59, 79, 99], USUAL),
    ({"fps": 0.1, "min_frames": 8}, TEN, [0, 14, 28, 42, 57, 71, 85, 99], USUAL),
    ({"fps": 5.0, "max_frames": 10}, TEN, [0, 11, 22, 33, 44, 55, 66, 77, 88, 99], USUAL),
    ({"min_pixels": 400 * CELL}, (8, 2.0, 240, 320), [0, 1, 2, 3, 4, 5, 6, 7], (504, 672)),
    ({"max_pixels": 200 * CELL}, FEW, [0, 1, 2, 3, 4, 5, 6, 7], (280, 504)),
    ({"resized_height": 100, "resized_width": 300}, FEW, [0, 1, 2, 3, 4, 5, 6, 7], (112, 308)),
    # More cases: odd counts, bounds beyond the clip, several settings at once, extreme values.
    ({"nframes": 7}, TEN, [0, 14, 28, 42, 57, 71, 85, 99], USUAL),
    ({"min_pixels": 16 * CELL, "max_pixels": 64 * CELL}, FEW, [0, 1, 2, 3, 4, 5, 6, 7], (168, 280)),
    ({"video_start": -1.0, "video_end": 0.5}, TEN, [0, 2, 3, 5], USUAL),
    ({"video_start": 9.7, "video_end": 99.0}, TEN, [97, 99], USUAL),
    ({"video_start": 1.1, "video_end": 2.3, "nframes": 4}, (300, 30000 / 1001, 240, 320), [33, 45, 56, 68], USUAL),
    ({"video_start": 60, "video_end": 120, "fps": 0.1}, (9000, 25.0, 240, 320), list(range(1500, 3001, 300)), USUAL),
    ({"min_frames": 5, "max_frames": 7, "fps": 0.5}, TEN, [0, 20, 40, 59, 79, 99], USUAL),
    ({"max_frames": 2}, TEN, [0, 99], USUAL),
    ({"fps": 30}, (6, 10.0, 240, 320), [0, 1, 2, 3, 4, 5], USUAL),
    ({"nframes": 100, "max_pixels": 2000 * CELL}, (100, 10.0, 1080, 1920), ALL, (560, 1008)),
    ({"total_pixels": 1000 * CELL, "nframes": 10}, (100, 10.0, 1080, 1920), list(range(0, 100, 11)), (280, 504)),
    ({"resized_height": 10, "resized_width": 10, "fps": 1.0}, (40, 10.0, 240, 320), [0, 13, 26, 39], (56, 56)),
    ({"min_pixels": 600 * CELL, "nframes": 4}, (100, 10.0, 33, 47), [0, 33, 66, 99], (588, 840)),
]


def plan_of(settings, clip, family=Qwen25VL, sampling=None, patch=14):
    total, fps, height, width = clip
    facts = ClipMetadata(total / fps, fps, height, width, total)
    geometry, settings = Geometry(patch, temporal_patch=family.temporal_patch), ClipSettings.of(settings)
    sampling = sampling or family.sampling
    return plan_video(facts, sampling, geometry=geometry, timestamps=family.timestamps, settings=settings)


@pytest.mark.parametrize(("settings", "clip", "frames", "size"), OF_QWEN_VL_UTILS)
def test_frames_and_sizes_match_qwen_vl_utils(settings, clip, frames, size):
    plan = plan_of(settings, clip)
    assert plan.times == tuple(frame / clip[1] for frame in frames) and (plan.height, plan.width) == size
    assert plan.fps == pytest.approx(len(frames) / (frames[-1] - frames[0] + 1) * clip[1])


def test_other_models_and_samplings_apply_the_same_settings():
    odd = plan_of({"nframes": 5}, TEN, VideoLlama3)  # one frame per temporal patch
    assert odd.times == (0.0, 2.5, 5.0, 7.4, 9.9)
    part = plan_of({"video_start": 2.0, "video_end": 4.0, "max_pixels": 64 * 32**2}, TEN, Qwen3VL, patch=16)
    assert part.times == (2.0, 2.7, 3.3, 4.0) and 50 < part.tokens_per_frame <= 64
    assert part.pieces[0].text.startswith("<2.4 seconds>"), "timestamps are relative to the file"
    seed = SeedSampling(budget=640, levels=(64, 32))
    assert plan_of({}, TEN, VideoLlama3, seed).times == tuple(range(10))
    assert plan_of({"video_start": 2, "video_end": 4}, TEN, VideoLlama3, seed).times == (2.0, 3.0, 4.0)
    assert plan_of({"fps": 2}, TEN, VideoLlama3, seed).frames == 20
    assert plan_of({"fps": 5, "max_frames": 12}, TEN, VideoLlama3, seed).frames == 12
    assert plan_of({"fps": 10}, TEN, VideoLlama3, seed).frames == 20, "limited by the budget"
    assert plan_of({"max_pixels": 9 * CELL}, TEN, VideoLlama3, seed).tokens_per_frame <= 9
    fixed = FixedSampling(8, 16)
    assert plan_of({"video_start": 5.0}, TEN, VideoLlama3, fixed).times[0] == 5.0
    assert plan_of({"nframes": 3, "resized_height": 56, "resized_width": 84}, TEN, VideoLlama3, fixed).grid == (3, 4, 6)


def test_sections_of_variable_rate_clips_start_at_video_start():
    slides = ClipMetadata(60.0, 0.05, 56, 56, 3, ((0.0, 5.0), (5.0, 40.0), (40.0, 60.0)))
    settings = ClipSettings(video_start=10.0, video_end=50.0)
    found = plan_video(slides, SeedSampling(), timestamps=VideoLlama3.timestamps, settings=settings)
    assert found.times == (10.0, 40.0)
    fast = ClipMetadata(60.0, 0.7, 56, 56, 42, ((0.0, 20.0),))  # then 41 frames at a varying rate
    seconds = ClipSettings(video_start=30.5, video_end=40.5, nframes=2)
    assert plan_video(fast, VideoLlama3.sampling, settings=seconds).times[0] == pytest.approx(30.5)
    even = plan_video(
        slides, Qwen25VL.sampling, geometry=Geometry(temporal_patch=2), timestamps=None, settings=settings
    )
    assert (even.times[0], even.times[-1]) == (10.0, 50.0)


def test_all_frames_of_a_list_are_used_unless_settings_select_some():
    frames = ClipMetadata(2.5, 2.0, 56, 56, 5, is_list=True)
    for family, sampling in (
        (Qwen25VL, Qwen25VL.sampling),
        (VideoLlama3, SeedSampling()),
        (VideoLlama3, FixedSampling(2)),
    ):
        geometry = Geometry(temporal_patch=family.temporal_patch)

        def shown(settings, geometry=geometry, sampling=sampling):
            plan = plan_video(frames, sampling, geometry=geometry, timestamps=None, settings=ClipSettings(**settings))
            return [round(2 * time) for time in plan.times]

        assert shown({})[:5] == [0, 1, 2, 3, 4] and set(shown({})[5:]) <= {4}
        assert shown({"nframes": 2}) == [0, 4] and shown({"video_start": 1.0, "video_end": 1.5}) == [2, 3]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fps": 0}, "fps is 0; valid is a finite number above 0"),
        ({"fps": "2"}, "fps is '2'"),
        ({"fps": float("nan")}, "fps is nan"),
        ({"nframes": 2.5}, "nframes is 2.5; valid is an integer of at least 1"),
        ({"nframes": True}, "nframes is True"),
        ({"max_pixels": -1}, "max_pixels is -1"),
        ({"video_start": "0:10"}, "video_start is '0:10'; valid is a finite number of seconds"),
        ({"video_end": [4]}, r"video_end is \[4\]"),
        ({"nframes": 4, "fps": 1.0}, "nframes=4 and fps=1 exclude each other"),
        ({"nframes": 4, "max_frames": 2}, "nframes=4 is not between min_frames and max_frames"),
        ({"min_frames": 9, "max_frames": 8}, "min_frames=9 is above max_frames=8"),
        ({"min_pixels": 9, "max_pixels": 8}, "min_pixels=9 is above max_pixels=8"),
        ({"resized_height": 56}, "resized_height and resized_width must be set together"),
        ({"video_start": 4, "video_end": 2}, "video_start=4 is not before video_end=2"),
    ],
)
def test_invalid_settings_are_reported(settings, words):
    with pytest.raises(ValueError, match=words):
        ClipSettings.of(settings)


@pytest.mark.parametrize(
    ("settings", "sampling", "words"),
    [
        ({"video_start": 11.0}, None, r"has no frame in video_start=11\.0, video_end=None: it lasts 10 s"),
        ({"video_end": -1.0}, None, "has no frame"),
        ({"video_start": 2.01, "video_end": 2.09}, None, "has no frame"),
        ({"nframes": 200}, None, "nframes=200 is not between 2 and the 100 available frames"),
        ({"video_start": 8.0, "nframes": 30}, None, "nframes=30 is not between 2 and the 20 available frames"),
        ({"resized_height": 10, "resized_width": 4000}, None, "has 4000 x 10 pixels"),
        ({"nframes": 90}, SeedSampling(budget=500, levels=(16,)), "has 540 visual tokens with the settings of its row"),
        ({"min_pixels": 99 * CELL}, SeedSampling(budget=64, levels=(16,)), "video.max_tokens is 64"),
    ],
)
def test_settings_that_a_clip_cannot_satisfy_are_reported(settings, sampling, words):
    with pytest.raises(VideoError, match=words):
        plan_of(settings, TEN, sampling=sampling)


@pytest.mark.parametrize(
    ("settings", "most", "size"),
    [
        ({}, None, (252, 308)),
        ({"max_pixels": 40 * CELL}, None, (140, 196)),
        ({"min_pixels": 200 * CELL}, None, (364, 476)),
        ({"resized_height": 100, "resized_width": 300}, None, (112, 308)),
        ({"max_pixels": 40 * CELL}, 20, (84, 140)),
        ({"resized_height": 100, "resized_width": 300}, 20, None),
    ],
)
def test_images_have_the_size_of_their_settings(settings, most, size):
    bounds = PixelBounds(min_pixels=4 * CELL, max_pixels=(most or 100) * CELL)

    def plan():
        return plan_image(ImageMetadata(240, 320), bounds, Geometry(temporal_patch=2), ImageSettings.of(settings), most)

    if size is None:
        with pytest.raises(VideoError, match=r"has 44 visual tokens .* video\.max_image_tokens is 20"):
            plan()
    else:
        assert (plan().height, plan().width) == size
