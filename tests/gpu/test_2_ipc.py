"""Weights are passed to another process on the same GPU by CUDA IPC, and their memory is released.

(2) of README.md. Needs torch only. On a CPU the same messages carry tensors in shared memory.
"""

import pytest
import torch
from processes import allocated, connected, received

from rlfuse.engines.weights.cuda_ipc import collect, pack, share_ipc
from rlfuse.errors import EngineError

BUCKET = 64 << 20


def _weights(device, scale):
    """Return a bucket of tensors with distinct values, one of them a view."""
    rows = (BUCKET if device == "cuda" else 1 << 16) // 4 // 256
    whole = torch.arange(rows * 256, device=device).remainder_(8191).view(rows, 256).mul(scale)
    return {
        "model.embed_tokens.weight": whole.to(torch.bfloat16),
        "model.layers.0.mlp.up_proj.weight": whole[: rows // 2].float().t(),
        "model.norm.weight": whole[0, 3:11].float(),
    }


def _share(weights, device):
    if device == "cuda":
        return share_ipc(weights)
    update, buffer = pack(weights)
    return update | {"ipc_handles": {device: buffer.share_memory_()}}, buffer


def _opened(update, device):
    """Open an update as vLLM's receiver does (distributed/weight_transfer/packed_tensor.py, packed_ipc_consumer)."""
    buffer = update["ipc_handles"].get(device)
    if device == "cuda":
        arguments = list(update["ipc_handles"][str(torch.cuda.get_device_properties(0).uuid)])
        arguments[6] = 0  # device index of the receiver
        buffer = torch.multiprocessing.reductions.rebuild_cuda_tensor(*arguments)
    described = (update[key] for key in ("names", "dtype_names", "shapes"))
    parts = zip(*described, buffer.split(update["tensor_sizes"]), strict=True)
    return {name: part.view(getattr(torch, dtype)).view(shape).clone() for name, dtype, shape, part in parts}


def _receiver(connection, device):
    """Answer each message with the names of missing or wrong tensors, until None arrives."""
    while (message := received(connection)) is not None:
        scale, update = message
        opened, expected = _opened(update, device), _weights(device, scale)
        facts = zip(update["names"], update["dtype_names"], update["shapes"], strict=True)
        wrong = [
            name
            for name, dtype, shape in facts
            if (str(opened[name].dtype), list(opened[name].shape)) != (f"torch.{dtype}", shape)
            or not torch.equal(opened[name], expected[name])
        ]
        wrong += sorted(expected.keys() - opened.keys())
        del opened
        connection.send(wrong)


def test_weights_arrive_in_another_process_and_their_memory_comes_back(device):
    free = allocated(device)
    with connected(_receiver, device) as other:
        for scale in (1, 3):
            update, kept = _share(_weights(device, scale), device)
            other.send((scale, update))
            assert received(other) == []
            shared = allocated(device) - free
            del kept
            if device == "cuda":
                collect()
            print(f"push {scale}: {shared} bytes shared, {allocated(device) - free} after it")
            assert allocated(device) - free <= shared // 100
        other.send(None)


def test_tensors_of_host_memory_are_refused(device):
    """Host memory has no IPC handles; weights are pushed while the trainer is on the device."""
    weights = _weights(device, 1)
    name = next(reversed(weights))
    with pytest.raises(EngineError, match=f"host memory .{name if device == 'cuda' else ''}"):
        share_ipc(weights | {name: weights[name].cpu()})
