"""Tensors of a DeepSpeed engine, whatever it keeps where."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch


def step_tensors(engine: Any) -> list[torch.Tensor]:
    """Return what only its steps read: masters and moments, except those whose memory is that of weights."""
    inner, sharded = getattr(engine, "basic_optimizer", None), "fp32_partitioned_groups_flat"
    if inner is None:
        return []
    found = [each for group in inner.param_groups for each in group["params"]]
    found += [*inner.state, *getattr(engine.optimizer, sharded, [])]  # ZeRO 3 hands them over in a step alone
    found += [value for state in inner.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    weights = [*engine.module.buffers(), *engine.module.parameters()]
    weights += [each.ds_tensor for each in weights if hasattr(each, "ds_tensor")]
    kept = {each.untyped_storage().data_ptr() for each in weights}
    return [each for each in found if each.untyped_storage().data_ptr() not in kept]


def reachable(root: Any) -> Iterator[torch.Tensor]:
    """What is reached from here through containers, attributes of tensors and the parts of optimizers."""
    seen, waiting = {}, [root]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value  # alive, or another could get its id
        if isinstance(value, torch.Tensor):
            yield value
            waiting += [value.grad, *vars(value).values()]  # of a sharded parameter its partition
        elif isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | deque):
            waiting += [*value, *getattr(value, "__dict__", {}).values()]
        elif type(value).__module__.startswith(("deepspeed.runtime.", "torch.optim.")):
            waiting += getattr(value, "__dict__", {}).values()
