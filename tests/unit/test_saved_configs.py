"""Checkpoints that any version reads: config.json has every key of its source, the tokenizer a class known to all."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rlfuse.config.schema import ModelConfig
from rlfuse.data.tokenizers import save_tokenizer
from rlfuse.engines.trainer.models import load_critic, load_policy
from rlfuse.engines.weights.exporting import Exporter
from rlfuse.tasks.vocabulary import build_tokenizer

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
"""As published for transformers 4."""


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
    own = {"torch_dtype": "bfloat16", "architectures": [type(model).__name__]}
    if role == "critic":
        own |= {"tie_word_embeddings": saved.get("tie_word_embeddings")} if "tie_word_embeddings" in published else {}
    assert {key: saved.get(key, "lost") for key in published} == published | own
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


def test_a_saved_tokenizer_has_a_class_that_every_version_knows(tmp_path):
    made = build_tokenizer()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made.backend_tokenizer, eos_token=made.eos_token)
    save_tokenizer(tokenizer, tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    assert reloaded("20 mod 6 =").input_ids == tokenizer("20 mod 6 =").input_ids
    assert (reloaded.eos_token_id, len(reloaded)) == (tokenizer.eos_token_id, len(tokenizer))
