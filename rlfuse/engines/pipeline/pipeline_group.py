"""The driver's handle of all pipeline ranks, the counterpart of `TrainerGroup`.

Distributes rows over blocks, pipelines and micro-batches, sends them with a schedule, and returns results in the order
of the rows. With tensor parallelism, all ranks of a device get its work and the first one returns results.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rlfuse import clock
from rlfuse.cluster.placement import Slots
from rlfuse.cluster.remote import all_of
from rlfuse.config.schema import Config
from rlfuse.engines.pipeline.layout import Pipelines, mesh_of
from rlfuse.engines.pipeline.schedule_executor import TimedOperation
from rlfuse.engines.pipeline.slow_devices import device_costs, pipeline_rates, repartition, with_layer_counts
from rlfuse.engines.trainer.micro_batches import split_evenly
from rlfuse.engines.trainer.rank_group import OnRanksJoined, RankGroup, check_written, start_ranks, warn_if_unfused
from rlfuse.engines.trainer.sequence_parallel_packing import Costs, Share, fill, plan, unit_per_row
from rlfuse.engines.weights.sync import plan_buckets
from rlfuse.errors import EngineError
from rlfuse.fusion.schedules.operations import Operation, Rows
from rlfuse.fusion.schedules.problem import Model, Problem, ScheduleError
from rlfuse.fusion.schedules.shared_heads import with_heads
from rlfuse.fusion.schedules.transfers import check_deadlock
from rlfuse.protocols import PassResult
from rlfuse.samples import MicroBatch, Row

T = TypeVar("T")
Work = Mapping[str, tuple[list[list[Share]], Sequence[Row]]]
"""Model -> its micro-batches as [pipeline][micro-batch], and the rows that they index."""


@dataclass(frozen=True, slots=True)
class ScheduleResult:
    """Results of a schedule."""

    scores: dict[str, list[np.ndarray]]
    """Model -> float32 [T] per scored row."""
    old_log_probs: list[np.ndarray]
    """Log-probs of the actor, float32 [T] per training row, if no row had `old_log_probs`; otherwise empty."""
    timed: list[list[TimedOperation]]
    """Timed operations of the first rank of each device, by block * devices + device."""

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        times = [each for row in self.timed for each in row]
        return max(each.end for each in times) - min(each.start for each in times)


class PipelineGroup(RankGroup):
    """Group of all pipeline ranks."""

    @classmethod
    async def start(
        cls,
        config: Config,
        slots: Slots,
        layout: Sequence[Pipelines],
        cores: Sequence[int] | None = None,
        met: OnRanksJoined | None = None,
    ) -> tuple[PipelineGroup, dict[str, Any]]:
        """Start one rank per slot and load the stages; return the group and facts to log. See `TrainerGroup.start`."""
        from rlfuse.engines.pipeline.pipeline_rank import PipelineRank  # only when ranks are started

        group = cls(config, await start_ranks(PipelineRank, config, slots, cores))
        if met:
            await met(group)
        return group, await group.setup(layout)

    async def setup(self, layout: Sequence[Pipelines]) -> dict[str, Any]:
        """Load the stages of `layout`, replacing earlier ones; return facts to log. Raises ValueError if `layout` does
        not match the ranks."""
        self.layout = {pipelines.model: pipelines for pipelines in layout}
        self.mesh = mesh_of(layout, len(self.ranks))
        self.block = self.mesh.pp
        self._accumulated = {name: [] for name in self.layout if name != "ref"}
        self._owners: dict[str, tuple[int, int]] = {}
        facts = warn_if_unfused((await self._all("setup", "load its stages", tuple(layout)))[0])
        self.costs = facts.pop("costs")
        cut = with_layer_counts(layout, self.costs)
        self.layout = {pipelines.model: pipelines for pipelines in cut}
        self.work = device_costs(cut, self.costs)
        return facts

    def copies(self, model: str) -> int:
        """Return the number of pipelines of a model in all blocks: its data-parallel size."""
        return self.layout[model].mesh(self.mesh.world).dp

    @property
    def device_rates(self) -> list[float]:
        """Rate of each device of all blocks: that of its slowest rank."""
        return self._worst_per_device(self.rates, max)

    def _worst_per_device(self, ranks: Sequence[T], worst: Callable[[Sequence[T]], T]) -> list[T]:
        """Return for each device of all blocks the worst value of its ranks."""
        return [worst([ranks[rank] for rank in device]) for device in self.mesh.groups("tp")]

    # Passes ------------------------------------------------------------------------------------------------------

    async def run(
        self,
        schedule: Rows,
        rows: Mapping[str, Sequence[Row]],
        scored: Mapping[str, Sequence[Row]] | None = None,
        planned: Sequence[Sequence[tuple[float, float]]] = (),
    ) -> ScheduleResult:
        """Run a schedule that trains each model on its `rows` and scores its rows in `scored`.

        Rows are distributed over all pipelines of the model and its micro-batches in the schedule: training rows over
        the first ones, which have a B, scored rows over the rest. Micro-batches without rows run a short filler with
        weight 0. `planned`: start and end of every operation, in the schedule's order, for events. Raises ValueError if
        the models differ from those of the schedule, EngineError if the schedule would deadlock.
        """
        self._check(schedule)
        trains, scores = _micro_batch_counts(schedule)
        work = [self._distribute(counts, of) for counts, of in ((trains, rows), (scores, scored or {}))]
        for name in rows:
            self._accumulated[name] += [row.trained_tokens(name) for row in rows[name]]
        return await self._run(schedule, *work, planned)

    def _distribute(self, counts: Mapping[str, int], rows: Mapping[str, Sequence[Row]]) -> Work:
        if counts.keys() != rows.keys():
            raise ValueError(f"The schedule has the models {sorted(counts)}, but the rows are for {sorted(rows)}.")
        work = {}
        for name, each in rows.items():
            bins = split_evenly([row.tokens for row in each], self.copies(name), counts[name], self._rates_of(name))
            work[name] = [[Share(tuple(bin)) for bin in pipeline] for pipeline in bins], each
        return work

    def _within_budget(self, model: str, rows: Sequence[Row]) -> list[list[Share]]:
        """Return as few micro-batches as the token budget allows, equally many in every pipeline."""
        budget, most = self.config.actor.ppo_max_token_len_per_gpu, self.config.actor.ppo_micro_batch_size_per_gpu
        costs = Costs(rates=tuple(self._rates_of(model)))
        return plan(unit_per_row(rows), self.copies(model), budget, costs=costs, most=most, lockstep=True)

    def _micro_batches(self, model: str, rows: Sequence[Row]) -> int:
        """Return the micro-batches per pipeline: as the token budget requires, and enough to fill the pipeline if there
        are enough rows."""
        fullest = min(2 * self.layout[model].stages, -(-len(rows) // self.copies(model)))
        return max(len(self._within_budget(model, rows)[0]), fullest)

    def _rates_of(self, model: str) -> list[float]:
        """Return the rates of the model's pipelines."""
        return pipeline_rates(self.device_rates, self.work, self.layout[model].stages)

    async def score(self, models: Sequence[str], rows: Sequence[Row], slot: int | None = None) -> dict[str, PassResult]:
        """Compute scores as `Trainer.score`, with one schedule per model. Raises ValueError for a single slot."""
        if slot is not None:
            raise ValueError(f"Slot {slot} has only some pipeline stages and can't score alone. Call without a slot.")
        found = {}
        for model in models:
            began, count = clock.now(), self._micro_batches(model, rows)
            schedule = forward_only(self.layout[model], count)
            self._check(schedule)
            result = await self._run(schedule, {}, self._distribute({model: count}, {model: rows}))
            found[model] = PassResult(result.scores[model], began)
        return found

    def _check(self, schedule: Rows) -> None:
        try:
            check_deadlock(schedule, tuple(self.layout.values()))
        except ScheduleError as error:
            raise EngineError(f"The schedule was not started. {error}") from error

    async def _run(
        self, schedule: Rows, trained: Work, scored: Work, planned: Sequence[Sequence[tuple[float, float]]] = ()
    ) -> ScheduleResult:
        batches: dict[str, list[list[MicroBatch]]] = {}
        first = {name: len(shares[0]) for name, (shares, _) in trained.items()}
        for name, (shares, rows) in (*trained.items(), *scored.items()):
            before = batches.get(name, [[]] * len(shares))
            batches[name] = [[*some, *more] for some, more in zip(before, fill(shares, rows), strict=True)]

        def arguments(rank: int) -> tuple[Any, ...]:
            device = rank // self.mesh.tp
            work = {name: filled[device // self.layout[name].stages] for name, filled in batches.items()}
            return schedule, work, planned[device % self.block] if planned else ()

        answers = (await self._call("run", "run its part of the schedule", None, arguments))[:: self.mesh.tp]
        scores, from_update = ({name: [None] * len(rows) for name, (_, rows) in of.items()} for of in (scored, trained))
        for device, (found, _) in enumerate(answers):
            for (name, number), arrays in found.items():
                place = number - first.get(name, 0)
                of, to = (trained, from_update) if place < 0 else (scored, scores)  # place < 0: counted from the end
                share = of[name][0][device // self.layout[name].stages][place]
                for index, array in zip(share.rows, arrays, strict=False):  # fillers have no index
                    to[name][index] = array
        old_log_probs = [each for each in from_update.get("actor", ()) if each is not None]
        return ScheduleResult(scores, old_log_probs, [timed for _, timed in answers])

    # Weights and checkpoints -------------------------------------------------------------------------------------

    async def bucket_plan(self, model: str = "actor") -> list[list[str]]:
        """Return the model's tensors in buckets of rollout.update_weights_bucket_mb; no bucket spans two stages."""
        room = self.config.rollout.update_weights_bucket_mb << 20
        sizes = await self._sizes(model)
        by_stage: dict[int, list[tuple[str, int]]] = {}
        for rank, tensors in enumerate(sizes):
            for stage, name, size in tensors:
                by_stage.setdefault(stage, []).append((name, size))
                self._owners[f"{model}/{name}"] = rank, stage
        return [bucket for stage in sorted(by_stage) for bucket in plan_buckets(by_stage[stage], room)]

    async def _sizes(self, model: str) -> list[list[tuple[int, str, int]]]:
        """Return (stage, name, bytes) of the tensors on each rank of the first pipeline."""
        return (await self._all("sizes", "list its weights", model))[: self.layout[model].stages * self.mesh.tp]

    async def export_bucket(self, names: list[str], path: str) -> list[str]:
        """Write these tensors to `path` on the rank that has them; return their checkpoint names."""
        return await self._write("actor", names, "export_bucket", Path(path))

    def writer(self, names: list[str]) -> int:
        return self._owners[f"actor/{names[0]}"][0]

    async def save(self, folder: Path, wait: bool = True) -> None:
        """Write a checkpoint to `folder`: `{actor,critic}/huggingface/`, and the state that `load` reads.

        Raises NotSaved if a file could not be written.
        """
        self._check_no_gradients("saved")
        await self.save_metadata(folder)
        for model in self._accumulated:
            await self._export(model, folder.absolute() / model / "huggingface")
        check_written(await self._all("save", f"save a checkpoint to {folder}", folder.absolute()))

    async def is_saving(self) -> bool:
        return False

    async def saved(self) -> None: ...

    async def _export(self, model: str, folder: Path) -> None:
        buckets, weight_map = await self.bucket_plan(model), {}
        for i, names in enumerate(buckets):
            shard = f"model-{i + 1:05d}-of-{len(buckets):05d}.safetensors"
            kept, problem = await self._write(model, names, "save_bucket", folder / shard, model)
            check_written([problem])
            weight_map |= dict.fromkeys(kept, shard)
        total = sum(file.stat().st_size for file in folder.glob("model-*.safetensors"))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))

    async def _write(self, model: str, names: list[str], method: str, path: Path, *arguments: Any) -> Any:
        """Have the rank that owns these tensors write them, gathered from its tensor-parallel ranks or, for a shared
        head, from the ranks of its pipeline; return its answer."""
        rank, stage = self._owners[f"{model}/{names[0]}"]
        shared_head = stage >= self.layout[model].depth
        ranks = range(self.layout[model].stages) if shared_head else range(rank, rank + self.mesh.tp)
        async with self._lock.exclusive():
            calls = [self._ask(each, method, f"write {path}", *arguments, stage, names, path) for each in ranks]
            return (await all_of([*map(asyncio.ensure_future, calls)]))[ranks.index(rank)]

    async def move_layers(self, saved: Path) -> bool:
        """Repartition the models by `costs` and the current rates, if that is faster; return True if they were.

        `saved`: a checkpoint of the ranks' current state, which is reloaded, so weights and optimizers stay
        bit-identical. The models must be on their devices.
        """
        layout = list(self.layout.values())
        if repartition(layout, self.costs, self.device_rates) == layout:
            return False
        free_layers = self._worst_per_device(await self._all("free_layers", "report its free memory"), min)
        least = [min(free_layers[device :: self.block]) for device in range(self.block)]
        if (cut := repartition(layout, self.costs, self.device_rates, least)) == layout:
            return False
        costs = self.costs
        await self.setup(cut)
        self.costs, self.work = costs, device_costs(cut, costs)
        await self.load(saved)
        return True


def forward_only(pipelines: Pipelines, micro_batches: int) -> Rows:
    """Return a schedule of forward passes: stages run their micro-batches in order, a device its stages in sequence."""
    rows = tuple(
        tuple(
            Operation(pipelines.model, pipelines.pipeline(device), stage, number, "F")
            for stage in pipelines.stages_on(device)
            for number in range(micro_batches)
        )
        for device in range(pipelines.devices)
    )
    if not pipelines.vocabulary:
        return rows
    stages, name = pipelines.stages, pipelines.model
    of = Model(name, stages, micro_batches, 1.0, None, pipelines.pipelines, 1.0, pipelines.direction)
    problem = Problem(pipelines.devices, (of,), chunks_per_device=pipelines.chunks, placement=pipelines.placement)
    return with_heads(problem, rows, {name: 1.0})


def _micro_batch_counts(schedule: Rows) -> tuple[dict[str, int], dict[str, int]]:
    """Return two maps from models to micro-batches per pipeline: of training, and of scoring, which are numbered
    last."""
    all_, trained = {}, {}
    for operation in (each for row in schedule for each in row):
        for counts in (all_, trained) if operation.kind == "B" else (all_,):
            counts[operation.model] = max(counts.get(operation.model, 0), operation.micro_batch + 1)
    scored = {name: count - trained.get(name, 0) for name, count in all_.items()}
    return trained, {name: count for name, count in scored.items() if count}
