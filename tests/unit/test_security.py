"""Secrets stay out of what is written, pickles out of what is loaded."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlfuse.config.checks import check
from rlfuse.config.facts import read_facts
from rlfuse.config.schema import Config, ModelConfig
from rlfuse.config.secrets import by_name, hidden, hidden_text
from rlfuse.engines.trainer.models import load_policy

ENVIRONMENT = {"JUDGE_API_KEY": "abcdefgh-1", "SHORT_TOKEN": "text", "HOME": "/home/somebody"}


def test_values_of_secret_variables_become_their_names():
    given = {"kwargs": {"judge": "abcdefgh-1", "header": "Bearer abcdefgh-1", "kind": "text", "home": "/home/somebody"}}
    expected = {"judge": "${oc.env:JUDGE_API_KEY}", "header": "Bearer ${oc.env:JUDGE_API_KEY}"}
    assert by_name(given, ENVIRONMENT)["kwargs"] == given["kwargs"] | expected
    assert hidden(given, ENVIRONMENT) == by_name(given, ENVIRONMENT)


def test_keys_and_what_addresses_hold_are_hidden_and_nothing_else_is():
    given = {
        "functions": [{"path": "https://me:word@judge.example/score?key=abc&n=2", "kwargs": {"api_key": "abc"}}],
        "prompt_key": "question", "tokens_per_frame": 4, "hf_token": "hf_1", "password": "", "max_tokens": 3,
    }  # fmt: skip
    found = hidden(given, {})
    assert found["functions"] == [{"path": "https://***@judge.example/score?key=***&n=2", "kwargs": {"api_key": "***"}}]
    assert found | {"functions": None, "hf_token": "hf_1"} == given | {"functions": None}
    assert found["hf_token"] == "***"
    assert hidden_text("ConnectionError: http://u:p@h:1/x", {}) == "ConnectionError: http://***@h:1/x"


def test_pickled_weights_are_refused(tmp_path):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=8, num_key_value_heads=1, **sizes))
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load_policy(str(tmp_path), ModelConfig(dtype="float32"))
    config = Config()
    config.model.path, config.data.train_files = str(tmp_path), []
    (problem,) = [line for line in check(config, read_facts(config)) if line.startswith("model.path")]
    assert "its weights are pickled" in problem and "save_pretrained" in problem
