"""Removal of dropout: PPO's ratio must be 1 before an update, also in the pass that computes gradients.

Role: `models` and `pipeline.loading` call `zero_fields` before and `zero_dropout` after building a model; trainer ranks
call `check_repeatable` after loading. Uses torch and transformers, not DeepSpeed or Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rlfuse.config.model_files import NOISE, is_noise
from rlfuse.errors import EngineError

SAMPLED = 256
"""Elements compared per tensor."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
"""Tolerance relative to a tensor's largest element: GPU kernels may sum in any order."""


def zero_fields(config: PreTrainedConfig | dict[str, Any]) -> None:
    """Set the dropout probabilities of a configuration and its nested ones to 0."""
    fields = config if isinstance(config, dict) else vars(config)
    for name, value in list(fields.items()):
        if isinstance(value, PreTrainedConfig | dict):
            zero_fields(value)
        elif is_noise(name, value) and value > 0:
            fields[name] = 0.0


def zero_dropout(model: PreTrainedModel) -> None:
    """Set the probability of dropout modules to 0, and the attributes and fields that functional dropout reads."""
    zero_fields(model.config)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if is_noise(name, value) and value > 0:
                setattr(module, name, 0.0)


def check_repeatable(model: PreTrainedModel, run: Callable[[], Any], role: str) -> None:
    """Raise EngineError, naming a module, if two calls of `run` in training mode give different results in `model`.

    Random number generators and the mode are restored. If `run` is collective, every rank calls.
    """
    on_cuda, training = model.device.type == "cuda", model.training
    model.train()
    with torch.random.fork_rng([torch.cuda.current_device()] if on_cuda else []), torch.no_grad():
        first, second = _values(model, run), _values(model, run)
    model.train(training)
    tolerance = TOLERANCE[model.dtype] if on_cuda else 0.0
    for one, other in zip_longest(first, second):
        if one is None or other is None or one.module != other.module or _differ(one.sample, other.sample, tolerance):
            name = (one or other).source
            raise EngineError(
                f"The {role}'s {name or 'model'}, a {type(model.get_submodule(name)).__name__}, returned different "
                "values in two passes in training mode. Turn off its dropout or other noise in config.json or in the "
                "model's code, as the policy ratio must be 1 before an update; fields and attributes "
                f"with {' or '.join(NOISE)} in their names are set to 0 at startup."
            )


class _Value(NamedTuple):
    module: str
    source: str
    """Module that computed the value: `module` for its output, its caller for its input."""
    sample: Tensor


def _values(model: PreTrainedModel, run: Callable[[], Any]) -> list[_Value]:
    """Return samples of the inputs and outputs of modules during `run`, in order."""
    found, calls = [], [""]

    def enters(name: str, _: nn.Module, positional: tuple, named: dict) -> None:
        found.append(_Value(name, calls[-1], _sample((positional, named))))
        calls.append(name)

    def leaves(name: str, _: nn.Module, __: tuple, output: Any) -> None:
        found.append(_Value(name, calls.pop(), _sample(output)))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(partial(enters, name), with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(partial(leaves, name)))
        run()
    return found


def _sample(value: Any) -> Tensor:
    """Return some elements of every floating-point tensor in `value`, float32."""
    tensors = [each for each in _tensors(value) if each.is_floating_point()]
    parts = [each.detach().flatten()[:: len(each.flatten()) // SAMPLED | 1].float().cpu() for each in tensors]
    return torch.cat([torch.empty(0), *parts]).nan_to_num(0.0, 0.0, 0.0)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _differ(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if one.shape != other.shape:
        return True
    return bool(len(one)) and bool((one - other).abs().max() > tolerance * one.abs().max())
