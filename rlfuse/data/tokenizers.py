"""The tokenizer of a run, from the model's folder or hub name, and what a reward model reads of a conversation.

Role: `load_tokenizer` is called once by the run, before Ray starts; a wrong path ends there with the remedy.
`conversation_ids` is called where reward models are trained and where they score, so that both see the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlfuse.config.schema import ModelConfig
from rlfuse.data.messages import tools_of
from rlfuse.errors import ConfigError


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer beside the model's weights."""
    try:
        return AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        kind = "folder" if Path(model.path).is_dir() else "hub name"
        raise ConfigError(
            [
                f"model.path={model.path}: the {kind} has no tokenizer that transformers can load "
                f"({str(error).strip().splitlines()[0]}). Save one into it with tokenizer.save_pretrained(path)."
            ]
        ) from error


def conversation_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], text: str, tools: Any = None
) -> list[int]:
    """The tokens of `conversation_text`."""
    whole, special = conversation_text(tokenizer, messages, text, tools)
    return tokenizer(whole, add_special_tokens=special).input_ids


def conversation_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], text: str, tools: Any = None
) -> tuple[str, bool]:
    """`messages`, answer included, by the tokenizer's chat template; `text` as it stands where it has none, around
    which the tokens belong that it puts around a text. `tools`: the row's column."""
    if tokenizer.chat_template is None:
        return text, True
    schemas = tools_of("field tools", tools) or None
    return tokenizer.apply_chat_template(list(messages), tools=schemas, tokenize=False), False
