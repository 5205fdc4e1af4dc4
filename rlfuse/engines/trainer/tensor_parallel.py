"""Tensor parallelism over consecutive trainer ranks: each has a share of every decoder layer and processes all tokens.

Layers are sharded by transformers' tensor-parallel plan of the family (Megatron-LM, arXiv 1909.08053): `colwise`
layers compute some outputs, `rowwise` layers take these as inputs and are followed by an all-reduce. Not sharded:
embedding, head, norms, and keys and values if several ranks share a head. Transformers' own tensor parallelism uses
DTensors, which DeepSpeed cannot flatten. Ranks of a group get the same rows and compute equal gradients of replicated
parameters, which count once in the norm.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedConfig, PreTrainedModel

from rlfuse.config.parallel_mesh import ParallelMesh
from rlfuse.engines.trainer.attention import attends_by_layout
from rlfuse.engines.trainer.state_files import WHOLE, Share
from rlfuse.errors import EngineError

KEY = "training.tensor_model_parallel_size"
COLWISE, ROWWISE, REPLICATED_SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
_KEY_VALUE = ("k_proj", "v_proj")
"""Attention layers that are sharded by key-value heads."""


class TensorShares(Protocol):
    """Group of ranks with shares of the same tensors, and this rank's index in it."""

    degree: int
    index: int
    is_writer: bool
    """True if this rank writes checkpoints for the group."""

    def gather_whole(self, tensor: Tensor, dim: int) -> Tensor: ...


class MemoryOnlyGroup:
    """First of `degree` ranks without the others, for memory plans: a sum allocates memory but changes nothing."""

    index = 0

    def __init__(self, degree: int):
        self.degree = degree

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor.clone(memory_format=torch.contiguous_format)


class TensorParallelGroup(MemoryOnlyGroup):
    """Tensor-parallel group of this rank; all ranks create it at the same time."""

    def __init__(self, mesh: ParallelMesh, rank: int, timeout: timedelta):
        super().__init__(mesh.tp)
        self.index, self.is_writer = mesh.coordinates(rank)["tp"], mesh.leads(rank, "tp")
        for ranks in mesh.groups("tp"):
            group = dist.new_group(ranks, timeout=timeout)
            if rank in ranks:
                self.group = group

    def load(self, load: Callable[[], PreTrainedModel]) -> PreTrainedModel:
        """Call `load` and return this rank's share of the model; one rank of the group at a time holds a whole
        model."""
        for turn in range(self.degree):
            if turn == self.index:
                model = shard_layers(load(), self)
            dist.barrier(self.group)
        return model

    def gather_whole(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the whole tensor from shares along `dim`; every rank of the group calls."""
        own = tensor.detach().contiguous()
        parts = [torch.empty_like(own) for _ in range(self.degree)]
        dist.all_gather(parts, own, group=self.group)
        return torch.cat(parts, dim)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks of the group, as a new tensor."""
        found = super().sum(tensor)
        dist.all_reduce(found, group=self.group)
        return found


def is_share(parameter: nn.Parameter | Tensor) -> bool:
    """Return whether the parameter is this rank's share of a larger tensor."""
    return getattr(parameter, "tensor_model_parallel", False)


def share_of(shares: TensorShares | None, parameter: nn.Parameter) -> Share:
    """Return which share of a parameter this rank has; `shares`: its group."""
    if shares is None or not is_share(parameter):
        return WHOLE
    return Share(shares.index, shares.degree, parameter.partition_dim)


# Which models ---------------------------------------------------------------------------------------------------------


def check_shardable(config: PreTrainedConfig, degree: int) -> None:
    """Raise EngineError if `degree` ranks cannot shard the family or its heads."""
    text = config.get_text_config()
    plan, name = getattr(text, "base_model_tp_plan", None) or {}, text.model_type
    if not any(style == ROWWISE for style in plan.values()):
        raise EngineError(f"transformers has no tensor-parallel plan for a {name}, which {KEY}={degree} needs")
    other = sorted({style for layer, style in plan.items() if "*" in layer} - {COLWISE, ROWWISE, REPLICATED_SUMMED})
    if other:
        raise EngineError(
            f"the tensor-parallel plan of a {name} has {', '.join(other)} layers, which {KEY}={degree} does not support"
        )
    heads = text.num_attention_heads
    shared = getattr(text, "num_key_value_heads", None) or heads
    if heads % degree or (shared % degree and degree % shared):
        raise EngineError(
            f"{KEY}={degree} must divide the {heads} attention heads of a {name}, and divide or be a multiple of its "
            f"{shared} heads of keys and values"
        )
    if (getattr(text, "intermediate_size", None) or degree) % degree:
        raise EngineError(f"{KEY}={degree} must divide the {text.intermediate_size} numbers between a {name}'s MLPs")


# A rank's share -------------------------------------------------------------------------------------------------------


def shard_layers(model: PreTrainedModel, ranks: MemoryOnlyGroup) -> PreTrainedModel:
    """Replace the model's decoder layers with this rank's shares of them, and return it.

    EngineError if a layer has parameters outside its plan: their gradients could be of some heads only.
    """
    check_shardable(model.config, ranks.degree)
    if not attends_by_layout(model):
        raise EngineError(
            f"{KEY}={ranks.degree}: a {type(model).__name__} computes with a fixed number of heads. Set it to 1"
        )
    entrance, planned = _SharedInput(ranks), _planned(model)
    for name, style in planned.items():
        parent, _, leaf = name.rpartition(".")
        layer = model.get_submodule(name)
        if style == REPLICATED_SUMMED:
            for parameter in layer.parameters():
                parameter.register_hook(ranks.sum)
        else:
            setattr(model.get_submodule(parent), leaf, _share(name, layer, style, model, ranks, entrance))
    for parent in {name.rpartition(".")[0] for name, style in planned.items() if style == ROWWISE}:
        module = model.get_submodule(parent)
        module.register_forward_hook(entrance.forget, always_call=True)
        for name, _ in module.named_parameters(prefix=parent):
            if name.rpartition(".")[0] not in planned:
                raise EngineError(f"{KEY}={ranks.degree}: {name} is in no tensor-parallel plan. Set it to 1")
    return model


def _planned(model: PreTrainedModel) -> dict[str, str]:
    """Return module name -> style in transformers' tensor-parallel plan, for modules of decoder layers."""
    plan = model.tp_plan
    names = ((name, re.sub(r"\.\d+(?=\.|$)", ".*", name)) for name, _ in model.named_modules())
    return {name: plan[pattern] for name, pattern in names if pattern in plan and "*" in pattern}


def _share(
    name: str, layer: nn.Module, style: str, model: PreTrainedModel, ranks: MemoryOnlyGroup, entrance: _SharedInput
) -> nn.Module:
    text, leaf = model.config.get_text_config(), name.rpartition(".")[2]
    if not isinstance(layer, nn.Linear):
        raise EngineError(
            f"{KEY}={ranks.degree}: {name} is a {type(layer).__name__}, which cannot be sharded. Set it to 1"
        )
    if style == ROWWISE:
        return _Rows(layer, ranks)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if leaf in _KEY_VALUE and heads % ranks.degree:
        return _SharedColumns(layer, ranks, entrance, heads)
    return _Columns(layer, ranks, entrance)


def _cut(parameter: nn.Parameter, dim: int, ranks: MemoryOnlyGroup) -> nn.Parameter:
    """Return a copy of this rank's share, so that the whole can be freed; marked as in Megatron-LM."""
    if parameter.shape[dim] % ranks.degree:
        raise EngineError(f"{KEY}={ranks.degree} must divide {parameter.shape[dim]}, a width of a layer. Lower it")
    own = nn.Parameter(parameter.detach().chunk(ranks.degree, dim)[ranks.index].clone())
    own.tensor_model_parallel, own.partition_dim = True, dim
    return own


class ShardedLinear(nn.Module):
    """Linear layer with a share of the rows or columns of its weight."""

    multiply = staticmethod(linear)


class _Columns(ShardedLinear):
    """Column-parallel linear layer: computes some of the outputs."""

    def __init__(self, layer: nn.Linear, ranks: MemoryOnlyGroup, entrance: _SharedInput):
        super().__init__()
        self._entrance = entrance
        self.weight = _cut(layer.weight, 0, ranks)
        self.bias = None if layer.bias is None else _cut(layer.bias, 0, ranks)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.multiply(self._entrance(inputs), self.weight, self.bias)


class _SharedColumns(nn.Module):
    """Linear layer of keys or values that computes the single head of this rank's queries; its weight is replicated."""

    def __init__(self, layer: nn.Linear, ranks: MemoryOnlyGroup, entrance: _SharedInput, heads: int):
        super().__init__()
        self._entrance, width = entrance, layer.out_features // heads
        head = ranks.index * heads // ranks.degree
        self._own = slice(head * width, (head + 1) * width)
        self.weight, self.bias = layer.weight, layer.bias
        for parameter in layer.parameters():
            parameter.register_hook(ranks.sum)

    def forward(self, inputs: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias[self._own]
        return linear(self._entrance(inputs), self.weight[self._own], bias)


class _Rows(ShardedLinear):
    """Row-parallel linear layer: takes some of the inputs, and sums over the ranks before it adds the bias."""

    def __init__(self, layer: nn.Linear, ranks: MemoryOnlyGroup):
        super().__init__()
        self._ranks, self.bias = ranks, layer.bias
        self.weight = _cut(layer.weight, 1, ranks)

    def forward(self, inputs: Tensor) -> Tensor:
        whole = _Sum.apply(self.multiply(inputs, self.weight), self._ranks)
        return whole if self.bias is None else whole + self.bias


class _SharedInput:
    """Input of column-parallel layers, whose gradient is summed over the ranks once per input."""

    def __init__(self, ranks: MemoryOnlyGroup):
        self._ranks = ranks
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and inputs.requires_grad):
            return inputs
        if self._last is None or self._last[0] is not inputs:
            self._last = inputs, _SumOfGradient.apply(inputs, self._ranks)
        return self._last[1]

    def forget(self, *_: object) -> None:
        """Release the last input."""
        self._last = None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, ranks: MemoryOnlyGroup) -> Tensor:
        return ranks.sum(tensor)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _SumOfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, ranks: MemoryOnlyGroup) -> Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum(gradient), None
