"""DeepSpeed ranks against plain torch: gradients for every loss, ZeRO stage, rank count and micro-batching.

Gradients are accumulated by all ranks at once, or on single slots in any order while others are idle.
"""

import asyncio
import os
from dataclasses import replace

import numpy as np
import pytest
import ray
import torch
from trainer_probe import (
    LR,
    VOCABULARY,
    Probe,
    assert_skipping_changes_nothing,
    distance,
    lengths,
    make_rows,
    only_the_policy_loss,
    scores_of,
    settings,
)
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlfuse.algorithms.losses import AGG_MODES


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory):
    """Save a random Qwen2 that is small enough for a single-process reference."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("policy")
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=128, initializer_range=0.05,
            tie_word_embeddings=True,
        )
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


def reference(config, rows):
    """Return {name: gradient} in one process, one sequence at a time, with the loss written out."""
    model = Qwen2ForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    per_row = []
    for row in rows:
        ids = torch.tensor(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64))[None]
        logits = model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1]
        log_p = logits.log_softmax(-1)
        logp = log_p.gather(-1, ids[0, len(row.prompt_ids) :, None])[:, 0]
        t = {name: torch.from_numpy(array) for name, array in row.tensors.items()}
        ratio = (logp - t["old_log_probs"]).exp()
        plain, clipped = -t["advantages"] * ratio, -t["advantages"] * ratio.clamp(0.8, 1.2)
        surrogate = torch.maximum(plain, clipped)
        surrogate = torch.where(t["advantages"] < 0, torch.minimum(surrogate, -3.0 * t["advantages"]), surrogate)
        entropy = -(log_p.exp() * log_p).sum(-1)
        log_r = t["ref_log_probs"] - logp
        per_row.append(surrogate - 0.01 * entropy + 0.1 * (log_r.exp() - log_r - 1))
    tokens, sequences, mode = sum(map(len, per_row)), len(per_row), config.actor.loss_agg_mode
    loss = {
        "token-mean": lambda: sum(x.sum() for x in per_row) / tokens,
        "seq-mean-token-sum": lambda: sum(x.sum() for x in per_row) / sequences,
        "seq-mean-token-mean": lambda: sum(x.mean() for x in per_row) / sequences,
        "seq-mean-token-sum-norm": lambda: sum(x.sum() for x in per_row) / 32 / sequences,
    }[mode]()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
async def group(policy_folder, slots):
    """Start two ranks that can load one configuration after the other."""
    return (await Probe.start(settings(policy_folder), slots))[0]


async def assert_gradients_match(group, rows):
    metrics = await group.update("actor", rows)
    gradients = await group.gradients()
    expected = reference(group.config, rows)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-5)
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    assert metrics["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics["actor/lr"] == LR
    return gradients, metrics


@pytest.mark.parametrize("stage, packed", [(1, False), (3, True)])
async def test_log_probs_of_the_update_are_bitwise_those_of_a_separate_pass(group, policy_folder, stage, packed):
    """With the same micro-batches, gradients, weights and metrics are bitwise equal too."""
    config = settings(policy_folder, stage, alone=True)
    config.model.use_remove_padding = packed
    bare = [replace(row, tensors=without(row, "old_log_probs")) for row in make_rows(15)]
    found = []
    for passes in (True, False):
        await group.take(config)
        rows = bare
        if passes:
            before = await scores_of(group, "actor", bare)
            rows = [replace(r, tensors=r.tensors | {"old_log_probs": o}) for r, o in zip(bare, before, strict=True)]
        gained = (await group.accumulate(("actor",), rows))["actor"].arrays
        metrics = await group.step("actor", lengths(rows))
        old = before if passes else gained
        again = [replace(r, tensors=r.tensors | {"old_log_probs": o}) for r, o in zip(bare, old, strict=True)]
        metrics |= {f"again/{name}": each for name, each in (await group.update("actor", again)).items()}
        found.append((metrics, old, await scores_of(group, "actor", bare)))
        assert (gained == []) == passes
    (metrics, old, after), (expected, *outputs) = found
    np.testing.assert_equal(metrics, expected)
    assert metrics["actor/ppo_kl"] == 0 != metrics["again/actor/ppo_kl"]
    for have, want in zip((old, after), outputs, strict=True):
        np.testing.assert_array_equal(np.concatenate(have), np.concatenate(want))


def without(row, name):
    return {other: each for other, each in row.tensors.items() if other != name}


async def on_one_slot(group, model, rows):
    """Train on one slot; the other rank joins the step without rows."""
    await group.accumulate((model,), rows, slot=1)


async def in_pieces(group, model, rows):
    """Train on both slots concurrently, unevenly, out of order and with scoring in between; the rest on all ranks."""

    async def slot_1():
        await group.accumulate((model,), rows[5:], slot=1)
        await scores_of(group, "actor", rows[:2], slot=1)
        await group.accumulate((model,), rows[4:5], slot=1)

    await asyncio.gather(group.accumulate((model,), rows[3:4], slot=0), slot_1())
    await group.accumulate((model,), rows[:3])


@pytest.mark.parametrize("stage, mode", [*((0, mode) for mode in AGG_MODES), (1, AGG_MODES[0])])
async def test_gradients_equal_single_process_torch_for_every_accumulation(group, policy_folder, stage, mode):
    rows, config = make_rows(), settings(policy_folder, stage, mode, alone=True)
    serial, expected = await assert_gradients_match(await group.take(config), rows)
    for split in (on_one_slot, in_pieces):
        await split(await group.take(config), "actor", rows)
        metrics = await group.step("actor", lengths(rows[::-1]))
        assert distance(await group.gradients(), serial) < 1e-6, split
        assert metrics == pytest.approx(expected, rel=1e-5), split


@pytest.mark.parametrize("stage", [2, 3, "fsdp2"])
async def test_gradients_equal_single_process_torch_in_lockstep(group, policy_folder, stage):
    """A call with fewer rows than ranks uses a filler."""
    rows, config = make_rows(), settings(policy_folder, stage, alone=True)
    serial, _ = await assert_gradients_match(await group.take(config), rows)
    await group.take(config)
    for part in (rows[:1], rows[1:]):
        await group.accumulate(("actor",), part)
    await group.step("actor", lengths(rows))
    assert distance(await group.gradients(), serial) < 1e-6


@pytest.mark.parametrize("stage", [1, 3, "fsdp2"])
async def test_gradients_do_not_depend_on_how_slow_ranks_are(group, policy_folder, stage):
    """A slow rank gets fewer rows, and fillers to stay in lockstep."""
    rows, config = make_rows(15), settings(policy_folder, stage, alone=True)
    serial, expected = await assert_gradients_match(await group.take(config), rows)
    try:
        await group.take(config)
        await group.replan([1.0, 3.0])
        await group.drain()
        for part in (rows[:1], rows[1:]):
            await group.accumulate(("actor",), part)
        spans = await group.drain()
        metrics = await group.step("actor", lengths(rows))
        assert distance(await group.gradients(), serial) < 1e-6
        assert metrics == pytest.approx(expected, rel=1e-5)
        scores = await scores_of(group, "actor", rows)
        await group.replan([])
        for found, want in zip(scores, await scores_of(group, "actor", rows), strict=True):
            np.testing.assert_allclose(found, want, atol=1e-5)
    finally:
        await group.replan([])
    mine = [[span for span in spans if span.where == f"trainer/{rank}" and span.kind == "backward"] for rank in (0, 1)]
    fast, slow = (sum(span.tokens for span in of) for of in mine)
    assert 2 * slow < fast and fast + slow == sum(row.tokens for row in rows)
    assert len(mine[0]) == len(mine[1]) or stage == 1


@pytest.mark.parametrize("budget, count", [(10_000, 7), (16, 7), (64, 1)])
async def test_gradients_do_not_depend_on_micro_batches_and_idle_ranks(group, policy_folder, budget, count):
    """One micro-batch, one per row, and a rank without rows."""
    config = settings(policy_folder, budget=budget, alone=True)
    await assert_gradients_match(await group.take(config), make_rows(count))


async def test_padded_rows_train_as_packed_ones(group, policy_folder):
    config = settings(policy_folder, alone=True)
    config.model.use_remove_padding = False
    rows = make_rows()
    serial, _ = await assert_gradients_match(await group.take(config), rows)
    await in_pieces(await group.take(config), "actor", rows)
    await group.step("actor", lengths(rows))
    assert distance(await group.gradients(), serial) < 1e-6


async def test_one_rank_gives_the_results_of_two(policy_folder, slots):
    """The rank's process also stays on its core."""
    config, core = settings(policy_folder, alone=True), max(os.sched_getaffinity(0))
    config.trainer.n_gpus_per_node = 1
    alone, _ = await Probe.start(config, replace(slots, count=1), cores=[core])
    try:
        await assert_gradients_match(alone, make_rows())
        assert await alone.ranks[0].__ray_call__.remote(lambda rank: os.sched_getaffinity(0)) == {core}
    finally:
        ray.kill(alone.ranks[0])


@pytest.mark.parametrize(
    "stage, mode, dtype",
    [
        (0, "seq-mean-token-mean", "float32"),
        (0, "token-mean", "bfloat16"),
        (1, "seq-mean-token-sum-norm", "float32"),
        (1, "seq-mean-token-mean", "bfloat16"),
        (2, "token-mean", "float32"),
        (3, "seq-mean-token-sum", "float32"),
        ("fsdp2", "seq-mean-token-mean", "float32"),
    ],
)
async def test_rows_without_advantage_can_be_skipped(group, policy_folder, tmp_path, stage, mode, dtype):
    """Also all rows of a mini-batch: AdamW steps with a gradient of 0."""
    config = only_the_policy_loss(settings(policy_folder, stage, mode, dtype, alone=True))
    tolerance = 1e-6 if dtype == "float32" else 0.02
    await assert_skipping_changes_nothing(lambda: group.take(config), tmp_path, tolerance)


async def test_skipping_rows_on_one_rank_is_bitwise_exact(policy_folder, slots, tmp_path):
    """With one row per micro-batch, the summation order is the same."""
    config = only_the_policy_loss(settings(policy_folder, 1, budget=1, alone=True))
    config.trainer.n_gpus_per_node = 1
    alone, _ = await Probe.start(config, replace(slots, count=1))
    try:
        await assert_skipping_changes_nothing(lambda: alone.take(config), tmp_path, tolerance=0.0)
    finally:
        ray.kill(alone.ranks[0])


@pytest.mark.parametrize("stage", [0, 1])
async def test_several_clipped_steps_of_both_models_equal_serial_ones(group, policy_folder, stage):
    config = settings(policy_folder, stage, "seq-mean-token-mean", clip=0.05)
    batches = [make_rows(7, seed) for seed in (3, 4, 5)]

    async def train(split):
        await group.take(config)
        metrics = []
        for rows in batches:
            for model in ("critic", "actor"):
                await split(group, model, rows)
            metrics += [await group.step(model, lengths(rows)) for model in ("critic", "actor")]
        return metrics, await scores_of(group, "actor", rows), await scores_of(group, "critic", rows)

    expected, *outputs = await train(lambda group, model, rows: group.accumulate((model,), rows))
    metrics, *found = await train(in_pieces)
    assert [m["actor/grad_norm"] > 0.05 for m in expected[1::2]] == [True] * 3
    for have, want in zip(metrics, expected, strict=True):
        assert have == pytest.approx(want, rel=1e-5)
    for have, want in zip(found, outputs, strict=True):
        np.testing.assert_allclose(np.concatenate(have), np.concatenate(want), atol=1e-5)


@pytest.mark.parametrize("stage, split", [(0, on_one_slot), (1, in_pieces)])
async def test_bfloat16_steps_are_close_for_every_accumulation(group, policy_folder, stage, split):
    rows, config = make_rows(), settings(policy_folder, stage, dtype="bfloat16", clip=0.05, alone=True)
    expected = await (await group.take(config)).update("actor", rows)
    await split(await group.take(config), "actor", rows)
    metrics = await group.step("actor", lengths(rows))
    assert metrics["actor/grad_norm"] > config.actor.grad_clip
    assert metrics == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("stage", [0, 2, 3])
async def test_models_move_to_host_memory_and_back_with_their_gradients(group, policy_folder, stage):
    """As on GPUs, but both copies are in host memory here; no state may be lost."""
    rows, config = make_rows(), settings(policy_folder, stage)

    async def train(move):
        await group.take(config)
        metrics = [await group.update("actor", rows) | await group.update("critic", rows)]
        await group.accumulate(("actor",), rows)
        await move()
        metrics.append(await group.step("actor", lengths(rows)))
        return metrics, await scores_of(group, "actor", rows), await scores_of(group, "ref", rows)

    def there_and_back(rank):
        from rlfuse.engines.trainer.offloading import to_device, to_host

        for model in rank.engines.values():
            to_host(model)
            to_device(model)

    def optimizers_later(rank):
        from rlfuse.engines.trainer.offloading import offloaded_bytes, to_device, to_host

        for model in rank.engines.values():
            to_host(model)
            to_device(model, optimizer=False)
        return [offloaded_bytes(rank.engines[name]) for name in ("actor", "critic", "ref")]

    def moved(how=there_and_back):
        return asyncio.gather(*(rank.__ray_call__.remote(how) for rank in group.ranks))

    async def fetched():
        for actor, critic, reference in await moved(optimizers_later):
            assert actor > 0 and critic > 0 and reference == 0
        await asyncio.gather(*map(group.fetch_optimizers, (0, 1)), scores_of(group, "actor", rows))

    expected = await train(lambda: asyncio.sleep(0))
    for move in (moved, fetched, lambda: moved(optimizers_later)):
        np.testing.assert_equal(await train(move), expected)


async def test_slots_work_concurrently_and_record_spans(group, policy_folder):
    rows = make_rows()
    await group.take(settings(policy_folder))
    await group.drain()
    await group.acquire_device(1)
    await asyncio.gather(*(group.accumulate(("actor",), rows * 16, slot) for slot in (0, 1)))
    await group.accumulate(("actor",), rows[:2], slot=1)
    await scores_of(group, "critic", rows[:2], slot=1)
    await group.release_device(1)
    await group.step("actor", lengths(rows * 32 + rows[:2]))
    spans = await group.drain()
    by_rank = [[span for span in spans if span.where == f"trainer/{rank}"] for rank in (0, 1)]
    kinds = {"forward", "backward", "optimizer"}
    assert [{span.kind for span in spans} for spans in by_rank] == [kinds, kinds | {"values", "switch"}]
    tokens = sum(row.tokens for row in rows)
    more = [sum(span.tokens for span in spans if span.kind == "backward") - 16 * tokens for spans in by_rank]
    assert more == [0, rows[0].tokens + rows[1].tokens]
    assert [s.attributes["to"] for s in by_rank[1] if s.kind == "switch"] == ["trainer", "rollout"]
    began = [next(s.start for s in spans if s.kind == "forward") for spans in by_rank]
    assert max(began) < min(max(s.end for s in spans if s.kind == "backward") for spans in by_rank)


async def test_operations_that_need_all_ranks_are_refused_on_one_slot(group, policy_folder):
    rows = make_rows()
    await group.take(settings(policy_folder, 2))
    assert (group.lockstep, group.lockstep_backward) == (False, True)
    assert len(await scores_of(group, "critic", rows, slot=0)) == len(rows)
    with pytest.raises(ValueError, match=r"zero_stage=2 needs all ranks.*slot 1 alone"):
        await group.accumulate(("actor",), rows, slot=1)
    await group.take(settings(policy_folder, 3))
    assert (group.lockstep, group.lockstep_backward) == (True, True)
    with pytest.raises(ValueError, match=r"zero_stage=3 needs all ranks.*slot 0 alone"):
        await scores_of(group, "ref", rows, slot=0)


async def test_steps_and_checkpoints_are_refused_with_unmatched_gradients(group, policy_folder, tmp_path):
    rows = make_rows()
    await group.take(settings(policy_folder))
    with pytest.raises(ValueError, match="No gradients of the actor were accumulated"):
        await group.step("actor", lengths(rows))
    await group.accumulate(("critic",), rows, slot=0)
    with pytest.raises(ValueError, match=r"Step of the critic over 6 rows .* 7 .*Accumulate each other row"):
        await group.step("critic", lengths(rows[1:]))
    with pytest.raises(ValueError, match=r"saved: the critic has accumulated gradients of 7 rows.*Take the step"):
        await group.save(tmp_path / "checkpoint")
    await group.step("critic", lengths(rows))
    await group.save(tmp_path / "checkpoint")


def masked(rows, counted):
    """Return the rows with a loss mask that is 1 for the first `counted` of them, else 0."""
    kept = [np.full(len(row.response_ids), index < counted, np.float32) for index, row in enumerate(rows)]
    return [replace(row, tensors=row.tensors | {"loss_mask": mask}) for row, mask in zip(rows, kept, strict=True)]


async def test_masked_rows_change_neither_gradient_nor_means(group, policy_folder):
    rows, config = make_rows(), settings(policy_folder, alone=True)
    _, expected = await assert_gradients_match(await group.take(config), rows[:4])
    serial = await group.gradients()
    await group.take(config)
    await group.accumulate(("actor",), masked(rows, 4))
    metrics = await group.step("actor", [*lengths(rows[:4]), 0, 0, 0])
    assert distance(await group.gradients(), serial) < 1e-6 and metrics == pytest.approx(expected, rel=1e-5)
    await group.accumulate(("actor",), masked(rows, 0))
    empty = await group.step("actor", [0] * len(rows))
    assert empty["actor/grad_norm"] == empty["actor/pg_loss"] == empty["actor/entropy"] == 0


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "bfloat16"), (1, "float32"), (2, "bfloat16"), (3, "float32"), ("fsdp2", "bfloat16")]
)
async def test_the_reference_is_mixed_with_the_actor_and_resumed_from_the_checkpoint(
    group, policy_folder, tmp_path, stage, dtype
):
    rows, config = make_rows(), settings(policy_folder, stage, dtype=dtype, alone=True)
    config.ref.sync_ref_model, config.ref.ref_model_mixup_alpha = True, 0.25
    config.actor.optim.lr = 0.02

    async def checkpoint_of(name):
        await group.save(tmp_path / name)
        return {
            model: Qwen2ForCausalLM.from_pretrained(tmp_path / name / model / "huggingface", dtype=torch.float32)
            for model in ("actor", "ref")
        }

    await group.take(config)
    start = dict(Qwen2ForCausalLM.from_pretrained(policy_folder, dtype=torch.float32).named_parameters())
    await group.update("actor", rows)
    await group.sync_reference()
    saved = await checkpoint_of("first")
    actor, rounding = dict(saved["actor"].named_parameters()), {"float32": 1e-6, "bfloat16": 8e-3}[dtype]
    for name, found in saved["ref"].named_parameters():
        assert not torch.equal(actor[name], start[name])
        near = {"rtol": rounding, "atol": 1e-6 if dtype == "float32" else 1e-4}
        torch.testing.assert_close(found, 0.25 * actor[name] + 0.75 * start[name], **near)

    async def continue_training():
        scores = [await scores_of(group, "ref", rows)]
        await group.update("actor", rows)
        await group.sync_reference()
        return [*scores, await scores_of(group, "ref", rows)]

    expected = await continue_training()
    await group.take(config)
    await group.load(tmp_path / "first")
    for have, want in zip(await continue_training(), expected, strict=True):
        np.testing.assert_array_equal(np.concatenate(have), np.concatenate(want))


@pytest.mark.parametrize("stage", [0, 1, 3, "fsdp2"])
async def test_clipping_scales_the_step_by_the_global_norm(group, policy_folder, stage):
    """The clipped gradient is the full one times limit / norm, for every optimizer."""
    limit = 0.05
    rows = make_rows()
    await group.take(settings(policy_folder, stage, clip=limit, alone=True))
    metrics = await group.update("actor", rows)
    clipped = await group.gradients()
    expected = reference(group.config, rows)
    norm = float(torch.stack([g.norm() for g in expected.values()]).norm())
    assert norm > limit and metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, gradient in expected.items():
        torch.testing.assert_close(clipped[name], gradient * (limit / norm), atol=1e-5, rtol=1e-3)


async def test_log_probs_values_and_reference_of_a_bfloat16_zero3_job(group, policy_folder):
    """Passes with sharded bfloat16 weights are close to float32 results of one process."""
    config = settings(policy_folder, 3, dtype="bfloat16")
    await group.take(config)
    rows = make_rows()
    actor, reference_log_probs = [await scores_of(group, model, rows) for model in ("actor", "ref")]
    model = Qwen2ForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)
    for row, found, same in zip(rows, actor, reference_log_probs, strict=True):
        ids = torch.tensor(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64))[None]
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1].log_softmax(-1)
        want = logits.gather(-1, ids[0, len(row.prompt_ids) :, None])[:, 0].numpy()
        np.testing.assert_allclose(found, want, atol=0.05)
        np.testing.assert_array_equal(found, same)
    assert all(not values.any() for values in await scores_of(group, "critic", rows))  # a new value head is 0
    metrics = await group.update("critic", rows)
    assert metrics["critic/vf_loss"] > 0 and np.isfinite(metrics["critic/grad_norm"])
    assert any(values.any() for values in await scores_of(group, "critic", rows))


@pytest.mark.parametrize("stage", [1, 3, "fsdp2"])
async def test_resumed_training_is_bitwise_the_uninterrupted_one(group, policy_folder, stage, tmp_path):
    rows = make_rows()

    async def two_steps():
        metrics = [await group.update("actor", rows) | await group.update("critic", rows) for _ in range(2)]
        return metrics, await scores_of(group, "actor", rows)

    await group.take(settings(policy_folder, stage, clip=1.0))
    await two_steps()
    await group.save(tmp_path / "checkpoint")
    expected, expected_log_probs = await two_steps()
    await group.take(settings(policy_folder, stage, clip=1.0))
    await group.load(tmp_path / "checkpoint")
    found, found_log_probs = await two_steps()
    assert found == expected
    np.testing.assert_equal(found_log_probs, expected_log_probs)
    saved, report = Qwen2ForCausalLM.from_pretrained(
        tmp_path / "checkpoint" / "actor" / "huggingface", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and saved.config.tie_word_embeddings


async def test_training_resumes_under_every_layout(group, policy_folder, tmp_path):
    """ZeRO stages, FSDP2 and tensor parallelism read each other's checkpoints and continue equally, up to rounding."""
    rows = make_rows()

    async def two_steps():
        metrics = [await group.update("actor", rows) | await group.update("critic", rows) for _ in range(2)]
        return metrics, np.concatenate(await scores_of(group, "actor", rows))

    await group.take(settings(policy_folder, 1, clip=1.0))
    await two_steps()
    await group.save(tmp_path / "1")
    expected, expected_log_probs = await two_steps()
    before = "1"
    for layout in ("fsdp2", 3, "shares", 0, 2):
        config = settings(policy_folder, 1 if layout == "shares" else layout, clip=1.0)
        config.training.tensor_model_parallel_size = 2 if layout == "shares" else 1
        await group.take(config)
        await group.load(tmp_path / before)
        assert layout != 3 or await group.fill_padding(np.nan)
        await group.save(tmp_path / str(layout))  # each layout saves the checkpoint that the next one reads
        found, log_probs = await two_steps()
        for one, other in zip(found, expected, strict=True):
            assert {name: one[name] for name in other} == pytest.approx(other, rel=2e-3, abs=1e-5), layout
        np.testing.assert_allclose(log_probs, expected_log_probs, atol=2e-4)
        before = str(layout)
