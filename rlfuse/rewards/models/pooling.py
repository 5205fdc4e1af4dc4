"""Run a reward model in vLLM's pooling mode: a text model, or a video model with a head `score.weight`.

The head has shape [labels, hidden] and is never randomly initialised. Scores are raw logits, without activation.
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
    "score these rows by a judge or by functions and limit `sources` of this entry to data without clips and images"
)
WEIGHT, BIAS = "score.weight", "score.bias"


@dataclass(frozen=True, slots=True)
class ScoringInput:
    """Sequence to score; equal sequences have equal logits."""

    tokens: tuple[int, ...]
    media: tuple[tuple[str, FramePlan | None], ...] = ()
    visual: tuple[Visual, ...] = field(default=(), compare=False)
    prompt: VideoPrompt | None = field(default=None, compare=False)


def load_visual_inputs(path: str, trust_remote_code: bool) -> VisualInputs:
    """Return the visual inputs of a reward model, which for a text model only report why it has none."""
    return VisualInputs(path, trust_remote_code, key=KEY, otherwise=ALTERNATIVE)


class Pooling:
    """Runner of the model on a vLLM engine in this process. `settings`: `classifier.Settings`."""

    def __init__(self, settings: Any):
        if not head_labels(settings.path, settings.trust_remote_code):
            raise RewardError(
                f"{KEY}: {settings.path} is not a sequence classifier according to the architectures in its "
                "config.json; use a trained classifier, not a language model"
            )
        same = {name: getattr(settings, name) for name in ("dtype", "trust_remote_code", "engine_kwargs")}
        self._visual_inputs = load_visual_inputs(settings.path, settings.trust_remote_code)
        with self._visual_inputs.model_folder(read_head) as model:
            self._engine = engine(EngineSettings(model, **same, pooling=True))
        self._visual_inputs.start(self._engine)
        self.context = self._engine.context
        self._pad_id = self._engine.model_config.get_text_config().pad_token_id

    def encode(self, item: Item, tokenizer: PreTrainedTokenizerBase) -> ScoringInput:
        """Return the sequence to score. Raises RewardError or VideoError if markers do not match clips and images."""
        from rlfuse.data.messages import conversation, map_texts
        from rlfuse.data.tokenizers import conversation_text, without_padding

        escape_markers, response = self._visual_inputs.escape_markers, self._visual_inputs.escape_markers(item.response)
        messages = conversation(item.messages, response)
        if not item.visual:
            unmarked = map_texts(escape_markers, messages)
            if item.lacks_visual and unmarked != messages:
                raise RewardError(
                    "the prompt has a marker of a clip or image that is not available, as in saved samples"
                )
            messages = unmarked
        text, special = conversation_text(tokenizer, messages, item.columns.get("tools"))
        made = self._visual_inputs.assemble(text, item.visual, special)
        # transformers scores the last token before padding, vLLM the last token.
        ids = without_padding(made.token_ids.tolist(), self._pad_id, tokenizer.pad_token_id)
        made = replace(made, token_ids=made.token_ids[: len(ids)])
        shown = tuple((each.path, each.plan) for each in item.visual)
        return ScoringInput(tuple(made.token_ids.tolist()), shown, item.visual, made)

    def logits(self, sequences: Sequence[ScoringInput]) -> list[list[float] | RewardFailure]:
        """Return the logits of each sequence, or the failure to build its prompt."""
        found: list[list[float] | RewardFailure] = []
        for few in split_by_visual_tokens(sequences):
            prompts = [self._prompt(each) for each in few]
            logits = iter(self._engine.logits([each for each in prompts if not isinstance(each, RewardFailure)]))
            found += [each if isinstance(each, RewardFailure) else next(logits) for each in prompts]
        return found

    def _prompt(self, sequence: ScoringInput) -> dict[str, Any] | RewardFailure:
        try:
            return self._visual_inputs.prompt(sequence.prompt, sequence.visual)
        except Exception as error:
            return failure("", error)


def is_video_model(folder: Path) -> bool:
    """Return whether the folder is a complete video model, for which transformers has no classifier."""
    config = json.loads((folder / "config.json").read_text())
    if config.get("vision_config") is None or AUTO_MAP_CLASS in (config.get("auto_map") or {}):
        return False
    from rlfuse.video.models.base import family_of_type  # imports transformers

    return family_of_type(config.get("model_type", "")) is not None


def check_head(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the head. Raises RewardError unless they match config.json."""
    from rlfuse.tensor_files import map_tensors, safetensors_files  # imports torch

    config = json.loads((folder / "config.json").read_text())
    labels = len(config.get("id2label") or "01")  # transformers omits it for two unnamed labels
    hidden = (config.get("text_config") or config).get("hidden_size")
    try:
        tensors = {name: each for file in safetensors_files(folder) for name, each in map_tensors(file)}
    except FileNotFoundError as error:
        raise RewardError(f"{KEY}: {error}") from error
    if WEIGHT not in tensors:
        raise RewardError(
            f"{KEY}: {folder} has no {WEIGHT}, so its head would be random. Use a trained reward model with its head "
            "in *.safetensors, not a language model"
        )
    named = config.get("architectures") or []
    if not any("SequenceClassification" in name for name in (*named, *(config.get("auto_map") or ()))):
        raise RewardError(
            f"{KEY}: {folder} has a {WEIGHT}, but architectures={named} in config.json. If it is a linear layer over "
            "the features of the last token, set architectures to the model's ...ForSequenceClassification"
        )
    shape = list(tensors[WEIGHT].shape)
    if shape[0] != labels or hidden not in (None, *shape[1:]):
        raise RewardError(
            f"{KEY}: {folder} has a {WEIGHT} of shape {shape}, but config.json has {labels} labels (id2label) and "
            f"hidden size {hidden}; use head and config.json of the same model"
        )
    return {name: tensors[name].clone() for name in (WEIGHT, BIAS) if name in tensors}


def read_head(folder: str) -> torch.nn.Linear:
    """Read the head of the reward model in this folder. Raises RewardError like `check_head`."""
    import torch

    tensors = check_head(Path(folder))
    labels, hidden = tensors[WEIGHT].shape
    head = torch.nn.Linear(hidden, labels, bias=BIAS in tensors, device="meta")
    head.load_state_dict({name.removeprefix("score."): each for name, each in tensors.items()}, assign=True)
    return head
