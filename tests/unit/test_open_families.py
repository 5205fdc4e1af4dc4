"""A custom family of video models: the README example equals Qwen2-VL bitwise, and errors about invalid families."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from rlfuse.cli import main
from rlfuse.config.checks import check
from rlfuse.config.custom_modules import load_module
from rlfuse.config.facts import read_facts
from rlfuse.config.schema import Config, ModelConfig
from rlfuse.engines.memory.model_sizes import read_shape
from rlfuse.engines.trainer.families import training_problems
from rlfuse.engines.trainer.models import load_critic, load_policy
from rlfuse.engines.vllm.prompts import prompt_arguments
from rlfuse.run.resume.acceptance import with_local_paths
from rlfuse.run.resume.changes import input_digests
from rlfuse.tasks.small_video_models import byte_tokenizer
from rlfuse.tools.job_package import pack
from rlfuse.video.models import base
from rlfuse.video.models.base import Route, m_rope, register_custom_family
from rlfuse.video.positions import MRope
from rlfuse.video.towers import Tower
from rlfuse.video.video_model import VideoModel
from rlfuse.video.vllm_route import select_route

README = Path(__file__).parents[2] / "rlfuse/video/README.md"
PIXELS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Undo registrations after each test."""
    base.known_families()
    monkeypatch.setattr(base, "FAMILIES", dict(base.FAMILIES))


@pytest.fixture
def custom_family(tmp_path):
    """Return the name of the README's family, as given by a user."""
    (tmp_path / "mine.py").write_text(re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1])
    return f"{tmp_path / 'mine.py'}:Qwen2VL"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a small Qwen2-VL."""
    folder, tokenizer = tmp_path_factory.mktemp("models") / "qwen2_vl", byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<start>", "<stop>"]})
    text = dict(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    text |= dict(num_attention_heads=2, num_key_value_heads=1, bos_token_id=None, eos_token_id=1)
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    vision = dict(depth=2, embed_dim=64, num_heads=2, hidden_size=64, initializer_range=0.1)
    names = {"image": "<|image_pad|>", "video": "<|video_pad|>", "vision_start": "<start>", "vision_end": "<stop>"}
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(word) for name, word in names.items()}
    torch.manual_seed(0)
    config = Qwen2VLConfig(text_config=text, vision_config=vision, **ids)
    Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    return folder


@pytest.mark.slow
@torch.no_grad()
def test_readme_example_has_the_features_of_the_model(custom_family, folder):
    with pytest.raises(ValueError, match="qwen2_vl model; supported vision towers: qwen2_5_vl, qwen3_vl"):
        Tower(folder)
    register_custom_family(custom_family)
    model = Qwen2VLForConditionalGeneration.from_pretrained(folder).eval()
    tower, frames = Tower(folder), torch.randint(0, 256, (5, 56, 84, 3), dtype=torch.uint8)
    assert tower.shape.cost.unit(24) == 2 * 12 * 64 * 64 * 24 + 2 * 2 * 64 * 24 * 24
    filled = torch.cat([frames, frames[-1:]])  # padded to pairs of frames
    patches, grid = tower._patches(tower.pixels.normalise(filled), 2)
    expected = model.get_video_features(patches, grid).pooler_output[0]
    torch.testing.assert_close(tower.encode(frames), expected, atol=1e-5, rtol=1e-5)


def test_readme_position_check_detects_a_wrong_rope(custom_family, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "mine", load_module(Path(custom_family.rpartition(":")[0])))
    check = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
    check = check.replace("Qwen/Qwen2-VL-2B-Instruct", str(folder))
    exec(check, names := {})
    assert m_rope(names["config"]) == names["Qwen2VL"].rope(names["config"])
    monkeypatch.setattr(names["Qwen2VL"], "rope", lambda config: MRope(2, 4.0))
    with pytest.raises(AssertionError, match="Mismatched elements"):
        exec(check, {})


@pytest.mark.slow
def test_readme_example_works_in_driver_engine_trainer_and_plan(custom_family, folder, tmp_path):
    config = Config()
    config.model = ModelConfig(path=str(folder), dtype="float32", video_family=custom_family)
    assert training_problems(config) == []
    whole = AutoModelForImageTextToText.from_pretrained(folder)
    assert select_route(whole.config) is Route.VIDEO_EMBEDS and prompt_arguments(whole.config, 4096)["enable_mm_embeds"]
    policy, critic = (load(str(folder), config.model) for load in (load_policy, load_critic))
    size = sum(each.numel() for each in whole.parameters())
    shape = read_shape(str(folder), "model.path")
    assert shape.parameters == sum(each.numel() for each in policy.parameters())
    assert shape.parameters + shape.tower == size and shape.sight == (2, 64, 256)
    assert not any("visual" in name for model in (policy, critic) for name in model.state_dict())

    model = VideoModel.from_pretrained(str(folder))
    assert model.servable_folder(tmp_path / "text") == str(folder) and model.frame == ("<start>", "<stop>")
    trained = tmp_path / "huggingface"
    with torch.no_grad():
        policy.lm_head.weight.add_(1.0)
    policy.save_pretrained(trained)
    model.complete(trained)
    again = AutoModelForImageTextToText.from_pretrained(trained)
    torch.testing.assert_close(again.lm_head.weight, policy.lm_head.weight)
    torch.testing.assert_close(again.model.visual.state_dict(), whole.model.visual.state_dict())


WRONG = [
    ("nowhere.py:Qwen2VL", "", "the file .*nowhere.py does not exist; correct the path"),
    ("mine.py:Other", "class A: pass\ndef f(): pass\n", "no class `Other`; its classes: A; name one of them"),
    ("mine.py:A", "import absent_package\nclass A: pass\n", "does not find the package `absent_package`"),
    ("mine.py", "", "does not name a class in a file; write path/file.py:name"),
]


@pytest.mark.parametrize(("given", "text", "message"), WRONG)
def test_invalid_files_are_reported_at_startup(given, text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(text)
    config = Config()
    config.model.video_family = given
    problems = [each for each in check(config, read_facts(config)) if each.startswith("model.video_family")]
    assert len(problems) == 1 and re.search(f"model.video_family={given}: .*{message}", problems[0])


def test_custom_family_overrides_a_built_in_one(tmp_path):
    text = "from rlfuse.video.models.qwen2_5_vl import Qwen25VL\nfrom rlfuse.video.models.base import video_family\n"
    text += '@video_family("qwen2_5_vl")\nclass Mine(Qwen25VL): merge = 4\n'
    (tmp_path / "mine.py").write_text(text)
    register_custom_family(f"{tmp_path / 'mine.py'}:Mine")
    assert base.FAMILIES["qwen2_5_vl"].merge == 4


def test_family_file_is_packed_with_the_job_and_its_content_is_recorded(custom_family, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = Config()
    config.model = ModelConfig(path=str(folder), video_family="mine.py:Qwen2VL")
    assert with_local_paths(config).model.video_family == custom_family
    assert "mine.py" in input_digests(config)
    pack(replace(config), tmp_path / "sent", tmp_path)
    assert (tmp_path / "sent/job/mine.py").read_text() == (tmp_path / "mine.py").read_text()
    assert "video_family: mine.py:Qwen2VL" in (tmp_path / "sent/job/job.yaml").read_text()


@pytest.mark.slow
def test_plan_supports_the_custom_family(custom_family, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [
        f"model.path={folder}",
        f"model.video_family={custom_family}",
        "data.train_files=[rows.parquet]",
        "algorithm=grpo",
    ]
    reward = "reward.functions=[rlfuse.rewards.verifiers.numeric:score]"
    assert main(["plan", *words, reward, "trainer.n_gpus_per_node=1"]) in (0, 3)
    assert "tower" in capsys.readouterr().out
