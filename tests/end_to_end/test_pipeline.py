"""Pipelines against one process: the same gradients and parameters for every schedule and layout, on real ranks."""

import asyncio
import time
from dataclasses import dataclass, replace

import numpy as np
import pipelines
import pytest
import ray
import torch
from pipelines import Sleeping, fused, serial
from safetensors.torch import load_file
from single_process import BATCHES, FAMILIES, VOCABULARY, Serial, lengths, make_rows, settings
from transformers import (
    AutoConfig,
    Qwen2ForCausalLM,
    Qwen2ForTokenClassification,
)

from rlfuse.cluster.placement import Slots, worker_environment
from rlfuse.engines.models import collate, has_value_head, load_policy
from rlfuse.engines.passes import actor_loss, log_probs
from rlfuse.engines.pipeline.group import PipelineGroup
from rlfuse.engines.pipeline.layout import Pipelines
from rlfuse.engines.protocols import EngineError
from rlfuse.fusion.schedules.planning import Planner

ray.cloudpickle.register_pickle_by_value(pipelines)  # ranks can't import from tests
ORDERS = [(order, split) for order in ("serial", "fused") for split in (False, True)]
COUNTS = {"actor": 4, "critic": 4}
"""Micro-batches of a pipeline."""
OPPOSITE = (Pipelines("actor", 2), Pipelines("critic", 2, direction="up"))
TWO_CRITICS = (Pipelines("actor", 4), Pipelines("critic", 2, 2, "up"))
LAYOUTS = {
    "4 and 4": (Pipelines("actor", 4), Pipelines("critic", 4, direction="up")),
    "dp 2": OPPOSITE,  # two blocks of two devices
    "V, dp 2": (Pipelines("actor", 2, chunks=2), Pipelines("critic", 2, direction="up")),
    "unequal, side by side": (Pipelines("actor", 2, 2, layers=(3, 1)), Pipelines("critic", 4, layers=(1, 1, 2, 0))),
    "whole models": (Pipelines("actor", 1, 2), Pipelines("critic", 2)),
}


@dataclass(frozen=True)
class Anywhere(Slots):
    """More ranks than the shared Ray cluster has slots."""

    def options(self, slot, share, environment=None, **more):
        return {"num_cpus": 0, "runtime_env": {"env_vars": worker_environment("cpu")}} | more


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Random models of four layers, and a smaller one of two for the critic."""
    torch.manual_seed(0)
    made = {}
    small = dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=128, initializer_range=0.05,
    )  # fmt: skip
    for family, (config, model, more) in FAMILIES.items():
        for layers in (4, 2):
            folder = tmp_path_factory.mktemp(family)
            model(config(**small, **more, num_hidden_layers=layers)).save_pretrained(folder)
            made[family, layers] = str(folder)
    return made


@pytest.fixture(scope="module")
def one_process(folders):
    """Serial runs, each made once."""
    made = {}

    def get(config, name):
        key = (config.model.path, config.critic.path, config.actor.grad_clip, name)
        if key not in made:
            made[key] = Serial(config, name)
        return made[key]

    return get


class Probe(PipelineGroup):
    """Reads what single ranks hold."""

    async def take(self, config, layout):
        """Load stages of another layout, in the same processes: starting those is what costs."""

        def reconfigure(rank, config):
            rank.config = config

        self.config = config
        self.tied = AutoConfig.from_pretrained(config.model.path).tie_word_embeddings
        await asyncio.gather(*(rank.__ray_call__.remote(reconfigure, config) for rank in self.ranks))
        return await self.setup(layout, 10)

    async def tensors(self, model, field):
        """{name: tensor} over all stages: `grad` summed over data parallel ranks and undivided, or `data`."""

        def read(rank, model, field):
            whole = {}
            for name, parameter in rank.engines[model].module.named_parameters():
                tensor = getattr(parameter, field)
                whole[name.split(".", 1)[1]] = torch.zeros_like(parameter) if tensor is None else tensor.detach()
            return whole

        parts = await asyncio.gather(*(rank.__ray_call__.remote(read, model, field) for rank in self.ranks))
        total = {}
        for part in parts if field == "grad" else parts[: self.layout[model].stages]:
            for name, tensor in part.items():
                total[name] = total[name] + tensor if name in total else tensor
        if "lm_head.weight" in total and model == "actor" and self.tied:
            head = total.pop("lm_head.weight")
            if field == "grad":
                total["model.embed_tokens.weight"] = total["model.embed_tokens.weight"] + head
        return total


def schedule(order, layout, split):
    if order == "serial" and all(pipelines.chunks == 1 for pipelines in layout):
        return serial(layout, COUNTS, split)
    seconds = {"F": 5, "B": 5 if split else 10, "W": 5}
    return fused(layout, COUNTS, lambda model, stage, kind: seconds[kind], split)


def distance(found, expected):
    """Norm of the difference of all tensors, relative to the norm of what is expected."""
    assert found.keys() == expected.keys()
    one, other = (torch.cat([tensors[name].flatten() for name in expected]) for tensors in (found, expected))
    return float((one - other).norm() / other.norm())


@pytest.fixture(scope="module")
async def four(folders, slots):
    """Four ranks, ready to take layouts."""
    group, _ = await Probe.start(settings(folders), Anywhere(None, 4, "cpu"), TWO_CRITICS, 10)
    yield group
    for rank in group.ranks:
        ray.kill(rank)


@pytest.fixture(scope="module")
async def two(folders, slots):
    """Two ranks, likewise."""
    group, _ = await Probe.start(settings(folders), Anywhere(None, 2, "cpu"), OPPOSITE, 10)
    yield group
    for rank in group.ranks:
        ray.kill(rank)


async def three_steps(group, config, layout, order, split):
    """{model: gradient of each step}, {model: parameters after them}, metrics of each step."""
    rows = schedule(order, layout, split)
    await group.take(config, layout)
    metrics, gradients = [], {name: [] for name in COUNTS}
    for batch in BATCHES:
        await group.run(rows, {name: batch for name in COUNTS})
        for name in COUNTS:
            summed = await group.tensors(name, "grad")
            gradients[name].append({key: tensor / sum(lengths(batch)) for key, tensor in summed.items()})
            metrics.append(await group.step(name, lengths(batch)))
    return gradients, {name: await group.tensors(name, "data") for name in COUNTS}, metrics


def assert_like_one_process(config, one_process, gradients, parameters, metrics):
    """Gradients to 1e-6 of their norm in the first step. AdamW divides them by their own size, so that rounding in
    elements that are next to zero moves parameters by up to the learning rate: 1e-5 after that."""
    for name in COUNTS:
        expected = one_process(config, name)
        found = [distance(*pair) for pair in zip(gradients[name], expected.gradients, strict=True)]
        assert found[0] < 1e-6 and max(found) < 1e-5, (name, found)
        assert distance(parameters[name], expected.parameters) < 1e-5
        norms = [each[f"{name}/grad_norm"] for each in metrics if f"{name}/grad_norm" in each]
        assert norms == pytest.approx(expected.norms, rel=1e-5)


@pytest.mark.parametrize(
    "family, order, split", [("qwen2", *order) for order in ORDERS] + [(name, "fused", True) for name in FAMILIES][1:]
)
async def test_every_order_trains_as_one_process(four, folders, one_process, family, order, split):
    """Four stages of the actor, two opposite pipelines of two stages of the smaller critic; clipped."""
    config = settings(folders, family, clip=0.1)
    assert_like_one_process(config, one_process, *await three_steps(four, config, TWO_CRITICS, order, split))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("order, split", ORDERS[::3])
async def test_every_layout_trains_as_one_process(four, folders, one_process, name, order, split):
    config = settings(folders, critic_layers=4, clip=0.1)
    assert_like_one_process(config, one_process, *await three_steps(four, config, LAYOUTS[name], order, split))


@pytest.mark.parametrize("order, split", ORDERS[::3])
async def test_two_ranks_train_as_one_process(two, folders, one_process, order, split):
    config = settings(folders, "llama", clip=0.1)
    assert_like_one_process(config, one_process, *await three_steps(two, config, OPPOSITE, order, split))


async def test_orders_give_one_gradient_to_the_last_bit(two, folders):
    config = settings(folders)
    runs = [await three_steps(two, config, OPPOSITE, order, split) for order, split in (*ORDERS[:1], *ORDERS[2:])]
    for gradients, parameters, metrics in runs[1:]:
        np.testing.assert_equal(metrics, runs[0][2])
        for name in COUNTS:
            assert distance(parameters[name], runs[0][1][name]) == 0
            assert distance(gradients[name][2], runs[0][0][name][2]) == 0


async def test_activation_checkpointing_changes_no_number(two, folders, one_process):
    config = settings(folders)
    config.model.enable_gradient_checkpointing = True
    for split in (False, True):
        assert_like_one_process(config, one_process, *await three_steps(two, config, OPPOSITE, "fused", split))


async def test_padded_rows_train_as_packed_ones(two, folders, one_process):
    config = settings(folders)
    config.model.use_remove_padding = False
    assert_like_one_process(config, one_process, *await three_steps(two, config, OPPOSITE, "fused", True))


async def test_bfloat16_is_close(two, folders, one_process):
    config = settings(folders, dtype="bfloat16", clip=0.1)
    _, _, metrics = await three_steps(two, config, OPPOSITE, "fused", True)
    for name in COUNTS:
        norms = [each[f"{name}/grad_norm"] for each in metrics if f"{name}/grad_norm" in each]
        assert norms == pytest.approx(one_process(settings(folders, clip=0.1), name).norms, rel=0.05)


async def test_fewer_rows_than_micro_batches_leave_fillers_that_count_for_nothing(four, folders, one_process):
    config, few = settings(folders), make_rows(3, 8)
    await four.take(config, LAYOUTS["dp 2"])
    execution = await four.run(schedule("fused", LAYOUTS["dp 2"], True), {name: few for name in COUNTS})
    assert execution.scores == {}
    model = load_policy(config.model.path, config.model, "cpu")
    (actor_loss(config, model, collate(few, packed=False))[0] / sum(lengths(few))).backward()
    found = {key: tensor / sum(lengths(few)) for key, tensor in (await four.tensors("actor", "grad")).items()}
    assert distance(found, {key: p.grad for key, p in model.named_parameters()}) < 1e-6
    assert (await four.step("actor", lengths(few)))["actor/entropy"] > 0


async def test_scores_come_in_the_order_of_rows(four, folders):
    """Forward-only schedules, on layouts with two pipelines and with a V."""
    config, rows = settings(folders), make_rows(9, 1)
    config.actor.ppo_max_token_len_per_gpu = 40
    policy = load_policy(config.model.path, config.model, "cpu")
    batch = collate(rows, packed=False)
    with torch.no_grad():
        want = batch.split(log_probs(config, policy, batch)[0])
    for layout in ((*TWO_CRITICS, Pipelines("ref", 2, 2)), LAYOUTS["V, dp 2"]):
        await four.take(config, layout)
        for model in ("actor", "ref")[: len(layout) - 1]:
            for have, expected in zip(await four.log_probs(model, rows), want, strict=True):
                np.testing.assert_allclose(have, expected, atol=1e-5)
        assert all(not values.any() for values in await four.values(rows))  # a fresh value head starts at 0


async def test_a_schedule_scores_what_it_does_not_train(two, folders):
    """Reference and actor passes over later rows in an actor's schedule: the numbers and gradients of each alone."""
    config, rows = settings(folders), make_rows(6, 2)
    layout = (Pipelines("actor", 2), Pipelines("ref", 2, direction="up"))
    await two.take(config, layout)
    alone = {name: await two.log_probs(name, rows) for name in ("actor", "ref")}
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
    with pytest.raises(ValueError, match=r"The schedule's models are \['actor', 'ref'\], but .* \['ref'\]"):
        await two.run(plan.rows, {"actor": BATCHES[0]}, {"ref": rows})


async def test_training_resumes_exactly_in_another_layout(four, two, folders, tmp_path):
    """Saved by four stages and two critics; continued by two ranks, and by a V with tied weights on one device."""
    config = settings(folders, clip=0.1)
    reference = await three_steps(four, config, TWO_CRITICS, "fused", True)
    await four.save(tmp_path / "checkpoint")

    async def one_more(group, layout):
        await group.run(schedule("fused", layout, True), {name: BATCHES[0] for name in COUNTS})
        metrics = {}
        for name in COUNTS:
            metrics |= await group.step(name, lengths(BATCHES[0]))
        return metrics, {name: await group.tensors(name, "data") for name in COUNTS}

    metrics, parameters = await one_more(four, TWO_CRITICS)
    for group, layout in ((four, TWO_CRITICS), (two, OPPOSITE), (four, LAYOUTS["V, dp 2"])):
        await group.take(config, layout)
        await group.load(tmp_path / "checkpoint")
        for name in COUNTS:
            assert distance(await group.tensors(name, "data"), reference[1][name]) == 0
        found, resumed = await one_more(group, layout)
        assert found == pytest.approx(metrics, rel=1e-5)
        for name in COUNTS:
            assert distance(resumed[name], parameters[name]) < 1e-5


async def test_checkpoints_are_hugging_face_folders(four, folders, tmp_path):
    config = settings(folders)
    _, parameters, _ = await three_steps(four, config, TWO_CRITICS, "serial", False)
    await four.save(tmp_path)
    for name, kind in (("actor", Qwen2ForCausalLM), ("critic", Qwen2ForTokenClassification)):
        model, report = kind.from_pretrained(tmp_path / name / "huggingface", output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        assert distance({key: p.detach() for key, p in model.named_parameters()}, parameters[name]) == 0
    assert has_value_head(str(tmp_path / "critic" / "huggingface"))


async def test_weights_come_in_buckets_as_checkpoints_name_them(four, folders, tmp_path):
    config = settings(folders)
    config.rollout.update_weights_bucket_mb = 0
    await four.take(config, TWO_CRITICS)
    found = {}
    for i, names in enumerate(await four.bucket_plan()):
        await four.export_bucket(names, str(tmp_path / f"{i}.safetensors"))
        found |= load_file(tmp_path / f"{i}.safetensors")
    policy = load_policy(config.model.path, config.model, "cpu")
    assert distance(found, {key: p.detach() for key, p in policy.named_parameters()}) == 0


async def test_what_does_not_fit_says_so(two, folders, tmp_path):
    config = settings(folders)
    with pytest.raises(ValueError, match=r"take \{'actor': 2, 'critic': 4\}.*make these equal"):
        await two.take(config, (Pipelines("actor", 2), Pipelines("critic", 2, 2)))
    with pytest.raises(ValueError, match=r"2 ranks are no whole number of blocks of 4"):
        await two.take(config, (Pipelines("actor", 4),))
    with pytest.raises(EngineError, match=r"layers=\(1, 2\) are 3, but .* has 4 layers"):
        await two.take(config, (Pipelines("actor", 2, layers=(1, 2)),))
    await two.take(config, OPPOSITE)
    with pytest.raises(ValueError, match="Nothing was accumulated for the actor"):
        await two.step("actor", [3])
    await two.run(schedule("serial", OPPOSITE, False), {name: BATCHES[0] for name in COUNTS})
    with pytest.raises(ValueError, match=r"saved now: the actor holds gradients of 11 rows.*Step first"):
        await two.save("/nowhere")
    for model in COUNTS:
        await two.step(model, lengths(BATCHES[0]))
    (tmp_path / "trainer.json").write_text('{"ranks": 2}')
    with pytest.raises(EngineError, match=r"not written by pipeline ranks.*pipeline_parallel_size=1"):
        await two.load(tmp_path)


@pytest.mark.parametrize("split", [False, True])
async def test_four_ranks_run_their_rows_in_order_and_nothing_before_its_input(four, folders, split):
    """Sleeping, as four ranks share two cores. What it takes is measured by tests/benchmarks/pipeline_executor.py."""
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
            earlier = replace(each.operation, stage=source)
            assert each.start >= starts[earlier] + 0.9 * seconds[earlier.kind]


async def test_a_rank_killed_within_a_schedule_is_one_clear_error(folders, slots):
    """Last, on ranks of its own, started as a job would; the time limit is far longer than it takes."""
    config = settings(folders)
    config.cluster.timeout_s = 60
    group, facts = await Probe.start(config, slots, OPPOSITE, 10)
    assert facts["packed"] is True
    await group.run(schedule("fused", OPPOSITE, True), {name: BATCHES[0] for name in COUNTS})
    busy = asyncio.ensure_future(
        group.run(serial(OPPOSITE, dict.fromkeys(COUNTS, 400)), {name: BATCHES[0] for name in COUNTS})
    )
    await asyncio.sleep(0.5)
    ray.kill(group.ranks[1])
    began = time.perf_counter()
    with pytest.raises(EngineError, match=r"trainer/1 died while it was asked to run its part of the schedule"):
        await busy
    assert time.perf_counter() - began < config.cluster.timeout_s
    ray.kill(group.ranks[0])
