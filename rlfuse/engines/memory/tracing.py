"""Measure what a training pass leaves in memory: the trainer's own code, run on meta tensors.

Parameters and their gradients are not counted. Fused attention keeps queries, keys, values, output and a number per
query and head. Of layers of one kind two are run, and the last of the stack.
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
"""Without gradients."""
_RECOMPUTED = {"use_reentrant": False}
_TENSORS = ("old_log_probs", "advantages", "ref_log_probs", "values", "returns")
"""What objectives read of a row."""
HEAP = 32 << 20  # smaller blocks are in the heap of a CPU rank (`rank_group.MALLOC_SETTINGS`)
_FOUND: dict[tuple[type, str, int], dict[tuple, Work]] = {}
"""What equal models were found to need: one process may plan several jobs of a model."""


def first_line(error: Exception) -> str:
    """The start of its message, and its class where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@dataclass(frozen=True, slots=True)
class SequenceLengths:
    """The sequences of a micro-batch."""

    lengths: tuple[tuple[int, int], ...]  # tokens of prompt and response
    shared: bool = False  # whether equal prompts are there once

    @property
    def prompts(self) -> int:
        found = [prompt for prompt, _ in self.lengths]
        return found[0] if self.shared else sum(found)


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes of one micro-batch on one device, beside parameters."""

    before: int  # when the first layer begins
    layers: tuple[int, ...]  # that each layer adds and that stay until its backward pass
    kept: int  # when the loss is known: all that the backward pass needs
    peak: int  # at the most, at any time of forward and backward pass
    small: int  # likewise, of blocks below HEAP alone


def _settings(model: PreTrainedModel) -> str:
    return repr(sorted((model.config.to_dict() | {"_name_or_path": None}).items()))


class MetaModel:
    """A model on the meta device, ready to train as the trainer makes it; `stack` are its decoder layers. `width`:
    ranks that share them, of which this is the first."""

    def __init__(self, model: PreTrainedModel, stack: nn.ModuleList, width: int = 1):
        self.model, self.stack = model, stack
        self._shares: dict[int, MetaModel] = {width: self}
        self.packs = attends_by_layout(model) or "position_ids" in model.forward.__annotations__
        self._found = _FOUND.setdefault((type(model), _settings(model), width), {})
        for parameter in model.parameters():
            if parameter.requires_grad:  # as DeepSpeed, which adds it to a sum
                parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))

    def share(self, width: int) -> MetaModel:
        """What each of `width` ranks holds of it. EngineError where they can't share its layers."""
        if width not in self._shares:
            whole = next(name for name, module in self.model.named_modules() if module is self.stack)
            model = shard_layers(copy.deepcopy(self.model), MemoryOnlyGroup(width))
            self._shares[width] = MetaModel(model, model.get_submodule(whole), width)
        return self._shares[width]

    def work(self, config: Config, role: str, texts: SequenceLengths, device: str) -> Work:
        """Of a micro-batch that `actor` or `critic` learns from, or of a `reference`'s or a `values` pass. ConfigError
        for a model whose passes depend on the numbers in its tensors, or fail otherwise."""
        actor, model = config.actor, config.model
        loss = (actor.entropy_coeff != 0, actor.use_kl_loss, actor.loss_mode, actor.loss_agg_mode)
        run = (model.dtype, model.enable_gradient_checkpointing, model.use_remove_padding)
        run += (config.training.vocabulary_parallel, config.rollout.temperature)
        key = (role, texts, device, *run, *loss)
        if key not in self._found:
            try:
                self._found[key] = self._run(config, role, texts, device)
            except ConfigError:  # of a loss of the user's own, which says all itself
                raise
            except Exception as error:  # whatever a family's own code raises
                name, which = type(self.model).__name__, {"values": "critic"}.get(role, role)
                wrong = f"the {which}, a {name}: the memory of its passes can't be told without running them"
                raise ConfigError([f"{wrong} ({first_line(error)})"]) from error
        return self._found[key]

    def _run(self, config: Config, role: str, texts: SequenceLengths, device: str) -> Work:
        model = self.model.to(getattr(torch, config.model.dtype)).train()
        if config.model.enable_gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=_RECOMPUTED)
        else:
            model.gradient_checkpointing_disable()
        batch, live = self._batch(config, texts, device), _Live(model)
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


class _Live(TorchDispatchMode):
    """Bytes of the storages that are alive, beside a model's parameters and buffers."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.now = self.peak = self.small = self.small_peak = 0
        self._known = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 0  # no number is known; what looks for special ones finds none
        if function is torch.ops.aten.index_put.default and args[3:] == (True,):  # a gradient, summed into zeros that
            # autograd copies only where a mode looks on
            function = torch.ops.aten.index_put_.default
        result = function(*args, **(kwargs or {}))
        for each in (result,) if isinstance(result, Tensor) else tree_iter(result):
            if isinstance(each, Tensor):
                self._see(each.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) not in self._known:
            self._known.add(key)
            self._count(storage.nbytes())
            self.peak, self.small_peak = max(self.peak, self.now), max(self.small_peak, self.small)
            weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._count(size, -1)

    def _count(self, size: int, sign: int = 1) -> None:
        self.now += sign * size
        self.small += sign * size * (size < HEAP)


@contextmanager
def _losses(fused: bool) -> Iterator[None]:
    """Log-probs and entropy as the device computes them: by kernels that keep nothing, or in slices of rows. The second
    slice is there beside the first, and the others are like it."""
    slices, is_fused = losses._slices, fused_log_probs.is_fused
    losses._slices, fused_log_probs.is_fused = lambda rows: slices(rows)[:2], lambda _: fused
    try:
        yield
    finally:
        losses._slices, fused_log_probs.is_fused = slices, is_fused


class _Attention(torch.autograd.Function):
    """What flash and memory-efficient attention keep: [B, heads, tokens, d] or, of a layout, [B, tokens, heads, d]."""

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
    """`attention._varlen`: behind a shared prefix every segment has keys and values of its own."""
    _, _, *unusual = more  # soft-capping and sinks, which no kernel computes
    if any(each is not None for each in unusual):
        return attention.attend(query, key, value, segments, *more)
    if any(segment.prefix for segment in segments):
        prefixes = sum(segment.prefix[1] - segment.prefix[0] for segment in segments if segment.prefix)
        columns = torch.empty(key.shape[1] + prefixes, dtype=torch.int64, device="meta")
        key, value = key[:, columns], value[:, columns]
    return _Attention.apply(query, key, value, None)


class _Experts(torch.autograd.Function):
    """One matrix product for each expert, which torch has no meta kernel of for every precision."""

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
    """torch's attention and experts as devices compute them; `grouped`: also heads of queries that share a key."""

    def __init__(self, grouped: bool):
        super().__init__()
        self.grouped = grouped

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function is scaled_dot_product_attention and self._in_one_kernel(*args[:3], kwargs.get("enable_gqa")):
            mask = kwargs.get("attn_mask")
            return _Attention.apply(*args[:3], None if mask is None else mask.to(args[0].dtype))
        if function is torch._grouped_mm:  # what every way to it calls
            return _Experts.apply(*args[:2])
        return function(*args, **kwargs)

    def _in_one_kernel(self, query: Tensor, key: Tensor, value: Tensor, shares: bool | None) -> bool:
        """Else torch computes all scores: for keys that are broadcast, and values narrower than keys."""
        alike = query.shape[-3] == key.shape[-3] or (self.grouped and bool(shares))
        return alike and query.shape[-1] == value.shape[-1]


class _Again(torch.autograd.Function):
    """A layer that leaves so many bytes, and so many in small blocks."""

    @staticmethod
    def forward(ctx, hidden: Tensor, large: int, small: int) -> Tensor:
        pieces = [large, *[HEAP // 2] * (small // (HEAP // 2)), small % (HEAP // 2)]
        ctx.save_for_backward(*[hidden.new_empty(size, dtype=torch.uint8) for size in pieces])
        return torch.empty_like(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.saved_tensors  # noqa: B018, freed from here on
        return torch.empty_like(gradient), None, None


class _Stack:
    """The layers while a pass runs: notes when each begins, and lets repeated ones leave what those like them left."""

    def __init__(self, layers: nn.ModuleList, live: _Live, kernels: _Kernels):
        self._layers, self._live, self._kernels, self._recording = layers, live, kernels, True
        self.starts: list[int] = []
        self._small: list[int] = []
        self.added: list[int] = []
        self._like = _models([_kind(layer) for layer in layers])
        self._tuples: dict[int, int] = {}

    def __enter__(self) -> _Stack:
        for number, layer in enumerate(self._layers):
            layer.forward = self._wrapped(number, layer.forward)
        return self

    def __exit__(self, *_: object) -> None:
        for layer in self._layers:
            del layer.forward

    def ends(self, held: int) -> None:
        """The loss is known; what is run from now on is run again."""
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
                with self._kernels:  # here, because a recomputation leaves such modes
                    result = forward(*args, **kwargs)
                self._tuples[number] = len(result) if isinstance(result, tuple) else 0
                return result
            hidden = args[0] if args else kwargs["hidden_states"]
            left, small = (each[like + 1] - each[like] for each in (self.starts, self._small))
            left, small = (left, small) if torch.is_grad_enabled() else (0, 0)
            small = max(0, min(small, left))
            result = _Again.apply(hidden, left - small, small)
            return (result, *[None] * (self._tuples[like] - 1)) if self._tuples[like] else result

        return run


def _models(kinds: list[tuple]) -> list[int]:
    """For each layer the one that it repeats, or itself: the first two of a kind, and the last of all. The second
    stands for the others, as what goes into the first layer stays with the caller."""
    places: dict[tuple, list[int]] = {}
    for number, kind in enumerate(kinds):
        places.setdefault(kind, []).append(number)
    return [
        number if number in (*places[kind][:2], len(kinds) - 1) else places[kind][1]
        for number, kind in enumerate(kinds)
    ]


def _kind(layer: nn.Module) -> tuple:
    """Equal for layers that do the same: their parameters, and whatever plain values their modules hold."""
    weights = tuple((name, tuple(each.shape)) for name, each in layer.named_parameters())
    plain = tuple(
        (name, key, value)
        for name, module in layer.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float | str | None) and not key.startswith(("layer", "_"))
    )
    return weights, plain
