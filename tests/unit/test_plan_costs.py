"""Costs of a plan: links, communication of ZeRO ranks, tensor parallelism, recomputation, wide engines."""

from dataclasses import replace
from math import inf

import pytest
from test_plan_search import job_of, shape  # noqa: F401, a fixture

from rlfuse.engines.memory.estimate import ITEM, Moved
from rlfuse.engines.memory.model_memory import MAX_CACHED_BYTES
from rlfuse.engines.memory.remedies import changed
from rlfuse.tools.planning import plan
from rlfuse.tools.planning.costs import costs_of, offload_traffic, optimizer_transfer_seconds
from rlfuse.tools.planning.exchanges import (
    Traffic,
    gradient_exchange,
    gradient_traffic,
    offloaded_gradient_bytes,
    offloaded_step_bytes,
    pass_exchange,
    step_exchange,
    step_traffic,
)
from rlfuse.tools.planning.hardware import ADAM_BYTES, Hardware, Links


def test_a_ring_within_a_node_sends_all_other_parts():
    links = Links(within_bytes_per_s=100.0, between_bytes_per_s=10.0, per_node=4)
    assert links.all_gather(400, 1) == 0
    assert links.all_gather(400, 4) == pytest.approx(3 * 100 / 100)
    assert links.all_reduce(400, 4) == 2 * links.all_gather(400, 4)


def test_between_nodes_the_slower_link_counts_and_devices_of_a_node_share_the_work():
    links = Links(within_bytes_per_s=inf, between_bytes_per_s=10.0, per_node=4)
    assert links.all_gather(800, 8) == pytest.approx(800 / 8 / 10)
    assert links.all_gather(800, 2, stride=4) == pytest.approx(800 / 2 / 10)


def test_latency_counts_once_for_each_hop():
    links = Links(within_s=1.0, between_s=5.0, per_node=2)
    assert links.all_gather(0, 4) == 1 + 5


def costs(of, **keys):
    config = changed(job_of(of).config, [(name.replace("__", "."), value) for name, value in keys.items()])
    links = Links(1e9, 1e8, 1e-5, 1e-4, 2)
    return costs_of(config, {"actor": of}, Hardware(1e13, 1e13, 1e13, 1e12, host_bytes_per_s=1e10, links=links), 200)


def test_communication_of_each_zero_stage(shape):  # noqa: F811
    """Stage 1 all-reduces gradients like stage 0, and also gathers weights."""
    whole, states, sums, all_of_it = (costs(shape, actor__zero_stage=stage) for stage in range(4))
    assert whole.train_tokens_per_s == states.train_tokens_per_s > sums.train_tokens_per_s
    assert sums.train_tokens_per_s > all_of_it.train_tokens_per_s
    assert whole.score_tokens_per_s == sums.score_tokens_per_s > all_of_it.score_tokens_per_s
    assert states.optimizer_s > whole.optimizer_s > sums.optimizer_s > all_of_it.optimizer_s


def test_local_traffic_of_a_step(shape):  # noqa: F811
    """Count float32 gradients: into a bucket, divided, flat, and a quarter kept and flat; the other 68 bytes are
    those of `optimizer_traffic`. A single rank reduces nothing. CPUs allocate square roots; GPUs do not.
    """
    config = changed(job_of(shape).config, {"model.dtype": "float32", "actor.zero_stage": 1}.items())
    parameters, device = 4 * MAX_CACHED_BYTES, Hardware(1e13, 1e13, 1e13, 1e9)
    of_four, alone = (step_traffic(config, parameters, copies) for copies in (4, 1))
    assert of_four.in_place == (8 + (8 + 68) / 4) * parameters and alone.in_place == (8 + 68) * parameters
    assert of_four.copied == (16 + (8 + 8) / 4) * parameters and alone.copied == (8 + 8 + 8) * parameters
    assert of_four.host_only == 16 / 4 * parameters
    host = replace(device, copied_bytes_per_s=1e8)
    assert of_four.seconds(device) == (of_four.in_place + of_four.copied) / 1e9
    assert of_four.seconds(host) == of_four.in_place / 1e9 + (of_four.copied + of_four.host_only) / 1e8
    few = step_traffic(config, MAX_CACHED_BYTES / 16, 1)
    assert few.host_only == 0 and few.copied == 8 * MAX_CACHED_BYTES / 16, "a bucket is allocated"


@pytest.mark.parametrize("sums, moved", [("float32", 2 * 4 + 4 + 2), ("bfloat16", 2 * 2 + 2 + 4 + 4 + 2)])
def test_a_step_of_16_bit_models_uses_a_float32_copy(shape, sums, moved):  # noqa: F811
    """Use ZeRO 0; gradients are reduced, normed and clipped in the accumulation type."""
    given = {"actor.zero_stage": 0, "actor.grad_accum_dtype": sums, "model.dtype": "bfloat16"}
    config, item = changed(job_of(shape).config, given.items()), 4 if sums == "float32" else 2
    assert step_traffic(config, 1000, 2).in_place == (11 * item + 32 + moved) * 1000


@pytest.mark.parametrize("again", [False, True])
def test_copies_of_a_message_depend_on_its_size(shape, again):  # noqa: F811
    """Use ZeRO 3, which prefetches 50 of 60 million parameters twice, gathers each module, and scatters twice.

    Recomputed layers are gathered once for recomputation and backward. gloo scatters by all-reducing a copy.
    """
    settings = {"model.dtype": "float32", "actor.zero_stage": 3, "model.enable_gradient_checkpointing": again}
    config = changed(job_of(shape).config, settings.items())
    large, few, small = (
        replace(shape, parameters=n, modules=m) for n, m in ((60_000_000, 60), (60_000_000, 2), (10**6, 60))
    )
    ahead, found = pass_exchange(config, large), gradient_exchange(config, large)
    assert (ahead.bytes, ahead.scattered, ahead.modules, ahead.messages) == (240e6, 0, 60, 2)
    assert (found.bytes, found.scattered) == (720e6, 240e6), "forward, backward, gradients"
    assert (found.modules, found.messages) == ((180 if again else 120), 2 + 60 + 2)
    assert ahead.copies == Traffic(copied=480e6, host_only=480e6), "DeepSpeed's flat tensor and gloo's"
    assert found.copies == ahead.copies + Traffic(host_only=480e6), (
        "a module of 4 MB fits MAX_CACHED_BYTES, gradients do not"
    )
    assert gradient_exchange(config, few).copies == found.copies + Traffic(host_only=960e6), (
        "modules of 120 MB: two tensors"
    )
    assert gradient_exchange(config, small).copies == Traffic(in_place=8e6), "no allocation, but flat weights are split"
    handed_over = gradient_traffic(config, 60_000_000, 4)
    assert (handed_over.in_place, handed_over.copied) == (960e6 + 120e6, 480e6), "bucket, divided, a quarter; flat"
    device = Hardware(1e13, 1e13, 1e13, 1e9)
    assert (found.sent(device), found.sent(replace(device, copied_bytes_per_s=1e8))) == (720e6, 960e6)


@pytest.mark.parametrize("size, copied", [(MAX_CACHED_BYTES // 4, 0.0), (MAX_CACHED_BYTES // 4 + 1, 8.0)])
def test_a_step_gathers_its_weights_in_one_message(shape, size, copied):  # noqa: F811
    """Use ZeRO 1; on CPUs weights are copied from a new tensor of gloo."""
    config = changed(job_of(shape).config, {"model.dtype": "float32", "actor.zero_stage": 1}.items())
    assert step_exchange(config, replace(shape, parameters=size)).copies == Traffic(host_only=copied * size)


@pytest.mark.parametrize("again, cared_for", [(False, 2), (True, 3)])
def test_zero_3_has_a_fixed_cost_per_module(shape, again, cared_for):  # noqa: F811
    """Count it in forward, recomputation and backward; message latency replaces it if that is longer."""
    assert shape.modules == 8 * 9 + 3
    settings = {"actor.zero_stage": 3, "model.enable_gradient_checkpointing": again}
    config = changed(job_of(shape).config, settings.items())
    device = Hardware(1e13, 1e13, 1e13, 1e12)
    quick, slow, far = (
        costs_of(
            config, {"actor": shape}, replace(device, gather_s=begun, links=Links(within_s=wait, between_s=wait)), 200
        )
        for begun, wait in ((0.0, 0.0), (1e-3, 0.0), (0.0, 1e-3))
    )
    tokens = min(config.actor.ppo_max_token_len_per_gpu, 8 * 4 * 200 / 4)
    kinds = (("score_tokens_per_s", 1, pass_exchange), ("train_tokens_per_s", cared_for, gradient_exchange))
    for name, times, exchange in kinds:
        begun, waited = (tokens * (1 / getattr(each, name) - 1 / getattr(quick, name)) for each in (slow, far))
        assert begun == pytest.approx(times * 75 * 1e-3)
        hops = 2 * (exchange(config, shape).messages + 1)  # within a node and between; all bytes count as one message
        assert waited == pytest.approx(hops * 1e-3)


def test_ulysses_all_to_alls_wait_for_the_link(shape):  # noqa: F811
    """Count four in each of 8 layers (queries, keys, values, outputs), and four for their gradients."""
    settings = {"training.ulysses_sequence_parallel_size": 2, "actor.ppo_max_token_len_per_gpu": 64}
    config = changed(job_of(shape).config, settings.items())
    quick, slow = (
        costs_of(config, {"actor": shape}, Hardware(1e13, 1e13, 1e13, 1e12, links=Links(within_s=wait)), 200)
        for wait in (0.0, 1e-3)
    )
    for name, times in (("score_tokens_per_s", 1), ("train_tokens_per_s", 2)):
        assert 64 * (1 / getattr(slow, name) - 1 / getattr(quick, name)) == pytest.approx(times * 4 * 8 * 1e-3)


def test_optimizer_transfers_follow_the_residency(shape):  # noqa: F811
    """Transfer 16 GB of optimizer state out of 24 GB, at 10 GB/s: 1.6 s in each direction."""
    ways, moved = {}, Moved(24e9, 16e9)
    for residency in ("training", "forecast", "step"):
        keys = {"actor.optimizer_residency": residency, "data.train_batch_size": 24, "actor.zero_stage": 1}
        config = changed(job_of(shape).config, keys.items())
        for flops in (5e11, 1e15):
            given = config, {"actor": shape}, Hardware(flops, flops, flops, 1e12, host_bytes_per_s=1e10), 200, moved
            ways[residency, flops] = costs_of(*given), optimizer_transfer_seconds(*given)
    for flops in (5e11, 1e15):
        (together, whole), (late, behind), (alone, trips) = (
            ways[each, flops] for each in ("training", "forecast", "step")
        )
        assert whole == (pytest.approx(1.6), 0.0) and together.switch_s == pytest.approx(2.4)
        assert behind[0] == whole[0] and 0 < behind[1] <= 1.6
        assert late.switch_s == pytest.approx(2.4 - behind[1] / 2), "of a role switch, mean of both directions"
        assert trips == (pytest.approx(3 * 3.2), 0.0) and alone.switch_s == pytest.approx(0.8), "three updates a step"
        assert alone.optimizer_s - together.optimizer_s == pytest.approx(3.2)
        assert late.optimizer_s == together.optimizer_s
    long, short = (ways["forecast", flops][1][1] for flops in (5e11, 1e15))
    assert long == pytest.approx(1.6) and short < 0.16, "little overlaps it"


@pytest.mark.parametrize(
    "zero, dtype, sums",
    [
        (1, "bfloat16", 0),
        (1, "float32", 0),
        (2, "bfloat16", 0),
        (2, "float32", 8),
        (3, "bfloat16", 8),
        (3, "float32", 8),
    ],
)
def test_offloaded_optimizers_exchange_gradients_and_weights_with_the_device(shape, zero, dtype, sums):  # noqa: F811
    """Count transfers per step, and per micro-batch if DeepSpeed keeps gradient sums on the host."""
    keys = {"actor.zero_stage": zero, "model.dtype": dtype, "actor.ppo_max_token_len_per_gpu": 400}
    resident = changed(job_of(shape).config, keys.items())
    offloaded = changed(resident, {"actor.offload_optimizer": True}.items())
    n, item = shape.parameters / 4, 2 if dtype == "bfloat16" else 4
    assert offloaded_gradient_bytes(offloaded, shape.parameters, 4) == sums * n
    assert offloaded_step_bytes(offloaded, shape.parameters, 4) == (4 + item) * n
    assert (
        offloaded_gradient_bytes(resident, shape.parameters, 4)
        == offloaded_step_bytes(resident, shape.parameters, 4)
        == 0
    )
    device = Hardware(1e13, 1e13, 1e13, 1e12, host_bytes_per_s=1e10)
    bus, slow, host = (
        device,
        replace(device, host_bytes_per_s=1e9),
        Hardware(1e13, 1e13, 1e13, 1e9, copied_bytes_per_s=1e8),
    )
    for hardware in (bus, slow, host):
        on_device, on_host = (costs_of(config, {"actor": shape}, hardware, 200) for config in (resident, offloaded))
        assert on_host.optimizer_s > on_device.optimizer_s
        assert (on_host.train_tokens_per_s < on_device.train_tokens_per_s) == (sums > 0)
    fast, long = (costs_of(offloaded, {"actor": shape}, each, 200).optimizer_s for each in (bus, slow))
    assert long - fast == pytest.approx((8 + ADAM_BYTES + 2 * (4 + item)) * n * (1e-9 - 1e-10)), (
        "on the host, and the transfer"
    )


def test_transfer_time_of_offloaded_optimizers_is_printed(shape):  # noqa: F811
    """Run three updates of 8 prompts x 4 samples x 200 tokens on 4 ranks: 6 micro-batches of 8 bytes, and a step of 6.

    Packing wastes half a row on average, so 1.5 rows fill a micro-batch.
    """
    keys = {"actor.zero_stage": 3, "actor.offload_optimizer": True, "actor.ppo_max_token_len_per_gpu": 400}
    config = changed(job_of(shape).config, (keys | {"data.train_batch_size": 24}).items())
    size, seconds = offload_traffic(
        config, {"actor": shape}, Hardware(1e13, 1e13, 1e13, 1e12, host_bytes_per_s=1e10), 200
    )
    assert size == pytest.approx(3 * (6 * 8 + 6) * shape.parameters / 4) and seconds == pytest.approx(size / 1e10)
    note = plan._offload_note(8 << 30, 0.5)
    assert note.startswith("  actor.offload_optimizer=true: 8.0 GiB of gradients and weights to the host and back")
    assert note.endswith("0.50 s per step, not overlapped")
    assert plan._offload_note(8 << 30, 0.0).endswith("--cluster adds the transfer time")


def test_tensor_parallel_ranks_step_faster_and_all_reduce(shape):  # noqa: F811
    alone = {"trainer__nnodes": 1, "actor__zero_stage": 0}
    whole, halves = (costs(shape, **alone, training__tensor_model_parallel_size=width) for width in (1, 2))
    assert halves.train_tokens_per_s < whole.train_tokens_per_s, "all-reduces in every layer, and a head on each rank"
    assert halves.score_tokens_per_s < whole.score_tokens_per_s
    assert halves.optimizer_s < whole.optimizer_s
    assert halves.step_base_s == whole.step_base_s, "the engine does not change"


def test_recomputation_costs_a_third_more_and_larger_micro_batches_gather_less_often(shape):  # noqa: F811
    kept, again = (costs(shape, model__enable_gradient_checkpointing=value) for value in (False, True))
    assert kept.train_tokens_per_s == pytest.approx(4 / 3 * again.train_tokens_per_s)
    few, many = (costs(shape, actor__zero_stage=3, actor__ppo_max_token_len_per_gpu=n) for n in (256, 2048))
    assert many.train_tokens_per_s > few.train_tokens_per_s


def test_tensor_parallel_engines_read_faster_and_communicate(shape):  # noqa: F811
    one, two = (costs(shape, rollout__tensor_model_parallel_size=width) for width in (1, 2))
    assert two.step_per_context_token_s == pytest.approx(one.step_per_context_token_s / 2)
    assert two.step_base_s > one.step_base_s, "reading the weights of a small model is faster than the all-reduces"


@pytest.mark.parametrize("sequence_s", [0.0, 1e-6, 1e-4])
def test_decoding_costs_are_exact_at_both_ends_and_a_lower_bound_between(shape, sequence_s):  # noqa: F811
    """Charge the fixed cost per sequence for actual sequences only."""
    hardware = Hardware(1e13, 1e13, 1e13, 1e12, decode_step_s=1e-3, decode_sequence_s=sequence_s)
    config = job_of(shape).config
    read = (sum(shape.layers) + shape.head) * ITEM[config.model.dtype] / 1e12
    computed = 2 * (shape.passed + shape.head) / 1e13
    fitted = costs_of(config, {"actor": shape}, hardware, 200)
    bend = read / computed
    for batch in (1, 2, bend / 4, bend / 2, bend, 2 * bend, 8 * bend):
        exact = 1e-3 + sequence_s * batch + max(read, computed * batch)
        assert (
            exact - sequence_s * bend - computed
            <= fitted.decode_step(batch, 0)
            <= (1 + 1e-9) * exact + computed + sequence_s
        )
        if batch == 1 or batch >= bend:
            assert fitted.decode_step(batch, 0) == pytest.approx(exact, abs=computed + sequence_s)
