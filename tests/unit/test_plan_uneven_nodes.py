"""Plans for clusters whose nodes differ in speed, memory, memory bandwidth or number of devices."""

from math import inf

import pytest
from test_plan_search import CLUSTER, SMALL, brute_force, facts_of, job_of, shape  # noqa: F401, the fixture

from rlfuse.config.schema import Config
from rlfuse.costs.model import Costs
from rlfuse.engines.memory.remedies import changed
from rlfuse.tools.planning.cluster_file import Cluster, ClusterError, Group
from rlfuse.tools.planning.forecast import forecast, lengths_of
from rlfuse.tools.planning.hardware import NodeSpeed, WorkSpeed
from rlfuse.tools.planning.search import search
from rlfuse.tools.planning.space import axes_of, structures
from rlfuse.tools.planning.step_time import StepTimes, engine_speeds, slowest_node_costs

WHOLE, SLOWER = WorkSpeed(), WorkSpeed(0.5, 0.5)


def test_slower_nodes_slow_the_step_and_the_smallest_memory_counts(shape):  # noqa: F811
    uneven = Cluster(**CLUSTER, groups=(Group(nodes=1, peak_tflops=5, device_memory_gb=20),))
    one, two = (changed(Config(), [("trainer.nnodes", nodes)]) for nodes in (1, 2))
    assert uneven.budget(two).bytes < Cluster(**CLUSTER).budget(two).bytes
    assert uneven.speeds(two) == (NodeSpeed(), NodeSpeed(0.5)) and uneven.speeds(one) == (NodeSpeed(),)
    assert uneven.budget(one) == Cluster(**CLUSTER).budget(one), "memory of unused nodes does not count"
    axes = SMALL | {"trainer.nnodes": (2,)}
    even = search(job_of(shape, axes=axes), facts_of(shape), seconds=0).plans[0]
    slower = search(job_of(shape, uneven, axes), facts_of(shape), seconds=0).plans[0]
    assert slower.seconds.step > even.seconds.step


def test_memory_bandwidth_of_a_group_affects_only_generation(shape):  # noqa: F811
    group = Group(nodes=2, memory_bandwidth_gbs=CLUSTER["memory_bandwidth_gbs"] / 2)
    plan = search(job_of(shape, axes=SMALL | {"fusion.policy": ("serial",)}), facts_of(shape), seconds=0).plans[0]
    (even, halved, slow) = (
        job.simulated(*job.with_settings(plan.settings), policy="serial")
        for job in (
            job_of(shape),
            job_of(shape, Cluster(**CLUSTER, groups=(group,))),
            job_of(shape, memory_bandwidth_gbs=CLUSTER["memory_bandwidth_gbs"] / 2),
        )
    )
    assert halved.generating > 1.2 * even.generating and halved.generating == pytest.approx(slow.generating, rel=0.05)
    assert halved.training == pytest.approx(even.training, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("bandwidth", [None, 100])
def test_plans_use_only_nodes_with_enough_devices(shape, bandwidth):  # noqa: F811
    group = Group(nodes=1, devices_per_node=1, memory_bandwidth_gbs=bandwidth)
    cluster = Cluster(**CLUSTER, groups=(group,))
    assert cluster.devices == 3 and cluster.sizes == (1, 2)
    axes = axes_of(job_of(shape).config, shape, cluster)
    assert axes["trainer.n_gpus_per_node"] == (1, 2) and axes["trainer.nnodes"] == (1, 2)
    few = {"actor.offload_optimizer": (False,), "rollout.gpu_memory_utilization": (0.8,)}
    job, facts = job_of(shape, cluster, SMALL | few | {"trainer.n_gpus_per_node": (1, 2)}), facts_of(shape)
    job.config.trainer.n_gpus_per_node = 1
    machines = {tuple(dict(each)[f"trainer.{key}"] for key in ("nnodes", "n_gpus_per_node"))
                for each in structures(job.config, facts, job.axes, shape, cluster)}  # fmt: skip
    assert machines == {(1, 1), (2, 1), (1, 2)}, "no two nodes have two devices"
    found = search(job, facts, seconds=inf)
    assert found.unexplored == 0 and found.plans[0].seconds.step == pytest.approx(min(brute_force(job, facts)))
    requested = changed(job.config, [("trainer.nnodes", 2), ("trainer.n_gpus_per_node", 2)])
    assert list(cluster.missing_for(requested)) == [
        "trainer.nnodes=2: the cluster file has nodes=1 with 2 devices; change one of the two"
    ]


@pytest.mark.slow
def test_forecasts_use_the_speeds_of_uneven_nodes():
    config = Config()
    config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.rollout.n = 8, 8, 2
    config.algorithm.adv_estimator, config.data.max_response_length = "grpo", 256
    config.trainer.nnodes, config.trainer.n_gpus_per_node = 2, 2
    costs, lengths = Costs(score_tokens_per_s=8000, train_tokens_per_s=4000), lengths_of(config, 120)
    times = StepTimes({}, lengths, 64)
    even, uneven = (forecast(config, times, costs, speeds=speeds).steps for speeds in ((), (WHOLE, SLOWER)))
    # Slot speeds are known from the second step on, so work is assigned in proportion.
    assert all(even[policy].step < uneven[policy].step < 2 * even[policy].step for policy in even)
    assert (
        slowest_node_costs(costs, (WHOLE, SLOWER)).train_tokens_per_s == 2000 and slowest_node_costs(costs, ()) == costs
    )


def test_engine_has_the_speed_of_its_slowest_device():
    config = Config()
    config.trainer.nnodes, config.trainer.n_gpus_per_node = 2, 4
    config.rollout.tensor_model_parallel_size = 2
    assert engine_speeds(config, (WHOLE, SLOWER)) == (WHOLE, WHOLE, SLOWER, SLOWER) and engine_speeds(config, ()) == ()
    config.rollout.tensor_model_parallel_size = 8
    assert engine_speeds(config, (WorkSpeed(0.5, 2.0), WHOLE)) == (WorkSpeed(0.5, 1.0),)


def test_groups_need_the_cluster_s_value():
    with pytest.raises(ClusterError, match="memory_bandwidth_gbs of a group is relative to"):
        Cluster(nodes=2, devices_per_node=8, device_memory_gb=80, peak_tflops=312,
                groups=(Group(nodes=1, memory_bandwidth_gbs=900),))  # fmt: skip
