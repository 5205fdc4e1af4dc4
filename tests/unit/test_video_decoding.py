"""Decoding of real files with PyAV: times of frames, seeking, and messages for damaged files."""

import os
from pathlib import Path

import av
import clip_files
import numpy as np
import pytest
from av.stream import Disposition
from clip_files import numbers, plan_of, steady, write_blank, write_streams, write_video

from rlfuse.errors import VideoError
from rlfuse.video import decoding
from rlfuse.video.decoding import decode, probe
from rlfuse.video.plan import FixedSampling, Geometry, SeedSampling, plan_video

CONTAINERS = {
    "mp4": {"g": "12"},
    "mkv": {"g": "12"},
    "ts": {"g": "12"},
    "mov": {"g": "12", "bf": "0"},
    "avi": {"codec": "mpeg4", "g": "12", "bf": "2"},
}
"""Options with B-frames where supported; in AVI, frames have no time stamps."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("clips")


def displayed(appearances, times):
    """Return the frame displayed at each time: the last that appeared."""
    return [max(0, np.searchsorted(appearances, time + 1e-3, side="right") - 1) for time in times]


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize(
    "times",
    [steady(100), [0.0, 0.1, 7.3, 9.9], [1.19, 1.2, 1.21, 1.25, 2.4, 2.5], [3.0, 3.0], [9.95]],
    ids=["all", "sparse", "around a keyframe", "twice", "last"],
)
def test_decoded_frames_are_the_displayed_ones(folder, kind, times):
    path = folder / f"steady.{kind}"
    if not path.exists():
        write_video(path, steady(100), **CONTAINERS[kind])
    facts = probe(str(path))
    assert facts.duration_s == pytest.approx(10.0, abs=0.11) and facts.frames == 100 and facts.fps == pytest.approx(10)
    assert numbers(decode(str(path), plan_of(times))) == displayed(steady(100), times)


def test_variable_frame_rate(folder):
    appearances = [0.0, 0.04, 0.08, 1.5, 1.54, 4.0, 7.25, 7.29]
    path = write_video(folder / "variable.mp4", appearances, g="3")
    times = [0.0, 0.05, 1.0, 1.5, 3.99, 4.0, 7.0, 7.26, 7.29]
    assert numbers(decode(path, plan_of(times))) == displayed(appearances, times)
    plan = plan_video(probe(path), SeedSampling(), "general")
    assert plan.times[-1] < 7.4 and decode(path, plan).shape == (plan.frames, plan.height, plan.width, 3)


@pytest.mark.parametrize("kind", ["mp4", "mov"])
def test_pauses_at_the_start_are_valid_with_b_frames(folder, kind):
    appearances = [0.0, 5.0, 10.0, *(15 + number / 30 for number in range(30))]
    path = write_video(folder / f"pauses.{kind}", appearances, fps=30)
    facts = probe(path)
    assert facts.duration_s == pytest.approx(16.0, abs=0.01) and facts.frames == 33
    plan = plan_video(facts, SeedSampling())
    assert numbers(decode(path, plan_of(plan.times))) == [0, 1, 2, 3, 32]


@pytest.mark.parametrize("kind", ["mkv", "mp4"])
@pytest.mark.parametrize(("gap", "shorter"), [(10, 1.0), (29, 0.1), (29, 19.0)])
def test_one_shorter_gap_between_slides_loses_no_slide(folder, kind, gap, shorter):
    appearances = [20 * slide - (shorter if slide > gap else 0) for slide in range(31)]
    path = write_video(folder / f"gap{gap}_{shorter}.{kind}", appearances, fps=30)
    plan = plan_video(probe(path), SeedSampling())
    assert numbers(decode(path, plan_of(plan.times))) == list(range(31))


def test_the_duration_of_the_header_is_kept(folder):
    appearances = [*steady(60, 30), *(2.0 + 20 * slide for slide in range(1, 20))]
    path = write_video(folder / "length.mkv", appearances, codec="libvpx", fps=30)
    assert probe(path).duration_s == pytest.approx(382.03, abs=0.01)


LECTURE = [0.0, *(19.3 * slide + slide % 5 for slide in range(1, 30))]
"""Slides of a lecture, each shown for about 19 seconds."""


@pytest.mark.parametrize(("kind", "codec"), [("mkv", "libx264"), ("webm", "libvpx"), ("mp4", "libx264")])
def test_all_slides_of_a_lecture_are_sampled_for_any_frame_rate_in_the_header(folder, kind, codec):
    path = write_video(folder / f"lecture.{kind}", LECTURE, codec=codec, fps=30)
    facts = probe(path)
    assert facts.frames == 30 and facts.duration_s >= LECTURE[-1] and facts.fps < 0.1
    for sampling, level in ((SeedSampling(), 640), (FixedSampling(30, 128), 128)):
        plan = plan_video(facts, sampling)
        assert plan.times == pytest.approx(LECTURE, abs=0.001) and plan.level == level
        assert numbers(decode(path, plan_of(plan.times))) == list(range(30))
    few = plan_video(facts, SeedSampling(budget=20 * 128))
    sampled = numbers(decode(path, plan_of(few.times)))
    assert 15 <= few.frames == len(set(sampled)) <= 20 and sampled[0] == 0 and sampled[-1] >= 27
    rotary = plan_video(facts, SeedSampling(), "detail", Geometry(temporal_patch=2), timestamps=None)
    assert rotary.seconds_per_temporal_patch == 1.0 and np.allclose(np.diff(rotary.times)[:-1], 0.5)
    assert rotary.times[-1] > facts.duration_s - 1


def test_a_frame_rate_below_the_header_is_read_from_packets(folder):
    path = write_video(folder / "timelapse.mkv", steady(12, 0.25), fps=30)
    facts = probe(path)
    assert facts.fps == pytest.approx(0.25) and facts.static_intervals == ()
    plan = plan_video(facts, SeedSampling())
    assert plan.times == tuple(steady(12, 0.25)) and numbers(decode(path, plan_of(plan.times))) == list(range(12))


def test_frame_rates_that_do_not_divide_the_time_base(folder):
    for kind, fps in (("mkv", 24), ("mp4", 30), ("mp4", 7)):
        path = write_video(folder / f"uneven{fps}.{kind}", steady(50, fps), fps=fps)
        times = tuple(round(number / fps, 6) for number in range(50))
        assert numbers(decode(path, plan_of(times))) == list(range(50))


def test_a_part_of_a_plan(folder):
    path = write_video(folder / "part.mp4", steady(60), g="10")
    plan = plan_of(steady(60))
    assert numbers(decode(path, plan, 20, 33)) == list(range(20, 33))
    assert numbers(decode(path, plan, 55)) == list(range(55, 60))


def test_only_keyframe_intervals_of_requested_frames_are_decoded(folder):
    path = write_video(folder / "holes.mp4", steady(100), g="10", bf="0", sc_threshold="0")
    with av.open(path) as container:
        entries = [(entry.pos, entry.size) for entry in container.streams.video[0].index_entries]
    with open(path, "r+b") as file:
        for pos, size in entries[21:90]:
            file.seek(pos)
            file.write(b"\xff" * size)
    assert numbers(decode(path, plan_of([0.0, 1.7, 9.0, 9.9]))) == [0, 17, 90, 99]
    with pytest.raises(VideoError, match=r"holes.mp4: can't be decoded up to 2.5 s"):
        decode(path, plan_of([0.0, 2.5]))


@pytest.mark.parametrize("kind", ["mp4", "mov"])
@pytest.mark.parametrize("options", [{}, clip_files.PYRAMID, clip_files.OPEN, clip_files.MPEG4], ids=str)
def test_b_frames_do_not_move_a_seek_to_an_earlier_keyframe(tmp_path, monkeypatch, kind, options):
    path = write_video(tmp_path / f"clip.{kind}", steady(200), **({"g": "20"} | options))
    decoded, frames, gop = [], decoding._Video.frames, int(options.get("g", 20))
    monkeypatch.setattr(decoding._Video, "frames", lambda video: map(lambda f: decoded.append(f) or f, frames(video)))
    requested = range(gop + 1, 200, gop)  # the second frame of each group of pictures, in order of presentation
    assert numbers(decode(path, plan_of([number / 10 for number in requested]))) == list(requested)
    assert len(decoded) < len(requested) * gop / 2


@pytest.mark.parametrize("rotation", [45, -30])
def test_an_oblique_rotation_is_rejected(folder, rotation):
    path = write_video(folder / f"oblique{rotation}.mp4", steady(3), rotation=rotation)
    for read in (probe, lambda path: decode(path, plan_of([0.0]))):
        with pytest.raises(
            VideoError,
            match=r"oblique.*rotation of (45|-29|-30) degrees or is sheared; supported are multiples of 90, .*Rotate",
        ):
            read(path)


@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
def test_rotated_clips_are_decoded_upright(folder, rotation):
    path = write_video(folder / f"rotated{rotation}.mp4", steady(4), size=(32, 128), rotation=rotation)
    facts = probe(path)
    assert (facts.height, facts.width) == ((128, 32) if rotation % 180 else (32, 128))
    pixels = decode(path, plan_video(facts, SeedSampling(), "motion"))
    assert pixels.shape[1] > pixels.shape[2] if rotation % 180 else pixels.shape[1] < pixels.shape[2]
    stored = np.rot90(pixels, -rotation // 90, axes=(1, 2))
    bars = np.stack([stored[..., width * stored.shape[2] // 16, :] for width in range(1, 16, 2)], 2)
    assert numbers(np.repeat(bars, 4, axis=2))[:2] == [0, 2]


def test_portrait(folder):
    path = write_video(folder / "portrait.mp4", steady(3), size=(640, 360))
    plan = plan_video(probe(path), SeedSampling())
    assert plan.height > plan.width and decode(path, plan).shape == (1, plan.height, plan.width, 3)


@pytest.mark.slow
def test_8k(folder):
    path = write_blank(folder / "8k.mp4", (4320, 7680))
    plan = plan_video(probe(path), SeedSampling())
    assert (plan.height, plan.width, plan.frames) == (19 * 28, 33 * 28, 1)
    assert decode(path, plan).shape == (1, plan.height, plan.width, 3)


def test_one_frame(folder):
    for kind in ("mp4", "mkv"):
        path = write_video(folder / f"one.{kind}", [0.0])
        facts = probe(path)
        plan = plan_video(facts, SeedSampling(), "motion")
        assert facts.frames == 1 and plan.times == (0.0,)
        assert decode(path, plan).shape == (1, plan.height, plan.width, 3)


def test_a_wrong_extension_is_read_by_its_content(folder):
    path = folder / "named.txt"
    os.rename(write_video(folder / "named.mp4", steady(5)), path)
    assert numbers(decode(str(path), plan_of([0.3]))) == [3]


def bad_files(folder: Path) -> dict[str, Path]:
    """Return invalid files by the kind of error."""
    files = {name: folder / f"{name}.mp4" for name in ("empty", "text", "cut", "folder", "frameless")}
    files["empty"].write_bytes(b"")
    files["text"].write_text("this is no video\n" * 100)
    content = Path(write_video(folder / "whole.mp4", steady(50))).read_bytes()
    files["cut"].write_bytes(content[: len(content) // 2])
    files["folder"].mkdir()
    files["sound"] = Path(clip_files.write_sound(folder / "sound.mp4"))
    with av.open(str(files["frameless"]), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.pix_fmt = "yuv420p"
        container.start_encoding()
    files["missing"] = folder / "missing.mp4"
    files["song"] = Path(write_streams(folder / "song.mkv", ("mjpeg", 0, 1, Disposition(0)), sound_s=1.0))
    return files


BAD = {
    "empty": "is empty. Replace",
    "text": "can't be read as a video",
    "cut": "can't be read as a video",
    "frameless": "has no video. Give",
    "folder": "is a folder. Correct",
    "sound": "has no video, only audio. Give",
    "missing": "does not exist. Correct",
    "song": "has no video, only cover art and audio. Give",
}


@pytest.mark.parametrize("kind", BAD)
def test_invalid_files_are_reported(tmp_path, kind):
    path = bad_files(tmp_path)[kind]
    for read in (probe, lambda path: decode(path, plan_of([0.0]))):
        with pytest.raises(VideoError, match=BAD[kind]) as caught:
            read(str(path))
        assert caught.value.file == str(path)


@pytest.mark.parametrize("kind", ["mp4", "mkv", "ts"])
def test_a_truncated_clip_is_an_error(folder, kind):
    options = {"movflags": "faststart"} if kind == "mp4" else {}
    path = Path(write_video(folder / f"early.{kind}", steady(100), g="10", **options))
    plan = plan_video(probe(str(path)), SeedSampling(), "motion")
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    with pytest.raises(VideoError, match=rf"early.{kind}: (ends at [3-8]|.* its index refers to byte)"):
        decode(str(path), plan)


def overwrite(path: str, name: bytes, ahead: int, value: bytes) -> str:
    """Write `value` at `ahead` bytes after the last occurrence of `name`; return the path."""
    data = bytearray(Path(path).read_bytes())
    place = data.rindex(name) + ahead
    data[place : place + len(value)] = value
    Path(path).write_bytes(data)
    return path


def write_inconsistent_clips(folder: Path) -> dict[str, str]:
    """Write clips of 10 s whose header and time stamps disagree; return file name -> path."""
    cut = Path(write_video(folder / "cut.mkv", steady(100), g="10"))
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size * 2 // 3])
    cluster, block_time = b"\x1f\x43\xb6\x75", len(b"\x1f\x43\xb6\x75") + 1
    content = Path(write_video(folder / "jump.mkv", steady(100), g="10")).read_bytes()
    stamp = content.index(b"\xe7", content.rindex(cluster) + block_time) - content.rindex(cluster)
    return {
        "cut.mkv": str(cut),
        "jump.mkv": overwrite(str(folder / "jump.mkv"), cluster, stamp + 2, b"\xff"),
        "long.mp4": overwrite(write_video(folder / "long.mp4", steady(100)), b"stts", 16, b"\x00\x20"),
        "jump.ts": write_video(folder / "jump.ts", [*steady(100), 2186.0]),
    }


def test_inconsistent_header_and_time_stamps_are_rejected_with_both_values(folder):
    messages = {
        "cut.mkv": r"ends at [3-8][.\d]* s, but its header gives 10 s: it is truncated\. Fetch it again",
        "jump.mkv": r"has time stamps over [3-9]\d[.\d]* s, but its header gives 10 s: one of them is damaged\. Write",
        "long.mp4": r"has time stamps over \d{3,}[.\d]* s, but its header gives 10 s: one of them is damaged\. Write",
        "jump.ts": r"has time stamps over 2186\.1 s, with a jump of 2176\.1 s between two frames\. Write",
    }
    for kind, path in write_inconsistent_clips(folder).items():
        with pytest.raises(VideoError, match=f"{kind}: {messages[kind]}"):
            probe(path)


def test_a_time_stamp_beyond_the_clip_is_rejected(folder):
    path = write_video(folder / "order.mp4", steady(100), bf="2", b_strategy="0")
    overwrite(overwrite(path, b"ctts", 12 + 8 * 3 + 4, b"\x02"), b"edts", 0, b"free")
    with pytest.raises(
        VideoError, match=r"order.mp4: has a frame stamped 2\d{3}[.\d]* s, but its header gives 10.* s: one"
    ):
        decode(path, plan_of(steady(100)))


def test_decreasing_time_stamps_are_rejected(folder):
    path = write_video(folder / "back.mp4", steady(100), bf="2", b_strategy="0")
    overwrite(path, b"ctts", 12 + 8 * 2 + 4 + 2, b"\x10")
    with pytest.raises(
        VideoError, match=r"back.mp4: has a frame stamped .* s after one of .*: its time stamps are dam"
    ):
        decode(path, plan_of(steady(100)))


@pytest.mark.parametrize(("kind", "head"), [("mp4", 1200), ("mkv", 1200), ("ts", 4000), ("avi", 6000)])
def test_damage_to_the_structure_of_a_file_is_harmless_or_reported(folder, kind, head):
    # The duration of a damaged clip is never far too long.
    path = folder / f"damaged.{kind}"
    content = Path(write_video(path, steady(40), g="12", codec="mpeg4" if kind == "avi" else "libx264")).read_bytes()
    places = range(len(content) - head, len(content)) if kind == "mp4" else range(head)  # tables of MP4 are at the end
    rng = np.random.default_rng(0)
    for place in rng.choice(places, 40, replace=False):
        damaged = bytearray(content)
        damaged[place] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        try:
            assert probe(str(path)).duration_s < 9
        except VideoError as error:
            assert error.file == str(path)
