"""Every container that clips come in: which frame is shown when, read off the frame itself, and how it is shown."""

import random

import numpy as np
import pytest
from av.stream import Disposition
from clip_files import (
    COLOURS,
    TURNS,
    numbered,
    numbers,
    plan_of,
    steady,
    write_blank,
    write_edited,
    write_interlaced,
    write_packed,
    write_streams,
    write_turned,
    write_video,
)
from PIL import Image

from rlfuse.errors import VideoError
from rlfuse.video.decoding import decode, probe
from rlfuse.video.plan import VideoPlan

PYRAMID = {"bf": "3", "b_strategy": "0", "g": "12", "x264-params": "b-pyramid=normal"}
OPEN = {"bf": "3", "b_strategy": "0", "g": "12", "x264-params": "open-gop=1:scenecut=0"}
MPEG4 = {"codec": "mpeg4", "bf": "3", "g": "20"}
MPEG2 = {"codec": "mpeg2video", "bf": "2", "fps": 25}
X265 = {"codec": "libx265", "x265-params": "bframes=4:keyint=12:open-gop=1:log-level=none"}
VP9 = {
    "codec": "libvpx-vp9",
    "g": "20",
    "auto-alt-ref": "1",
    "lag-in-frames": "16",
    "deadline": "good",
    "cpu-used": "5",
}
WHOLE = {
    **{f"h264 {kind}": (kind, PYRAMID) for kind in ("mp4", "mkv", "mov", "avi", "ts", "flv")},
    **{f"h264 open {kind}": (kind, OPEN) for kind in ("mp4", "mkv", "avi", "ts")},
    **{f"mpeg4 {kind}": (kind, MPEG4) for kind in ("mp4", "mkv", "avi", "ts")},
    **{f"mpeg2 {kind}": (kind, MPEG2) for kind in ("ts", "mpg", "avi")},
    **{f"h265 {kind}": (kind, X265) for kind in ("mp4", "ts")},
    "vp9 webm": ("webm", VP9),
    "vp8 webm": ("webm", VP9 | {"codec": "libvpx"}),
    "av1 mp4": ("mp4", {"codec": "libsvtav1", "g": "12", "preset": "12"}),
    "prores mov": ("mov", {"codec": "prores_ks", "pix_fmt": "yuv422p10le"}),
    "ffv1 mkv": ("mkv", {"codec": "ffv1"}),
    "mjpeg avi": ("avi", {"codec": "mjpeg", "pix_fmt": "yuvj420p"}),
    "gif": ("gif", {"codec": "gif", "pix_fmt": "rgb8"}),
    "fragments": ("mp4", PYRAMID | {"movflags": "frag_keyframe+empty_moov+default_base_moof"}),
    "a clock that wraps": ("ts", PYRAMID | {"output_ts_offset": "95440.7"}),
    "refreshed without keyframes": ("ts", {"bf": "0", "g": "12", "x264-params": "intra-refresh=1"}),
}
UNEVEN = np.cumsum([0] + [0.05, 0.3, 0.1, 1.2, 0.05, 0.15, 0.8] * 4).round(2).tolist()


def check(path: str, appearances: list[float]) -> None:
    """All frames at the instants at which they appear, and just before them; then few, far apart, in any keyframe
    interval: each shows its number."""
    facts = probe(path)
    assert facts.frames == len(appearances)
    assert facts.duration_s == pytest.approx(appearances[-1], abs=1.3) and facts.duration_s > appearances[-1]
    last = len(appearances) - 1
    assert numbers(decode(path, plan_of(appearances))) == list(range(last + 1))
    before = [at - 0.002 for at in appearances[1:]]
    assert numbers(decode(path, plan_of(before))) == list(range(last))
    rng = random.Random(0)
    for size in (1, 1, 2, 4, 1, 2, 4, 8):
        few = sorted(rng.sample(range(last + 1), size))
        assert numbers(decode(path, plan_of([appearances[number] for number in few]))) == few


@pytest.mark.parametrize("name", WHOLE)
def test_each_frame_is_shown_from_its_time_until_the_next(tmp_path, name):
    kind, options = WHOLE[name]
    appearances = steady(60, options.get("fps", 10))
    check(write_video(tmp_path / f"clip.{kind}", appearances, **options), appearances)


@pytest.mark.parametrize("kind", ["mp4", "mkv", "mov", "ts", "flv", "webm", "gif"])
def test_where_the_rate_varies_each_frame_is_shown_for_as_long_as_it_lasts(tmp_path, kind):
    options = {"webm": VP9, "gif": {"codec": "gif", "pix_fmt": "rgb8"}}.get(kind, PYRAMID)
    check(write_video(tmp_path / f"clip.{kind}", UNEVEN, **options), UNEVEN)


def test_open_groups_of_pictures_in_avi_are_not_late(tmp_path):
    path = write_video(tmp_path / "open.avi", steady(40), **OPEN)
    assert [numbers(decode(path, plan_of([number / 10]))) for number in (13, 24, 37)] == [[13], [24], [37]]


def test_b_frames_packed_as_by_divx(tmp_path):
    check(write_packed(tmp_path / "plain.avi", 41), steady(41))


@pytest.mark.parametrize("disposal", [0, 1, 2])
def test_gifs_of_parts_and_of_uneven_pictures(tmp_path, disposal):
    stays = [0.05, 0.1, 0.3, 1.2, 0.06] * 6
    pictures = [Image.fromarray(np.array(numbered(number, 32, 128))) for number in range(len(stays))]
    path, milliseconds = tmp_path / "parts.gif", [round(1000 * stay) for stay in stays]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=milliseconds, disposal=disposal)
    check(str(path), [0.0, *np.cumsum(stays[:-1]).round(2).tolist()])


EDITS = {
    "begins late": ([(1.5, 4.5)], [*range(15, 60)]),
    "begins at a keyframe": ([(1.2, 4.8)], [*range(12, 60)]),
    "ends early": ([(0.0, 3.0)], [*range(30)]),
    "a piece": ([(2.0, 2.0)], [*range(20, 40)]),
    "later than the sound": ([(None, 1.0), (0.0, 6.0)], [*range(60)]),
    "a piece later than the sound": ([(None, 1.0), (1.5, 3.0)], [*range(15, 45)]),
    "begins within a frame": ([(0.75, 5.0)], [*range(8, 58)]),  # with the next: FFmpeg drops the rest of it
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_list_s_piece_is_the_clip(tmp_path, name):
    parts, expected = EDITS[name]
    path = write_edited(tmp_path / "edited.mp4", write_video(tmp_path / "whole.mp4", steady(60), **PYRAMID), parts)
    facts = probe(path)
    assert (facts.frames, facts.duration_s) == (len(expected), pytest.approx(len(expected) / 10, abs=0.01))
    assert numbers(decode(path, plan_of(steady(len(expected))))) == expected
    assert numbers(decode(path, plan_of([len(expected) / 20]))) == [expected[len(expected) // 2]]


@pytest.mark.parametrize("parts", [[(0.0, 1.0), (3.0, 2.0)], [(3.0, 2.0), (0.0, 1.0)], [(0, 1), (None, 1), (3, 1)]])
def test_several_edits_are_refused(tmp_path, parts):
    path = write_edited(tmp_path / "edited.mp4", write_video(tmp_path / "whole.mp4", steady(60), **PYRAMID), parts)
    for read in (probe, lambda path: decode(path, plan_of([0.0]))):
        with pytest.raises(VideoError, match=r"edited.mp4: is put together from several parts .* Write it again with"):
            read(path)


@pytest.mark.parametrize("matrix", TURNS)
def test_turned_and_mirrored_clips_come_upright(tmp_path, matrix):
    path = write_turned(tmp_path / "turned.mp4", matrix)
    facts = probe(path)
    assert (facts.height, facts.width) == ((128, 64) if matrix[1] else (64, 128))
    pixels = decode(path, VideoPlan((0.0,), 56, 56, 1.0, 4))[0]
    names = {colour: name for name, colour in COLOURS.items()}
    corners = [pixels[row, column] for row in (14, 42) for column in (14, 42)]
    assert "".join(names[tuple(np.where(corner > 128, 255, 0).tolist())] for corner in corners) == TURNS[matrix]


NONE, DEFAULT, COVER = Disposition(0), Disposition.default, Disposition.attached_pic
STREAMS = {
    "a flagged cover": ([("mjpeg", 200, 1, COVER), ("libx264", 0, 20, DEFAULT)], 2.0, [0, 3]),
    "an unflagged cover": ([("mjpeg", 200, 1, DEFAULT), ("libx264", 0, 20, NONE)], 2.0, [0, 3]),
    "a cover behind": ([("libx264", 0, 20, NONE), ("mjpeg", 200, 1, NONE)], 2.0, [0, 3]),
    "the default": ([("libx264", 0, 20, NONE), ("libx264", 100, 5, DEFAULT)], 0.5, [100, 103]),
    "else the longest": ([("libx264", 100, 5, NONE), ("libx264", 0, 20, NONE)], 2.0, [0, 3]),
}
"""The last not in MP4, where one is always the default."""


@pytest.mark.parametrize(("kind", "name"), [*((kind, name) for kind in ("mkv", "mp4") for name in STREAMS)][:-1])
def test_of_several_streams_the_one_that_a_player_shows(tmp_path, kind, name):
    streams, duration, expected = STREAMS[name]
    path = write_streams(tmp_path / f"streams.{kind}", *streams)
    assert probe(path).duration_s == pytest.approx(duration)
    assert numbers(decode(path, plan_of([0.0, 0.3]))) == expected


@pytest.mark.parametrize("kind", ["avi", "ts"])
def test_a_cover_where_streams_have_no_flags(tmp_path, kind):
    path = write_streams(tmp_path / f"cover.{kind}", ("mjpeg", 200, 1, NONE), ("libx264", 0, 20, NONE))
    assert numbers(decode(path, plan_of([0.0, 0.3]))) == [0, 3]


@pytest.mark.parametrize("kind", ["mp4", "mkv", "mov", "ts", "avi", "webm"])
def test_wide_pixels_are_shown_wide(tmp_path, kind):
    path = tmp_path / f"wide.{kind}"
    if kind == "webm":  # says in the container how wide, where other things stood
        write_video(path, steady(3), codec="libvpx-vp9", size=(64, 64), color_range="tv")
        colours, width = b"\x55\xb0\x84\x55\xb9\x81\x01", b"\x54\xb0\x82\x00\x80\xec\x80"
        path.write_bytes(path.read_bytes().replace(colours, width))
    else:
        write_blank(path, (64, 64), aspect=2)
    facts = probe(str(path))
    assert (facts.height, facts.width) == (64, 128)


FIELDS = {
    "h264 mp4": ("mp4", {"g": "5"}),
    "h264 avi": ("avi", {"g": "5"}),
    "mpeg2 ts": ("ts", {"codec": "mpeg2video", "b": "20M", "bf": "2"}),
    "mpeg4 avi": ("avi", {"codec": "mpeg4", "b": "20M"}),
    "prores mov": ("mov", {"codec": "prores_ks", "pix_fmt": "yuv422p10le"}),
    "ffv1 mkv": ("mkv", {"codec": "ffv1"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ["tff", "bff"])
@pytest.mark.parametrize("name", FIELDS)
def test_fields_become_frames_of_one_instant_the_same_in_all_parts_of_a_plan(tmp_path, name, order):
    kind, options = FIELDS[name]
    path = write_interlaced(tmp_path / f"fields.{kind}", 12, (112, 252), 6, order=order, **options)
    plan = VideoPlan(tuple(steady(12, 25)), 112, 252, 25.0, 36)
    whole = decode(path, plan)
    shades = whole.mean(axis=3)
    assert np.abs(shades[:, 1:-1] - (shades[:, :-2] + shades[:, 2:]) / 2).mean() < 0.5  # no combing
    assert np.abs((shades > 128).argmax(axis=2).T - 12 * np.arange(12)).max() <= 2
    for first in range(12):
        assert np.array_equal(decode(path, plan, first, first + 1), whole[first : first + 1])
        assert np.array_equal(decode(path, plan, first), whole[first:])


def test_pictures_that_are_single_fields_are_refused(tmp_path):
    options = {"codec": "libx265", "x265-params": "interlace=tff:log-level=none", "fps": 50}
    path = write_video(tmp_path / "fields.ts", steady(6, 50), **options)
    for read in (probe, lambda path: decode(path, plan_of([0.0]))):
        with pytest.raises(VideoError, match=r"fields.ts: stores each field as a picture of its own.* Deinterlace it"):
            read(path)
