"""Register families of video models, each in a file of its own: tower, sizes, costs, vLLM route, positions, export.

Files of this folder are imported when the first configuration with a visual part is seen, custom ones in each process
that needs them (`register_custom_family`). Parameters of a family's module have the checkpoint's names.
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
    """A way of embeddings into vLLM."""

    PROMPT_EMBEDS = "prompt_embeds"
    """vLLM serves the text part alone and gets the embeddings in place of the placeholders' own. Exact where visual
    tokens are to the text part what text is: one position each, a causal mask, no features in deeper layers."""
    VIDEO_EMBEDS = "video_embeds"
    """vLLM serves the whole model and gets embeddings and patch grid, from which it makes the 3-D positions of M-RoPE;
    so `prompt_embeds`, which get 1-D positions, would be wrong there."""


class VideoFamily(torch.nn.Module, ABC):
    """The tower of a family, made from a configuration of it without weights, and what else is known of the family."""

    model_class: ClassVar[type[PreTrainedModel]]
    tower_prefixes: ClassVar[tuple[str, ...]]
    merge: ClassVar[int] = 2
    temporal_patch: ClassVar[int] = 1
    """Frames of a unit: no attention crosses its bounds."""
    route: ClassVar[Route] = Route.PROMPT_EMBEDS
    timestamps: ClassVar[Timestamps | None] = None
    """How its processor writes the time of a frame; None: not at all."""
    sampling: ClassVar[ProcessorSampling] = ProcessorSampling(
        fps=2.0, min_frames=4, max_frames=768, min_pixels=128 * 28**2, max_pixels=768 * 28**2
    )
    """How its processor samples clips, where that of a checkpoint does not say; these are Qwen2-VL's numbers."""
    image_bounds: ClassVar[PixelBounds] = PixelBounds(min_pixels=56**2, max_pixels=1280 * 28**2)
    image_merge: ClassVar[int] = 2
    """Of an image, a token covers as many patches each way."""

    @abstractmethod
    def forward(self, patches: torch.Tensor, grid: torch.Tensor, merge: int) -> torch.Tensor:
        """[patches, 3 * temporal_patch * side * side] of one grid (units, rows, columns) -> [tokens, width], each of
        merge x merge patches: hidden features in place of the token's own, then as many for each layer that is fed."""

    @staticmethod
    @abstractmethod
    def cost(config: PreTrainedConfig) -> CostModel:
        """What a unit costs to encode, by which clips are spread over ranks."""

    @staticmethod
    def sizes(config: PreTrainedConfig) -> tuple[int, int, int]:
        """The tower's layers, hidden size and intermediate size, from which plans guess what training it takes."""
        vision = config.vision_config
        layers = getattr(vision, "depth", None) or vision.num_hidden_layers
        width = getattr(vision, "embed_dim", None) or vision.hidden_size
        return layers, width, getattr(vision, "intermediate_size", None) or 4 * width

    @staticmethod
    def rope(config: PreTrainedConfig) -> MRope | None:
        """How positions are counted on three axes; None where a visual token has one position, as text has."""
        return None

    @staticmethod
    def deepstack_layers(config: PreTrainedConfig) -> int:
        """How many layers of the text part, from the first on, get features of their own, added to their output."""
        return 0

    @staticmethod
    def grid_inputs(config: PreTrainedConfig, plan: VideoPlan) -> dict[str, torch.Tensor]:
        """With `VIDEO_EMBEDS`: what vLLM takes of a clip or image beside its embeddings."""
        return {f"{plan.modality}_grid_thw": torch.tensor([plan.grid])}

    @staticmethod
    def engine_written_span(config: PreTrainedConfig, ids: np.ndarray, visual: Visual) -> tuple[int, int]:
        """Return the span of a prompt that vLLM writes for one placeholder."""
        return int(visual.positions[0]), int(visual.positions[-1]) + 1

    @classmethod
    def export(cls, folder: str | Path, out: str | Path, head: torch.nn.Linear | None = None) -> Path:
        """Write the text part of the model with its tokenizer to `out`. `head`: of a reward model."""
        out = Path(out)
        model_class = cls.model_class.from_pretrained(folder, dtype="auto", use_safetensors=True)
        config = model_class.config.text_config
        if config.model_type not in TEXT_PARTS:
            known = ", ".join(TEXT_PARTS)
            raise ValueError(f"{folder}: the text part is a {config.model_type}; exact alone are those of {known}")
        # The whole model's word is final where the two configurations differ: it decided how the weights were saved.
        config.tie_word_embeddings = model_class.config.tie_word_embeddings
        config.image_token_id, config.video_token_id = (
            model_class.config.image_token_id,
            model_class.config.video_token_id,
        )
        config.id2label = model_class.config.id2label
        kind = AutoModelForCausalLM if head is None else AutoModelForSequenceClassification
        with torch.device("meta"):
            text = kind.from_config(config, dtype=model_class.dtype)
        text.model = model_class.model.language_model
        if head is None:
            text.lm_head, text.generation_config = model_class.lm_head, GenerationConfig()
        else:
            text.score = head
        text.save_pretrained(out)
        if head is None:  # transformers would refuse to save many that it loads
            model_class.generation_config.to_json_file(out / "generation_config.json")
        file, source = out / "config.json", config.get_config_dict(folder)[0].get("text_config") or {}
        saved, every = json.loads(file.read_text()), json.loads(text.config.to_json_string(use_diff=False))
        file.write_text(json.dumps(with_keys_of(source, saved, every), indent=2, sort_keys=True) + "\n")
        AutoTokenizer.from_pretrained(folder).save_pretrained(out)
        return out


TEXT_PARTS = ("qwen2", "qwen3", "llama")
"""Types of text models to which a visual token is what text is."""
FAMILIES: dict[str, type[VideoFamily]] = {}


def video_family(model_type: str) -> Callable[[type[VideoFamily]], type[VideoFamily]]:
    """Register a family for the models whose config.json has this `model_type`."""

    def register(family: type[VideoFamily]) -> type[VideoFamily]:
        FAMILIES[model_type] = family
        return family

    return register


def register_custom_family(family: str | None) -> None:
    """Register a family of the user's own, `path/file.py:name`, in this process. ConfigError where it is none."""
    if family is None:
        return
    _import_built_in()  # first, so that the user's own comes in place of a built-in one of the same type
    if load(FAMILY, family) not in FAMILIES.values():
        wrong = "is not registered; put @video_family(MODEL_TYPE) above the class"
        raise ConfigError([f"{FAMILY}={family}: {wrong}"])


def family_of(config: PreTrainedConfig) -> type[VideoFamily] | None:
    """The family of a model with a visual part; None for a model of text, and for a family that is not registered."""
    return None if getattr(config, "vision_config", None) is None else family_of_type(config.model_type)


def family_of_type(model_type: str) -> type[VideoFamily] | None:
    """The family whose models' config.json has this `model_type`; None if it is not registered."""
    _import_built_in()
    return FAMILIES.get(model_type)


def m_rope(config: PreTrainedConfig) -> MRope | None:
    """How models of this configuration count positions on three axes; None for 1-D positions."""
    family = family_of(config)
    return family and family.rope(config)


def embedding_width(config: PreTrainedConfig) -> int:
    """Features of a visual token in models of this configuration: of the text part's input, and of layers it feeds."""
    family = family_of(config)
    return config.get_text_config().hidden_size * (1 + (family.deepstack_layers(config) if family else 0))


def known_families() -> str:
    """Their names, for messages."""
    _import_built_in()
    return ", ".join(sorted(FAMILIES))


@cache
def _import_built_in() -> None:
    for each in pkgutil.iter_modules(models.__path__, f"{models.__name__}."):
        importlib.import_module(each.name)


def register_language_models(config: PreTrainedConfig) -> None:
    """Make transformers' auto classes load a whole model's text part, without its tower, under the whole model's tensor
    names. Positions and embeddings come with every batch."""
    family = family_of(config)
    if family is not None and family.route is Route.VIDEO_EMBEDS:
        _register(family)


@cache
def _register(family: type[VideoFamily]) -> None:
    model_class, towers = family.model_class, [prefix.rstrip(".") for prefix in family.tower_prefixes]
    family_base = [each for each in model_class.__mro__ if issubclass(each, PreTrainedModel)][-2]
    skipped = tuple(rf"^(model\.)?{tower}\." for tower in towers)

    def drop_tower(body: torch.nn.Module) -> None:
        for tower in towers:  # `from_pretrained` makes models without memory, and fills what is left of them
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

    older_names = get_checkpoint_conversion_mapping(model_class.__name__)  # of the tensors in checkpoints of the hub
    for own, auto, head in (
        (Policy, AutoModelForCausalLM, "ForCausalLM"),
        (Value, AutoModelForTokenClassification, "ForTokenClassification"),
    ):
        own.__name__ = model_class.__name__.removesuffix("ForConditionalGeneration") + head
        # `exist_ok`: transformers passes over classes for its own configurations otherwise, without a word.
        auto.register(model_class.config_class, own, exist_ok=True)
        if older_names is not None:
            register_checkpoint_conversion_mapping(own.__name__, older_names, overwrite=True)
