"""Mesh of trainer ranks: process groups, lockstep sets, and the leading rank of each group."""

from itertools import chain, combinations, product

import pytest

from rlfuse.config.parallel_mesh import AXES, ParallelMesh
from rlfuse.config.schema import Config

GROUPS = [
    (ParallelMesh.of(3), ("dp",), [(0, 1, 2)]),
    (ParallelMesh.of(3), ("tp",), [(0,), (1,), (2,)]),
    (ParallelMesh.of(8, tp=2), ("tp",), [(0, 1), (2, 3), (4, 5), (6, 7)]),
    (ParallelMesh.of(8, tp=2), ("dp",), [(0, 2, 4, 6), (1, 3, 5, 7)]),
    (ParallelMesh.of(8, sp=2, tp=2), ("sp",), [(0, 2), (1, 3), (4, 6), (5, 7)]),
    (ParallelMesh.of(8, sp=2, tp=2), ("dp", "sp"), [(0, 2, 4, 6), (1, 3, 5, 7)]),
    (ParallelMesh.of(8, sp=4).at_degree(2), ("sp",), [(0, 1), (2, 3), (4, 5), (6, 7)]),
    (ParallelMesh.of(12, pp=4), ("pp",), [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]),
    (ParallelMesh.of(12, pp=2, tp=3), ("pp",), [(0, 3), (1, 4), (2, 5), (6, 9), (7, 10), (8, 11)]),
    (ParallelMesh.of(12, pp=2, tp=3), ("dp",), [(0, 6), (1, 7), (2, 8), (3, 9), (4, 10), (5, 11)]),
]
SMALL = [mesh for sizes in product((1, 2, 3), repeat=len(AXES)) if (mesh := ParallelMesh(*sizes)).world <= 12]
SETS = [axes for count in range(len(AXES) + 1) for axes in combinations(AXES, count)]


@pytest.mark.parametrize(("mesh", "axes", "expected"), GROUPS)
def test_groups_of_small_worlds(mesh, axes, expected):
    assert list(mesh.groups(*axes)) == expected


@pytest.mark.parametrize("axes", SETS)
def test_groups_partition_the_ranks_and_have_one_leader_each(axes):
    for mesh in SMALL:
        groups = mesh.groups(*axes)
        assert sorted(chain.from_iterable(groups)) == list(range(mesh.world))
        for ranks in groups:
            assert [mesh.leads(rank, *axes) for rank in ranks] == [True] + [False] * (len(ranks) - 1)


def test_lockstep_sets_are_data_parallel_replicas_unless_sharded():
    for mesh in SMALL:
        sets, size = mesh.lockstep_sets(), mesh.world // mesh.dp
        assert len(sets) == mesh.dp and mesh.lockstep_sets(shards=True) == (tuple(range(mesh.world)),)
        for first, count in product(range(mesh.world), range(1, mesh.world + 1)):
            ranks = range(first, min(first + count, mesh.world))
            assert mesh.separable(ranks) == (first % size == 0 == len(ranks) % size)
            assert mesh.separable(ranks, shards=True) == (len(ranks) == mesh.world)


def test_ranks_and_coordinates():
    for mesh in SMALL:
        assert [mesh.rank(**mesh.coordinates(rank)) for rank in range(mesh.world)] == list(range(mesh.world))
        assert mesh.copies == len(mesh.groups("dp", "sp")[0])
    assert ParallelMesh.of(12, pp=2, tp=3).coordinates(10) == {"dp": 1, "sp": 0, "pp": 1, "tp": 1}
    assert ParallelMesh.of(12, pp=2, tp=3).rank(pp=1, tp=2) == 5
    assert [ParallelMesh.of(6, pp=2, tp=3).following(rank, "tp") for rank in range(3, 6)] == [4, 5, 3]


def test_parallel_degrees_must_divide_the_slots():
    config = Config()
    config.trainer.nnodes, config.trainer.n_gpus_per_node = 2, 8
    config.training.pipeline_parallel_size, config.training.tensor_model_parallel_size = 2, 4
    assert config.mesh == ParallelMesh(dp=2, pp=2, tp=4) and config.mesh.world == config.slots
    config.training.pipeline_parallel_size = 3
    with pytest.raises(ValueError, match=r"16 ranks cannot be divided by sp=1 x pp=3 x tp=4"):
        config.mesh  # noqa: B018
