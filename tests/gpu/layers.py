"""A network of products alone, whose gradients come out the same to the last bit, and DeepSpeed's engine for it."""

import tempfile
from pathlib import Path

import torch

from rlfuse.config.schema import ActorConfig, OptimConfig
from rlfuse.engines.deepspeed.deepspeed_model import DeepSpeedModel
from rlfuse.engines.deepspeed.optimizer import trainable


class Layers(torch.nn.Module):
    """Four linear layers; under ZeRO each rank's share of them is what there is to move."""

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
    """`Layers` under AdamW and ZeRO, on the device."""
    settings = ActorConfig(zero_stage=stage, grad_clip=0.0, **actor)
    model = Layers(width, dtype)
    return movable(trainable(model if stage == 3 else model.to(device), settings, OptimConfig(lr=1e-2), device))


def movable(engine):
    """An engine that moves as the `DeepSpeedModel` around it does."""
    model = DeepSpeedModel(engine, 1)
    engine.tensors, engine.step_tensors = model.tensors, model.step_tensors
    return engine


def inputs(device, width, seed, dtype):
    """A micro-batch of eight rows; drawn on the CPU, so the same everywhere."""
    return torch.randn(8, width, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def accumulate(engine, device, width, seeds):
    """Add the gradients of these micro-batches' summed losses."""
    for seed in seeds:
        engine.backward(loss(engine, inputs(device, width, seed, engine.module.dtype)), scale_wrt_gas=False)


def loss(network, x):
    """A sum over the micro-batch."""
    return network(x).float().square().sum()


def saved(engine):
    """{file and place in it: tensor} of the checkpoint that DeepSpeed writes of the engine."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder, tag="deepspeed", save_latest=False)
        for file in sorted(Path(folder).rglob("*.pt")):
            _collect(torch.load(file, map_location="cpu", weights_only=False), file.name, found)
    return found


def warm_up(device, width, dtype):
    """Let cuBLAS have its workspaces, of both passes, before anyone counts bytes."""
    loss(Layers(width, dtype).to(device), inputs(device, width, 0, dtype)).backward()


def _collect(value, name, found):
    if torch.is_tensor(value):
        found[name] = value.clone()
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            _collect(each, f"{name}/{key}", found)


def difference(ours, theirs):
    """Names under which two collections of tensors differ in a bit, or that only one of them has."""
    both = ours.keys() & theirs.keys()
    return sorted(ours.keys() ^ theirs.keys()) + sorted(n for n in both if not torch.equal(ours[n], theirs[n]))
