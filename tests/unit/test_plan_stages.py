"""Pipelines in `rlfuse plan`: placement of layers, memory and time."""

import json
from dataclasses import replace

import pytest
from test_plan import SEVEN_B
from test_plan_models import job

from rlfuse.config.facts import Facts
from rlfuse.costs.model import Costs
from rlfuse.engines.memory.activations import activations, parts_on, stage_parts
from rlfuse.engines.memory.estimate import parameters_on
from rlfuse.engines.memory.model_sizes import read_shape
from rlfuse.engines.pipeline.layout import pipelines_of
from rlfuse.fusion.schedules.operations import Operation
from rlfuse.fusion.schedules.planning import planner_of
from rlfuse.fusion.schedules.transfers import check_deadlock
from rlfuse.tools.planning.cluster_file import Cluster
from rlfuse.tools.planning.space import CHUNKS, PLACEMENT, VOCABULARY, axes_of, structures
from rlfuse.tools.planning.step_time import StepTimes, stage_shares
from rlfuse.tools.planning.tables import placements, stage_note

PIPELINES = "training.pipeline_parallel_size"


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text(json.dumps(SEVEN_B))
    return read_shape(str(folder), "model.path")


def test_fewer_logits_allow_more_layers_on_the_last_stage(large):
    sizes = {}
    for prompt in (0, 512, 7680):
        config = job(training__pipeline_parallel_size=4, data__max_prompt_length=prompt)
        sizes[prompt] = [len(part.layers) for part in stage_parts(config, large)]
        shares = stage_shares(config, large)
        assert sum(shares) == pytest.approx(1) and max(shares) < 0.28
    assert sizes == {0: [7, 8, 8, 5], 512: [7, 7, 8, 6], 7680: [7, 7, 7, 7]}
    assert "head counts as 1.2 layers, since 50% of positions" in stage_note(job(), large)


CHUNKED = [(1, "v"), (2, "v"), (2, "interleaved"), (3, "interleaved")]


@pytest.mark.parametrize("chunks, placement", CHUNKED)
@pytest.mark.parametrize("role", ["actor", "critic", "reference"])
def test_virtual_stages_hold_the_whole_model_in_total(large, chunks, placement, role):
    config = chunked(chunks, placement)
    assert sum(parameters_on(config, large, role, at) for at in range(4)) == large.parameters
    layers = [layer for at in range(4) for part in parts_on(config, large, role, at) for layer in part.layers]
    assert sorted(layers) == list(range(28)) and len(parts_on(config, large, role, 0)) == chunks


def chunked(chunks, placement="v", **more):
    return job(
        training__pipeline_parallel_size=4,
        training__virtual_pipeline_model_parallel_size=chunks,
        training__pipeline_placement=placement,
        **more,
    )


def test_v_placement_has_both_ends_on_one_device(large):
    first = placements(chunked(2), {"actor": large, "critic": large})[0].trainer
    assert first == "trainer/0: actor layers 0-3 and 26-27, critic layers 12-15 and 16-19"
    held = [len(part.layers) for part in parts_on(chunked(2), large, "actor", 0)]
    assert held == [4, 2] and parts_on(chunked(2), large, "actor", 0)[1].last
    ends = parts_on(chunked(2, "interleaved"), large, "critic", 0)
    assert not ends[0].first and ends[1].last  # stages 3 and 7 of an upward pipeline


@pytest.mark.parametrize("chunks, placement", CHUNKED[1:])
def test_planner_schedules_virtual_stages(chunks, placement):
    """Compare with 1F1B of one stage per device."""
    config = chunked(chunks, placement, algorithm__adv_estimator="gae")
    planner, counts = planner_of(config), {"actor": 4, "critic": 4}
    for name in counts:
        for stage in range(4 * chunks):
            for kind, seconds in (("F", 0.1), ("B", 0.2)):
                planner.learn(Operation(name, 0, stage, 0, kind), (1 + (stage == 4 * chunks - 1)) * seconds / chunks)
    plan = planner.plan(counts)
    check_deadlock(plan.rows, tuple(pipelines_of(config, name) for name in counts))
    last = {each.stage for row in plan.rows for each in row}
    assert last == set(range(4 * chunks)) and plan.seconds < plan.serial_s
    assert planner.stage_seconds("actor") == pytest.approx([0.3 / chunks] * (4 * chunks - 1) + [0.6 / chunks])


@pytest.mark.slow
def test_search_tries_virtual_stages_with_pipelines(large):
    axes = axes_of(job(), large, Cluster(1, 8, 80, device="cuda", peak_tflops=100.0))
    facts = Facts(attention_heads=large.heads, layers=28, cuda=True)
    some = {
        tuple(dict(each)[key] for key in (PIPELINES, CHUNKS, PLACEMENT))
        for each in structures(job(), facts, axes, large)
    }
    assert some == {(1, 1, "v"), *((stages, *each) for stages in (2, 4, 8) for each in CHUNKED[:3])}


@pytest.mark.parametrize("chunks, placement", CHUNKED[:3])
@pytest.mark.parametrize("role", ["actor", "critic", "reference"])
def test_a_vocabulary_parallel_head_is_split_evenly(large, chunks, placement, role):
    config = chunked(chunks, placement, training__vocabulary_parallel=True)
    held = [parameters_on(config, large, role, at) for at in range(4)]
    assert sum(held) == large.parameters
    if role != "critic":
        assert sum(part.head == (at, 4) for at in range(4) for part in parts_on(config, large, role, at)) == 4
        between = [size for at, size in enumerate(held) if at in (1, 2)]
        assert max(between) - min(between) <= max(large.layers)
        assert sum(stage_shares(config, large, role)) == pytest.approx(1)
    assert "the actor's head is split" in stage_note(config, large)


def test_activations_of_a_vocabulary_parallel_head_are_on_every_device(large):
    """Compare with a whole head: less on its device, more on the others."""
    whole, divided = (chunked(1, training__vocabulary_parallel=shared) for shared in (False, True))
    found = [[activations(config, large, "actor", "cuda", at) for at in (0, 3)] for config in (whole, divided)]
    layers = [[len(parts_on(config, large, "actor", at)[0].layers) for at in (0, 3)] for config in (whole, divided)]
    assert layers == [[7, 6], [7, 7]]
    assert found[1][0] > found[0][0] and found[1][1] < found[0][1] * 7 / 6


def test_vocabulary_parallelism_shortens_steps_of_wide_heads(large):
    """Use 8 stages of 3 or 4 layers and a head that costs as much as 9 layers; check the bounds as well."""
    times = StepTimes({"actor": replace(large, head=9 * large.layers[0])}, [512] * 256, 0)
    took = {}
    for shared in (False, True):
        config = job(
            training__pipeline_parallel_size=8,
            training__vocabulary_parallel=shared,
            trainer__n_gpus_per_node=8,
            algorithm__adv_estimator="grpo",
            data__max_prompt_length=1,
        )
        plan = times.planner(config, {"actor": 16}, 1.0).plan({"actor": 16})
        check_deadlock(plan.rows, (pipelines_of(config, "actor"),))
        costs = Costs(train_tokens_per_s=100.0)
        took[shared] = times._pipeline_s(config, costs, schedule=True, roomy=False)
        assert times._pipeline_s(config, costs, schedule=False, roomy=True) < took[shared]
        assert times._pipeline_s(config, costs, schedule=False, roomy=False) <= took[shared]
    assert took[False] > 1.3 * took[True]


@pytest.mark.slow
def test_search_tries_vocabulary_parallelism_for_wide_heads(large):
    cluster, facts = Cluster(1, 4, 80, device="cuda", peak_tflops=100.0), Facts(layers=28, vocabulary=152064, cuda=True)
    given = job(data__max_prompt_length=1)
    axes = axes_of(given, large, cluster)
    some = {tuple(dict(each)[key] for key in (PIPELINES, VOCABULARY)) for each in structures(given, facts, axes, large)}
    assert some == {(1, False), *((stages, shared) for stages in (2, 4) for shared in (False, True))}
    assert axes_of(given, replace(large, head=large.hidden), cluster)[VOCABULARY] == (False,)
