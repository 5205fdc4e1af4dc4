"""Hugging Face models as the trainer uses them: loading, and a forward pass that computes only response positions.

Role: called by trainer ranks; knows torch and transformers, not DeepSpeed or Ray. Sequences are packed into one row
(positions restart at every sequence, which transformers turns into a block-diagonal mask or flash attention's
variable-length call) or, where a model can't do that, padded; both give the same numbers (`packs_exactly` checks it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from rlfuse.config.schema import ModelConfig
from rlfuse.samples import Row
from rlfuse.video.placeholders import exclude


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch on its device. R = response tokens of all rows, B = rows, T = the longest response."""

    inputs: dict[str, torch.Tensor]
    """`input_ids`, `position_ids` (and `attention_mask` when padded)."""
    predict: torch.Tensor
    """int64 [R]: positions of the flattened model output that predict each response token, row by row."""
    targets: torch.Tensor
    """int64 [R]: the response tokens."""
    mask: torch.Tensor
    """bool [B, T]: True on response tokens; in row-major order its True entries are those of `targets`."""
    tensors: dict[str, torch.Tensor]
    """float32 [B, T] per-token arrays of the rows, 0 where masked."""
    keep: int | torch.Tensor
    """What `logits_to_keep` asks of the model; `predict` indexes what is kept."""

    def matrix(self, flat: torch.Tensor) -> torch.Tensor:
        """[R] -> [B, T], differentiable, 0 where masked."""
        return torch.zeros(self.mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(self.mask, flat)

    def split(self, flat: torch.Tensor) -> list[np.ndarray]:
        """[R] -> one float32 array per row."""
        return [part.numpy() for part in flat.detach().float().cpu().split(self.mask.sum(1).tolist())]


def collate(rows: Sequence[Row], packed: bool, device: torch.device | str = "cpu") -> Batch:
    """Rows as model inputs: packed into one sequence, or prompts padded left and responses padded right."""
    lengths = torch.tensor([len(row.response_ids) for row in rows])
    mask = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
    tensors = {
        name: torch.zeros(mask.shape).masked_scatter(
            mask, torch.from_numpy(np.concatenate([row.tensors[name] for row in rows]).astype(np.float32))
        )
        for name in rows[0].tensors
    }
    inputs, predict, keep = (_packed if packed else _padded)(rows, mask)
    return Batch(
        {name: tensor.to(device) for name, tensor in inputs.items()},
        predict.to(device),
        torch.from_numpy(np.concatenate([row.response_ids for row in rows]).astype(np.int64)).to(device),
        mask.to(device),
        {name: tensor.to(device) for name, tensor in tensors.items()},
        keep if isinstance(keep, int) else keep.to(device),
    )


def _packed(rows: Sequence[Row], mask: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    ids = np.concatenate([part for row in rows for part in (row.prompt_ids, row.response_ids)]).astype(np.int64)
    positions = np.concatenate([np.arange(row.tokens) for row in rows])
    starts = np.cumsum([0] + [row.tokens for row in rows[:-1]])
    keep = np.concatenate(
        [
            start + len(row.prompt_ids) - 1 + np.arange(len(row.response_ids))
            for start, row in zip(starts, rows, strict=True)
        ]
    )
    inputs = {"input_ids": torch.from_numpy(ids)[None], "position_ids": torch.from_numpy(positions)[None]}
    return inputs, torch.arange(len(keep)), torch.from_numpy(keep)


def _padded(rows: Sequence[Row], mask: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor, int]:
    left, right = max(len(row.prompt_ids) for row in rows), mask.shape[1]
    ids = torch.zeros(len(rows), left + right, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    for b, row in enumerate(rows):
        span = slice(left - len(row.prompt_ids), left + len(row.response_ids))
        ids[b, span] = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64))
        attention[b, span] = 1
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    # The model keeps its last `right + 1` positions: column c predicts response token c, the last predicts nothing.
    columns = torch.arange(right)[None, :] + torch.arange(len(rows))[:, None] * (right + 1)
    inputs = {"input_ids": ids, "attention_mask": attention, "position_ids": positions}
    return inputs, columns[mask], right + 1


def response_logits(model: Callable, batch: Batch) -> torch.Tensor:
    """[R, V] logits that predict each response token; no other position reaches the language-model head."""
    logits = model(**batch.inputs, use_cache=False, logits_to_keep=batch.keep).logits
    return logits.flatten(0, 1)[batch.predict]


def response_values(model: Callable, batch: Batch) -> torch.Tensor:
    """float32 [R]: the value of the state before each response token."""
    values = model(**batch.inputs, use_cache=False).logits[..., 0]
    kept = values[:, -batch.keep :] if isinstance(batch.keep, int) else values[:, batch.keep]
    return kept.flatten()[batch.predict].float()


def load_policy(path: str, settings: ModelConfig, device: str) -> PreTrainedModel:
    """The causal language model at `path`, ready to train."""
    return _load(AutoModelForCausalLM, path, settings, device)


def load_critic(path: str, settings: ModelConfig, device: str) -> PreTrainedModel:
    """A value model: the weights at `path` under one scalar head, which is random unless `path` has one."""
    return _load(AutoModelForTokenClassification, path, settings, device, num_labels=1)


def has_value_head(path: str) -> bool:
    """Whether the weights at `path` are a value model's own."""
    return any("TokenClassification" in name for name in AutoConfig.from_pretrained(path).architectures or [])


def _load(kind: type, path: str, settings: ModelConfig, device: str, **overrides) -> PreTrainedModel:
    if Path(path).is_absolute() and not Path(path).is_dir():
        raise FileNotFoundError(f"model.path: there is no model folder at {path}")
    model = kind.from_pretrained(
        path,
        dtype=getattr(torch, settings.dtype),
        attn_implementation=attention(device),
        trust_remote_code=settings.trust_remote_code,
        **overrides,
    )
    return trainer_ready(model, settings)


def trainer_ready(model: PreTrainedModel, settings: ModelConfig) -> PreTrainedModel:
    """Dropout off (PPO's ratio must be 1 before an update), activations recomputed if configured, its class noted.

    Visual placeholders get no probability, as in the engine.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if settings.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    exclude(model)
    model.config.architectures = [type(model).__name__]  # else a critic's checkpoint says it is a policy's
    return model


def attention(device: str) -> str:
    """flash attention where it is installed on GPUs: packed rows then cost no masked work; else torch's own."""
    return "flash_attention_2" if device != "cpu" and is_flash_attn_2_available() else "sdpa"


@torch.no_grad()
def packs_exactly(model: Callable, vocab_size: int, dtype: torch.dtype, device: str) -> bool:
    """Whether packed sequences get the logits they get when padded: false for models that ignore position restarts."""
    ids = np.arange(4, 16, dtype=np.int32) % vocab_size
    rows = [Row(ids[:3], ids[3:7]), Row(ids[:5], ids[5:12])]
    packed, padded = (
        response_logits(model, collate(rows, way, device)).float().nan_to_num(neginf=0.0) for way in (True, False)
    )
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    return bool((packed - padded).abs().max() <= tolerance * (1 + padded.abs().max()))
