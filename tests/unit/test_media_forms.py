"""Clips and images in the formats of common data sets, several per prompt; unusable ones are reported."""

import base64
import io
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from clip_files import numbered, numbers, plan_of, steady, write_video
from PIL import Image

from rlfuse.config.checks import check
from rlfuse.config.facts import read_facts
from rlfuse.config.schema import Config
from rlfuse.data.clips import ClipReader
from rlfuse.data.prompts import load_prompts
from rlfuse.data.rows import read_rows
from rlfuse.data.tokenizers import load_tokenizer
from rlfuse.errors import DataError
from rlfuse.tasks.small_video_models import SmallModel, write_small_video_llama3
from rlfuse.video.decoding import decode, probe
from rlfuse.video.embedding import content_hash
from rlfuse.video.frame_list import frame_list_bytes
from rlfuse.video.media_settings import ClipSettings, ImageSettings
from rlfuse.video.video_model import VideoModel

pytestmark = pytest.mark.usefixtures("one_decode_pool")

MP4 = b"\0\0\0\x20ftypisom" + bytes(range(256)) * 2
PNG = b"\x89PNG\r\n\x1a\n" + bytes(80)
TEXT = base64.b64encode(MP4).decode()


def user(*parts):
    return {"prompt": [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]}


def clip(**keys):
    return {"type": "video"} | keys


def rows_of(folder, *rows):
    """Write rows as JSON lines, or as Parquet if they contain bytes; return the file."""
    file = folder / "rows.parquet"
    try:
        text = "\n".join(map(json.dumps, rows))
    except TypeError:
        pq.write_table(pa.Table.from_pylist(list(rows)), file)
    else:
        (file := folder / "rows.jsonl").write_text(text)
    return file


FORMS = [  # (row, sources of its clips, with paths below the folder of the data; the prompt)
    ({"prompt": "<video> or <video>?", "videos": ["a.mp4", "b.mp4"]}, ["a.mp4", "b.mp4"], "<video> or <video>?"),
    (user(clip(video=["0.png", "1.png"])), [("0.png", "1.png")], "<video>?"),
    ({"prompt": "<video>?", "videos": [MP4]}, [MP4], "<video>?"),
    ({"prompt": "<video>?", "videos": [{"bytes": MP4, "path": "a.mp4"}]}, [MP4], "<video>?"),
    ({"prompt": "<video>?", "videos": [f"data:video/mp4;base64,{TEXT}"]}, [MP4], "<video>?"),
    ({"prompt": "what?", "videos": ["a.mp4"]}, ["a.mp4"], "<video>what?"),
    ({"prompt": "?", "videos": ["file:///a%20b/c%25.mp4"]}, ["/a b/c%.mp4"], "<video>?"),
    ({"prompt": "?", "videos": ["file://localhost/a.mp4"]}, ["/a.mp4"], "<video>?"),
    # More cases.
    ({"prompt": "?", "videos": ["a.mp4", "b.mp4", "a.mp4"]}, ["a.mp4", "b.mp4", "a.mp4"], "<video><video><video>?"),
    ({"prompt": "?", "videos": [TEXT]}, [MP4], "<video>?"),
    ({"prompt": "?", "videos": [{"bytes": TEXT}]}, [MP4], "<video>?"),
    ({"prompt": "?", "videos": [["0.png", "1.png"], "a.mp4"]}, [("0.png", "1.png"), "a.mp4"], "<video><video>?"),
    ({"prompt": "?", "videos": [{"video": [{"bytes": PNG}, {"bytes": PNG}]}]}, [(PNG, PNG)], "<video>?"),
    (
        user(clip(video=[base64.b64encode(PNG).decode(), "file:/a/1.png"])),
        [(PNG, "/a/1.png")],
        "<video>?",
    ),
    (
        user({"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,/9j/AA==,/9j/AQ=="}}),
        [(b"\xff\xd8\xff\0", b"\xff\xd8\xff\1")],
        "<video>?",
    ),
    ({"prompt": "?", "video": {"bytes": MP4, "path": None}}, [MP4], "<video>?"),
    ({"prompt": "<video>?", "video": "a.mp4"}, ["a.mp4"], "<video>?"),
    ({"prompt": "<video>?", "video": ["0.png", "1.png"]}, [("0.png", "1.png")], "<video>?"),
    (user({"video": "a.mp4"}, clip(path="b.mp4")), ["a.mp4", "b.mp4"], "<video><video>?"),
    (user(clip(index=1), clip(index=0)) | {"videos": ["a.mp4", "b.mp4"]}, ["b.mp4", "a.mp4"], "<video><video>?"),
    (user(clip(), clip(video="b.mp4")) | {"videos": ["a.mp4"]}, ["a.mp4", "b.mp4"], "<video><video>?"),
    ({"prompt": "?", "videos": ["FILE:///%E3%81%82#1?.mp4"]}, ["/あ#1?.mp4"], "<video>?"),
    ({"prompt": "<image>?", "images": ["0.png"], "videos": ["a.mp4"]}, ["a.mp4"], "<video><image>?"),
]


@pytest.mark.parametrize(("row", "sources", "content"), FORMS)
def test_clips_are_accepted_in_every_form(tmp_path, row, sources, content):
    def absolute(source):
        if isinstance(source, tuple):
            return tuple(map(absolute, source))
        return str(tmp_path / source) if isinstance(source, str) else source

    [found] = read_rows(str(rows_of(tmp_path, row)), "prompt")
    assert [each.source for each in found.videos] == [absolute(source) for source in sources]
    assert [message["content"] for message in found.messages] == [content]


SETTINGS = {"video_start": 2.0, "video_end": 4.0, "fps": 1.0, "min_frames": 2, "max_frames": 8}
SETTINGS |= {"min_pixels": 784, "max_pixels": 7840, "total_pixels": 78400}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "?", "videos": [{"video": "a.mp4"} | SETTINGS]},
        {"prompt": "?", "videos": {"video": "a.mp4"} | SETTINGS},
        {"prompt": "?", "videos": [{"video": {"path": "a.mp4"} | SETTINGS}]},
        {"prompt": "?", "video": {"path": "a.mp4", "bytes": None} | SETTINGS},
        user(clip(video="a.mp4", **SETTINGS)),
        user({"video": "a.mp4"} | SETTINGS),
        user({"type": "video_url", "video_url": {"url": "a.mp4"} | SETTINGS}),
        user({"type": "video_url", "video_url": {"url": "a.mp4"}} | SETTINGS),
        user(clip(**SETTINGS)) | {"videos": ["a.mp4"]},
        user(clip(**SETTINGS)) | {"videos": [{"video": "a.mp4", "fps": 9.0, "min_frames": 2}]},
        user(clip(video="a.mp4", text="", nframes=None, **SETTINGS | {"min_frames": 2.0})),
        {"prompt": json.dumps(user(clip(video="a.mp4", **SETTINGS))["prompt"])},
    ],
)
def test_settings_are_read_wherever_they_are_given(tmp_path, row):
    [found] = read_rows(str(rows_of(tmp_path, row)), "prompt")
    assert [each.settings for each in found.videos] == [ClipSettings(**SETTINGS)]
    assert found.videos[0].source == str(tmp_path / "a.mp4")


def test_settings_of_images_and_of_lists_of_frames_are_read(tmp_path):
    rows = [
        {"prompt": "?", "images": [{"image": "a.png", "max_pixels": 784, "detail": "low"}]},
        {"prompt": "?", "videos": [{"video": ["0.png"], "fps": 4}]},
        {"prompt": "?", "videos": [{"video": ["0.png"], "sample_fps": 4, "fps": 1}]},
        {"prompt": "?", "videos": [["0.png"]]},
    ]
    image, rate, both, none = read_rows(str(rows_of(tmp_path, *rows)), "prompt")
    assert image.images[0].settings == ImageSettings(max_pixels=784)
    assert rate.videos[0].settings == ClipSettings(sample_fps=4.0)
    assert both.videos[0].settings == ClipSettings(sample_fps=4.0, fps=1.0)
    assert none.videos[0].settings == ClipSettings(sample_fps=2.0)


REFUSED = [
    (
        {"videos": ["s3://bucket/a.mp4"]},
        r"videos: .* s3:// URLs are not supported\. Copy the file to a folder shared by all nodes",
    ),
    ({"videos": ["http://x.org/a.mp4"]}, r"http:// URLs are not supported\. Copy"),
    (user(clip(video="https://x.org/a.mp4")), r"https:// URLs are not supported"),
    ({"videos": [{"video": "a.mp4", "start": 2}]}, r"the key 'start' is not known; valid are .*video_start"),
    ({"images": [{"image": "a.png", "fps": 2}]}, r"images: .* the key 'fps' is not known; valid are .*max_pixels"),
    (user(clip(video="a.mp4", nframe=4)), "the key 'nframe' is not known"),
    (
        {"prompt": "?", "videos": ["a.mp4"], "extra_info": {"task": "counting"}},
        r"extra_info\.task: 'counting' is not a valid task",
    ),
    # More cases.
    ({"videos": ["gs://bucket/a.mp4"]}, "gs:// URLs are not supported"),
    ({"videos": [["0.png", "hdfs://x/1.png"]]}, "hdfs:// URLs are not supported"),
    ({"images": ["S3://bucket/a.png"]}, "images: .* S3:// URLs are not supported"),
    ({"videos": [{"video": {"path": "a.mp4", "raw_fps": 30}}]}, "the key 'raw_fps' is not known"),
    ({"videos": [{"video": "a.mp4", "path": "b.mp4"}]}, "has both 'path' and 'video'"),
    ({"videos": [{"video": "a.mp4", "image": "b.png"}]}, "the key 'image' is not known"),
    (user(clip(video="a.mp4", text="what")), "the key 'text' is not known"),
    ({"videos": [{"fps": 2}]}, "where a file path, bytes or a list of frames is expected"),
    ({"videos": [{"video": "a.mp4", "fps": -2}]}, r"fps is -2; valid is a finite number above 0"),
    ({"videos": [{"video": "a.mp4", "nframes": 4, "fps": 2}]}, "nframes=4 and fps=2 exclude each other"),
    ({"videos": [{"video": "a.mp4", "sample_fps": 2}]}, r"sample_fps applies to lists of frames.* Use fps"),
    (
        {"videos": [{"video": [{"image": "0.png", "max_pixels": 9}]}]},
        "frames can't have settings, got {'max_pixels': 9}",
    ),
    ({"videos": [{"video": [["0.png"]]}]}, "where a file path"),
    ({"videos": [{"bytes": "not base64"}]}, "where a file path, bytes"),
    ({"videos": ["data:video/mp4,abc"]}, "where a file path"),
    ({"videos": ["data:video/mp4;base64,AAAA-_=="]}, "where a file path"),
    ({"videos": [{"bytes": "clips/a1/b.mp4"}]}, "where a file path"),
    ({"videos": [7]}, "7 where a file path"),
    ({"videos": ["a.mp4"], "extra_info": {"task": ["motion"]}}, r"extra_info\.task: \['motion'\] is not a valid task"),
    (
        {"videos": ["a.mp4"], "extra_info": {"task": ""}},
        r"extra_info\.task: '' is not a valid task; valid are general, ",
    ),
    ({"videos": ["a.mp4"], "extra_info": {"task": "Motion"}}, r"extra_info\.task: 'Motion' is not a valid task"),
]


@pytest.mark.parametrize(("row", "words"), REFUSED)
def test_invalid_media_are_reported_with_file_row_and_field(tmp_path, row, words):
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 1, field .*{words}"):
        read_rows(str(rows_of(tmp_path, {"prompt": "?"} | row)), "prompt")


ROOTED = {  # a path in a row -> the file that it names; None where it is outside of data.media_root
    "a.mp4": "root/a.mp4",
    "./in/../a.mp4": "root/a.mp4",
    "file://{0}/root/in/a%20b.mp4": "root/in/a b.mp4",
    "{0}/root/absent.mp4": "root/absent.mp4",
    "inner.mp4": "root/a.mp4",
    "loop.mp4": "root/loop.mp4",
    "../secret.mp4": None,
    "in/../../secret.mp4": None,
    "%2e%2e/secret.mp4": "root/%2e%2e/secret.mp4",
    "file://{0}/root/%2e%2e/secret.mp4": None,
    "{0}/secret.mp4": None,
    "/etc/passwd": None,
    "file:///etc/passwd": None,
    "~/a.mp4": None,
    "outer.mp4": None,
    "folder/secret.mp4": None,
    "{0}/root2/a.mp4": None,
    "..": None,
}
FRAMES = {"list.frames": "names other files", "renamed.mp4": "names other files", "a\0.mp4": "a null character"}
HOLDERS = [
    ("video", lambda path: {"prompt": "?", "videos": [path]}),
    ("video", lambda path: {"prompt": "?", "video": {"path": path}}),
    ("video", lambda path: user(clip(video=path))),
    ("video", lambda path: user({"type": "video_url", "video_url": {"url": path}})),
    ("video", lambda path: {"prompt": "?", "videos": [["0.png", {"image": path}]]}),
    ("image", lambda path: {"prompt": "?", "images": [{"image": path}]}),
    ("image", lambda path: {"prompt": "<image>?", "image": path}),
]


@pytest.fixture
def rooted(tmp_path):
    """Create a media root with links into it and out of it, next to files that no row may name."""
    for name in ("root/in", "root2", "data"):
        (tmp_path / name).mkdir(parents=True)
    links = {"inner.mp4": "a.mp4", "outer.mp4": "../secret.mp4", "folder": "..", "loop.mp4": "loop.mp4"}
    for name, target in (links | {"renamed.mp4": "list.frames"}).items():
        (tmp_path / "root" / name).symlink_to(target)
    return tmp_path


@pytest.mark.parametrize("path", [*ROOTED, *FRAMES])
@pytest.mark.parametrize(("kind", "row"), HOLDERS)
def test_rows_cannot_name_files_outside_of_the_media_root(rooted, kind, row, path):
    file = rows_of(rooted / "data", row(path.format(rooted)))
    if found := ROOTED.get(path):
        [read] = read_rows(str(file), "prompt", media_root=str(rooted / "root"))
        [media] = read.videos if kind == "video" else read.images
        assert (media.source[-1] if isinstance(media.source, tuple) else media.source) == str(rooted / found)
        return
    with pytest.raises(DataError, match=r"rows\.jsonl, line 1, field .*") as refused:
        read_rows(str(file), "prompt", media_root=str(rooted / "root"))
    words = FRAMES.get(path) or f"outside of data.media_root={rooted}/root. Move the file into that folder"
    assert words in str(refused.value)


def test_media_root_is_checked_at_startup_and_applied_to_rows(rooted, monkeypatch):
    config = Config()
    config.model.path, config.data.train_files = str(rooted), [str(rows_of(rooted / "data", HOLDERS[0][1]("../x")))]
    for root in ("", str(rooted / "absent")):
        config.data.media_root = root
        problem = f"data.media_root={root}: does not exist; give the folder of the clips and images of rows"
        assert problem in check(config, read_facts(config))
    config.data.media_root = str(rooted / "root")
    monkeypatch.setattr("rlfuse.data.prompts.check_template", lambda *_: None)
    with pytest.raises(DataError, match=r"outside of data\.media_root"):
        load_prompts(config.data.train_files, None, config.data)


def test_task_is_only_read_from_rows_with_clips(tmp_path):
    rows = [{"prompt": "2 + 2", "extra_info": {"task": "sum"}}, {"prompt": "?", "videos": ["a"], "extra_info": "none"}]
    rows += [{"prompt": "?", "videos": ["a"], "extra_info": {"task": each}} for each in (None, "motion")]
    assert [row.task for row in read_rows(str(rows_of(tmp_path, *rows)), "prompt")] == [None, None, None, "motion"]


# Prompts -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a video model, a clip of 60 numbered frames at 10 fps, and numbered images."""
    folder = tmp_path_factory.mktemp("forms")
    write_small_video_llama3(folder / "model", SmallModel(heads=2, layers=1, tower_heads=1, tower_layers=1))
    write_video(folder / "a b.mp4", steady(60))
    for number in range(8):
        Image.fromarray(numbered(number, 32, 128)).save(folder / f"{number}.png")
    Image.fromarray(numbered(0, 128, 32)).save(folder / "tall.png")
    return folder


def load(folder, *rows):
    config = Config()
    config.model.path, config.data.max_prompt_length, config.video.max_failure_rate = str(folder / "model"), 2000, 1.0
    tokenizer, model = load_tokenizer(config.model), VideoModel.from_pretrained(config.model.path)
    reader = ClipReader(model, config.video, tokenizer, 1, folder / ".images")
    return load_prompts([str(rows_of(folder, *rows))], tokenizer, config.data, reader)


def shown(visual):
    """Return the numbers of the frames that the plan samples from its clip."""
    return numbers(decode(visual.path, plan_of(visual.plan.times)))


@pytest.mark.slow
def test_prompts_contain_the_requested_frames(folder):
    video, some = (folder / "a b.mp4").read_bytes(), {"video_start": 2.0, "video_end": 4.0}
    url = f"data:video/mp4;base64,{base64.b64encode(video).decode()}"
    frames = [f"{number}.png" for number in range(8)]
    rows = [
        ({"prompt": "?", "videos": [{"video": "a b.mp4"} | some]}, [[20, 27, 33, 40]]),
        (user(clip(video=f"file://localhost{folder}/a%20b.mp4", nframes=3, **some)), [[20, 30, 40]]),
        ({"prompt": "?", "videos": [{"bytes": video, "fps": 0.5, "min_frames": 1}]}, [[0, 30, 59]]),
        ({"prompt": "?", "videos": [url, {"video": "a b.mp4", "nframes": 2}]}, [[0, 10, 20, 30, 40, 50], [0, 59]]),
        ({"prompt": "?", "videos": [frames]}, [list(range(8))]),
        ({"prompt": "?", "videos": [{"video": frames[::-1], "nframes": 3}]}, [[7, 3, 0]]),
        (user(clip(video=[{"bytes": (folder / "5.png").read_bytes()}, "2.png"])), [[5, 2]]),
        ({"prompt": "?", "videos": [frames[:3], frames[3:5]]}, [[0, 1, 2], [3, 4]]),
    ]
    prompts, report = load(folder, *(json_of(row) for row, _ in rows))
    assert report.unusable == [] and report.clips == len(rows)
    for prompt, (_, expected) in zip(prompts, rows, strict=True):
        assert [shown(each) for each in prompt.visual] == expected
        assert [len(each.positions) for each in prompt.visual] == [each.plan.tokens for each in prompt.visual]
        assert str(prompt.columns).find("b'") < 0 and len(str(prompt.columns)) < 1500, "paths instead of bytes"
    assert prompts[0].columns["videos"] == [{"video": "a b.mp4", "video_start": 2.0, "video_end": 4.0}]
    assert prompts[4].visual[0].plan.times[:3] == (0.0, 0.5, 1.0)


def json_of(row):
    """Encode bytes as base64, as JSON has no bytes."""

    def convert(value):
        if isinstance(value, dict):
            return {key: convert(each) for key, each in value.items()}
        if isinstance(value, list):
            return [convert(each) for each in value]
        return base64.b64encode(value).decode() if isinstance(value, bytes) else value

    return convert(row)


@pytest.mark.slow
def test_unusable_clips_and_frames_skip_their_row_and_are_reported(folder):
    rows = [
        ({"prompt": "?", "videos": [["0.png", "gone.png"]]}, r"its frame .*gone\.png: does not exist"),
        (
            {"prompt": "?", "videos": [["0.png", "tall.png"]]},
            "changes its aspect ratio, from 128 x 32 pixels to 32 x",
        ),
        ({"prompt": "?", "videos": [["0.png", "a b.mp4"]]}, r"its frame .*a b\.mp4: can't be read as an image"),
        ({"prompt": "?", "videos": [{"video": "a b.mp4", "video_start": 7}]}, "has no frame in video_start=7"),
        (
            {"prompt": "?", "videos": ["a b.mp4", {"video": "a b.mp4", "nframes": 61}]},
            "nframes=61 is not between 1 and",
        ),
        ({"prompt": "?", "videos": ["file:///gone/a.mp4"]}, "gone/a.mp4: does not exist"),
    ]
    with pytest.raises(DataError) as error:
        load(folder, *(row for row, _ in rows))
    lines = str(error.value).splitlines()[1:]
    assert len(lines) == len(rows)
    for line, (_, words) in zip(lines, rows, strict=True):
        assert re.search(words, line), line


def test_frame_lists_are_hashed_by_the_content_of_their_frames(folder, tmp_path):
    Image.fromarray(numbered(1, 32, 128)).save(tmp_path / "copy.png")
    hashes = []
    for name, frames in (
        ("x", ["0.png", "1.png"]),
        ("y", ["0.png", str(tmp_path / "copy.png")]),
        ("z", ["1.png", "0.png"]),
    ):
        path = tmp_path / f"{name}.frames"
        path.write_bytes(frame_list_bytes([str(folder / frame) for frame in frames], 4.0))
        hashes.append(content_hash(path))
    assert hashes[0] == hashes[1] != hashes[2]
    (tmp_path / "slow.frames").write_bytes(frame_list_bytes([str(folder / frame) for frame in ("0.png", "1.png")], 2.0))
    assert content_hash(tmp_path / "slow.frames") not in hashes, (
        "at another frame rate, the same times select other frames"
    )
    facts = probe(str(tmp_path / "x.frames"))
    assert (facts.frames, facts.fps, facts.duration_s, facts.height, facts.width) == (2, 4.0, 0.5, 32, 128)
    buffer = io.BytesIO()
    Image.fromarray(numbered(6, 32, 128)).save(buffer, "PNG")
    (tmp_path / "copy.png").write_bytes(buffer.getvalue())
    assert content_hash(tmp_path / "y.frames") != hashes[1]
    assert np.array_equal(numbers(decode(str(tmp_path / "y.frames"), plan_of([0.0, 0.25]))), [0, 6])
