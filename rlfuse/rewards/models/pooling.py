"""Run a reward model in vLLM's pooling mode: of text, or a video model with a head `score.weight` [labels, hidden].

Scores are raw, without vLLM's activation; the head is never randomly initialised.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlfuse.config.reward_labels import AUTO_MAP_CLASS, head_labels
from rlfuse.engines.vllm.offline_engine import EngineSettings, engine
from rlfuse.errors import RewardError
from rlfuse.rewards.api.items import Item
from rlfuse.rewards.api.results import failure
from rlfuse.rewards.models.visual_inputs import VisualInputs, split_by_visual_tokens
from rlfuse.samples import FramePlan, RewardFailure, Visual

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from rlfuse.video.prompt import VideoPrompt

KEY = "reward.model_path"
ALTERNATIVE = (
    "score such rows by a judge or by functions, and name in this entry's sources data_sources that show nothing"
)
WEIGHT, BIAS = "score.weight", "score.bias"


@dataclass(frozen=True, slots=True)
class ScoringInput:
    """A sequence to score; equal ones have the same logits."""

    tokens: tuple[int, ...]
    shown: tuple[tuple[str, FramePlan | None], ...] = ()
    visual: tuple[Visual, ...] = field(default=(), compare=False)
    made: VideoPrompt | None = field(default=None, compare=False)


def load_visual_inputs(path: str, trust_remote_code: bool) -> VisualInputs:
    """Return how the reward model sees; for a text model, why not."""
    return VisualInputs(path, trust_remote_code, key=KEY, otherwise=ALTERNATIVE)


class Pooling:
    """Runs the model on a vLLM engine of this process. `settings`: `classifier.Settings`."""

    def __init__(self, settings: Any):
        if not head_labels(settings.path, settings.trust_remote_code):
            raise RewardError(
                f"{KEY}: {settings.path} is no sequence classifier by the architectures of its "
                "config.json; give a trained one, not a language model"
            )
        same = {name: getattr(settings, name) for name in ("dtype", "trust_remote_code", "engine_kwargs")}
        self._visual_inputs = load_visual_inputs(settings.path, settings.trust_remote_code)
        with self._visual_inputs.served(read_head) as model:
            self._engine = engine(EngineSettings(model, **same, pooling=True))
        self._visual_inputs.start(self._engine)
        self.context = self._engine.context
        self._pad_id = self._engine.model_config.get_text_config().pad_token_id

    def asked(self, item: Item, tokenizer: PreTrainedTokenizerBase) -> ScoringInput:
        """Return the sequence to score. RewardError or VideoError if markers do not match what the item shows."""
        from rlfuse.data.messages import conversation, map_texts
        from rlfuse.data.tokenizers import conversation_text, without_padding

        escape_markers, response = self._visual_inputs.escape_markers, self._visual_inputs.escape_markers(item.response)
        messages = conversation(item.messages, response)
        if not item.visual:
            unmarked = map_texts(escape_markers, messages)
            if item.lacks_visual and unmarked != messages:
                raise RewardError(
                    "the prompt has the marker of a clip or image, and none came along, as none does from saved samples"
                )
            messages = unmarked
        text, special = conversation_text(tokenizer, messages, item.columns.get("tools"))
        made = self._visual_inputs.assemble(text, item.visual, special)
        # transformers scores the last token that is no padding, vLLM the last.
        ids = without_padding(made.token_ids.tolist(), self._pad_id, tokenizer.pad_token_id)
        made = replace(made, token_ids=made.token_ids[: len(ids)])
        shown = tuple((each.path, each.plan) for each in item.visual)
        return ScoringInput(tuple(made.token_ids.tolist()), shown, item.visual, made)

    def logits(self, sequences: Sequence[ScoringInput]) -> list[list[float] | RewardFailure]:
        """Return each sequence's logits, or why it can't be shown."""
        found: list[list[float] | RewardFailure] = []
        for few in split_by_visual_tokens(sequences):
            prompts = [self._prompt(each) for each in few]
            logits = iter(self._engine.logits([each for each in prompts if not isinstance(each, RewardFailure)]))
            found += [each if isinstance(each, RewardFailure) else next(logits) for each in prompts]
        return found

    def _prompt(self, asked: ScoringInput) -> dict[str, Any] | RewardFailure:
        try:
            return self._visual_inputs.prompt(asked.made, asked.visual)
        except Exception as error:
            return failure("", error)


def is_video_model(folder: Path) -> bool:
    """Return whether the folder is a whole video model and has no transformers classifier."""
    config = json.loads((folder / "config.json").read_text())
    if config.get("vision_config") is None or AUTO_MAP_CLASS in (config.get("auto_map") or {}):
        return False
    from rlfuse.video.models.base import family_of_type  # imports transformers

    return family_of_type(config.get("model_type", "")) is not None


def check_head(folder: Path) -> dict[str, Path]:
    """Return the files of the head's tensors. RewardError unless they match the folder's config.json."""
    from rlfuse.video.checkpoints import locate_tensors, tensor_shape

    config = json.loads((folder / "config.json").read_text())
    labels = len(config.get("id2label") or "01")  # transformers writes none where there are two without names
    hidden = (config.get("text_config") or config).get("hidden_size")
    try:
        places = locate_tensors(folder)
    except FileNotFoundError as error:
        raise RewardError(f"{KEY}: {error}") from error
    if WEIGHT not in places:
        raise RewardError(
            f"{KEY}: {folder} holds no {WEIGHT}, so that scores would be a random head's. Give a trained reward model, "
            "whose head is in its *.safetensors, not a language model"
        )
    named = config.get("architectures") or []
    if not any("SequenceClassification" in name for name in (*named, *(config.get("auto_map") or ()))):
        raise RewardError(
            f"{KEY}: {folder} has a {WEIGHT}, but its config.json has architectures={named}; if that is a linear layer "
            "over the last token's features, name there the model's ...ForSequenceClassification"
        )
    shape = tensor_shape(places[WEIGHT], WEIGHT)
    if shape[0] != labels or hidden not in (None, *shape[1:]):
        raise RewardError(
            f"{KEY}: {folder} has a {WEIGHT} of shape {shape}, and a config.json that speaks of {labels} labels "
            f"(id2label) and {hidden} hidden features; give head and config.json of one model"
        )
    return {name: places[name] for name in (WEIGHT, BIAS) if name in places}


def read_head(folder: str) -> torch.nn.Linear:
    """Read the head of the reward model in this folder. RewardError as `check_head`."""
    import torch

    from rlfuse.video.checkpoints import read_tensor

    tensors = {name: read_tensor(file, name) for name, file in check_head(Path(folder)).items()}
    labels, hidden = tensors[WEIGHT].shape
    head = torch.nn.Linear(hidden, labels, bias=BIAS in tensors, device="meta")
    head.load_state_dict({name.removeprefix("score."): each for name, each in tensors.items()}, assign=True)
    return head
