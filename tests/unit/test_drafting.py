"""Conditions under which engines draft from earlier responses: repeated steps, later epochs, and exclusions."""

from types import SimpleNamespace

import pytest

from rlfuse.config.custom_functions import with_values
from rlfuse.config.schema import Config
from rlfuse.run.drafting import run_drafts, run_engines, with_drafts

WITHOUT_DRAFTS = "Steps 4 to 5 are repeated without drafts: trainer.deterministic=true"


@pytest.mark.parametrize(
    ("last_step", "changes", "draft", "line"),
    [
        (3, {}, "ngram", None),
        (5, {}, "history", None),
        (3, {"rollout.draft": "history"}, "history", None),
        (5, {"trainer.deterministic": True}, "ngram", WITHOUT_DRAFTS),
        (5, {"fusion.tail_speculation": 2}, "ngram", "not used as drafts. fusion.tail_speculation=2: must be 0"),
        (5, {"rollout.name": "transformers"}, "ngram", "drafts. rollout.draft=history: rollout.name="),
    ],
    ids=str,
)  # fmt: skip
def test_a_run_that_continues_after_step_3(last_step, changes, draft, line, tiny):
    messages = []
    config = with_values(Config(), {"model.path": tiny} | changes)
    log = SimpleNamespace(responses=SimpleNamespace(last_step=last_step), say=messages.append)
    assert run_engines(config, 3, log).rollout.draft == draft
    assert len(messages) == (line is not None) and all(line in each for each in messages), messages
    drafts = run_drafts(config, 3, log)
    assert drafts.epoch_limit_mb == (256 if changes.get("rollout.draft") == "history" else 0)
    assert drafts.are_wanted == (draft == "history" or line is not None) and drafts.repeated_until == last_step


def test_a_run_without_stored_responses_uses_no_drafts(tiny):
    log = SimpleNamespace(responses=None, say=pytest.fail)
    config = with_values(Config(), {"model.path": tiny})
    assert run_engines(config, 3, log) is config and not run_drafts(config, 3, log).are_wanted


def test_an_evaluation_can_draft_with_any_model(tiny):
    messages = []
    config = with_values(Config(), {"model.path": tiny})
    assert with_drafts(config, messages.append, trains=False).rollout.draft == "history" and not messages


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Write the configuration of a tiny model and return its folder."""
    from transformers import Qwen2Config

    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 100}
    Qwen2Config(num_hidden_layers=1, architectures=["Qwen2ForCausalLM"], **sizes).save_pretrained(folder)
    return str(folder)
