"""The clip and image tasks: prepared folder, blanked validation files, demonstrations, and the warm-started model."""

import json
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlfuse.config.compose import compose_job
from rlfuse.data.clips import ClipReader
from rlfuse.data.prompts import load_prompts
from rlfuse.tasks import clips
from rlfuse.tasks.clip_warm_start import VISUAL, build_tokenizer, demonstration, watch
from rlfuse.tasks.clips import Clips, Kind, ask_end, compute_score, draw_clips, draw_scene
from rlfuse.tasks.prepare import prepare_clips, prepare_images
from rlfuse.tasks.settings import CLIPS, ClipWarmStart
from rlfuse.video.decoding import decode, probe
from rlfuse.video.models.video_llama_3 import VideoLlama3
from rlfuse.video.plan import plan_video
from rlfuse.video.prompt import tokenise
from rlfuse.video.towers import Tower
from rlfuse.video.video_model import VideoModel

TINY = ClipWarmStart(heads=2, layers=1, tower_heads=1, tower_layers=1, steps=6, batch=3, lr=1e-2)
FEW = Clips(train=4, val=2, kinds=(Kind.ORDER,), longest_s=20.0, distinct_ends=True)
FEW_IMAGES = replace(FEW, kinds=(Kind.PLACE,))


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Prepare the smallest possible task."""
    return prepare_clips(tmp_path_factory.mktemp("cache") / "clips", TINY, FEW)


@pytest.fixture(scope="module")
def image_task(tmp_path_factory):
    return prepare_images(tmp_path_factory.mktemp("cache") / "images", TINY, FEW_IMAGES)


def rows(file):
    return pq.read_table(file).to_pylist()


@pytest.mark.slow
def test_demonstrations_have_mixed_accuracy_and_are_correct_without_injected_errors():
    rng, settings = np.random.default_rng(0), ClipWarmStart()
    scenes = [scene for _, scene, _ in draw_clips(replace(CLIPS, train=500), "train")]
    assert all(scene.events[0].colour != scene.events[-1].colour for scene in scenes)

    def scores(settings):
        for scene in scenes:
            for end in Kind.ORDER.ends:
                question = ask_end(scene, Kind.ORDER, end)
                yield compute_score("clips_order", demonstration(question, rng, settings), question.answer)

    faulty, perfect = (
        list(scores(settings)),
        list(scores(ClipWarmStart(confuses_green_blue=0.0, confuses_red_yellow=0.0))),
    )
    assert 0.4 < np.mean([parts["acc"] for parts in faulty]) < 0.7
    assert all(parts["format"] == 1.0 for parts in faulty + perfect)
    assert all(parts["acc"] == 1.0 for parts in perfect)


def test_demonstrations_and_questions_are_short():
    tokenizer, settings = build_tokenizer(Kind.PLACE.ends), ClipWarmStart()
    scene = draw_scene(np.random.default_rng(0), 10.0, 600.0)
    answer = demonstration(ask_end(scene, Kind.ORDER, "first"), np.random.default_rng(0), settings)
    ids = tokenise(tokenizer, answer, VISUAL)
    assert len(ids) == len(answer.split()) == 4
    assert tokenizer.decode(ids, skip_special_tokens=True) == answer
    assert len(tokenise(tokenizer, " which is first ?", VISUAL)) == 3
    assert len(tokenise(tokenizer, " which is bottom ?", VISUAL)) == 3
    assert len(tokenise(tokenizer, "[12.5 second]", VISUAL)) == 6


@pytest.mark.slow
def test_the_prepared_folder_has_all_files_of_a_job(task):
    train, val, blind = map(rows, (task.train_file, task.val_file, task.val_blind_file))
    assert (len(train), len(val), len(blind)) == (4, 2, 2)
    assert {row["data_source"] for row in train + val} == {"clips_order"}
    assert len(list((task.root / "clips").iterdir())) == 8
    assert (task.model_path / "video_preprocessor_config.json").is_file()


@pytest.mark.slow
def test_blanked_clips_differ_from_validation_clips_only_in_their_pixels(task):
    for row, blind in zip(rows(task.val_file), rows(task.val_blind_file), strict=True):
        assert blind.pop("data_source") == row.pop("data_source") + "_blind"
        [seen], [unseen] = row.pop("videos"), blind.pop("videos")
        assert blind == row and seen != unseen
        facts = probe(str(task.root / unseen["video"]))
        assert facts == probe(str(task.root / seen["video"]))
        pixels = decode(str(task.root / unseen["video"]), plan_video(facts, TINY.sampling))
        assert np.abs(pixels.astype(int) - clips.GROUND).max() <= 2


@pytest.mark.slow
def test_images_show_the_answer_and_blanked_images_show_nothing(image_task):
    assert len(rows(image_task.train_file)) == 4 and len(list((image_task.root / "images").iterdir())) == 8
    for row, blind in zip(rows(image_task.val_file), rows(image_task.val_blind_file), strict=True):
        assert (row["data_source"], blind.pop("data_source")) == ("images_place", "images_place_blind")
        seen, unseen = (
            np.asarray(Image.open(image_task.root / each.pop("images")[0]["image"])) for each in (row, blind)
        )
        assert row == blind | {"data_source": row["data_source"]} and seen.shape == unseen.shape == (168, 56, 3)
        assert (unseen == clips.GROUND).all()
        position, truth = row["prompt"][0]["content"].split()[3], row["reward_model"]["ground_truth"]
        third = {"top": seen[:56], "bottom": seen[112:]}[position]
        assert (third == clips.COLOURS[truth]).all(axis=2).sum() == clips.SQUARE**2


@pytest.mark.slow
def test_the_image_experiment_uses_the_prompts_of_the_warm_start(image_task):
    """Compare the job's frame plans with those of the saved model's training."""
    config = compose_job(["experiment=images", f"model.path={image_task.model_path}"])
    model, tokenizer = (
        VideoModel.from_pretrained(config.model.path),
        AutoTokenizer.from_pretrained(image_task.model_path),
    )
    reader = ClipReader(model, config.video, tokenizer, 1, image_task.root)
    prompts, _ = load_prompts([str(image_task.train_file)], tokenizer, config.data, reader)
    for prompt, watched in zip(prompts, watch(image_task.root, FEW_IMAGES, TINY, model, tokenizer), strict=True):
        assert prompt.visual[0].plan == watched.plan
        assert any(prompt.token_ids.tolist() == shown.token_ids.tolist() for _, shown in watched.questions)


@pytest.mark.slow
def test_preparing_again_with_the_same_settings_writes_nothing(task, capsys):
    written = task.train_file.stat().st_mtime_ns
    assert prepare_clips(task.root, TINY, FEW) == task
    assert task.train_file.stat().st_mtime_ns == written and capsys.readouterr().out == ""
    assert json.loads((task.root / "settings.json").read_text())["clips"]["kinds"] == ["order"]


@pytest.mark.slow
def test_tower_and_language_model_load_with_the_trained_weights(task, tmp_path):
    tower = Tower(task.model_path)
    VideoLlama3.export(task.model_path, tmp_path / "text")
    model, tokenizer = (kind.from_pretrained(tmp_path / "text") for kind in (AutoModelForCausalLM, AutoTokenizer))
    clip = watch(task.root, FEW, TINY, VideoModel.from_pretrained(str(task.model_path)), tokenizer)[0]
    frames = tower.encode(clip.pictures).unflatten(0, (len(clip.pictures), -1))
    assert frames.shape[1:] == (4, model.config.hidden_size)
    _, prompt = clip.questions[0]
    embeds = model.get_input_embeddings()(torch.from_numpy(prompt.token_ids).long())
    embeds[torch.from_numpy(prompt.positions[0]).long()] = frames[clip.order].flatten(0, 1)
    last = model(inputs_embeds=embeds[None]).logits[0, -1]
    # Six training steps are enough to learn the first token of every answer.
    assert tokenizer.decode(last.argmax()) == "<think>"
