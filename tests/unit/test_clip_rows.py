"""Rows with clips become prompts with frame plans; a row with an unusable clip is skipped and reported."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from clip_files import steady, write_sound, write_video

from rlfuse.config.custom_functions import with_values
from rlfuse.config.schema import Config, ModelConfig
from rlfuse.data.clips import ClipReader, sampling_of
from rlfuse.data.prompts import load_prompts
from rlfuse.data.tokenizers import load_tokenizer
from rlfuse.errors import ConfigError, DataError
from rlfuse.run.inference import video_model_of
from rlfuse.samples import Embedding, Response, Sample
from rlfuse.tasks.small_video_models import VIDEO, SmallModel, write_small_qwen25_vl, write_small_video_llama3
from rlfuse.video.compression import compress_tokens
from rlfuse.video.decoding import decode
from rlfuse.video.prompt import tokenise
from rlfuse.video.towers import Pixels
from rlfuse.video.video_model import VideoModel

pytestmark = pytest.mark.usefixtures("one_decode_pool")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a small video model, and valid and broken clips."""
    folder = tmp_path_factory.mktemp("rows")
    write_small_video_llama3(folder / "model", SmallModel(heads=2, layers=1, tower_heads=1, tower_layers=1))
    write_video(folder / "good.mp4", steady(20), size=(56, 56))
    write_video(folder / "long.mp4", steady(60, fps=1), size=(56, 56))
    write_video(folder / "still.mp4", [0.0], size=(56, 56))
    write_sound(folder / "sound.mp4")
    (folder / "cut.mp4").write_bytes((folder / "good.mp4").read_bytes()[:700])
    (folder / "empty.mp4").touch()
    whole = Path(write_video(folder / "whole.mkv", steady(60), size=(56, 56))).read_bytes()
    (folder / "early.mkv").write_bytes(whole[: len(whole) * 2 // 3])
    return folder


def load(folder, *rows, data=(), **video):
    """Return the prompts and the report of rows (question, *clips)."""
    config = with_values(Config(), {f"data.{name}": value for name, value in dict(data).items()})
    config.model.path, config.data.max_prompt_length = str(folder / "model"), 300
    config.video.sampling = "seed_vl"
    config.video.levels, config.video.max_tokens, config.video.decode_timeout_s = [4], 256, 20.0
    for name, value in video.items():
        setattr(config.video, name, value)
    tokenizer, model = load_tokenizer(config.model), VideoModel.from_pretrained(config.model.path)
    lines = [{"prompt": text, "videos": [{"video": clip} for clip in clips], "answer": "1"} for text, *clips in rows]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    clips = ClipReader(model, config.video, tokenizer, 1, folder / "images")
    return load_prompts([str(folder / "rows.jsonl")], tokenizer, config.data, clips)


@pytest.mark.slow
def test_placeholders_replace_the_video_marker_of_a_prompt(folder):
    (shown, text), report = load(folder, ("what is <video> ?", "good.mp4"), ("and without ?",))
    plan, positions = shown.visual[0].plan, shown.visual[0].positions
    assert plan.frames == 2 and plan.tokens == len(positions) == 8
    assert shown.visual[0].path == str(folder / "good.mp4") and shown.visual[0].source is None
    assert len(set(shown.token_ids[positions])) == 1 and "<video>" in shown.text
    outside = np.delete(shown.token_ids, positions)
    assert shown.token_ids[positions[0]] not in outside
    assert text.visual == () and "1 with clips" in str(report)


UNUSABLE = (
    (("see <video>", "missing.mp4"), "does not exist"),
    (("see <video>", "sound.mp4"), "has no video"),
    (("see <video>", "cut.mp4"), "can't be"),
    (("see <video>", "empty.mp4"), "is empty"),
    (("see <video>", "early.mkv"), "its header gives 6 s: it is truncated"),
    (("<video> and <video> ?", "good.mp4"), "2 <video> markers and 1 clip"),
    (("<video> ?",), "1 <video> marker and 0 clips"),
    (("<video> <video> ?", "good.mp4", "still.mp4", "good.mp4"), "2 <video> markers and 3 clips"),
)


@pytest.mark.slow
def test_rows_with_unusable_clips_are_skipped_and_named(folder):
    prompts, report = load(folder, *(row for row, _ in UNUSABLE), ("see <video>", "still.mp4"), max_failure_rate=0.95)
    assert [prompt.index for prompt in prompts] == [0] and prompts[0].visual[0].path.endswith("still.mp4")
    for number, ((_, *clips), words) in enumerate(UNUSABLE):
        line = report.unusable[number]
        assert f"rows.jsonl, row {number}" in line and words in line, line
        assert len(clips) != 1 or clips[0] in line, line
    assert f"{len(UNUSABLE)} skipped for unusable clips or images" in str(report)


@pytest.mark.slow
def test_too_many_unusable_clips_stop_the_run_and_name_the_first(folder):
    with pytest.raises(DataError, match=r"1 of 2 rows have clips.*max_failure_rate=0\.1:\n.*row 0.*sound\.mp4"):
        load(folder, ("see <video>", "sound.mp4"), ("see <video>", "good.mp4"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "overlong", "words"),
    [
        (1.0, 0, "none of 16 rows is usable: 16 have clips or images that can't be used:"),
        (
            1.0,
            2,
            "of 18 rows is usable: 16 have clips or images that can't be used; 2 are longer",
        ),
        (0.1, 0, "16 of 16 rows have clips or images that can't be used, more than video.max_failure_rate=0.1:"),
    ],
)
def test_reasons_are_reported_if_no_row_is_usable(folder, rate, overlong, words):
    rows = [row for row, _ in UNUSABLE] * 2 + [("<video> " + "long " * 300, "good.mp4")] * overlong
    with pytest.raises(DataError) as error:
        load(folder, *rows, data={"filter_overlong_prompts": True}, max_failure_rate=rate)
    first, *lines, last = str(error.value).splitlines()
    assert words in first and last == "  and 6 more"
    assert all(reason in line for (_, reason), line in zip(UNUSABLE, lines, strict=False)), lines


@pytest.mark.slow
def test_placeholders_in_a_response_are_plain_text(folder):
    """Insert embeddings only in the prompt, and keep the text of the response."""
    (prompt,), _ = load(folder, ("see <video>", "good.mp4"))
    config = Config()
    config.model.path = str(folder / "model")
    tokenizer, model = load_tokenizer(config.model), VideoModel.from_pretrained(config.model.path)
    response_text = f"it shows {VIDEO}{VIDEO}"
    ids = np.asarray(tokenise(tokenizer, response_text, model.visual), np.int32)
    assert tokenizer.decode(ids) == response_text and not set(ids) & set(model.visual.ids(tokenizer).values())
    embedding = Embedding("clip", "", len(prompt.visual[0].positions), 64)
    shown = replace(prompt, visual=(replace(prompt.visual[0], source=embedding),))
    response = Response(ids, np.zeros(len(ids), np.float32), "stop", 0, response_text)
    row = Sample(shown, 1, 0, seed=0, response=response).row()
    [visual] = row.visual
    np.testing.assert_array_equal(visual.positions, prompt.visual[0].positions)
    assert visual.positions.max() < len(row.prompt_ids) and len(visual.positions) == visual.source.tokens


@pytest.mark.slow
def test_sampling_and_timestamps_default_to_those_of_the_family(folder):
    def shown(**video):
        [prompt], _ = load(folder, ("see <video>", "good.mp4"), **video)
        tokenizer = load_tokenizer(ModelConfig(path=str(folder / "model")))
        return prompt.visual[0].plan, tokenizer.decode(prompt.token_ids).replace(VIDEO, "")

    processor = folder / "model" / "video_preprocessor_config.json"
    before = processor.read_text()
    processor.write_text(
        json.dumps(json.loads(before) | {"fps": 2.5, "min_pixels": 28 * 28, "max_pixels": 5 * 56 * 56})
    )
    try:
        plan, text = shown(sampling="family")
        assert plan.times == (0.0, 0.4, 0.8, 1.2, 1.6) and plan.grid == (5, 4, 4)
        assert text == "see Time 0.0s:,Time 0.4s:,Time 0.8s:,Time 1.2s:,Time 1.6s:"
        again, text = shown(sampling="family", timestamps="seed_vl")
        assert again.hash == plan.hash and text.startswith("see [0.0 second][0.4 second]")
    finally:
        processor.write_text(before)


@pytest.mark.slow
def test_timestamps_that_the_engine_does_not_support_are_refused(tmp_path):
    config = Config()
    config.model.path, config.video.timestamps = str(write_small_qwen25_vl(tmp_path / "model")), "seed_vl"
    with pytest.raises(ConfigError, match=r"seed_vl: engines insert clips of .*model into the prompt.*to family"):
        video_model_of(config)


@pytest.mark.slow
def test_prompts_omit_repeated_tokens_if_the_processor_compresses_them(folder):
    """Compress across blocks of frames with sampling=family; other samplings keep all tokens."""
    processor = folder / "model" / "video_preprocessor_config.json"
    before = processor.read_text()
    processor.write_text(
        json.dumps(json.loads(before) | {"use_token_compression": True, "fps": 2.0, "min_pixels": 784})
    )
    rows = ("see <video>", "half.mp4"), ("see <video>", "good.mp4"), ("see <video>", "sound.mp4")
    given = {"data": {"max_prompt_length": 2000}, "sampling": "family", "max_failure_rate": 0.5}
    write_video(folder / "half.mp4", steady(20), size=(56, 112))
    try:
        prompts, report = load(folder, *rows, **given)
        whole, _ = load(folder, *rows, **given, mm_processor_kwargs={"use_token_compression": False})
        seed, _ = load(folder, *rows, **given | {"sampling": "seed_vl"})
    finally:
        processor.write_text(before)
    assert len(report.unusable) == 1 and "sound.mp4" in report.unusable[0]
    for prompt, every in zip(prompts, whole, strict=True):
        plan, path = prompt.visual[0].plan, prompt.visual[0].path
        assert plan == compress_tokens(every.visual[0].plan, [decode(path, plan)], Pixels.of(folder / "model"))
        assert len(prompt.visual[0].positions) == plan.tokens
        assert len(every.token_ids) - len(prompt.token_ids) == every.visual[0].plan.tokens - plan.tokens
    assert prompts[0].visual[0].plan.tokens < whole[0].visual[0].plan.tokens, "some of the bars never change"
    assert all(each.visual[0].plan.kept is None for each in (*whole, *seed))


WRITE = {"llama": write_small_video_llama3, "qwen25": write_small_qwen25_vl}


@pytest.mark.parametrize(
    ("kind", "sampling", "given", "words"),
    [
        ("llama", "family", {"cap_pixels_per_frame": True}, "cap_pixels_per_frame: the processor of model.path has no"),
        (
            "llama",
            "family",
            {"max_video_tokens": 9},
            "valid are fps, max_frames, max_pixels, min_frames, min_p",
        ),
        ("qwen25", "family", {"use_token_compression": True}, "use_token_compression: the processor of model.path has"),
        ("qwen25", "seed_vl", {"cap_pixels_per_frame": True}, "has no effect with video.sampling=seed_vl"),
        ("llama", "fixed", {"use_token_compression": False}, "has no effect with video.sampling=fixed"),
        ("qwen25", "family", {"cap_pixels_per_frame": 1}, "cap_pixels_per_frame=1: needs true or false"),
        ("qwen25", "family", {"max_frames": 2.5}, "max_frames=2.5: needs a whole number above 0"),
        ("llama", "family", {"fps": 0}, "fps=0: needs a number above 0"),
        ("llama", "family", {"fps": True}, "fps=true: needs a number above 0"),
        ("llama", "family", {"min_pixels": "9"}, "needs a whole number above 0"),
        ("llama", "family", {"fps": 0.5, "max_frames": 3, "use_token_compression": False}, None),
        ("qwen25", "family", {"cap_pixels_per_frame": True, "max_video_tokens": 99, "fps": 3}, None),
    ],
)
@pytest.mark.slow
def test_processor_settings_are_validated(tmp_path, kind, sampling, given, words):
    small = SmallModel(heads=2, layers=1, tower_heads=1, tower_layers=1)
    model = VideoModel.from_pretrained(str(WRITE[kind](tmp_path / "model", small)))
    video = replace(Config().video, sampling=sampling)
    if words is None:
        found = sampling_of(replace(video, mm_processor_kwargs=given), model)
        assert found == replace(model.sampling, **given)
        return
    with pytest.raises(ConfigError, match=re.escape(words)):
        sampling_of(replace(video, mm_processor_kwargs=given), model)
