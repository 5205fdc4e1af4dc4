"""Training state of pipeline ranks by parameter name, loadable under another split into stages.

Role: used by `DeepSpeedModel` of pipeline ranks; every rank calls, the ranks of one pipeline write. Weights are
DeepSpeed's float32 masters. Files: `rank_<i>.safetensors` with tensors `<field>/<parameter>`, and `optimizer.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from safetensors import safe_open
from safetensors.torch import save_file

from rlfuse.engines.deepspeed.optimizer import restore_run_settings
from rlfuse.engines.trainer.saving import CheckpointWriter
from rlfuse.engines.trainer.tensor_parallel import TensorShares, is_share

MOMENTS = ("exp_avg", "exp_avg_sq")
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}


def save(
    engine: Any, folder: Path, rank: int | None, files: CheckpointWriter, shares: TensorShares | None = None
) -> None:
    """Gather this rank's parameters and moments; write them as the file of `rank`, if given.

    Parameters of which ranks have shares (`shares`) are written whole: layers by the first rank of their group, a head
    shared by stages by the last stage, or as the embedding if it is tied.
    """
    stepped = bool(engine.optimizer.optimizer.state)
    tensors = {}
    for name, parameter in _named(engine):
        whole = {"weight": safe_get_full_fp32_param(parameter)}
        for moment in MOMENTS if stepped else ():
            whole[moment] = safe_get_full_optimizer_state(parameter, moment)
        writes = rank is not None
        if is_share(parameter):
            tied = getattr(parameter, PIPE_REPLICATED, False)
            dim = parameter.partition_dim
            writes = writes and shares.is_writer
            gathered = ((field, shares.gather_whole(tensor, dim)) for field, tensor in whole.items() if not tied)
            whole = {field: tensor.cpu() for field, tensor in gathered if writes}  # gathering is collective
        if writes:
            tensors |= {f"{field}/{name}": tensor.cpu().contiguous() for field, tensor in whole.items()}
    if rank is not None:
        path = folder / f"rank_{rank}.safetensors"
        files.write(path, lambda: (folder.mkdir(parents=True, exist_ok=True), save_file(tensors, path)))
    if rank == 0:
        steps = max((int(state["step"]) for state in engine.optimizer.optimizer.state.values()), default=0)
        files.write(folder, lambda: (folder / "optimizer.json").write_text(json.dumps({"steps": steps})))


def load(engine: Any, folder: Path, shares: TensorShares | None = None) -> None:
    """Load what `save` wrote for the parameters on this rank, or its shares of them.

    FileNotFoundError if there is no state.
    """
    files = sorted(folder.glob("rank_*.safetensors"))
    if not files or not (folder / "optimizer.json").is_file():
        raise FileNotFoundError(
            f"{folder} has no pipeline state to resume from. Use a checkpoint saved by pipeline ranks."
        )
    where: dict[str, Path] = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            where |= dict.fromkeys(tensors.keys(), file)
    steps = json.loads((folder / "optimizer.json").read_text())["steps"]
    _make_moments(engine, steps)
    for name, parameter in _named(engine):
        own = _share(parameter, shares)
        safe_set_full_fp32_param(parameter, _read(where, "weight", name, folder, own).to(parameter.device))
        for moment in MOMENTS if steps else ():
            value = _read(where, moment, name, folder, own).to(parameter.device)
            safe_set_full_optimizer_state(parameter, value, moment)
    engine.optimizer.update_lp_params()
    restore_run_settings(engine)


def _named(engine: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield parameters under the whole model's names, without the stage index."""
    for name, parameter in engine.module.named_parameters():
        yield name.split(".", 1)[1], parameter


def _share(parameter: torch.nn.Parameter, shares: TensorShares | None) -> tuple[slice, ...]:
    """Return the index of this rank's share in the whole tensor."""
    if not is_share(parameter):
        return (slice(None),)
    size = parameter.shape[parameter.partition_dim]
    return (*[slice(None)] * parameter.partition_dim, slice(shares.index * size, (shares.index + 1) * size))


def _read(where: dict[str, Path], field: str, name: str, folder: Path, own: tuple[slice, ...]) -> torch.Tensor:
    key = f"{field}/{name}"
    if key not in where:  # saved when head and embedding were one parameter
        key = f"{field}/{_TIED.get(name, name)}"
    if key not in where:
        raise FileNotFoundError(f"{folder} has no {field} of {name}. Use a checkpoint of the same model.")
    with safe_open(where[key], "pt") as tensors:
        return tensors.get_slice(key)[own]


def _make_moments(engine: Any, steps: int) -> None:
    """Create AdamW's state, so that it can be filled: take a step that changes nothing, if there is no state yet."""
    if not steps:
        return
    optimizer = engine.optimizer.optimizer
    if not optimizer.state:
        with _at_rest(optimizer):
            optimizer.step()
    engine.optimizer._lazy_init_hp_params_optimizer_state()
    for state in optimizer.state.values():
        state["step"] = torch.full_like(state["step"], steps) if torch.is_tensor(state["step"]) else steps


@contextmanager
def _at_rest(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Set gradients and learning rates to zero within the block."""
    kept = [(group, group["lr"], [flat.grad for flat in group["params"]]) for group in optimizer.param_groups]
    for group, _, _ in kept:
        group["lr"] = 0.0
        for flat in group["params"]:
            flat.grad = torch.zeros_like(flat)
    yield
    for group, rate, gradients in kept:
        group["lr"] = rate
        for flat, gradient in zip(group["params"], gradients, strict=True):
            flat.grad = gradient
