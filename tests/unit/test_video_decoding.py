"""Real files through PyAV: which frame is shown when, what is read, and everything that may be wrong with a file."""

import os
from pathlib import Path

import av
import clip_files
import numpy as np
import pytest
from clip_files import numbers, plan_of, steady, write_video

from rlfuse.video.decoding import decode, probe
from rlfuse.video.errors import VideoError
from rlfuse.video.plan import SeedSampling, plan_video

CONTAINERS = {
    "mp4": {"g": "12"},
    "mkv": {"g": "12"},
    "ts": {"g": "12"},
    "mov": {"g": "12", "bf": "0"},
    "avi": {"codec": "mpeg4", "g": "12"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("clips")


def shown(appearances, times):
    """Which frame is on the screen: the last that appeared."""
    return [max(0, np.searchsorted(appearances, time + 1e-3, side="right") - 1) for time in times]


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize(
    "times",
    [steady(100), [0.0, 0.1, 7.3, 9.9], [1.19, 1.2, 1.21, 1.25, 2.4, 2.5], [3.0, 3.0], [9.95]],
    ids=["all", "sparse", "around a keyframe", "twice", "last"],
)
def test_frames_are_those_on_the_screen(folder, kind, times):
    path = folder / f"steady.{kind}"
    if not path.exists():
        write_video(path, steady(100), **CONTAINERS[kind])
    facts = probe(str(path))
    assert facts.duration_s == pytest.approx(10.0, abs=0.11) and facts.frames == 100 and facts.fps == pytest.approx(10)
    assert numbers(decode(str(path), plan_of(times))) == shown(steady(100), times)


def test_variable_frame_rate(folder):
    appearances = [0.0, 0.04, 0.08, 1.5, 1.54, 4.0, 7.25, 7.29]
    path = write_video(folder / "variable.mp4", appearances, g="3")
    times = [0.0, 0.05, 1.0, 1.5, 3.99, 4.0, 7.0, 7.26, 7.29]
    assert numbers(decode(path, plan_of(times))) == shown(appearances, times)
    plan = plan_video(probe(path), SeedSampling(), "general")
    assert plan.times[-1] < 7.4 and decode(path, plan).shape == (plan.frames, plan.height, plan.width, 3)


def test_frame_rates_that_no_clock_divides(folder):
    for kind, fps in (("mkv", 24), ("mp4", 30), ("mp4", 7)):
        path = write_video(folder / f"uneven{fps}.{kind}", steady(50, fps), fps=fps)
        times = tuple(round(number / fps, 6) for number in range(50))
        assert numbers(decode(path, plan_of(times))) == list(range(50))


def test_a_part_of_a_plan(folder):
    path = write_video(folder / "part.mp4", steady(60), g="10")
    plan = plan_of(steady(60))
    assert numbers(decode(path, plan, 20, 33)) == list(range(20, 33))
    assert numbers(decode(path, plan, 55)) == list(range(55, 60))


def test_only_the_keyframe_intervals_of_named_frames_are_decoded(folder):
    path = write_video(folder / "holes.mp4", steady(100), g="10", bf="0", sc_threshold="0")
    with av.open(path) as container:
        entries = [(entry.pos, entry.size) for entry in container.streams.video[0].index_entries]
    with open(path, "r+b") as file:
        for pos, size in entries[21:90]:
            file.seek(pos)
            file.write(b"\xff" * size)
    assert numbers(decode(path, plan_of([0.0, 1.7, 9.0, 9.9]))) == [0, 17, 90, 99]
    with pytest.raises(VideoError, match=r"holes.mp4: can't be decoded on the way to 2.5 s"):
        decode(path, plan_of([0.0, 2.5]))


@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
def test_rotated_clips_come_upright(folder, rotation):
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


def test_8k(folder):
    path = write_video(folder / "8k.mp4", [0.0], size=(4320, 7680), preset="ultrafast")
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


def test_wide_pixels_are_shown_wide(folder):
    path = folder / "anamorphic.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        stream.codec_context.sample_aspect_ratio = 2
        container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), "rgb24")))
        container.mux(stream.encode(None))
    facts = probe(str(path))
    assert (facts.height, facts.width) == (64, 128)


def test_a_wrong_extension_is_read_by_its_content(folder):
    path = folder / "named.txt"
    os.rename(write_video(folder / "named.mp4", steady(5)), path)
    assert numbers(decode(str(path), plan_of([0.3]))) == [3]


def bad_files(folder: Path) -> dict[str, Path]:
    """Files that can't be used, by what is wrong with them."""
    files = {name: folder / f"{name}.mp4" for name in ("empty", "text", "cut", "folder", "frameless")}
    files["empty"].write_bytes(b"")
    files["text"].write_text("this is no video\n" * 100)
    whole = Path(write_video(folder / "whole.mp4", steady(50))).read_bytes()
    files["cut"].write_bytes(whole[: len(whole) // 2])
    files["folder"].mkdir()
    files["sound"] = Path(clip_files.write_sound(folder / "sound.mp4"))
    with av.open(str(files["frameless"]), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.pix_fmt = "yuv420p"
        container.start_encoding()
    files["missing"] = folder / "missing.mp4"
    return files


BAD = {
    "empty": "is empty. Replace",
    "text": "can't be read as a video",
    "cut": "can't be read as a video",
    "frameless": "has no video. Give",
    "folder": "is a folder. Correct",
    "sound": "has no video, only audio. Give",
    "missing": "there is no such file. Correct",
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_wrong_with_a_file_is_said(tmp_path, kind):
    path = bad_files(tmp_path)[kind]
    for read in (probe, lambda path: decode(path, plan_of([0.0]))):
        with pytest.raises(VideoError, match=BAD[kind]) as caught:
            read(str(path))
        assert caught.value.file == str(path)


@pytest.mark.parametrize("kind", ["mp4", "mkv", "ts"])
def test_a_clip_that_ends_early_is_an_error_and_its_last_frame_is_not_repeated(folder, kind):
    options = {"movflags": "faststart"} if kind == "mp4" else {}
    path = Path(write_video(folder / f"early.{kind}", steady(100), g="10", **options))
    plan = plan_video(probe(str(path)), SeedSampling(), "motion")
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    with pytest.raises(VideoError, match=rf"early.{kind}: (ends at|can't be decoded on the way to) [3-8]"):
        decode(str(path), plan)
