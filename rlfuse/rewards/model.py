"""A sequence-classification reward model in a process of its own.

Role: `RewardModelWorker` is the class of a Ray actor that the reward pool owns; it is one more part of the reward,
named `reward_model`. torch and transformers are imported in that process only.
Invariants:
- a score is a raw logit of a head that came with the weights (never of a fresh, random one); of a head with several
  labels each that is asked for is a score of its own, and all come from one pass;
- the text is never truncated: a sample that doesn't fit the model's context is a `RewardFailure`;
- a sample's score does not depend on what it is batched with (right padding, masked; without a padding token in the
  model's configuration sequences go one at a time, because the model can't tell where they end).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlfuse.config.rewards import MODEL_PART
from rlfuse.rewards.items import Item, Outcome, RewardError, Score
from rlfuse.rewards.labels import check_trust, columns, read_config, saved
from rlfuse.rewards.results import failure, headline, user_traceback
from rlfuse.samples import RewardFailure

DTYPES = ("float32", "bfloat16", "float16")
KEPT = 4096
"""Sequences whose scores are kept; a call of the pool has far fewer, and labels are asked for in turns."""

Tokens = tuple[int, ...]
"""Tokens of prompt and response."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which reward model, and how it runs."""

    path: str
    asked: tuple[str, ...] = (MODEL_PART,)
    """Names of the entries that it answers: `reward_model`, or `reward_model/LABEL` for each label that counts."""
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
        labels, own = saved(folder)
        check_trust(spec.path, "reward.model_path", own, spec.trust_remote_code)
        if labels:
            columns(spec.path, labels, spec.asked)
    elif _looks_local(spec.path):
        raise RewardError(
            f"reward.model_path: there is no folder {folder}; correct it, or give a hub name (owner/model)"
        )


class RewardModelWorker:
    """Scores items with one model on one device."""

    def __init__(self, spec: ModelSpec):
        self._spec = spec
        self._kept: dict[Tokens, list[float]] = {}
        """All labels' scores of the latest sequences: whoever asks for one label asks for the others soon."""

    def start(self) -> str | None:
        """Load; the reason in words if that failed."""
        try:
            self._load()
        except RewardError as error:
            return str(error)
        except Exception as error:
            return f"reward.model_path: {self._spec.path} can't be loaded: {headline(error)}\n{user_traceback(error)}"
        return None

    def score(self, name: str, items: Sequence[Item]) -> list[Outcome]:
        """What the entry of that name, one of those asked for, says of each item, in order."""
        outcomes: list[Outcome | None] = [None] * len(items)
        sequences: dict[int, Tokens] = {}
        for position, item in enumerate(items):
            try:
                tokens = tuple(self._tokens(item))
            except Exception as error:
                outcomes[position] = failure(name, error)
                continue
            if 0 < len(tokens) <= self._context:
                sequences[position] = tokens
            else:
                outcomes[position] = self._misfit(name, len(tokens))
        logits = self._logits(list(sequences.values()))
        for position, tokens in sequences.items():
            outcomes[position] = _outcome(name, logits[tokens], self._columns[name])
        return outcomes

    def _load(self) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        spec = self._spec
        path = str(Path(spec.path).expanduser()) if Path(spec.path).expanduser().is_dir() else spec.path
        shared = {"trust_remote_code": spec.trust_remote_code}
        try:
            config = read_config(path, "reward.model_path", spec.trust_remote_code)
        except OSError as error:
            raise RewardError(
                f"reward.model_path: {path} is no folder here and the hub gave none: {headline(error)}"
            ) from error
        self._columns = columns(path, list(config.id2label.values()), spec.asked)
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

    def _misfit(self, name: str, length: int) -> RewardFailure:
        return RewardFailure(
            name,
            f"prompt and response are {length} tokens of the reward model, which takes 1 to {self._context}: lower "
            "data.max_response_length or give a model with a longer context",
        )

    def _logits(self, sequences: Sequence[Tokens]) -> dict[Tokens, list[float] | Exception]:
        """Of each sequence all labels' logits, or why there are none; from those kept where they are."""
        found = {tokens: self._kept[tokens] for tokens in sequences if tokens in self._kept}
        for batch in self._batches({tokens for tokens in sequences if tokens not in found}):
            found |= zip(batch, self._forward(batch), strict=True)
        if len(self._columns) > 1:
            self._kept |= {tokens: each for tokens, each in found.items() if isinstance(each, list)}
            for oldest in list(self._kept)[:-KEPT]:
                del self._kept[oldest]
        return found

    def _batches(self, sequences: Iterable[Tokens]) -> Iterator[list[Tokens]]:
        """Of similar length, longest first, within the token budget."""
        batch: list[Tokens] = []
        for tokens in sorted(sequences, key=lambda tokens: (-len(tokens), tokens)):
            longest = len(batch[0]) if batch else 0
            if batch and (self._pad_id is None or longest * (len(batch) + 1) > self._spec.max_batch_tokens):
                yield batch
                batch = []
            batch.append(tokens)
        if batch:
            yield batch

    def _forward(self, sequences: list[Tokens]) -> list[list[float] | Exception]:
        import torch

        longest = max(map(len, sequences))
        padded = [[*tokens, *[self._pad_id] * (longest - len(tokens))] for tokens in sequences]
        mask = [[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in sequences]
        try:
            with torch.no_grad():
                logits = self._model(
                    input_ids=torch.tensor(padded, device=self._spec.device),
                    attention_mask=torch.tensor(mask, device=self._spec.device),
                ).logits
            return logits.float().tolist()
        except Exception as error:
            return [error] * len(sequences)


def _outcome(name: str, logits: list[float] | Exception, column: int) -> Outcome:
    if isinstance(logits, Exception):
        return failure(name, logits)
    if math.isfinite(logits[column]):
        return Score(logits[column])
    return RewardFailure(name, f"the model's logit is {logits[column]}; check its weights, or use dtype float32")


def _looks_local(path: Any) -> bool:
    return str(path).startswith(("/", ".", "~")) or str(path).count("/") > 1
