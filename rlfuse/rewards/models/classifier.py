"""Score with a sequence-classification reward model: `reward.model_path`.

A score is a raw logit of the head in the checkpoint. Text is never truncated: a sample that exceeds the context is a
`RewardFailure`. A score does not depend on the rest of the batch. Only `start` imports torch and vLLM.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from rlfuse.config.custom_errors import headline
from rlfuse.config.custom_functions import HEAD
from rlfuse.config.documentation import by_name
from rlfuse.config.reward_labels import check_trust, label_columns, read_config, saved_labels
from rlfuse.config.rewards import MODEL_PART
from rlfuse.errors import RewardError
from rlfuse.rewards.api.items import Item
from rlfuse.rewards.api.results import failure
from rlfuse.rewards.models.pooling import (
    ALTERNATIVE,
    KEY,
    Pooling,
    ScoringInput,
    check_head,
    is_video_model,
    load_visual_inputs,
)
from rlfuse.rewards.models.visual_inputs import VisualInputs
from rlfuse.samples import RewardFailure, Visual

MAX_BATCH_TOKENS = 16384
"""Padded tokens per forward pass; a longer sequence is a separate batch."""
MAX_CACHED_SEQUENCES = 4096
Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Settings:
    """Model and backend settings; equal settings share one model per process."""

    path: str
    backend: str
    dtype: str
    device: str
    trust_remote_code: bool
    engine_kwargs: str
    head: str | None = None
    """Custom head, as `path/file.py:name`."""
    head_kwargs: str = "{}"


class Classifier:
    """Reward function that returns the score of one label of a model."""

    def __init__(
        self,
        path: str,
        backend: str = "hf",
        dtype: str = "float32",
        device: str = "auto",
        trust_remote_code: bool = False,
        engine_kwargs: dict[str, Any] | None = None,
        label: str = "",
        head: str | None = None,
        head_kwargs: dict[str, Any] | None = None,
    ):
        """Check the arguments without loading the model. Raises RewardError.

        `device`: cpu | cuda | auto. `label`: label whose score is returned; empty for a model with one label. `head`:
        class of a custom head, as `path/file.py:name`.
        """
        for key, value in (("reward.model_dtype", dtype), ("reward.model_backend", backend)):
            if value not in (valid := by_name()[key].names):
                raise RewardError(f"{key} is {value!r}; it must be one of {valid}")
        if engine_kwargs and backend != "vllm":
            raise RewardError(f"reward.engine_kwargs={engine_kwargs} requires reward.model_backend=vllm")
        if head and backend != "hf":
            raise RewardError(f"{HEAD}={head} requires reward.model_backend=hf, got {backend}")
        self._name = f"{MODEL_PART}/{label}" if label else MODEL_PART
        path = resolve_model_path(path, KEY)
        if Path(path).is_dir():
            labels, custom_class = saved_labels(Path(path))
            check_trust(path, KEY, custom_class, trust_remote_code)
            if labels:
                label_columns(path, labels, [self._name])
            _check_tokens(path, trust_remote_code)
            if is_video_model(Path(path)):
                if backend != "vllm":
                    raise RewardError(
                        f"reward.model_backend={backend}: {path} is a video model, for which transformers has no "
                        "sequence classifier; set reward.model_backend=vllm"
                    )
                check_head(Path(path))
        more, arguments = (json.dumps(given or {}, sort_keys=True) for given in (engine_kwargs, head_kwargs))
        self._settings = Settings(path, backend, dtype, device, trust_remote_code, more, head, arguments)
        self._model: LoadedClassifier | None = None
        self._visual_inputs: VisualInputs | None = None

    def start(self) -> None:
        self._model = LOADED_CLASSIFIERS.get(self._settings)
        if self._model is None:
            LOADED_CLASSIFIERS[self._settings] = self._model = LoadedClassifier(self._settings, self._name)
        self._column = label_columns(self._settings.path, self._model.labels, [self._name])[self._name]

    def unsupported_reason(self, visual: Sequence[Visual]) -> str | None:
        """Return why the model can't score rows with these clips and images, or None. Loads no weights."""
        if self._settings.backend != "vllm":
            return (
                f"{KEY}={self._settings.path} can't process {visual[0].path}: reward.model_backend="
                f"{self._settings.backend} supports text only. Use a video model with a score head and "
                f"reward.model_backend=vllm, or {ALTERNATIVE}"
            )
        self._visual_inputs = self._visual_inputs or load_visual_inputs(
            self._settings.path, self._settings.trust_remote_code
        )
        return self._visual_inputs.unsupported_reason(visual)

    def score(self, samples: Sequence[Item]) -> list[float | RewardFailure]:
        refused = [self.unsupported_reason(item.visual) if item.visual else None for item in samples]
        scored = iter(self._model.logits([item for item, why in zip(samples, refused, strict=True) if not why]))
        return [RewardFailure("", why) if why else self._score(next(scored)) for why in refused]

    def _score(self, logits: list[float] | RewardFailure) -> float | RewardFailure:
        return logits if isinstance(logits, RewardFailure) else _finite(logits[self._column])


class LoadedClassifier:
    """Loaded model with its tokenizer. `first`: first label that is used."""

    def __init__(self, settings: Settings, first: str):
        from transformers import AutoTokenizer

        path, trusts = settings.path, settings.trust_remote_code
        try:
            config = read_config(path, KEY, trusts)
        except OSError as error:
            raise RewardError(
                f"reward.model_path: {path} is neither a local folder nor available on the hub: {headline(error)}"
            ) from error
        self.labels = list(config.id2label.values())
        label_columns(path, self.labels, [first])  # checked before the weights are loaded
        self._tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trusts)
        self._runner = Pooling(settings) if settings.backend == "vllm" else Transformers(settings, config)
        self._context = min(limit for limit in (self._runner.context, self._tokenizer.model_max_length) if limit)
        self._cache: dict[ScoringInput, list[float]] = {}

    def logits(self, samples: Sequence[Item]) -> list[list[float] | RewardFailure]:
        """Return the logits of all labels for each sample, in order."""
        sequences = [self._encode(item) for item in samples]
        found = self._run({each for each in sequences if isinstance(each, ScoringInput)})
        return [found[each] if isinstance(each, ScoringInput) else each for each in sequences]

    def _encode(self, item: Item) -> ScoringInput | RewardFailure:
        try:
            sequence = self._runner.encode(item, self._tokenizer)
        except Exception as error:
            return failure("", error)
        if 0 < len(sequence.tokens) <= self._context:
            return sequence
        return RewardFailure(
            "",
            f"prompt and response are {len(sequence.tokens)} tokens for the reward model, which accepts 1 to "
            f"{self._context}: lower data.max_response_length or use a model with a longer context",
        )

    def _run(self, sequences: set[ScoringInput]) -> dict[ScoringInput, list[float] | RewardFailure]:
        found = {sequence: self._cache[sequence] for sequence in sequences if sequence in self._cache}
        if new := sorted(sequences - found.keys(), key=lambda sequence: sequence.tokens):
            found |= zip(new, self._runner.logits(new), strict=True)
        if len(self.labels) > 1:
            self._cache |= {sequence: each for sequence, each in found.items() if isinstance(each, list)}
            for oldest in list(self._cache)[:-MAX_CACHED_SEQUENCES]:
                del self._cache[oldest]
        return found


LOADED_CLASSIFIERS: WeakValueDictionary[Settings, LoadedClassifier] = WeakValueDictionary()


class Transformers:
    """Runner of the model in transformers, in padded batches."""

    def __init__(self, settings: Settings, config: Any):
        import torch
        from transformers import AutoModel, AutoModelForSequenceClassification

        model, info = (AutoModel if settings.head else AutoModelForSequenceClassification).from_pretrained(
            settings.path,
            config=config,
            dtype=getattr(torch, settings.dtype),
            output_loading_info=True,
            use_safetensors=True,
            trust_remote_code=settings.trust_remote_code,
        )
        if info["missing_keys"]:
            raise RewardError(
                f"reward.model_path: {settings.path} has no weights for {sorted(info['missing_keys'])}, so they would "
                "be random. Use a trained sequence-classification model, not a language model."
            )
        if settings.head:
            from rlfuse.rewards.models.custom_head import CustomHead

            kwargs = json.loads(settings.head_kwargs)
            model = CustomHead(model, config, settings.head, kwargs, settings.path).to(model.dtype)
        self._device = settings.device
        if self._device == "auto":
            self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = model.eval().to(self._device)
        text = config.get_text_config()
        self._pad_id = text.pad_token_id
        self.context = getattr(text, "max_position_embeddings", None) or math.inf

    def encode(self, item: Item, tokenizer: Any) -> ScoringInput:
        """Return the tokens of the item, formatted with the chat template of the model if it has one."""
        from rlfuse.data.messages import conversation
        from rlfuse.data.tokenizers import conversation_ids  # imports transformers

        messages = conversation(item.messages, item.response)
        return ScoringInput(tuple(conversation_ids(tokenizer, messages, item.columns.get("tools"))))

    def logits(self, sequences: Sequence[ScoringInput]) -> list[list[float] | RewardFailure]:
        """Return the logits of each sequence, or the failure of its batch."""
        found: dict[Tokens, list[float] | RewardFailure] = {}
        for batch in self._batches([sequence.tokens for sequence in sequences]):
            try:
                logits = self._forward(batch)
            except Exception as error:
                logits = [failure("", error)] * len(batch)
            found |= zip(batch, logits, strict=True)
        return [found[sequence.tokens] for sequence in sequences]

    def _batches(self, sequences: Iterable[Tokens]) -> Iterator[list[Tokens]]:
        """Yield batches of similar length, longest first, within the token budget."""
        batch: list[Tokens] = []
        for tokens in sorted(sequences, key=lambda tokens: -len(tokens)):
            longest = len(batch[0]) if batch else 0
            if batch and (self._pad_id is None or longest * (len(batch) + 1) > MAX_BATCH_TOKENS):
                yield batch
                batch = []
            batch.append(tokens)
        if batch:
            yield batch

    def _forward(self, sequences: list[Tokens]) -> list[list[float]]:
        import torch

        longest = max(map(len, sequences))
        padded = [[*tokens, *[self._pad_id] * (longest - len(tokens))] for tokens in sequences]
        mask = [[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in sequences]
        with torch.no_grad():
            logits = self._model(
                input_ids=torch.tensor(padded, device=self._device),
                attention_mask=torch.tensor(mask, device=self._device),
            ).logits
        return logits.float().tolist()


def resolve_model_path(path: Any, key: str) -> str:
    """Return the folder of a model, or a hub name unchanged. Raises RewardError for a missing or wrong folder."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if str(path).startswith(("/", ".", "~")) or str(path).count("/") > 1:
            raise RewardError(
                f"{key}: folder {folder} does not exist; correct the path, or use a hub name (owner/model)"
            )
        return path
    if not (folder / "config.json").is_file():
        raise RewardError(f"{key}: {folder} has no config.json; use a folder that save_pretrained wrote")
    return str(folder)


def _check_tokens(path: str, trusts: bool) -> None:
    """Raise RewardError if the tokenizer has tokens for which the model has no embedding."""
    from transformers import AutoTokenizer

    from rlfuse.data.tokenizers import check_vocabulary_size

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trusts)
    except (OSError, ValueError):
        return  # reported where the model is loaded
    for problem in check_vocabulary_size(tokenizer, KEY, path, trusts):
        raise RewardError(problem)


def _finite(logit: float) -> float | RewardFailure:
    if math.isfinite(logit):
        return logit
    return RewardFailure(
        "", f"the logit of the reward model is {logit}; check the weights, or set reward.model_dtype=float32"
    )
