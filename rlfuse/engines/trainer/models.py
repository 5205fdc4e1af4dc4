"""Hugging Face models as the trainer uses them: loading, and a forward pass that computes only response positions.

Role: called by trainer ranks; knows torch and transformers, not DeepSpeed or Ray. Sequences are packed into one row
(positions restart at every sequence, and the batch's layout keeps them apart) or, where a model can't do that, padded;
both give the same numbers (`packs_exactly` checks it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from rlfuse.config.schema import ModelConfig
from rlfuse.engines.trainer.attention import attend_by_layout
from rlfuse.engines.trainer.dropout import check_repeatable, zero_dropout, zero_fields
from rlfuse.engines.trainer.families import HEAD_KEY_MAPPING, ValueHead, value_class
from rlfuse.engines.trainer.model_inputs import Batch, collate
from rlfuse.errors import EngineError
from rlfuse.samples import Row
from rlfuse.video.models.base import embedding_width, register_language_models
from rlfuse.video.placeholders import exclude

if TYPE_CHECKING:
    from rlfuse.engines.trainer.sequence_parallel import SequenceSlice


def response_logits(model: Callable, batch: Batch) -> torch.Tensor:
    """[r, V] logits that predict this rank's response tokens; no other position reaches the language-model head."""
    with visual_embeddings(model, batch):
        logits = model(**batch.inputs, use_cache=False, logits_to_keep=batch.keep).logits
    return batch.predictions(logits)


def response_values(model: Callable, batch: Batch) -> torch.Tensor:
    """float32 [R]: the value of the state before each response token."""
    with visual_embeddings(model, batch):
        values = model(**batch.inputs, use_cache=False).logits[..., 0]
    return batch.gather_slices(batch.predictions(values[:, batch.keep]).float())


def head_inputs(model: Callable, batch: Batch) -> torch.Tensor:
    """[r, hidden] that a value model's head is given, which itself gives nothing while it is fresh.

    What it gives, [r, 1], of a class that ships with its weights: its head may have any name.
    """
    module, found = getattr(model, "module", model), []
    if not isinstance(module, ValueHead):
        return response_values(model, batch)[:, None]
    handle = module.score.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    try:
        model(**batch.inputs, use_cache=False)
    finally:
        handle.remove()
    return batch.predictions(found[0][:, batch.keep])


def response_scores(model: Callable, batch: Batch) -> torch.Tensor:
    """float32 [R]: a reward model's score before each response token, of the label that the row's `label` numbers."""
    logits = model(**batch.inputs, use_cache=False).logits
    scores = batch.predictions(logits[:, batch.keep]).float()
    labels = batch.responses(batch.tensors["label"]).long()
    return scores.gather(1, labels[:, None])[:, 0]


@contextmanager
def visual_embeddings(model: Callable, batch: Batch) -> Iterator[None]:
    """The batch's visual embeddings take the place of the tokens' own while the model runs, and feed its first layers.

    At the output of the embedding, and not as `inputs_embeds`: so the embedding runs inside the engine's forward, where
    ZeRO 3 gathers its weights, and the text's tokens train it. Layers are fed by the model's own code, beyond what is
    run again when activations are recomputed.
    """
    if not batch.visual:
        yield
        return
    module = getattr(model, "module", model)
    hidden, width = module.config.get_text_config().hidden_size, embedding_width(module.config)
    for at, embeddings in batch.visual:
        if embeddings.shape != (len(at), width):
            raise ValueError(
                f"visual embeddings of shape {list(embeddings.shape)} for {len(at)} positions of a model that takes "
                f"{width} numbers each: encode them with the tower and projector of this model."
            )

    def replace(_: torch.nn.Module, __: tuple, output: torch.Tensor) -> torch.Tensor:
        flat = output.flatten(0, 1)
        for at, embeddings in batch.visual:
            flat = flat.index_copy(0, at, embeddings[:, :hidden].to(flat.dtype))
        return flat.view_as(output)

    def feed(_: torch.nn.Module, positional: tuple, named: dict) -> tuple[tuple, dict]:
        places, features = (torch.cat(parts) for parts in zip(*batch.visual, strict=True))  # in the batch's order
        shown = torch.zeros_like(batch.inputs["input_ids"], dtype=torch.bool)
        shown.view(-1)[places] = True
        levels = list(features[:, hidden:].split(hidden, dim=1))
        return positional, named | {"visual_pos_masks": shown, "deepstack_visual_embeds": levels}

    handles = [module.get_input_embeddings().register_forward_hook(replace)]
    if width > hidden:
        handles.append(module.get_decoder().register_forward_pre_hook(feed, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def load_policy(path: str, settings: ModelConfig) -> PreTrainedModel:
    """The causal language model at `path`, ready to train; of a Qwen2.5-VL or Qwen3-VL without its tower."""
    return _load(AutoModelForCausalLM, path, settings)


def load_critic(path: str, settings: ModelConfig) -> PreTrainedModel:
    """A value model: the weights at `path` under one row, `score`, which is 0 unless `path` has one.

    A class that ships with the weights names and begins its head as it likes.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=settings.trust_remote_code)
    kind = value_class(config, settings.trust_remote_code)
    names = HEAD_KEY_MAPPING if issubclass(kind, ValueHead) else None
    model = _load(kind, path, settings, names, num_labels=1)
    # Saved as `score`, whatever its name was: transformers would go back to that.
    model._weight_conversions = [each for each in model._weight_conversions if each.target_patterns != ["score."]]
    return model


def load_reward_model(path: str, settings: ModelConfig, labels: Sequence[str]) -> PreTrainedModel:
    """A sequence classifier with these labels, whose forward gives the head's output at every token, [B, tokens, K].

    Its own gives scores for each row of the inputs, but packed inputs are one row for many sequences. Saved, it is the
    ordinary classifier. The head is random unless `path` has one. EngineError for a class without a head, or with more.
    """
    fields = {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    model = _load(AutoModelForSequenceClassification, path, settings, **fields)
    body, name = model.base_model, type(model).__name__
    heads = [child for child in model.children() if child is not body and not isinstance(child, torch.nn.Dropout)]
    if len(heads) != 1 or body is model:
        names = ", ".join(type(each).__name__ for each in heads)
        raise EngineError(
            f"model.path={path}: beside its body a {name} has {len(heads)} modules ({names or 'none'}); a reward model "
            "has one, its head, which turns hidden states into scores. Put them into one module."
        )

    def forward(**inputs: Any) -> SequenceClassifierOutput:
        return SequenceClassifierOutput(logits=heads[0](body(**inputs).last_hidden_state))

    model.forward = forward
    return model


@torch.no_grad()
def check_forward(model: PreTrainedModel, path: str) -> None:
    """EngineError if a class that is not transformers' own scores otherwise than `load_reward_model` has it.

    What is trained would not be what serves. Under ZeRO-3 every rank calls.
    """
    padding = model.config.get_text_config().pad_token_id
    ids = [i for i in range(4, 12) if i != padding]
    inputs = {"input_ids": torch.tensor([ids], device=model.device), "use_cache": False}
    trained, own = model.forward(**inputs).logits[:, -1], type(model).forward(model, **inputs).logits
    tolerance = 1e-4 if model.dtype == torch.float32 else 0.05
    if own.shape != trained.shape or not torch.allclose(own, trained, rtol=tolerance, atol=tolerance):
        raise EngineError(
            f"model.path={path}: the forward of {type(model).__name__} gives {_short(own)} where its head on the last "
            f"token's hidden state gives {_short(trained)}; only the head is trained. Compute scores in the head alone."
        )


def _short(scores: torch.Tensor) -> str:
    return f"{[round(value, 4) for value in scores.flatten().tolist()]} of shape {list(scores.shape)}"


def _load(
    kind: type, path: str, settings: ModelConfig, names: dict[str, str] | None = None, **fields: Any
) -> PreTrainedModel:
    """`names`: of tensors, as `key_mapping`; `fields`: of the configuration."""
    if Path(path).is_absolute() and not Path(path).is_dir():
        raise FileNotFoundError(f"model.path: there is no model folder at {path}")
    config = AutoConfig.from_pretrained(path, trust_remote_code=settings.trust_remote_code, **fields)
    register_language_models(config)
    zero_fields(config)
    model = kind.from_pretrained(
        path,
        config=config,
        dtype=getattr(torch, settings.dtype),
        trust_remote_code=settings.trust_remote_code,
        use_safetensors=True,
        key_mapping=names,
    )
    return prepare_for_training(model, settings)


def prepare_for_training(model: PreTrainedModel, settings: ModelConfig) -> PreTrainedModel:
    """Attention by layouts (transformers' choice where a model takes none), no dropout, maybe recomputed activations.

    Visual placeholders get no probability, as in the engine.
    """
    attend_by_layout(model)
    zero_dropout(model)
    if settings.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    exclude(model)
    model.config.architectures = [type(model).__name__]  # else a critic's checkpoint says it is a policy's
    return model


def check_training_passes(engine: Any, packed: bool, device: str, role: str) -> None:
    """EngineError if a model draws random numbers in training mode (`check_repeatable`); every rank calls."""
    module = engine.module
    batch = collate(_check_rows(module.config.get_text_config().vocab_size), packed, device)
    check_repeatable(module, lambda: engine(**batch.inputs, use_cache=False), role)


def packs_exactly(
    model: Callable, vocab_size: int, dtype: torch.dtype, device: str, read: Callable = response_logits
) -> bool:
    """Whether packed sequences get the logits they get when padded: false for models that ignore position restarts.

    `read`: what is compared in place of logits, `head_inputs` of a value model.
    """
    rows = _check_rows(vocab_size)
    return _same_outputs(model, [collate(rows, way, device) for way in (True, False)], dtype, read)


def splits_exactly(
    model: Callable, vocab_size: int, dtype: torch.dtype, packed: bool, device: str, part: SequenceSlice
) -> bool:
    """Whether the ranks of `part`, which all call, get from slices what the whole gives.

    False for models that mix tokens otherwise than in the attention that layouts reach.
    """
    rows = _check_rows(vocab_size)
    return _same_outputs(model, [collate(rows, packed, device, each) for each in (part, None)], dtype)


def _check_rows(vocab_size: int) -> list[Row]:
    ids = np.arange(4, 16, dtype=np.int32) % vocab_size
    return [Row(ids[:3], ids[3:7]), Row(ids[:5], ids[5:12])]


@torch.no_grad()
def _same_outputs(model: Callable, batches: list[Batch], dtype: torch.dtype, read: Callable = response_logits) -> bool:
    """Whether two batches of the same rows get the same logits: eight of each row, and what all of them sum up to."""
    found = []
    for batch in batches:
        logits = read(model, batch).float()
        some = logits[:, :8].nan_to_num(neginf=0.0).unbind(-1)
        found.append(torch.stack([batch.gather_slices(x) for x in (*some, logits.logsumexp(-1))]))
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    return bool((found[0] - found[1]).abs().max() <= tolerance * (1 + found[1].abs().max()))
