"""A network of matrix products, whose gradients are bitwise reproducible, and a DeepSpeed engine for it."""

import tempfile
from pathlib import Path

import torch

from rlfuse.config.schema import ActorConfig, OptimConfig
from rlfuse.engines.deepspeed.deepspeed_model import DeepSpeedModel
from rlfuse.engines.deepspeed.optimizer import trainable


class Layers(torch.nn.Module):
    """Four linear layers, sharded over ranks under ZeRO."""

    def __init__(self, width, dtype, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(4))
        self.to(dtype)

    @property
    def dtype(self):
        return self.layers[0].weight.dtype

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def engine(device, width, stage, dtype, **actor):
    """Return `Layers` with AdamW and ZeRO on the device."""
    settings = ActorConfig(zero_stage=stage, grad_clip=0.0, **actor)
    model = Layers(width, dtype)
    return movable(trainable(model if stage == 3 else model.to(device), settings, OptimConfig(lr=1e-2), device))


def movable(engine):
    """Make the engine movable as `DeepSpeedModel` does, and return it."""
    model = DeepSpeedModel(engine, 1)
    engine.tensors, engine.step_tensors = model.tensors, model.step_tensors
    return engine


def inputs(device, width, seed, dtype):
    """Return a micro-batch of eight rows, drawn on the CPU so that it is the same on every device."""
    return torch.randn(8, width, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def accumulate(engine, device, width, seeds):
    """Accumulate the gradients of one micro-batch per seed."""
    for seed in seeds:
        engine.backward(loss(engine, inputs(device, width, seed, engine.module.dtype)), scale_wrt_gas=False)


def loss(network, x):
    """Return the loss summed over the micro-batch."""
    return network(x).float().square().sum()


def saved(engine):
    """Save the engine with DeepSpeed; return {file and key: tensor} of the checkpoint."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder, tag="deepspeed", save_latest=False)
        for file in sorted(Path(folder).rglob("*.pt")):
            _collect(torch.load(file, map_location="cpu", weights_only=False), file.name, found)
    return found


def warm_up(device, width, dtype):
    """Let cuBLAS allocate its workspaces for both passes before bytes are counted."""
    loss(Layers(width, dtype).to(device), inputs(device, width, 0, dtype)).backward()


def _collect(value, name, found):
    if torch.is_tensor(value):
        found[name] = value.clone()
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            _collect(each, f"{name}/{key}", found)


def difference(ours, theirs):
    """Return the names whose tensors are not bitwise equal, or that only one collection has."""
    both = ours.keys() & theirs.keys()
    return sorted(ours.keys() ^ theirs.keys()) + sorted(n for n in both if not torch.equal(ours[n], theirs[n]))
