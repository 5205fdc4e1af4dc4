"""The search for the fastest plan: equal to brute force, with time limits, neighbours and refinement."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from math import inf
from random import Random
from types import SimpleNamespace

import pytest
from test_plan import SEVEN_B

from rlfuse.config.facts import Facts
from rlfuse.config.schema import Config
from rlfuse.engines.memory.estimate import memory_of
from rlfuse.engines.memory.model_sizes import read_shape
from rlfuse.engines.memory.remedies import changed, problems
from rlfuse.errors import EngineError
from rlfuse.tools.planning.cluster_file import Cluster, ClusterError, Group
from rlfuse.tools.planning.costs import costs_of
from rlfuse.tools.planning.forecast import lengths_of
from rlfuse.tools.planning.hardware import KINDS
from rlfuse.tools.planning.search import TIMED_OUT, refine, search
from rlfuse.tools.planning.searched_job import Job
from rlfuse.tools.planning.space import FASTEST, POLICY, Fillings, axes_of, structures
from rlfuse.tools.planning.step_time import Seconds, StepTimes, fastest_labels, simulated_part, with_idle_stages

SMALL = {
    "trainer.nnodes": (1, 2),
    "trainer.n_gpus_per_node": (2,),
    "rollout.tensor_model_parallel_size": (1, 2),
    "training.pipeline_parallel_size": (1, 2),
    "training.tensor_model_parallel_size": (1, 2),
    "training.ulysses_sequence_parallel_size": (1,),
    "actor.zero_stage": (1, 3),
    "actor.offload_optimizer": (False, True),
    "model.enable_gradient_checkpointing": (False, True),
    "actor.ppo_max_token_len_per_gpu": (1024, 4096),
    "rollout.max_num_seqs": (16, 64),
    "rollout.gpu_memory_utilization": (0.8, 0.5),
    "fusion.policy": ("adaptive",),
}
"""A space small enough for brute force."""
CLUSTER = {"nodes": 2, "devices_per_node": 2, "device_memory_gb": 24, "peak_tflops": 10, "memory_bandwidth_gbs": 300}


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16}
    (folder / "config.json").write_text(json.dumps(SEVEN_B | sizes | {"vocab_size": 32000}))
    return read_shape(str(folder), "model.path")


def job_of(shape, cluster=None, axes=None, **more):
    cluster = cluster or Cluster(**CLUSTER | more)
    config = Config()
    config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.rollout.n = 16, 8, 4
    config.algorithm.adv_estimator, config.data.max_response_length = "grpo", 256
    config.trainer.nnodes, config.trainer.n_gpus_per_node = cluster.nodes, cluster.devices_per_node
    config.cluster.device = cluster.device
    return Job(config, {"actor": shape}, {}, cluster, cluster.hardware(), lengths_of(config, 120), 64, axes or SMALL)


def read_of(data):
    from rlfuse.config.input_files import read

    return read(Cluster, data, ClusterError)


def facts_of(shape):
    return Facts(attention_heads=shape.heads, layers=len(shape.layers), cuda=True)


def brute_force(job, facts):
    """Yield the step time of every plan that fits, without using bounds."""
    found = []
    names = list(job.axes)[8:]
    for structure in structures(job.config, facts, job.axes, job.shapes["actor"], job.cluster):
        for values in product(*(job.axes[name] for name in names)):
            config, memory = job.with_settings((*structure, *zip(names, values, strict=True)))
            if not problems(config, memory):
                seconds = job.simulated(config, memory).step
                assert job.bound(config, memory) <= seconds * (1 + 1e-9)
                found.append(seconds)
    return found


# The search ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_both_optimizer_residencies_are_searched(shape):
    offload, residency = "actor.offload_optimizer", "actor.optimizer_residency"
    for device, values in (("cuda", ("forecast", "step")), ("cpu", ("training",))):
        axes = axes_of(Config(), shape, Cluster(1, 2, 10, device=device, peak_tflops=1.0))
        assert axes[residency] == values
    job = job_of(shape, axes=SMALL | {residency: ("forecast", "step")})
    tried = [dict(each) for each in structures(job.config, facts_of(shape), job.axes, shape)]
    pairs = {(each[offload], each[residency]) for each in tried}
    assert pairs == {(False, "forecast"), (False, "step"), (True, "forecast")}, (
        "host optimizers need no other residency"
    )


def test_indivisible_tensor_parallel_sizes_are_not_searched(shape):
    axes = axes_of(job_of(shape).config, shape, Cluster(1, 8, 10, device="cuda", peak_tflops=1.0))
    assert axes["training.tensor_model_parallel_size"] == (1, 2, 4, 8)
    mixture = replace(shape, model=SimpleNamespace(share=refuse_to_share, work=shape.model.work))
    axes = axes_of(job_of(shape).config, mixture, Cluster(1, 8, 10, device="cuda", peak_tflops=1.0))
    assert axes["training.tensor_model_parallel_size"] == (1,)


def refuse_to_share(width):
    raise EngineError(f"{width} ranks can't share it")


@pytest.mark.slow
@pytest.mark.parametrize("memory", [24, 14])
def test_search_equals_brute_force(shape, memory):
    axes = SMALL | {"trainer.nnodes": (2,), "rollout.gpu_memory_utilization": (0.8,)}
    job, facts = job_of(shape, axes=axes, device_memory_gb=memory), facts_of(shape)
    found = search(job, facts, seconds=inf)
    assert found.plans[0].seconds.step == pytest.approx(min(brute_force(job, facts)))
    assert found.unexplored == 0, "the search is complete"


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
@pytest.mark.parametrize("groups", [(), (Group(nodes=1, peak_tflops=5, memory_bandwidth_gbs=100),)])
def test_quick_bound_is_at_most_the_bound(shape, estimator, groups):
    """Include pipelines, a critic and uneven nodes."""
    job, facts = job_of(shape, Cluster(**CLUSTER, groups=groups)), facts_of(shape)
    job.config.algorithm.adv_estimator = estimator
    job = replace(job, shapes=dict.fromkeys(("actor", "critic") if estimator == "gae" else ("actor",), shape))
    fastest = Fillings(job.axes).settings(FASTEST)
    found = [job.sized_without_activations(each + fastest) for each in structures(job.config, facts, job.axes, shape)]
    assert len(found) > 20
    for config, memory in found:
        assert 0 < job.quick_bound(config) <= job.bound(config, memory, roomy=True)


@pytest.mark.slow
def test_cached_memory_and_costs_match_the_plan(shape):
    """Compare with fresh results, in any order of evaluation."""
    job, draw = job_of(shape), Random(2)
    some = draw.sample(list(structures(job.config, facts_of(shape), SMALL, shape)), 16)
    tried = [(*each, *((key, draw.choice(SMALL[key])) for key in list(SMALL)[8:])) for each in some]
    for settings in (*tried, *tried[::-1]):
        (config, memory), fresh = job.with_settings(settings), job_of(shape)
        assert memory == memory_of(config, job.shapes, job.cluster.budget(config))
        assert job.costs(config, memory) == fresh.costs(config, memory)


@pytest.mark.slow
def test_a_stopped_search_reports_what_is_unexplored(shape):
    job, facts = job_of(shape), facts_of(shape)
    cut, whole = search(job, facts, seconds=0), search(job, facts, seconds=inf)
    assert cut.simulated == 1 and cut.bound_s <= whole.plans[0].seconds.step <= cut.plans[0].seconds.step


def test_the_first_plans_are_tried_under_every_policy(shape):
    policies = ("serial", "stream", "rlhfuse", "adaptive")
    few = {key: values[:1] for key, values in SMALL.items() if key != "rollout.max_num_seqs"}
    job, facts = job_of(shape, axes=SMALL | few | {"fusion.policy": policies}), facts_of(shape)
    job.config.fusion.policy = "serial"
    first = search(job, facts, seconds=inf).plans[0]
    config, memory = job.with_settings(first.settings)
    steps = {policy: job.simulated(config, memory, policy).step for policy in policies}
    assert first.seconds.step == min(steps.values()) < steps["serial"]
    assert steps[dict(first.settings)["fusion.policy"]] == first.seconds.step


def test_a_timeout_without_plans_reports_what_is_unexplored(shape):
    axes = SMALL | {"model.enable_gradient_checkpointing": (False,), "actor.ppo_max_token_len_per_gpu": (4096,)}
    job, facts = job_of(shape, axes=axes, device_memory_gb=6.8), facts_of(shape)
    found = search(job, facts, seconds=0)
    assert not found.plans and found.unexplored > 0 and found.nearest[1]


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, 3, 8])
def test_search_and_refinement_share_one_deadline(shape, monkeypatch, seconds):
    """Use a clock that advances only during simulations."""
    clock, original = SimpleNamespace(now=0.0), StepTimes.simulated

    def slow(self, *arguments, **more):
        clock.now += 1
        return original(self, *arguments, **more)

    monkeypatch.setattr(StepTimes, "simulated", slow)
    policies = ("serial", "stream", "rlhfuse", "adaptive")
    job, facts = job_of(shape, axes=SMALL | {POLICY: policies}), facts_of(shape)
    found = search(job, facts, seconds, clock=lambda: clock.now)
    assert found.plans and found.unexplored > 0 and clock.now <= max(1, seconds)
    assert (found.bound_s == 0) is (seconds == 0), "with and without time for the bounds of all structures"
    began, (after, around) = clock.now, refine(job, found, facts, 2, lambda: clock.now)
    assert clock.now <= began + 2 and after.plans[0].seconds.step <= 1.002 * found.plans[0].seconds.step
    assert TIMED_OUT in {each.reason for each in around}


@pytest.mark.slow
def test_smallest_fillings_are_tried_without_sizing_them_again(shape, monkeypatch):
    """Use a clock that advances only when memory without activations is computed."""
    clock, original = SimpleNamespace(now=0.0), Job.sized_without_activations

    def slow(self, settings):
        clock.now += 1
        return original(self, settings)

    monkeypatch.setattr(Job, "sized_without_activations", slow)
    axes = SMALL | {"model.enable_gradient_checkpointing": (False,), "actor.ppo_max_token_len_per_gpu": (8192,)}
    job, facts = job_of(shape, axes=axes, device_memory_gb=6.8), facts_of(shape)
    found = search(job, facts, seconds=6, clock=lambda: clock.now)
    assert not found.plans and found.structures > 3 and clock.now <= 6


@pytest.mark.slow
def test_search_ends_early_after_patience_plans_without_gain(shape):
    job, facts = job_of(shape), facts_of(shape)
    whole, patient = search(job, facts, seconds=inf), search(job, facts, seconds=inf, patience=3)
    assert patient.simulated < whole.simulated and patient.unexplored > 0 and patient.bound_s > 0
    assert patient.plans[0].seconds.step >= whole.plans[0].seconds.step >= patient.bound_s


@pytest.mark.slow
def test_caches_do_not_change_step_times(shape):
    """Compare pipelines that differ only in speed, and so share a schedule."""
    pipeline, job = (("training.pipeline_parallel_size", 2), ("actor.zero_stage", 1)), job_of(shape)
    again = (*pipeline, ("model.enable_gradient_checkpointing", True))
    fresh = job.simulated(*job.with_settings(again))
    other = job_of(shape)
    faster = other.simulated(*other.with_settings(pipeline))
    assert faster.step < fresh.step and other.simulated(*other.with_settings(again)) == fresh


def test_ctrl_c_returns_the_plans_found_so_far(shape, monkeypatch):
    job, facts, simulated = job_of(shape), facts_of(shape), []
    original = StepTimes.simulated

    def interrupted(self, *arguments, **more):
        simulated.append(arguments)
        if len(simulated) == 2:
            raise KeyboardInterrupt
        return original(self, *arguments, **more)

    monkeypatch.setattr(StepTimes, "simulated", interrupted)
    found = search(job, facts, seconds=inf)
    assert len(found.plans) == 1 and found.unexplored > 0 and found.bound_s <= found.plans[0].seconds.step


@pytest.mark.slow
def test_neighbours_of_a_refined_plan_are_not_faster(shape):
    job, facts = job_of(shape), facts_of(shape)
    found, around = refine(job, search(job, facts, seconds=0), facts)
    best = found.plans[0].seconds.step
    assert {each.setting[0] for each in around} <= set(job.axes) and len(around) >= 7
    assert all(each.plan.seconds.step >= best * 0.998 if each.plan else each.reason for each in around)


@pytest.mark.slow
def test_an_invalid_neighbour_is_reported_with_its_error(shape):
    job, facts = job_of(shape, axes=SMALL | {"training.pipeline_parallel_size": (4, 8)}), facts_of(shape)
    _, around = refine(job, search(job, facts, seconds=0), facts)
    why = next(each.reason for each in around if each.setting == ("training.pipeline_parallel_size", 8))
    assert "must divide the 4 slots" in why


@pytest.mark.slow
def test_keys_are_not_changed_without_a_gain(shape):
    job, facts = job_of(shape), facts_of(shape)
    job.config.rollout.max_num_seqs = 64  # an engine has 16 samples, so 1024 would be no faster
    found, _ = refine(job, search(job, facts, seconds=0), facts)
    assert dict(found.plans[0].settings)["rollout.max_num_seqs"] == 64


@pytest.mark.parametrize(
    "device, leaf, configured", [("cuda", "gpu_memory_utilization", 0.55), ("cpu", "kv_cache_memory_mb", 64)]
)
def test_the_job_s_cache_size_is_searched(shape, device, leaf, configured):
    config = changed(Config(), [(f"rollout.{leaf}", configured)])
    values = axes_of(config, shape, Cluster(1, 2, 10, device=device, peak_tflops=1.0))[f"rollout.{leaf}"]
    assert configured in values and list(values) == sorted(values, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("off, kept", [(9.0, True), (0.0, False)])
def test_the_job_s_values_stay_within_the_error_of_a_calibration(shape, off, kept):
    job, facts = job_of(shape), facts_of(shape)
    job.config.actor.offload_optimizer = True
    measured = replace(job.hardware, errors=dict.fromkeys(KINDS, off))
    job = replace(job, cluster=replace(job.cluster, calibration="calibration.yaml"), hardware=measured)
    found, around = refine(job, search(job, facts, seconds=0), facts)
    first, *others = found.plans
    assert dict(first.settings)["actor.offload_optimizer"] is kept
    assert any(plan.seconds.step < first.seconds.step for plan in others) is kept, "faster plans are still listed"
    assert all(each.plan or each.reason for each in around)


@pytest.mark.slow
def test_a_neighbour_without_a_pipeline_has_no_virtual_stages(shape):
    """Start from a plan with virtual stages, which plans without a pipeline can't have."""
    stages, several = "training.pipeline_parallel_size", "training.virtual_pipeline_model_parallel_size"
    job, facts = job_of(shape, axes=SMALL | {several: (1, 2)}), facts_of(shape)
    found = search(replace(job, axes=job.axes | {stages: (2,), several: (2,)}), facts, seconds=0)
    found, around = refine(job, found, facts)
    tried = [found.plans[0], *(each.plan for each in around if each.setting == (stages, 1))]
    assert (1, 1) in {(dict(plan.settings)[stages], dict(plan.settings)[several]) for plan in tried if plan}


@pytest.mark.slow
def test_values_are_reset_after_the_values_they_depend_on(shape):
    """Check that virtual stages are reset before the pipeline, as a device without pipeline has one stage."""
    stages, several = "training.pipeline_parallel_size", "training.virtual_pipeline_model_parallel_size"
    job, facts = job_of(shape, axes=SMALL | {several: (1, 2)}), facts_of(shape)
    measured = replace(job.hardware, errors=dict.fromkeys(KINDS, 9.0))
    job = replace(job, cluster=replace(job.cluster, calibration="calibration.yaml"), hardware=measured)
    found = search(replace(job, axes=job.axes | {stages: (2,), several: (2,)}), facts, seconds=0)
    assert dict(found.plans[0].settings)[several] == 2
    first = dict(refine(job, found, facts)[0].plans[0].settings)
    assert (first[stages], first[several]) == (1, 1)


def test_shared_errors_do_not_make_steps_equal():
    errors = {"generating": 0.3, "scoring": 0.3, "training": 0.3}
    base, slower, traded = Seconds(10, 5, 20), Seconds(10, 5, 21), Seconds(18, 5, 13)
    assert slower.is_significantly_slower(base, errors) and not traded.is_significantly_slower(base, errors)
    assert fastest_labels({"serial": slower, "adaptive": base}, errors) == {"adaptive": "the fastest"}
    equal = fastest_labels({"serial": traded, "stream": slower, "adaptive": base}, errors)
    assert equal == dict.fromkeys(("serial", "adaptive"), "equal within the error")
    nearly = replace(base, training=20.01)
    assert len(fastest_labels({"serial": nearly, "adaptive": base}, errors)) == 2, (
        "both policies are equal within the error"
    )


@pytest.mark.parametrize("tokens, longer", [(65536, 1.25), (256, 33 / 32), (64, 1 + 1 / 128)])
def test_passes_of_a_pipeline_wait_for_the_first_and_last_micro_batch(shape, tokens, longer):
    job = job_of(shape)
    job.config.training.pipeline_parallel_size, job.config.actor.ppo_max_token_len_per_gpu = 2, tokens
    costs = costs_of(job.config, job.shapes, job.hardware, 256)
    waits = with_idle_stages(job.config, costs, 256)  # 32 rows of 256 tokens in each of two pipelines
    assert costs.score_tokens_per_s / waits.score_tokens_per_s == pytest.approx(longer)
    job.config.training.pipeline_parallel_size = 1
    assert with_idle_stages(job.config, costs, 256) == costs


@pytest.mark.parametrize("stages", [2, 4])
def test_no_filling_of_a_pipeline_beats_the_bound_of_its_structure(shape, stages):
    """Try several micro-batch sizes: small ones have short bubbles, so the largest are not always the fastest."""
    job = job_of(shape)
    pipeline = (("training.pipeline_parallel_size", stages), ("actor.zero_stage", 1))
    first, *others = [(*pipeline, ("actor.ppo_max_token_len_per_gpu", tokens)) for tokens in (4096, 512, 64)]
    bound = job.bound(*job.sized_without_activations(first), roomy=True)
    assert all(bound <= job.bound(*job.sized_without_activations(each)) for each in (first, *others))
    assert job.bound(*job.sized_without_activations(others[0])) < job.bound(*job.sized_without_activations(first))


@pytest.mark.parametrize("engines", [1, 2, 6, 7, 8, 96, 128, 1024])
@pytest.mark.parametrize("mini_batch, mini_batches, rows", [(64, 1, 8), (64, 8, 8), (1, 32, 1), (75, 4, 2)])
def test_simulated_part_keeps_samples_per_engine(engines, mini_batch, mini_batches, rows):
    simulated_engines, prompts = simulated_part(engines, mini_batch, mini_batches, rows)
    assert 1 <= simulated_engines <= engines and 1 <= prompts <= mini_batch
    assert prompts / simulated_engines == pytest.approx(mini_batch / engines, rel=0.03)
    assert prompts * mini_batches >= min(16, mini_batch * mini_batches)


def test_simulated_samples_include_the_longest(shape):
    job = job_of(shape)
    few, everything = job.times._lengths(4, 8), job.times._lengths(4, 16)
    assert max(few) == max(job.lengths) and sorted(everything) == sorted(job.lengths)
    assert sum(few) / len(few) == pytest.approx(sum(everything) / len(everything), rel=0.25)
