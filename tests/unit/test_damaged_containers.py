"""Damaged video files in every container: readable frames are decoded correctly, other files are refused."""

import struct
from pathlib import Path

import av
import pytest
from clip_files import (
    MJPEG,
    MPEG2,
    MPEG4,
    OPEN,
    PYRAMID,
    UNEVEN,
    VP9,
    X265,
    assert_shows,
    numbers,
    plan_of,
    steady,
    write_edited,
    write_packets,
    write_video,
)

from rlfuse.errors import VideoError
from rlfuse.video.decoding import decode, probe


def test_avi_b_frames_without_known_presentation_times_are_refused(tmp_path):
    pauses = write_video(tmp_path / "pauses.avi", UNEVEN, fps=20, **MPEG4)
    within = write_packets(tmp_path / "within.avi", write_video(tmp_path / "whole.mkv", steady(60), **MPEG4), first=5)
    for path, what in ((pauses, "pauses"), (within, "no keyframe at its start")):
        with pytest.raises(
            VideoError, match=rf"{path}: has B-frames and {what}, but AVI does not store presentation times"
        ):
            probe(path)


@pytest.mark.parametrize("options", [MJPEG, MPEG4, PYRAMID, {"bf": "0", "g": "12"}, {"codec": "ffv1"}])
def test_avi_without_an_index(tmp_path, options):
    path = tmp_path / "clip.avi"
    whole = Path(write_video(path, steady(60), **options)).read_bytes()
    end = whole.rindex(b"idx1")
    path.write_bytes(whole[:4] + struct.pack("<I", end - 8) + whole[8:end])
    assert_shows(str(path), steady(60))


@pytest.mark.parametrize("options", [PYRAMID, OPEN, MPEG4, X265, VP9])
def test_an_index_without_keyframe_flags(tmp_path, options):
    path = Path(write_video(tmp_path / "clip.mp4", steady(60), **options))
    path.write_bytes(path.read_bytes().replace(b"stss", b"free"))
    assert_shows(str(path), steady(60))


WITHIN = {
    "h264 ts": ("ts", PYRAMID, 8),
    "h264 mp4": ("mp4", PYRAMID, 8),
    "h265 mkv": ("mkv", X265, 12),
    "mpeg4 mp4": ("mp4", MPEG4, 20),
    "mpeg4 mkv": ("mkv", MPEG4, 20),
    "mpeg4 avi": ("avi", MPEG4 | {"bf": "0"}, 20),
    "mpeg2 ts": ("ts", MPEG2, 12),
    "mpeg2 mpg": ("mpg", MPEG2, 12),
}
"""(container, codec, first frame that can be decoded without the first five packets)."""


@pytest.mark.parametrize("name", WITHIN)
def test_a_recording_starts_at_its_first_keyframe(tmp_path, name):
    kind, options, first = WITHIN[name]
    fps = options.get("fps", 10)
    whole = write_video(tmp_path / "whole.mkv", steady(60, fps), **options)
    path = write_packets(tmp_path / f"recording.{kind}", whole, first=5)
    times = steady(60 - first, fps)
    assert probe(path).frames == len(times)
    assert numbers(decode(path, plan_of(times))) == list(range(first, 60))
    assert [numbers(decode(path, plan_of([time])))[0] for time in times[::7]] == list(range(first, 60))[::7]


CUT = {
    "mp4": PYRAMID | {"movflags": "faststart"},
    "mov": MJPEG | {"movflags": "faststart"},
    "fragments": PYRAMID | {"movflags": "frag_keyframe+empty_moov"},
    "mkv": PYRAMID,
    "live webm": VP9 | {"live": "1"},
    "avi": MPEG4,
    "mjpeg avi": MJPEG,
    "flv": PYRAMID,
    "gif": {"codec": "gif", "pix_fmt": "rgb8"},
    "apng": {"codec": "apng", "pix_fmt": "rgb24"},
    "ivf": VP9,
    "ts": PYRAMID,
}


ENDS_MARKED = ("mp4", "mov", "mkv", "gif")
"""Containers that record their length; in others, a missing end may go undetected."""


@pytest.mark.parametrize("name", CUT)
def test_truncated_files_are_refused_or_shorter_without_wrong_frames(tmp_path, name):
    path = tmp_path / f"cut.{name.split()[-1].replace('fragments', 'mp4')}"
    whole = Path(write_video(path, steady(60), **CUT[name])).read_bytes()
    refused = 0
    for share in (0.3, 0.5, 0.7, 0.9):
        path.write_bytes(whole[: int(share * len(whole))])
        try:
            seen = numbers(decode(str(path), plan_of(steady(probe(str(path)).frames))))
            *front, last = seen
            assert len(front) > 5 and front == [*range(len(front))]
            assert last in (len(front), len(front) - 1)  # a partial frame is lost
        except VideoError as error:
            assert error.file == str(path)
            refused += 1
    assert name not in ENDS_MARKED or refused == 4


def test_a_newline_after_a_gif_is_ignored(tmp_path):
    path = Path(write_video(tmp_path / "line.gif", steady(20), **CUT["gif"]))
    path.write_bytes(path.read_bytes() + b"\r\n")
    assert numbers(decode(str(path), plan_of(steady(20)))) == [*range(20)]


@pytest.mark.parametrize("options", [PYRAMID, {"bf": "0", "g": "12"}, X265, MPEG2])
def test_frames_between_the_keyframes_around_lost_packets_are_refused(tmp_path, options):
    fps, path = options.get("fps", 10), tmp_path / "lost.ts"
    whole = Path(write_video(path, steady(60, fps), **options)).read_bytes()
    with av.open(str(path)) as container:
        places = sorted(packet.pos for packet in container.demux(video=0) if packet.size)
    path.write_bytes(whole[: places[27]] + whole[places[28] :])
    seen = {}
    for number in range(60):
        try:
            seen[number] = numbers(decode(str(path), plan_of([number / fps])))[0]
        except VideoError as error:
            assert f"lost packets between its keyframes around {number / fps:g} s. Fetch it again" in str(error)
    assert all(number == shown for number, shown in seen.items())
    assert 42 < len(seen) < 59 and {*range(20), *range(40, 60)} <= set(seen)


def test_concatenated_segments_are_complete(tmp_path):
    write_video(tmp_path / "part%d.ts", steady(60), container="segment", segment_time="1.2", **PYRAMID)
    parts = [path.read_bytes() for path in sorted(tmp_path.glob("part*"))]
    (path := tmp_path / "stream.ts").write_bytes(b"".join(parts))
    assert len(parts) >= 3
    assert_shows(str(path), steady(60))


BARE = {"h264": PYRAMID, "hevc": X265, "m1v": MPEG2 | {"codec": "mpeg1video"}, "mjpeg": MJPEG}


@pytest.mark.parametrize("kind", BARE)
def test_streams_without_a_container_are_refused(tmp_path, kind):
    path = write_video(tmp_path / f"bare.{kind}", steady(10), **BARE[kind])
    with pytest.raises(VideoError, match=f"bare.{kind}: is a raw stream without time stamps.* Put the stream into"):
        probe(path)


def test_program_streams_with_few_time_stamps_are_refused(tmp_path):
    path = write_video(tmp_path / "few.mpg", steady(60), **PYRAMID)
    with pytest.raises(VideoError, match=r"few.mpg: has frames without time stamps. Put the stream into"):
        probe(path)


def test_concatenated_recordings_with_restarting_time_stamps_are_refused(tmp_path):
    part = Path(write_video(tmp_path / "part.ts", steady(40), **PYRAMID)).read_bytes()
    (path := tmp_path / "both.ts").write_bytes(part * 2)
    with pytest.raises(VideoError, match=r"both.ts: .*a time stamp is damaged"):
        probe(str(path))


@pytest.mark.parametrize(("kind", "options"), [("webm", VP9), ("mkv", MJPEG)])
def test_changes_of_aspect_ratio_are_refused_but_not_of_size(tmp_path, kind, options):
    parts = {
        size: write_video(tmp_path / f"{size}.mkv", steady(20), size=(size // 4, size), **options)
        for size in (128, 256)
    }
    path = write_packets(tmp_path / f"sizes.{kind}", parts[128], parts[256])
    assert numbers(decode(path, plan_of(steady(40)))) == [*range(20)] * 2
    square = write_video(tmp_path / "square.mkv", steady(20), size=(128, 128), **options)
    path = write_packets(tmp_path / f"shapes.{kind}", parts[128], square)
    for times in (steady(40), [3.5]):
        with pytest.raises(
            VideoError, match=r"shapes.*: changes its aspect ratio.* 128 x 32 pixels to 128 x 128. Split it there"
        ):
            decode(path, plan_of(times))


@pytest.mark.parametrize("parts", [[(0.0, 1.0), (3.0, 2.0)], [(3.0, 2.0), (0.0, 1.0)], [(0, 1), (None, 1), (3, 1)]])
def test_several_edits_are_refused(tmp_path, parts):
    path = write_edited(tmp_path / "edited.mp4", write_video(tmp_path / "whole.mp4", steady(60), **PYRAMID), parts)
    for read in (probe, lambda path: decode(path, plan_of([0.0]))):
        with pytest.raises(
            VideoError, match=r"edited.mp4: has an edit list with several segments.* Write it again with"
        ):
            read(path)


def test_fields_stored_as_separate_frames_are_refused(tmp_path):
    options = {"codec": "libx265", "x265-params": "interlace=tff:log-level=none", "fps": 50}
    path = write_video(tmp_path / "fields.ts", steady(6, 50), **options)
    for read in (probe, lambda path: decode(path, plan_of([0.0]))):
        with pytest.raises(VideoError, match=r"fields.ts: stores each field as a separate picture.* Deinterlace it"):
            read(path)


@pytest.mark.parametrize("codec", ["mjpeg", "libx264", "ffv1"])
def test_an_avi_truncated_to_one_frame_is_refused(tmp_path, codec):
    whole = Path(
        write_video(
            tmp_path / "whole.avi", steady(60), codec=codec, pix_fmt="yuvj420p" if codec == "mjpeg" else "yuv420p"
        )
    )
    data = whole.read_bytes()
    place = data.index(b"00dc", data.index(b"movi"))
    cut = tmp_path / "cut.avi"
    cut.write_bytes(data[: place + 8 + int.from_bytes(data[place + 4 : place + 8], "little")])
    with pytest.raises(VideoError, match=r"cut\.avi: .* truncated"):
        probe(str(cut))


LISTS = {
    "ffconcat": "ffconcat version 1.0\nfile '{}'\n",
    "ffconcat with comments": "# made by a tool\nffconcat version 1.0\nfile {}\nduration 2\n",
    "hls": "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:1\n#EXTINF:1.0,\n{}\n#EXT-X-ENDLIST\n",
}


@pytest.mark.parametrize("name", ["clip.mp4", "clip.ffconcat", "clip.m3u8"])
@pytest.mark.parametrize("kind", LISTS)
def test_playlists_are_refused_without_opening_their_files(tmp_path, kind, name):
    (tmp_path / name).write_text(LISTS[kind].format("absent.ts"))
    refused = r"has a damaged header or an unsupported format|can't be read as a video \(Invalid data"
    for read in (probe, lambda path: decode(path, plan_of([0.0]))):
        with pytest.raises(VideoError, match=rf"{name}: ({refused})"):
            read(str(tmp_path / name))
