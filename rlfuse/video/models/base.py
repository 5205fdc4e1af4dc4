"""Base class and registry of video model families: tower, sizes, costs, vLLM route, positions, export.

Each family has its own file. Files of this folder are imported on the first lookup, custom ones in each process that
needs them (`register_custom_family`). Parameters of a family's module have the checkpoint's names.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_layers import GenericForTokenClassification

from rlfuse.config.custom_functions import FAMILY
from rlfuse.config.custom_modules import load
from rlfuse.config.model_files import with_keys_of
from rlfuse.errors import ConfigError
from rlfuse.samples import Visual
from rlfuse.video import models
from rlfuse.video.plan import Timestamps, VideoPlan
from rlfuse.video.positions import MRope
from rlfuse.video.processor_sampling import PixelBounds, ProcessorSampling
from rlfuse.video.sharding import CostModel


class Route(StrEnum):
    """How embeddings are passed to vLLM."""

    PROMPT_EMBEDS = "prompt_embeds"
    """vLLM serves the text part alone and gets prompt embeddings. Exact only if the text part treats visual tokens like
    text: one position each, a causal mask, no features in deeper layers."""
    VIDEO_EMBEDS = "video_embeds"
    """vLLM serves the whole model and gets embeddings and the patch grid, from which it computes M-RoPE positions.
    `prompt_embeds` would be wrong for such models, since they get 1-D positions."""


class VideoFamily(torch.nn.Module, ABC):
    """Vision tower of a model family, built from a configuration without weights, and the family's properties."""

    model_class: ClassVar[type[PreTrainedModel]]
    tower_prefixes: ClassVar[tuple[str, ...]]
    merge: ClassVar[int] = 2
    temporal_patch: ClassVar[int] = 1
    """Frames of a temporal patch (unit); attention never crosses units."""
    route: ClassVar[Route] = Route.PROMPT_EMBEDS
    timestamps: ClassVar[Timestamps | None] = None
    """Timestamp format of its processor; None: no timestamps."""
    sampling: ClassVar[ProcessorSampling] = ProcessorSampling(
        fps=2.0, min_frames=4, max_frames=768, min_pixels=128 * 28**2, max_pixels=768 * 28**2
    )
    """Sampling of its processor, if the checkpoint has no settings; the defaults are Qwen2-VL's."""
    image_bounds: ClassVar[PixelBounds] = PixelBounds(min_pixels=56**2, max_pixels=1280 * 28**2)
    image_merge: ClassVar[int] = 2
    """Patches per token in each direction, for images."""

    @abstractmethod
    def forward(self, patches: torch.Tensor, grid: torch.Tensor, merge: int) -> torch.Tensor:
        """Encode [patches, 3 * temporal_patch * side * side] of one grid (units, rows, columns) to [tokens, width].

        A token covers merge x merge patches. Its features are the input embedding, then those of each DeepStack layer.
        """

    @staticmethod
    @abstractmethod
    def cost(config: PreTrainedConfig) -> CostModel:
        """Return the cost model of encoding a unit, used to shard clips over ranks."""

    @staticmethod
    def sizes(config: PreTrainedConfig) -> tuple[int, int, int]:
        """Return the tower's layers, hidden size and intermediate size, for estimates of its training memory."""
        vision = config.vision_config
        layers = getattr(vision, "depth", None) or vision.num_hidden_layers
        width = getattr(vision, "embed_dim", None) or vision.hidden_size
        return layers, width, getattr(vision, "intermediate_size", None) or 4 * width

    @staticmethod
    def rope(config: PreTrainedConfig) -> MRope | None:
        """Return the M-RoPE settings; None for 1-D positions."""
        return None

    @staticmethod
    def deepstack_layers(config: PreTrainedConfig) -> int:
        """Return the number of first text layers whose output gets visual features added (DeepStack)."""
        return 0

    @staticmethod
    def grid_inputs(config: PreTrainedConfig, plan: VideoPlan) -> dict[str, torch.Tensor]:
        """Return vLLM's inputs for a clip or image in addition to its embeddings, with `VIDEO_EMBEDS`."""
        return {f"{plan.modality}_grid_thw": torch.tensor([plan.grid])}

    @staticmethod
    def engine_written_span(config: PreTrainedConfig, ids: np.ndarray, visual: Visual) -> tuple[int, int]:
        """Return the span of prompt tokens that vLLM inserts for one placeholder."""
        return int(visual.positions[0]), int(visual.positions[-1]) + 1

    @classmethod
    def export(cls, folder: str | Path, out: str | Path, head: torch.nn.Linear | None = None) -> Path:
        """Write the text part of the model with its tokenizer to `out`. `head`: a reward model's output layer."""
        out = Path(out)
        model = cls.model_class.from_pretrained(folder, dtype="auto", use_safetensors=True)
        config = model.config.text_config
        if config.model_type not in TEXT_PARTS:
            known = ", ".join(TEXT_PARTS)
            raise ValueError(f"{folder}: the text part is a {config.model_type}; only {known} can be served alone")
        # The whole model's configuration takes precedence, since it decided how the weights were saved.
        config.tie_word_embeddings = model.config.tie_word_embeddings
        config.image_token_id, config.video_token_id = model.config.image_token_id, model.config.video_token_id
        config.id2label = model.config.id2label
        kind = AutoModelForCausalLM if head is None else AutoModelForSequenceClassification
        with torch.device("meta"):
            text = kind.from_config(config, dtype=model.dtype)
        text.model = model.model.language_model
        if head is None:
            text.lm_head, text.generation_config = model.lm_head, GenerationConfig()
        else:
            text.score = head
        text.save_pretrained(out)
        if head is None:  # transformers loads many generation configs that it refuses to save
            model.generation_config.to_json_file(out / "generation_config.json")
        file, source = out / "config.json", config.get_config_dict(folder)[0].get("text_config") or {}
        saved, every = json.loads(file.read_text()), json.loads(text.config.to_json_string(use_diff=False))
        file.write_text(json.dumps(with_keys_of(source, saved, every), indent=2, sort_keys=True) + "\n")
        AutoTokenizer.from_pretrained(folder).save_pretrained(out)
        return out


TEXT_PARTS = ("qwen2", "qwen3", "llama")
"""Text model types that treat visual tokens like text."""
FAMILIES: dict[str, type[VideoFamily]] = {}


def video_family(model_type: str) -> Callable[[type[VideoFamily]], type[VideoFamily]]:
    """Register a family for models whose config.json has this `model_type`."""

    def register(family: type[VideoFamily]) -> type[VideoFamily]:
        FAMILIES[model_type] = family
        return family

    return register


def register_custom_family(family: str | None) -> None:
    """Register a custom family, `path/file.py:name`, in this process. ConfigError if it is not a family."""
    if family is None:
        return
    _import_built_in()  # first, so that a custom family replaces a built-in one of the same type
    if load(FAMILY, family) not in FAMILIES.values():
        wrong = "is not registered; decorate the class with @video_family(MODEL_TYPE)"
        raise ConfigError([f"{FAMILY}={family}: {wrong}"])


def family_of(config: PreTrainedConfig) -> type[VideoFamily] | None:
    """Return the family of a model; None for text-only models and unregistered families."""
    return None if getattr(config, "vision_config", None) is None else family_of_type(config.model_type)


def family_of_type(model_type: str) -> type[VideoFamily] | None:
    """Return the family registered for this `model_type` of config.json; None if there is none."""
    _import_built_in()
    return FAMILIES.get(model_type)


def m_rope(config: PreTrainedConfig) -> MRope | None:
    """Return the M-RoPE settings of a model; None for 1-D positions."""
    family = family_of(config)
    return family and family.rope(config)


def embedding_width(config: PreTrainedConfig) -> int:
    """Return the number of features of a visual token: the input embedding, and one per DeepStack layer."""
    family = family_of(config)
    return config.get_text_config().hidden_size * (1 + (family.deepstack_layers(config) if family else 0))


def known_families() -> str:
    """Return the names of the registered families, for messages."""
    _import_built_in()
    return ", ".join(sorted(FAMILIES))


@cache
def _import_built_in() -> None:
    for each in pkgutil.iter_modules(models.__path__, f"{models.__name__}."):
        importlib.import_module(each.name)


def register_language_models(config: PreTrainedConfig) -> None:
    """Make transformers' auto classes load a video model without its tower, with unchanged tensor names.

    Positions and embeddings are passed with every batch.
    """
    family = family_of(config)
    if family is not None and family.route is Route.VIDEO_EMBEDS:
        _register(family)


@cache
def _register(family: type[VideoFamily]) -> None:
    model_class, towers = family.model_class, [prefix.rstrip(".") for prefix in family.tower_prefixes]
    family_base = [each for each in model_class.__mro__ if issubclass(each, PreTrainedModel)][-2]
    skipped = tuple(rf"^(model\.)?{tower}\." for tower in towers)

    def drop_tower(body: torch.nn.Module) -> None:
        for tower in towers:  # `from_pretrained` builds the model on the meta device, so no memory is wasted
            delattr(body, tower)

    class Policy(model_class):  # type: ignore[valid-type, misc]
        """The language model with its output layer."""

        _keys_to_ignore_on_load_unexpected = skipped

        def __init__(self, config: PreTrainedConfig):
            super().__init__(config)
            drop_tower(self.model)

    class Value(GenericForTokenClassification, family_base):  # type: ignore[valid-type, misc]
        """The language model under a value head."""

        _keys_to_ignore_on_load_unexpected = (*skipped, r"^lm_head\.")

        def __init__(self, config: PreTrainedConfig):
            super().__init__(config)
            drop_tower(self.model)

    older_names = get_checkpoint_conversion_mapping(model_class.__name__)  # tensor names of older checkpoints
    for own, auto, head in (
        (Policy, AutoModelForCausalLM, "ForCausalLM"),
        (Value, AutoModelForTokenClassification, "ForTokenClassification"),
    ):
        own.__name__ = model_class.__name__.removesuffix("ForConditionalGeneration") + head
        # Without `exist_ok`, transformers silently ignores classes for its own configurations.
        auto.register(model_class.config_class, own, exist_ok=True)
        if older_names is not None:
            register_checkpoint_conversion_mapping(own.__name__, older_names, overwrite=True)
