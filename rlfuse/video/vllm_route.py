"""Decide how embeddings are passed to vLLM: by the route of the model's family, if it is exact. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig

from rlfuse.video.models.base import TEXT_PARTS, Route, family_of, known_families
from rlfuse.video.placeholders import placeholder_ids
from rlfuse.video.plan import VideoPlan


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reason why no route is exact."""

    reason: str


def select_route(config: PreTrainedConfig, plan: VideoPlan | None = None) -> Route | Refusal:
    """Return the route into vLLM for this plan; without a plan, for clips in general."""
    kind, family = config.model_type, family_of(config)
    if kind in TEXT_PARTS:
        if placeholder_ids(config):
            return Route.PROMPT_EMBEDS
        return Refusal(
            f"this {kind} model has no visual placeholder: its config.json must have image_token_id and "
            "video_token_id, as in the exported text part of a video model"
        )
    if family is None:
        return Refusal(unknown_family_message(kind))
    if family.route is Route.PROMPT_EMBEDS:
        return Refusal(f"engines serve the text part of a {kind} model: export it and set model.path to its folder")
    if plan and not plan.is_image and plan.timestamps != family.timestamps:
        how = "with the family's timestamps" if family.timestamps else "without timestamps"
        return Refusal(f"the engine inserts clips of a {kind} into the prompt: plan the clip {how}")
    return family.route


def unknown_family_message(kind: str) -> str:
    """Return the message for a model type without a registered video family."""
    return f"{kind} is not a supported video model; supported are {known_families()}"
