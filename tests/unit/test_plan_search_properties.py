"""Properties of every search: more memory and devices never slow a plan, plans fit, none exceeds the published MFU."""

from __future__ import annotations

import time
from dataclasses import replace
from math import inf
from random import Random

import pytest
from test_plan_search import CLUSTER, SMALL, facts_of, job_of, read_of, shape  # noqa: F401, a fixture

from rlfuse.config.schema import Config
from rlfuse.engines.memory.remedies import changed, problems
from rlfuse.tools.planning.cluster_file import MAX_UTILIZATION, Cluster, ClusterError, LinkSpecs
from rlfuse.tools.planning.forecast import lengths_of
from rlfuse.tools.planning.hardware import Calibration, Errors, Hardware, Source, rounded_coefficients, write
from rlfuse.tools.planning.search import search
from rlfuse.tools.planning.search_command import PATIENCE, SEARCH_SHARE, SECONDS
from rlfuse.tools.planning.space import axes_of, is_structural, structures


@pytest.mark.slow
def test_more_memory_never_makes_a_plan_infeasible_or_slower(shape):  # noqa: F811
    facts, before = facts_of(shape), inf
    for memory in (6, 10, 12, 14, 24):
        found = search(job_of(shape, device_memory_gb=memory), facts, seconds=inf)
        now = found.plans[0].seconds.step if found.plans else inf
        assert now <= before
        before = now
    assert before < inf


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_plans_still_fit_with_more_device_or_host_memory(shape, device):  # noqa: F811
    """Draw single values of all searched keys, with a critic and a reference."""
    cluster = Cluster(**CLUSTER, device=device)
    axes, facts, draw = axes_of(Config(), shape, cluster), facts_of(shape), Random(1)
    axes["actor.ppo_max_token_len_per_gpu"] = axes["actor.ppo_max_token_len_per_gpu"][::3]  # each needs another trace
    job = job_of(shape, cluster, axes)
    job.config.algorithm.adv_estimator = "gae"
    job = replace(job, shapes=dict.fromkeys(("actor", "critic", "reference"), shape))
    rest = [key for key in axes if not is_structural(key)]
    some = draw.sample(list(structures(job.config, facts, axes, shape)), 12)
    plans = [(*each, *((key, draw.choice(axes[key])) for key in rest)) for each in some]
    seen = set()
    for more in ("device_memory_gb", "host_memory_gb"):
        larger = [replace(job, cluster=replace(cluster, **{more: size})) for size in (4, 8, 12, 24, 80, 640)]
        for settings in plans:
            fits = [not problems(*each.with_settings(settings)) for each in larger]
            assert fits == sorted(fits), settings
            seen.add(tuple(fits))
    assert len(seen) > 3, "all plans need the same memory"


@pytest.mark.slow
@pytest.mark.parametrize("more, counts", [("nodes", (1, 2, 3, 4)), ("devices_per_node", (1, 2, 4))])
@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_more_devices_never_slow_the_best_plan(shape, more, counts, estimator):  # noqa: F811
    """Use slow links between nodes."""
    facts, steps = facts_of(shape), []
    for count in counts:
        cluster = Cluster(**CLUSTER | {more: count}, links=LinkSpecs(between_gbs=0.1, within_gbs=1))
        known = axes_of(Config(), shape, cluster)
        axes = SMALL | {key: known[key] for key in ("trainer.nnodes", "trainer.n_gpus_per_node")}
        job = job_of(shape, cluster, axes)
        job.config.algorithm.adv_estimator = estimator
        roles = ("actor", "critic") if estimator == "gae" else ("actor",)
        best = search(replace(job, shapes=dict.fromkeys(roles, shape)), facts, seconds=inf).plans[0]
        steps.append(best.seconds.step)
    assert steps == sorted(steps, reverse=True)


@pytest.mark.slow
def test_more_devices_never_slow_the_result_of_a_default_search(shape):  # noqa: F811
    """Search the whole space, with early stopping."""
    steps = []
    for nodes in (1, 8):
        cluster = Cluster(**CLUSTER | {"nodes": nodes, "devices_per_node": 8})
        job = job_of(shape, cluster)
        job.config.data.train_batch_size, job.config.actor.ppo_mini_batch_size = 32, 16
        axes, lengths = axes_of(job.config, shape, cluster), lengths_of(job.config, 120)
        given = SEARCH_SHARE * SECONDS
        job = replace(job, axes=axes, lengths=lengths)
        found = search(job, facts_of(shape), given, patience=PATIENCE, clock=time.process_time)
        assert found.bound_s > 0, "not all structures were tried"
        steps.append(found.plans[0].seconds.step)
    assert steps == sorted(steps, reverse=True)


@pytest.mark.slow
def test_no_forecast_exceeds_the_highest_published_mfu(shape):  # noqa: F811
    """Check all simulated plans, with the highest accepted utilization."""
    job = job_of(shape, utilization=MAX_UTILIZATION)
    flops = 6 * shape.passed * (sum(job.lengths) + len(job.lengths) * job.prompt_tokens)
    for plan in search(job, facts_of(shape), seconds=inf).plans:
        config = changed(job.config, plan.settings)
        training = job.simulated(config, plan.memory, "serial").training
        assert flops / training / config.slots / (job.cluster.peak_tflops * 1e12) <= MAX_UTILIZATION


def test_utilization_above_the_highest_published_mfu_is_refused():
    with pytest.raises(ClusterError, match=r"utilization=0.6: needs a number above 0, at most 0.547"):
        read_of({**CLUSTER, "utilization": 0.6})


def test_a_scaled_calibration_is_checked_against_the_peak(tmp_path):
    known = Hardware(50e12, 40e12, 30e12, 1e12, sent_bytes_per_s=3e8, errors={"training": 0.05})
    path = tmp_path / "calibration.yaml"
    source = Source("a run", 1000, 2, 64, 10, 20, 40, 1)
    errors = Errors(training=0.05)
    write(Calibration("runs", "a device", 1, "1", rounded_coefficients(known), errors, "steps", (source,)), path)
    cluster = {"nodes": 1, "devices_per_node": 8, "device_memory_gb": 80, "calibration": str(path)}
    same, other = read_of(cluster).hardware(), read_of(cluster | {"product_ratio": 2, "copy_ratio": 1.5}).hardware()
    assert (same.train_flops, other.train_flops, other.bytes_per_s) == (40e12, 80e12, 1.5e12)
    assert (same.links.within_bytes_per_s, other.links.within_bytes_per_s) == (3e8, 200e9), (
        "links are those of the cluster file"
    )
    assert read_of(cluster | {"links": {"within_gbs": 25}}).hardware().links.within_bytes_per_s == 25e9
    assert other.errors["training"] > same.errors["training"] == 0.05
    assert read_of(cluster | {"peak_tflops": 80}).hardware().train_flops == 40e12
    with pytest.raises(ClusterError, match=r"56% of peak_tflops=72, above the highest published MFU of 54\.7%"):
        read_of(cluster | {"peak_tflops": 72}).hardware()
    with pytest.raises(ClusterError, match=r"above the highest published MFU of 49\.3%"):
        read_of(cluster | {"peak_tflops": 80}).hardware(experts=True)
    with pytest.raises(ClusterError, match="product_ratio, copy_ratio: they scale a calibration"):
        read_of(cluster | {"product_ratio": 2})


def test_mixture_of_experts_forecasts_are_limited_by_published_mfu():
    cluster = Cluster(**CLUSTER, utilization=MAX_UTILIZATION)
    assert cluster.hardware().train_flops == MAX_UTILIZATION * 10e12
    assert cluster.hardware(experts=True).train_flops == 0.493 * 10e12


def test_a_plan_leaves_the_margin_free(shape):  # noqa: F811
    best = search(job_of(shape), facts_of(shape), seconds=0).plans[0]
    assert max(map(best.memory.total, best.memory.phases)) <= 0.95 * 24 * 2**30


def test_offloaded_state_fits_host_memory(shape):  # noqa: F811
    job, facts = job_of(shape), facts_of(shape)
    offloaded = [(key, (True,) if key == "actor.offload_optimizer" else values) for key, values in SMALL.items()]
    free = search(replace(job, axes=dict(offloaded)), facts, seconds=0).plans[0]
    config, _ = job.with_settings(free.settings)
    needed = free.memory.host * config.trainer.n_gpus_per_node / 2**30
    for share, fits in ((1.1, True), (0.9, False)):
        tight = job_of(shape, host_memory_gb=needed * share / 0.95)
        wrong = problems(config, replace(free.memory, budget=tight.cluster.budget(config)))
        assert fits is not any("host memory: needs" in line for line in wrong)
    none = search(job_of(shape, axes=dict(offloaded), host_memory_gb=1), facts, seconds=0)
    assert not none.plans and "(host_memory_gb)" in none.nearest[1][0]
