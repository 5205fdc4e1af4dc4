"""Multimodal judges and classifiers, on both routes into vLLM, in one real pool, against Hugging Face's models."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from rlfuse.config.rewards import RewardConfig
from rlfuse.errors import RewardError
from rlfuse.rewards.models.judge import TEMPLATE
from rlfuse.rewards.workers.pool import RewardPool
from rlfuse.samples import Prompt, Response, Sample, Visual
from rlfuse.tasks.clips import draw_scene, write_clip, write_image
from rlfuse.tasks.small_video_models import write_small_qwen25_vl, write_small_video_llama3
from rlfuse.video import decoding, images
from rlfuse.video.models.base import m_rope
from rlfuse.video.plan import FixedSampling, plan_video
from rlfuse.video.prompt import escape_markers, unescape_markers
from rlfuse.video.towers import Tower
from rlfuse.video.video_model import VideoModel

WRITERS = {"qwen": write_small_qwen25_vl, "llama": write_small_video_llama3}
ROWS = [
    ("<video>Which is last?", "red", "blue"),
    ("<image>Which?", "a <video>", "blue"),
    (escape_markers("Is <image> a tag?"), "2", "3"),
]
"""Question, response, reference; markers in responses and in rows without media are plain text."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: write(tmp_path_factory.mktemp("judges") / name) for name, write in WRITERS.items()}


@pytest.fixture(scope="module")
def heads(folders, tmp_path_factory):
    """Return family -> (folder of a classifier with the judge's trunk and three labels, its head)."""
    found = {}
    for name, folder in folders.items():
        shutil.copytree(folder, own := tmp_path_factory.mktemp("classifiers") / name)
        config = json.loads((own / "config.json").read_text())
        config["architectures"] = [
            config["architectures"][0].replace("ConditionalGeneration", "SequenceClassification")
        ]
        config["id2label"] = {"0": "clear", "1": "right", "2": "short"}
        (own / "config.json").write_text(json.dumps(config))
        head = torch.nn.Linear(config["text_config"]["hidden_size"], 3)
        weights = load_file(own / "model.safetensors").items()
        tensors = {key: each for key, each in weights if not key.startswith("lm_head")}
        tensors |= {"score.weight": head.weight.detach(), "score.bias": head.bias.detach()}
        save_file(tensors, own / "model.safetensors", {"format": "pt"})
        found[name] = own, head
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, scene = tmp_path_factory.mktemp("shown"), draw_scene(np.random.default_rng(4), 10.0, 12.0)
    write_clip(scene, folder / "clip.mp4")
    write_image(scene, folder / "image.png")
    return {"<video>": str(folder / "clip.mp4"), "<image>": str(folder / "image.png")}


def shown(model: VideoModel, question: str, files) -> tuple[Visual, ...]:
    """Return the media of the question's markers as the policy of this family receives them."""
    nowhere, found = np.empty(0, np.int32), []
    if "<video>" in question:
        facts = decoding.probe(files["<video>"])
        plan = plan_video(facts, FixedSampling(4, 8), geometry=model.geometry, timestamps=model.family.timestamps)
        found.append(Visual(nowhere, None, files["<video>"], plan))
    if "<image>" in question:
        plan = images.plan_image(images.probe(files["<image>"]), *model.image_sizes(8))
        found.append(Visual(nowhere, None, files["<image>"], plan))
    return tuple(found)


OWN = """\
import os
from pathlib import Path
from rlfuse.video.models.base import video_family
from rlfuse.video.models.qwen2_5_vl import Qwen25VL

(Path(__file__).parent / f"known_to_{os.getpid()}").touch()

@video_family("qwen2_5_vl")
class Own(Qwen25VL):
    '''Unchanged.'''
"""
SCORES = """\
from rlfuse.rewards.models.classifier import Classifier

class Scores:
    def __init__(self, **folders):
        self.models = {name: Classifier(folder, "vllm", label="right") for name, folder in folders.items()}

    def start(self):
        for model in self.models.values():
            model.start()

    def score(self, samples):
        '''Score one batch per model.'''
        batches = {name: [each for each in samples if each.data_source == name] for name in self.models}
        found = {name: iter(model.score(batches[name])) for name, model in self.models.items()}
        return [next(found[each.data_source]) for each in samples]
"""


def sample(number: int, name: str, row, visual) -> Sample:
    question, response, reference = unescape_markers(row[0]), *row[1:]
    messages = ({"role": "user", "content": question},)
    prompt = Prompt(number, np.array([3], np.int32), question, messages, name, reference, visual=visual)
    answer = Response(np.array([5], np.int32), np.zeros(1, np.float32), "stop", 0, response)
    return Sample(prompt, 1, 0, number, answer)


@torch.no_grad()
def last_hidden(whole, model, text, visual, light=1.0) -> torch.Tensor:
    """Return the last token's hidden state by Hugging Face; features rounded as in caches, times `light`."""
    tower, tokenizer = Tower(model.folder), AutoTokenizer.from_pretrained(model.folder)
    made = model.prompt(tokenizer, text, [each.plan for each in visual])
    ids = torch.from_numpy(made.token_ids.astype(np.int64))
    rows, placed = whole.get_input_embeddings()(ids), []
    for each, places in zip(visual, made.positions, strict=True):
        frames = (images.read if each.plan.is_image else decoding.decode)(each.path, each.plan)
        pixels = tower.pixels.normalise(torch.from_numpy(frames.copy()))
        pixels = pixels.repeat_interleave(each.plan.frames // len(pixels), 0)
        patches, grid = tower._patches(pixels, each.plan.merge)
        merge = {"video_merge_sizes": torch.tensor([each.plan.merge])} if tower.shape.temporal_patch == 1 else {}
        seen = whole.get_video_features(pixel_values_videos=patches, video_grid_thw=grid, **merge).pooler_output[0]
        rows[torch.from_numpy(places).long()] = light * seen.bfloat16().float()
        placed.append(replace(each, positions=places))
    at = rope.positions(len(ids), placed) if (rope := m_rope(whole.config)) else np.arange(len(ids))
    at = torch.from_numpy(at).unsqueeze(-2)
    return whole.model.language_model(inputs_embeds=rows[None], position_ids=at).last_hidden_state[0, -1]


@torch.no_grad()
def first(whole, model, question, a, b, visual, light=1.0) -> float:
    """Return P(A) for the two responses."""
    hidden = last_hidden(whole, model, TEMPLATE.format(prompt=question, a=a, b=b), visual, light)
    tokenizer = AutoTokenizer.from_pretrained(model.folder)
    verdicts = [tokenizer.convert_tokens_to_ids(verdict) for verdict in "AB"]
    return whole.lm_head(hidden)[verdicts].softmax(-1)[0].item()


async def test_multimodal_judges_and_classifiers_score_as_hugging_face(ray_cluster, folders, heads, files, tmp_path):
    """The pool's processes load a custom family. A judge that cannot process the media is refused at startup."""
    models = {name: VideoModel.from_pretrained(str(folder)) for name, folder in folders.items()}
    kwargs = {"reference": "ground_truth", "dtype": "float32", "max_model_len": 2048}
    entries = [
        {"path": "judge", "name": name, "sources": [name], "kwargs": {"model": str(folder)} | kwargs}
        for name, folder in folders.items()
    ]
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "scores.py").write_text(SCORES)
    scores = {name: str(folder) for name, (folder, _) in heads.items()}
    entries.append({"path": f"{tmp_path / 'scores.py'}:Scores", "name": "score", "weight": 0.0, "kwargs": scores})
    pool = RewardPool(RewardConfig(entries), engine_timeout_s=300, video_family=f"{tmp_path / 'own.py'}:Own")
    rows = [(name, row, shown(models[name], row[0], files)) for name in folders for row in ROWS]
    batch = [sample(number, *each) for number, each in enumerate(rows)]
    pool.check_prompts([each.prompt for each in batch])
    other = replace(batch[0].prompt, data_source="llama")
    with pytest.raises(RewardError, match=r"llama, row 0: model=.* can't process .*clip\.mp4: it expects frames"):
        pool.check_prompts([other])
    await pool.start()
    try:
        assert len(list(tmp_path.glob("known_to_*"))) == len(folders) + 1
        results = await pool.score(batch)
        again = await pool.score(batch[:1])
    finally:
        await pool.close()
    load = AutoModelForImageTextToText.from_pretrained
    wholes = {name: load(folder, dtype=torch.float32).eval() for name, folder in folders.items()}
    for (name, (question, response, reference), visual), found in zip(rows, results, strict=True):
        answers = escape_markers(response), reference
        p, q = (first(wholes[name], models[name], question, *order, visual) for order in (answers, answers[::-1]))
        assert found.value == pytest.approx((p + 1 - q) / 2, abs=1e-4), (name, question, found)
        unseen = first(wholes[name], models[name], question, *answers, visual, light=0.0)
        assert (abs(unseen - p) > 1e-3) == bool(visual), "the score has to depend on the media, if any"
        last = last_hidden(wholes[name], models[name], f"{question}{answers[0]}<end>", visual)
        assert found.parts["score"] == pytest.approx(heads[name][1](last)[1].item(), abs=1e-4), (name, question, found)
    assert again[0].value == results[0].value and again[0].parts["score"] == results[0].parts["score"]
