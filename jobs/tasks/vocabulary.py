"""The remainder task's tokenizer: one token per number, operator or special, saved as a Hugging Face fast tokenizer.

Role: what the warm start saves beside the model, so that any engine loads the pair by its folder.
Invariants: it is a `Qwen2Tokenizer`, because transformers 5 loads a Qwen2 folder's tokenizer as that class whatever was
saved there; words stand among its added tokens, since Qwen2's own rule would split 47 into 4 and 7; a word carries
the space before it, as in any byte-level vocabulary, so text begins with a space (the chat template sees to that) and
decoding gives it back as it was. The template trims, so that answers that were decoded read as they were written.
Callers: `warm_start`, `judging`, and tests that need a real tokenizer without a network.
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
    """A tokenizer over the task's words, and `more`; anything else is lost."""
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
