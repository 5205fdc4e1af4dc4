"""The remainder task's tokenizer: one token per number, operator or special token.

It is a `Qwen2Tokenizer`, which transformers 5 always loads for a Qwen2 folder; words are added tokens, since Qwen2's
pre-tokenizer splits 47. A word includes the space before it, and the chat template strips spaces.
"""

from __future__ import annotations

from tokenizers import AddedToken
from transformers import Qwen2Tokenizer

from rlfuse.tasks.remainder import LARGEST_NUMBER

PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"
WORDS = ("mod", "-", "=", ",", ";")
CHAT_TEMPLATE = (
    "{% for message in messages %} {{ message['content'] | trim }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def build_tokenizer(more: tuple[str, ...] = ()) -> Qwen2Tokenizer:
    """Build a tokenizer with the task's words and `more`; other text becomes unknown tokens."""
    tokenizer = Qwen2Tokenizer(
        vocab={PAD: 0, END: 1, UNKNOWN: 2},
        merges=[],
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
    )
    words = [*WORDS, *map(str, range(LARGEST_NUMBER + 1)), *more]
    tokenizer.add_tokens([AddedToken(f" {word}", normalized=False) for word in words])
    return tokenizer
