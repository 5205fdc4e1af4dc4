"""Planned activation offloading: the same decisions as on ranks, and the memory of real passes."""

from itertools import accumulate

import pytest
import torch
from test_activation_offloading import FAST, every_storage_is_worth_a_copy, offloaded  # noqa: F401
from test_plan import job
from transformers import AutoModelForCausalLM, Qwen2Config

from rlfuse.config.facts import Facts
from rlfuse.engines.memory.activations import (
    MIB,
    WORKSPACES,
    activations,
    describe_activations,
    largest_activation_plan,
    plan_activations,
)
from rlfuse.engines.memory.estimate import GIB, TRAINING, Budget, memory_of
from rlfuse.engines.memory.model_sizes import read_shape
from rlfuse.engines.memory.tracing import HEAP, SequenceLengths, _row
from rlfuse.engines.trainer.activation_placement import Place
from rlfuse.engines.trainer.micro_batch_losses import OBJECTIVES
from rlfuse.engines.trainer.model_inputs import collate
from rlfuse.engines.trainer.models import prepare_for_training
from rlfuse.engines.trainer.rank_group import MALLOC_SETTINGS
from rlfuse.tools.planning.cluster_file import Cluster
from rlfuse.tools.planning.costs import costs_of
from rlfuse.tools.planning.hardware import Hardware
from rlfuse.tools.planning.space import axes_of, structures

SIZES = dict(num_hidden_layers=6, vocab_size=96, hidden_size=64, num_attention_heads=4, intermediate_size=192,
             num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0)  # fmt: skip
SAMPLES = SequenceLengths(((120, 80), (160, 40)))


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Return the shape of a model and the model."""
    config, folder = Qwen2Config(**SIZES), tmp_path_factory.mktemp("model")
    config.save_pretrained(folder)
    settings = job(model__dtype="float32").model
    return read_shape(str(folder), "model.path"), prepare_for_training(
        AutoModelForCausalLM.from_config(config), settings
    ).train()


def peak_of(config, model, offloading):
    """Return the peak bytes of a pass with gradients, as counted by torch's allocator."""
    batch = collate([_row(*each) for each in SAMPLES.lengths], True)
    handles = [
        p.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None)) for p in model.parameters()
    ]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        with offloading.offloaded(batch, None):
            loss, _ = OBJECTIVES["actor"](config, model, batch)
        loss.backward()
    for handle in handles:
        handle.remove()
    moves = [each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]
    return max(accumulate(each.nbytes() for each in sorted(moves, key=lambda each: each.start_ns())))


@pytest.mark.slow
@pytest.mark.parametrize("stay", [0, 2, 6])
@pytest.mark.parametrize("disk", [0, 64])
def test_ranks_match_the_plan_in_placement_and_memory(tmp_path, given, stay, disk):
    shape, model = given
    config = job(model__dtype="float32", model__enable_activation_offload=True, model__activation_disk_mb=disk)
    layer = plan_activations(config, shape, "actor", SAMPLES, "cpu").layer
    config.model.activation_device_mb = (stay + 0.5) * layer / MIB
    planned = plan_activations(config, shape, "actor", SAMPLES, "cpu")
    offloading, _ = offloaded(model, tmp_path, device=(stay + 0.5) * layer, disk=disk * MIB)
    peak_of(config, model, offloading)  # the first pass measures the layers
    measured = peak_of(config, model, offloading)
    assert offloading.places.layers == planned.places.layers
    assert planned.places.layers.count(Place.DEVICE) == max(1, stay)
    assert planned.peak == pytest.approx(measured, rel=0.1)


@pytest.mark.slow
def test_offloaded_activations_are_in_the_plan(given):
    shape, _ = given
    config = job(model__dtype="float32", model__activation_disk_mb=1, actor__ppo_max_token_len_per_gpu=4096)
    on_device = memory_of(config, {"actor": shape}, Budget("cuda", GIB))
    config.model.enable_activation_offload, config.model.activation_device_mb = True, 1
    on_host = memory_of(config, {"actor": shape}, Budget("cuda", GIB))
    found = largest_activation_plan(config, shape, "actor", "cuda")
    assert on_host.total(TRAINING) < on_device.total(TRAINING) and found.places.layers[-1] is Place.DEVICE
    assert on_host.host - on_device.host == found.offloaded_bytes(Place.HOST) == 5 * found.layer
    config.model.activation_host_mb = int(2.5 * found.layer) >> 20
    lines = list(describe_activations(largest_activation_plan(config, shape, "actor", "cuda"), "actor"))
    assert "actor: activations of 6 layers in a micro-batch of 4,096 tokens" in lines[0] and "recomputed" in lines[0]
    config.model.activation_disk_mb = 4096
    lines = list(describe_activations(largest_activation_plan(config, shape, "actor", "cuda"), "actor"))
    assert "on disk" in lines[0] and "GiB to disk; a drive rated for 600 TB" in lines[1]
    assert not list(describe_activations(largest_activation_plan(job(), shape, "actor", "cuda"), "actor"))


@pytest.mark.slow
def test_heap_fragmentation_is_only_planned_for_small_blocks_on_cpus(given):
    shape, _ = given
    assert int(MALLOC_SETTINGS["MALLOC_MMAP_THRESHOLD_"]) == HEAP

    def sizes(prompt, again=False):
        limits = {"data__max_prompt_length": prompt, "actor__ppo_max_token_len_per_gpu": prompt}
        config = job(model__dtype="float32", model__enable_gradient_checkpointing=again, **limits)
        parts = memory_of(config, {"actor": shape}, Budget("cpu", GIB)).parts
        found = {part.what: part.size for part in parts if part.role == "actor"}
        return found["activations"], found["heap fragmentation"]

    kept, between = sizes(1024)
    assert kept == between, "all blocks are small"
    kept, between = sizes(65536)
    assert 0.2 * kept < between < 0.7 * kept, "the largest blocks of a layer are not"
    kept_again, between_again = sizes(65536, again=True)
    assert kept_again < kept and between_again == between, "recomputed activations fragment the heap as well"


@pytest.mark.slow
def test_copies_that_no_computation_overlaps_are_not_planned(given):
    shape, _ = given
    config = job(model__enable_activation_offload=True, model__activation_device_mb=0)
    slow, fast = (
        largest_activation_plan(config, shape, "actor", "cuda", seconds=1e-6, host_s=speed)
        for speed in (1.0, FAST * FAST)
    )
    assert slow.recomputed_fraction == 5 / 6 and fast.recomputed_fraction == 0


@pytest.mark.slow
def test_search_tries_activation_offloading_for_long_rows(given):
    shape, _ = given
    cluster = Cluster(nodes=1, devices_per_node=2, device_memory_gb=24, peak_tflops=10, memory_bandwidth_gbs=300)
    config, key = job(slots=2, model__activation_device_mb=64), "model.enable_activation_offload"
    assert axes_of(config, shape, cluster)[key] == (False,)
    config.data.max_prompt_length = 65536
    axes = axes_of(config, shape, cluster)
    assert axes[key] == (False, True)
    few = {name: values for name, values in axes.items() if name in (key, "training.pipeline_parallel_size")}
    found = {tuple(value for _, value in each) for each in structures(config, Facts(layers=6, cuda=True), few, shape)}
    assert {tuple(sorted(map(str, each))) for each in found} == {("1", "False"), ("1", "True"), ("2", "False")}


def test_recomputed_layers_take_time(given):
    shape, _ = given
    config = job(model__activation_device_mb=0)

    def train_token_s(**changes):
        config.model.enable_activation_offload = "host_bytes_per_s" in changes
        return 1 / costs_of(config, {"actor": shape}, Hardware(1e9, 1e9, 1e9, 1e12, **changes), 300).train_tokens_per_s

    on_device, on_host, recomputed = (
        train_token_s(),
        train_token_s(host_bytes_per_s=1e15),
        train_token_s(host_bytes_per_s=1.0),
    )
    assert on_host == pytest.approx(on_device) and recomputed == pytest.approx(on_device * (3 + 5 / 6) / 3, rel=0.01)


@pytest.mark.slow
def test_cuda_graphs_are_planned_if_models_stay_resident(given):
    shape, _ = given
    shapes, few = dict.fromkeys(("actor", "critic", "reference"), shape), {"actor__ppo_max_token_len_per_gpu": 1024}

    def graphs(device="cuda", **changed):
        parts = memory_of(job(**few | changed), shapes, Budget(device, 80 * GIB)).parts
        return sum(part.size for part in parts if part.what == "CUDA graphs")

    gradients = 2 * 4 * shape.parameters
    work = activations(job(**few), shape, "actor", "cuda")
    assert graphs() == pytest.approx(gradients + WORKSPACES + work, rel=0.1)
    assert graphs(actor__ppo_max_token_len_per_gpu=16384) == graphs(actor__cuda_graphs="off") == graphs("cpu") == 0
    assert graphs(rollout__free_cache_engine=True) == 0
