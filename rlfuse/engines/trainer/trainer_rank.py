"""Trainer rank: actor, critic and reference in one process, each a `ShardedModel` over all ranks.

Collective, bounded by cluster.timeout_s: steps, checkpoints, passes with sharded weights, backward passes with sharded
gradients, micro-batches of degree d among d ranks. Invariants: gradients and diagnostics are sums until the step
divides them once; in a collective pass all ranks run equally many micro-batches, if needed fillers of weight 0; of
ranks with slices of a micro-batch the first counts diagnostics and returns results; a step with a non-finite loss or
gradient is skipped on every rank, and non-finite weights are never saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from transformers import PreTrainedModel

from rlfuse.config.parallel_mesh import ParallelMesh
from rlfuse.config.schema import ModelConfig, OptimConfig
from rlfuse.engines.trainer import fused_log_probs, state_files
from rlfuse.engines.trainer.activation_offloading import RankActivations
from rlfuse.engines.trainer.attention import attends_by_layout
from rlfuse.engines.trainer.base_rank import Rank, requires_models
from rlfuse.engines.trainer.cost_measurement import matmul_parameters, matmul_rate, measure_costs
from rlfuse.engines.trainer.cuda_graphs import record_passes
from rlfuse.engines.trainer.liveness import WATCH
from rlfuse.engines.trainer.micro_batch_losses import (
    OBJECTIVES,
    OUTPUTS,
    PassResults,
    RankCall,
    add_sums,
    old_log_probs_from_update,
    read_sums,
    weighted_loss,
)
from rlfuse.engines.trainer.model_inputs import Batch, collate
from rlfuse.engines.trainer.models import (
    check_training_passes,
    head_inputs,
    load_critic,
    load_policy,
    packs_exactly,
    response_logits,
    splits_exactly,
)
from rlfuse.engines.trainer.saving import REFERENCE, CheckpointWriter, StagedFiles, checkpoint_writer
from rlfuse.engines.trainer.sequence_parallel import SequenceParallel, SequenceSlice
from rlfuse.engines.trainer.sequence_parallel_packing import Costs, degrees_up_to
from rlfuse.engines.trainer.sharded_model import ShardedModel, check_finite
from rlfuse.engines.trainer.state_files import WHOLE, Part, SavedState
from rlfuse.engines.trainer.tensor_parallel import TensorParallelGroup
from rlfuse.engines.trainer.vision_tower import SUBMODULE as TOWER
from rlfuse.engines.trainer.vision_tower import MicroBatchClip, TowerSettings, TrainedTower
from rlfuse.engines.weights import cuda_ipc
from rlfuse.engines.weights.exporting import Exporter
from rlfuse.errors import EngineError
from rlfuse.samples import MicroBatch, Row
from rlfuse.step.scoring import KIND_OF
from rlfuse.video.models.base import m_rope, register_custom_family

_CUT = (
    "{}={}: the {}, a {}, mixes tokens outside full or sliding-window attention, so its sequences cannot be split. "
    "Set it to 1"
)


class TrainerRank(Rank):
    """Models of one rank. Call `join`, then `setup`, then any other method."""

    activations: RankActivations | None = None
    """Activation offloading; None where it is off."""
    tensor: TensorParallelGroup | None = None
    """Tensor-parallel group of this rank."""
    synced: Exporter | None = None
    """Exporter of a reference policy that is mixed with the actor, and so belongs to checkpoints."""
    shared: Sequence[torch.Tensor] = ()
    """Weight buckets that engines are loading."""

    def join(self, place: str | ray.actor.ActorHandle) -> None:
        """Initialise the process group of all ranks, and those of tensor and sequence parallelism."""
        super().join(place)
        self.meet_groups()

    @cached_property
    def staged(self) -> StagedFiles:
        return StagedFiles()

    def meet_groups(self) -> None:
        """Create the tensor- and sequence-parallel groups of the configuration; every rank calls."""
        mesh, limit = self.mesh, timedelta(seconds=self.limit_s)
        self.tensor = TensorParallelGroup(mesh, self.rank, limit) if mesh.tp > 1 else None
        self.parallel = SequenceParallel(mesh, self.rank, limit)

    @property
    def mesh(self) -> ParallelMesh:
        return self.config.mesh_of(self.world)

    def setup(self, tower: TowerSettings | None = None) -> dict[str, Any]:
        """Load the models; return facts to log. `tower`: settings of a vision tower that is trained with the actor."""
        config, start = self.config, self.config.model.path
        register_custom_family(config.model.video_family)
        torch.manual_seed(config.data.seed)
        self.engines: dict[str, ShardedModel] = {}
        self.tower = tower and TrainedTower(tower, self.device, config.uses_reference)
        self.extra_modules = self.tower.modules if self.tower else []
        with self.recorder.span("start", cause="run"), self.backend.loading(config):
            policy = self._load(load_policy, start)
            if self.tower:
                self.tower.attach_to(policy)
            self.engines["actor"] = self._trainable(policy, config.actor.optim)
            if config.uses_critic:
                critic = self._load(load_critic, config.critic.path or start)
                self.engines["critic"] = self._trainable(critic, config.critic.optim)
            if config.uses_reference:
                self.engines["ref"] = self._frozen(config.ref.path or start)
        modules = {name: each.module for name, each in self.engines.items()}
        for module in (*modules.values(), *self.extra_modules):
            self.progress.follow(module)
        self.ropes = {name: m_rope(each.config) for name, each in modules.items()}
        self.sums: dict[str, dict[str, torch.Tensor]] = {}
        self.exporters = {
            name: Exporter(engine.module, self.rank, self.tensor, engine)
            for name, engine in self.engines.items()
            if name != "ref"
        }
        self.synced = self._synced_reference() if config.ref.sync_ref_model else None
        self.packed = config.model.use_remove_padding and all(map(self._packs, self.engines))
        self.shares = self.packed and all(map(attends_by_layout, modules.values()))
        for name in self.exporters:
            check_training_passes(self.engines[name], self.packed, self.device, name)
        lines = self._arrange_passes()
        self._check_split()
        parameters = {name: self._matmul_parameters(name) for name in self.exporters}
        facts = {"packed": self.packed, "shares_prompts": self.shares, "lines": lines, "parameters": parameters}
        facts["checkpoint_bytes"] = sum(self.checkpoint_bytes())
        return facts | {"unfused": fused_log_probs.unavailable(self.device)}

    def _frozen(self, path: str) -> ShardedModel:
        return self.backend.frozen(self._load(load_policy, path), self.config, self.device)

    def _synced_reference(self) -> Exporter:
        """Return the exporter of the reference. EngineError if it has other parameters than the actor."""
        sharded = self.engines["ref"]
        exporter = Exporter(sharded.module, self.rank, self.tensor, sharded)
        if differ := set(exporter.sizes()) ^ set(self.exporters["actor"].sizes()):
            name, size = min(differ)
            raise EngineError(
                f"ref.sync_ref_model=true mixes actor and reference, but only one of them has {name} with {size:,} "
                f"bytes. Set ref.path={self.config.ref.path} to a model with the actor's architecture."
            )
        return exporter

    def _matmul_parameters(self, name: str) -> tuple[int, int]:
        """Return `matmul_parameters` of a model of this rank."""
        module = self.engines[name].module
        names = {id(tensor): key for key, tensor in self.exporters[name].tensors.items()}
        lookups = [names.get(id(each.weight)) for each in module.modules() if isinstance(each, torch.nn.Embedding)]
        outputs = module.get_output_embeddings()
        head = None if outputs is None else names.get(id(outputs.weight))
        sizes = {key: size // self.dtype.itemsize for key, size in self.sizes(name)}
        return matmul_parameters(sizes, lookups, head, module.config.get_text_config())

    def _arrange_passes(self) -> list[str]:
        """Set up activation offloading and CUDA graphs; every rank calls. Return lines for the log."""
        models = {name: each.module for name, each in self.engines.items()}
        trained = {name: self.engines[name] for name in self.exporters}
        wanted = self.config.model.enable_activation_offload
        self.activations = RankActivations(self.config, trained, self.device) if wanted else None
        self.graphs, line = record_passes(self.config, models, self.device, self.recorder, self.shares)
        return [str(each) for each in (self.activations, line) if each]

    def _load(self, load: Callable[[str, ModelConfig], PreTrainedModel], path: str) -> PreTrainedModel:
        """Load the model at `path`, or this rank's share of its layers."""
        model = self.config.model
        return self.tensor.load(lambda: load(path, model)) if self.tensor else load(path, model)

    def _trainable(self, model: PreTrainedModel, optim: OptimConfig) -> ShardedModel:
        return self.backend.trained(model, self.config, optim, self.device, self.mesh)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which layers compute and weights are pushed."""
        return getattr(torch, self.config.model.dtype)

    def _packs(self, name: str) -> bool:
        engine = self.engines[name]
        read = head_inputs if name == "critic" else response_logits
        return packs_exactly(engine, engine.module.config.get_text_config().vocab_size, self.dtype, self.device, read)

    def _check_split(self) -> None:
        """Raise EngineError if sequence parallelism is on and a model of this rank does not support it."""
        largest = self.mesh.sp
        if largest == 1:
            return
        key, part, actor = "training.ulysses_sequence_parallel_size", self.parallel.part(largest), self.engines["actor"]
        for name, engine in self.engines.items():
            module = engine.module
            if (heads := module.config.get_text_config().num_attention_heads // self.mesh.tp) % largest:
                raise EngineError(f"{key}={largest} must divide the {heads} attention heads of the {name}. Lower it")
            if not attends_by_layout(module):
                raise EngineError(_CUT.format(key, largest, name, type(module).__name__))
        text = actor.module.config.get_text_config()
        if not splits_exactly(actor, text.vocab_size, self.dtype, self.packed, self.device, part):
            raise EngineError(_CUT.format(key, largest, "actor", type(actor.module).__name__))

    @requires_models
    def measure(self) -> Costs:
        """Measure the costs of sequence parallelism on these ranks; every rank calls."""
        degrees, width = degrees_up_to(self.mesh.sp), self.mesh.tp
        module = self.engines["actor"].module
        text, lockstep = module.config.get_text_config(), width > 1 or self.config.sharded_weights
        token_s = 2 * sum(self._matmul_parameters("actor")) / matmul_rate(self.dtype, self.device) / width
        return measure_costs(self._time_pass, degrees, text, token_s, self.dtype, self.device, lockstep, width)

    @torch.no_grad()
    def _time_pass(self, tokens: int, degree: int) -> None:
        """Run a forward pass of one row with `tokens` tokens and wait for the device."""
        ids = np.zeros(tokens, dtype=np.int32)
        batch = collate([Row(ids[1:], ids[:1])], self.packed, self.device, self.parallel.part(degree))
        float(response_logits(self.engines["actor"], batch).sum())  # waits for the device

    def _collate(self, model: str, rows: Sequence[Row], part: SequenceSlice | None) -> Batch:
        sizes = self.graphs.sizes if self.graphs else ()
        return collate(rows, self.packed, self.device, part, self.shares, self.ropes[model], sizes)

    # Passes without gradients ------------------------------------------------------------------------------------

    @requires_models
    @torch.no_grad()
    def score(self, models: Sequence[str], micro_batches: Sequence[MicroBatch]) -> PassResults:
        """Run each model's forward pass (`OUTPUTS`); all are launched before the first result is read."""
        call = RankCall(models, self.device)
        for model in models:
            engine, kind = self.engines[model], KIND_OF.get(model, "values")
            engine.eval()
            for number, micro_batch in enumerate(micro_batches):
                part = self.parallel.part(micro_batch.degree)
                with self._span(kind, micro_batch, "finished samples") as span, call.timed(model, span):
                    rows = self.tower.rows_of(model, micro_batch.rows) if self.tower else micro_batch.rows
                    batch = self._cached_or_collated(model, rows, part, number, call)
                    span.attributes["run"] = batch.inputs["input_ids"].numel()
                    scores = batch.split_later(OUTPUTS[model](self.config, engine, batch))
                    call.results[model].append(scores if self._returns_results(part) else None)
        return call.read()

    def _cached_or_collated(
        self, model: str, rows: Sequence[Row], part: SequenceSlice | None, number: int, call: RankCall
    ) -> Batch:
        """Collate rows, or reuse the batch of the call's previous model, which is the same for rows without clips."""
        batch = call.batches.pop(number, None)
        if batch is None:
            batch = self._collate(model, rows, part)
        if model != call.models[-1] and not any(row.visual for row in rows):
            call.batches[number] = batch
        return batch

    @requires_models
    @torch.no_grad()
    def evaluate(self, model: str, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Return the diagnostics of the model's loss, summed over the rows of which this rank returns results."""
        call, totals = RankCall((model,), self.device), dict[str, torch.Tensor]()
        self.engines[model].eval()
        for number, micro_batch in enumerate(micro_batches):
            part = self.parallel.part(micro_batch.degree)
            with self._span("evaluate", micro_batch, "testing", model=model) as span, call.timed(model, span):
                batch = self._cached_or_collated(model, micro_batch.rows, part, number, call)
                _, sums = OBJECTIVES[model](self.config, self.engines[model], batch)
            add_sums(totals, sums, micro_batch.weight * self._returns_results(part))
        call.read()
        return read_sums(totals)

    # Updates -----------------------------------------------------------------------------------------------------

    @requires_models
    def accumulate(self, models: Sequence[str], micro_batches: Sequence[MicroBatch]) -> PassResults:
        """Accumulate the gradients of each model's summed loss, and its diagnostics.

        Returns the old log-probs of actor rows that had none (`old_log_probs_from_update`).
        """
        call = RankCall(models, self.device)
        for model in models:
            self.engines[model].train()
            for number, micro_batch in enumerate(micro_batches):
                self._accumulate(model, micro_batch, number, call)
        return call.read()

    def _accumulate(self, model: str, micro_batch: MicroBatch, number: int, call: RankCall) -> None:
        engine, totals = self.engines[model], self.sums.setdefault(model, {})
        part = self.parallel.part(micro_batch.degree)
        with self._span("forward", micro_batch, f"update_{model}", model=model) as span, call.timed(model, span):
            rows, clips = self._rows_and_clips(model, micro_batch)
            batch = self._cached_or_collated(model, rows, part, number, call)
            with self.activations.offloaded(model, batch, span) if self.activations else nullcontext():
                loss, sums = OBJECTIVES[model](self.config, engine, batch)
        with self._span("backward", micro_batch, f"update_{model}", model=model) as span, call.timed(model, span):
            engine.backward(weighted_loss(loss, micro_batch.weight))
            if clips:
                self.tower.backward(clips)
        call.results[model].append(
            old_log_probs_from_update(model, rows, batch) if self._returns_results(part) else None
        )
        add_sums(totals, sums, micro_batch.weight * self._returns_results(part))

    def _rows_and_clips(self, model: str, micro_batch: MicroBatch) -> tuple[Sequence[Row], list[MicroBatchClip]]:
        """Return the rows for an update of `model`, and their clips that train the tower."""
        if not self.tower or not micro_batch.weight:
            return micro_batch.rows, []
        if model == "actor":
            return self.tower.rows_with_gradient(micro_batch.rows)
        return self.tower.rows_of(model, micro_batch.rows), []

    @requires_models
    def step(self, model: str, count: float, lr_factor: float = 1.0) -> tuple[dict[str, float], dict[str, float]]:
        """Take one optimizer step with the gradients of all ranks divided by `count`; every rank calls.

        Returns the diagnostics summed over this rank's rows, and the values equal on every rank, `lr` and `grad_norm`.
        """
        engine = self.engines[model]
        with self.stepping(model) as span:
            trained = self.tower if model == "actor" else None
            if trained:
                trained.add_gradients_to(engine)
            facts = engine.step(count, lr_factor)
            span.attributes["skipped"] = not math.isfinite(facts["grad_norm"])
            if trained:
                trained.copy_weights_from(engine)
            if self.device != "cpu":
                span.attributes["max_memory"] = torch.cuda.max_memory_allocated()
        return read_sums(self.sums.pop(model, {})), facts

    @requires_models
    def sync_reference(self) -> None:
        """Move the reference policy towards the actor (TR-DPO, Gorbatovski et al. 2024, arXiv 2404.09656)."""
        self.engines["actor"].mix_into(self.engines["ref"], self.config.ref.ref_model_mixup_alpha)

    # Weights and checkpoints -------------------------------------------------------------------------------------

    def sizes(self, model: str) -> list[tuple[str, int]]:
        """Return (name, bytes) of the model's tensors."""
        return (self.synced if model == "ref" else self.exporters[model]).sizes()

    @requires_models
    def export_bucket(self, names: list[str], path: Path) -> None:
        """Write these tensors of the actor to a safetensors file; every rank calls, rank 0 writes."""
        self.exporters["actor"].write(names, path)

    @requires_models
    def save_tower(self, path: Path) -> int:
        """Write the trained tower on rank 0; return its number of updates. Later rows have embeddings of that tower."""
        if self.rank == 0:
            self.tower.write(path)
        self.tower.embedded_at = self.tower.updates
        return self.tower.updates

    # Needs GPUs, see weights.cuda_ipc

    @requires_models
    def share_ipc(self, names: list[str]) -> dict[str, Any]:
        """Return a bucket's CUDA IPC handle for the engine on this rank's GPU; every rank calls.

        The last two buckets stay allocated until `release_ipc`. EngineError if the models are in host memory.
        """
        with self.exporters["actor"].gathered(names, everywhere=True) as tensors:
            cuda_ipc.collect()
            handle, buffer = cuda_ipc.share_ipc(tensors)
        self.shared = [*self.shared[-1:], buffer]
        return handle

    def release_ipc(self) -> None:
        """Release the buckets that `share_ipc` keeps, once the engine has loaded them."""
        self.shared = []
        cuda_ipc.collect()

    def save(self, folder: Path, buckets: dict[str, list[list[str]]], wait: bool = True) -> str | None:
        """Write `{actor,critic}/` below `folder`: the backend's state, and a Hugging Face folder in these buckets.

        The actor's Hugging Face folder also gets a trained tower, `tower.safetensors`. A synchronized reference policy
        is written to `ref/huggingface/`. Returns the first file that could not be written with the reason. With
        `wait=False` the files are complete after `saved`. EngineError for weights that are not finite.
        """
        with (
            checkpoint_writer(self.engines[name] for name in self._saved_models()) as files,
            self.staged.folder(folder, self._bytes_of_host()) as staged,
        ):
            files.write(folder, partial(folder.mkdir, parents=True, exist_ok=True))
            folder = staged
            for name, exporter in self.exporters.items():
                model = self.engines[name]
                state_files.save(folder / name, self.rank, self._written(model), model.steps, files)
                exporter.save_pretrained(folder / name / "huggingface", buckets[name], files)
            if self.synced:
                self.synced.save_pretrained(folder / REFERENCE, buckets["ref"], files)
            if self.tower and self.rank == 0:
                tower = folder / "actor" / "huggingface" / "tower.safetensors"
                files.write(tower, lambda: self.tower.write(tower))
            for name in self.exporters:
                check_finite(name, self.engines[name].not_finite())
        return files.problem or (self.saved() if wait else None)

    def save_metadata(self, folder: Path) -> str | None:
        """Write all that `save` writes except weights and optimizer state; return as `save`."""
        files = CheckpointWriter()
        files.probe(folder, self.rank)
        for name, exporter in self.exporters.items():
            exporter.save_pretrained(folder / name / "huggingface", [], files)
        if self.synced:
            self.synced.save_pretrained(folder / REFERENCE, [], files)
        return files.problem

    @requires_models
    def load(self, folder: Path) -> None:
        """Load weights, optimizer states and reference that `save` wrote under any layout; hyperparameters are those of
        this run."""
        for name in self.exporters:
            with self.optimizer_on_device(name):
                self.engines[name].load(SavedState(folder / name), self.tensor)
        if self.synced:
            with self.backend.loading(self.config):
                self._frozen(str(folder / REFERENCE)).mix_into(self.engines["ref"], 1.0)  # a copy, in every layout
        if self.tower:
            self.tower.copy_weights_from(self.engines["actor"])
            self.tower.embedded_at = self.tower.updates

    @ray.method(concurrency_group=WATCH)
    def is_saving(self) -> bool:
        """Return whether files of the last `save` are still being copied to the disk; answered during other calls."""
        return self.staged.is_copying()

    @ray.method(concurrency_group=WATCH)
    def saved(self) -> str | None:
        """Wait for the files of the last `save`; return the first that could not be written with the reason."""
        return self.staged.problem()

    def checkpoint_bytes(self) -> tuple[int, int]:
        """Return the size of a checkpoint of all ranks: of the states of trained models, and of exported models."""
        exported = {name: sum(size for _, size in self.sizes(name)) for name in self._saved_models()}
        if self.tower:  # exporters omit it
            actor = self.engines["actor"]
            exported["actor"] += sum(map(actor.nbytes, getattr(actor.module, TOWER).parameters()))
        trained = sum(exported[name] for name in self.exporters) // self.dtype.itemsize
        return trained * state_files.BYTES_PER_PARAMETER, sum(exported.values())

    def _bytes_of_host(self) -> int:
        """Return what the ranks of this host write of a checkpoint: their states, and rank 0 the exported models."""
        (states, exported), local = self.checkpoint_bytes(), self.config.trainer.n_gpus_per_node
        part = min(1.0, local / self.world) if self.config.sharded_optimizer else 1.0
        return int(states * part) + (exported if self.rank < local else 0)

    def _saved_models(self) -> list[str]:
        """Return the models of a checkpoint: the trained ones and a synchronized reference."""
        return [*self.exporters, *(["ref"] if self.synced else [])]

    def _written(self, model: ShardedModel) -> Iterator[Part]:
        """Return the parts of a model that this rank writes: of several ranks with equal parts, only the first."""
        first = self.mesh.leads(self.rank, "tp")
        if not self.config.sharded_optimizer and not self.mesh.leads(self.rank, "dp", "sp"):
            return iter(())
        return (part for part in model.parts(self.tensor) if first or part.share != WHOLE)

    # Events ------------------------------------------------------------------------------------------------------

    def _span(self, kind: str, micro_batch: MicroBatch, cause: str, **attributes: Any):
        rows, degree = micro_batch.rows if micro_batch.weight else (), micro_batch.degree
        tokens, sharers = sum(row.tokens for row in rows), degree * self.mesh.tp
        return self.recorder.span(
            kind,
            cause=cause,
            samples=tuple(row.id for row in rows),
            tokens=len(range(self.rank % sharers, tokens, sharers)),  # this rank's share, exact to one token
            attributes=attributes | {"degree": degree},
        )

    def _returns_results(self, part: SequenceSlice | None) -> bool:
        """Return whether this rank returns the results of a micro-batch that ranks share."""
        return self.mesh.at_degree(part.degree if part else 1).leads(self.rank, "sp", "tp")
