"""Frame plans, compared with the table of Seed1.5-VL, and the prompts made from them."""

import itertools
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlfuse.errors import VideoError
from rlfuse.video.plan import ClipMetadata, FixedSampling, Geometry, SeedSampling, TaskKind, fit_size, plan_video
from rlfuse.video.prompt import VisualTokens, assemble, tokenise

FPS = {TaskKind.GENERAL: 1, TaskKind.DETAIL: 2, TaskKind.MOTION: 5}
# Tokens per frame, most frames, longest clips in seconds at 1 / 2 / 5 frames a second, as published (whole seconds).
TABLE = [
    (640, 128, (128, 64, 25.6)),
    (512, 160, (160, 80, 32)),
    (384, 213, (213, 106, 42)),
    (256, 320, (320, 160, 64)),
    (160, 512, (512, 256, 102)),
    (128, 640, (640, 320, 128)),
]
CELLS = [(row, kind, longest) for row in range(len(TABLE)) for kind, longest in zip(FPS, TABLE[row][2], strict=True)]
VISUAL = VisualTokens("<|video_pad|>", "<|image_pad|>")
SMALL = SeedSampling(budget=48, levels=(8, 4, 2))


def clip(duration_s=10.0, fps=24.0, height=1080, width=1920, frames=None):
    return ClipMetadata(duration_s, fps, height, width, frames)


@pytest.fixture(scope="module")
def tokenizer():
    """Return a minimal tokenizer with special tokens and one token for every printable character."""
    vocab = {"<unk>": 0, **{chr(code): code - 31 for code in range(32, 127)}}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|video_pad|>", "<|image_pad|>", "<|im_end|>"]})
    return tokenizer


@pytest.mark.parametrize(("row", "kind", "longest"), CELLS)
def test_every_cell_of_the_table(row, kind, longest):
    level, most, _ = TABLE[row]
    exact = most / FPS[kind]
    assert math.isclose(exact, longest, rel_tol=0, abs_tol=0.7) and math.floor(exact) == math.floor(longest)
    for duration in (longest, exact):
        plan = plan_video(clip(duration), SeedSampling(), kind)
        assert (plan.level, plan.fps) == (level, FPS[kind])
        assert plan.times == tuple(round(i / FPS[kind], 6) for i in range(plan.frames))
    assert plan.frames == most
    assert level * most <= 81_920 < level * (most + 1)

    beyond = plan_video(clip(exact + 1 / FPS[kind]), SeedSampling(), kind)
    if row + 1 < len(TABLE):
        assert (beyond.level, beyond.frames) == (TABLE[row + 1][0], most + 1)
    else:
        assert (beyond.level, beyond.frames) == (128, 640)
        assert beyond.fps < FPS[kind]


def test_an_hour_gets_640_frames_over_its_duration():
    plan = plan_video(clip(3600.0), SeedSampling(), "motion")
    assert plan.frames == 640 and plan.level == 128
    assert np.allclose(np.diff(plan.times), 3600 / 640)
    assert plan.times[0] == 0 and plan.times[-1] == 3600 - 3600 / 640


def test_frames_of_a_clip_with_few_frames_are_not_repeated():
    assert plan_video(clip(10.0, fps=2.0), SeedSampling(), "motion").frames == 20
    few = plan_video(clip(10.0, fps=24.0, frames=3), SeedSampling())
    assert few.frames == 3 and few.times[-1] == pytest.approx(20 / 3)
    single = plan_video(clip(1 / 24, frames=1), SeedSampling())
    assert single.times == (0.0,) and single.pieces[0].text == "[0.0 second]"


def test_pieces_have_the_time_before_every_frame():
    plan = plan_video(clip(2.0), SMALL, "detail")
    assert [piece.text for piece in plan.pieces] == [f"[{t} second]" for t in ("0.0", "0.5", "1.0", "1.5")]
    assert {piece.tokens for piece in plan.pieces} == {plan.tokens_per_frame}
    assert sum(piece.tokens for piece in plan.pieces) == plan.tokens


def test_temporal_patches_have_two_frames_each():
    qwen = Geometry(temporal_patch=2)
    plan = plan_video(clip(5.0), SeedSampling(), "detail", qwen, timestamps=None)
    assert plan.frames == 10 and plan.grid == (5, plan.height // 14, plan.width // 14)
    assert plan.tokens == 5 * plan.tokens_per_frame == math.prod(plan.grid) // 4
    assert plan.seconds_per_temporal_patch == 1.0
    assert [(piece.text, piece.tokens) for piece in plan.pieces] == [("", plan.tokens)]

    odd = plan_video(clip(3.0), SeedSampling(), geometry=qwen)
    assert odd.times == (0.0, 1.0, 2.0, 2.0)
    assert [piece.text for piece in odd.pieces] == ["[0.5 second]", "[2.0 second]"]
    assert plan_video(clip(3600.0), SeedSampling(), geometry=qwen).frames == 1280


def test_fixed_sampling_has_the_same_number_of_frames_for_any_clip():
    for duration in (10.0, 60.0, 3600.0):
        plan = plan_video(clip(duration), FixedSampling(frames=16, tokens_per_frame=64), "motion")
        assert plan.frames == 16 and plan.tokens_per_frame <= 64
        assert np.allclose(np.diff(plan.times), duration / 16, atol=1e-5)
    assert plan_video(clip(0.25, fps=24.0), FixedSampling(frames=16)).frames == 6


@pytest.mark.slow
@given(
    duration=st.floats(0.01, 20_000),
    fps=st.floats(0.1, 240),
    height=st.integers(1, 8192),
    width=st.integers(1, 8192),
    frames=st.none() | st.integers(1, 100_000),
    kind=st.sampled_from(list(TaskKind)),
    sampling=st.sampled_from([SeedSampling(), SMALL, FixedSampling(32, 6)]),
    temporal_patch=st.sampled_from([1, 2]),
)
def test_any_clip_fits_its_budget(duration, fps, height, width, frames, kind, sampling, temporal_patch):
    facts = ClipMetadata(duration, fps, height, width, frames)
    plan = plan_video(facts, sampling, kind, Geometry(temporal_patch=temporal_patch))
    assert plan.tokens <= sampling.budget
    assert plan.tokens_per_frame <= plan.level
    assert plan.height % 28 == 0 == plan.width % 28
    assert plan.height < height + 28 and plan.width < width + 28
    assert plan.frames % temporal_patch == 0 and plan.frames - temporal_patch < facts.distinct_frames
    assert plan.times[0] == 0 and plan.times[-1] < duration + 1e-6
    assert all(earlier <= later for earlier, later in itertools.pairwise(plan.times))
    assert sum(piece.tokens for piece in plan.pieces) == plan.tokens


@pytest.mark.slow
@given(
    durations=st.lists(st.floats(0.02, 1) | st.floats(1, 40), min_size=2, max_size=60),
    kind=st.sampled_from(list(TaskKind)),
    sampling=st.sampled_from([SeedSampling(), SMALL, FixedSampling(32, 6)]),
)
def test_at_a_variable_rate_no_frame_is_repeated_and_the_plan_spans_the_clip(durations, kind, sampling):
    ends = np.cumsum(durations)
    begins = ends - durations
    listed = [
        (b, e) for b, e in zip(begins.tolist(), ends.tolist(), strict=True) if e - b > 0.1 or np.mean(durations) > 0.1
    ]
    facts = ClipMetadata(ends[-1], len(durations) / ends[-1], 480, 640, len(durations), tuple(listed))
    plan = plan_video(facts, sampling, kind)
    seen = np.searchsorted(begins, np.array(plan.times) + 1e-3, side="right") - 1
    assert plan.tokens <= sampling.budget and plan.times[0] == 0 and plan.times[-1] < ends[-1]
    assert (np.diff(plan.times) > 0).all() and (not listed or (np.diff(seen) > 0).all())
    requested_fps = 10 if isinstance(sampling, FixedSampling) else sampling.fps(kind)
    if len(listed) == len(durations) <= min(ends[-1] * requested_fps, sampling.budget // plan.level):
        assert seen.tolist() == list(range(len(durations)))
    even = plan_video(facts, sampling, kind, timestamps=None)
    assert np.allclose(np.diff(even.times), 1 / even.fps, atol=1e-5) and even.times[-1] >= ends[-1] - 1.01 / even.fps
    assert even.tokens <= sampling.budget


@pytest.mark.parametrize("level", [640, 512, 384, 256, 160, 128])
@pytest.mark.parametrize(("height", "width"), [(1080, 1920), (1920, 1080), (480, 640), (4320, 7680), (1080, 2520)])
def test_the_aspect_ratio_is_kept_and_the_token_level_used(level, height, width):
    fitted_height, fitted_width = fit_size(height, width, level, 28)
    assert abs(math.log(fitted_width / fitted_height * height / width)) < 0.09
    assert 0.8 * min(level, height * width / 784) <= fitted_height * fitted_width / 784 <= level


@pytest.mark.parametrize(
    ("size", "level", "expected"),
    [
        ((56, 56), 640, (56, 56)),  # enlarged by less than one cell
        ((1, 1), 640, (28, 28)),
        ((20_000, 1), 640, (640 * 28, 28)),
        ((1, 10_000), 4, (28, 112)),
        ((300, 300), 1, (28, 28)),
    ],
)
def test_extreme_sizes(size, level, expected):
    assert fit_size(*size, level, 28) == expected


def test_hash_is_stable_and_depends_on_the_plan_only():
    plan = plan_video(clip(), SeedSampling())
    assert plan.hash == plan_video(clip(fps=30.0), SeedSampling(budget=80_000)).hash
    changed = [
        plan_video(clip(11.0), SeedSampling()),
        plan_video(clip(), SeedSampling(), "detail"),
        plan_video(clip(height=1000), SeedSampling()),
        plan_video(clip(), SeedSampling(), geometry=Geometry(temporal_patch=2)),
    ]
    assert len({plan.hash, *(other.hash for other in changed)}) == 1 + len(changed)
    assert pickle.loads(pickle.dumps(plan)).hash == plan.hash
    program = (
        "from rlfuse.video.plan import *; print(plan_video(ClipMetadata(10.0, 24.0, 1080, 1920), SeedSampling()).hash)"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == plan.hash


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: clip(0.0), "duration_s is 0.0"),
        (lambda: clip(math.nan), "duration_s is nan"),
        (lambda: clip(fps=-1.0), "fps is -1.0"),
        (lambda: clip(height=0), "height is 0"),
        (lambda: clip(frames=0), "frames is 0"),
        (lambda: SeedSampling(budget=100), "budget: got 100.*128"),
        (lambda: SeedSampling(levels=(128, 640)), "levels: got"),
        (lambda: SeedSampling(levels=()), "levels: got"),
        (lambda: SeedSampling(fps_motion=0.0), "fps_motion: got 0.0"),
        (lambda: FixedSampling(frames=0), "frames: got 0"),
        (lambda: Geometry(temporal_patch=0), "temporal_patch: got 0"),
        (lambda: plan_video(clip(), SMALL, "poetry"), "task: got 'poetry'; valid are general, detail, motion"),
    ],
)
def test_invalid_metadata_and_settings_are_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_prompt_has_the_tokens_of_the_plan_at_its_positions(tokenizer):
    plan = plan_video(clip(3.0), SMALL)
    prompt = assemble(tokenizer, "Look: <video>How many?<|im_end|>", [plan], VISUAL)
    pad = tokenizer.convert_tokens_to_ids("<|video_pad|>")
    assert prompt.token_ids.dtype == np.int32
    assert np.array_equal(np.flatnonzero(prompt.token_ids == pad), prompt.positions[0])
    assert len(prompt.positions[0]) == plan.tokens
    frame = "<|video_pad|>" * plan.tokens_per_frame
    expected = "".join(f"[{i}.0 second]{frame}" for i in range(3))
    assert tokenizer.decode(prompt.token_ids) == f"Look: {expected}How many?<|im_end|>"


def test_several_clips_keep_their_order(tokenizer):
    plans = [plan_video(clip(seconds), SMALL) for seconds in (2.0, 5.0)]
    prompt = assemble(tokenizer, "<video> or <video>", plans, VISUAL)
    assert [len(places) for places in prompt.positions] == [plan.tokens for plan in plans]
    assert prompt.positions[0][-1] < prompt.positions[1][0]


@pytest.mark.parametrize(
    ("text", "clips", "message"),
    [
        ("<video> and <video>", 1, "2 <video> markers and 1 clip:"),
        ("<video>", 0, "1 <video> marker and 0 clips:"),
        ("what?", 1, "0 <video> markers and 1 clip:"),
        ("<video>", 2, "1 <video> marker and 2 clips:"),
    ],
)
def test_markers_and_clips_have_to_match(tokenizer, text, clips, message):
    with pytest.raises(VideoError, match=message):
        assemble(tokenizer, text, [plan_video(clip(), SMALL)] * clips, VISUAL)


def test_spans_of_plans_include_timestamps_and_frame_tokens(tokenizer):
    plans = [plan_video(clip(seconds), SMALL) for seconds in (2.0, 1.0)]
    prompt = assemble(tokenizer, "One<video> or <video>?", plans, VISUAL, frame=("<|im_start|>", "<|im_end|>"))
    for (first, last), plan in zip(prompt.spans, plans, strict=True):
        text = tokenizer.decode(prompt.token_ids[first:last]).replace("<|video_pad|>", "")
        assert text == "<|im_start|>" + "".join(piece.text for piece in plan.pieces) + "<|im_end|>"
    [plain] = assemble(tokenizer, "One<video>?", plans[:1], VISUAL).spans
    assert plain == (3, 3 + 2 * 12 + plans[0].tokens)


@pytest.mark.parametrize(
    "text",
    [
        "<|video_pad|>",
        "a <|video_pad|><|video_pad|> b",
        "<|image_pad|><|video_<|video_pad|>pad|>",
        "<|<|video_pad|>video_pad|>",
    ],
)
def test_placeholder_text_never_becomes_a_visual_token(tokenizer, text):
    ids = tokenise(tokenizer, text, VISUAL)
    assert not set(ids) & set(VISUAL.ids(tokenizer).values())
    assert tokenizer.decode(ids) == text
    plan = plan_video(clip(2.0), SMALL)
    prompt = assemble(tokenizer, f"{text}<video>{text}", [plan], VISUAL)
    pad = tokenizer.convert_tokens_to_ids("<|video_pad|>")
    assert np.array_equal(np.flatnonzero(prompt.token_ids == pad), prompt.positions[0])


@pytest.mark.slow
@given(st.text(st.sampled_from("<|>_videopad"), max_size=40))
def test_no_text_becomes_a_visual_token(tokenizer, text):
    spelled = text.replace("v", "<|video_pad|>").replace("i", "<|image_pad|>")
    ids = tokenise(tokenizer, spelled, VISUAL)
    assert not set(ids) & set(VISUAL.ids(tokenizer).values())
    assert tokenizer.decode(ids) == spelled


def test_a_placeholder_that_cannot_be_escaped_is_rejected(tokenizer):
    with pytest.raises(VideoError, match=r"are visual placeholders"):
        tokenise(tokenizer, "a#b", VisualTokens("#", "<|image_pad|>"))
    with pytest.raises(VideoError, match=r"no token '<frame>'"):
        assemble(tokenizer, "<video>", [plan_video(clip(), SMALL)], VisualTokens("<frame>", "<|image_pad|>"))


def test_errors_are_picklable_and_contain_the_file():
    error = pickle.loads(pickle.dumps(VideoError("it is empty", "Replace it").of("a.mp4")))
    assert str(error) == "a.mp4: it is empty. Replace it."
