"""Images of rows: sizes, pixels, prompts, positions and features are those of the model's own processor and of Hugging
Face; a picture that can't be used costs its row and is named."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from rlfuse.config.schema import Config
from rlfuse.data import clips
from rlfuse.data.clips import ClipReader
from rlfuse.data.prompts import load_prompts
from rlfuse.data.rows import read_rows
from rlfuse.data.tokenizers import load_tokenizer
from rlfuse.errors import DataError, VideoError
from rlfuse.tasks.small_video_models import IMAGE, SmallModel, write_small_qwen25_vl, write_small_video_llama3
from rlfuse.video.images import plan_image, probe, read
from rlfuse.video.models.base import m_rope
from rlfuse.video.plan import Geometry
from rlfuse.video.processor_sampling import PixelBounds
from rlfuse.video.towers import Tower
from rlfuse.video.video_model import VideoModel

BOUNDS = {"min_pixels": 16 * 28**2, "max_pixels": 40 * 28**2}
SIZES = [(100, 140), (28, 28), (300, 90), (640, 480)]


def picture(height, width, mode="RGB"):
    noise = np.random.default_rng(height).integers(0, 256, (height // 4 + 1, width // 4 + 1, 4), np.uint8)
    return Image.fromarray(noise, "RGBA").resize((width, height)).convert(mode)


def encoded(image, form="PNG", **more):
    written = io.BytesIO()
    image.save(written, form, **more)
    return written.getvalue()


@pytest.fixture(scope="module", params=[write_small_video_llama3, write_small_qwen25_vl])
def folder(request, tmp_path_factory):
    folder = request.param(tmp_path_factory.mktemp("images") / "model", SmallModel(heads=2, layers=1))
    for number, size in enumerate(SIZES):
        picture(*size).save(folder / f"{number}.png")
    return folder


@pytest.mark.parametrize("kind", ["video_llama_3", "qwen2_5_vl"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
def test_pixels_are_the_processors(kind, mode, tmp_path):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.video_llama_3.image_processing_pil_video_llama_3 import VideoLlama3ImageProcessorPil

    processor, geometry = VideoLlama3ImageProcessorPil(**BOUNDS, do_normalize=False, do_rescale=False), Geometry(14, 1)
    if kind == "qwen2_5_vl":
        processor = Qwen2VLImageProcessorPil(**BOUNDS, do_normalize=False, do_rescale=False)
        geometry = Geometry(14, 2, 2)
    for size in SIZES:
        image = picture(*size, mode)
        image.save(tmp_path / "one.png")
        plan = plan_image(probe(str(tmp_path / "one.png")), PixelBounds(**BOUNDS), geometry)
        inputs = processor(images=[image], return_tensors="pt")
        assert [list(plan.grid)] == inputs["image_grid_thw"].tolist()
        pixels = torch.tensor(read(str(tmp_path / "one.png"), plan)).expand(plan.frames, -1, -1, -1)
        merge, patches, rows, columns = plan.merge, plan.frames, plan.height // 14, plan.width // 14
        cut = pixels.permute(0, 3, 1, 2).reshape(1, patches, 3, rows // merge, merge, 14, columns // merge, merge, 14)
        ours = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).flatten(5).flatten(0, 4)
        assert torch.equal(ours.float(), inputs["pixel_values"].float())


@torch.no_grad()
def test_features_are_the_models(folder):
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.video_llama_3.image_processing_pil_video_llama_3 import VideoLlama3ImageProcessorPil

    model, tower = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32), Tower(folder)
    kind = VideoLlama3ImageProcessorPil if "llama" in model.config.model_type else Qwen2VLImageProcessorPil
    processor = kind(image_mean=list(tower.pixels.mean), image_std=list(tower.pixels.std))
    for number in range(2):
        path = str(folder / f"{number}.png")
        plan = plan_image(probe(path), *VideoModel.at(str(folder)).image_sizes(None))
        inputs = processor(images=[Image.open(path)], return_tensors="pt")
        expected = torch.cat(list(model.get_image_features(**inputs).pooler_output))
        found = tower.encode(torch.tensor(read(path, plan)), plan.merge)
        assert found.shape == expected.shape == (plan.tokens, 64)
        assert (found - expected).abs().max() < 1e-5 < expected.abs().max()


def load(folder, *rows, **video):
    config = Config()
    config.model.path, config.data.max_prompt_length = str(folder), 600
    config.video.max_image_tokens, config.video.max_failure_rate = 64, 0.95
    for name, value in video.items():
        setattr(config.video, name, value)
    tokenizer, model = load_tokenizer(config.model), VideoModel.at(config.model.path)
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row | {"answer": "1"}) for row in rows))
    reader = ClipReader(model, config.video, tokenizer, config.data.max_prompt_length, workers=1)
    return load_prompts([str(folder / "rows.jsonl")], tokenizer, config.data, reader)


@pytest.mark.slow
def test_several_images_stand_where_their_markers_do(folder):
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
def test_positions_are_transformers(folder):
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


def test_images_come_in_every_form(tmp_path):
    image = picture(30, 40)
    for given in (
        {"images": [{"bytes": encoded(image), "path": None}]},
        {"images": [encoded(image)]},
        {"image": image},
        {"images": [image]},
    ):
        [row] = rows_of(tmp_path, given)
        [found] = row.images
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(found))), np.asarray(image)), given
    [row] = rows_of(tmp_path, {"prompt": "what ?", "images": ["a.png", "b.png"]})
    assert row.messages[0]["content"] == "<image><image>what ?", "as TRL has it"
    assert row.images == (str(tmp_path / "a.png"), str(tmp_path / "b.png"))


def test_bytes_become_one_file_for_as_many_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(clips, "IMAGES", tmp_path / "cache")
    paths = {clips._file_of(encoded(picture(30, 40))) for _ in range(3)}
    assert len(paths) == 1 and probe(paths.pop()).height == 30


@pytest.mark.parametrize("given", ["a.png", "https://x.org/a.png", 3, "", None])
def test_a_column_image_that_no_marker_asks_for_is_any_column(tmp_path, given):
    [row] = rows_of(tmp_path, {"prompt": "2 + 2 ?", "image": given, "images": []})
    assert row.images == () and row.messages[0]["content"] == "2 + 2 ?" and row.columns["image"] == given


def test_bytes_that_can_not_be_kept_are_told_with_what_to_set(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(clips, "IMAGES", tmp_path / "file" / "images")
    with pytest.raises(DataError, match=r"can't be kept in .* set XDG_CACHE_HOME"):
        clips._file_of(b"a picture")


@pytest.mark.parametrize("given", [{"images": 3}, {"images": [{"other": 1}]}, {"images": ["https://x.org/a.png"]}])
def test_what_is_no_image_is_named(given, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "<image>", **given}))
    with pytest.raises(DataError, match=r"line 1, field images: .* where paths of files"):
        read_rows(str(tmp_path / "rows.jsonl"), "prompt")


def test_turned_pictures_come_upright_and_strips_are_refused(tmp_path):
    turned = Image.Exif()
    turned[0x0112] = 6
    picture(40, 80).save(tmp_path / "turned.jpg", exif=turned)
    facts = probe(str(tmp_path / "turned.jpg"))
    assert (facts.height, facts.width) == (80, 40)
    picture(4, 1000).save(tmp_path / "strip.png")
    with pytest.raises(VideoError, match="is 1000 x 4 pixels"):
        plan_image(probe(str(tmp_path / "strip.png")), PixelBounds(**BOUNDS), Geometry())


@pytest.mark.slow
def test_an_image_that_cant_be_used_costs_its_row_and_is_named(folder):
    (folder / "cut.png").write_bytes(encoded(picture(60, 60))[:300])
    (folder / "text.png").write_text("no picture")
    unusable = (
        ({"prompt": "<image>", "images": ["missing.png"]}, "missing.png: there is no such file"),
        ({"prompt": "<image>", "images": ["cut.png"]}, "cut.png: can't be read as an image"),
        ({"prompt": "<image>", "images": ["text.png"]}, "text.png: can't be read as an image"),
        ({"prompt": "<image> <image>", "images": ["0.png"]}, "2 <image> markers and 1 image"),
        ({"prompt": "<image>"}, "1 <image> marker and 0 images"),
        ({"prompt": "<video>", "images": ["0.png"]}, "1 <video> marker and 0 clips"),
        ({"prompt": "<image>" * 12, "images": ["3.png"] * 12}, "at most 600 are allowed"),
    )
    prompts, report = load(folder, *(row for row, _ in unusable), {"prompt": "<image>", "images": ["0.png"]})
    assert len(prompts) == 1 and len(report.unusable) == len(unusable)
    for line, (_, words) in zip(report.unusable, unusable, strict=True):
        assert words in line, line
