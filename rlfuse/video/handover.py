"""How a clip's embeddings reach vLLM, decided by what is exact: a table of models, and a reason where none will do.

Role: pure; asked for a model when its engine starts, and for every plan before anything runs.
- `PROMPT_EMBEDS`: vLLM serves the text part alone and gets the embeddings in place of the placeholders' own. Exact
  where visual tokens are to the text part what text is: one position each, a causal mask, no features in deeper layers.
- `VIDEO_EMBEDS`: vLLM serves the whole model and gets embeddings and patch grid, from which it makes the 3-D positions
  of M-RoPE; so `prompt_embeds`, which get 1-D positions, would be wrong there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from transformers import PreTrainedConfig

from rlfuse.video.placeholders import placeholder_ids

if TYPE_CHECKING:
    from rlfuse.video.plan import VideoPlan


class Route(StrEnum):
    """A way into vLLM."""

    PROMPT_EMBEDS = "prompt_embeds"
    VIDEO_EMBEDS = "video_embeds"


@dataclass(frozen=True, slots=True)
class Refusal:
    """No way is exact."""

    reason: str


TEXT_PARTS = ("qwen2", "qwen3", "llama")
"""Ordinary text models, which video models of 1-D positions have inside."""

WHOLE_1D = ("video_llama_3", "internvl", "llava_onevision", "perception_lm", "smolvlm")
"""Video models whose text part, exported as a model of its own, is exact with `prompt_embeds`."""

M_ROPE = ("qwen2_vl", "qwen2_5_vl")
"""Video models that are exact as a whole, with `video_embeds`."""

IN_LAYERS = ("qwen3_vl", "qwen3_vl_moe")
"""Video models whose towers feed several layers of the text part."""


def hand_over(config: PreTrainedConfig, plan: VideoPlan | None = None) -> Route | Refusal:
    """The way for clips of this plan into a vLLM engine of this model; without a plan, for any.

    `config` is of the model that vLLM serves.
    """
    kind = config.model_type
    if kind in TEXT_PARTS and placeholder_ids(config):
        return Route.PROMPT_EMBEDS
    if kind in M_ROPE and not (plan and plan.timestamps):
        return Route.VIDEO_EMBEDS
    return Refusal(_reason(kind))


def _reason(kind: str) -> str:
    if kind in TEXT_PARTS:
        return (
            f"this {kind} model has no visual placeholder: its configuration must name image_token_id and "
            "video_token_id, as the export of a video model's text part does"
        )
    if kind in M_ROPE:
        return f"vLLM puts all placeholders of a clip where {kind} has one: plan the clip with timestamps=False"
    if kind in WHOLE_1D:
        return f"vLLM is to serve the text part of a {kind} model: export it and give its folder as model.path"
    if kind in IN_LAYERS:
        return f"the tower of {kind} feeds several layers of the text part, an embedding in the cache feeds one"
    return (
        f"{kind} is not known to be exact with embeddings from outside; known are {', '.join(M_ROPE)} as a whole, and "
        f"the text parts of {', '.join(WHOLE_1D)}"
    )
