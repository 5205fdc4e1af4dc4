"""A small network with fixed weights, and a loss function for it."""

import torch


class Network(torch.nn.Module):
    """Three layers with a buffer; the middle one is larger than a bucket."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        sizes = [(6, 30), (30, 30), (30, 4)]
        self.layers = torch.nn.ModuleList(torch.nn.Linear(*size) for size in sizes)
        self.register_buffer("scale", torch.full((6,), 0.5))
        self.to(dtype)

    @property
    def dtype(self):
        return self.scale.dtype

    def forward(self, x):
        x = x * self.scale
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def loss(network, seed):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    return network(x.to(next(network.parameters()).dtype)).float().square().sum()
