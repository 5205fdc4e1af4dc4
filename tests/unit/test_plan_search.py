"""The search for the fastest plan: equal to brute force, monotone in memory and devices, plausible, a job file."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from math import inf

import pytest
from test_plan import SEVEN_B

from rlfuse.config.facts import Facts
from rlfuse.config.schema import Config
from rlfuse.fusion.costs import Costs
from rlfuse.planning.calibration import Calibration, Errors, Source, coefficients_of, write
from rlfuse.planning.cluster_file import MOST_UTILIZATION, Cluster, ClusterError, Group, LinksGiven
from rlfuse.planning.costs import costs_of
from rlfuse.planning.forecast import engine_speeds, forecast, lengths_of, of_slowest, with_idle_stages
from rlfuse.planning.hardware import KINDS, Hardware, Links
from rlfuse.planning.memory import problems
from rlfuse.planning.model_sizes import read_shape
from rlfuse.planning.remedies import changed
from rlfuse.planning.search import search, settled, surely_slower
from rlfuse.planning.space import axes_of, structures
from rlfuse.planning.step_time import Job, Seconds, StepTimes, cut

SMALL = {
    "trainer.nnodes": (1, 2),
    "trainer.n_gpus_per_node": (2,),
    "rollout.tensor_model_parallel_size": (1, 2),
    "training.pipeline_parallel_size": (1, 2),
    "training.ulysses_sequence_parallel_size": (1,),
    "actor.zero_stage": (1, 3),
    "actor.offload_optimizer": (False, True),
    "model.enable_gradient_checkpointing": (False, True),
    "actor.ppo_max_token_len_per_gpu": (1024, 4096),
    "rollout.max_num_seqs": (16, 64),
    "rollout.gpu_memory_utilization": (0.8, 0.5),
    "fusion.policy": ("adaptive",),
}
"""A space that brute force goes through."""
CLUSTER = {"nodes": 2, "devices_per_node": 2, "device_memory_gb": 24, "tflops": 10, "memory_bandwidth_gbs": 300}


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
    """Seconds of every plan that fits, whatever the bound says of it."""
    times, found = job.times, []
    names = list(job.axes)[7:]
    for structure in structures(job.config, facts, job.axes, job.shapes["actor"]):
        for values in product(*(job.axes[name] for name in names)):
            config, memory = job.with_settings((*structure, *zip(names, values, strict=True)))
            if not problems(config, memory):
                seconds = times.simulated(config, memory).step
                assert times.bound(config, memory) <= seconds * (1 + 1e-9)
                found.append(seconds)
    return found


# Links and costs -----------------------------------------------------------------------------------------------------


def test_a_ring_within_a_node_sends_all_but_ones_own_part():
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


def costs(shape, **keys):
    config = changed(job_of(shape).config, [(name.replace("__", "."), value) for name, value in keys.items()])
    links = Links(1e9, 1e8, 1e-5, 1e-4, 2)
    return costs_of(config, {"actor": shape}, Hardware(1e13, 1e13, 1e13, 1e12, host_bytes_per_s=1e10, links=links), 200)


def test_each_zero_stage_sends_what_it_divides(shape):
    whole, states, sums, all_of_it = (costs(shape, actor__zero_stage=stage) for stage in range(4))
    assert whole.train_tokens_per_s == states.train_tokens_per_s > sums.train_tokens_per_s
    assert sums.train_tokens_per_s > all_of_it.train_tokens_per_s
    assert whole.score_tokens_per_s == sums.score_tokens_per_s > all_of_it.score_tokens_per_s
    assert whole.optimizer_s > states.optimizer_s > sums.optimizer_s > all_of_it.optimizer_s


def test_recomputation_costs_a_third_more_and_larger_micro_batches_gather_less_often(shape):
    kept, again = (costs(shape, model__enable_gradient_checkpointing=value) for value in (False, True))
    assert kept.train_tokens_per_s == pytest.approx(4 / 3 * again.train_tokens_per_s)
    few, many = (costs(shape, actor__zero_stage=3, actor__ppo_max_token_len_per_gpu=n) for n in (256, 2048))
    assert many.train_tokens_per_s > few.train_tokens_per_s


def test_engines_over_several_devices_read_faster_and_wait_for_each_other(shape):
    one, two = (costs(shape, rollout__tensor_model_parallel_size=width) for width in (1, 2))
    assert two.step_per_context_token_s == pytest.approx(one.step_per_context_token_s / 2)
    assert two.step_base_s > one.step_base_s, "a small model's weights are read faster than its devices agree"


# The search ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("memory", [24, 14])
def test_it_is_brute_force(shape, memory):
    job, facts = job_of(shape, device_memory_gb=memory), facts_of(shape)
    found = search(job, facts, seconds=inf)
    assert found.plans[0].seconds.step == pytest.approx(min(brute_force(job, facts)))
    assert found.left == 0, "it came to its end"


@pytest.mark.slow
def test_a_cut_search_says_what_is_still_open(shape):
    job, facts = job_of(shape), facts_of(shape)
    cut, whole = search(job, facts, seconds=0), search(job, facts, seconds=inf)
    assert cut.simulated == 1 and cut.bound_s <= whole.plans[0].seconds.step <= cut.plans[0].seconds.step


def test_the_first_plans_are_tried_under_every_policy(shape):
    policies = ("serial", "stream", "rlhfuse", "adaptive")
    job, facts = job_of(shape, axes=SMALL | {"fusion.policy": policies}), facts_of(shape)
    job.config.fusion.policy = "serial"
    first = search(job, facts, seconds=0).plans[0]
    config, memory = job.with_settings(first.settings)
    steps = {policy: job.times.simulated(config, memory, policy).step for policy in policies}
    assert first.seconds.step == min(steps.values()) < steps["serial"]
    assert steps[dict(first.settings)["fusion.policy"]] == first.seconds.step


def test_where_time_is_out_and_nothing_was_found_it_says_what_was_not_looked_at(shape):
    axes = SMALL | {"model.enable_gradient_checkpointing": (False,), "actor.ppo_max_token_len_per_gpu": (4096,)}
    job, facts = job_of(shape, axes=axes, device_memory_gb=6.8), facts_of(shape)
    found = search(job, facts, seconds=0)
    assert not found.plans and found.left > 0 and found.nearest[1]


def test_what_was_found_before_ctrl_c_is_told(shape, monkeypatch):
    job, facts, simulated = job_of(shape), facts_of(shape), []
    really = StepTimes.simulated

    def interrupted(self, *arguments, **more):
        simulated.append(arguments)
        if len(simulated) == 2:
            raise KeyboardInterrupt
        return really(self, *arguments, **more)

    monkeypatch.setattr(StepTimes, "simulated", interrupted)
    found = search(job, facts, seconds=inf)
    assert len(found.plans) == 1 and found.left > 0 and found.bound_s <= found.plans[0].seconds.step


def test_neighbours_of_a_plan_that_was_settled_for_are_no_faster_or_can_not_be(shape):
    job, facts = job_of(shape), facts_of(shape)
    found, around = settled(job, search(job, facts, seconds=0), facts)
    best = found.plans[0].seconds.step
    assert {each.setting[0] for each in around} <= set(job.axes) and len(around) >= 7
    assert all(each.plan.seconds.step >= best * 0.998 if each.plan else each.why_not for each in around)


def test_a_neighbour_that_no_check_lets_pass_is_told(shape):
    job, facts = job_of(shape, axes=SMALL | {"training.pipeline_parallel_size": (4, 8)}), facts_of(shape)
    _, around = settled(job, search(job, facts, seconds=0), facts)
    why = next(each.why_not for each in around if each.setting == ("training.pipeline_parallel_size", 8))
    assert "must divide the 4 slots" in why


def test_a_key_is_not_changed_for_nothing(shape):
    job, facts = job_of(shape), facts_of(shape)
    job.config.rollout.max_num_seqs = 64  # 16 samples are all that an engine has: 1024 would be no faster
    found, _ = settled(job, search(job, facts, seconds=0), facts)
    assert dict(found.plans[0].settings)["rollout.max_num_seqs"] == 64


@pytest.mark.parametrize("off, kept", [(9.0, True), (0.0, False)])
def test_the_job_s_own_values_stay_as_long_as_a_calibration_leaves_open_what_is_faster(shape, off, kept):
    job, facts = job_of(shape), facts_of(shape)
    job.config.actor.offload_optimizer = True
    measured = replace(job.hardware, errors=dict.fromkeys(KINDS, off))
    job = replace(job, cluster=replace(job.cluster, calibration="calibration.yaml"), hardware=measured)
    found, around = settled(job, search(job, facts, seconds=0), facts)
    first, *others = found.plans
    assert dict(first.settings)["actor.offload_optimizer"] is kept
    assert any(plan.seconds.step < first.seconds.step for plan in others) is kept, "and the faster ones are told"
    assert all(each.plan or each.why_not for each in around)


@pytest.mark.slow
def test_more_memory_never_makes_a_plan_infeasible_or_slower(shape):
    facts, before = facts_of(shape), inf
    for memory in (6, 10, 12, 14, 24):
        found = search(job_of(shape, device_memory_gb=memory), facts, seconds=inf)
        now = found.plans[0].seconds.step if found.plans else inf
        assert now <= before
        before = now
    assert before < inf


@pytest.mark.slow
def test_more_devices_never_slow_the_best_plan(shape):
    facts, steps = facts_of(shape), []
    for nodes in (1, 2, 3, 4):
        cluster = Cluster(**CLUSTER | {"nodes": nodes}, links=LinksGiven(between_gbs=0.1))
        axes = SMALL | {"trainer.nnodes": axes_of(Config(), shape, cluster)["trainer.nnodes"]}
        steps.append(search(job_of(shape, cluster, axes), facts, seconds=inf).plans[0].seconds.step)
    assert steps == sorted(steps, reverse=True)


def test_no_forecast_is_better_than_what_anybody_measured(shape):
    job = job_of(shape, utilization=MOST_UTILIZATION)
    best = search(job, facts_of(shape), seconds=0).plans[0]
    flops = 6 * shape.passed * (sum(job.lengths) + len(job.lengths) * job.prompt_tokens)
    assert flops / best.seconds.training / job.cluster.devices / (job.cluster.tflops * 1e12) <= MOST_UTILIZATION
    with pytest.raises(ClusterError, match=r"utilization=0.6: needs a number above 0, at most 0.547"):
        read_of({**CLUSTER, "utilization": 0.6})


def test_a_calibration_goes_over_to_another_device_by_measured_ratios_and_is_held_against_its_peak(tmp_path):
    known = Hardware(50e12, 40e12, 30e12, 1e12, errors={"training": 0.05})
    path = tmp_path / "calibration.yaml"
    source = Source("a run", 1000, 2, 64, 10, 20, 40, 1)
    errors = Errors(training=0.05)
    write(Calibration("runs", "a device", 1, "1", coefficients_of(known), errors, "steps", (source,)), path)
    cluster = {"nodes": 1, "devices_per_node": 8, "device_memory_gb": 80, "calibration": str(path)}
    same, other = read_of(cluster).hardware(), read_of(cluster | {"product_ratio": 2, "copy_ratio": 1.5}).hardware()
    assert (same.train_flops, other.train_flops, other.bytes_per_s) == (40e12, 80e12, 1.5e12)
    assert other.errors["training"] > same.errors["training"] == 0.05
    assert read_of(cluster | {"tflops": 80}).hardware().train_flops == 40e12
    with pytest.raises(ClusterError, match=r"56% of tflops=72, more than 54\.7%"):
        read_of(cluster | {"tflops": 72}).hardware()
    with pytest.raises(ClusterError, match=r"more than 49\.3%"):
        read_of(cluster | {"tflops": 80}).hardware(experts=True)
    with pytest.raises(ClusterError, match="product_ratio, copy_ratio: need each other"):
        read_of(cluster | {"product_ratio": 2})


def test_a_mixture_of_experts_is_forecast_no_faster_than_any_was_measured():
    cluster = Cluster(**CLUSTER, utilization=MOST_UTILIZATION)
    assert cluster.hardware().train_flops == MOST_UTILIZATION * 10e12
    assert cluster.hardware(experts=True).train_flops == 0.493 * 10e12


def test_a_plan_leaves_the_margin_free(shape):
    best = search(job_of(shape), facts_of(shape), seconds=0).plans[0]
    assert max(map(best.memory.total, best.memory.phases)) <= 0.95 * 24 * 2**30


def test_what_is_off_the_devices_has_room_on_their_host(shape):
    job, facts = job_of(shape), facts_of(shape)
    offloaded = [(key, (True,) if key == "actor.offload_optimizer" else values) for key, values in SMALL.items()]
    free = search(replace(job, axes=dict(offloaded)), facts, seconds=0).plans[0]
    config, _ = job.with_settings(free.settings)
    needed = free.memory.host * config.trainer.n_gpus_per_node / 2**30
    for share, fits in ((1.1, True), (0.9, False)):
        tight = job_of(shape, host_memory_gb=needed * share / 0.95)
        wrong = problems(config, replace(free.memory, budget=tight.cluster.budget()))
        assert fits is not any("host memory: needs" in line for line in wrong)
    none = search(job_of(shape, axes=dict(offloaded), host_memory_gb=1), facts, seconds=0)
    assert not none.plans and "(host_memory_gb)" in none.nearest[1][0]


def test_slower_nodes_slow_the_step_and_the_smallest_memory_counts(shape):
    uneven = Cluster(**CLUSTER, groups=(Group(nodes=1, tflops=5, device_memory_gb=20),))
    assert uneven.budget().bytes < Cluster(**CLUSTER).budget().bytes
    assert uneven.speeds(2) == (1.0, 0.5) and uneven.speeds(1) == (1.0,)
    assert uneven.budget(1) == Cluster(**CLUSTER).budget(), "of a node that is not used no memory counts"
    axes = SMALL | {"trainer.nnodes": (2,)}
    even = search(job_of(shape, axes=axes), facts_of(shape), seconds=0).plans[0]
    slower = search(job_of(shape, uneven, axes), facts_of(shape), seconds=0).plans[0]
    assert slower.seconds.step > even.seconds.step


def test_one_jobs_forecast_is_of_uneven_nodes():
    config = Config()
    config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.rollout.n = 8, 8, 2
    config.algorithm.adv_estimator, config.data.max_response_length = "grpo", 256
    config.trainer.nnodes, config.trainer.n_gpus_per_node = 2, 2
    costs, lengths = Costs(score_tokens_per_s=8000, train_tokens_per_s=4000), lengths_of(config, 120)
    even, uneven = (forecast(config, {}, costs, lengths, 64, speeds=speeds).steps for speeds in ((), (1.0, 0.5)))
    assert uneven["serial"] == pytest.approx(2 * even["serial"], rel=0.05), "samples are divided alike"
    assert all(uneven[policy] > 1.3 * even[policy] for policy in even)
    assert of_slowest(costs, (1.0, 0.5)).train_tokens_per_s == 2000 and of_slowest(costs, ()) == costs


def test_an_engine_is_as_fast_as_its_slowest_device():
    config = Config()
    config.trainer.nnodes, config.trainer.n_gpus_per_node = 2, 4
    config.rollout.tensor_model_parallel_size = 2
    assert engine_speeds(config, (1.0, 0.5)) == (1.0, 1.0, 0.5, 0.5) and engine_speeds(config, ()) == ()
    config.rollout.tensor_model_parallel_size = 8
    assert engine_speeds(config, (1.0, 0.5)) == (0.5,)


def test_errors_that_plans_have_in_common_do_not_make_them_equal(shape):
    plan = search(job_of(shape), facts_of(shape), seconds=0).plans[0]
    errors = {"generating": 0.3, "scoring": 0.3, "training": 0.3}
    mine, slower = (replace(plan, seconds=Seconds(*each)) for each in ((10, 5, 20), (10, 5, 21)))
    assert surely_slower(mine, slower, errors)
    traded = replace(plan, seconds=Seconds(18, 5, 13))
    assert not surely_slower(mine, traded, errors)


@pytest.mark.parametrize("tokens, longer", [(65536, 1.25), (256, 33 / 32), (64, 1 + 1 / 128)])
def test_passes_of_a_pipeline_wait_for_the_first_and_last_micro_batch(shape, tokens, longer):
    job = job_of(shape)
    job.config.training.pipeline_parallel_size, job.config.actor.ppo_max_token_len_per_gpu = 2, tokens
    costs = costs_of(job.config, job.shapes, job.hardware, 256)
    waits = with_idle_stages(job.config, costs, [192] * 64, 64)  # 32 rows of 256 tokens in each of two pipelines
    assert costs.score_tokens_per_s / waits.score_tokens_per_s == pytest.approx(longer)
    job.config.training.pipeline_parallel_size = 1
    assert with_idle_stages(job.config, costs, [192] * 64, 64) == costs


@pytest.mark.parametrize("stages", [2, 4])
def test_no_filling_of_a_pipeline_beats_the_bound_of_its_structure(shape, stages):
    """Small micro-batches have short bubbles: the largest are not the fastest."""
    job = job_of(shape)
    pipeline = (("training.pipeline_parallel_size", stages), ("actor.zero_stage", 1))
    first, *others = [(*pipeline, ("actor.ppo_max_token_len_per_gpu", tokens)) for tokens in (4096, 512, 64)]
    bound = job.times.bound(*job.lean(first), roomy=True)
    assert all(bound <= job.times.bound(*job.lean(each)) for each in (first, *others))
    assert job.times.bound(*job.lean(others[0])) < job.times.bound(*job.lean(first))


@pytest.mark.parametrize("engines", [1, 2, 6, 7, 8, 96, 128, 1024])
@pytest.mark.parametrize("mini_batch, mini_batches, rows", [(64, 1, 8), (64, 8, 8), (1, 32, 1), (75, 4, 2)])
def test_a_step_is_cut_in_proportion(engines, mini_batch, mini_batches, rows):
    some, prompts = cut(engines, mini_batch, mini_batches, rows)
    assert 1 <= some <= engines and 1 <= prompts <= mini_batch
    assert prompts / some == pytest.approx(mini_batch / engines, rel=0.03)
    assert prompts * mini_batches >= min(16, mini_batch * mini_batches)


def test_few_samples_have_the_longest_of_all(shape):
    job = job_of(shape)
    few, everything = job.times._lengths(4, 8), job.times._lengths(4, 16)
    assert max(few) == max(job.lengths) and sorted(everything) == sorted(job.lengths)
    assert sum(few) / len(few) == pytest.approx(sum(everything) / len(everything), rel=0.25)
