"""The remainder task's tokenizer: one token per number, operator or special, saved as a Hugging Face fast tokenizer.

Role: what the warm start saves beside the model, so that any engine loads the pair by its folder.
Invariants: decoding gives the words back with single spaces between them; the chat template turns a user message into
the bare prompt and closes an assistant message with the end-of-sequence token.
Callers: `warm_start`, and tests that need a real tokenizer without a network.
"""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from rlfuse.tasks.remainder import LARGEST_NUMBER

PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"
WORDS = ("mod", "-", "=", ",", ";")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %} {{ eos_token }}{% endif %}"
    "{% if not loop.last %} {% endif %}{% endfor %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer over the task's words; anything else becomes `<unk>`."""
    words = [PAD, END, UNKNOWN, *WORDS, *map(str, range(LARGEST_NUMBER + 1))]
    tokenizer = Tokenizer(WordLevel({word: place for place, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        # Clean-up would glue "41 ," to "41,", which is another string than the one that was sampled.
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
