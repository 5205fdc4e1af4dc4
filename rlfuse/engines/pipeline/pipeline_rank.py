"""A pipeline rank: its stages of actor, critic and reference, those of each model in a `StagesModel`.

With tensor parallelism, a device has several ranks, and the first one returns and writes what all have. `setup`,
`run`, `step`, `save` and `load` are collective and bounded by cluster.timeout_s. Invariants: gradients and diagnostics
are sums until the step divides once. If head and embedding are one tensor on two stages, both copies get the sum of
both gradients, which counts once in the norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from rlfuse.config.parallel_mesh import ParallelMesh
from rlfuse.engines.pipeline.head_shares import HeadShares, gradient_of, process_group
from rlfuse.engines.pipeline.layout import Pipelines, mesh_of
from rlfuse.engines.pipeline.loading import EMBEDDING, HEAD, is_tied, layer_costs, load_stage, partition
from rlfuse.engines.pipeline.p2p_groups import COLLECTIVE_TIMEOUT_FACTOR
from rlfuse.engines.pipeline.schedule_executor import ScheduleExecutor, TimedOperation
from rlfuse.engines.pipeline.stages import (
    DeviceStages,
    Stage,
    body,
    check_first_layer,
    check_head,
    check_training_passes,
)
from rlfuse.engines.trainer import fused_log_probs, state_files
from rlfuse.engines.trainer.base_rank import Rank, requires_models
from rlfuse.engines.trainer.micro_batch_losses import read_sums
from rlfuse.engines.trainer.models import packs_exactly
from rlfuse.engines.trainer.offloading import on_device
from rlfuse.engines.trainer.saving import CheckpointWriter, checkpoint_writer
from rlfuse.engines.trainer.sharded_model import StagesModel, check_finite
from rlfuse.engines.trainer.state_files import WHOLE, SavedState
from rlfuse.engines.trainer.tensor_parallel import TensorParallelGroup, TensorShares
from rlfuse.engines.weights.exporting import Exporter
from rlfuse.events import Span
from rlfuse.fusion.schedules.operations import Rows
from rlfuse.samples import MicroBatch

Scores = dict[tuple[str, int], list[np.ndarray]]
"""(model, micro-batch) -> one float32 array per row; from ranks with last stages."""


class PipelineRank(Rank):
    """Stages of one device. `join` connects to the other ranks and `setup` loads; then `run` and `step` train."""

    engines: dict[str, StagesModel]
    executor: ScheduleExecutor | None = None
    shares: Mapping[str, HeadShares] = MappingProxyType({})
    """Head shares, of models whose head all devices share."""
    tensor: TensorParallelGroup | None = None
    """Tensor-parallel group of this rank."""

    def setup(self, layout: Sequence[Pipelines]) -> dict[str, Any]:
        """Load this device's stages of every model in `layout`, replacing earlier ones; return facts to log."""
        config = self.config
        torch.manual_seed(config.data.seed)
        self.layout = {pipelines.model: pipelines for pipelines in layout}
        self.mesh = mesh_of(layout, self.world)
        self.at = self.mesh.coordinates(self.rank)
        self.ties: dict[str, _TiedEmbedding] = {}
        with self.recorder.span("start", cause="run"):
            if self.executor is not None:
                self.executor.close()
            self._release_models()
            self.tensor = _tensor_parallel_group(self.mesh, self.rank, COLLECTIVE_TIMEOUT_FACTOR * self.limit_s)
            self.executor = ScheduleExecutor(layout, self.limit_s, self.progress.record_activity)
            self.shares = self.executor.shares
            loaded = {pipelines.model: self._load(pipelines) for pipelines in layout}
            packed = self._agree_on_packing(loaded)
            for name, shares in self.shares.items():
                check_head(loaded[name][shares.index], packed)
            for name, models in loaded.items():
                parts = self._parts(name)
                for stage, model in models.items():
                    check_first_layer(model, packed)
                    check_training_passes(model, packed, name)
                    self.stages[name, stage] = Stage(config, name, model, parts[stage], packed, self.device)
                    self.progress.follow(model)
                if name != "ref":
                    self._make_trainable(name, models)
            self.extra_modules = list(loaded.get("ref", {}).values())
        costs = {name: layer_costs(self._path(name), config, each) for name, each in self.layout.items()}
        return {"packed": packed, "costs": costs, "unfused": fused_log_probs.unavailable(self.device)}

    def _release_models(self) -> None:
        """Release the models of an earlier `setup`, since two do not fit into memory."""
        for engine in self.engines.values():
            engine.close()
        self.stages: dict[tuple[str, int], Stage] = {}
        self.engines, self.extra_modules = {}, []
        self.garbage.collect_frozen()  # hooks make reference cycles of engines, frozen by the first collection
        if self.device != "cpu":
            torch.cuda.empty_cache()

    def free_layers(self) -> int:
        """Return the additional layers of every model that the device has memory for, at this rank's peak usage.

        The size of a layer is its share of the rank's peak memory, which includes embeddings and heads.
        """
        layers = min(len(stage.part.layers) for stage in self.stages.values())
        if self.device == "cpu":
            taken, free = psutil.Process().memory_info().rss, psutil.virtual_memory().available / self.world
        else:
            taken = torch.cuda.max_memory_reserved()
            free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - taken
        return max(0, int(max(1, layers) * free / taken))

    def _path(self, name: str) -> str:
        config = self.config
        path = {"actor": None, "critic": config.critic.path, "ref": config.ref.path}[name]
        return path or config.model.path

    def _parts(self, name: str):
        return partition(self._path(name), self.config, self.layout[name])

    def _load(self, pipelines: Pipelines) -> dict[int, PreTrainedModel]:
        name, parts = pipelines.model, self._parts(pipelines.model)
        first = "cpu" if self.tensor else self.device  # the device has memory for a share of the layers only

        def load(stage: int) -> PreTrainedModel:
            return load_stage(self._path(name), self.config.model, first, parts[stage], name == "critic")

        loads = {stage: partial(load, stage) for stage in pipelines.stages_on(self.at["pp"])}
        if self.tensor:
            return {stage: self.tensor.load(each).to(self.device) for stage, each in loads.items()}
        return {stage: each() for stage, each in loads.items()}

    def _agree_on_packing(self, loaded: Mapping[str, Mapping[int, PreTrainedModel]]) -> bool:
        """Return whether rows may be packed on all ranks; each rank tests its layers."""
        packed = self.config.model.use_remove_padding and all(
            packs_exactly(body(model, 32), 32, model.dtype, self.device)
            for models in loaded.values()
            for model in models.values()
        )
        answer = torch.tensor(int(packed), device=self.device)
        dist.all_reduce(answer, op=dist.ReduceOp.MIN)
        return bool(answer)

    def _make_trainable(self, name: str, models: Mapping[int, PreTrainedModel]) -> None:
        pipelines, config = self.layout[name], self.config
        optim = config.actor.optim if name == "actor" else config.critic.optim
        if all(is_tied(model) for model in models.values()):
            self.ties[name] = _TiedEmbedding(pipelines, models, self.world, self.shares.get(name))
        module = DeviceStages({str(stage): model for stage, model in models.items()}).train()
        self.engines[name] = self.backend.trained(module, config, optim, self.device, pipelines.mesh(self.world))

    @property
    def _answers(self) -> bool:
        """True if this rank returns the results of its tensor-parallel group."""
        return self.tensor is None or self.tensor.is_writer

    # Schedules ---------------------------------------------------------------------------------------------------

    @requires_models
    def run(
        self, rows: Rows, work: Mapping[str, Sequence[MicroBatch]], planned: Sequence[tuple[float, float]] = ()
    ) -> tuple[Scores, list[TimedOperation]]:
        """Run this device's row of a schedule; collective, with the same rows on all ranks of a block.

        `work`: micro-batches of this device's pipeline of each model, numbered as in the schedule. An F without a B
        computes scores. `planned`: start and end of each operation of this row, in seconds of the schedule, for events.
        Returns the scores of last stages, on ranks that return results, and the timed operations.
        """
        for (name, _), stage in self.stages.items():
            stage.begin(work.get(name, ()))
        timed = self.executor.run(rows, self.stages)
        for each, plan in zip_longest(timed, planned):
            span = self._span(each, work)
            span.attributes |= {"planned": plan} if plan else {}
            self.recorder.add(span)
        scores = {
            (name, number): read() for (name, _), stage in self.stages.items() for number, read in stage.scores.items()
        }
        return scores if self._answers else {}, timed

    def _span(self, timed: TimedOperation, work: Mapping[str, Sequence[MicroBatch]]) -> Span:
        operation = timed.operation
        micro_batch = work[operation.model][operation.micro_batch]
        rows = micro_batch.rows if micro_batch.weight else ()
        return Span(
            {"F": "forward", "B": "backward", "W": "weight_gradients", "H": "head"}[operation.kind],
            self.recorder.where,
            timed.start,
            timed.end,
            step=self.recorder.step,
            samples=tuple(row.id for row in rows),
            tokens=len(range(self.at["tp"], sum(row.tokens for row in rows), self.mesh.tp)),  # this rank's share
            cause=f"update_{operation.model}",
            attributes={
                "model": operation.model,
                "pipeline": operation.pipeline,
                "stage": operation.stage,
                "micro_batch": operation.micro_batch,
                "waited": timed.start - timed.ready,
            },
        )

    @requires_models
    def step(self, model: str, count: float, lr_factor: float = 1.0) -> tuple[dict[str, float], dict[str, float]]:
        """Run an optimizer step with the gradients of all pipelines, divided by `count`; collective.

        Returns the diagnostics summed over this rank's rows, on ranks that return results, and the values that are
        equal on all ranks: `lr`, `grad_norm`.
        """
        engine = self.engines[model]
        with self.stepping(model) as span:
            if model in self.ties:
                self.ties[model].add_gradients()
            facts = engine.step(count, lr_factor)
            span.attributes["skipped"] = not math.isfinite(facts["grad_norm"])
        sums: dict[str, float] = {}
        for (name, _), stage in self.stages.items():
            if name == model:
                sums |= read_sums(stage.sums)
                stage.sums = {}
        return sums if self._answers else {}, facts

    # Weights and checkpoints -------------------------------------------------------------------------------------

    def sizes(self, model: str) -> list[tuple[int, str, int]]:
        """Return (stage, name, bytes) of the tensors on this rank, without the second copy of a tied one.

        Shared tensors are listed with their full size: by the first tensor-parallel rank, and for a head that stages
        share by the rank of the last stage, under an extra stage number after the last.
        """
        if not self._answers:
            return []
        tied_copy = {HEAD} if model in self.ties else set()
        stages, shares = [stage for owner, stage in self.stages if owner == model], self.shares.get(model)
        after_last = shares.layout.depth if shares else None
        return [
            (stage, name, size)
            for stage in ([*stages, after_last] if shares and shares.is_writer else stages)
            for name, size in self._exporter(model, stage).sizes()
            if name not in tied_copy and (shares is None or name.startswith("lm_head.") == (stage == after_last))
        ]

    def _exporter(self, model: str, stage: int) -> Exporter:
        """Return the exporter of a stage, or of a shared head under the stage number after the last."""
        shares = self.shares.get(model)
        if shares is None or stage < shares.layout.depth:
            return Exporter(self.stages[model, stage].model, self.at["tp"], self.tensor)
        return Exporter(self.stages[model, shares.index].model, 0 if shares.is_writer else 1, shares)

    @requires_models
    def export_bucket(self, stage: int, names: list[str], path: Path) -> list[str]:
        """Write these tensors of the actor's stage to a safetensors file; return their checkpoint names.

        Collective over the ranks that share the layers or, for a shared head, over the pipeline.
        """
        return self._exporter("actor", stage).write(names, path)

    def save_bucket(self, model: str, stage: int, names: list[str], path: Path) -> tuple[list[str], str | None]:
        """Write a shard of a checkpoint as `export_bucket` does; also return the write error, if any."""
        with on_device(self.engines[model], optimizer=False), checkpoint_writer() as files:
            return self._exporter(model, stage).write(names, path, files), files.problem

    def save_metadata(self, folder: Path) -> str | None:
        """Write the files of `huggingface/` folders except shards; return the write error, if any."""
        files = CheckpointWriter()
        files.probe(folder, self.rank)
        for name in self.engines if self.rank == 0 else ():
            stage = self.layout[name].stages_on(self.at["pp"])[0]
            Exporter(self.stages[name, stage].model, 0).save_pretrained(folder / name / "huggingface", [], files)
        return files.problem

    def save(self, folder: Path) -> str | None:
        """Write this rank's part of the training state to `{actor,critic}/` in `folder`.

        Returns the write error, if any. Raises EngineError if weights are not finite.
        """
        with checkpoint_writer(self.engines.values()) as files:
            for name, engine in self.engines.items():
                first = self.tensor is None or self.tensor.is_writer
                held = (part for part in engine.parts(self._shares(name)) if not part.is_tied_copy)
                written = (part for part in held if first or part.share != WHOLE)
                state_files.save(folder / name, self.rank, written, engine.steps, files)
                check_finite(name, engine.not_finite())
        return files.problem

    @requires_models
    def load(self, folder: Path) -> None:
        """Load weights and optimizer states that `save` wrote, under any layout."""
        for name, engine in self.engines.items():
            with self.optimizer_on_device(name):
                engine.load(SavedState(folder / name), self._shares(name))

    def _shares(self, model: str) -> TensorShares | None:
        """Return the group with which this rank shares tensors of the model, if any."""
        return self.shares.get(model) or self.tensor


# Cached: every gloo group starts threads.
@cache
def _tensor_parallel_group(mesh: ParallelMesh, rank: int, limit_s: float) -> TensorParallelGroup | None:
    if mesh.tp == 1:
        return None
    group = TensorParallelGroup(mesh, rank, timedelta(seconds=limit_s))
    # NCCL uses several algorithms by tensor size, and connects each in its first call. As in `p2p_groups`, this must
    # happen before receives wait on the device. (Not tested on GPUs.)
    for power in range(0, 28, 3) if dist.get_backend() == "nccl" else ():
        group.sum(torch.zeros(1 << power, dtype=torch.bfloat16, device="cuda"))
    return group


class _TiedEmbedding:
    """Tied tensor: embedding on the first stage and head on the last stage or on all; keeps the copies equal."""

    def __init__(
        self, pipelines: Pipelines, models: Mapping[int, PreTrainedModel], world: int, shares: HeadShares | None
    ):
        self.parameter: torch.nn.Parameter | None = None
        self.group, self.shares, self.models = None, shares, models
        if shares is not None:
            models[shares.index].get_parameter(HEAD).is_tied_copy = True  # counted with the embedding
            return
        ends = sorted({pipelines.device(0, stage) for stage in (0, pipelines.depth - 1)})
        for ranks in pipelines.mesh(world).groups("pp") if len(ends) > 1 else ():
            pair = [ranks[device] for device in ends]
            group = process_group(*pair)
            if dist.get_rank() in pair:
                self.group = group
        first, last = models.get(0), models.get(pipelines.depth - 1)
        if first and last:
            last.lm_head.weight = first.base_model.embed_tokens.weight
        elif first:
            self.parameter = first.get_parameter(EMBEDDING)
        elif last:
            self.parameter = last.get_parameter(HEAD)
            self.parameter.is_tied_copy = True  # the norm counts it once

    def add_gradients(self) -> None:
        """Set the gradients of all copies to their sum; collective over each pipeline."""
        if self.shares is not None:
            self.shares.add_tied_gradients(self.models)
        elif self.parameter is not None:
            dist.all_reduce(gradient_of(self.parameter), group=self.group)
