"""The search space: values of each key, order of fillings, and bounds."""

from __future__ import annotations

import pytest
from test_plan_search import SMALL, job_of, shape  # noqa: F401, a fixture

from rlfuse.config.schema import Config
from rlfuse.tools.planning.cluster_file import Cluster
from rlfuse.tools.planning.space import CHUNKS, FASTEST, PLACEMENT, Fillings, axes_of


def test_ulysses_degrees_end_at_the_smallest_budget(shape):  # noqa: F811
    config, cluster, key = (
        Config(),
        Cluster(2, 8, 10, device="cuda", peak_tflops=1.0),
        "training.ulysses_sequence_parallel_size",
    )
    config.data.max_prompt_length, config.data.max_response_length = 1024, 4096
    assert axes_of(config, shape, cluster)[key] == (1, 2), "the smallest budget has 4,096 tokens"
    config.data.max_prompt_length = 60000
    assert axes_of(config, shape, cluster)[key] == (1, 2, 4, 8, 16)
    config.actor.ppo_max_token_len_per_gpu = 32768
    assert axes_of(config, shape, cluster, ["actor.ppo_max_token_len_per_gpu"])[key] == (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["v", "interleaved"])
@pytest.mark.parametrize("stages", [2, 4])
def test_no_interleaved_schedule_beats_its_bound(shape, stages, placement):  # noqa: F811
    job = job_of(shape, axes=SMALL | {CHUNKS: (2,), PLACEMENT: (placement,)})
    settings = (
        ("training.pipeline_parallel_size", stages),
        (CHUNKS, 2),
        (PLACEMENT, placement),
        ("actor.zero_stage", 1),
    )
    for tokens in (64, 512, 4096):
        config, memory = job.with_settings((*settings, ("actor.ppo_max_token_len_per_gpu", tokens)))
        bound = job.bound(config, memory)
        assert job.bound(config, memory, roomy=True) < bound <= job.simulated(config, memory).step * (1 + 1e-9)


@pytest.mark.parametrize("stages, loads", [(1, 1), (2, 3)])
def test_fillings_are_enumerated_completely(stages, loads):
    """Check that only smaller fillings follow if the first one fits; pipelines start with each token budget."""
    axes = SMALL | {"actor.ppo_max_token_len_per_gpu": (1024, 2048, 4096)}
    structure, walk = (("training.pipeline_parallel_size", stages),), Fillings(axes)
    assert len(walk.first(structure)) == loads and walk.first(structure)[0] == FASTEST
    for fits, count in ((False, 2 * 3 * 2), (True, 2 * loads)):
        found, left = [], walk.first(structure)
        while left:
            found.append(left.pop())
            left += walk.after(structure, found[-1], fits)
        assert len(found) == len(set(found)) == count and (walk.smallest in found) is not fits
