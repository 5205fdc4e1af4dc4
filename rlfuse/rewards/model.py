"""A sequence-classification reward model in a process of its own.

Role: `RewardModelWorker` is the class of a Ray actor that the reward pool owns; it is one more part of the reward,
named `reward_model`. torch and transformers are imported in that process only.
Invariants:
- the score is the raw logit of a head with one label that came with the weights (never a fresh, random one);
- the text is never truncated: a sample that doesn't fit the model's context is a `RewardFailure`;
- a sample's score does not depend on what it is batched with (right padding, masked; without a padding token in the
  model's configuration sequences go one at a time, because the model can't tell where they end).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlfuse.config.rewards import MODEL_PART
from rlfuse.rewards.items import Item, Outcome, RewardError, Score
from rlfuse.rewards.results import failure, headline, user_traceback
from rlfuse.samples import RewardFailure

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which reward model, and how it runs."""

    path: str
    device: str = "cpu"
    """cpu | cuda."""
    dtype: str = "float32"
    trust_remote_code: bool = False
    max_batch_tokens: int = 16384
    """Padded tokens of one forward pass; a longer sequence goes alone."""


def check_model(spec: ModelSpec) -> None:
    """What can be seen without loading: called in the driver before any process starts."""
    if spec.dtype not in DTYPES:
        raise RewardError(f"reward model: dtype is {spec.dtype!r}; it has to be one of {DTYPES}")
    folder = Path(spec.path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise RewardError(
                f"reward.model_path: {folder} has no config.json; give the folder that save_pretrained wrote"
            )
    elif _looks_local(spec.path):
        raise RewardError(
            f"reward.model_path: there is no folder {folder}; correct it, or give a hub name (owner/model)"
        )


class RewardModelWorker:
    """Scores items with one model on one device."""

    def __init__(self, spec: ModelSpec):
        self._spec = spec

    def start(self) -> str | None:
        """Load; the reason in words if that failed."""
        try:
            self._load()
        except RewardError as error:
            return str(error)
        except Exception as error:
            return f"reward.model_path: {self._spec.path} can't be loaded: {headline(error)}\n{user_traceback(error)}"
        return None

    def score(self, _name: str, items: Sequence[Item]) -> list[Outcome]:
        """One outcome for each item, in order."""
        outcomes: list[Outcome | None] = [None] * len(items)
        sequences = {}
        for position, item in enumerate(items):
            try:
                tokens = self._tokens(item)
            except Exception as error:
                outcomes[position] = failure(MODEL_PART, error)
                continue
            if 0 < len(tokens) <= self._context:
                sequences[position] = tokens
            else:
                outcomes[position] = self._misfit(len(tokens))
        for batch in self._batches(sequences):
            scores = self._forward([sequences[position] for position in batch])
            for position, outcome in zip(batch, scores, strict=True):
                outcomes[position] = outcome
        return outcomes

    def _load(self) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

        spec = self._spec
        path = str(Path(spec.path).expanduser()) if Path(spec.path).expanduser().is_dir() else spec.path
        shared = {"trust_remote_code": spec.trust_remote_code}
        try:
            config = AutoConfig.from_pretrained(path, **shared)
        except OSError as error:
            raise RewardError(
                f"reward.model_path: {path} is no folder here and the hub gave none: {headline(error)}"
            ) from error
        if config.num_labels != 1:
            raise RewardError(
                f"reward.model_path: {path} has num_labels={config.num_labels}; a reward model has a head with one "
                "label. Give a sequence-classification model that was trained as one."
            )
        self._tokenizer = AutoTokenizer.from_pretrained(path, **shared)
        model, info = AutoModelForSequenceClassification.from_pretrained(
            path,
            config=config,
            dtype=getattr(torch, spec.dtype),
            output_loading_info=True,
            use_safetensors=True,
            **shared,
        )
        if info["missing_keys"]:
            raise RewardError(
                f"reward.model_path: {path} holds no weights for {sorted(info['missing_keys'])}, which would be "
                "random. Give a trained sequence-classification model, not a language model."
            )
        self._model = model.eval().to(spec.device)
        text = config.get_text_config()
        self._pad_id = text.pad_token_id
        limits = (getattr(text, "max_position_embeddings", None), self._tokenizer.model_max_length)
        self._context = min(limit for limit in (*limits, math.inf) if limit)

    def _tokens(self, item: Item) -> list[int]:
        """By the reward model's own chat template; without one, the policy's prompt text and the response."""
        from rlfuse.data.tokenizers import conversation_ids  # imports transformers

        messages = [*item.messages, {"role": "assistant", "content": item.response}]
        return conversation_ids(self._tokenizer, messages, item.prompt_text + item.response)

    def _misfit(self, length: int) -> RewardFailure:
        return RewardFailure(
            MODEL_PART,
            f"prompt and response are {length} tokens of the reward model, which takes 1 to {self._context}: lower "
            "data.max_response_length or give a model with a longer context",
        )

    def _batches(self, sequences: dict[int, list[int]]) -> Iterator[list[int]]:
        """Positions of similar length, longest first, within the token budget."""
        batch: list[int] = []
        for position in sorted(sequences, key=lambda p: -len(sequences[p])):
            longest = len(sequences[batch[0]]) if batch else 0
            if batch and (self._pad_id is None or longest * (len(batch) + 1) > self._spec.max_batch_tokens):
                yield batch
                batch = []
            batch.append(position)
        if batch:
            yield batch

    def _forward(self, sequences: list[list[int]]) -> list[Outcome]:
        import torch

        longest = max(map(len, sequences))
        padded = [tokens + [self._pad_id] * (longest - len(tokens)) for tokens in sequences]
        mask = [[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in sequences]
        try:
            with torch.no_grad():
                logits = self._model(
                    input_ids=torch.tensor(padded, device=self._spec.device),
                    attention_mask=torch.tensor(mask, device=self._spec.device),
                ).logits
            values = logits.float().squeeze(-1).tolist()
        except Exception as error:
            return [failure(MODEL_PART, error)] * len(sequences)
        return [_outcome(value) for value in values]


def _outcome(value: float) -> Outcome:
    if math.isfinite(value):
        return Score(value)
    return RewardFailure(MODEL_PART, f"the model's logit is {value}; check its weights, or use dtype float32")


def _looks_local(path: Any) -> bool:
    return str(path).startswith(("/", ".", "~")) or str(path).count("/") > 1
