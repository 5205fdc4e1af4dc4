"""data.truncation and data.filter_overlong_prompts act equally on all models; clips and images are never cut."""

import json

import numpy as np
import pytest
from clip_files import steady, write_video
from PIL import Image

from rlfuse.config.custom_functions import with_values
from rlfuse.config.schema import Config
from rlfuse.data.clips import ClipReader
from rlfuse.data.prompts import load_prompts
from rlfuse.data.tokenizers import load_tokenizer
from rlfuse.errors import DataError
from rlfuse.tasks.small_video_models import (
    SmallModel,
    write_small_qwen3_vl,
    write_small_qwen25_vl,
    write_small_video_llama3,
)
from rlfuse.video.video_model import VideoModel

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_decode_pool")]
MODELS = {"llama": write_small_video_llama3, "qwen25": write_small_qwen25_vl, "qwen3": write_small_qwen3_vl}
LONG = "0123456789" * 30
CLIP, IMAGE = {"videos": ["a.mp4"]}, {"images": ["a.png"]}
TEXT = {"prompt": LONG}
CLIP_FIRST, CLIP_LAST = {"prompt": f"<video>{LONG}"} | CLIP, {"prompt": f"{LONG}<video>"} | CLIP
CLIP_BETWEEN = {"prompt": f"{LONG}<video>{LONG}"} | CLIP
IMAGE_LAST, IMAGE_AND_CLIP = {"prompt": f"{LONG}<image>"} | IMAGE, {"prompt": f"<video>{LONG}<image>"} | CLIP | IMAGE


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Write a clip and an image; return their folder and {model: config, tokenizer, reader}."""
    folder = tmp_path_factory.mktemp("overlong")
    write_video(folder / "a.mp4", steady(12, fps=2), size=(56, 56))
    Image.new("RGB", (64, 64), "red").save(folder / "a.png")
    readers = {}
    for name, write in MODELS.items():
        path = write(folder / name, SmallModel(heads=2, layers=1, tower_heads=1, tower_layers=1))
        config = with_values(
            Config(), {"model.path": str(path), "video.sampling": "fixed", "video.max_image_tokens": 4}
        )
        config = with_values(config, {"video.frames": 4, "video.tokens_per_frame": 4})
        tokenizer = load_tokenizer(config.model)
        readers[name] = (
            config,
            tokenizer,
            ClipReader(VideoModel.from_pretrained(str(path)), config.video, tokenizer, 1, folder),
        )
    return folder, readers


def load(models, model, rows, limit, shows=True, **data):
    folder, readers = models
    config, tokenizer, clips = readers[model]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = with_values(
        config, {f"data.{key}": value for key, value in (data | {"max_prompt_length": limit}).items()}
    ).data
    return load_prompts([str(folder / "rows.jsonl")], tokenizer, data, clips if shows else None)


FITTED = [
    ("llama", TEXT, "left"),
    ("llama", TEXT, "right"),
    ("qwen25", TEXT, "middle"),
    ("qwen3", TEXT, "left"),
    ("llama", CLIP_FIRST, "right"),
    ("qwen25", CLIP_FIRST, "right"),
    ("qwen3", CLIP_FIRST, "right"),
    ("llama", CLIP_FIRST, "middle"),
    ("llama", CLIP_LAST, "left"),
    ("qwen25", CLIP_LAST, "left"),
    ("qwen3", CLIP_LAST, "middle"),
    ("qwen25", IMAGE_LAST, "left"),
    ("llama", IMAGE_AND_CLIP, "middle"),
    ("qwen3", IMAGE_AND_CLIP, "middle"),
]
REFUSED = [
    ("llama", TEXT, "error", ["has 300 tokens, data.max_prompt_length is 250. Raise it, drop"]),
    (
        "llama",
        CLIP_FIRST,
        "error",
        ["16 of the tokens are visual", "use fewer or smaller frames", "=true, or truncate them"],
    ),
    (
        "llama",
        CLIP_FIRST,
        "left",
        ["data.truncation=left would cut through a clip or an image", "use fewer or smaller frames"],
    ),
    ("qwen25", CLIP_LAST, "right", ["data.truncation=right would cut through a clip or an image", "filter_overlong"]),
    ("qwen3", CLIP_BETWEEN, "middle", ["data.truncation=middle would cut through a clip or an image"]),
    ("llama", IMAGE_AND_CLIP, "left", ["data.truncation=left would cut"]),
    ("qwen25", IMAGE_LAST, "right", ["data.truncation=right would cut"]),
]


@pytest.mark.parametrize(("model", "row", "way"), FITTED)
def test_prompts_are_truncated_like_text_and_clips_stay_whole(models, model, row, way):
    limit = 250
    [whole], _ = load(models, model, [row], 10_000)
    [cut], report = load(models, model, [row], limit, truncation=way)
    ids, head = whole.token_ids, {"left": 0, "right": limit, "middle": limit // 2}[way]
    np.testing.assert_array_equal(cut.token_ids, np.concatenate([ids[:head], ids[len(ids) - (limit - head) :]]))
    assert "1 truncated to 250 tokens" in str(report) and not report.unusable
    for before, after in zip(whole.visual, cut.visual, strict=True):
        np.testing.assert_array_equal(cut.token_ids[after.positions], ids[before.positions])
        assert len(after.positions) == after.plan.tokens and after.plan == before.plan
    if not row.keys() - {"prompt"}:
        [text], _ = load(models, model, [row], limit, shows=False, truncation=way)
        np.testing.assert_array_equal(cut.token_ids, text.token_ids)


@pytest.mark.parametrize(("model", "row", "way", "words"), REFUSED)
def test_prompts_that_cannot_be_truncated_are_reported_with_their_length(models, model, row, way, words):
    with pytest.raises(DataError, match=r"rows\.jsonl, row 1: the prompt has") as error:
        load(models, model, [{"prompt": "short"}, row], 250, truncation=way)
    assert all(each in str(error.value) for each in words), error.value


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("row", "way"), [(CLIP_LAST, "left"), (CLIP_FIRST, "right"), (IMAGE_LAST, "left")])
def test_timestamps_and_special_tokens_of_a_clip_are_not_truncated(models, model, row, way):
    [alone], _ = load(models, model, [row | {"prompt": row["prompt"].replace(LONG, "")}], 10_000)
    limit = len(alone.token_ids)
    [cut], _ = load(models, model, [row], limit, truncation=way)
    np.testing.assert_array_equal(cut.token_ids, alone.token_ids)
    with pytest.raises(DataError, match=f"truncation={way} would cut"):
        load(models, model, [row], limit - 1, truncation=way)


@pytest.mark.parametrize("model", MODELS)
def test_overlong_rows_are_dropped_and_do_not_count_as_unusable(models, model):
    """Drop text, clips and images; dropped rows do not count towards video.max_failure_rate."""
    rows = [TEXT, {"prompt": "short"}, CLIP_FIRST, IMAGE_AND_CLIP, {"prompt": "<video>"} | CLIP, CLIP_BETWEEN]
    prompts, report = load(models, model, rows, 200, filter_overlong_prompts=True, truncation="left")
    assert [len(prompt.visual) for prompt in prompts] == [0, 1] and [prompt.index for prompt in prompts] == [0, 1]
    assert report.dropped == 4 and report.unusable == [] and "4 dropped (over 200 tokens)" in str(report)
    with pytest.raises(DataError, match="none of 1 rows is usable: 1 are longer than"):
        load(models, model, [CLIP_FIRST], 200, filter_overlong_prompts=True)
