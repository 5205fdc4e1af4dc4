"""Gradients of 256 micro-batches in bfloat16 add up as they do in float32, under every ZeRO stage.

(4) of README.md. Needs DeepSpeed. The sum is derived from Adam's first moment, a tenth of it after one step.
"""

import pytest

pytest.importorskip("deepspeed")
import torch
from layers import Layers, accumulate, engine, inputs, loss, saved
from processes import in_ranks

from rlfuse.engines.deepspeed.optimizer import take_step

WIDTH, COUNT = {"cuda": 512, "cpu": 16}, 256


def _moment(device, stage):
    """Return the flattened sum of gradients in the engine's optimizer."""
    trained = engine(device, WIDTH[device], stage, torch.bfloat16)
    accumulate(trained, device, WIDTH[device], range(COUNT))
    take_step(trained, 1.0, 1)
    found = saved(trained)
    moments = [tensor.flatten().float() for name, tensor in found.items() if name.endswith("/exp_avg")]
    return (torch.cat(moments) / 0.1).numpy()


def _sums(device):
    """Return the gradients of the same micro-batches, summed in float32 and in bfloat16."""
    model = Layers(WIDTH[device], torch.bfloat16).to(device)
    sums = [[torch.zeros_like(p, dtype=dtype) for p in model.parameters()] for dtype in (torch.float32, torch.bfloat16)]
    for seed in range(COUNT):
        loss(model, inputs(device, WIDTH[device], seed, torch.bfloat16)).backward()
        for total in sums:
            for added, parameter in zip(total, model.parameters(), strict=True):
                added += parameter.grad
        model.zero_grad()
    return [torch.cat([each.flatten().float() for each in total]).cpu() for total in sums]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bfloat16_gradients_add_up_in_float32(device, stage):
    [found] = in_ranks(1, _moment, device, stage)
    exact, rounded = _sums(device)
    found = torch.from_numpy(found)[: len(exact)]
    difference, without = (float((each - exact).norm() / exact.norm()) for each in (found, rounded))
    print(f"ZeRO {stage}: {COUNT} micro-batches are summed to {difference:.1e}; in bfloat16 it would be {without:.1e}")
    assert difference < 1e-3
