"""All trainer ranks as one: the driver's side of training, scoring by the policy, critic and reference.

Role: implements the controller's `Trainer` and the weight sync's `WeightExporter` over `TrainerRank` actors. Decides
(purely, in `degrees`) which row goes to which ranks and micro-batch, and puts the answers back in the order of the
rows. A long row is cut over several ranks where that is needed or sooner done. Invariants and waits: as `rank_group`.

    controller --rows--> TrainerGroup --micro-batches--> rank 0 .. rank N-1   (collectives among the ranks)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from rlfuse.cluster import watchdog
from rlfuse.cluster.placement import Slots
from rlfuse.config.parallel_mesh import ParallelMesh
from rlfuse.config.parallelism import STATE, state_layout, value_of
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
    plan,
    unit_per_row,
    units_by_prompt,
)
from rlfuse.engines.weights.sync import plan_buckets
from rlfuse.errors import EngineError
from rlfuse.protocols import PassResult
from rlfuse.samples import Row

if TYPE_CHECKING:  # imports the video tower
    from rlfuse.engines.trainer.vision_tower import TowerSettings


class TrainerGroup(RankGroup):
    """Ranks with whole models."""

    pipelined = False

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
        met: OnRanksJoined | None = None,
    ) -> tuple[TrainerGroup, dict[str, Any]]:
        """One rank on every slot, models loaded; and facts to log.

        `cores`: the CPU core that each rank's process is bound to; `tower`: what video.freeze_vision_tower=false trains, not
        read otherwise; `met`: awaited once the ranks have met, before they load models.
        """
        from rlfuse.engines.trainer.trainer_rank import TrainerRank  # only when ranks are started

        tower = None if config.video.freeze_vision_tower else tower
        group = cls(config, await start_ranks(TrainerRank, config, slots, cores))
        if met:
            await met(group)
        facts = await group._load(tower)
        group.shares_prompts = facts.pop("shares_prompts")
        return group, facts

    async def _load(self, *arguments: Any) -> dict[str, Any]:
        """Have every rank set its models up; facts to log."""
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
        """As `Trainer.score`. ValueError for one slot where ranks share weights, or with a row that must be cut."""
        shares = self._plan(rows, slot)
        action = " and ".join(
            f"{'log-probs' if model in ('actor', 'ref') else 'values'} of the {model}" for model in models
        )
        return await self._send("score", f"compute {action}", models, shares, rows, slot)

    async def accumulate(
        self, models: Sequence[str], rows: Sequence[Row], slot: int | None = None
    ) -> dict[str, PassResult]:
        """As `WholeModels.accumulate`. ValueError for one slot where ranks share gradients, or as `score`."""
        shares = self._plan(rows, slot, trained=True)
        for model in models:
            self._accumulated[model] += [row.length for row in rows]  # the next step waits for them
        action = f"accumulate gradients of the {' and '.join(models)}"
        return await self._send("accumulate", action, models, shares, rows, slot)

    async def _send(
        self,
        method: str,
        action: str,
        models: Sequence[str],
        shares: list[list[Share]],
        rows: Sequence[Row],
        slot: int | None,
    ) -> dict[str, PassResult]:
        """Call the ranks with their micro-batches of `rows`."""
        batches = dict(zip(self._ranks(slot), fill(shares, rows), strict=True))
        answers = await self._call(method, action, slot, lambda rank: (models, batches[rank]))
        found = {}
        for model in models:
            parts, began = zip(*(answer[model] for answer in answers), strict=True)
            found[model] = PassResult(_by_row(shares, parts, len(rows)), min(began))
        return found

    def _plan(self, rows: Sequence[Row], slot: int | None, trained: bool = False) -> list[list[Share]]:
        """By rank; where shards are gathered or reduced in this pass, all ranks run as many micro-batches."""
        config, actor, mesh = self.config, self.config.actor, self.mesh
        lockstep = config.sharded_gradients if trained else config.sharded_weights
        budget, most = actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu
        ranks, longest = self._ranks(slot), max(row.tokens for row in rows)
        if not mesh.at_degree(1).separable(ranks, lockstep):
            why = f"{config.sharding} needs all ranks in this pass" if lockstep else f"{mesh.tp} ranks share each layer"
            raise ValueError(f"{why}, slot {slot} alone would wait for others without end: call without a slot.")
        if mesh.sp > 1 and slot is not None and longest > budget:
            raise ValueError(
                f"A row of {longest} tokens must be cut over ranks (actor.ppo_max_token_len_per_gpu={budget}), slot "
                f"{slot} alone can't: ask without a slot."
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
        """That a row may have, ascending."""
        return degrees_up_to(self.mesh.sp) if slot is None else (1,)

    def _units(self, rows: Sequence[Row], capacity: int, ranks: int) -> list[Unit]:
        """Rows that stay together; `capacity`: tokens of a micro-batch at most."""
        most = self.config.actor.ppo_micro_batch_size_per_gpu
        return units_by_prompt(rows, capacity, ranks, most) if self.shares_prompts else unit_per_row(rows)

    # Weights and checkpoints -------------------------------------------------------------------------------------

    async def bucket_plan(self, model: str = "actor") -> list[list[str]]:
        """The model's tensors, always the same, in buckets of rollout.update_weights_bucket_mb."""
        if model not in self._buckets:
            sizes = (await self._all("sizes", "list its weights", model))[0]
            self._buckets[model] = plan_buckets(sizes, self.config.rollout.update_weights_bucket_mb << 20)
        return self._buckets[model]

    async def export_bucket(self, names: list[str], path: str) -> None:
        await self._all("export_bucket", f"write weights to {path}", names, Path(path))

    def writer(self, names: list[str]) -> int:
        return 0

    async def save_tower(self, path: Path) -> int:
        """Write the trained tower for the encoder ranks' `update_tower`, which also takes the updates returned.

        Rows after this must bring embeddings of that tower. `path`: a folder that the encoder ranks can read.
        """
        return (await self._all("save_tower", f"write its tower to {path}", Path(path).absolute()))[0]

    async def share_ipc(self, names: list[str]) -> list[dict[str, Any]]:
        """`weights.cuda_ipc`'s, of every rank that shares a GPU with an engine; the ranks keep the tensors."""
        return await self._all("share_ipc", "share a bucket", names)

    async def release_ipc(self) -> None:
        """The ranks let go of what `share_ipc` kept."""
        await self._all("release_ipc", "release a bucket")

    async def save(self, folder: Path) -> None:
        """A folder for each model below `folder`, with what is needed to check that a resumed run fits.

        NotSaved where a file could not be written.
        """
        self._check_no_gradients("saved")
        buckets = {model: await self.bucket_plan(model) for model in self.models}
        check_written(await self._all("save", f"save a checkpoint to {folder}", folder.absolute(), buckets))
        (folder / "trainer.json").write_text(json.dumps(self._shape()))

    async def save_metadata(self, folder: Path) -> None:
        """Write what `save` writes except weights and optimizer state. NotSaved where a file could not be written."""
        check_written(await self._all("save_metadata", f"write files to {folder}", folder.absolute()))

    async def load(self, folder: Path) -> None:
        """Continue from what `save` wrote under the same number of ranks, which divide states alike."""
        self._check_no_gradients("loaded")
        saved = json.loads((folder / "trainer.json").read_text())
        if "ranks" not in saved:
            raise EngineError(
                f"{folder} was written by pipeline stages: resume with training.pipeline_parallel_size above 1, or "
                f"start a new run from the weights with model.path={folder / self.models[0] / 'huggingface'}."
            )
        if state_layout(saved) != state_layout(self._shape()):
            raise EngineError(
                f"{folder} was written with {saved}, this run has {self._shape()}: training resumes only with the "
                f"same. Keep those settings, or start a new run from the weights with "
                f"model.path={folder / self.models[0] / 'huggingface'}."
            )
        await self._all("load", f"load the checkpoint {folder}", folder.absolute())

    def _shape(self) -> dict[str, Any]:
        config = self.config
        return {"ranks": len(self.ranks), "critic": config.uses_critic, **{key: value_of(config, key) for key in STATE}}


def _by_row(shares: Sequence[Sequence[Share]], answers: Sequence[Any], rows: int) -> list[np.ndarray]:
    """The ranks' arrays in the order of the rows; none where the ranks returned none."""
    results: list[Any] = [None] * rows
    for mine, parts in zip(shares, answers, strict=True):
        for share, arrays in zip(mine, parts, strict=True):
            # A filler's answer has no index; of ranks with slices of the same rows one answers.
            for index, array in zip(share.rows, arrays, strict=False):
                results[index] = array
    return [] if all(each is None for each in results) else results
