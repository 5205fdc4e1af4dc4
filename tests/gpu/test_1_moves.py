"""Models are moved to the host and back: released bytes, and bitwise equal states and further training.

(1) of README.md. Needs DeepSpeed.
"""

from contextlib import nullcontext

import pytest

pytest.importorskip("deepspeed")
import torch
import torch.distributed as dist
from layers import Layers, accumulate, difference, engine, inputs, loss, movable, saved, warm_up
from processes import allocated, in_ranks
from small import make_rows, policy_folder, settings

from rlfuse.config.schema import ActorConfig
from rlfuse.engines.deepspeed.optimizer import freeze, take_step
from rlfuse.engines.trainer import activation_offloading
from rlfuse.engines.trainer.activation_offloading import ActivationOffloading, Budget
from rlfuse.engines.trainer.activation_placement import Place, TierCapacity
from rlfuse.engines.trainer.activation_stores import PIECE_BYTES, Disk, HostMemory
from rlfuse.engines.trainer.model_inputs import collate
from rlfuse.engines.trainer.models import load_policy, response_logits
from rlfuse.engines.trainer.offloading import fetch_optimizer, offloaded_bytes, on_device, to_device, to_host

WIDTH = {"cuda": 2048, "cpu": 16}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _moved(device, stage, dtype):
    """Move one engine as a slot's rank is moved between steps, and compare it with a twin that stays on the device."""
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
    to_host(mover)  # with accumulated gradients
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


def _late(device, stage, dtype, residency):
    """Move one engine's optimizer after its weights, or for steps only, and compare it with a twin that stays."""
    width, dtype = WIDTH[device], DTYPES[dtype]
    warm_up(device, width, dtype)
    before, peaks = allocated(device), []
    mover, twin = (engine(device, width, stage, dtype) for _ in range(2))
    for count in range(4):
        to_host(mover)
        to_device(mover, optimizer=False)
        weights, away = allocated(device) - before, offloaded_bytes(mover)
        for each in (mover, twin):
            accumulate(each, device, width, range(3 * count, 3 * count + 2))
        if residency == "forecast":
            fetch_optimizer(mover, 60.0)
        for each in (mover, twin):
            accumulate(each, device, width, range(3 * count + 2, 3 * count + 3))
        to_device(mover)
        peaks.append((weights, away, allocated(device) - before))
        norms = [take_step(each, 3.0, dist.get_world_size()) for each in (mover, twin)]
        assert norms[0] == norms[1] > 0
        if residency == "step":
            to_host(mover, optimizer_alone=True)
    return {"bytes": peaks, "trained differently": difference(saved(twin), _saved_from_host(mover))}


def _saved_from_host(mover):
    with on_device(mover):
        return saved(mover)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("residency", ["forecast", "step"])
def test_an_optimizer_can_be_moved_after_the_weights(device, stage, residency):
    """On CPUs the optimizer is sharded over two ranks."""
    for facts in in_ranks(1 if device == "cuda" else 2, _late, device, stage, "bfloat16", residency):
        print(f"ZeRO {stage}, {residency}: bytes with weights, of the optimizer, with both: {facts['bytes']}")
        assert facts["trained differently"] == []
        assert all(away > 0 for _, away, _ in facts["bytes"])
        if device == "cuda":
            assert all(both - weights >= 0.95 * away for weights, away, both in facts["bytes"])


def _frozen(device, stage, dtype):
    width, dtype = WIDTH[device], DTYPES[dtype]
    warm_up(device, width, dtype)
    before = allocated(device)
    model = movable(freeze(Layers(width, dtype), ActorConfig(zero_stage=stage), device))
    x = inputs(device, width, 0, dtype)
    with torch.no_grad():
        first, there = float(loss(model, x)), allocated(device) - before
        to_host(model)
        away = allocated(device) - before
        to_device(model)
        return {"losses": (first, float(loss(model, x))), "bytes": (there, away, allocated(device) - before)}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_frozen_model_is_moved_to_the_host_and_back(device, stage):
    [facts] = in_ranks(1, _frozen, device, stage, "bfloat16")
    there, away, back = facts["bytes"]
    print(f"reference, ZeRO {stage}: bytes {there} on the device, {away} away, {back} back")
    assert facts["losses"][0] == facts["losses"][1] > 0
    if device == "cuda":
        assert away <= 0.05 * there and back == pytest.approx(there, rel=0.02)


@pytest.mark.parametrize("place", ["host", "disk"])
def test_activations_are_offloaded(device, tmp_path, place):
    cuda = device == "cuda"
    rows, hidden = (make_rows(16, longest=400), 1024) if cuda else (make_rows(6), 32)  # about 1 GB per layer on a GPU
    model = load_policy(policy_folder(tmp_path, hidden, layers=6), settings(tmp_path).model).to(device).train()
    batch, room = collate(rows, True, device), (2**34 if cuda else 256 * PIECE_BYTES)
    store = HostMemory(room, cuda) if place == "host" else Disk(room, cuda, tmp_path)
    budget = Budget(0, {Place(place): TierCapacity(room, 1e15)}, {Place(place): store})
    offloading = ActivationOffloading(model, budget, 1e12, recompute_all=False)
    found, smallest = [], activation_offloading.MIN_STORAGE_BYTES
    activation_offloading.MIN_STORAGE_BYTES = 1
    try:
        for _ in range(3):  # recomputed, as nothing is measured yet; offloaded; offloaded to reused memory
            found.append(_gradients(model, batch, offloading))
    finally:
        activation_offloading.MIN_STORAGE_BYTES = smallest
    assert offloading.places.layers == (Place(place),) * 5 + (Place.DEVICE,)
    expected, peak = _gradients(model, batch)
    print(f"bytes at most: {peak} where all stays, {[most for _, most in found]} run again, away, away")
    for gradients, most in found:
        for name, gradient in expected.items():  # recomputation on a GPU may sum in another order
            assert (gradients[name] - gradient).norm() <= (1e-4 if cuda else 0.0) * gradient.norm(), name
        assert most < 0.7 * peak or not cuda
    assert store.has_room(room // PIECE_BYTES * PIECE_BYTES)


def _gradients(model, batch, offloading=None):
    """Return the gradient of each parameter, and the peak memory on a GPU in bytes."""
    model.zero_grad()
    if batch.predict.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    with offloading.offloaded(batch, None) if offloading else nullcontext():
        total = response_logits(model, batch).logsumexp(-1).sum()
    total.backward()
    most = torch.cuda.max_memory_allocated() if batch.predict.is_cuda else 0
    return {name: each.grad.clone() for name, each in model.named_parameters()}, most
