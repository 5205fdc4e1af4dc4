"""Model families: checks whether a family can be trained, and value-model classes.

A value model is its family's base model with a linear head `score` of one output. Its folder also loads with
transformers' token-classification class if that has the same structure (Qwen2, Llama, ...).
"""

from __future__ import annotations

import re
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForTokenClassification, PreTrainedConfig, PreTrainedModel, initialization
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_layers import GenericForTokenClassification
from transformers.modeling_outputs import TokenClassifierOutput
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from rlfuse.config.schema import Config
from rlfuse.engines.trainer.tensor_parallel import check_shardable
from rlfuse.engines.weights.sync import check_pushable
from rlfuse.errors import EngineError
from rlfuse.video.models.base import register_custom_family, register_language_models

HEAD_NAMES = ("v_head.summary", "v_head", "value_head.summary", "value_head", "classifier")
"""Other names of value heads in checkpoints: those of TRL, verl, DeepSpeed-Chat and GPT-2-like models."""
HEAD_KEY_MAPPING = {rf"^{re.escape(head)}\.": "score." for head in HEAD_NAMES}
"""`key_mapping` for `from_pretrained`."""
CUSTOM_CLASS = "AutoModelForTokenClassification"
"""Key in config.json's auto_map for a custom class in the model folder."""


def head_name(name: str) -> str:
    """Return the name in rlfuse of a checkpoint's tensor."""
    for pattern, ours in HEAD_KEY_MAPPING.items():
        name = re.sub(pattern, ours, name)
    return name


class ValueHead(GenericForTokenClassification):
    """Mixin for a family: its base model with a linear head of one output, initialised to 0.

    A new critic therefore adds no noise to the first advantages. The head has the width of the embedding, which in
    OPT's smallest models differs from that of the layers.
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.score = torch.nn.Linear(self.get_input_embeddings().embedding_dim, 1)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        super()._init_weights(module)
        if module is self.score:
            initialization.zeros_(module.weight)
            initialization.zeros_(module.bias)

    def forward(self, **inputs: Any) -> TokenClassifierOutput:
        return TokenClassifierOutput(logits=self.score(self.base_model(**inputs).last_hidden_state))


def value_class(config: PreTrainedConfig, trust_remote_code: bool = False) -> type[PreTrainedModel]:
    """Return the value-model class for the family of `config`. EngineError if the family has no base model."""
    if trust_remote_code and (code := (getattr(config, "auto_map", None) or {}).get(CUSTOM_CLASS)):
        custom = get_class_from_dynamic_module(code, config.name_or_path)
        custom.register_for_auto_class(CUSTOM_CLASS)  # then its code is saved with its weights
        return custom
    register_language_models(config)
    base = MODEL_MAPPING.get(type(config), None)
    if base is None:
        raise EngineError(
            f"transformers has no base model for a {type(config).__name__} to build a value model on, and the folder "
            f"has no custom {CUSTOM_CLASS} that model.trust_remote_code allows"
        )
    custom = AutoModelForTokenClassification._model_mapping.get(type(config), None)
    if custom is not None and issubclass(custom, GenericForTokenClassification):
        name, family = custom.__name__, custom
    else:
        name = f"{base.__name__.removesuffix('Model')}ValueModel"
        family = [each for each in base.__mro__ if issubclass(each, PreTrainedModel)][-2]
    attributes = {
        "__module__": family.__module__,  # transformers renames tensors of older checkpoints for its own classes only
        "base_model_prefix": family.base_model_prefix,
        "config_class": type(config),
    }
    return type(name, (ValueHead, family), attributes)


def training_problems(config: Config) -> list[str]:
    """Return the problems that prevent training or scoring with the configured models, one line per key."""
    register_custom_family(config.model.video_family)
    path, trust = config.model.path, config.model.trust_remote_code
    paths = {"model.path": path}
    if config.uses_critic:
        paths["critic.path"] = config.critic.path or path
    if config.uses_reference and config.ref.path:
        paths["ref.path"] = config.ref.path
    found = []
    for key, path in paths.items():
        try:
            family = AutoConfig.from_pretrained(path, trust_remote_code=trust)
            _check_family(family, key == "critic.path", trust)
            if (width := config.training.tensor_model_parallel_size) > 1:
                check_shardable(family, width)
            if key == "model.path":
                check_pushable(family)
        except (EngineError, OSError, ValueError, KeyError, StrictDataclassError) as error:
            found.append(f"{key}={path}: {str(error).strip().splitlines()[0]}; choose another model")
    return found


def _check_family(config: PreTrainedConfig, value: bool, trust_remote_code: bool) -> None:
    """Raise EngineError if the family cannot be a policy or, with `value`, a value model."""
    stateful = getattr(MODEL_MAPPING.get(type(config), None), "_is_stateful", False)
    if stateful and getattr(config.get_text_config(), "num_attention_heads", None) is None:
        raise EngineError(
            f"models of type {config.model_type} have recurrent state and no attention; training needs a model with "
            "attention layers"
        )
    if value:
        value_class(config, trust_remote_code)
