"""Splitting of reasoning and answer, including misplaced tags."""

import pytest

from rlfuse.data.messages import conversation
from rlfuse.rewards.api.entries import load_entries
from rlfuse.rewards.api.items import item_of_row
from rlfuse.rewards.reasoning_tags import (
    answer_after_reasoning,
    answer_only,
    format_gate,
    is_reasoning_open,
    split_reasoning,
    without_reasoning,
)
from rlfuse.rewards.workers.reward_worker import pack, unpack

GOOD = {
    "<think>so</think>four": ("so", "four"),
    "  <think>\na\nb\n</think>\n\n4 ": ("a\nb", "4"),
    "<think></think>4": ("", "4"),
    "<think>2 < 3 > 1 </ think></think>4": ("2 < 3 > 1 </ think>", "4"),
}
BAD = {  # response -> visible answer
    "four": "four",
    " four \n": "four",
    "": "",
    "<think>so</think>": "",
    "<think>so</think> \n": "",
    "<think>so": "",
    "so</think>four": "four",
    "first <think>so</think>four": "four",
    "<think>a<think>b</think>c</think>four": "four",
    "<think>a</think>one<think>b</think>two": "two",
    "<think>a</think>four</think>": "",
    "<think>a</think>four<think>": "four",
    "<think>a</think>four<think>and on": "four",
    "</think>four<think>a": "four",
    "</think><think>a</think>four": "four",
    "<THINK>a</THINK>four": "<THINK>a</THINK>four",
    "<think>a</thinkk>four": "",
}


def test_well_formed_responses_are_split():
    for response, parts in GOOD.items():
        assert split_reasoning(response) == parts
        assert answer_after_reasoning(response) == parts[1]


@pytest.mark.parametrize("response", BAD)
def test_malformed_responses_are_rejected_without_exposing_reasoning(response):
    assert split_reasoning(response) is None
    assert answer_after_reasoning(response) == BAD[response]


def test_reasoning_opened_by_the_prompt():
    assert split_reasoning("so</think>four", opened=True) == ("so", "four")
    for response in ("<think>so</think>four", "four", "so</think>", "a</think>b</think>c"):
        assert split_reasoning(response, opened=True) is None
    assert answer_after_reasoning("still at it", opened=True) == ""


def item(prompt, response="<think>so</think>four", prompt_text=None):
    built = item_of_row({"prompt": prompt, "response": response})
    return built if prompt_text is None else without(built, prompt_text)


def without(built, prompt_text):
    from dataclasses import replace

    return replace(built, prompt_text=prompt_text)


def test_only_tags_of_the_template_open_reasoning():
    messages = [{"role": "user", "content": "Close with </think> what <think>"}]
    assert not is_reasoning_open(item(messages))  # rows of tables have no chat template
    assert not is_reasoning_open(item(messages, prompt_text="<u>Close with </think> what <think><a>"))
    assert is_reasoning_open(item(messages, prompt_text="<u>Close with </think> what <think><a><think>\n"))
    plain = [{"role": "user", "content": "2+2?"}]
    assert is_reasoning_open(item(plain, prompt_text="<u>2+2?<a><think>\n"))
    assert is_reasoning_open(item([*plain, {"role": "assistant", "content": "<think>"}]))
    assert is_reasoning_open(item([*plain, {"role": "assistant", "content": "<think>\nOkay,"}]))
    assert not is_reasoning_open(item([*plain, {"role": "assistant", "content": "<think>so</think>"}]))
    assert is_reasoning_open(item("Question: 2+2? Assistant: <think>"))
    for question in ("2 >", "", [{"type": "text", "text": "2+2?"}]):  # none of them ends the template
        assert is_reasoning_open(item([{"role": "user", "content": question}], prompt_text="<u>?<a><think>"))


@pytest.mark.parametrize(
    ("prefill", "response", "answer"),
    [
        (None, " four", " four"),
        ("It is", " four", "It is four"),
        ("It is <think>", "so</think> four", "It is four"),
        ("<think>\nOkay,", " so</think>four", "four"),
        ("<think>\nOkay,", " so", ""),
    ],
)
def test_a_response_continues_a_prefill(prefill, response, answer):
    """Check the input of a reward model, which receives answers only."""
    messages = [{"role": "user", "content": "2+2?"}]
    sample = item([*messages, {"role": "assistant", "content": prefill}] if prefill else messages, response)
    visible = without_reasoning(sample)
    assert conversation(visible.messages, visible.response) == [*messages, {"role": "assistant", "content": answer}]
    assert "Okay" not in visible.prompt_text


def test_the_format_gate_returns_the_reason():
    chat = [{"role": "user", "content": "2+2? <think>"}]
    closed = ["four", "<think>so", "<think>a</think>b<think>c</think>d", "<think>so</think>"]
    good, *bad = format_gate([item(chat), *(item(chat, response) for response in closed)])
    assert (good.value, good.text) == (1.0, None) and {reward.value for reward in bad} == {0.0}
    assert [reward.text for reward in bad] == [
        "the response does not start with <think>",
        "the reasoning is not closed with </think>",
        "the response has 2 <think> and 2 </think>; it must have one of each",
        "no answer follows the reasoning",
    ]


def test_only_answer_only_functions_receive_the_answer_without_reasoning():
    plain = [{"role": "user", "content": "2+2?"}]
    opened = item(plain, "four, but wait", "<u>2+2?<a><think>\n")

    def shown(solution_str):
        return {"score": 0.0, "seen": solution_str}

    @answer_only
    def cut(solution_str):
        return shown(solution_str)

    for function, entry, seen in (
        (shown, {}, "four, but wait"),
        (shown, {"answer_only": True}, ""),
        (cut, {}, ""),
        (cut, {"answer_only": False}, "four, but wait"),
    ):
        _, loaded = load_entries([{"path": function, "name": "f", **entry}])
        [score] = unpack(pack(loaded["f"])).score([opened])  # as in a reward worker
        assert score.notes == {"seen": seen}


def test_reasoning_tags_are_removed_from_the_prompt_too():
    plain = [{"role": "user", "content": "2+2?"}]
    seen = without_reasoning(item(plain, "so</think>four", "<u>2+2?<a><think>\n"))
    assert (seen.response, seen.prompt_text) == ("four", "<u>2+2?<a>")
    assert without_reasoning(item(plain)).response == "four"
    assert without_reasoning(item(plain, " four \n")).response == " four \n"
