"""What a judge is shown: the policy's embeddings where tower, file and plan are the same, else its own; refusals."""

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
def pictures(tmp_path, folder):
    model, found = VideoModel.from_pretrained(str(folder)), []
    for number in range(2):
        write_image(draw_scene(np.random.default_rng(number), 10.0, 12.0), file := tmp_path / f"{number}.png")
        plan = plan_image(probe(str(file)), *model.image_sizes(8))
        found.append(Visual(np.empty(0, np.int32), None, str(file), plan))
    return found


def seeing(folder) -> VisualInputs:
    """As when an engine of this model runs."""
    model = SimpleNamespace(hf_config=AutoConfig.from_pretrained(folder), dtype=torch.float32, max_model_len=64)
    limits = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=2048))
    own = VisualInputs(str(folder), key="model", otherwise="")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    own.start(OfflineEngine(SimpleNamespace(model_config=model, vllm_config=limits, get_tokenizer=lambda: tokenizer)))
    return own


def rows_of(own: VisualInputs, visual: Visual) -> torch.Tensor:
    return own.prompt(own.assemble("<image>?", [visual], True), [visual])["multi_modal_data"]["image"]["image_embeds"]


@pytest.mark.slow
def test_the_policys_embedding_is_taken_where_the_tower_is_the_same_and_made_where_not(
    folder, pictures, tmp_path, monkeypatch
):
    own, tower, marked = seeing(folder), Tower(folder), torch.full((pictures[0].plan.tokens, 128), 7.0)
    made = [rows_of(own, each) for each in pictures]
    assert all(torch.isfinite(rows).all() for rows in made) and not torch.equal(*made)
    for version, taken in ((tower.version, True), (tower.version_after(1), False)):
        key = embedding_key(content_hash(pictures[0].path), pictures[0].plan, version)
        (file := tmp_path / key).touch()
        write_rows(str(file), 0, marked)
        given = replace(pictures[0], source=Embedding(key, str(file), *marked.shape))
        assert torch.equal(rows_of(own, given), marked.bfloat16()) == taken
        gone = replace(given, source=replace(given.source, path=f"{file}.gone"))
        assert torch.equal(rows_of(own, gone), made[0])
    monkeypatch.setattr(visual_inputs, "MAX_CACHED_BYTES", 1)
    own._embeddings.clear()
    assert [torch.equal(rows_of(own, each), rows) for each, rows in zip(pictures, made, strict=True)] == [True, True]
    assert len(own._embeddings) == 1, "the latest alone is kept"


def test_a_question_whose_clip_did_not_come_along_is_not_judged_by_its_text(folder):
    row = {"prompt": "<video>Which?", "response": "red", "ground_truth": "blue", "videos": ["a.mp4"]}
    saved = item_of_row(row)
    judge = Judge(str(folder))
    judge._visual_inputs = seeing(folder)
    assert "not available, as in saved samples; set blind=true" in judge._orders(saved).message
    assert item_of_row(row | {"videos": []}).lacks_visual is False, "a tag that is text"


def test_what_cannot_be_shown_is_refused_with_what_to_change(folder, pictures, tmp_path):
    Qwen2Config().save_pretrained(text := tmp_path / "text")
    assert Judge(str(folder)).unsupported_reason(pictures) is None
    assert Judge(str(text), blind=True).unsupported_reason(pictures) is None
    why = Judge(str(text)).unsupported_reason(pictures)
    assert f"{text} can't process {pictures[0].path}: use a model of " in why and "blind=true" in why
    coarse = replace(pictures[0], plan=replace(pictures[0].plan, geometry=Geometry(14, 2, 1)))
    assert "it expects frames of Geometry(patch=14, merge=2" in Judge(str(folder)).unsupported_reason(
        [pictures[1], coarse]
    )
    (damaged := tmp_path / "damaged").mkdir()
    (damaged / "config.json").write_text('{"model_type": "of_no_library"}')
    for ask in (lambda judge: judge.unsupported_reason(pictures), Judge.start):
        with pytest.raises(RewardError, match=r"model=.*damaged can't be read: .*of_no_library"):
            ask(Judge(str(damaged)))
    why = Classifier(str(text), "vllm").unsupported_reason(pictures)
    assert f"reward.model_path={text} can't process {pictures[0].path}: use a model of " in why and "by a judge" in why
    assert "reward.model_backend=hf supports text only" in Classifier(str(text)).unsupported_reason(pictures)


def test_a_video_model_without_a_head_of_its_own_is_no_reward_model(folder, tmp_path):
    """Of the shape that its config.json says, and served by vLLM."""
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


def test_what_transformers_classifies_by_its_text_part_is_a_reward_model_of_text(folder, pictures, tmp_path):
    """A classifier of Gemma 3, and a class that ships with the weights; neither is shown a picture it would pass by."""
    video = json.loads((folder / "config.json").read_text()) | {"auto_map": {AUTO_MAP_CLASS: "own.Own"}}
    for config in ({"model_type": "gemma3", "vision_config": {}}, video):
        (there := tmp_path / config["model_type"]).mkdir()
        (there / "config.json").write_text(json.dumps(config | {"id2label": {"0": "good"}}))
        model = Classifier(str(there), trust_remote_code=True)
        assert "reward.model_backend=hf supports text only" in model.unsupported_reason(pictures)


@pytest.mark.slow
def test_an_engine_takes_the_clips_that_fit_the_context_it_was_given(folder, monkeypatch):
    """Not in the model's own, of which vLLM would hold activations ready, 128,000 tokens of a Qwen2.5-VL."""
    from vllm.v1.engine.llm_engine import LLMEngine

    monkeypatch.setattr(LLMEngine, "from_engine_args", lambda arguments: arguments)
    for own, length, steps in (("{}", None, 8192), ('{"max_model_len": 4096}', None, 4096), ("{}", 6000, 6000)):
        made = offline_engine._build(EngineSettings(str(folder), max_model_len=length, engine_kwargs=own), "cpu")
        assert made.max_num_batched_tokens == steps


def test_samples_are_compared_together_as_long_as_they_show_little():
    many, few, none = (
        SimpleNamespace(visual=[SimpleNamespace(plan=SimpleNamespace(tokens=tokens))] * shown)
        for tokens, shown in ((MAX_VISUAL_TOKENS // 2, 2), (MAX_VISUAL_TOKENS // 4, 1), (0, 0))
    )
    assert list(split_by_visual_tokens([none, few, few, none, many, many, few])) == [
        [none, few, few, none],
        [many],
        [many, few],
    ]
    assert list(split_by_visual_tokens([none] * 9)) == [[none] * 9] and list(split_by_visual_tokens([])) == []
