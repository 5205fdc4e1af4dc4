"""Share weights through CUDA IPC with engines on the same GPU: the trainer ranks' functions, called by `WeightPush`.

Each bucket is packed into one buffer with one handle, allocated until the engines have loaded it: torch pairs one
export with one receiver. It ran on one H200 with a handle per tensor; packed buckets are untested there.
"""

from __future__ import annotations

from typing import Any

import torch

from rlfuse.errors import EngineError


def pack(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Any], torch.Tensor]:
    """Copy a bucket to one uint8 buffer; return names, types, shapes and bytes in its order, widest types first
    (alignment)."""
    ordered = sorted(tensors.items(), key=lambda each: -each[1].element_size())
    sizes = [tensor.nbytes for _, tensor in ordered]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=ordered[0][1].device)
    for (_, tensor), room in zip(ordered, buffer.split(sizes), strict=True):
        room.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    described = {
        "names": [name for name, _ in ordered],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in ordered],
        "shapes": [list(tensor.shape) for _, tensor in ordered],
        "tensor_sizes": sizes,
    }
    return described, buffer


def share_ipc(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Any], torch.Tensor]:
    """Return a bucket's handle for engines on this GPU, and its buffer. EngineError for tensors in host memory."""
    from torch.multiprocessing.reductions import reduce_tensor

    if away := [name for name, tensor in tensors.items() if tensor.device.type != "cuda"]:
        raise EngineError(
            f"Weights in host memory cannot be shared by CUDA IPC ({away[0]}, {len(away)} of {len(tensors)} tensors). "
            "Acquire the devices of the trainer's ranks before pushing weights"
        )
    described, buffer = pack(tensors)
    gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    handles = {gpu: reduce_tensor(buffer)[1]}
    torch.cuda.synchronize()  # engines do not wait for this process's stream
    return described | {"ipc_handles": handles}, buffer


def collect() -> None:
    """Free memory that engines no longer use."""
    torch.cuda.ipc_collect()


def merge_ipc(shared: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge what each rank's `share_ipc` returned into one update: every GPU finds its handles."""
    return shared[0] | {
        "ipc_handles": {gpu: handle for update in shared for gpu, handle in update["ipc_handles"].items()}
    }
