"""Driver-side group of trainer ranks: training, and scoring with the policy, critic and reference.

    controller --rows--> TrainerGroup --micro-batches--> rank 0 .. rank N-1   (collectives among the ranks)

Assigns rows to ranks and micro-batches and returns results in row order. A long row is split over several ranks if it
has to be or if that is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from rlfuse.cluster import watchdog
from rlfuse.cluster.placement import Slots
from rlfuse.cluster.remote import all_of
from rlfuse.config.parallel_mesh import ParallelMesh
from rlfuse.config.schema import Config
from rlfuse.engines.trainer.lockstep_packing import plan_lockstep
from rlfuse.engines.trainer.makespan import bounds, makespan
from rlfuse.engines.trainer.rank_group import OnRanksJoined, RankGroup, check_written, start_ranks, warn_if_unfused
from rlfuse.engines.trainer.sequence_parallel_packing import (
    Costs,
    Share,
    Unit,
    degrees_up_to,
    fill,
    filler_like,
    plan,
    unit_per_row,
    units_by_prompt,
)
from rlfuse.engines.weights.sync import plan_buckets
from rlfuse.protocols import PassResult
from rlfuse.samples import Row

if TYPE_CHECKING:  # imports the video tower
    from rlfuse.engines.trainer.vision_tower import TowerSettings


class TrainerGroup(RankGroup):
    """Group of ranks without pipeline stages."""

    pipelined = False
    saves_in_background = True

    def __init__(self, config: Config, ranks: Sequence[ray.actor.ActorHandle]):
        super().__init__(config, ranks)
        self.costs, self.shares_prompts = Costs(), False
        self._buckets: dict[str, list[list[str]]] = {}

    @classmethod
    async def start(
        cls,
        config: Config,
        slots: Slots,
        cores: Sequence[int] | None = None,
        tower: TowerSettings | None = None,
        joined: OnRanksJoined | None = None,
    ) -> tuple[TrainerGroup, dict[str, Any]]:
        """Start one rank on every slot and load its models; return the group and facts to log.

        `cores`: CPU core that each rank is bound to; `tower`: settings of the vision tower, used only with
        video.freeze_vision_tower=false; `joined`: awaited after the ranks have joined, before they load models.
        """
        from rlfuse.engines.trainer.trainer_rank import TrainerRank  # only when ranks are started

        tower = None if config.video.freeze_vision_tower else tower
        group = cls(config, await start_ranks(TrainerRank, config, slots, cores))
        if joined:
            await joined(group)
        facts = await group._load(tower)
        group.shares_prompts = facts.pop("shares_prompts")
        return group, facts

    async def _load(self, *arguments: Any) -> dict[str, Any]:
        """Load the models on every rank; return facts to log."""
        facts = warn_if_unfused((await self._all("setup", "load its models", *arguments))[0])
        for line in facts.pop("lines"):
            watchdog.say(line)
        return facts

    async def measure(self) -> dict[str, Any]:
        if self.mesh.sp > 1:
            self.costs = (await self._all("measure", "time passes"))[0]
        return await super().measure()

    @property
    def lockstep(self) -> bool:
        return self.config.lockstep

    @property
    def lockstep_backward(self) -> bool:
        return self.config.lockstep_backward

    @property
    def mesh(self) -> ParallelMesh:
        return self.config.mesh_of(len(self.ranks))

    async def score(self, models: Sequence[str], rows: Sequence[Row], slot: int | None = None) -> dict[str, PassResult]:
        """Implement `Trainer.score`. ValueError for a single slot if weights are sharded or a row must be split."""
        shares = self._plan(rows, slot)
        action = " and ".join(
            f"{'log-probs' if model in ('actor', 'ref') else 'values'} of the {model}" for model in models
        )
        return await self._send("score", f"compute {action}", models, shares, rows, slot)

    async def accumulate(
        self, models: Sequence[str], rows: Sequence[Row], slot: int | None = None
    ) -> dict[str, PassResult]:
        """Implement `WholeModels.accumulate`. ValueError for a single slot if gradients are sharded, or as in
        `score`."""
        shares = self._plan(rows, slot, trained=True)
        for model in models:
            self._accumulated[model] += [row.trained_tokens(model) for row in rows]  # checked by the next step
        action = f"accumulate gradients of the {' and '.join(models)}"
        return await self._send("accumulate", action, models, shares, rows, slot)

    async def _accumulate_zero(self, model: str) -> None:
        """Run a filler on every rank if gradients are sharded, since such a step needs a backward pass."""
        if self.lockstep_backward:
            ids, zero = np.zeros(1, np.int32), np.zeros(1, np.float32)
            names = ("advantages", "old_log_probs", "selected")  # what a loss without further terms may read
            filler = filler_like(Row(ids, ids, dict.fromkeys(names, zero)))
            action = f"accumulate a gradient of 0 of the {model}"
            await self._call("accumulate", action, None, lambda rank: ((model,), [filler]))

    async def _send(
        self,
        method: str,
        action: str,
        models: Sequence[str],
        shares: list[list[Share]],
        rows: Sequence[Row],
        slot: int | None,
    ) -> dict[str, PassResult]:
        """Call the ranks with their micro-batches of `rows`; return results in row order."""
        batches = dict(zip(self._ranks(slot), fill(shares, rows), strict=True))
        answers = await self._call(method, action, slot, lambda rank: (models, batches[rank]))
        found = {}
        for model in models:
            parts, began = zip(*(answer[model] for answer in answers), strict=True)
            found[model] = PassResult(_by_row(shares, parts, len(rows)), min(began))
        return found

    def _plan(self, rows: Sequence[Row], slot: int | None, trained: bool = False) -> list[list[Share]]:
        """Return each rank's micro-batches; equally many where this pass gathers or reduces shards."""
        config, actor, mesh = self.config, self.config.actor, self.mesh
        lockstep = config.sharded_gradients if trained else config.sharded_weights
        budget, most = actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu
        ranks, longest = self._ranks(slot), max(row.tokens for row in rows)
        if not mesh.at_degree(1).separable(ranks, lockstep):
            why = f"{config.sharding} needs all ranks in this pass" if lockstep else f"{mesh.tp} ranks share each layer"
            raise ValueError(f"{why}: a call on slot {slot} alone would never return. Call without a slot.")
        if mesh.sp > 1 and slot is not None and longest > budget:
            raise ValueError(
                f"A row of {longest} tokens exceeds actor.ppo_max_token_len_per_gpu={budget} and must be split over "
                f"ranks, which slot {slot} alone cannot do. Call without a slot."
            )
        degrees, width = self._degrees(slot), mesh.tp
        holders = len(ranks) // width
        units = self._units(rows, budget * degrees[-1], holders)
        costs = replace(self.costs, rates=tuple(max(self.rates[i : i + width]) for i in ranks[::width]))
        costs = costs.trained() if trained else costs
        with self.recorder.span("plan", cause="a pass") as span:
            if lockstep and degrees[-1] > 1:
                shares = plan_lockstep(units, holders, budget, degrees, costs, most)
            else:
                shares = plan(units, holders, budget, degrees, costs, most, lockstep)
            if slot is None:
                even, longest = bounds(units, holders, budget, degrees, costs, lockstep)
                took = makespan(shares, units, costs, lockstep)
                span.attributes |= {"makespan": took, "even": even, "longest": longest}
        return [mine for mine in shares for _ in range(width)]

    def _degrees(self, slot: int | None) -> Sequence[int]:
        """Return the sequence-parallel degrees that a row may have, ascending."""
        return degrees_up_to(self.mesh.sp) if slot is None else (1,)

    def _units(self, rows: Sequence[Row], capacity: int, ranks: int) -> list[Unit]:
        """Group rows that stay together into units; `capacity`: maximum tokens of a micro-batch."""
        most = self.config.actor.ppo_micro_batch_size_per_gpu
        return units_by_prompt(rows, capacity, ranks, most) if self.shares_prompts else unit_per_row(rows)

    async def sync_reference(self) -> None:
        """Implement `WholeModels.sync_reference`."""
        await self._all("sync_reference", "mix the actor into the reference")

    # Weights and checkpoints -------------------------------------------------------------------------------------

    async def bucket_plan(self, model: str = "actor") -> list[list[str]]:
        """Return the model's tensor names in buckets of rollout.update_weights_bucket_mb; the same on every call."""
        if model not in self._buckets:
            sizes = (await self._all("sizes", "list its weights", model))[0]
            self._buckets[model] = plan_buckets(sizes, self.config.rollout.update_weights_bucket_mb << 20)
        return self._buckets[model]

    async def export_bucket(self, names: list[str], path: str) -> None:
        await self._all("export_bucket", f"write weights to {path}", names, Path(path))

    def writer(self, names: list[str]) -> int:
        return 0

    async def save_tower(self, path: Path) -> int:
        """Write the trained tower for `update_tower` of the encoder ranks; return its number of updates.

        Later rows must have embeddings of that tower. `path`: a file that the encoder ranks can read.
        """
        return (await self._all("save_tower", f"write its tower to {path}", Path(path).absolute()))[0]

    async def share_ipc(self, names: list[str]) -> list[dict[str, Any]]:
        """Return the CUDA IPC handles of a bucket by rank (`weights.cuda_ipc`); ranks keep the tensors alive."""
        return await self._all("share_ipc", "share a bucket", names)

    async def release_ipc(self) -> None:
        """Release the tensors that `share_ipc` keeps alive."""
        await self._all("release_ipc", "release a bucket")

    async def save(self, folder: Path, wait: bool = True) -> None:
        """Save each model to its own folder below `folder`. NotSaved if a file could not be written.

        `wait=False`: return once the state is copied; the files are on the disk when `saved` returns.
        """
        self._check_no_gradients("saved")
        synced = ["ref"] if self.config.ref.sync_ref_model else []
        buckets = {model: await self.bucket_plan(model) for model in (*self.models, *synced)}
        check_written(await self._all("save", f"save a checkpoint to {folder}", folder.absolute(), buckets, wait))

    async def is_saving(self) -> bool:
        """Return whether files of the last `save` are still being written."""
        return any(await self._of_files("is_saving", "report on its checkpoint files"))

    async def saved(self) -> None:
        """Wait until all files of the last `save` are on the disk. NotSaved if one could not be written."""
        check_written(await self._of_files("saved", "write its checkpoint files"))

    async def _of_files(self, method: str, action: str) -> list[Any]:
        """Call all ranks while they may be running other calls, on one slot or all."""
        return await all_of([self._ask(rank, method, action) for rank in self._ranks(None)])


def _by_row(shares: Sequence[Sequence[Share]], answers: Sequence[Any], rows: int) -> list[np.ndarray]:
    """Return the ranks' arrays in row order; an empty list if the ranks returned none."""
    results: list[Any] = [None] * rows
    for mine, parts in zip(shares, answers, strict=True):
        for share, arrays in zip(mine, parts, strict=True):
            # Fillers have no rows, and only one of the ranks with slices of the same rows returns arrays.
            for index, array in zip(share.rows, arrays, strict=False):
                results[index] = array
    return [] if all(each is None for each in results) else results
