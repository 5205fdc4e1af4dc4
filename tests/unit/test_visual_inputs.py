"""Visual inputs of judges: embeddings of the policy if tower, file and plan are equal, otherwise separate ones."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, Qwen2Config

from rlfuse.config.reward_labels import AUTO_MAP_CLASS
from rlfuse.engines.vllm import offline_engine
from rlfuse.engines.vllm.offline_engine import EngineSettings, OfflineEngine
from rlfuse.errors import RewardError
from rlfuse.rewards.api.items import item_of_row
from rlfuse.rewards.models import visual_inputs
from rlfuse.rewards.models.classifier import Classifier
from rlfuse.rewards.models.judge import Judge
from rlfuse.rewards.models.pooling import read_head
from rlfuse.rewards.models.visual_inputs import MAX_VISUAL_TOKENS, VisualInputs, split_by_visual_tokens
from rlfuse.samples import Embedding, Visual
from rlfuse.tasks.clips import draw_scene, write_image
from rlfuse.tasks.small_video_models import write_small_qwen25_vl
from rlfuse.video.embedding import content_hash, embedding_key, write_rows
from rlfuse.video.images import plan_image, probe
from rlfuse.video.plan import Geometry
from rlfuse.video.towers import Tower
from rlfuse.video.video_model import VideoModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_small_qwen25_vl(tmp_path_factory.mktemp("models") / "qwen25_vl")


@pytest.fixture
def images(tmp_path, folder):
    model, found = VideoModel.from_pretrained(str(folder)), []
    for number in range(2):
        write_image(draw_scene(np.random.default_rng(number), 10.0, 12.0), file := tmp_path / f"{number}.png")
        plan = plan_image(probe(str(file)), *model.image_sizes(8))
        found.append(Visual(np.empty(0, np.int32), None, str(file), plan))
    return found


def started_inputs(folder) -> VisualInputs:
    """Return the visual inputs of a judge whose engine runs this model."""
    model = SimpleNamespace(hf_config=AutoConfig.from_pretrained(folder), dtype=torch.float32, max_model_len=64)
    limits = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=2048))
    inputs = VisualInputs(str(folder), key="model", otherwise="")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs.start(
        OfflineEngine(SimpleNamespace(model_config=model, vllm_config=limits, get_tokenizer=lambda: tokenizer))
    )
    return inputs


def rows_of(inputs: VisualInputs, visual: Visual) -> torch.Tensor:
    return inputs.prompt(inputs.assemble("<image>?", [visual], True), [visual])["multi_modal_data"]["image"][
        "image_embeds"
    ]


@pytest.mark.slow
def test_embeddings_of_the_policy_are_reused_for_the_same_tower_and_computed_otherwise(
    folder, images, tmp_path, monkeypatch
):
    inputs, tower, marked = started_inputs(folder), Tower(folder), torch.full((images[0].plan.tokens, 128), 7.0)
    computed = [rows_of(inputs, each) for each in images]
    assert all(torch.isfinite(rows).all() for rows in computed) and not torch.equal(*computed)
    for version, is_reused in ((tower.version, True), (tower.version_after(1), False)):
        key = embedding_key(content_hash(images[0].path), images[0].plan, version)
        (file := tmp_path / key).touch()
        write_rows(str(file), 0, marked)
        visual = replace(images[0], source=Embedding(key, str(file), *marked.shape))
        assert torch.equal(rows_of(inputs, visual), marked.bfloat16()) == is_reused
        missing = replace(visual, source=replace(visual.source, path=f"{file}.gone"))
        assert torch.equal(rows_of(inputs, missing), computed[0])
    monkeypatch.setattr(visual_inputs, "MAX_CACHED_BYTES", 1)
    inputs._embeddings.clear()
    assert [torch.equal(rows_of(inputs, each), rows) for each, rows in zip(images, computed, strict=True)] == [
        True,
        True,
    ]
    assert len(inputs._embeddings) == 1, "only the latest is kept"


def test_a_sample_whose_clip_is_unavailable_is_not_judged_by_text(folder):
    row = {"prompt": "<video>Which?", "response": "red", "ground_truth": "blue", "videos": ["a.mp4"]}
    saved = item_of_row(row)
    judge = Judge(str(folder))
    judge._visual_inputs = started_inputs(folder)
    assert "not available, as in saved samples; set blind=true" in judge._orders(saved).message
    assert item_of_row(row | {"videos": []}).lacks_visual is False, "the tag is plain text"


def test_unsupported_visual_inputs_are_rejected_with_the_fix(folder, images, tmp_path):
    Qwen2Config().save_pretrained(text := tmp_path / "text")
    assert Judge(str(folder)).unsupported_reason(images) is None
    assert Judge(str(text), blind=True).unsupported_reason(images) is None
    reason = Judge(str(text)).unsupported_reason(images)
    assert f"{text} can't process {images[0].path}: use a model of " in reason and "blind=true" in reason
    coarse = replace(images[0], plan=replace(images[0].plan, geometry=Geometry(14, 2, 1)))
    assert "it expects frames of Geometry(patch=14, merge=2" in Judge(str(folder)).unsupported_reason(
        [images[1], coarse]
    )
    (damaged := tmp_path / "damaged").mkdir()
    (damaged / "config.json").write_text('{"model_type": "of_no_library"}')
    for call in (lambda judge: judge.unsupported_reason(images), Judge.start):
        with pytest.raises(RewardError, match=r"model=.*damaged can't be read: .*of_no_library"):
            call(Judge(str(damaged)))
    reason = Classifier(str(text), "vllm").unsupported_reason(images)
    assert (
        f"reward.model_path={text} can't process {images[0].path}: use a model of " in reason and "by a judge" in reason
    )
    assert "reward.model_backend=hf supports text only" in Classifier(str(text)).unsupported_reason(images)


def test_a_video_model_without_a_score_head_is_not_a_reward_model(folder, tmp_path):
    # The head must have the shape of config.json, and vLLM must serve it.
    shutil.copytree(folder, own := tmp_path / "own")
    with pytest.raises(RewardError, match=r"reward\.model_backend=hf: .*own is a video model.* set reward\."):
        Classifier(str(own))
    with pytest.raises(RewardError, match=r"reward\.model_path: .*own has no score\.weight, .*not a language model"):
        Classifier(str(own), "vllm")
    save_file({"score.weight": torch.ones(2, 128)}, own / "head.safetensors")
    with pytest.raises(
        RewardError, match=r"architectures=\['Qwen2_5_VLForConditionalGeneration'\] in .*set architectures"
    ):
        Classifier(str(own), "vllm", label="LABEL_1")
    text = (own / "config.json").read_text()
    (own / "config.json").write_text(text.replace("ForConditionalGeneration", "ForSequenceClassification"))
    for labels, width in ((1, 128), (2, 127)):
        save_file({"score.weight": torch.zeros(labels, width)}, own / "head.safetensors")
        with pytest.raises(RewardError, match=rf"shape \[{labels}, {width}\], .* has 2 labels .* hidden size 128"):
            Classifier(str(own), "vllm", label="LABEL_1")
    save_file({"score.weight": torch.ones(2, 128)}, own / "head.safetensors")
    Classifier(str(own), "vllm", label="LABEL_1")
    assert read_head(str(own)).weight.equal(torch.ones(2, 128)) and read_head(str(own)).bias is None


def test_classifiers_that_use_only_the_text_model_are_text_reward_models(folder, images, tmp_path):
    # A Gemma 3 classifier and a class that ships with the weights would ignore images, so they reject them.
    video = json.loads((folder / "config.json").read_text()) | {"auto_map": {AUTO_MAP_CLASS: "own.Own"}}
    for config in ({"model_type": "gemma3", "vision_config": {}}, video):
        (model_folder := tmp_path / config["model_type"]).mkdir()
        (model_folder / "config.json").write_text(json.dumps(config | {"id2label": {"0": "good"}}))
        model = Classifier(str(model_folder), trust_remote_code=True)
        assert "reward.model_backend=hf supports text only" in model.unsupported_reason(images)


@pytest.mark.slow
def test_an_engine_batches_as_many_tokens_as_its_context_length(folder, monkeypatch):
    # For the context length of the model (128,000 tokens for Qwen2.5-VL), vLLM would reserve too many activations.
    from vllm.v1.engine.llm_engine import LLMEngine

    monkeypatch.setattr(LLMEngine, "from_engine_args", lambda arguments: arguments)
    for engine_kwargs, length, steps in (
        ("{}", None, 8192),
        ('{"max_model_len": 4096}', None, 4096),
        ("{}", 6000, 6000),
    ):
        arguments = offline_engine._build(
            EngineSettings(str(folder), max_model_len=length, engine_kwargs=engine_kwargs), "cpu"
        )
        assert arguments.max_num_batched_tokens == steps


def test_samples_are_split_into_calls_by_visual_tokens():
    many, few, none = (
        SimpleNamespace(visual=[SimpleNamespace(plan=SimpleNamespace(tokens=tokens))] * count)
        for tokens, count in ((MAX_VISUAL_TOKENS // 2, 2), (MAX_VISUAL_TOKENS // 4, 1), (0, 0))
    )
    assert list(split_by_visual_tokens([none, few, few, none, many, many, few])) == [
        [none, few, few, none],
        [many],
        [many, few],
    ]
    assert list(split_by_visual_tokens([none] * 9)) == [[none] * 9] and list(split_by_visual_tokens([])) == []
