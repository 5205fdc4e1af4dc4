"""Split `<think>reasoning</think>answer` responses, and check their format (`format_gate`). Pure.

The format is that of Seed1.5-VL (arXiv 2505.07062): exactly one block of reasoning, then a non-empty answer. Tags in
the prompt do not count, except a `<think>` of the chat template at its very end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rlfuse.rewards.api.items import Item
from rlfuse.samples import Reward

OPEN, CLOSE = "<think>", "</think>"


def answer_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a reward function that should receive answers without their reasoning."""
    function.answer_only = True
    return function


def split_reasoning(response: str, opened: bool = False) -> tuple[str, str] | None:
    """Return (reasoning, answer), or None if the format is wrong. `opened`: the prompt ends with `<think>`."""
    text = response.strip()
    if not opened:
        if not text.startswith(OPEN):
            return None
        text = text[len(OPEN) :]
    reasoning, closed, answer = text.partition(CLOSE)
    reasoning, answer = reasoning.strip(), answer.strip()
    nested = any(tag in part for tag in (OPEN, CLOSE) for part in (reasoning, answer))
    return (reasoning, answer) if closed and answer and not nested else None


def answer_after_reasoning(response: str, opened: bool = False) -> str:
    """Return the text after the last `</think>`, up to an unclosed `<think>`; "" if `opened` and never closed."""
    _, closed, after = response.rpartition(CLOSE)
    if opened and not closed:
        return ""
    return after.partition(OPEN)[0].strip()


def is_reasoning_open(item: Item) -> bool:
    """Return whether the prompt ends inside a reasoning block, by chat template or prefill."""
    if prefill := _prefill(item):
        return prefill.rfind(OPEN) > prefill.rfind(CLOSE)
    text = item.prompt_text.rstrip()
    if not text.endswith(OPEN):
        return False
    if isinstance(item.prompt, str) or not item.messages or item.messages[-1].get("role") != "user":
        return True
    # Without a chat template, the tag may be the end of the question itself.
    question = str(item.messages[-1]["content"]).rstrip()
    return not (question.endswith(OPEN) and text.endswith(question))


def without_reasoning(item: Item) -> Item:
    """Return the item with only the answer as its response."""
    opened = is_reasoning_open(item)
    if not opened and OPEN not in item.response and CLOSE not in item.response:
        return item  # unchanged to the last space, which is visible in the tokens of a reward model
    shown = replace(item, response=answer_after_reasoning(item.response, opened))
    if not opened:
        return shown
    messages = item.messages
    if prefill := _prefill(item):
        messages = [*messages[:-1], messages[-1] | {"content": prefill.rpartition(OPEN)[0]}]
    return replace(shown, prompt_text=item.prompt_text.rpartition(OPEN)[0], messages=messages)


def _prefill(item: Item) -> str:
    last = item.messages[-1] if item.messages else {}
    return str(last["content"]) if last.get("role") == "assistant" else ""


def format_gate(samples: Sequence[Item]) -> list[Reward]:
    """Return 1 for exactly one reasoning block followed by an answer, else 0 with the reason as text."""
    faults = [_fault(item.response.strip(), is_reasoning_open(item)) for item in samples]
    return [Reward(0.0, text=fault) if fault else Reward(1.0) for fault in faults]


def _fault(text: str, opened: bool) -> str:
    if split_reasoning(text, opened) is not None:
        return ""
    opens, closes = text.count(OPEN) + opened, text.count(CLOSE)
    if not opened and not text.startswith(OPEN):
        return f"the response does not start with {OPEN}"
    if closes == 0:
        return f"the reasoning is not closed with {CLOSE}"
    if opens > 1 or closes > 1:
        return f"the response has {opens} {OPEN} and {closes} {CLOSE}; it must have one of each"
    return "no answer follows the reasoning"
