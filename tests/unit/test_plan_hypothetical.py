"""What this project can't run yet, as the search sees it: what it saves and costs, and that no job file ever has it."""

from dataclasses import replace
from math import inf

import pytest
from test_plan_search import CLUSTER, Cluster, facts_of, job_of, shape  # noqa: F401, a fixture

from rlfuse.planning import hypothetical
from rlfuse.planning.hypothetical import mapping_problem
from rlfuse.planning.search import search

EXPERTS = "hypothetical.expert_parallel_size"


@pytest.fixture
def job(shape):  # noqa: F811
    """Of a mixture: nothing else has what can't be run yet."""
    shape = replace(shape, active=0.3, experts=8, experts_used=1)
    job = job_of(shape)
    more = hypothetical.axes(job.config, shape)
    return replace(job, config=hypothetical.hypothetical(job.config), axes={**job.axes, **more})


def size(memory, role, what):
    return sum(part.size for part in memory.parts if (part.role, part.what) == (role, what))


def test_with_none_of_it_a_plan_is_the_plain_one(job):
    plain = replace(job, config=job.config)
    assert hypothetical.words(job.config) == []
    assert job.with_settings([(EXPERTS, 1)])[1] == plain.with_settings([])[1]


def test_ranks_share_the_experts_and_send_tokens_to_them(job):
    assert job.shapes["actor"].of_experts == pytest.approx(0.8)
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
    found = search(job, facts_of(job.shapes["actor"]), inf)
    for plan in found.plans:
        config, memory = job.with_settings(plan.settings)
        assert job.bound(config, memory) <= plan.seconds.step * (1 + 1e-9)
        assert not list(hypothetical.problems(config, job.shapes["actor"]))
    plain = search(
        replace(job, axes={k: v[:1] if k.startswith("hyp") else v for k, v in job.axes.items()}),
        facts_of(job.shapes["actor"]),
        inf,
    )
    assert found.plans[0].seconds.step <= plain.plans[0].seconds.step
