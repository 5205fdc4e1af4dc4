"""Suggested settings in error messages are valid, and wandb credentials are checked at startup."""

import re

import pytest
from test_config_checks import change, sound

from rlfuse.config.checks import check
from rlfuse.config.facts import Facts, read_facts

STAGES, CHUNKS = "training__pipeline_parallel_size", "training__virtual_pipeline_model_parallel_size"
SLOTS, MINI, BATCH = "trainer__n_gpus_per_node", "actor__ppo_mini_batch_size", "data__train_batch_size"
ENGINE, SHARES = "rollout__tensor_model_parallel_size", "training__tensor_model_parallel_size"
ULYSSES, N = "training__ulysses_sequence_parallel_size", "rollout__n"
ADVISED = [
    ({STAGES: 2, CHUNKS: 2, SLOTS: 2}, 2, "set training.virtual_pipeline_model_parallel_size=1"),
    ({STAGES: 2, CHUNKS: 4, SLOTS: 2}, 4, "set training.virtual_pipeline_model_parallel_size=2"),
    ({STAGES: 2, CHUNKS: 2, SLOTS: 2}, 1, "set training.pipeline_parallel_size=1 and training.virtual"),
    ({STAGES: 4, SLOTS: 4}, 3, "set training.pipeline_parallel_size=2"),
    ({STAGES: 4, CHUNKS: 2, SLOTS: 4}, 3, "set training.pipeline_parallel_size=2 and training.virtual"),
    ({STAGES: 4, SLOTS: 6}, 2, "set training.pipeline_parallel_size=2"),
    ({STAGES: 8, SLOTS: 8}, 6, "set training.pipeline_parallel_size=4"),
    ({STAGES: 3, CHUNKS: 2, SLOTS: 4}, 1, "set training.pipeline_parallel_size=1"),
    ({STAGES: 5, SLOTS: 4, SHARES: 2}, 12, "set training.pipeline_parallel_size=2"),
    ({STAGES: 3, CHUNKS: 5, SLOTS: 3}, 12, "set training.virtual_pipeline_model_parallel_size=4"),
    ({BATCH: 8, MINI: 3, SLOTS: 4}, 12, "for instance actor.ppo_mini_batch_size=4"),
    ({BATCH: 8, MINI: 2, SLOTS: 3}, 12, "set actor.ppo_mini_batch_size=4"),
    ({BATCH: 9, MINI: 4, SLOTS: 3, N: 2}, 12, "for instance actor.ppo_mini_batch_size=3"),
    ({BATCH: 4, MINI: 4, SLOTS: 8}, 12, "set actor.ppo_mini_batch_size=8 and data.train_batch_size=8"),
    ({BATCH: 2, MINI: 2, SLOTS: 8, N: 3}, 12, "set actor.ppo_mini_batch_size=3 and data.train_batch_size=3"),
    ({BATCH: 7, MINI: 2, SLOTS: 2}, 12, "for instance actor.ppo_mini_batch_size=7"),
    ({ENGINE: 6, SLOTS: 6}, 12, "set rollout.tensor_model_parallel_size=2"),
    ({ENGINE: 6, SLOTS: 9}, 12, "set rollout.tensor_model_parallel_size=1"),
    ({ENGINE: 8, SLOTS: 4}, 12, "set rollout.tensor_model_parallel_size=4"),
    ({SHARES: 3, SLOTS: 6}, 12, "set training.tensor_model_parallel_size=1"),
    ({ULYSSES: 3, SLOTS: 6}, 12, "set training.ulysses_sequence_parallel_size=2"),
    ({ULYSSES: 8, SLOTS: 4}, 12, "set training.ulysses_sequence_parallel_size=4"),
    ({"data__max_prompt_length": 1500, "data__max_response_length": 700}, 12, "shorten one by 1176"),
    ({"data__max_prompt_length": 10, "data__max_response_length": 1020}, 12, "shorten one by 6"),
    ({"data__max_prompt_length": 1100, "data__max_response_length": 1100}, 12, "shorten both, by 1176 together"),
]


@pytest.mark.parametrize(("changes", "layers", "advice"), ADVISED, ids=str)
def test_suggested_settings_are_valid(changes, layers, advice):
    config, facts = sound(**changes), Facts(context_length=1024, attention_heads=16, layers=layers, cuda=False)
    problems = check(config, facts)
    assert any(advice in problem.rpartition("; ")[2] for problem in problems), problems
    for problem in problems:
        for name, value in re.findall(r"([\w.]+)=(\d+)", problem.rpartition("; ")[2].partition(", or ")[0]):
            change(config, name, int(value))
    assert check(config, facts) == [] or advice.startswith("shorten")


KEY = "k" * 40
NETRC = f"machine HOST login user password {KEY}"
CREDENTIALS = [
    ({}, "", "wandb has no API key for "),
    ({"WANDB_API_KEY": ""}, "", "wandb has no API key for "),
    ({"WANDB_API_KEY": "short"}, "", "API key must have 40+ characters, has 5"),
    ({"WANDB_API_KEY": "a b" * 20}, "", "may only contain the letters"),
    ({"WANDB_API_KEY": KEY, "WANDB_IDENTITY_TOKEN_FILE": "FILE"}, "", "which is not allowed"),
    ({"WANDB_IDENTITY_TOKEN_FILE": "/nowhere/token"}, "", "WANDB_IDENTITY_TOKEN_FILE=/nowhere/token does not exist"),
    ({}, "machine example.org login user password x", "wandb has no API key for "),
    ({}, "this is no netrc file", "wandb has no API key for "),
    ({}, NETRC.replace(KEY, "short"), "API key must have 40+ characters, has 5"),
    ({"WANDB_API_KEY": KEY}, "", None),
    ({"WANDB_API_KEY": f"local-{KEY}"}, "", None),
    ({"WANDB_IDENTITY_TOKEN_FILE": "FILE"}, "", None),
    ({}, NETRC, None),
]


@pytest.mark.slow
@pytest.mark.parametrize(("variables", "netrc", "why"), CREDENTIALS, ids=str)
def test_wandb_online_without_credentials_is_refused(variables, netrc, why, tmp_path, monkeypatch):
    from wandb.sdk import wandb_setup
    from wandb.sdk.lib import wbauth

    wbauth.unauthenticate_session()  # the session of another test
    host = wandb_setup.singleton().settings.base_url.partition("//")[2]
    (tmp_path / "netrc").write_text(netrc.replace("HOST", host))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (variables | {"NETRC": "FILE"}).items():
        monkeypatch.setenv(name, value.replace("FILE", str(tmp_path / "netrc")))
    config = sound(trainer__wandb_mode="online")
    found = [each for each in check(config, read_facts(config)) if each.startswith("trainer.wandb_mode=online: ")]
    assert (found == []) if why is None else (why in found[0] and "set trainer.wandb_mode=offline" in found[0])
    for changes in ({"trainer__wandb_mode": "offline"}, {"trainer__logger": ["console"]}):
        assert read_facts(sound(**{"trainer__wandb_mode": "online", **changes})).wandb is None
