"""`rlfuse plan` reads local data and prints the lengths of its rows and clips."""

import json
from copy import deepcopy

import pytest
from clip_files import steady, write_video
from PIL import Image
from test_plan_models import FAMILIES

from rlfuse import cli
from rlfuse.config.custom_functions import with_values
from rlfuse.config.schema import Config
from rlfuse.tasks.small_video_models import END, SmallModel, byte_tokenizer, write_small_video_llama3
from rlfuse.tools.planning.planned_job import DataLengths, prompt_tokens, read_lengths

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_decode_pool")]
ROWS = [{"prompt": "x" * length, "answer": "1"} for length in (10, 20, 60)]
CLIPS = [{"prompt": f"<video>{'x' * length}", "videos": [f"{length}.mp4"]} for length in (10, 20)]
IMAGE = {"prompt": "<image>", "images": ["a.png"]}
PAIR = {"prompt": "abc", "chosen": "de", "rejected": "fghi"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a text model, a video model, clips of 10 and 20 frames, and an image."""
    folder = tmp_path_factory.mktemp("lengths")
    (text := deepcopy(FAMILIES["qwen2"])).vocab_size = 300
    text.save_pretrained(folder / "text")
    byte_tokenizer().save_pretrained(folder / "text")
    write_small_video_llama3(folder / "video", SmallModel(heads=2, layers=1, tower_heads=1, tower_layers=1))
    for count in (10, 20):
        write_video(folder / f"{count}.mp4", steady(count, fps=1), size=(56, 56))
    Image.new("RGB", (64, 64), "red").save(folder / "a.png")
    return folder


def config_of(folder, model, rows, suffix="jsonl", **changes):
    (folder / f"rows.{suffix}").write_text("".join(json.dumps(row) + "\n" for row in rows))
    video = {"video.sampling": "seed_vl", "video.levels": [4], "video.max_image_tokens": 4}
    given = {"model.path": str(folder / model), "data.train_files": [str(folder / "rows.jsonl")]} | video
    return with_values(Config(), given | {key.replace("__", "."): value for key, value in changes.items()})


@pytest.mark.parametrize(
    ("model", "rows", "changes", "tokens", "mean", "words"),
    [
        ("text", ROWS, {}, {"prompt": [10, 20, 60]}, 30, "data  3 prompts from"),
        ("video", ROWS, {}, {"prompt": [10, 20, 60]}, 30, "data  3 prompts from"),
        ("text", ROWS, {"data__max_prompt_length": 30}, {"prompt": [10, 20, 60]}, 20, "the run fails on the first"),
        ("text", ROWS, {"data__max_prompt_length": 30, "data__truncation": "left"}, {"prompt": [10, 20, 60]}, 20,
         "1 of 3 rows exceed 30 tokens (data.truncation=left: they are truncated)"),
        ("text", ROWS, {"data__max_prompt_length": 30, "data__filter_overlong_prompts": True},
         {"prompt": [10, 20, 60]}, 15, "filter_overlong_prompts=true: they are dropped"),
        ("text", ROWS, {"data__max_prompt_length": 5, "data__filter_overlong_prompts": True},
         {"prompt": [10, 20, 60]}, 5, "3 of 3 rows exceed 5 tokens"),
        ("video", CLIPS, {}, {"prompt": [159, 329], "clip": [40, 80]}, 244, "2 with clips"),
        ("video", [*CLIPS, *ROWS[:1], IMAGE], {}, {"prompt": [159, 329, 10, 4], "clip": [40, 80], "image": [4]}, 126,
         "1 with images"),
        ("video", [*CLIPS, {"prompt": "<video>", "videos": ["gone.mp4"]}], {},
         {"prompt": [159, 329], "clip": [40, 80]}, 244, "gone.mp4: does not exist"),
        ("video", CLIPS, {"data__max_prompt_length": 300}, {"prompt": [159, 329], "clip": [40, 80]}, 230,
         "1 of 2 rows exceed 300 tokens"),
        ("text", [PAIR], {"trainer__task": "reward_model"}, {"sequence (prompt with one answer)": [6, 8]}, 7,
         "data  1 pairs"),
        ("text", [PAIR | {"chosen": f"de{END}"}], {"trainer__task": "dpo", "data__prompt_is_chat": False},
         {"sequence (prompt with one answer)": [6, 8]}, 7, "data  1 pairs"),
    ],
)  # fmt: skip
def test_lengths_are_measured_before_limits_apply(folder, model, rows, changes, tokens, mean, words):
    found = read_lengths(config_of(folder, model, rows, **changes))
    assert isinstance(found, DataLengths), found
    assert (found.tokens, found.mean) == (tokens, mean) and words in "\n".join(found.lines())


@pytest.mark.parametrize(
    ("model", "rows", "changes", "words"),
    [
        ("text", ROWS, {"data__train_files": ["absent.jsonl"]}, ""),
        ("text", [{"question": "1"}], {}, "has no column 'prompt'"),
        ("text", [*ROWS, {"prompt": 3}], {}, "line 4, field prompt"),
        ("text", CLIPS, {}, "model.path is a text-only model"),
        ("video", [{"prompt": "<video>", "videos": ["gone.mp4"]}], {}, "none of 1 rows is usable"),
        ("absent/model", ROWS, {}, "no tokenizer"),
    ],
)
def test_unreadable_data_is_skipped_with_a_reason(folder, model, rows, changes, words):
    config = config_of(folder, model, rows, **changes)
    found = read_lengths(config)
    assert isinstance(found, str) and words in found and bool(words) == bool(found), found
    assert prompt_tokens(config, found) == 256


def test_file_named_like_a_placeholder_is_not_read(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "train.parquet").write_bytes(b"no parquet")
    assert read_lengths(config_of(folder, "text", ROWS, data__train_files=["train.parquet"])) == ""


def test_plan_prints_tokens_per_prompt_and_clip_and_uses_their_mean(folder, capsys, tmp_path):
    config = config_of(folder, "video", CLIPS)
    words = [
        f"model.path={config.model.path}",
        f"data.train_files=[{config.data.train_files[0]}]",
        "cluster.device=cpu",
    ]
    words += ["reward.functions=[rlfuse.rewards.verifiers.exact:score]", "trainer.n_gpus_per_node=1", "algorithm=grpo"]
    words += ["data.train_batch_size=2", "actor.ppo_mini_batch_size=2", "rollout.n=2", "data.max_prompt_length=512"]
    words += ["video.sampling=seed_vl", "video.levels=[4]", f"trainer.default_local_dir={tmp_path}"]
    assert cli.main(["plan", *words, "--device-memory", "80", "--peak-tflops", "1"]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert ["prompt", "244.0", "329", "2"] in lines and ["clip", "60.0", "80", "2"] in lines
    assert "prompts of 244" in out and "no data was read" not in out and not any(tmp_path.iterdir())
    assert "lengths default to half the limits; set --response-tokens\n" in out
