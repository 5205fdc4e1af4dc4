"""Images of rows: sizes, pixels, prompts, positions and features equal those of Hugging Face's processors and models.

An unusable image only skips its row and is named in the report.
"""

import base64
import errno
import io
import json
import os
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from rlfuse.config.schema import Config
from rlfuse.data import clips as kept_images
from rlfuse.data.clips import ClipReader, MediaStore
from rlfuse.data.prompts import load_prompts
from rlfuse.data.rows import read_rows
from rlfuse.data.tokenizers import load_tokenizer
from rlfuse.errors import DataError, VideoError
from rlfuse.tasks.small_video_models import (
    IMAGE,
    SmallModel,
    write_small_qwen3_vl,
    write_small_qwen25_vl,
    write_small_video_llama3,
)
from rlfuse.video.images import plan_image, probe, read
from rlfuse.video.models.base import m_rope
from rlfuse.video.plan import Geometry
from rlfuse.video.processor_sampling import PixelBounds
from rlfuse.video.towers import Tower
from rlfuse.video.video_model import VideoModel

pytestmark = pytest.mark.usefixtures("one_decode_pool")

BOUNDS = {"min_pixels": 16 * 28**2, "max_pixels": 40 * 28**2}
SIZES = [(100, 140), (28, 28), (300, 90), (640, 480)]


def picture(height, width, mode="RGB"):
    noise = np.random.default_rng(height).integers(0, 256, (height // 4 + 1, width // 4 + 1, 4), np.uint8)
    return Image.fromarray(noise, "RGBA").resize((width, height)).convert(mode)


def encoded(image, form="PNG", **more):
    written = io.BytesIO()
    image.save(written, form, **more)
    return written.getvalue()


@pytest.fixture(scope="module", params=[write_small_video_llama3, write_small_qwen25_vl, write_small_qwen3_vl])
def folder(request, tmp_path_factory):
    folder = request.param(tmp_path_factory.mktemp("images") / "model", SmallModel(heads=2, layers=1))
    for number, size in enumerate(SIZES):
        picture(*size).save(folder / f"{number}.png")
    return folder


one_family = pytest.mark.parametrize("folder", [write_small_qwen3_vl], indirect=True)
"""For tests of code that does not depend on the model family."""


@pytest.mark.parametrize("kind", ["video_llama_3", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
def test_pixels_match_the_processor(kind, mode, tmp_path):
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.video_llama_3.image_processing_video_llama_3 import VideoLlama3ImageProcessor

    processor, geometry = VideoLlama3ImageProcessor(**BOUNDS, do_normalize=False, do_rescale=False), Geometry(14, 1)
    if kind != "video_llama_3":
        geometry = Geometry(16 if kind == "qwen3_vl" else 14, 2, 2)
        processor = Qwen2VLImageProcessor(**BOUNDS, do_normalize=False, do_rescale=False, patch_size=geometry.patch)
    for size in SIZES:
        image = picture(*size, mode)
        image.save(tmp_path / "one.png")
        plan = plan_image(probe(str(tmp_path / "one.png")), PixelBounds(**BOUNDS), geometry)
        inputs = processor(images=[image], return_tensors="pt")
        assert [list(plan.grid)] == inputs["image_grid_thw"].tolist()
        pixels = torch.tensor(read(str(tmp_path / "one.png"), plan)).expand(plan.frames, -1, -1, -1)
        merge, side, (_, rows, columns) = plan.merge, geometry.patch, plan.grid
        cells = (rows // merge, merge, side, columns // merge, merge, side)
        cut = pixels.permute(0, 3, 1, 2).reshape(1, plan.frames, 3, *cells)
        ours = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).flatten(5).flatten(0, 4)
        assert torch.equal(ours.float(), inputs["pixel_values"].float())


@torch.no_grad()
def test_features_match_the_model(folder):
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.video_llama_3.image_processing_video_llama_3 import VideoLlama3ImageProcessor

    model, tower = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32), Tower(folder)
    kind = VideoLlama3ImageProcessor if "llama" in model.config.model_type else Qwen2VLImageProcessor
    settings = dict(image_mean=list(tower.pixels.mean), image_std=list(tower.pixels.std))
    processor = kind(**settings, patch_size=model.config.vision_config.patch_size)
    for number in range(2):
        path = str(folder / f"{number}.png")
        plan = plan_image(probe(path), *VideoModel.from_pretrained(str(folder)).image_sizes(None))
        inputs = processor(images=[Image.open(path)], return_tensors="pt")
        seen = model.get_image_features(**inputs)
        levels = [seen.pooler_output, *getattr(seen, "deepstack_features", ())]
        expected = torch.cat([torch.cat(list(each)) for each in levels], dim=-1)
        found = tower.encode(torch.tensor(read(path, plan)), plan.merge)
        assert found.shape == expected.shape == (plan.tokens, tower.shape.hidden)
        assert (found - expected).abs().max() < 1e-5 < expected.abs().max()


def load(folder, *rows, **video):
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row | {"answer": "1"}) for row in rows))
    return loaded(folder, folder / "rows.jsonl", **video)


def loaded(folder, file, **video):
    config = Config()
    config.model.path, config.data.max_prompt_length = str(folder), 600
    config.video.max_image_tokens, config.video.max_failure_rate = 64, 0.95
    for name, value in video.items():
        setattr(config.video, name, value)
    tokenizer, model = load_tokenizer(config.model), VideoModel.from_pretrained(config.model.path)
    reader = ClipReader(model, config.video, tokenizer, 1, folder / "kept")
    return load_prompts([str(file)], tokenizer, config.data, reader)


@pytest.mark.slow
def test_several_images_are_placed_at_their_markers(folder):
    (two, text), _ = load(
        folder, {"prompt": "is <image> like <image> ?", "images": ["1.png", {"image": "0.png"}]}, {"prompt": "no ?"}
    )
    assert [each.path for each in two.visual] == [str(folder / "1.png"), str(folder / "0.png")]
    assert two.columns["images"] == [each.path for each in two.visual] and text.visual == ()
    marked = np.concatenate([each.positions for each in two.visual])
    pad = load_tokenizer(Config().model.__class__(path=str(folder))).convert_tokens_to_ids(IMAGE)
    np.testing.assert_array_equal(np.flatnonzero(two.token_ids == pad), marked)
    assert [len(each.positions) for each in two.visual] == [each.plan.tokens for each in two.visual]
    assert all(each.plan.tokens <= 64 for each in two.visual)


@pytest.mark.slow
@torch.no_grad()
def test_positions_match_transformers(folder):
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder)
    if (rope := m_rope(model.config)) is None:
        pytest.skip("positions on one axis")
    [two], _ = load(folder, {"prompt": "is <image> like <image> ?", "images": ["1.png", "0.png"]})
    kinds = torch.zeros(1, len(two.token_ids), dtype=torch.int32)
    for each in two.visual:
        kinds[0, each.positions] = 1
    grids = torch.tensor([each.plan.grid for each in two.visual])
    expected, _ = model.model.get_rope_index(torch.zeros_like(kinds).long(), kinds, image_grid_thw=grids)
    np.testing.assert_array_equal(rope.positions(len(two.token_ids), two.visual), expected[:, 0])


def rows_of(tmp_path, row):
    from datasets import Dataset

    Dataset.from_list([row | {"prompt": row.get("prompt", "<image>?")}]).save_to_disk(str(tmp_path / "data"))
    return read_rows(str(tmp_path / "data"), "prompt")


def test_images_are_accepted_in_every_form(tmp_path):
    image = picture(30, 40)
    for given in (
        {"images": [{"bytes": encoded(image), "path": None}]},
        {"images": [encoded(image)]},
        {"image": image},
        {"images": [image]},
    ):
        [row] = rows_of(tmp_path, given)
        [found] = row.images
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(found.source))), np.asarray(image)), given
    [row] = rows_of(tmp_path, {"prompt": "what ?", "images": ["a.png", "b.png"]})
    assert row.messages[0]["content"] == "<image><image>what ?", "as in TRL"
    assert [each.source for each in row.images] == [str(tmp_path / "a.png"), str(tmp_path / "b.png")]


URL = "data:image/png;base64," + base64.b64encode(encoded(picture(30, 40))).decode()


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "image", "image": "a.png"}, "a.png"),  # verl, Qwen
        ({"type": "image", "image": {"bytes": b"a picture", "path": None}}, b"a picture"),  # TRL
        ({"type": "image", "path": "a.png"}, "a.png"),  # transformers
        ({"type": "image_url", "image_url": {"url": "file:///a/b.png", "detail": "low"}}, "/a/b.png"),  # OpenAI
        ({"type": "image_url", "image_url": {"url": URL}}, encoded(picture(30, 40))),
        ({"type": "video", "video": "a.mp4"}, "a.mp4"),
        ({"type": "video_url", "video_url": {"url": "a.mp4"}}, "a.mp4"),  # vLLM
    ],
)
def test_message_parts_contain_their_media(part, expected, tmp_path):
    messages = [{"role": "user", "content": [part, {"type": "text", "text": " what ?"}]}]
    # In Parquet, every part has the keys of all parts. Such data sets often have the media column as well.
    more = {"a.png": {"images": [{"bytes": b"another"}]}, "a.mp4": {"videos": ["another.mp4"]}}.get(str(expected), {})
    pq.write_table(pa.Table.from_pylist([{"prompt": messages} | more]), tmp_path / "rows.parquet")
    [row] = read_rows(str(tmp_path / "rows.parquet"), "prompt")
    shown, marker = (row.videos, "<video>") if part["type"].startswith("video") else (row.images, "<image>")
    assert [each.source for each in shown] == [expected if isinstance(expected, bytes) else str(tmp_path / expected)]
    assert row.messages == ({"role": "user", "content": f"{marker} what ?"},)
    assert row.columns["prompt"] == [*row.messages], "rows stay in memory, so they must not hold bytes"


def test_message_parts_without_media_take_them_from_the_column(tmp_path):
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": " alike ?"}]
    row = {"prompt": [{"role": "user", "content": content}], "images": ["a.png", "b.png"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    [row] = read_rows(str(tmp_path / "rows.jsonl"), "prompt")
    assert [each.source for each in row.images] == [str(tmp_path / "a.png"), str(tmp_path / "b.png")]
    assert row.messages[0]["content"] == "<image><image> alike ?"


@pytest.mark.slow
@one_family
def test_markers_in_text_parts_are_plain_text(folder):
    text = "what does <image> or <video> mean in"
    content = [{"type": "text", "text": text}, {"type": "image"}, {"type": "text", "text": " ?"}]
    rows = [{"prompt": [{"role": "user", "content": parts}]} for parts in (content, content[::2])]
    (shown, plain), report = load(folder, rows[0] | {"images": ["0.png"]}, rows[1])
    [visual] = shown.visual
    tokenizer = load_tokenizer(Config().model.__class__(path=str(folder)))
    assert report.unusable == [] and plain.visual == ()
    assert tokenizer.decode(np.delete(shown.token_ids, visual.positions)).count(text) == 1
    assert tokenizer.decode(plain.token_ids).count(f"{text} ?") == 1 and text in plain.text
    assert shown.messages == ({"role": "user", "content": f"{text}<image> ?"},)


def test_equal_bytes_are_stored_once(tmp_path):
    kept = MediaStore(tmp_path / "kept")
    paths = {kept.path_of(encoded(picture(30, 40))) for _ in range(3)}
    assert [str(path) for path in kept.folder.iterdir()] == [*paths] and probe(paths.pop()).height == 30


def test_long_unused_images_are_pruned(tmp_path):
    kept = MediaStore(tmp_path)
    requested, recently_read, unused = (kept.path_of(content) for content in (b"a", b"b", b"c"))
    long_ago = time.time() - kept_images.MAX_UNUSED_S - 60
    for path, read_at in ((requested, long_ago), (recently_read, time.time()), (unused, long_ago)):
        os.utime(path, (read_at, long_ago))
    kept.path_of(b"a")
    kept.prune()
    assert {str(path) for path in tmp_path.iterdir()} == {requested, recently_read}


def test_images_are_read_from_a_read_only_folder(tmp_path, monkeypatch):
    kept = MediaStore(tmp_path)
    path = kept.path_of(b"a")

    def read_only(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("os.utime", read_only)
    assert kept.path_of(b"a") == path


@pytest.mark.parametrize("given", ["a.png", "https://x.org/a.png", 3, "", None])
def test_image_column_without_a_marker_is_an_ordinary_column(tmp_path, given):
    [row] = rows_of(tmp_path, {"prompt": "2 + 2 ?", "image": given, "images": []})
    assert row.images == () and row.messages[0]["content"] == "2 + 2 ?" and row.columns["image"] == given


def part(kind, given):
    return [{"role": "user", "content": [{"type": kind, kind: given}]}]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"images": 3}, "images"),
        ({"images": [{"other": 1}]}, "images"),
        ({"images": ["https://x.org/a.png"]}, "images"),
        ({"images": ["data:image/png;base64,abc"]}, "images"),
        ({"images": ["data:image/png;base64,äöü"]}, "images"),
        ({"prompt": part("image_url", {"url": "https://x.org/a.png"})}, "prompt"),
        ({"prompt": part("image", ["a.png"])}, "prompt"),
        ({"prompt": part("video", "https://x.org/a.mp4")}, "prompt"),
        ({"prompt": part("video", [])}, "prompt"),
    ],
)
def test_invalid_media_values_are_reported_with_line_and_field(given, field, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "<image>", **given}))
    with pytest.raises(DataError, match=rf"line 1, field {field}: .* where a file path"):
        read_rows(str(tmp_path / "rows.jsonl"), "prompt")


def test_exif_orientation_is_applied_and_extreme_aspect_ratios_are_refused(tmp_path):
    turned = Image.Exif()
    turned[0x0112] = 6
    picture(40, 80).save(tmp_path / "turned.jpg", exif=turned)
    facts = probe(str(tmp_path / "turned.jpg"))
    assert (facts.height, facts.width) == (80, 40)
    picture(4, 1000).save(tmp_path / "strip.png")
    with pytest.raises(VideoError, match="has 1000 x 4 pixels"):
        plan_image(probe(str(tmp_path / "strip.png")), PixelBounds(**BOUNDS), Geometry())


def unusable_rows(folder):
    """Return (row, expected message) for rows with unusable images."""
    (folder / "cut.png").write_bytes(encoded(picture(60, 60))[:300])
    (folder / "text.png").write_text("no picture")
    (folder / "empty.png").touch()
    picture(4, 1000).save(folder / "strip.png")
    large = encoded(Image.new("1", (14_000, 14_000)))  # twice the size above which Pillow raises
    (folder / "large.png").write_bytes(large)
    if not (folder / "hangs.png").exists():
        os.mkfifo(folder / "hangs.png")
    return (
        ({"prompt": "<image>", "images": ["missing.png"]}, "missing.png: does not exist"),
        ({"prompt": "<image>", "images": ["cut.png"]}, "cut.png: can't be read as an image"),
        ({"prompt": "<image>", "images": ["text.png"]}, "text.png: can't be read as an image"),
        ({"prompt": "<image>", "images": ["empty.png"]}, "empty.png: can't be read as an image"),
        ({"prompt": "<image>", "images": ["strip.png"]}, "strip.png: has 1000 x 4 pixels"),
        ({"prompt": "<image>", "images": ["large.png"]}, "large.png: can't be read as an image (Image size"),
        ({"prompt": "<image>", "images": ["hangs.png"]}, "hangs.png: took longer than 3 s"),
        ({"prompt": "<image>", "images": ["."]}, "can't be read as an image"),
        ({"prompt": "<image> <image>", "images": ["0.png"]}, "2 <image> markers and 1 image"),
        ({"prompt": "<image>"}, "1 <image> marker and 0 images"),
        ({"prompt": "<image>", "images": ["0.png", "1.png"]}, "1 <image> marker and 2 images"),
        ({"prompt": "<video>", "images": ["0.png"]}, "1 <video> marker and 0 clips"),
    )


@pytest.mark.slow
@one_family
def test_unusable_images_skip_their_row_and_are_reported(folder):
    unusable = unusable_rows(folder)
    prompts, report = load(
        folder, *(row for row, _ in unusable), {"prompt": "<image>", "images": ["0.png"]}, decode_timeout_s=3.0
    )
    assert len(prompts) == 1 and len(report.unusable) == len(unusable)
    for number, (line, (_, words)) in enumerate(zip(report.unusable, unusable, strict=True)):
        assert f"rows.jsonl, row {number}" in line and words in line, line
    assert f"1 with images, {len(unusable)} skipped for unusable clips or images" in str(report)


@pytest.mark.slow
@one_family
def test_too_many_unusable_images_stop_the_run_and_name_the_first(folder):
    with pytest.raises(DataError, match=r"1 of 2 rows have clips or .*max_failure_rate=0\.1:\n.*row 0.*gone\.png"):
        load(
            folder,
            {"prompt": "<image>", "images": ["gone.png"]},
            {"prompt": "<image>", "images": ["0.png"]},
            max_failure_rate=0.1,
        )


@pytest.mark.slow
@one_family
def test_prompts_hold_file_paths_instead_of_bytes(folder):
    """Read a Hugging Face image data set, one of whose images is not an image."""
    from datasets import Dataset, Features, Value
    from datasets import Image as Pictures

    features = Features({"prompt": Value("string"), "image": Pictures(), "answer": Value("string")})
    rows = [
        {"prompt": "<image> ?", "image": {"bytes": content}, "answer": "1"}
        for content in (b"no picture", encoded(picture(30, 40)))
    ]
    Dataset.from_list(rows, features).save_to_disk(str(folder / "data"))
    [prompt], report = loaded(folder, folder / "data")
    assert "row 0" in report.unusable[0] and "can't be read as an image" in report.unusable[0]
    [shown] = prompt.visual
    assert prompt.columns["image"] == shown.path and prompt.columns["images"] == [shown.path]
    assert str(folder / "kept") in shown.path and probe(shown.path).height == 30
