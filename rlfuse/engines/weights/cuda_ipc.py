"""The trainer's end of vLLM's own weight transfer through CUDA IPC: two processes on a GPU share memory.

Role: functions that a trainer rank calls on its own device with one bucket of whole tensors, under checkpoint names;
`WeightPush` calls the ranks and the engines in the right order.

    each rank --CUDA IPC handles--> workers on the same GPU      share_ipc per bucket, kept until all have loaded it

Invariants: the tensors lie on the device, and live until the engines have loaded what they make of them.
Waits for nothing but the device.
State: written against the sources of vLLM 0.32, bound to them in tests, and not run: it needs a GPU. Shared memory
(`weights`) is what tests run.
"""

from __future__ import annotations

from typing import Any

import torch

from rlfuse.errors import EngineError


def share_ipc(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """A bucket's handles for engines on this GPU, and the tensors to keep until those have loaded it.

    EngineError for tensors in host memory, of which there are no handles.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    if away := [name for name, tensor in tensors.items() if tensor.device.type != "cuda"]:
        raise EngineError(
            f"weights to be shared by CUDA IPC lie in host memory ({away[0]}, {len(away)} of {len(tensors)} in all): "
            "the trainer's ranks have to take their devices before weights are pushed"
        )
    kept = [tensor.detach().contiguous() for tensor in tensors.values()]
    gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    handles = [{gpu: reduce_tensor(tensor)[1]} for tensor in kept]
    torch.cuda.synchronize()  # engines read the memory as it is, not after this process's stream
    described = {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in kept],
        "shapes": [list(tensor.shape) for tensor in kept],
    }
    return described | {"ipc_handles": handles}, kept


def collect() -> None:
    """Give memory back that was shared, once the engines have let go of it."""
    torch.cuda.ipc_collect()


def merge_ipc(shared: list[dict[str, Any]]) -> dict[str, Any]:
    """One update for all engines from what each rank's `share_ipc` returned: every GPU finds its own handles."""
    by_tensor = zip(*(update["ipc_handles"] for update in shared), strict=True)
    return shared[0] | {"ipc_handles": [{gpu: h for part in parts for gpu, h in part.items()} for parts in by_tensor]}
