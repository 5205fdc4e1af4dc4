"""Measure the activation memory of a training pass by running the trainer's code on meta tensors.

Parameters and their gradients are not counted. Fused attention stores queries, keys, values, output and one number per
query and head. Only two layers of each kind and the last layer of the stack are run.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import PreTrainedModel

from rlfuse.algorithms import losses
from rlfuse.config.schema import Config
from rlfuse.engines.trainer import attention, fused_log_probs
from rlfuse.engines.trainer.attention import Segment, attends_by_layout
from rlfuse.engines.trainer.micro_batch_losses import OBJECTIVES, log_probs
from rlfuse.engines.trainer.model_inputs import Batch, collate
from rlfuse.engines.trainer.models import response_values
from rlfuse.engines.trainer.tensor_parallel import MemoryOnlyGroup, shard_layers
from rlfuse.errors import ConfigError
from rlfuse.samples import Row

_PASSES = {"reference": log_probs, "values": lambda config, model, batch: batch.matrix(response_values(model, batch))}
"""Passes without gradients."""
_RECOMPUTED = {"use_reentrant": False}
_TENSORS = ("old_log_probs", "advantages", "ref_log_probs", "values", "returns", "selected")
"""Tensors of a row that objectives use."""
HEAP = 32 << 20  # smaller blocks are allocated in the heap of a CPU rank (`rank_group.MALLOC_SETTINGS`)
_FOUND: dict[tuple[type, str, int], dict[tuple, Work]] = {}
"""Results by model, since a process may plan several jobs with the same model."""


def first_line(error: Exception) -> str:
    """Return the first line of the error message, or the class name if it is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@dataclass(frozen=True, slots=True)
class SequenceLengths:
    """The sequences of a micro-batch."""

    lengths: tuple[tuple[int, int], ...]  # tokens of prompt and response
    shared: bool = False  # True if equal prompts are stored once

    @property
    def prompts(self) -> int:
        found = [prompt for prompt, _ in self.lengths]
        return found[0] if self.shared else sum(found)


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes of a micro-batch on one device, without parameters."""

    before: int  # at the start of the first layer
    layers: tuple[int, ...]  # activations of each layer, kept until its backward pass
    kept: int  # at the loss: everything needed by the backward pass
    peak: int  # maximum over forward and backward pass
    small: int  # maximum of blocks smaller than HEAP


def _settings(model: PreTrainedModel) -> str:
    return repr(sorted((model.config.to_dict() | {"_name_or_path": None}).items()))


class MetaModel:
    """Model on the meta device, prepared for training as in the trainer. `stack`: its decoder layers; `width`:
    tensor-parallel size; the model is the share of the first rank."""

    def __init__(self, model: PreTrainedModel, stack: nn.ModuleList, width: int = 1):
        self.model, self.stack = model, stack
        self._shares: dict[int, MetaModel] = {width: self}
        self.packs = attends_by_layout(model) or "position_ids" in model.forward.__annotations__
        self._found = _FOUND.setdefault((type(model), _settings(model), width), {})
        for parameter in model.parameters():
            if parameter.requires_grad:  # as DeepSpeed does after it has accumulated the gradient
                parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))

    def share(self, width: int) -> MetaModel:
        """Return the model of each of `width` tensor-parallel ranks. Raises EngineError if its layers can't be
        shared."""
        if width not in self._shares:
            whole = next(name for name, module in self.model.named_modules() if module is self.stack)
            model = shard_layers(copy.deepcopy(self.model), MemoryOnlyGroup(width))
            self._shares[width] = MetaModel(model, model.get_submodule(whole), width)
        return self._shares[width]

    def work(self, config: Config, role: str, texts: SequenceLengths, device: str) -> Work:
        """Return the memory of a training micro-batch of `actor` or `critic`, or of a `reference` or `values` pass.
        Raises ConfigError for a model whose passes depend on tensor values, or fail for other reasons."""
        actor, model = config.actor, config.model
        loss = (
            config.trainer.task,
            config.dpo.loss_type,
            actor.entropy_coeff != 0,
            actor.use_kl_loss,
            actor.loss_mode,
            actor.loss_agg_mode,
        )
        run = (model.dtype, model.enable_gradient_checkpointing, model.use_remove_padding)
        run += (config.training.vocabulary_parallel, config.rollout.temperature)
        key = (role, texts, device, *run, *loss)
        if key not in self._found:
            try:
                self._found[key] = self._run(config, role, texts, device)
            except ConfigError:  # of a custom loss; already has the full message
                raise
            except Exception as error:  # model code may raise anything
                name, which = type(self.model).__name__, {"values": "critic"}.get(role, role)
                wrong = f"the {which}, a {name}: the memory of its passes can't be computed on meta tensors"
                raise ConfigError([f"{wrong} ({first_line(error)})"]) from error
        return self._found[key]

    def _run(self, config: Config, role: str, texts: SequenceLengths, device: str) -> Work:
        model = self.model.to(getattr(torch, config.model.dtype)).train()
        if config.model.enable_gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=_RECOMPUTED)
        else:
            model.gradient_checkpointing_disable()
        batch, live = self._batch(config, texts, device), _MemoryCounter(model)
        kernels = _Kernels(device == "cpu" or model.dtype != torch.float32)
        fused = device == "cuda" and not config.training.vocabulary_parallel
        with live, _losses(fused), _Stack(self.stack, live, kernels) as stack:
            learns = role in OBJECTIVES
            with torch.set_grad_enabled(learns):
                kept = OBJECTIVES[role](config, model, batch) if learns else _PASSES[role](config, model, batch)
            held = live.now
            stack.ends(held)
            if learns:
                kept[0].backward()
        return Work(stack.starts[0], tuple(stack.added), held, live.peak, live.small_peak)

    def _batch(self, config: Config, texts: SequenceLengths, device: str) -> Batch:
        packed = config.model.use_remove_padding and self.packs
        batch = collate([_row(*each) for each in texts.lengths], packed, "meta", shared=texts.shared)
        if device == "cuda" and config.model.dtype != "float32":  # all segments in one call, see `attention.attend`
            batch.inputs["layout"] = replace(batch.inputs["layout"], spread=_attend)
        return batch


def _row(prompt: int, response: int) -> Row:
    tensors = dict.fromkeys(_TENSORS, np.zeros(response, dtype=np.float32))
    return Row(np.zeros(prompt, dtype=np.int32), np.zeros(response, dtype=np.int32), tensors=tensors)


class _MemoryCounter(TorchDispatchMode):
    """Counter of the bytes of live storages, except a model's parameters and buffers."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.now = self.peak = self.small = self.small_peak = 0
        self._known = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 0  # values are unknown; pretend that none is special
        if function is torch.ops.aten.index_put.default and args[3:] == (True,):  # a gradient summed into zeros;
            # autograd copies them only because a mode is active
            function = torch.ops.aten.index_put_.default
        result = function(*args, **(kwargs or {}))
        for each in (result,) if isinstance(result, Tensor) else tree_iter(result):
            if isinstance(each, Tensor):
                self._track(each.untyped_storage())
        return result

    def _track(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) not in self._known:
            self._known.add(key)
            self._count(storage.nbytes())
            self.peak, self.small_peak = max(self.peak, self.now), max(self.small_peak, self.small)
            weakref.finalize(storage, self._untrack, key, storage.nbytes())

    def _untrack(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._count(size, -1)

    def _count(self, size: int, sign: int = 1) -> None:
        self.now += sign * size
        self.small += sign * size * (size < HEAP)


@contextmanager
def _losses(fused: bool) -> Iterator[None]:
    """Compute log-probs and entropy as on the device: with fused kernels, which store nothing, or in slices of rows, of
    which the first two represent all."""
    slices, is_fused = losses._slices, fused_log_probs.is_fused
    losses._slices, fused_log_probs.is_fused = lambda rows: slices(rows)[:2], lambda _: fused
    try:
        yield
    finally:
        losses._slices, fused_log_probs.is_fused = slices, is_fused


class _Attention(torch.autograd.Function):
    """Tensors stored by flash and memory-efficient attention: [B, heads, tokens, d], or [B, tokens, heads, d]
    packed."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        result = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, result, mask, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return *map(torch.empty_like, (query, key, value)), None


def _attend(query: Tensor, key: Tensor, value: Tensor, segments: tuple[Segment, ...], *more: Any) -> Tensor:
    """Replace `attention._varlen`: after a shared prefix every segment has a copy of its keys and values."""
    _, _, *unusual = more  # soft-capping and sinks, which kernels do not support
    if any(each is not None for each in unusual):
        return attention.attend(query, key, value, segments, *more)
    if any(segment.prefix for segment in segments):
        prefixes = sum(segment.prefix[1] - segment.prefix[0] for segment in segments if segment.prefix)
        columns = torch.empty(key.shape[1] + prefixes, dtype=torch.int64, device="meta")
        key, value = key[:, columns], value[:, columns]
    return _Attention.apply(query, key, value, None)


class _Experts(torch.autograd.Function):
    """Grouped matrix product of experts, for which torch lacks meta kernels in some precisions."""

    @staticmethod
    def forward(ctx, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights)
        return rows.new_empty(len(rows), weights.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        rows, weights = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(weights)


class _Kernels(TorchFunctionMode):
    """Mode that replaces torch's attention and experts by device kernels; `grouped`: including grouped-query
    attention."""

    def __init__(self, grouped: bool):
        super().__init__()
        self.grouped = grouped

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function is scaled_dot_product_attention and self._is_fused(*args[:3], kwargs.get("enable_gqa")):
            mask = kwargs.get("attn_mask")
            return _Attention.apply(*args[:3], None if mask is None else mask.to(args[0].dtype))
        if function is torch._grouped_mm:  # called by all implementations
            return _Experts.apply(*args[:2])
        return function(*args, **kwargs)

    def _is_fused(self, query: Tensor, key: Tensor, value: Tensor, shares: bool | None) -> bool:
        """Return whether a fused kernel is used. Otherwise torch computes all scores: for broadcast keys, and values
        narrower than keys."""
        alike = query.shape[-3] == key.shape[-3] or (self.grouped and bool(shares))
        return alike and query.shape[-1] == value.shape[-1]


class _AllocationOnly(torch.autograd.Function):
    """Replacement of a layer that only allocates its activations: `large` bytes, and `small` bytes in small blocks."""

    @staticmethod
    def forward(ctx, hidden: Tensor, large: int, small: int) -> Tensor:
        pieces = [large, *[HEAP // 2] * (small // (HEAP // 2)), small % (HEAP // 2)]
        ctx.save_for_backward(*[hidden.new_empty(size, dtype=torch.uint8) for size in pieces])
        return torch.empty_like(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.saved_tensors  # noqa: B018, freed after this access
        return torch.empty_like(gradient), None, None


class _Stack:
    """Wrapper of the layers in a pass: records memory at the start of each, and replaces repeated ones by
    allocations."""

    def __init__(self, layers: nn.ModuleList, live: _MemoryCounter, kernels: _Kernels):
        self._layers, self._live, self._kernels, self._recording = layers, live, kernels, True
        self.starts: list[int] = []
        self._small: list[int] = []
        self.added: list[int] = []
        self._like = _representatives([_layer_kind(layer) for layer in layers])
        self._tuples: dict[int, int] = {}

    def __enter__(self) -> _Stack:
        for number, layer in enumerate(self._layers):
            layer.forward = self._wrapped(number, layer.forward)
        return self

    def __exit__(self, *_: object) -> None:
        for layer in self._layers:
            del layer.forward

    def ends(self, held: int) -> None:
        """Finish recording at the loss; later calls of layers are recomputations."""
        if len(self.starts) != len(self._layers):
            raise RuntimeError(f"{len(self.starts)} of its {len(self._layers)} layers were run")
        self._recording = False
        self.added = [b - a for a, b in pairwise(self.starts)]
        self.added.append(self.added[-1] if self.added else held - self.starts[0])

    def _wrapped(self, number: int, forward: Callable) -> Callable:
        like = self._like[number]

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._recording:
                self.starts.append(self._live.now)
                self._small.append(self._live.small)
            if like == number:
                with self._kernels:  # here, because recomputation disables outer modes
                    result = forward(*args, **kwargs)
                self._tuples[number] = len(result) if isinstance(result, tuple) else 0
                return result
            hidden = args[0] if args else kwargs["hidden_states"]
            left, small = (each[like + 1] - each[like] for each in (self.starts, self._small))
            left, small = (left, small) if torch.is_grad_enabled() else (0, 0)
            small = max(0, min(small, left))
            result = _AllocationOnly.apply(hidden, left - small, small)
            return (result, *[None] * (self._tuples[like] - 1)) if self._tuples[like] else result

        return run


def _representatives(kinds: list[tuple]) -> list[int]:
    """Return for each layer the index of its representative: itself for the first two of a kind and the last layer.
    Others use the second of their kind, because the input of the first layer is kept by the caller."""
    places: dict[tuple, list[int]] = {}
    for number, kind in enumerate(kinds):
        places.setdefault(kind, []).append(number)
    return [
        number if number in (*places[kind][:2], len(kinds) - 1) else places[kind][1]
        for number, kind in enumerate(kinds)
    ]


def _layer_kind(layer: nn.Module) -> tuple:
    """Return a key that is equal for equivalent layers: parameter shapes and plain attributes of the modules."""
    weights = tuple((name, tuple(each.shape)) for name, each in layer.named_parameters())
    plain = tuple(
        (name, key, value)
        for name, module in layer.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float | str | None) and not key.startswith(("layer", "_"))
    )
    return weights, plain
