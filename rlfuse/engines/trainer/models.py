"""Hugging Face models as the trainer uses them: loading, and a forward pass that computes only response positions.

Sequences are packed into one row (positions restart at every sequence, and the batch's layout separates them) or, for
models that cannot, padded; both give the same results (`packs_exactly` checks it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
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
    """Return the logits that predict this rank's response tokens, [r, V]; the LM head computes no other position."""
    with visual_embeddings(model, batch):
        logits = model(**batch.inputs, use_cache=False, logits_to_keep=batch.keep).logits
    return batch.predictions(logits)


def response_values(model: Callable, batch: Batch) -> torch.Tensor:
    """Return the value of the state before each response token, float32 [R]."""
    with visual_embeddings(model, batch):
        values = model(**batch.inputs, use_cache=False).logits[..., 0]
    return batch.gather_slices(batch.predictions(values[:, batch.keep]).float())


def head_inputs(model: Callable, batch: Batch) -> torch.Tensor:
    """Return the inputs of a value model's head, [r, hidden]: a new head outputs only zeros.

    For custom model classes, whose head may have any name, return its output, [r, 1].
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
    """Return a reward model's score before each response token, float32 [R], for the label index in the row's
    `label`."""
    logits = model(**batch.inputs, use_cache=False).logits
    scores = batch.predictions(logits[:, batch.keep]).float()
    labels = batch.responses(batch.tensors["label"]).long()
    return scores.gather(1, labels[:, None])[:, 0]


@contextmanager
def visual_embeddings(model: Callable, batch: Batch) -> Iterator[None]:
    """Replace token embeddings with the batch's visual embeddings within the block, and pass on deepstack features.

    The output of the embedding layer is replaced instead of passing `inputs_embeds`, so that the layer runs inside the
    engine's forward, where ZeRO 3 gathers its weights, and text tokens train it. The model's own code adds deepstack
    features, outside the layers that are recomputed.
    """
    if not batch.visual:
        yield
        return
    module = getattr(model, "module", model)
    hidden, width = module.config.get_text_config().hidden_size, embedding_width(module.config)
    for at, embeddings in batch.visual:
        if embeddings.shape != (len(at), width):
            raise ValueError(
                f"Visual embeddings of shape {list(embeddings.shape)} do not fit {len(at)} positions of width "
                f"{width}. Encode them with the tower and projector of this model."
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
    """Load the causal language model at `path`, ready to train; without the tower of a Qwen2.5-VL or Qwen3-VL."""
    return _load(AutoModelForCausalLM, path, settings)


def load_critic(path: str, settings: ModelConfig) -> PreTrainedModel:
    """Load a value model: the weights at `path` with a linear head `score`, 0 unless `path` has one.

    A custom class in the model folder defines its own head and initialization.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=settings.trust_remote_code)
    kind = value_class(config, settings.trust_remote_code)
    names = HEAD_KEY_MAPPING if issubclass(kind, ValueHead) else None
    model = _load(kind, path, settings, names, num_labels=1)
    # Save the head as `score`; transformers would restore its original name.
    model._weight_conversions = [each for each in model._weight_conversions if each.target_patterns != ["score."]]
    return model


def load_reward_model(path: str, settings: ModelConfig, labels: Sequence[str]) -> PreTrainedModel:
    """Load a sequence classifier with these labels whose forward returns the head's output at every token, [B, tokens,
    K].

    The classifier's own forward returns scores per row of the inputs, but packed inputs have many sequences in a row.
    It is saved as an ordinary classifier. The head is random unless `path` has one. EngineError unless the class has
    exactly one head.
    """
    fields = {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    model = _load(AutoModelForSequenceClassification, path, settings, **fields)
    body, name = model.base_model, type(model).__name__
    heads = [child for child in model.children() if child is not body and not isinstance(child, torch.nn.Dropout)]
    if len(heads) != 1 or body is model:
        names = ", ".join(type(each).__name__ for each in heads)
        raise EngineError(
            f"model.path={path}: a {name} has {len(heads)} modules ({names or 'none'}) besides its base model, but a "
            "reward model must have exactly one, its head. Combine them into one module."
        )

    def forward(**inputs: Any) -> SequenceClassifierOutput:
        return SequenceClassifierOutput(logits=heads[0](body(**inputs).last_hidden_state))

    model.forward = forward
    return model


@torch.no_grad()
def check_forward(model: PreTrainedModel, path: str) -> None:
    """Raise EngineError if the forward of a custom class scores differently from that of `load_reward_model`.

    Otherwise the served scores would differ from the trained ones. Under ZeRO-3 every rank calls.
    """
    padding = model.config.get_text_config().pad_token_id
    ids = [i for i in range(4, 12) if i != padding]
    inputs = {"input_ids": torch.tensor([ids], device=model.device), "use_cache": False}
    trained, own = model.forward(**inputs).logits[:, -1], type(model).forward(model, **inputs).logits
    tolerance = 1e-4 if model.dtype == torch.float32 else 0.05
    if own.shape != trained.shape or not torch.allclose(own, trained, rtol=tolerance, atol=tolerance):
        raise EngineError(
            f"model.path={path}: the forward of {type(model).__name__} returns {_short(own)}, but its head on the last "
            f"token's hidden state returns {_short(trained)}. Compute scores in the head only, which is what trains."
        )


def _short(scores: torch.Tensor) -> str:
    return f"{[round(value, 4) for value in scores.flatten().tolist()]} of shape {list(scores.shape)}"


def _load(
    kind: type, path: str, settings: ModelConfig, names: dict[str, str] | None = None, **fields: Any
) -> PreTrainedModel:
    """Load a model of class `kind`. `names`: `key_mapping` of tensors; `fields`: overrides of the configuration."""
    if Path(path).is_absolute() and not Path(path).is_dir():
        raise FileNotFoundError(f"model.path={path}: the model folder does not exist")
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
    """Set up attention by layouts if the model supports it, no dropout, and gradient checkpointing if configured.

    Visual placeholders get probability 0, as in the engine.
    """
    attend_by_layout(model)
    zero_dropout(model)
    if settings.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    exclude(model)
    model.config.architectures = [type(model).__name__]  # otherwise a critic's checkpoint would name a policy class
    return model


def check_training_passes(engine: Any, packed: bool, device: str, role: str) -> None:
    """Raise EngineError if a model is random in training mode (`check_repeatable`); every rank calls."""
    module = engine.module
    batch = collate(_check_rows(module.config.get_text_config().vocab_size), packed, device)
    check_repeatable(module, lambda: engine(**batch.inputs, use_cache=False), role)


def packs_exactly(
    model: Callable, vocab_size: int, dtype: torch.dtype, device: str, read: Callable = response_logits
) -> bool:
    """Return whether packed and padded sequences give the same logits; False for models that ignore position restarts.

    `read`: function that returns the compared outputs, e.g. `head_inputs` for a value model.
    """
    rows = _check_rows(vocab_size)
    return _same_outputs(model, [collate(rows, way, device) for way in (True, False)], dtype, read)


def splits_exactly(
    model: Callable, vocab_size: int, dtype: torch.dtype, packed: bool, device: str, part: SequenceSlice
) -> bool:
    """Return whether slices on the ranks of `part`, which all call, give the same logits as the whole.

    False for models that mix tokens outside the attention that layouts define.
    """
    rows = _check_rows(vocab_size)
    return _same_outputs(model, [collate(rows, packed, device, each) for each in (part, None)], dtype)


def _check_rows(vocab_size: int) -> list[Row]:
    ids = np.arange(4, 16, dtype=np.int32) % vocab_size
    return [Row(ids[:3], ids[3:7]), Row(ids[:5], ids[5:12])]


@torch.no_grad()
def _same_outputs(model: Callable, batches: list[Batch], dtype: torch.dtype, read: Callable = response_logits) -> bool:
    """Return whether two batches of the same rows give the same logits: compares eight per row and their logsumexp."""
    found = []
    for batch in batches:
        logits = read(model, batch).float()
        some = logits[:, :8].nan_to_num(neginf=0.0).unbind(-1)
        found.append(torch.stack([batch.gather_slices(x) for x in (*some, logits.logsumexp(-1))]))
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    return bool((found[0] - found[1]).abs().max() <= tolerance * (1 + found[1].abs().max()))
