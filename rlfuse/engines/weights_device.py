"""The trainer's end of the device weight transfers: vLLM's own `nccl` and `ipc` backends.

Role: functions that a trainer rank calls on its own device with one bucket of whole tensors, under checkpoint names;
`weights.WeightPush` calls the ranks and the engines in the right order.

    nccl   rank 0 --broadcast, packed--> every engine worker       open_nccl once, then describe + send_nccl per bucket
    ipc    each rank --CUDA IPC handles--> workers on the same GPU  share_ipc per bucket, kept until all have loaded it

Invariants: both ends see the same names, dtypes and shapes in the same order (`describe` is sent to the engines before
the tensors); tensors given to `share_ipc` live until the engines have loaded them.
Waits: `open_nccl` for all engines to join, `send_nccl` for all engines to receive. Both block: call them in the rank's
own thread, while the engines are in `join_transfer` and `receive`.
State: written against the sources of vLLM 0.32 and not run: it needs GPUs. Shared memory (`weights`) is what tests run.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch


def nccl_join(host: str, port: int, rank_offset: int, world_size: int) -> dict[str, Any]:
    """What an engine needs to join; its workers take the ranks from `rank_offset`, the trainer's rank 0 has 0."""
    rendezvous = {"master_address": host, "master_port": port}
    return rendezvous | {"rank_offset": rank_offset, "world_size": world_size, "packed": True}


def open_nccl(host: str, port: int, world_size: int) -> Any:
    """The communicator of rank 0 with every engine worker; returns when all `world_size` processes have joined."""
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    return trainer_init({"master_address": host, "master_port": port, "world_size": world_size})


def describe(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Names, dtypes and shapes of a bucket, in the order in which `send_nccl` sends it."""
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def send_nccl(communicator: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Broadcast a bucket from rank 0; returns when its last byte has left."""
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

    # Buffer sizes are vLLM's defaults on both ends: packed chunks must be cut alike.
    packed_nccl_broadcast_producer(iter(tensors.items()), communicator, src=0, post_iter_func=itemgetter(1))


def share_ipc(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """A bucket's handles for engines on this GPU, and the tensors to keep until those have loaded it."""
    from torch.multiprocessing.reductions import reduce_tensor

    kept = [tensor.detach().contiguous() for tensor in tensors.values()]
    gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    handles = [{gpu: reduce_tensor(tensor)[1]} for tensor in kept]
    torch.cuda.synchronize()  # engines read the memory as it is, not after this process's stream
    return describe(tensors) | {"ipc_handles": handles}, kept


def merge_ipc(shared: list[dict[str, Any]]) -> dict[str, Any]:
    """One update for all engines from what each rank's `share_ipc` returned: every GPU finds its own handles."""
    by_tensor = zip(*(update["ipc_handles"] for update in shared), strict=True)
    return shared[0] | {"ipc_handles": [{gpu: h for part in parts for gpu, h in part.items()} for parts in by_tensor]}
