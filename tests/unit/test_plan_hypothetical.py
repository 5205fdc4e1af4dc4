"""What this project can't run yet, as the search sees it: what it saves and costs, and that no job file ever has it."""

from dataclasses import replace

import pytest
from test_plan_search import CLUSTER, Cluster, facts_of, job_of, shape  # noqa: F401, a fixture

from rlfuse.planning import hypothetical
from rlfuse.planning.hypothetical import as_one, mapping_problem
from rlfuse.planning.remedies import changed
from rlfuse.planning.search import search

TENSOR, EXPERTS = "hypothetical.tensor_parallel_size", "hypothetical.expert_parallel_size"
AWAY, SMALL = "hypothetical.offload_activations", "hypothetical.rollout_8bit"


@pytest.fixture
def job(shape):  # noqa: F811
    job = job_of(shape)
    more = hypothetical.axes(job.config, shape, job.cluster.devices_per_node)
    return replace(job, config=hypothetical.hypothetical(job.config), axes={**job.axes, **more})


def size(memory, role, what):
    return sum(part.size for part in memory.parts if (part.role, part.what) == (role, what))


def test_with_none_of_it_a_plan_is_the_plain_one(job):
    plain = replace(job, config=job.config)
    assert hypothetical.words(job.config) == []
    assert job.with_settings([(TENSOR, 1)])[1] == plain.with_settings([])[1]


def test_trainers_of_two_ranks_hold_half_and_wait_for_their_links(job):
    whole, halves = (job.with_settings([("actor.zero_stage", 0), (TENSOR, degree)]) for degree in (1, 2))
    for what in ("parameters", "gradients", "optimizer"):
        assert size(halves[1], "actor", what) == pytest.approx(size(whole[1], "actor", what) / 2)
    assert size(halves[1], "engine", "parameters") == size(whole[1], "engine", "parameters")
    args = (job.shapes, job.hardware, 200.0)
    fast, slow = hypothetical.costs(whole[0], *args), hypothetical.costs(halves[0], *args)
    assert slow.train_tokens_per_s < fast.train_tokens_per_s, "all-reduces in every layer"
    assert slow.step_base_s == fast.step_base_s, "the engine is as it was"
    links = replace(job.hardware.links, within_bytes_per_s=float("inf"), within_s=0.0)
    free = hypothetical.costs(halves[0], job.shapes, replace(job.hardware, links=links), 200.0)
    assert free.train_tokens_per_s > slow.train_tokens_per_s


def test_a_group_is_a_rank_with_a_share_of_the_slots(job):
    config = changed(job.config, [(TENSOR, 2)])
    assert as_one(config).slots == job.config.slots // 2 and as_one(job.config).slots == job.config.slots


def test_activations_wait_in_the_hosts_memory_as_far_as_copies_are_hidden(job):
    (_, here), (_, away) = (job.with_settings([(AWAY, value)]) for value in (False, True))
    moved = size(here, "actor", "activations") - size(away, "actor", "activations")
    assert moved > 0 and away.host - here.host >= moved
    slow = replace(job, hardware=replace(job.hardware, host_bytes_per_s=1.0))
    assert size(slow.with_settings([(AWAY, True)])[1], "actor", "activations") == pytest.approx(
        size(here, "actor", "activations"), rel=1e-3
    )


def test_small_weights_leave_room_for_the_cache_and_are_read_faster(job):
    (config, wide), (small_config, small) = (job.with_settings([(SMALL, value)]) for value in (False, True))
    assert size(small, "engine", "parameters") == size(wide, "engine", "parameters") / 2
    assert small.kv_tokens > wide.kv_tokens
    args = (job.shapes, job.hardware, 200.0)
    assert hypothetical.costs(small_config, *args).step_base_s < hypothetical.costs(config, *args).step_base_s


def test_ranks_share_the_experts_and_send_tokens_to_them(shape):  # noqa: F811
    mixture = replace(shape, active=0.3, experts=8, experts_used=1)
    assert mixture.of_experts == pytest.approx(0.8)
    job = job_of(mixture)
    job = replace(job, config=hypothetical.hypothetical(job.config))
    (whole, all_of_it), (shared, half) = (
        job.with_settings([("actor.zero_stage", 0), (EXPERTS, degree)]) for degree in (1, 2)
    )
    assert size(half, "actor", "parameters") == pytest.approx(0.6 * size(all_of_it, "actor", "parameters"))
    assert size(half, "engine", "parameters") == size(all_of_it, "engine", "parameters")
    args = (job.shapes, job.hardware, 200.0)
    assert hypothetical.costs(shared, *args).score_tokens_per_s < hypothetical.costs(whole, *args).score_tokens_per_s


@pytest.mark.parametrize(
    ("ranks", "expert", "experts", "expert_tensor", "says"),
    [
        (8, 8, 128, 1, ""),
        (8, 4, 128, 2, ""),
        (8, 2, 0, 1, "no experts"),
        (8, 3, 128, 1, "divisor of the model's 128 experts"),
        (8, 8, 128, 2, "divisor of a stage's 8 ranks"),
        (4, 8, 128, 1, "divisor of a stage's 4 ranks"),
    ],
)
def test_experts_and_attention_cover_the_same_ranks(ranks, expert, experts, expert_tensor, says):
    found = mapping_problem(ranks, expert, experts, expert_tensor)
    assert says in found and bool(found) == bool(says)


@pytest.mark.slow
def test_every_plan_keeps_the_bound_and_the_search_finds_what_is_not_there_yet(job):
    found = search(job, facts_of(job.shapes["actor"]), 20.0)
    for plan in found.plans:
        config, memory = job.with_settings(plan.settings)
        assert job.times.bound(config, memory) <= plan.seconds.step * (1 + 1e-9)
        assert not list(hypothetical.problems(config, job.shapes["actor"]))
    plain = search(
        replace(job, axes={k: v[:1] if k.startswith("hyp") else v for k, v in job.axes.items()}),
        facts_of(job.shapes["actor"]),
        20.0,
    )
    assert found.plans[0].seconds.step <= plain.plans[0].seconds.step
