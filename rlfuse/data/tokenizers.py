"""Load the tokenizer of a run, and tokenise conversations for reward models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from rlfuse.config.model_files import copy_files
from rlfuse.config.schema import ModelConfig
from rlfuse.data.messages import parse_tools
from rlfuse.errors import ConfigError

PLACEHOLDERS = ("image_token", "video_token", "audio_token")
"""Tokenizer attributes with placeholder tokens, which are replaced by features and need no embedding."""


def load_tokenizer(model: ModelConfig, others: Mapping[str, str | None] | None = None) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer; ConfigError if it is missing or does not fit a model's embedding or vocabulary.

    `others`: paths of further models, which read the same token ids, by configuration key.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        kind = "folder" if Path(model.path).is_dir() else "hub name"
        raise ConfigError(
            [
                f"model.path={model.path}: the {kind} has no tokenizer that transformers can load "
                f"({str(error).strip().splitlines()[0]}). Save one there with tokenizer.save_pretrained(path)."
            ]
        ) from error
    models = {"model.path": model.path, **(others or {})}
    problems = [
        problem
        for key, path in models.items()
        if path
        for problem in (
            *check_vocabulary_size(tokenizer, key, path, model.trust_remote_code),
            *check_vocabulary(tokenizer, model.path, key, path, model.trust_remote_code),
        )
    ]
    if problems:
        raise ConfigError(problems)
    return tokenizer


def check_vocabulary_size(tokenizer: PreTrainedTokenizerBase, key: str, path: str, trusts: bool) -> Iterator[str]:
    """Yield a message if the model at `path` (value of `key`) lacks embeddings for some of the tokenizer's tokens."""
    try:
        text = AutoConfig.from_pretrained(path, trust_remote_code=trusts).get_text_config()
    except (OSError, ValueError, KeyError, StrictDataclassError):
        return  # errors in config.json are reported when the model is loaded
    rows = getattr(text, "vocab_size", None)
    ignored = {getattr(tokenizer, name, None) for name in PLACEHOLDERS}
    tokens = {token: index for token, index in tokenizer.get_vocab().items() if token not in ignored}
    last = max(tokens, key=tokens.get, default=None)
    if rows is not None and last is not None and tokens[last] >= rows:
        yield (
            f"{key}={path}: the tokenizer has tokens up to {tokens[last]} ({last!r}), but the model's embedding has "
            f"rows for 0 to {rows - 1}. Use the tokenizer the model was trained with, or resize the embedding once: "
            f"model.resize_token_embeddings({tokens[last] + 1}), then model.save_pretrained."
        )


def check_vocabulary(
    tokenizer: PreTrainedTokenizerBase, model_path: str, key: str, path: str, trusts: bool
) -> Iterator[str]:
    """Yield a message if the tokenizer of the model at `path` (value of `key`) has other ids for the same tokens.

    Further tokens of that model are allowed. `model_path`: the model of `tokenizer`.
    """
    if path == model_path:
        return
    try:
        other = AutoTokenizer.from_pretrained(path, trust_remote_code=trusts).get_vocab()
    except (OSError, ValueError):
        return  # `config.facts` reports a folder without a tokenizer
    different = {token: index for token, index in tokenizer.get_vocab().items() if other.get(token) != index}
    if different:
        token = min(different, key=different.get)
        theirs = f"has id {other[token]}" if token in other else "does not exist"
        yield (
            f"{key}={path}: its vocabulary differs from that of model.path={model_path} in {len(different):,} of "
            f"{len(tokenizer):,} tokens; {token!r} has id {different[token]} there and {theirs} here. Both models "
            "read the same token ids, so choose one with the tokenizer of model.path."
        )


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a tokenizer under a class name that transformers 4 knows, or copy its files."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception:  # custom tokenizer classes may raise anything
        if not copy_files(tokenizer.name_or_path, folder):
            raise
        return
    file = folder / "tokenizer_config.json"
    saved = json.loads(file.read_text())
    if saved.get("tokenizer_class") == "TokenizersBackend":
        file.write_text(json.dumps(saved | {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n")


def conversation_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], tools: Any = None
) -> list[int]:
    """Return the tokens of `conversation_text`, without padding at the end."""
    whole, special = conversation_text(tokenizer, messages, tools)
    return without_padding(tokenizer(whole, add_special_tokens=special).input_ids, tokenizer.pad_token_id)


def conversation_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], tools: Any = None
) -> tuple[str, bool]:
    """Return a conversation as input of a reward model, and whether the tokenizer must add special tokens."""
    if tokenizer.chat_template is None:
        *before, answer = (message.get("content") or "" for message in messages)
        return "\n".join(before) + answer, True
    schemas = parse_tools("field tools", tools) or None
    return tokenizer.apply_chat_template(list(messages), tools=schemas, tokenize=False), False


def without_padding(ids: Sequence[int], *padding: int | None) -> list[int]:
    """Return `ids` without trailing padding tokens: a sequence is scored at its last other token."""
    length = len(ids)
    while length and ids[length - 1] in padding:
        length -= 1
    return list(ids[:length])
