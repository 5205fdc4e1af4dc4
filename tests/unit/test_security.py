"""Secrets are hidden in all output, and pickled weights are rejected."""

import time

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlfuse.config.checks import check
from rlfuse.config.facts import read_facts
from rlfuse.config.schema import Config, ModelConfig
from rlfuse.config.secrets import by_name, hidden, hidden_command, hidden_text, remember
from rlfuse.engines.trainer.models import load_policy
from rlfuse.errors import RewardError
from rlfuse.rewards.api.functions import load_function
from rlfuse.rewards.api.items import item_of_row

ENVIRONMENT = {"JUDGE_API_KEY": "abcdefgh-1", "SHORT_TOKEN": "text", "HOME": "/home/somebody"}

SECRET_NAMES = [
    "api_key", "apiKey", "x-api-key", "API-KEY", "openai_key", "anthropic-key", "hf_key", "private_key",
    "privateKey", "ssh_key", "aws_access_key_id", "access_token", "accessToken", "refresh_token", "hf_token",
    "client_secret", "password", "db_password", "passwd", "db_pass", "pass", "db_pwd", "passphrase", "credentials",
    "Authorization", "proxy-authorization", "auth", "cookie",
]  # fmt: skip

OTHER_NAMES = [
    "prompt_key", "answer_key", "image_key", "ground_truth_key", "tokens", "max_tokens", "tokens_per_frame",
    "eos_token", "pad_token", "image_token", "monkey", "passes", "compass", "signature", "author", "secretary",
]  # fmt: skip


def test_values_of_secret_variables_become_their_names():
    data = {"kwargs": {"judge": "abcdefgh-1", "header": "Bearer abcdefgh-1", "kind": "text", "home": "/home/somebody"}}
    expected = {"judge": "${oc.env:JUDGE_API_KEY}", "header": "Bearer ${oc.env:JUDGE_API_KEY}"}
    assert by_name(data, ENVIRONMENT)["kwargs"] == data["kwargs"] | expected
    assert hidden(data, ENVIRONMENT) == by_name(data, ENVIRONMENT)


def test_keys_and_credentials_in_urls_are_hidden():
    data = {
        "functions": [{"path": "https://me:word@judge.example/score?key=abc&n=2", "kwargs": {"api_key": "abc"}}],
        "prompt_key": "question", "tokens_per_frame": 4, "hf_token": "hf_1", "password": "", "max_tokens": 3,
    }  # fmt: skip
    found = hidden(data, {})
    assert found["functions"] == [{"path": "https://***@judge.example/score?key=***&n=2", "kwargs": {"api_key": "***"}}]
    assert found | {"functions": None, "hf_token": "hf_1"} == data | {"functions": None}
    assert found["hf_token"] == "***"
    assert hidden_text("ConnectionError: http://u:p@h:1/x", {}) == "ConnectionError: http://***@h:1/x"


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_values_of_secret_names_are_hidden_in_any_form(name):
    data = {name: "correct horse"}
    assert hidden({"headers": data}, {}) == {"headers": {name: "***"}}
    assert hidden({name: ["correct horse", {"of": "staple"}], "n": {name: 12345678}}, {}) == {
        name: ["***", {"of": "***"}],
        "n": {name: "***"},
    }


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_values_of_similar_but_harmless_names_are_not_hidden(name):
    data = {name: "correct horse 12345678"}
    assert hidden(data, {}) == data and hidden_text(f"{data}, {name}=abcd1234", {}) == f"{data}, {name}=abcd1234"


PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nhunter22\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    "text, secret",
    [
        ("GET failed with {'Authorization': 'Bearer hunter22'}", "hunter22"),
        ('{"authorization":"Basic aHVudGVyMjI="}', "aHVudGVyMjI="),
        ("Authorization: AWS4-HMAC-SHA256 Credential=AKID/x, Signature=hunter22", "hunter22"),
        ("sent header Bearer hunter22hunter22", "hunter22"),
        ("Judge(**{'api_key': 'it\\'s hunter22'}) failed", "hunter22"),
        ("no such user (db_password=hunter22)", "hunter22"),
        ("https://judge.example/v1?sig=hunter22&n=3", "hunter22"),
        ("https://judge.example/v1?n=3&auth=hunter22", "hunter22"),
        ("https://x.blob.example/a?se=1&X-Amz-Signature=hunter22", "hunter22"),
        ("https://x.example/cb#access_token=hunter22", "hunter22"),
        ("https://x.example/cb?client_secret=hunter22", "hunter22"),
        ("https://x.example/cb?db_pass=hunter22", "hunter22"),
        ("redis://:hunter22@host:6379/0", "hunter22"),
        ("Incorrect API key provided: sk-proj-0hunter22hunter22", "hunter22"),
        ("401 for hf_0hunter22hunter22abc", "hunter22"),
        ("push with ghp_0hunter22hunter22abc", "hunter22"),
        ("cookie eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJ4In0.hunter22", "hunter22"),
        (f"cannot load {PEM}", "hunter22"),
        ("cannot load -----BEGIN PRIVATE KEY-----\nhunter22", "hunter22"),
    ],
)
def test_messages_hide_values_that_look_like_secrets(text, secret):
    found = hidden_text(text, {})
    assert secret not in found and "***" in found


def test_hiding_secrets_is_fast():
    began = time.process_time()
    for part in (
        "token='",
        "_",
        "a_",
        "&a",
        "sk-a-",
        "eyJa-",
        "Bearer ",
        "-----BEGIN ",
        "://",
        "authorization:",
        "'\\",
    ):
        hidden_text(part * (20_000 // len(part)), {})
    assert time.process_time() - began < 3


@pytest.mark.parametrize(
    "name", ["SMTP_PASS", "DB_PWD", "db_password", "SSH_PASSPHRASE", "BASIC_AUTH", "JUDGE_API_KEY"]
)
def test_values_of_all_secret_variables_are_hidden(name):
    assert hidden_text("sent hunter22hunter22", {name: "hunter22hunter22"}) == f"sent ${{oc.env:{name}}}"
    both = {"A_TOKEN": "hunter22", name: "hunter22hunter22"}
    assert hidden_text("sent hunter22hunter22", both) == f"sent ${{oc.env:{name}}}", "longer values are replaced first"
    assert (
        hidden_text("in /home/somebody", {"PWD": "/home/somebody", "OLDPWD": "/home/somebody"}) == "in /home/somebody"
    )


REFUSING = """
class Judge:
    def __init__(self, api_key, broken=False):
        self.key = api_key
        if broken:
            raise ValueError(f"the server refused {api_key}")
    def score(self, samples):
        raise ValueError(f"the server refused {self.key}")
"""


def test_secrets_in_arguments_of_a_reward_class_are_hidden(tmp_path):
    path, key = tmp_path / "mine.py", "nobody-guesses"
    path.write_text(REFUSING)
    with pytest.raises(RewardError) as refused:
        load_function(f"{path}:Judge", {"api_key": key, "broken": True})
    assert "Judge(**{'api_key': '***', 'broken': True}) failed: ValueError: the server refused ***" in str(
        refused.value
    )
    function = load_function(f"{path}:Judge", {"api_key": key})
    (failed,) = function.score([item_of_row({"prompt": "a", "response": "b"})], 5.0)
    assert failed.message == "ValueError: the server refused ***" and key not in failed.traceback


def test_values_of_secrets_in_a_configuration_are_hidden_everywhere():
    remember({"reward": {"functions": ["http://:se%2Fcret-1@host/x", {"kwargs": {"api_key": "unheard-of", "n": 3}}]}})
    assert hidden_text("unheard-of se/cret-1 se%2Fcret-1", {}) == "*** *** ***"
    assert hidden(["unheard-of"], {}) == ["***"]
    assert hidden_command("rlfuse eval 'x={api_key: abc}' unheard-of") == "rlfuse eval 'x={api_key: ***}' '***'"


def test_pickled_weights_are_rejected(tmp_path):
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
