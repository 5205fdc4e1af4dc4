"""CUDA graphs emulated on CPUs: a recorded pass is a list of operations on fixed tensors, which a replay runs again.

Role: replaces `cuda_graphs.CudaRecording`. As under CUDA, waiting for the device during a recording raises an error.
Graphs that share a pool overwrite each other's results, so that a replay fills the results of all others with NaN.
"""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero", "equal"}


def is_launched(operation):
    """Return whether an operation launches a kernel; views and empty tensors launch none."""
    views = [each.alias_info is not None and not each.alias_info.is_write for each in operation._schema.returns]
    return not any(views) and "empty" not in operation.overloadpacket.__name__


def tensors(tree):
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


class Count(TorchDispatchMode):
    """Count launched operations, and reject those that wait for the device."""

    def __init__(self, may_wait=False):
        super().__init__()
        self.operations, self.may_wait = 0, may_wait

    def __torch_dispatch__(self, operation, types, args=(), named=None):
        if not self.may_wait and operation.overloadpacket.__name__ in WAITS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {operation}")
        self.operations += is_launched(operation)
        return operation(*args, **named or {})


class Graph(Count):
    replays = 0

    def __init__(self, pool):
        super().__init__()
        self.calls, self.pool = [], pool
        pool.append(self)

    def __torch_dispatch__(self, operation, types, args=(), named=None):
        result = super().__torch_dispatch__(operation, types, args, named)
        given = {each.untyped_storage().data_ptr() for each in tensors((args, named))}
        fresh = [each.untyped_storage().data_ptr() not in given for each in tensors(result)]
        self.calls.append((operation, args, named or {}, tensors(result), fresh))
        return result

    def results(self):
        return [each for *_, found, fresh in self.calls for each, new in zip(found, fresh, strict=True) if new]

    def replay(self):
        Graph.replays += 1
        with torch.no_grad(), _disable_current_modes():
            self._replay()

    def _replay(self):
        read = {each.untyped_storage().data_ptr() for _, *given, _, _ in self.calls for each in tensors(given)}
        for other in self.pool:
            for each in other.results() if other is not self else ():
                if each.is_floating_point() and each.untyped_storage().data_ptr() not in read:
                    each.detach().fill_(torch.nan)
        for operation, args, named, kept, fresh in self.calls:
            found = tensors(operation(*args, **named))
            for old, new, is_fresh in zip(kept, found, fresh, strict=True):
                if is_fresh:
                    old.detach().copy_(new)


class EmulatedRecording:
    def __init__(self):
        self.graphs = []

    @contextmanager
    def warm_up(self):
        with Count():
            yield

    @contextmanager
    def capture(self):
        with Graph(self.graphs) as graph:
            yield graph
