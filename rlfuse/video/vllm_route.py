"""Decide how embeddings reach vLLM: by the exact route of the model's family, or the reason why there is none. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig

from rlfuse.video.models.base import TEXT_PARTS, Route, family_of, known_families
from rlfuse.video.placeholders import placeholder_ids
from rlfuse.video.plan import VideoPlan


@dataclass(frozen=True, slots=True)
class Refusal:
    """No route is exact."""

    reason: str


def select_route(config: PreTrainedConfig, plan: VideoPlan | None = None) -> Route | Refusal:
    """Return the route of this plan's clips into vLLM; without a plan, of any clip."""
    kind, family = config.model_type, family_of(config)
    if kind in TEXT_PARTS:
        if placeholder_ids(config):
            return Route.PROMPT_EMBEDS
        return Refusal(
            f"this {kind} model has no visual placeholder: its configuration must name image_token_id and "
            "video_token_id, as the export of a video model's text part does"
        )
    if family is None:
        return Refusal(unknown_family_message(kind))
    if family.route is Route.PROMPT_EMBEDS:
        return Refusal(f"engines serve the text part of a {kind} model: export it and give its folder as model.path")
    if plan and not plan.is_image and plan.timestamps != family.timestamps:
        how = "with the family's timestamps" if family.timestamps else "without timestamps"
        return Refusal(f"the engine writes a clip of a {kind} into the prompt itself: plan the clip {how}")
    return family.route


def unknown_family_message(kind: str) -> str:
    """Why models of a type that is no family's can't be shown clips."""
    return f"{kind} is no family of video models that is known here; known are {known_families()}"
