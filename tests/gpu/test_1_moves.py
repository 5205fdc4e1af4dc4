"""Models leave the device and come back: bytes that are free in between, states and training that don't notice.

(1) of README.md. Needs DeepSpeed.
"""

import pytest

pytest.importorskip("deepspeed")
import torch
from layers import Layers, accumulate, difference, engine, inputs, loss, saved, warm_up
from processes import allocated, in_ranks

from rlfuse.config.schema import ActorConfig
from rlfuse.engines.trainer.offloading import to_device, to_host
from rlfuse.engines.trainer.optimizer import freeze, take_step

WIDTH = {"cuda": 2048, "cpu": 16}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _moved(device, stage, dtype):
    """One engine goes through what a slot's rank does between steps, its twin stays where it is."""
    width, dtype = WIDTH[device], DTYPES[dtype]
    warm_up(device, width, dtype)
    before = allocated(device)
    mover = engine(device, width, stage, dtype)
    accumulate(mover, device, width, range(3))
    take_step(mover, 3.0, 1)
    facts = {"parameters": sum(getattr(p, "ds_numel", p.numel()) for p in mover.module.parameters())}
    there = saved(mover)
    facts["on device"] = allocated(device) - before
    to_host(mover)
    facts["on host"] = allocated(device) - before
    to_device(mover)
    facts["back"] = allocated(device) - before
    facts["saved differently"] = difference(there, saved(mover))
    facts["tensors saved"] = len(there)

    twin = engine(device, width, stage, dtype)
    accumulate(twin, device, width, range(3))
    take_step(twin, 3.0, 1)
    for each in (mover, twin):
        accumulate(each, device, width, range(3, 5))
    to_host(mover)  # with gradients that wait for their step
    to_device(mover)
    for each in (mover, twin):
        accumulate(each, device, width, range(5, 6))
    facts["norms"] = [take_step(each, 3.0, 1) for each in (mover, twin)]
    facts["trained differently"] = difference(saved(mover), saved(twin))
    return facts


@pytest.mark.parametrize("dtype, stage", [*(("bfloat16", stage) for stage in range(4)), ("float32", 0), ("float32", 3)])
def test_a_trained_model_leaves_the_device_and_comes_back(device, stage, dtype):
    [facts] = in_ranks(1, _moved, device, stage, dtype)
    each = {place: facts[place] / facts["parameters"] for place in ("on device", "on host", "back")}
    print(f"ZeRO {stage}, {dtype}: bytes a parameter {each}")
    assert facts["tensors saved"] > 8
    assert facts["saved differently"] == facts["trained differently"] == []
    assert facts["norms"][0] == facts["norms"][1] > 0
    if device == "cuda":
        assert each["back"] == pytest.approx(each["on device"], rel=0.01)
        assert each["on host"] <= 0.2


def _frozen(device, stage, dtype):
    width, dtype = WIDTH[device], DTYPES[dtype]
    warm_up(device, width, dtype)
    before = allocated(device)
    model = freeze(Layers(width, dtype), ActorConfig(zero_stage=stage), device)
    x = inputs(device, width, 0, dtype)
    with torch.no_grad():
        first, there = float(loss(model, x)), allocated(device) - before
        to_host(model)
        away = allocated(device) - before
        to_device(model)
        return {"losses": (first, float(loss(model, x))), "bytes": (there, away, allocated(device) - before)}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_frozen_model_leaves_the_device_and_comes_back(device, stage):
    [facts] = in_ranks(1, _frozen, device, stage, "bfloat16")
    there, away, back = facts["bytes"]
    print(f"reference, ZeRO {stage}: bytes {there} on the device, {away} away, {back} back")
    assert facts["losses"][0] == facts["losses"][1] > 0
    if device == "cuda":
        assert away <= 0.05 * there and back == pytest.approx(there, rel=0.02)
