"""Requests with stop strings and grouped token output end at the same token as in vLLM."""

import random

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]  # its import is slow: one process

BYTES, MERGES = 256, ("\n\n", "</", "an", "answer", ">\xe4", " \xe4", "\xbd\xa0", "\xa5\xbd>", "\xe4\xbd\xa0", ">x")
"""Tokens of several bytes, as Latin-1; some begin or end within a character."""
STOPS = {
    "a line": ("\n\n",),
    "a tag": ("</answer>",),
    "two": ("</answer>", "x\n"),
    "beyond ASCII": ("\u4f60",),
    "a special token": ("z", "</s>"),
}


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    tokens = [letters[byte] for byte in range(BYTES)]
    tokens += ["".join(letters[byte] for byte in text.encode("latin-1")) for text in MERGES]
    special = {name: len(tokens) + place for place, name in enumerate(("<pad>", "<end>", "<unk>"))}
    tokenizer = Qwen2Tokenizer(
        vocab={token: number for number, token in enumerate(tokens)} | special, merges=[],
        pad_token="<pad>", eos_token="<end>", unk_token="<unk>",
    )  # fmt: skip
    tokenizer.add_tokens([AddedToken("</s>", special=True), AddedToken(" \u4f60\u597d", normalized=False)])
    return tokenizer


def reader(tokenizer, stop):
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    params = SamplingParams(stop=list(stop), include_stop_str_in_output=True, skip_special_tokens=False)
    fields = {"request_id": "a", "prompt_token_ids": [40, 41], "sampling_params": params}
    return IncrementalDetokenizer.from_new_request(
        tokenizer, EngineCoreRequest(**dict.fromkeys(EngineCoreRequest.__struct_fields__) | fields)
    )


def end_of(reads, groups):
    """Return (tokens read, stop string or None, text, token ids) at the stop string, or after all groups."""
    count = 0
    for group in groups:
        count += len(group)
        if found := reads.update(group, False):
            return count, found, reads.output_text, reads.output_token_ids
    return count, None, reads.output_text, reads.output_token_ids


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_groups_end_at_the_same_token_as_single_tokens(tokenizer, stop):
    from rlfuse.engines.vllm.stop_tokens import StopTokenTable

    table, chance, sizes, ended = StopTokenTable(tokenizer), random.Random(3), [], 0
    likely = [ord(each) for each in "<>/answerx\n "] + [*range(0x80, 0xF0, 7)]
    likely += [0xE4, 0xBD, 0xA0, *range(BYTES, len(tokenizer))]
    stops = table.find(stop)
    for _ in range(400):
        tokens = [chance.choice(likely) for _ in range(60)]
        if chance.random() < 0.3:
            place = chance.randrange(60)
            tokens[place:place] = chance.choice(stop).encode()
        groups, watched = [tokens[:1]], stops.after(tokens[0])
        group = []
        for token in tokens[1:]:
            group.append(token)
            if token in watched:
                groups.append(group)
                group, watched = [], stops.after(token)
        single = end_of(reader(tokenizer, stop), [[token] for token in tokens])
        assert end_of(reader(tokenizer, stop), [*groups, group] if group else groups) == single
        ended += single[1] is not None
        sizes += map(len, groups)
    assert np.mean(sizes) > 1.1 and ended > 50


def test_tokenizers_with_context_dependent_text_have_no_stop_token_table(tokenizer):
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    from rlfuse.engines.vllm.stop_tokens import StopTokenTable

    pieces = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    pieces.decoder = decoders.Metaspace()
    assert StopTokenTable(PreTrainedTokenizerFast(tokenizer_object=pieces)).find(("a",)) is None
    assert StopTokenTable(None).find(("a",)) is None
    assert StopTokenTable(tokenizer).find(("\N{REPLACEMENT CHARACTER}",)) is None
    assert StopTokenTable(tokenizer).find(("a",)) is not None
