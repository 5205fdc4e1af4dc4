"""Folders of video models: a small random one to begin from, and the text part of one as a model of its own.

Role: called before a run, and by tests. `export_text_model` gives vLLM and the trainer an ordinary `Qwen2ForCausalLM`
folder, because both feed the text part with embeddings and neither needs the tower.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    VideoLlama3Config,
    VideoLlama3ForConditionalGeneration,
)

PAD, END = "<pad>", "<end>"
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True, slots=True)
class SmallModel:
    """Sizes of a small VideoLLaMA3; head sizes are 32 (the least that vLLM takes on a CPU)."""

    heads: int = 4
    layers: int = 2
    tower_heads: int = 2
    tower_layers: int = 2
    tied: bool = False
    """Whether the text model's output layer is its input embedding."""
    context: int = 8192
    spread: float = 0.15
    """Standard deviation of random weights: large enough that outputs depend visibly on inputs."""
    seed: int = 0

    def __post_init__(self):
        if self.heads < 2 or self.heads % 2 or min(self.layers, self.tower_heads, self.tower_layers) < 1:
            raise ValueError(f"{self}: heads must be even (two share a key), layers and tower_heads at least 1")


def byte_tokenizer(words: Sequence[str] = ()) -> Qwen2Tokenizer:
    """Every text, byte by byte, and `words` as one token each; with the two visual placeholders."""
    symbols = [PAD, END, *sorted(ByteLevel.alphabet())]
    tokenizer = Qwen2Tokenizer(
        vocab={symbol: i for i, symbol in enumerate(symbols)},
        merges=[],
        pad_token=PAD,
        eos_token=END,
        unk_token=None,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE, VIDEO]})
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    return tokenizer


def write_small_video_llama3(
    folder: str | Path, sizes: SmallModel | None = None, tokenizer: PreTrainedTokenizerFast | None = None
) -> Path:
    """A random VideoLLaMA3 with tokenizer (else `byte_tokenizer`) and processor configuration; returns the folder."""
    folder, sizes, tokenizer = Path(folder), sizes or SmallModel(), tokenizer or byte_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sizes.seed)
        model = VideoLlama3ForConditionalGeneration(_small_config(sizes, tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "video_preprocessor_config.json").write_text(json.dumps(_PROCESSOR, indent=2) + "\n")
    return folder


def export_text_model(folder: str | Path, out: str | Path) -> Path:
    """The text part of the VideoLLaMA3 at `folder`, as a `Qwen2ForCausalLM` with its tokenizer; returns `out`.

    Its token ids are those of the whole model, so the placeholders stay ids that a rollout must never sample.
    """
    folder, out = Path(folder), Path(out)
    whole = VideoLlama3ForConditionalGeneration.from_pretrained(folder, dtype="auto")
    config = whole.config.text_config
    if not isinstance(config, Qwen2Config):
        raise ValueError(f"{folder}: the text part is a {config.model_type}; only Qwen2's stands alone")
    # The whole model's word is final where the two configurations differ: it decided how the weights were saved.
    config.tie_word_embeddings = whole.config.tie_word_embeddings
    config.image_token_id, config.video_token_id = whole.config.image_token_id, whole.config.video_token_id
    text = Qwen2ForCausalLM(config).to(whole.dtype)
    text.model, text.lm_head = whole.model.language_model, whole.lm_head
    text.generation_config = whole.generation_config
    text.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)
    return out


def _small_config(sizes: SmallModel, tokenizer: PreTrainedTokenizerFast) -> VideoLlama3Config:
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    text = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32 * sizes.heads,
        intermediate_size=64 * sizes.heads,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads // 2,
        max_position_embeddings=sizes.context,
        initializer_range=sizes.spread,
        tie_word_embeddings=sizes.tied,
        dtype="float32",
        **ids,
    )
    tower = {
        "hidden_size": 32 * sizes.tower_heads,
        "intermediate_size": 64 * sizes.tower_heads,
        "num_hidden_layers": sizes.tower_layers,
        "num_attention_heads": sizes.tower_heads,
        "patch_size": 14,
        "initializer_range": sizes.spread,
    }
    return VideoLlama3Config(
        text_config=text.to_dict(),
        vision_config=tower,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        video_token_id=tokenizer.convert_tokens_to_ids(VIDEO),
        tie_word_embeddings=sizes.tied,
        dtype="float32",
        **ids,
    )


_PROCESSOR = {
    "video_processor_type": "VideoLlama3VideoProcessor",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "rescale_factor": 1 / 255,
    "patch_size": 14,
    "temporal_patch_size": 1,
    "merge_size": 2,
    "use_token_compression": False,
}
"""As VideoLLaMA3's own, less the token compression: the plan's token count is the model's."""
