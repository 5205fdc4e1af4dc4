"""Activation offloading and recomputation: placement per layer, and gradients identical to plain training."""

import gc
import math
import os
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from test_moves import group  # noqa: F401
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rlfuse.cluster.host_memory import free_bytes
from rlfuse.config.checks import check
from rlfuse.config.facts import Facts
from rlfuse.config.schema import Config, ModelConfig, OptimConfig
from rlfuse.engines.deepspeed.deepspeed_model import DeepSpeedModel
from rlfuse.engines.deepspeed.optimizer import take_step, trainable
from rlfuse.engines.trainer import activation_offloading
from rlfuse.engines.trainer.activation_offloading import ActivationOffloading, Budget, decoder_layers
from rlfuse.engines.trainer.activation_placement import Layer, Place, TierCapacity, place_activations
from rlfuse.engines.trainer.activation_stores import PIECE_BYTES, Disk, HostMemory, measure_speed
from rlfuse.engines.trainer.model_inputs import collate
from rlfuse.engines.trainer.models import prepare_for_training, response_logits
from rlfuse.engines.trainer.trainer_rank import TrainerRank
from rlfuse.errors import EngineError
from rlfuse.observe.metrics import memory_metrics
from rlfuse.samples import MicroBatch, Row

DEVICE, HOST, DISK, RECOMPUTE = Place
SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
)  # fmt: skip
FAMILIES = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, SMALL),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, SMALL | {"sliding_window": 16}),
    "experts": (Qwen3MoeForCausalLM, Qwen3MoeConfig, SMALL | dict(num_experts=4, num_experts_per_tok=2)),
    "bloom": (BloomForCausalLM, BloomConfig, dict(vocab_size=64, hidden_size=32, n_layer=4, n_head=4)),
}
FAST = 1e12
ROOM = 64 << 20


@pytest.fixture(autouse=True)
def every_storage_is_worth_a_copy(monkeypatch):
    monkeypatch.setattr(activation_offloading, "MIN_STORAGE_BYTES", 1)


def layer(activations=10.0, inputs=1.0, seconds=1.0):
    return Layer(activations, inputs, seconds)


def test_short_rows_stay_on_the_device_and_long_rows_offload_the_first_layers():
    tiers = {DISK: TierCapacity(100, FAST)}
    assert place_activations(4, layer(), 40, tiers).layers == (DEVICE,) * 4
    assert place_activations(4, layer(), 39, tiers).layers == (DISK, DEVICE, DEVICE, DEVICE)
    assert place_activations(4, layer(), 20, tiers).layers == (DISK, DISK, DEVICE, DEVICE)
    assert place_activations(4, layer(), 0, {}).layers == (RECOMPUTE, RECOMPUTE, RECOMPUTE, DEVICE)
    assert place_activations(4, layer(), 0, tiers, recompute_all=True).layers == (RECOMPUTE,) * 4
    assert place_activations(4, layer(math.inf), 1e30, tiers).layers == (RECOMPUTE, RECOMPUTE, RECOMPUTE, DEVICE)


def test_layers_are_copied_as_far_as_compute_hides_the_copy():
    slow = layer(activations=100.0, seconds=1.0)
    assert place_activations(9, slow, 100, {HOST: TierCapacity(1e9, 25.0)}).layers == (
        RECOMPUTE,
        RECOMPUTE,
        RECOMPUTE,
        HOST,
    ) * 2 + (DEVICE,)
    both = place_activations(9, slow, 100, {HOST: TierCapacity(1e9, 50.0), DISK: TierCapacity(1e9, 25.0)}).layers
    assert both == (RECOMPUTE, HOST, RECOMPUTE, HOST, DISK, HOST, RECOMPUTE, HOST, DEVICE)
    assert place_activations(3, slow, 100, {HOST: TierCapacity(1e9, 70.0)}).layers == (
        HOST,
        HOST,
        DEVICE,
    )  # the copy finishes less than one layer late
    # 4x the tokens: 4x the bytes, and more than 4x the compute because of attention.
    assert place_activations(9, layer(400.0, 4.0, 16.0), 400, {HOST: TierCapacity(1e9, 25.0)}).layers == (HOST,) * 8 + (
        DEVICE,
    )


def test_inputs_of_recomputed_layers_are_offloaded_if_they_do_not_fit():
    assert place_activations(5, layer(), 14, {}).inputs is DEVICE
    assert place_activations(5, layer(), 13, {HOST: TierCapacity(4, FAST)}).inputs is HOST
    assert place_activations(5, layer(), 13, {HOST: TierCapacity(3, FAST), DISK: TierCapacity(4, FAST)}).inputs is DISK
    assert place_activations(5, layer(), 5, {HOST: TierCapacity(9, FAST)}, recompute_all=True).inputs is DEVICE


def test_no_tier_exceeds_its_capacity():
    draw = np.random.default_rng(0)
    for _ in range(300):
        size, count = float(draw.integers(1, 50)), int(draw.integers(1, 20))
        tiers = {
            tier: TierCapacity(float(draw.integers(0, 300)), float(draw.choice([1, 10, FAST]))) for tier in (HOST, DISK)
        }
        device = float(draw.integers(0, 400))
        found = place_activations(count, layer(size, size / 10), device, tiers)
        for tier, room in tiers.items():
            inputs = found.layers.count(RECOMPUTE) * size / 10 if found.inputs is tier else 0
            assert found.layers.count(tier) * size + inputs <= room.bytes
        assert len(found.layers) == count and found.layers[-1] is DEVICE
        assert found.layers.count(DEVICE) * size <= max(device, size)


def model_of(family, seed=0):
    kind, config, sizes = FAMILIES[family]
    torch.manual_seed(seed)
    return prepare_for_training(kind(config(**sizes)), ModelConfig(path="", dtype="float32")).train()


def batch_of(model, *lengths, seed=0):
    draw = np.random.default_rng(seed)
    ids = [draw.integers(3, 60, each).astype(np.int32) for each in lengths]
    return collate([Row(each[:3], each[3:]) for each in ids], packed=False)


def gradients(model, batch, offloading=None):
    """Return the gradient of each parameter."""
    model.zero_grad()
    if offloading is None:
        response_logits(model, batch).logsumexp(-1).sum().backward()
    else:
        with offloading.offloaded(batch, None):
            loss = response_logits(model, batch).logsumexp(-1).sum()
        loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters()}


def offloaded(model, tmp_path, device=0.0, host=0, disk=0, recompute_all=False):
    """Return (offloading of `model`, its stores); capacities are in bytes."""
    stores = {HOST: HostMemory(host, False)} if host else {}
    stores |= {DISK: Disk(disk, False, tmp_path)} if disk else {}
    tiers = {HOST: TierCapacity(host, FAST), DISK: TierCapacity(disk, FAST)}
    return ActivationOffloading(model, Budget(device, tiers, stores), 1e9, recompute_all), stores


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_bitwise_equal_to_those_without_offloading(tmp_path, family):
    model = model_of(family)
    batches = [batch_of(model, 20, 30, seed=0), batch_of(model, 60, 50, 9, seed=1)]
    plain = [gradients(model, each) for each in batches]
    overflowing = {"host": 40 * PIECE_BYTES, "disk": ROOM}
    for rooms in ({"host": ROOM}, {"disk": ROOM}, {}, {"host": ROOM, "recompute_all": True}, overflowing):
        offloading, stores = offloaded(model, tmp_path, **rooms)
        for _ in range(2):
            assert all(same(gradients(model, batches[i], offloading), plain[i]) for i in range(2))
            assert not any(each.gradient_checkpointing for each in decoder_layers(model)) or "recompute_all" in rooms
        moved = set(offloading.places.layers) - {DEVICE}
        assert moved == (
            {RECOMPUTE} if not rooms or "recompute_all" in rooms else {HOST} if "host" in rooms else {DISK}
        )
        gc.collect()
        assert all(store.has_room(rooms[place]) for place, store in stores.items())
        assert DISK not in stores or stores[DISK].written > 0 == os.fstat(stores[DISK]._file.fileno()).st_size
    assert same(gradients(model, batches[0]), plain[0])  # the model has no hooks left


def test_each_storage_is_offloaded_once_however_many_views_are_saved(tmp_path):
    """Count shared storages once, such as the rotary embeddings of neighbouring layers."""
    model = model_of("qwen2")
    batch, (offloading, stores) = batch_of(model, 60, 50), offloaded(model, tmp_path, disk=ROOM)
    gradients(model, batch, offloading)  # measures the activations of one layer
    before = stores[DISK].written
    gradients(model, batch, offloading)
    measured = offloading._activations * batch.inputs["input_ids"].numel()
    assert 2.5 * measured < stores[DISK].written - before <= 3 * measured


def test_short_rows_run_without_hooks(tmp_path, monkeypatch):
    model = model_of("qwen2")
    offloading, _ = offloaded(model, tmp_path, device=ROOM, disk=ROOM)
    gradients(model, batch_of(model, 60), offloading)
    monkeypatch.setattr(activation_offloading, "saved_tensors_hooks", lambda *hooks: 1 / 0)
    gradients(model, batch_of(model, 50), offloading)
    with pytest.raises(ZeroDivisionError):  # a longer batch updates the measurement
        gradients(model, batch_of(model, 70), offloading)


@pytest.mark.slow
def test_an_aborted_pass_frees_its_memory(tmp_path):
    model = model_of("qwen2")
    batch = batch_of(model, 60)
    offloading, stores = offloaded(model, tmp_path, host=64 * PIECE_BYTES, disk=ROOM)
    gradients(model, batch, offloading)
    with offloading.offloaded(batch, None):
        loss = response_logits(model, batch).sum()
    assert not stores[HOST].has_room(64 * PIECE_BYTES)
    del loss
    with pytest.raises(ZeroDivisionError), offloading.offloaded(batch, None):
        response_logits(model, batch)
        raise ZeroDivisionError
    gc.collect()
    assert stores[HOST].has_room(64 * PIECE_BYTES) and stores[DISK].has_room(ROOM)
    expected = gradients(model, batch)
    assert same(gradients(model, batch, offloading), expected)


def test_a_full_disk_is_reported_with_bytes_and_the_setting_to_change(tmp_path, monkeypatch):
    model = model_of("qwen2")
    offloading, _ = offloaded(model, tmp_path, disk=ROOM)
    gradients(model, batch_of(model, 60), offloading)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(EngineError, match=r"bytes of activations.*No space left.*are free.*model.activation_disk_mb"):
        gradients(model, batch_of(model, 60), offloading)


def test_pinned_memory_stays_within_its_limit_and_is_reused():
    store, data = HostMemory(5 * PIECE_BYTES, False), torch.arange(3 * PIECE_BYTES, dtype=torch.int64).to(torch.uint8)
    for _ in range(3):
        pieces, back = store.write(data), torch.empty_like(data)
        assert store.has_room(2 * PIECE_BYTES) and not store.has_room(2 * PIECE_BYTES + 1)
        store.read(pieces, back)()
        store.free(pieces)
        assert torch.equal(back, data) and store.has_room(5 * PIECE_BYTES) and len(store._free) <= 5
    assert 0 < free_bytes() <= psutil.virtual_memory().total


def test_the_disk_store_uses_an_unlinked_file(tmp_path):
    disk = Disk(ROOM, False, tmp_path / "runs")
    key = disk.write(torch.arange(100, dtype=torch.uint8))
    disk.settle()
    back = torch.empty(100, dtype=torch.uint8)
    disk.read(key, back)()
    assert torch.equal(back, torch.arange(100, dtype=torch.uint8)) and not list((tmp_path / "runs").iterdir())


def test_invalid_combinations_are_reported_at_startup():
    config = Config()
    config.model.activation_host_mb, config.training.pipeline_parallel_size = 4, 2
    assert not [each for each in check(config, Facts(cuda=False)) if "activation" in each]
    config.model.enable_activation_offload = True
    found = [each for each in check(config, Facts(cuda=False)) if "activation" in each]
    assert ["pipeline_parallel_size=2" in each for each in found] == [True, False] and "CPU hosts" in found[1]
    assert len([each for each in check(config, Facts(cuda=True)) if "activation" in each]) == 1
    config.training.pipeline_parallel_size, config.training.tensor_model_parallel_size = 1, 2
    [found] = [each for each in check(config, Facts(cuda=True)) if "activation" in each]
    assert "which layers it recomputes" in found


def rank_of(stage, tmp_path, dtype="float32", **model):
    """Return a rank with a small actor, with activation offloading according to `model`."""
    config = Config()
    config.trainer.default_local_dir, config.actor.zero_stage = str(tmp_path), stage
    for key, value in model.items():
        setattr(config.model, key, value)
    rank = TrainerRank(config, 0, 1, "cpu")
    policy = model_of("qwen2").to(getattr(torch, dtype))
    rank.engines = {"actor": DeepSpeedModel(trainable(policy, config.actor, OptimConfig(lr=1e-2), "cpu"), 1)}
    rank.tower, rank.sums, rank.ropes, rank.exporters = None, {}, {"actor": None}, {"actor": None}
    rank.packed, rank.shares, rank.tensor = True, False, None
    rank.parallel = SimpleNamespace(part=lambda degree: None)
    rank.lines = rank._arrange_passes()
    return rank


def micro_batch(*lengths):
    draw = np.random.default_rng(sum(lengths))
    rows = []
    for each in lengths:
        ids = draw.integers(3, 60, each).astype(np.int32)
        names = ("advantages", "old_log_probs")
        rows.append(Row(ids[:3], ids[3:], {name: draw.normal(size=each - 3).astype(np.float32) for name in names}))
    return MicroBatch(tuple(rows))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_updates_are_the_same_for_every_zero_stage(tmp_path, monkeypatch, stage):
    """Treat the disk as faster than it is: layers this small are computed before a disk write starts."""
    monkeypatch.setattr(activation_offloading, "measure_speed", lambda *store: FAST * measure_speed(*store))
    away = {"enable_activation_offload": True, "activation_device_mb": 0, "activation_disk_mb": 64}
    for dtype in {1: ["bfloat16"], 2: ["float32"]}.get(stage, ["float32", "bfloat16"]):
        norms = []
        for settings in ({}, away, away | {"enable_gradient_checkpointing": True}):
            rank = rank_of(stage, tmp_path, dtype, **settings)
            for lengths in ((50,), (40, 30), (9,)):
                rank.accumulate(("actor",), [micro_batch(*lengths)])
            norms.append(take_step(rank.engines["actor"].engine, 4.0, 1))
            assert (rank.activations is None) == (not settings)
            spans = rank.recorder.drain()
            passes = [span.attributes for span in spans if span.kind == "forward"]
            metrics = memory_metrics(spans)
            assert bool(metrics) == bool(settings)
            if settings:
                shares = {place: metrics[f"perf/activation_offload/{place}"] for place in Place}
                assert sum(shares.values()) == pytest.approx(1) and shares["again"] > 0 == shares["host"]
                assert metrics["perf/activation_offload/disk_gb"] == sum(each["disk_bytes"] for each in passes) / 2**30
                first, *later = ["layers_disk" in each for each in passes]
                assert not first and later == ["enable_gradient_checkpointing" not in settings] * 2
                assert passes[-1]["disk_bytes"] > 0
        assert norms[0] == norms[1] == norms[2] > 0
