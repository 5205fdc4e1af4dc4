"""Checkpoints that all versions of transformers read: keys of config.json and class of the tokenizer."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rlfuse.config.model_files import copy_files
from rlfuse.config.schema import ModelConfig
from rlfuse.data.tokenizers import save_tokenizer
from rlfuse.engines.trainer.models import load_critic, load_policy, load_reward_model
from rlfuse.engines.trainer.saving import CheckpointWriter
from rlfuse.engines.weights.exporting import Exporter
from rlfuse.tasks.small_video_models import SmallModel, write_small_video_llama3
from rlfuse.tasks.vocabulary import build_tokenizer
from rlfuse.video.models.video_llama_3 import VideoLlama3

SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=128)
SMALL = SIZES | dict(intermediate_size=48, num_key_value_heads=2)
LLAMA_3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}  # fmt: skip
SOURCES = {
    "qwen2": SMALL | dict(rope_theta=1_000_000.0, tie_word_embeddings=True, sliding_window=None, attention_dropout=0.0),
    "qwen3": SMALL | dict(rope_theta=5_000_000.0, head_dim=16, rope_scaling=None),
    "llama": SMALL | dict(rope_theta=500_000.0, rope_scaling=LLAMA_3, attention_dropout=0.1),
    "mistral": SMALL | dict(rope_theta=1_000_000.0, use_cache=True),
    "phi3": SMALL | dict(rope_theta=20_000.0, resid_pdrop=0.1, embd_pdrop=0.1, pad_token_id=0),
    "gemma2": SMALL | dict(rope_theta=20_000.0, head_dim=16, attn_logit_softcapping=50.0),
    "gpt_neox": SIZES | dict(intermediate_size=48, rotary_pct=0.25, rotary_emb_base=20_000, hidden_dropout=0.1),
    "opt": SIZES | dict(ffn_dim=48, word_embed_proj_dim=32, dropout=0.1, attention_dropout=0.0, pad_token_id=1),
    "mixtral": SMALL | dict(rope_theta=1_000_000.0, num_local_experts=2, router_jitter_noise=0.1),
}
"""config.json as published for transformers 4."""


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("family", SOURCES)
def test_keys_of_the_source_are_kept(tmp_path, family, role):
    source, out = tmp_path / "source", tmp_path / "saved"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SOURCES[family])).save_pretrained(source)
    published = SOURCES[family] | {"model_type": family, "torch_dtype": "float32", "architectures": ["Published"]}
    (source / "config.json").write_text(json.dumps(published))
    settings = ModelConfig(path=str(source), dtype="bfloat16")
    model = load_policy(str(source), settings) if role == "actor" else load_critic(str(source), settings)
    out.mkdir()
    Exporter(model, 0).save_config(out)
    saved = json.loads((out / "config.json").read_text())
    replaced = {"torch_dtype": "bfloat16", "architectures": [type(model).__name__]}
    if role == "critic":
        replaced |= (
            {"tie_word_embeddings": saved.get("tie_word_embeddings")} if "tie_word_embeddings" in published else {}
        )
    assert {key: saved.get(key, "lost") for key in published} == published | replaced
    ours, theirs = (AutoConfig.from_pretrained(folder).to_dict() for folder in (out, source))
    changed = {name for name in ours if ours[name] != theirs.get(name)}
    assert changed <= {
        "_name_or_path",
        "architectures",
        "dtype",
        "id2label",
        "label2id",
        "num_labels",
        "tie_word_embeddings",
    }
    assert torch.bfloat16 == AutoConfig.from_pretrained(out).dtype


REFUSED_BY_TRANSFORMERS = {
    "sampling flags": ({"temperature": 0.6, "top_p": 0.9, "top_k": 20}, {}),
    "sampling flags of greedy decoding": ({"do_sample": False, "min_p": 0.1}, {}),
    "no padding token": ({"pad_token_id": -1}, {"pad_token_id": -1}),
    "one beam": ({"num_beams": 1, "length_penalty": 0.8}, {}),
    "early stopping": ({"early_stopping": True, "eos_token_id": [1, 2]}, {}),
    "scores": ({"output_scores": True}, {}),
    "flags in config.json": (None, {"temperature": 0.6, "num_beams": 1, "length_penalty": 0.8}),
}
"""(generation_config.json of a source, additional keys of its config.json)."""


@pytest.mark.parametrize("role", ["actor", "critic", "reward model"])
@pytest.mark.parametrize("case", REFUSED_BY_TRANSFORMERS)
def test_generation_settings_are_saved_unchanged(tmp_path, case, role):
    source, out = tmp_path / "source", tmp_path / "saved"
    generation, more = REFUSED_BY_TRANSFORMERS[case]
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL)).save_pretrained(source)
    (source / "generation_config.json").unlink()
    (source / "config.json").write_text(json.dumps(SMALL | {"model_type": "llama"} | more))
    if generation is not None:
        (source / "generation_config.json").write_text(json.dumps(generation))
    files = CheckpointWriter()
    Exporter(load_model(role, source), 0).save_pretrained(out, [], files)
    assert files.problem is None
    assert json.loads((out / "config.json").read_text()).items() >= more.items()
    copied = out / "generation_config.json"
    assert (json.loads(copied.read_text()) if copied.exists() else None) == (generation if role == "actor" else None)


def load_model(role, source, **settings):
    settings = ModelConfig(path=str(source), dtype="float32", **settings)
    if role == "reward model":
        return load_reward_model(str(source), settings, ["helpful"])
    return (load_policy if role == "actor" else load_critic)(str(source), settings)


CUSTOM = """
from transformers import LlamaConfig, LlamaForCausalLM

class Config(LlamaConfig):
    model_type = "custom_llama"

    def __init__(self, temperature=None, **more):
        super().__init__(**more)
        if temperature is not None:
            self.temperature = temperature

class Model(LlamaForCausalLM):
    config_class = Config
"""


def test_a_custom_class_that_cannot_be_serialised_is_saved_as_its_source(tmp_path):
    # Generation settings that its code stores in the configuration are accepted.
    source, out = tmp_path / "source", tmp_path / "saved"
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL)).save_pretrained(source)
    (source / "custom.py").write_text(CUSTOM)
    code = {"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"}
    config = SMALL | {"model_type": "custom_llama", "temperature": 0.6, "auto_map": code}
    config["torch_dtype"] = "bfloat16"
    (source / "config.json").write_text(json.dumps(config))
    model, files = load_model("actor", source, trust_remote_code=True), CheckpointWriter()
    Exporter(model, 0).save_pretrained(out, [], files)
    assert files.problem is None
    assert (out / "custom.py").read_text() == CUSTOM
    saved = AutoConfig.from_pretrained(out, trust_remote_code=True)
    assert (saved.temperature, saved.architectures, saved.dtype) == (0.6, ["Model"], torch.float32)


def test_the_files_of_a_tokenizer_that_cannot_save_itself_are_copied(tmp_path, monkeypatch):
    source, out = tmp_path / "source", tmp_path / "saved"
    build_tokenizer().save_pretrained(source)
    for name in ("README.md", "model.safetensors"):
        (source / name).write_text("of the source")
    tokenizer, unsupported = AutoTokenizer.from_pretrained(source), NotImplementedError("no vocabulary file")
    monkeypatch.setattr(type(tokenizer), "save_pretrained", lambda *_: (_ for _ in ()).throw(unsupported))
    out.mkdir()
    save_tokenizer(tokenizer, out)
    assert AutoTokenizer.from_pretrained(out)("20 mod 6 =").input_ids == tokenizer("20 mod 6 =").input_ids
    assert not {"README.md", "model.safetensors", "config.json"} & {file.name for file in out.iterdir()}
    monkeypatch.setattr(tokenizer, "name_or_path", str(tmp_path / "elsewhere"), raising=False)
    with pytest.raises(NotImplementedError, match="no vocabulary file"):
        save_tokenizer(tokenizer, out)


def test_files_of_a_hub_name_are_copied_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "generation_config.json").write_text("{}")
    (refs := snapshot.parents[1] / "refs").mkdir()
    (refs / "main").write_text("abc")
    assert copy_files("org/name", tmp_path) == ["generation_config.json"]
    monkeypatch.chdir(snapshot)
    assert not any(copy_files(source, tmp_path) for source in ("org/other", str(tmp_path / "none"), "", "/none"))


def rope_of(config):
    """Return the settings of rotary positions under the names of all versions of transformers."""
    fields, names = config.get_text_config().to_dict(), ("rope", "rotary", "max_position_embeddings")
    return {name: value for name, value in fields.items() if any(each in name for each in names)}


@pytest.mark.slow
@pytest.mark.parametrize("family", [*SOURCES, "video_llama_3"])
def test_source_trainer_checkpoint_and_engine_have_the_same_rotary_positions(tmp_path, family):
    # The engine may be started from the source or from the checkpoint.
    from vllm.transformers_utils.config import get_config

    source, out = tmp_path / "source", tmp_path / "saved"
    if family == "video_llama_3":
        write_small_video_llama3(tmp_path / "whole", SmallModel(heads=2, layers=1, tower_heads=1, tower_layers=1))
        whole_config = json.loads((tmp_path / "whole/config.json").read_text())
        rope = {"rope_theta": 5_000_000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
        published = {
            key: value for key, value in whole_config["text_config"].items() if key != "rope_parameters"
        } | rope
        (tmp_path / "whole/config.json").write_text(json.dumps(whole_config | {"text_config": published}))
        VideoLlama3.export(tmp_path / "whole", source)
        saved_config = json.loads((source / "config.json").read_text())
        assert {key: saved_config.get(key, "lost") for key in published if key not in ("dtype", "architectures")} == {
            key: value for key, value in published.items() if key not in ("dtype", "architectures")
        }
    else:
        AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SOURCES[family])).save_pretrained(source)
        (source / "config.json").write_text(json.dumps(SOURCES[family] | {"model_type": family}))
    model = load_policy(str(source), ModelConfig(path=str(source), dtype="float32"))
    out.mkdir()
    Exporter(model, 0).save_config(out)
    expected = rope_of(AutoConfig.from_pretrained(source))
    assert len(expected) >= 1 + (family != "opt")
    found = model.config, AutoConfig.from_pretrained(out), *(get_config(each, False) for each in (source, out))
    assert [rope_of(config) for config in found] == [expected] * 4
    raw = (json.loads((folder / "config.json").read_text()) for folder in (source, out))
    before, after = ({key: value for key, value in each.items() if "rope" in key or "rotary" in key} for each in raw)
    assert before.items() <= after.items()


def test_a_saved_tokenizer_has_a_class_known_to_all_versions(tmp_path):
    built = build_tokenizer()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built.backend_tokenizer, eos_token=built.eos_token)
    save_tokenizer(tokenizer, tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    assert reloaded("20 mod 6 =").input_ids == tokenizer("20 mod 6 =").input_ids
    assert (reloaded.eos_token_id, len(reloaded)) == (tokenizer.eos_token_id, len(tokenizer))
