"""Normalise chat messages and tools of a row. Pure.

Content becomes a string with `<video>` and `<image>` markers, nulls are removed, JSON text is decoded or refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from rlfuse.errors import DataError
from rlfuse.video.prompt import MARKERS, escape_markers, unescape_markers

MODALITIES = {"image": "image", "image_url": "image", "video": "video", "video_url": "video"}
"""Type of a message part -> modality."""
TYPES = {"text", *MODALITIES}
TOOL = {"type", "function", "name"}
START = 200
_ENCODED = re.compile(r"""["']?\[?["']?\{.*?["'](?:role|type)\\?["']:""")
_CERTAIN = re.compile(r"""["']?\[?["']?\{\\?["'](?:role|content)\\?["']:""")
"""Beginning of text that may be JSON-encoded messages or parts, and of text that must be; without white space."""

Message = dict[str, Any]


def parse_messages(where: str, given: Any, role: str) -> tuple[Message, ...]:
    """Return the messages of a field, content as text; a string is one message of this role."""
    return tuple(
        map_texts(unescape_markers, each) for each in parse_marked_messages(where, decode_messages(where, given), role)
    )


def parse_marked_messages(where: str, given: Any, role: str) -> tuple[Message, ...]:
    """Parse the messages that `decode_messages` returned, with literal `<video>` and `<image>` text escaped.

    Text parts, names and tool calls are escaped; in string content they are markers, as in verl.
    """
    if isinstance(given, str) and given:
        return ({"role": role, "content": given},)
    if not (isinstance(given, list) and given):
        raise DataError(f"{where}: {short_repr(given)} where a non-empty string or list of chat messages is expected.")
    return tuple(_message(f"{where}[{i}]", each) for i, each in enumerate(given))


def conversation(messages: Sequence[Message], response: str) -> list[Message]:
    """Return `messages` with the assistant's response; it continues a final assistant message, a prefill."""
    *before, last = messages or [{}]
    if last.get("role") != "assistant":
        return [*messages, {"role": "assistant", "content": response}]
    return [*before, last | {"content": f"{last['content']}{response}"}]


def decode_messages(where: str, given: Any) -> Any:
    """Return messages decoded from JSON text, other values unchanged. DataError for broken JSON."""
    if isinstance(given, str):
        found = _decoded_text(where, given)
        messages = found if isinstance(found, list) else [found]
        if not (messages and all(isinstance(each, dict) and "role" in each for each in messages)):
            return given
        given = refuse_surrogates(where, messages)
    elif isinstance(given, list) and given and all(isinstance(each, str) for each in given):
        entries = [decode_messages(f"{where}[{i}]", each) for i, each in enumerate(given)]
        given = [message for entry in entries for message in (entry if isinstance(entry, list) else [entry])]
    return [_with_parts(each) for each in given] if isinstance(given, list) else given


def _decoded_text(where: str, given: str) -> Any:
    found: Any = given
    while isinstance(found, str) and _ENCODED.match(head := "".join(found[:START].split())):
        try:
            found, end = json.JSONDecoder().raw_decode(text := found.strip())
            rest = "".join(text[end:][:START].split())
        except (ValueError, RecursionError) as error:
            found, rest, reason = given, head, error
        else:
            reason = ValueError("text follows the first message")
        if rest and _CERTAIN.match(rest):
            raise DataError(
                f"{where}: {short_repr(given)} looks like chat messages but is not JSON ({reason}). Store a list "
                "of messages or its JSON text, or set data.prompt_is_chat=false if it is the prompt text."
            )
        if rest:
            return given
    return found


def _with_parts(message: Any) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not (isinstance(content, str) and _ENCODED.match("".join(content[:START].split()))):
        return message
    parts = _json(content)
    known = isinstance(parts, list) and all(isinstance(part, dict) and part.get("type") in TYPES for part in parts)
    return message | {"content": parts} if known else message


def parse_tools(where: str, given: Any) -> list[dict[str, Any]]:
    """Return the JSON schemas of a row's `tools` column, a list or JSON text; [] if it is null or empty."""
    if isinstance(given, str):
        given = _json(given) if given.strip() else None
    elif isinstance(given, list):
        given = [_json(each) if isinstance(each, str) else without_nulls(each) for each in given]
    given = [given] if isinstance(given, dict) else given or []
    if not (isinstance(given, list) and all(isinstance(each, dict) and TOOL & each.keys() for each in given)):
        raise DataError(f"{where}: {short_repr(given)} where a list of JSON schemas, or its JSON text, is expected. "
                        "Rename the column if it does not contain tools of the chat template.")  # fmt: skip
    return refuse_surrogates(where, given)


def modality(part: Any) -> str | None:
    """Return the modality of a message part, None for text. Without a type, its keys decide, as in qwen-vl-utils."""
    if not isinstance(part, dict):
        return None
    kind = part.get("type") or next((name for name in MODALITIES if part.get(name) is not None), None)
    return MODALITIES.get(str(kind))


def without_nulls(value: Any) -> Any:
    """Return nested lists and dicts without the keys whose value is null."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def map_texts(function: Callable[[str], str], value: Any) -> Any:
    """Return nested lists and dicts with `function` applied to every string value."""
    if isinstance(value, dict):
        return {key: map_texts(function, each) for key, each in value.items()}
    if isinstance(value, list):
        return [map_texts(function, each) for each in value]
    return function(value) if isinstance(value, str) else value


def refuse_surrogates(where: str, value: Any) -> Any:
    """Return `value`; DataError if a string in it contains a lone surrogate, which tokenizers reject."""

    def encode(text: str) -> str:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            found = f"U+{ord(text[error.start]):04X} at character {error.start}"
            raise DataError(f"{where}: a lone surrogate, {found}, is not valid Unicode. Remove it.") from None
        return text

    return map_texts(encode, value)


def short_repr(value: Any) -> str:
    """Return the beginning of a value's repr, for messages."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _message(where: str, given: Any) -> Message:
    message = without_nulls(given)
    if isinstance(message, dict) and message.get("tool_calls") and "content" not in message:
        message["content"] = ""
    known = isinstance(message, dict) and isinstance(message.get("role"), str)
    if not (known and isinstance(message.get("content"), str | list)):
        raise DataError(f"{where}: {short_repr(given)} is not a message with role and content.")
    if "tool_calls" in message:
        message["tool_calls"] = _with_arguments(message["tool_calls"])
    content = message["content"]
    text = content if isinstance(content, str) else "".join(_text(where, part) for part in content)
    return map_texts(escape_markers, message) | {"content": text}


def _text(where: str, part: Any) -> str:
    if shown := modality(part):
        return MARKERS[shown]
    text = part.get("text", "" if part == {"type": "text"} else None) if isinstance(part, dict) else part
    if not isinstance(text, str):
        raise DataError(f"{where}: {short_repr(part)} is not a part with text, an image or a video. Remove it.")
    return escape_markers(text)


def _with_arguments(calls: Any) -> Any:
    """Decode arguments of tool calls: chat templates expect objects, OpenAI's API gives JSON text."""
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else {}
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            arguments = _json(function["arguments"])
            function["arguments"] = arguments if isinstance(arguments, dict) else function["arguments"]
    return calls


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
