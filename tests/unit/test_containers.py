"""Video containers: presentation time of each frame, orientation and aspect ratio."""

import numpy as np
import pytest
from clip_files import (
    BARS,
    COLOURS,
    COVER,
    DEFAULT,
    MJPEG,
    MPEG2,
    MPEG4,
    NONE,
    OPEN,
    PYRAMID,
    TURNS,
    UNEVEN,
    VP9,
    X265,
    assert_shows,
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

from rlfuse.video.decoding import decode, probe
from rlfuse.video.plan import VideoPlan

WHOLE = {
    **{f"h264 {kind}": (kind, PYRAMID) for kind in ("mp4", "mkv", "mov", "avi", "ts", "flv")},
    **{f"h264 open {kind}": (kind, OPEN) for kind in ("mp4", "mkv", "mov", "avi", "ts", "flv")},
    **{f"mpeg4 {kind}": (kind, MPEG4) for kind in ("mp4", "mkv", "mov", "avi", "ts")},
    **{f"mpeg2 {kind}": (kind, MPEG2) for kind in ("ts", "mpg", "avi", "mov", "mkv", "mxf")},
    **{f"h265 {kind}": (kind, X265) for kind in ("mp4", "mkv", "mov", "ts")},
    **{f"vp9 {kind}": (kind, VP9) for kind in ("webm", "mkv", "mp4")},
    **{
        f"vp8 {kind}": (kind, VP9 | {"codec": "libvpx", "auto-alt-ref": auto})
        for kind, auto in (("webm", "1"), ("avi", "0"))
    },
    **{f"av1 {kind}": (kind, {"codec": "libsvtav1", "g": "12", "preset": "12"}) for kind in ("mp4", "mkv", "webm")},
    **{f"mjpeg {kind}": (kind, MJPEG) for kind in ("avi", "mov", "mkv")},
    **{f"ffv1 {kind}": (kind, {"codec": "ffv1"}) for kind in ("mkv", "avi")},
    **{f"{codec} mov": ("mov", {"codec": codec, "pix_fmt": "rgb24"}) for codec in ("png", "qtrle")},
    "prores mov": ("mov", {"codec": "prores_ks", "pix_fmt": "yuv422p10le"}),
    "mpeg1 mpg": ("mpg", MPEG2 | {"codec": "mpeg1video"}),
    "msmpeg4 avi": ("avi", {"codec": "msmpeg4v2", "g": "20"}),
    "cinepak avi": ("avi", {"codec": "cinepak", "pix_fmt": "rgb24"}),
    "wmv2 asf": ("asf", {"codec": "wmv2", "g": "20"}),
    "mpeg4 asf": ("asf", MPEG4),
    "gif": ("gif", {"codec": "gif", "pix_fmt": "rgb8"}),
    "apng": ("apng", {"codec": "apng", "pix_fmt": "rgb24"}),
    "fragments": ("mp4", PYRAMID | {"movflags": "frag_keyframe+empty_moov+default_base_moof"}),
    "fragments that begin late": ("mp4", PYRAMID | {"movflags": "frag_keyframe+empty_moov", "output_ts_offset": "100"}),
    "fragments of one frame": ("mp4", PYRAMID | {"movflags": "frag_every_frame+empty_moov"}),
    "no edit list": ("mp4", PYRAMID | {"use_editlist": "0"}),
    "frames shown before they are decoded": ("mp4", PYRAMID | {"movflags": "negative_cts_offsets"}),
    **{
        f"{kind} that begins late": (kind, PYRAMID | {"output_ts_offset": "100"})
        for kind in ("mkv", "flv", "ts", "mp4")
    },
    "live webm": ("webm", VP9 | {"live": "1"}),
    "live mkv": ("mkv", PYRAMID | {"live": "1", "output_ts_offset": "100"}),
    "packets with arrival times": ("ts", PYRAMID | {"mpegts_m2ts_mode": "1"}),
    "a clock that wraps": ("ts", PYRAMID | {"output_ts_offset": "95440.7"}),
    "refreshed without keyframes": ("ts", {"bf": "0", "g": "12", "x264-params": "intra-refresh=1"}),
}

FIRST = {kind: name for name, (kind, _) in reversed(WHOLE.items())}.values()
"""One entry of `WHOLE` for each container."""


@pytest.mark.parametrize("name", [n if n in FIRST else pytest.param(n, marks=pytest.mark.slow) for n in WHOLE])
def test_each_frame_is_shown_from_its_time_until_the_next(tmp_path, name):
    kind, options = WHOLE[name]
    appearances = steady(60, options.get("fps", 10))
    assert_shows(write_video(tmp_path / f"clip.{kind}", appearances, **options), appearances)


@pytest.mark.parametrize("kind", ["mp4", "mkv", "mov", "ts", "flv", "webm", "gif"])
def test_variable_frame_rates_keep_the_duration_of_each_frame(tmp_path, kind):
    options = {"webm": VP9, "gif": {"codec": "gif", "pix_fmt": "rgb8"}}.get(kind, PYRAMID)
    assert_shows(write_video(tmp_path / f"clip.{kind}", UNEVEN, **options), UNEVEN)


def test_packet_durations_do_not_extend_the_clip(tmp_path):
    path = write_video(tmp_path / "pauses.mp4", [0.0, 0.1, 30.0, 30.1, 30.2, 300.0, 300.1, 305.0], **X265)
    assert probe(path).duration_s == pytest.approx(305.1, abs=0.06)


@pytest.mark.parametrize("codec", ["libx264", "mpeg4", "mjpeg"])
def test_dropped_avi_frames_repeat_the_previous_one(tmp_path, codec):
    options = MJPEG if codec == "mjpeg" else {"codec": codec, "bf": "0", "g": "12"}
    assert_shows(write_video(tmp_path / "clip.avi", UNEVEN, fps=20, **options), UNEVEN)


@pytest.mark.parametrize("kind", ["mp4", "mkv", "mov", "ts", "flv"])
def test_audio_may_start_before_video(tmp_path, kind):
    path = write_streams(tmp_path / f"late.{kind}", ("libx264", 0, 40, DEFAULT), sound_s=6.0, late=20)
    assert_shows(path, steady(40))


ODD = {
    "h264 mp4": ("mp4", "libx264", "yuv444p"),
    "vp9 webm": ("webm", "libvpx-vp9", "yuv420p"),
    "mpeg4 avi": ("avi", "mpeg4", "yuv420p"),
    "mjpeg avi": ("avi", "mjpeg", "yuvj420p"),
    "ffv1 mkv": ("mkv", "ffv1", "yuv420p"),
    "gif": ("gif", "gif", "rgb8"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_frame_sizes(tmp_path, name):
    kind, codec, pix_fmt = ODD[name]
    path = write_video(tmp_path / f"odd.{kind}", steady(12), codec=codec, pix_fmt=pix_fmt, size=(33, 129))
    facts = probe(path)
    assert (facts.height, facts.width) == (33, 129)
    assert numbers(decode(path, plan_of(steady(12)))) == list(range(12))


def test_transparent_gif_pixels_are_white(tmp_path):
    pictures = []
    for number in range(12):
        colours = numbered(number, 32, 128)[..., 0] // 255
        colours[:8] = 2
        pictures.append(Image.fromarray(colours))
        pictures[-1].putpalette([0, 0, 0, 255, 255, 255, 255, 0, 255])
    path = tmp_path / "clear.gif"
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=100, transparency=2, disposal=2)
    pixels = decode(str(path), plan_of(steady(12)))
    assert numbers(pixels[:, 10:]) == list(range(12)) and pixels[:, :5].min() > 250


def test_open_gops_in_avi_have_no_offset(tmp_path):
    path = write_video(tmp_path / "open.avi", steady(40), **OPEN)
    assert [numbers(decode(path, plan_of([number / 10]))) for number in (13, 24, 37)] == [[13], [24], [37]]


def test_divx_packed_b_frames(tmp_path):
    assert_shows(write_packed(tmp_path / "plain.avi", 41), steady(41))


@pytest.mark.parametrize("disposal", [0, 1, 2])
def test_gifs_with_partial_frames_and_uneven_durations(tmp_path, disposal):
    stays = [0.05, 0.1, 0.3, 1.2, 0.06] * 6
    pictures = [Image.fromarray(np.array(numbered(number, 32, 128))) for number in range(len(stays))]
    path, milliseconds = tmp_path / "parts.gif", [round(1000 * stay) for stay in stays]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=milliseconds, disposal=disposal)
    assert_shows(str(path), [0.0, *np.cumsum(stays[:-1]).round(2).tolist()])


EDITS = {
    "begins late": ([(1.5, 4.5)], [*range(15, 60)]),
    "begins at a keyframe": ([(1.2, 4.8)], [*range(12, 60)]),
    "ends early": ([(0.0, 3.0)], [*range(30)]),
    "a piece": ([(2.0, 2.0)], [*range(20, 40)]),
    "later than the sound": ([(None, 1.0), (0.0, 6.0)], [*range(60)]),
    "a piece later than the sound": ([(None, 1.0), (1.5, 3.0)], [*range(15, 45)]),
    "begins within a frame": ([(0.75, 5.0)], [*range(8, 58)]),  # FFmpeg drops the rest of that frame
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_list_selects_the_clip(tmp_path, name):
    parts, expected = EDITS[name]
    path = write_edited(tmp_path / "edited.mp4", write_video(tmp_path / "whole.mp4", steady(60), **PYRAMID), parts)
    facts = probe(path)
    assert (facts.frames, facts.duration_s) == (len(expected), pytest.approx(len(expected) / 10, abs=0.01))
    assert numbers(decode(path, plan_of(steady(len(expected))))) == expected
    assert numbers(decode(path, plan_of([len(expected) / 20]))) == [expected[len(expected) // 2]]


@pytest.mark.parametrize("matrix", TURNS)
def test_rotated_and_mirrored_clips_are_upright(tmp_path, matrix):
    path = write_turned(tmp_path / "turned.mp4", matrix)
    facts = probe(path)
    assert (facts.height, facts.width) == ((128, 64) if matrix[1] else (64, 128))
    pixels = decode(path, VideoPlan((0.0,), 56, 56, 1.0, 4))[0]
    names = {colour: name for name, colour in COLOURS.items()}
    corners = [pixels[row, column] for row in (14, 42) for column in (14, 42)]
    assert "".join(names[tuple(np.where(corner > 128, 255, 0).tolist())] for corner in corners) == TURNS[matrix]


@pytest.mark.parametrize("kind", ["mp4", "mov", "mkv", "webm"])
def test_rotation_by_90_degrees_in_every_container(tmp_path, kind):
    options = VP9 if kind == "webm" else PYRAMID
    path = write_video(tmp_path / f"turned.{kind}", steady(12), size=(32, 256), rotation=90, **options)
    facts = probe(path)
    assert (facts.height, facts.width) == (256, 32)
    pixels = decode(path, VideoPlan(tuple(steady(12)), 28 * BARS, 28, 1.0, BARS))
    assert numbers(np.rot90(pixels, -1, axes=(1, 2))) == list(range(12))


STREAMS = {
    "a flagged cover": ([("mjpeg", 200, 1, COVER), ("libx264", 0, 20, DEFAULT)], 2.0, [0, 3]),
    "an unflagged cover": ([("mjpeg", 200, 1, DEFAULT), ("libx264", 0, 20, NONE)], 2.0, [0, 3]),
    "a cover behind": ([("libx264", 0, 20, NONE), ("mjpeg", 200, 1, NONE)], 2.0, [0, 3]),
    "the default": ([("libx264", 0, 20, NONE), ("libx264", 100, 5, DEFAULT)], 0.5, [100, 103]),
    "else the longest": ([("libx264", 100, 5, NONE), ("libx264", 0, 20, NONE)], 2.0, [0, 3]),
}
"""The last entry does not apply to MP4, where one stream is always the default."""


@pytest.mark.parametrize(("kind", "name"), [*((kind, name) for kind in ("mkv", "mp4") for name in STREAMS)][:-1])
def test_the_stream_that_a_player_selects_is_decoded(tmp_path, kind, name):
    streams, duration, expected = STREAMS[name]
    path = write_streams(tmp_path / f"streams.{kind}", *streams)
    assert probe(path).duration_s == pytest.approx(duration)
    assert numbers(decode(path, plan_of([0.0, 0.3]))) == expected


@pytest.mark.parametrize("kind", ["avi", "ts"])
def test_cover_images_are_skipped_in_containers_without_stream_flags(tmp_path, kind):
    path = write_streams(tmp_path / f"cover.{kind}", ("mjpeg", 200, 1, NONE), ("libx264", 0, 20, NONE))
    assert numbers(decode(path, plan_of([0.0, 0.3]))) == [0, 3]


@pytest.mark.parametrize("kind", ["mp4", "mkv", "mov", "ts", "avi", "webm"])
def test_non_square_pixels_are_scaled(tmp_path, kind):
    path = tmp_path / f"wide.{kind}"
    if kind == "webm":  # write the display width over other fields of the container
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
def test_interlaced_fields_become_frames(tmp_path, name, order):
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


@pytest.mark.parametrize("kind", ["avi", "mp4", "mkv"])
@pytest.mark.parametrize("codec", ["mjpeg", "libx264", "mpeg4", "ffv1"])
@pytest.mark.parametrize("fps", [10, 25])
def test_the_duration_of_a_single_frame_is_read_from_the_file(tmp_path, kind, codec, fps):
    pixels = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    path = write_video(tmp_path / f"one.{kind}", [0.0], codec=codec, fps=fps, pix_fmt=pixels)
    facts = probe(path)
    assert facts.frames == 1 and facts.duration_s == pytest.approx(1 / fps) and facts.fps == pytest.approx(fps)
    assert numbers(decode(path, plan_of([0.0, 0.0]))) == [0, 0]
