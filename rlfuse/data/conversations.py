"""Tokenise conversations that a policy is trained on, and find the tokens of the assistant's messages.

Invariant: the prompt's tokens are those that the policy receives before it generates, and a prefix of the whole; a row
where they are not is a DataError. Loss tokens are those inside `{% generation %}` of the chat template; without such
marks, those by which each assistant message extends the rendered conversation, as in TRL's prompt-completion rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlfuse.config.schema import DataConfig
from rlfuse.data.messages import Message, decode_messages, parse_messages, parse_tools
from rlfuse.data.templates import chat_template_errors, check_template, tokenize_prompt
from rlfuse.errors import DataError

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Tokenised prompt and completion."""

    ids: np.ndarray
    """int32 [T]."""
    assistant: np.ndarray
    """bool [T]: tokens of the completion's assistant messages."""
    prompt: int
    """Number of tokens of the prompt."""


class ConversationTokenizer:
    """Tokenise rows with a policy's chat template, or as raw text. Raises ConfigError for unused template settings."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig):
        check_template(tokenizer, data)
        self._tokenizer, self._data = tokenizer, data

    def read(self, where: str, row: dict[str, Any], field: str) -> Conversation:
        """Tokenise the row's prompt, if any, with the completion in `field`. Strings are one message each.

        `where`: file and row, for errors. A completion that repeats the prompt's messages is accepted.
        """
        prompt, given = row.get(self._data.prompt_key), decode_messages(f"{where}, field {field}", row.get(field))
        if self._is_text(prompt):
            return self._text(where, prompt, given, field)
        if self._tokenizer.chat_template is None:
            raise DataError(
                f"{where}, field {field}: model.path has no chat template for messages. Give prompt and {field} as "
                "strings, or save a tokenizer with a chat template."
            )
        before = () if prompt is None else parse_messages(f"{where}, field {self._data.prompt_key}", prompt, "user")
        if before and before[-1]["role"] == "assistant":
            raise DataError(
                f"{where}, field {self._data.prompt_key}: the last message is the assistant's. Move it to {field}."
            )
        answer = parse_messages(f"{where}, field {field}", given, "assistant")
        answer = answer[len(before) :] if answer[: len(before)] == before else answer
        return self._chat(where, field, before, answer, parse_tools(f"{where}, field tools", row.get("tools")))

    def _is_text(self, prompt: Any) -> bool:
        return isinstance(prompt, str) and (not self._data.prompt_is_chat or self._tokenizer.chat_template is None)

    def _text(self, where: str, prompt: str, completion: Any, field: str) -> Conversation:
        """Tokenise raw text, ended by the EOS token."""
        if not isinstance(completion, str) or not completion:
            raise DataError(f"{where}, field {field}: {completion!r:.60}; expected a non-empty string, as the prompt.")
        end = self._tokenizer.eos_token or ""
        whole = prompt + completion + (end if not completion.endswith(end) else "")
        ids = tokenize_prompt(whole, self._tokenizer, False)
        start = self._prefix(where, self._data.prompt_key, ids, tokenize_prompt(prompt, self._tokenizer, False))
        return Conversation(np.asarray(ids, dtype=np.int32), np.arange(len(ids)) >= start, start)

    def _chat(
        self, where: str, field: str, before: Sequence[Message], answer: Sequence[Message], tools: list[dict[str, Any]]
    ) -> Conversation:
        whole, first = [*before, *answer], len(before)
        if not any(message["role"] == "assistant" for message in answer):
            raise DataError(f"{where}, field {field}: no message is the assistant's, so there is nothing to train on.")
        marks = bool(GENERATION.search(self._tokenizer.get_chat_template(tools=tools or None)))
        found = self._render(where, field, whole, tools, return_assistant_tokens_mask=marks)
        ids = found["input_ids"]
        mask = np.array(found["assistant_masks"], dtype=bool) if marks else np.zeros(len(ids), dtype=bool)

        def length_of(count: int, prompts: bool) -> int:
            """Return the number of tokens of the first `count` messages; `prompts`: with the generation prompt."""
            if not count:
                return 0
            part = self._render(where, field, whole[:count], tools, add_generation_prompt=prompts)["input_ids"]
            name = f"{field}[{count - first}]" if count > first or not before else self._data.prompt_key
            return self._prefix(where, name, ids, part)

        prompt = length_of(first, True)
        if marks:
            mask[:prompt] = False
        else:
            for number in range(first, len(whole)):
                if whole[number]["role"] == "assistant":
                    end = len(ids) if number + 1 == len(whole) else length_of(number + 1, False)
                    mask[length_of(number, True) : end] = True
        return Conversation(np.asarray(ids, dtype=np.int32), mask, prompt)

    def _render(
        self, where: str, field: str, messages: Sequence[Message], tools: list[dict[str, Any]], **options: Any
    ) -> dict[str, Any]:
        with chat_template_errors(f"{where}, field {field}"):
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=tools or None,
                tokenize=True,
                return_dict=True,
                **options,
                **self._data.apply_chat_template_kwargs,
            )

    def _prefix(self, where: str, field: str, whole: Sequence[int], part: Sequence[int]) -> int:
        """Return the length of `part`; DataError if it is not a prefix of `whole`."""
        same = next((i for i, (one, other) in enumerate(zip(part, whole, strict=False)) if one != other), len(whole))
        if same < len(part):
            alone, within = (self._tokenizer.decode(list(each[same : same + 8])) for each in (part, whole))
            raise DataError(
                f"{where}, field {field}: the conversation up to here has other tokens alone ({alone!r:.40} at token "
                f"{same}) than within the whole row ({within!r:.40}), so the policy would be trained on a context that "
                "it never receives. End the prompt at a token boundary, mark the assistant's text in the chat template "
                "with {% generation %}, or give each reply its own row with prompt and completion."
            )
        return len(part)
