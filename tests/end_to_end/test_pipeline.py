"""Pipelines on real ranks have the gradients and parameters of one process, for every schedule and layout."""

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pipelines
import ppo_steps
import pytest
import ray
import torch
from pipelines import Sleeping, fused, serial
from probing import (
    COUNTS,
    LAYOUTS,
    OPPOSITE,
    TWO_CRITICS,
    distance,
    fourth_step,
    schedule,
    started_group,
    state,
    three_steps,
)
from safetensors.torch import load_file
from single_process import BATCHES, FAMILIES, ThreeSteps, lengths, make_rows, settings
from trainer_probe import mini_batches_without_advantage, only_the_policy_loss, scores_of
from transformers import Qwen2ForCausalLM, Qwen2ForTokenClassification

from rlfuse.config.schema import Config
from rlfuse.engines.pipeline.layout import Pipelines
from rlfuse.engines.trainer.micro_batch_losses import actor_loss, log_probs
from rlfuse.engines.trainer.model_inputs import collate
from rlfuse.engines.trainer.models import load_policy
from rlfuse.errors import EngineError
from rlfuse.fusion.schedules.planning import Planner

ray.cloudpickle.register_pickle_by_value(pipelines)  # ranks can't import from tests
ORDERS = [(order, split) for order in ("serial", "fused") for split in (False, True)]


@pytest.fixture(scope="module")
def folders(pipeline_models):
    return pipeline_models


@pytest.fixture(scope="module")
def one_process(folders):
    """Return a function that computes three steps in one process, once per configuration."""
    made = {}

    def get(config, name):
        key = (config.model.path, config.critic.path, config.actor.grad_clip, name)
        if key not in made:
            made[key] = ThreeSteps(config, name)
        return made[key]

    return get


@pytest.fixture(scope="module")
async def two(folders, slots):
    async for group in started_group(folders, 2, OPPOSITE):
        yield group


@pytest.fixture(scope="module")
async def eight(folders, slots):
    async for group in started_group(folders, 8, TWO_CRITICS):
        yield group


def assert_like_one_process(config, one_process, gradients, parameters, metrics):
    """Compare gradients of the first step to 1e-6 of their norm, and all later results to 1e-5.

    AdamW divides gradients by their own size, so rounding in elements next to zero moves parameters by up to the
    learning rate.
    """
    for name in COUNTS:
        expected = one_process(config, name)
        found = [distance(*pair) for pair in zip(gradients[name], expected.gradients, strict=True)]
        assert found[0] < 1e-6 and max(found) < 1e-5, (name, found)
        assert distance(parameters[name], expected.parameters) < 1e-5
        norms = [each[f"{name}/grad_norm"] for each in metrics]
        assert norms == pytest.approx(expected.norms, rel=1e-5)


@pytest.mark.parametrize(
    "family, order, split", [("qwen2", *order) for order in ORDERS] + [(name, "fused", True) for name in FAMILIES][1:]
)
async def test_every_order_trains_as_one_process(four, folders, one_process, family, order, split):
    """Four stages of the actor, two opposite pipelines of the smaller critic with two stages each; clipped."""
    config = settings(folders, family, clip=0.1)
    assert_like_one_process(config, one_process, *await three_steps(four, config, TWO_CRITICS, order, split))


@pytest.mark.parametrize("name, split", [(name, name not in ("dp 2", "interleaved")) for name in LAYOUTS])
async def test_every_layout_trains_as_one_process(four, folders, one_process, name, split):
    config = settings(folders, critic_layers=4, clip=0.1)
    assert_like_one_process(config, one_process, *await three_steps(four, config, LAYOUTS[name], "fused", split))


@pytest.mark.skipif(os.cpu_count() < 8, reason="8 ranks take a minute to start on fewer cores")
@pytest.mark.parametrize(
    "layout, order, split",
    [(LAYOUTS["4 and 4"], *ORDERS[-1]), (TWO_CRITICS, *ORDERS[0])],
    ids=["4 and 4, fused", "two critics, serial"],
)
async def test_eight_ranks_train_as_one_process(eight, folders, one_process, layout, order, split):
    config = settings(folders, critic_layers=layout[1].stages, clip=0.1)
    assert_like_one_process(config, one_process, *await three_steps(eight, config, layout, order, split))


@pytest.mark.parametrize("order, split", ORDERS[::3])
async def test_two_ranks_train_as_one_process(two, folders, one_process, order, split):
    config = settings(folders, "llama", clip=0.1)
    assert_like_one_process(config, one_process, *await three_steps(two, config, OPPOSITE, order, split))


async def test_twenty_ppo_steps_have_the_losses_of_one_process(four, folders):
    config = settings(folders, clip=0.5)
    await four.take(config, (*TWO_CRITICS, Pipelines("ref", TWO_CRITICS[0].stages)))
    four.rows = schedule("fused", TWO_CRITICS, True)
    curve, one_process = await ppo_steps.loss_curve(four), await ppo_steps.loss_curve(ppo_steps.OneProcess(config))
    for found, expected in zip(curve, one_process, strict=True):
        found = {name: found[name] for name in expected}  # excluding the learning rate
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


async def test_gradients_are_bitwise_equal_for_all_orders(two, folders):
    config = settings(folders)
    runs = [await three_steps(two, config, OPPOSITE, order, split) for order, split in (*ORDERS[:1], *ORDERS[2:])]
    for gradients, parameters, metrics in runs[1:]:
        np.testing.assert_equal(metrics, runs[0][2])
        for name in COUNTS:
            assert distance(parameters[name], runs[0][1][name]) == 0
            assert distance(gradients[name][2], runs[0][0][name][2]) == 0


@pytest.mark.parametrize("family, order, split", [("llama", "serial", False), ("qwen2", "fused", True)])
async def test_the_actor_can_skip_rows_without_advantage(two, folders, family, order, split):
    """In one mini-batch the actor skips all rows, in another some; the critic trains on all of them."""
    config = only_the_policy_loss(settings(folders, family, clip=0.1))
    config.critic.optim.eps, expected = 1e-4, None
    schedules = {True: schedule(order, OPPOSITE, split), False: schedule(order, OPPOSITE[1:], split)}
    for skip in (False, True):
        await two.take(config, OPPOSITE)
        metrics = []
        for rows, zero in mini_batches_without_advantage():
            kept = [row for i, row in enumerate(rows) if not (skip and i in zero)]
            work = {"actor": kept, "critic": rows} if kept else {"critic": rows}
            await two.run(schedules[bool(kept)], work)
            left_out = [len(row.response_ids) for i, row in enumerate(rows) if skip and i in zero]
            metrics.append(await two.step("critic", lengths(rows)))
            metrics[-1] |= await two.step("actor", lengths(rows), skipped=left_out)
        found = metrics, {name: await two.tensors(name, "data") for name in COUNTS}
        expected = expected or found
    for one, other in zip(found[0], expected[0], strict=True):
        for name in {"actor/grad_norm", "actor/pg_loss", "critic/grad_norm", "critic/vf_loss"} & one.keys():
            assert one[name] == pytest.approx(other[name], rel=1e-6, abs=1e-6), name
    assert [row["actor/grad_norm"] > 0 for row in found[0]] == [False, True, False, True]
    assert found[0][2]["actor/pg_loss"] == 0 and "actor/entropy" not in found[0][2]
    for name in COUNTS:
        assert distance(found[1][name], expected[1][name]) < 1e-6


async def test_activation_checkpointing_changes_no_result(two, folders, one_process):
    config = settings(folders)
    config.model.enable_gradient_checkpointing = True
    assert_like_one_process(config, one_process, *await three_steps(two, config, OPPOSITE, "fused", True))


async def test_padded_rows_train_as_packed_ones(two, folders, one_process):
    config = settings(folders)
    config.model.use_remove_padding = False
    assert_like_one_process(config, one_process, *await three_steps(two, config, OPPOSITE, "fused", True))


async def test_fillers_for_missing_micro_batches_do_not_count(four, folders, one_process):
    config, few = settings(folders), make_rows(3, 8)
    await four.take(config, LAYOUTS["dp 2"])
    execution = await four.run(schedule("fused", LAYOUTS["dp 2"], True), {name: few for name in COUNTS})
    assert execution.scores == {}
    model = load_policy(config.model.path, config.model)
    (actor_loss(config, model, collate(few, packed=False))[0] / sum(lengths(few))).backward()
    found = {key: tensor / sum(lengths(few)) for key, tensor in (await four.tensors("actor", "grad")).items()}
    assert distance(found, {key: p.grad for key, p in model.named_parameters()}) < 1e-6
    assert (await four.step("actor", lengths(few)))["actor/entropy"] > 0


async def test_scores_are_in_the_order_of_rows(four, folders):
    """Forward-only schedules, on layouts with two pipelines and with a V."""
    config, rows = settings(folders), make_rows(9, 1)
    config.actor.ppo_max_token_len_per_gpu = 40
    policy = load_policy(config.model.path, config.model)
    batch = collate(rows, packed=False)
    with torch.no_grad():
        want = batch.split(log_probs(config, policy, batch))
    for layout in ((*TWO_CRITICS, Pipelines("ref", 2, 2)), LAYOUTS["V, dp 2"], LAYOUTS["interleaved"]):
        await four.take(config, layout)
        for model in ("actor", "ref")[: len(layout) - 1]:
            for have, expected in zip(await scores_of(four, model, rows), want, strict=True):
                np.testing.assert_allclose(have, expected, atol=1e-5)
        assert all(not values.any() for values in await scores_of(four, "critic", rows))  # a new value head is 0


async def test_a_schedule_can_score_rows_that_it_does_not_train_on(two, folders):
    """Reference and actor passes over later rows in an actor's schedule give the results of separate passes."""
    config, rows = settings(folders), make_rows(6, 2)
    layout = (Pipelines("actor", 2), Pipelines("ref", 2, direction="up"))
    await two.take(config, layout)
    alone = {name: await scores_of(two, name, rows) for name in ("actor", "ref")}
    await two.run(serial(layout[:1], {"actor": 4}), {"actor": BATCHES[0]})
    expected = await two.step("actor", lengths(BATCHES[0]))
    await two.take(config, layout)
    await two.drain()
    plan = Planner(2, split=True).plan({"actor": 4}, {"actor": 2, "ref": 3})
    execution = await two.run(plan.rows, {"actor": BATCHES[0]}, {"actor": rows, "ref": rows})
    for name, scores in alone.items():
        np.testing.assert_allclose(np.concatenate(execution.scores[name]), np.concatenate(scores), atol=1e-6)
    spans = [span for span in await two.drain() if span.kind == "backward"]
    assert len(spans) == 8 and {span.attributes["stage"] for span in spans} == {0, 1}
    assert await two.step("actor", lengths(BATCHES[0])) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match=r"The schedule has the models \['actor', 'ref'\], but .* \['ref'\]"):
        await two.run(plan.rows, {"actor": BATCHES[0]}, {"ref": rows})


@dataclass(frozen=True)
class Trained:
    """State after three steps of clipped training, in memory and in a checkpoint, and after a fourth."""

    config: Config
    parameters: dict
    metrics: list
    folder: Path
    fourth: tuple

    @property
    def dtype(self):
        return self.config.model.dtype


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
async def trained(request, four, folders, tmp_path_factory):
    """Train with four stages of the actor and two critics."""
    config, folder = settings(folders, clip=0.1, dtype=request.param), tmp_path_factory.mktemp(request.param)
    _, parameters, metrics = await three_steps(four, config, TWO_CRITICS, "fused", True)
    await four.save(folder)
    return Trained(config, parameters, metrics, folder, await fourth_step(four))


async def test_every_stage_is_clipped_by_the_norm_over_all_of_them(trained, folders, one_process):
    """Compare AdamW's first moment, which averages clipped gradients.

    Rounding to bfloat16 moves ratios across PPO's clip bound: 1 to 12 % of the moment in one process, by seed.
    """
    tolerance, rounding = {"float32": (1e-5, 1e-5), "bfloat16": (0.05, 0.15)}[trained.dtype]
    saved = state(trained.folder)
    for name in COUNTS:
        expected = one_process(settings(folders, clip=0.1), name)
        norms = [each[f"{name}/grad_norm"] for each in trained.metrics]
        assert norms == pytest.approx(expected.norms, rel=tolerance) and min(norms) > 0.2
        moment = dict.fromkeys(expected.gradients[0], 0.0)
        for gradient, norm in zip(expected.gradients, expected.norms, strict=True):
            moment = {key: 0.9 * moment[key] + 0.1 * gradient[key] * (0.1 / norm) for key in moment}
        assert distance({key: saved[f"{name}/exp_avg/{key}"] for key in moment}, moment) < rounding


async def test_training_resumes_exactly_in_another_layout(trained, four, two, tmp_path):
    """Layouts: the same stages, two ranks, a V with tied weights on one device, interleaved.

    A checkpoint saved again is bitwise equal, and so is the next step in the same stages; in other layouts rows are in
    other micro-batches.
    """
    saved, (metrics, parameters) = state(trained.folder), trained.fourth
    tolerance = {"float32": 1e-5, "bfloat16": 0.02}[trained.dtype]
    layouts = (TWO_CRITICS, OPPOSITE, LAYOUTS["V, dp 2"], LAYOUTS["interleaved"])
    for i, (group, layout) in enumerate(zip((four, two, four, two), layouts, strict=True)):
        await group.take(trained.config, layout)
        await group.load(trained.folder)
        await group.save(tmp_path / str(i))
        again = state(tmp_path / str(i))
        assert again.keys() == saved.keys() and all(torch.equal(again[key], saved[key]) for key in saved)
        for name in COUNTS:
            assert distance(await group.tensors(name, "data"), trained.parameters[name]) == 0
        found, resumed = await fourth_step(group)
        assert found == pytest.approx(metrics, rel=tolerance if i else 0, abs=0)
        for name in COUNTS:
            assert distance(resumed[name], parameters[name]) <= (tolerance if i else 0)


async def test_moving_layers_off_a_slow_rank_changes_no_result(trained, two, tmp_path):
    """Weights and optimizer state are bitwise equal, also after moving back; the next step differs by rounding only."""
    saved, (metrics, parameters) = state(trained.folder), trained.fourth
    tolerance = {"float32": 1e-5, "bfloat16": 0.02}[trained.dtype]
    await two.take(trained.config, OPPOSITE)
    await two.load(trained.folder)
    try:
        for i, (rates, layers) in enumerate([([1.0, 3.0], (3, 1)), ([1.0, 1.0], (2, 2)), ([3.0, 1.0], (1, 3))]):
            await two.replan(rates)
            assert await two.move_layers(trained.folder) and not await two.move_layers(trained.folder)
            assert two.layout["actor"].layers == layers
            await two.save(tmp_path / str(i))
            again = state(tmp_path / str(i))
            assert again.keys() == saved.keys() and all(torch.equal(again[key], saved[key]) for key in saved)
        found, moved = await fourth_step(two)
    finally:
        await two.replan([])
    assert found == pytest.approx(metrics, rel=tolerance)
    assert all(distance(moved[name], parameters[name]) <= tolerance for name in COUNTS)


async def test_a_slow_pipeline_gets_fewer_rows_without_changing_the_gradient(four, folders, one_process):
    """Two blocks of two devices; the last device of the second block is slow."""
    config, layout = settings(folders, critic_layers=4, clip=0.1), LAYOUTS["dp 2"]
    try:
        await four.replan([1.0, 1.0, 1.0, 3.0])
        await four.drain()
        found = await three_steps(four, config, layout, "fused", True)
        spans = [span for span in await four.drain() if span.kind == "backward"]
    finally:
        await four.replan([])
    assert_like_one_process(config, one_process, *found)
    tokens = [sum(span.tokens for span in spans if span.where == f"trainer/{rank}") for rank in range(4)]
    assert 2 * tokens[2] < tokens[0] and tokens[3] == tokens[2] and tokens[1] == tokens[0]


async def test_checkpoints_are_hugging_face_folders(trained):
    for name, kind in (("actor", Qwen2ForCausalLM), ("critic", Qwen2ForTokenClassification)):
        folder = trained.folder / name / "huggingface"
        model, report = kind.from_pretrained(folder, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        assert model.dtype == getattr(torch, trained.dtype)
        assert distance({key: p.detach() for key, p in model.named_parameters()}, trained.parameters[name]) == 0


async def test_exported_buckets_have_the_names_of_checkpoints(four, folders, tmp_path):
    config = settings(folders)
    config.rollout.update_weights_bucket_mb = 0
    await four.take(config, TWO_CRITICS)
    found = {}
    for i, names in enumerate(await four.bucket_plan()):
        await four.export_bucket(names, str(tmp_path / f"{i}.safetensors"))
        found |= load_file(tmp_path / f"{i}.safetensors")
    policy = load_policy(config.model.path, config.model)
    assert distance(found, {key: p.detach() for key, p in policy.named_parameters()}) == 0


async def test_impossible_layouts_are_refused_with_the_reason(two, folders, tmp_path):
    config = settings(folders)
    with pytest.raises(ValueError, match=r"must use the same number .*got \{'actor': 2, 'critic': 4\}"):
        await two.take(config, (Pipelines("actor", 2), Pipelines("critic", 2, 2)))
    with pytest.raises(ValueError, match=r"2 ranks are not a multiple of a block of 4"):
        await two.take(config, (Pipelines("actor", 4),))
    with pytest.raises(EngineError, match=r"layers=\(1, 2\) has 3 layers, but .* has 4"):
        await two.take(config, (Pipelines("actor", 2, layers=(1, 2)),))
    await two.take(config, OPPOSITE)
    with pytest.raises(ValueError, match="No gradients of the actor were accumulated"):
        await two.step("actor", [3])
    await two.run(schedule("serial", OPPOSITE, False), {name: BATCHES[0] for name in COUNTS})
    with pytest.raises(ValueError, match=r"saved: the actor has accumulated gradients of 11 rows.*Take the step"):
        await two.save("/nowhere")
    for model in COUNTS:
        await two.step(model, lengths(BATCHES[0]))
    with pytest.raises(EngineError, match=r"has no state to resume from"):
        await two.load(tmp_path)


@pytest.mark.parametrize("split", [False, True])
async def test_four_ranks_run_operations_in_order_and_after_their_inputs(four, folders, split):
    """Stages sleep, since four ranks share two cores; tests/benchmarks/pipeline_executor.py measures the overhead."""
    seconds = {"F": 0.01, "B": 0.01, "W": 0.01}
    layout = LAYOUTS["4 and 4"]
    rows = fused(layout, {"actor": 8, "critic": 8}, lambda model, stage, kind: seconds[kind], split)
    await four.take(settings(folders, critic_layers=4), layout)

    def play(rank, rows, layout):
        executor = rank.executor
        own = {(p.model, stage): Sleeping(p, stage, seconds) for p in layout for stage in p.stages_on(executor.device)}
        return executor.run(rows, own)

    ran = await asyncio.gather(*(rank.__ray_call__.remote(play, rows, layout) for rank in four.ranks))
    assert tuple(tuple(each.operation for each in row) for row in ran) == rows
    starts = {each.operation: each.start for row in ran for each in row}
    placed = {each.model: each for each in layout}
    for each in (each for row in ran for each in row):
        if (source := placed[each.operation.model].source(each.operation)) is not None:
            earlier = each.operation._replace(stage=source)
            assert each.start >= starts[earlier] + 0.9 * seconds[earlier.kind]


async def test_a_rank_killed_during_a_schedule_is_one_clear_error(two, folders):
    """Runs last, because its ranks are gone afterwards. The time limit is generous."""
    config = settings(folders)
    config.cluster.timeout_s = 60
    facts = await two.take(config, OPPOSITE)
    assert facts["packed"] is True
    await two.run(schedule("fused", OPPOSITE, True), {name: BATCHES[0] for name in COUNTS})
    busy = asyncio.ensure_future(
        two.run(serial(OPPOSITE, dict.fromkeys(COUNTS, 400)), {name: BATCHES[0] for name in COUNTS})
    )
    await asyncio.sleep(0.5)
    ray.kill(two.ranks[1])
    began = time.perf_counter()
    with pytest.raises(EngineError, match=r"trainer/1 died during the call to run its part of the schedule"):
        await busy
    assert time.perf_counter() - began < config.cluster.timeout_s
