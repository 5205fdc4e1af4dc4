"""The ranks of a trainer as a mesh: rank groups, lockstep sets, and the rank that reports for its group. Pure.

Role: `Config.mesh` for a job, `Pipelines.mesh` for one model of a pipeline schedule.
Invariant: ranks are numbered row by row, the first axis outermost. An axis is a field: expert parallelism adds `ep`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from functools import cache
from math import prod


@dataclass(frozen=True, slots=True)
class ParallelMesh:
    """Sizes of the axes of a mesh."""

    dp: int = 1
    """Data-parallel replicas of a model."""
    sp: int = 1
    """Ranks that may share a sequence: the maximum sequence-parallel size of a micro-batch."""
    pp: int = 1
    """Pipeline stages of a model, or the devices that run one schedule."""
    tp: int = 1
    """Ranks that share each layer."""

    @classmethod
    def of(cls, world: int, sp: int = 1, pp: int = 1, tp: int = 1) -> ParallelMesh:
        """Return the mesh of `world` ranks. ValueError unless the sizes divide them."""
        if world % (sp * pp * tp):
            raise ValueError(f"{world} ranks cannot be divided by sp={sp} x pp={pp} x tp={tp}: change one of these.")
        return cls(world // (sp * pp * tp), sp, pp, tp)

    @property
    def world(self) -> int:
        return prod(self._sizes.values())

    @property
    def copies(self) -> int:
        """Ranks with the same parameters, over which a backend may shard them and sums gradients."""
        return self.dp * self.sp

    @property
    def _sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of a rank on each axis."""
        found = {}
        for axis, size in reversed(self._sizes.items()):
            rank, found[axis] = divmod(rank, size)
        return found

    def rank(self, **at: int) -> int:
        """Return the rank at these coordinates; 0 on axes that are not named."""
        number = 0
        for axis, size in self._sizes.items():
            number = number * size + at.get(axis, 0)
        return number

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return the sets of ranks that differ along `axes` only, each ascending, by their first rank."""
        return _groups(self, frozenset(axes))

    def lockstep_sets(self, shards: bool = False) -> tuple[tuple[int, ...], ...]:
        """Return the sets of ranks that must make the same calls in the same order: the ranks of each replica.

        `shards`: True if the calls exchange shards of weights or gradients; then all ranks form one set.
        """
        return self.groups(*AXES) if shards else self.groups(*AXES[1:])

    def separable(self, ranks: Collection[int], shards: bool = False) -> bool:
        """Return whether these ranks can be called without the others: they are whole lockstep sets."""
        called = {*ranks}
        return all(called.issuperset(each) or called.isdisjoint(each) for each in self.lockstep_sets(shards))

    def leads(self, rank: int, *axes: str) -> bool:
        """Return whether a rank is the first of those that differ from it along `axes` only.

        It reports for a micro-batch along sp and tp, writes shared layers along tp, and checkpoints along dp, sp, tp.
        """
        return not any(at for axis, at in self.coordinates(rank).items() if axis in axes)

    def following(self, rank: int, axis: str) -> int:
        """Return the next rank along an axis, cyclically."""
        at = self.coordinates(rank)
        return self.rank(**at | {axis: (at[axis] + 1) % getattr(self, axis)})

    def at_degree(self, sp: int) -> ParallelMesh:
        """Return the mesh for micro-batches with sequence-parallel size `sp`."""
        return replace(self, dp=self.copies // sp, sp=sp)


AXES = tuple(field.name for field in fields(ParallelMesh))
"""Names of the axes, outermost first."""


@cache
def _groups(mesh: ParallelMesh, axes: frozenset[str]) -> tuple[tuple[int, ...], ...]:
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world):
        others = tuple(at for axis, at in mesh.coordinates(rank).items() if axis not in axes)
        found.setdefault(others, []).append(rank)
    return tuple(map(tuple, found.values()))
