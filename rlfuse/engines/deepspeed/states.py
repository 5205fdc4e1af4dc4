"""Parts of parameters that a rank holds in float32 under each ZeRO stage, as views of DeepSpeed's state.

Role: used by `DeepSpeedModel`. Masters and moments are: under ZeRO 0 whole parameters (in bfloat16, their float32
copies); under ZeRO 1 and 2 a range of all flattened parameters; under ZeRO 3 a range of each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from rlfuse.engines.trainer.state_files import MOMENTS, WEIGHT, Part, SavedState, Share

Named = list[tuple[str, torch.nn.Parameter]]
ShareOf = Callable[[torch.nn.Parameter], Share]
Held = tuple[int, torch.Tensor, dict[str, torch.Tensor]]
"""Position of the first element, master weights and moments of a parameter on this rank, all flat."""


def parts(engine: Any, named: Named, share_of: ShareOf) -> Iterator[Part]:
    """Yield this rank's part of each trained parameter."""
    stage, stepped = engine.zero_optimization_stage(), bool(engine.basic_optimizer.state)
    if stage in (1, 2) and stepped:
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    held: Callable[[torch.nn.Parameter], Held | None]
    held = {0: _whole(engine), 1: _range, 2: _range, 3: _partition}[stage]
    steps = count_steps(engine)
    for name, parameter in named:
        if not parameter.requires_grad or (found := held(parameter)) is None:
            continue
        start, master, moments = found
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        tied = bool(getattr(parameter, PIPE_REPLICATED, False))
        yield Part(name, shape, start, {WEIGHT: master, **moments}, share_of(parameter), steps, tied)


def load(engine: Any, named: Named, share_of: ShareOf, saved: SavedState) -> None:
    """Copy the saved state into this rank's parts and into the weights."""
    make_moments(engine, max(saved.steps(name) for name, parameter in named if parameter.requires_grad))
    for part in parts(engine, named, share_of):
        for field, tensor in part.tensors.items():
            if field == WEIGHT or saved.steps(part.name):
                tensor.copy_(saved.read(field, part))
            else:  # saved before the first step
                tensor.zero_()
    _update_weights(engine, named)
    engine.global_steps = saved.updates


def count_steps(engine: Any) -> int:
    """Return the number of steps in the moments, 0 before the first one."""
    return max((int(state["step"]) for state in engine.basic_optimizer.state.values()), default=0)


def _whole(engine: Any) -> Callable[[torch.nn.Parameter], Held]:
    masters, states = dict(_copies(engine.optimizer)), engine.basic_optimizer.state

    def held(parameter: torch.nn.Parameter) -> Held:
        master = masters.get(parameter, parameter)
        state = states.get(master, {})
        return 0, master.detach().view(-1), {name: state[name].view(-1) for name in MOMENTS if name in state}

    return held


def _copies(wrapper: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Yield each bfloat16 parameter with its float32 copy under ZeRO 0. `wrapper`: the engine's optimizer."""
    if isinstance(wrapper, FP16_UnfusedOptimizer):
        for weights, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
            yield from zip(weights, masters, strict=True)


def _range(parameter: Any) -> Held | None:
    mapping = parameter._hp_mapping
    if mapping is None:  # other ranks hold all of it
        return None
    moments = mapping.optim_fragment or {}
    found = {name: moments[name] for name in MOMENTS if name in moments}
    return mapping.lp_fragment_address.start, mapping.hp_fragment.detach(), found


def _partition(parameter: Any) -> Held | None:
    zero, size = parameter._z3_optimizer, parameter.partition_numel()
    start = zero._get_param_partition_rank(parameter) * size
    count = min(size, parameter.ds_numel - start)  # the last partition is padded
    if count <= 0:
        return None
    group, offset, _ = zero.grad_position[zero.get_param_id(parameter)]
    flat = zero.fp32_partitioned_groups_flat[group]
    state = zero.optimizer.state.get(flat, {})
    moments = {name: state[name].narrow(0, offset, count) for name in MOMENTS if name in state}
    return start, flat.detach().narrow(0, offset, count), moments


def _update_weights(engine: Any, named: Named) -> None:
    """Set the weights to the masters, on all ranks."""
    stage = engine.zero_optimization_stage()
    if stage in (1, 2):
        engine.optimizer.update_lp_params()
    elif stage == 0:
        for weight, master in _copies(engine.optimizer):
            weight.data.copy_(master)
    else:
        for _, parameter in named:
            if parameter.requires_grad and (found := _partition(parameter)) is not None:
                _, master, _ = found
                parameter.ds_tensor.data.view(-1)[: len(master)].copy_(master)


def make_moments(engine: Any, steps: int) -> None:
    """Create AdamW's state, so that it can be filled: take a step that changes nothing, if there is no state yet."""
    optimizer = engine.basic_optimizer
    if steps and not optimizer.state:
        flats = getattr(engine.optimizer, "fp32_partitioned_groups_flat", None)
        for stepped in [None] if flats is None else [[flat] for flat in flats]:
            with _at_rest(optimizer, stepped):
                optimizer.step()
    for state in optimizer.state.values():
        state["step"] = torch.full_like(state["step"], steps) if torch.is_tensor(state["step"]) else steps


@contextmanager
def _at_rest(optimizer: torch.optim.Optimizer, stepped: Iterable[torch.Tensor] | None) -> Iterator[None]:
    """Set gradients and learning rates to zero within the block. `stepped`: tensors to step, if groups are empty."""
    groups = optimizer.param_groups
    if stepped is not None:  # ZeRO 3 has them in the optimizer only during a step
        groups[0]["params"] = list(stepped)
    kept = [(group, group["lr"], each, each.grad) for group in groups for each in group["params"] if each.requires_grad]
    for group, _, each, _ in kept:
        group["lr"], each.grad = 0.0, torch.zeros_like(each)
    yield
    for group, rate, each, gradient in reversed(kept):
        group["lr"], each.grad = rate, gradient
    if stepped is not None:
        groups[0]["params"] = []
