"""Qwen2.5-VL without its tower, as policy and as value model: what the trainer loads from the whole model's folder.

Role: importing registers both with transformers' `AutoModelForCausalLM` and `AutoModelForTokenClassification`, which
know no such models; after that they are loaded, trained and saved like any other.
Invariants: tensors keep the names that they have in the whole model, so that vLLM, which serves it whole, takes them as
new weights, and `checkpoints.join_checkpoint` finds their places; of the tower nothing is read. Positions come with
every batch (`positions`), embeddings of clips at the output of the input embedding.
"""

from __future__ import annotations

from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLPreTrainedModel,
    Qwen2VLForConditionalGeneration,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_layers import GenericForTokenClassification


class Qwen25VLForCausalLM(Qwen2_5_VLForConditionalGeneration):
    """The language model with its output layer."""

    _keys_to_ignore_on_load_unexpected = (r"^(model\.)?visual\.",)

    def __init__(self, config: Qwen2_5_VLConfig):
        super().__init__(config)
        del self.model.visual  # `from_pretrained` makes models without memory, and fills what is left of them


class Qwen25VLForTokenClassification(GenericForTokenClassification, Qwen2_5_VLPreTrainedModel):
    """The language model under a value head."""

    _keys_to_ignore_on_load_unexpected = (r"^(model\.)?visual\.", r"^lm_head\.")

    def __init__(self, config: Qwen2_5_VLConfig):
        super().__init__(config)
        del self.model.visual


# `exist_ok`: transformers passes over classes for its own configurations otherwise, without a word.
AutoModelForCausalLM.register(Qwen2_5_VLConfig, Qwen25VLForCausalLM, exist_ok=True)
AutoModelForTokenClassification.register(Qwen2_5_VLConfig, Qwen25VLForTokenClassification, exist_ok=True)
for each in (Qwen25VLForCausalLM, Qwen25VLForTokenClassification):  # checkpoints of the hub have tensors' older names
    names = get_checkpoint_conversion_mapping(Qwen2VLForConditionalGeneration.__name__)
    register_checkpoint_conversion_mapping(each.__name__, names)
