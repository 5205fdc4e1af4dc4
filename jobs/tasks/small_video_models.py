"""Create small random video models of the real classes, for tasks and tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    VideoLlama3Config,
    VideoLlama3ForConditionalGeneration,
)

PAD, END = "<pad>", "<end>"
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True, slots=True)
class SmallModel:
    """Sizes of a small video model; the head size is 32 (vLLM's minimum on CPUs)."""

    heads: int = 4
    layers: int = 2
    tower_heads: int = 2
    tower_layers: int = 2
    tied: bool = False
    context: int = 8192
    spread: float = 0.15
    """Standard deviation of the random weights, large enough that outputs depend on inputs."""
    seed: int = 0

    def __post_init__(self):
        if self.heads < 2 or self.heads % 2 or min(self.layers, self.tower_heads, self.tower_layers) < 1:
            raise ValueError(f"{self}: heads must be even (two share a key), layers and tower_heads at least 1")


def byte_tokenizer(words: Sequence[str] = ()) -> Qwen2Tokenizer:
    """Build a byte tokenizer with one token for each of `words`, and the two visual placeholders."""
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
    """Write a random VideoLLaMA3, tokenizer (default: `byte_tokenizer`) and processor settings; return the folder."""
    folder, sizes, tokenizer = Path(folder), sizes or SmallModel(), tokenizer or byte_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sizes.seed)
        model = VideoLlama3ForConditionalGeneration(_small_config(sizes, tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "video_preprocessor_config.json").write_text(json.dumps(_PROCESSOR, indent=2) + "\n")
    return folder


def write_small_qwen25_vl(
    folder: str | Path, sizes: SmallModel | None = None, tokenizer: PreTrainedTokenizerFast | None = None
) -> Path:
    """Write a random Qwen2.5-VL, as `write_small_video_llama3`; missing visual tokens are added to the tokenizer."""
    sizes, tokenizer = sizes or SmallModel(), tokenizer or byte_tokenizer()
    config = _qwen_config(
        Qwen2_5_VLConfig,
        sizes,
        tokenizer,
        text={"rope_parameters": _ROPE | {"mrope_section": [4, 6, 6]}},
        tower={"fullatt_block_indexes": [sizes.tower_layers - 1]},
    )
    # Frames have the plan's size, so the processor's cap must not apply.
    pictures = Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor(cap_pixels_per_frame=False)
    processor = Qwen2_5_VLProcessor(*pictures, chat_template=tokenizer.chat_template)
    return _write(Qwen2_5_VLForConditionalGeneration, config, sizes.seed, processor, folder)


def write_small_qwen3_vl(
    folder: str | Path, sizes: SmallModel | None = None, tokenizer: PreTrainedTokenizerFast | None = None
) -> Path:
    """Write a random Qwen3-VL, as `write_small_qwen25_vl`; each tower layer feeds a text layer (DeepStack)."""
    sizes, tokenizer = sizes or SmallModel(), tokenizer or byte_tokenizer()
    fed = list(range(min(sizes.tower_layers, sizes.layers)))
    config = _qwen_config(
        Qwen3VLConfig,
        sizes,
        tokenizer,
        text={"rope_parameters": _ROPE | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}, "head_dim": 32},
        tower={"deepstack_visual_indexes": fed, "num_position_embeddings": 16},
    )
    images = Qwen2VLImageProcessor(patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    pictures = images, tokenizer, Qwen3VLVideoProcessor(cap_pixels_per_frame=False)
    processor = Qwen3VLProcessor(*pictures, chat_template=tokenizer.chat_template)
    return _write(Qwen3VLForConditionalGeneration, config, sizes.seed, processor, folder)


_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


def _qwen_config(
    kind: type, sizes: SmallModel, tokenizer: PreTrainedTokenizerFast, text: dict, tower: dict
) -> PreTrainedConfig:
    names = dict(vision_start=VISION_START, vision_end=VISION_END, image=IMAGE, video=VIDEO)
    tokenizer.add_special_tokens({"additional_special_tokens": list(names.values())})
    widths = {
        "hidden_size": 32 * sizes.tower_heads,
        "intermediate_size": 64 * sizes.tower_heads,
        "depth": sizes.tower_layers,
        "num_heads": sizes.tower_heads,
        "out_hidden_size": 32 * sizes.heads,
        "initializer_range": sizes.spread,
    }
    return kind(
        text_config=_text_settings(sizes, tokenizer) | text,
        vision_config=widths | tower,
        tie_word_embeddings=sizes.tied,
        dtype="float32",
        **{f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()},
    )


def _write(
    kind: type[PreTrainedModel], config: PreTrainedConfig, seed: int, processor: ProcessorMixin, folder: str | Path
) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    return Path(folder)


def _text_settings(sizes: SmallModel, tokenizer: PreTrainedTokenizerFast) -> dict:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 32 * sizes.heads,
        "intermediate_size": 64 * sizes.heads,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads // 2,
        "max_position_embeddings": sizes.context,
        "initializer_range": sizes.spread,
        "tie_word_embeddings": sizes.tied,
        "dtype": "float32",
        **_special_ids(tokenizer),
    }


def _special_ids(tokenizer: PreTrainedTokenizerFast) -> dict:
    return {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}


def _small_config(sizes: SmallModel, tokenizer: PreTrainedTokenizerFast) -> VideoLlama3Config:
    tower = {
        "hidden_size": 32 * sizes.tower_heads,
        "intermediate_size": 64 * sizes.tower_heads,
        "num_hidden_layers": sizes.tower_layers,
        "num_attention_heads": sizes.tower_heads,
        "patch_size": 14,
        "initializer_range": sizes.spread,
    }
    return VideoLlama3Config(
        text_config=Qwen2Config(**_text_settings(sizes, tokenizer)).to_dict(),
        vision_config=tower,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        video_token_id=tokenizer.convert_tokens_to_ids(VIDEO),
        tie_word_embeddings=sizes.tied,
        dtype="float32",
        **_special_ids(tokenizer),
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
"""VideoLLaMA3's settings without token compression, so that token counts are those of the plan."""
