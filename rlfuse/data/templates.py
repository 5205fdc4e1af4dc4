"""Render messages and tools with the tokenizer's chat template; report rows it rejects and settings it ignores."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature

from transformers import PreTrainedTokenizerBase

from rlfuse.config.declare import as_typed
from rlfuse.config.schema import DataConfig
from rlfuse.data.messages import map_texts, refuse_surrogates
from rlfuse.data.rows import DataRow
from rlfuse.errors import ConfigError, DataError
from rlfuse.video.prompt import escape_markers

KEY = "data.apply_chat_template_kwargs"
SET_HERE = {"messages", *signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"documents", "kwargs"}


def check_template(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> None:
    """Raise ConfigError for entries of data.apply_chat_template_kwargs that the chat template ignores."""
    if not data.apply_chat_template_kwargs:
        return
    if tokenizer.chat_template is None:
        raise ConfigError([f"{KEY}: the tokenizer of model.path has no chat template. Remove the setting."])
    template = tokenizer.get_chat_template()
    problems = [
        f"{KEY}.{name}={as_typed(value)}: "
        + ("is set by rlfuse. Remove it." if name in SET_HERE else f"the chat template of model.path does not use "
           f"`{name}`. Correct the name or remove it.")
        for name, value in data.apply_chat_template_kwargs.items()
        if name in SET_HERE or not _reads(template, name)
    ]  # fmt: skip
    if problems:
        raise ConfigError(problems)


def apply_template(row: DataRow, tokenizer: PreTrainedTokenizerBase, data: DataConfig, where: str) -> str:
    """Return the prompt text with markers; a final assistant message is left open as a prefill."""
    field = f"{where}, field {data.prompt_key}"
    if not row.is_chat or tokenizer.chat_template is None:
        if row.tools:
            why = (
                "model.path has no chat template"
                if row.is_chat
                else "data.prompt_is_chat=false applies no chat template"
            )
            raise DataError(f"{where}, field tools: {why}, so tools have no effect. Remove the column.")
        return "\n".join(message["content"] for message in row.messages)
    if row.tools and not _reads(tokenizer.get_chat_template(tools=list(row.tools)), "tools"):
        raise DataError(
            f"{where}, field tools: the chat template of model.path does not use `tools`. Use a model whose template "
            "does, or remove the column."
        )
    last = row.messages[-1]
    prefill = last["role"] == "assistant"
    if prefill and last.get("tool_calls"):
        raise DataError(
            f"{field}: the final assistant message has tool_calls, so it can't be continued. Append the "
            "tool's message, or remove the calls."
        )
    if prefill and not last["content"].strip():
        raise DataError(f"{field}: the final assistant message is empty, so it can't be continued. Remove it.")
    with chat_template_errors(field):
        text = tokenizer.apply_chat_template(
            list(row.messages),
            tools=map_texts(escape_markers, list(row.tools)) or None,
            tokenize=False,
            add_generation_prompt=not prefill,
            continue_final_message=prefill,
            **data.apply_chat_template_kwargs,
        )
    return refuse_surrogates(field, text)


@contextmanager
def chat_template_errors(field: str) -> Iterator[None]:
    """Convert any exception of a chat template into a DataError about `field`."""
    try:
        yield
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"{field}: the chat template of model.path raised {type(error).__name__}: {reason}. Correct the row."
        ) from error


def tokenize_prompt(text: str, tokenizer: PreTrainedTokenizerBase, is_templated: bool) -> list[int]:
    """Return a prompt's token ids; special tokens are added unless a chat template or the text has them."""
    return tokenizer(text, add_special_tokens=not (is_templated or _has_start(text, tokenizer)))["input_ids"]


def with_bos(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Prepend the BOS token to text without a chat template, if the tokenizer adds one.

    Needed for prompts with clips or images, which are tokenised in parts.
    """
    adds = [tokenizer.bos_token_id] == tokenizer("a")["input_ids"][:1]
    return f"{tokenizer.bos_token}{text}" if adds and not _has_start(text, tokenizer) else text


def _has_start(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)


def _reads(template: str, variable: str) -> bool:
    return re.search(rf"\b{re.escape(variable)}\b", template) is not None
