"""All trainer ranks as one: the driver's side of training, scoring by the policy, critic and reference.

Role: implements the controller's `Trainer` and the weight sync's `WeightExporter` over `TrainerRank` actors, one per
slot. Decides (purely, in `batching`) which row goes to which rank and micro-batch, sends every call to all ranks and
puts the answers back in the order of the rows. One call at a time reaches the ranks: they run in lockstep.

    controller --rows--> TrainerGroup --micro-batches--> rank 0 .. rank N-1   (collectives among the ranks)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from rlfuse.algorithms.losses import loss_count
from rlfuse.algorithms.objectives import Scale
from rlfuse.cluster.placement import SHARE, Slots
from rlfuse.cluster.remote import call, call_all
from rlfuse.config.schema import Config
from rlfuse.engines.batching import micro_batches
from rlfuse.engines.protocols import EngineError
from rlfuse.engines.weights import plan_buckets
from rlfuse.observe.events import Span
from rlfuse.samples import MicroBatch, Row


class TrainerGroup:
    """Every method sends one call to all ranks and waits for all of them, at most cluster.timeout_s."""

    def __init__(self, config: Config, ranks: Sequence[ray.actor.ActorHandle]):
        self.config, self.ranks = config, list(ranks)
        self._turn = asyncio.Lock()

    @classmethod
    async def start(cls, config: Config, slots: Slots, optimizer_steps: int) -> tuple[TrainerGroup, dict[str, Any]]:
        """One rank on every slot, models loaded; and facts to log. `optimizer_steps`: length of the schedule."""
        from rlfuse.engines.training import TrainerRank  # imports DeepSpeed: only when ranks are started

        remote = ray.remote(TrainerRank)
        group = cls(
            config,
            [
                remote.options(**slots.options(rank, SHARE)).remote(config, rank, slots.count, slots.device)
                for rank in range(slots.count)
            ],
        )
        host, port = await call(group.ranks[0].address.remote(), "trainer/0", "start", config.cluster.timeout_s)
        await group._all("join", "join the other ranks", host, port)
        return group, (await group._all("setup", "load its models", optimizer_steps))[0]

    async def log_probs(self, model: str, rows: Sequence[Row]) -> list[np.ndarray]:
        """float32 [T] per row, in order."""
        return await self._score("log_probs", f"compute log-probs of the {model}", rows, model)

    async def values(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """float32 [T] per row, in order."""
        return await self._score("values", "compute values", rows)

    async def update_actor(self, rows: Sequence[Row]) -> dict[str, float]:
        """One optimizer step on this mini-batch; its mean diagnostics."""
        return await self._update("update_actor", "update the actor", rows)

    async def update_critic(self, rows: Sequence[Row]) -> dict[str, float]:
        """One optimizer step on this mini-batch; its mean diagnostics."""
        return await self._update("update_critic", "update the critic", rows)

    async def _score(self, method: str, action: str, rows: Sequence[Row], *arguments: Any) -> list[np.ndarray]:
        plan = self._plan(rows)
        answers = await self._each(method, action, *arguments, batches=_fill(plan, rows))
        results: list[Any] = [None] * len(rows)
        for bins, parts in zip(plan, answers, strict=True):
            for bin, arrays in zip(bins, parts, strict=True):
                for index, array in zip(bin, arrays, strict=False):  # a filler's answer has no index
                    results[index] = array
        return results

    async def _update(self, method: str, action: str, rows: Sequence[Row]) -> dict[str, float]:
        lengths = [len(row.response_ids) for row in rows]
        horizon = self.config.data.max_response_length
        count = loss_count(lengths, self.config.actor.loss_agg_mode, horizon)
        scale = Scale(1 / count, 1 / sum(lengths), horizon)
        shares = await self._each(method, action, batches=_fill(self._plan(rows), rows), after=(scale,))
        names = {name: None for share in shares for name in share}
        return {name: sum(share.get(name, 0.0) for share in shares) for name in names}

    def _plan(self, rows: Sequence[Row]) -> list[list[list[int]]]:
        actor = self.config.actor
        return micro_batches(
            [row.tokens for row in rows],
            len(self.ranks),
            actor.ppo_max_token_len_per_gpu,
            actor.ppo_micro_batch_size_per_gpu,
        )

    # Weights and checkpoints -------------------------------------------------------------------------------------

    async def bucket_plan(self, model: str = "actor") -> list[list[str]]:
        """The model's tensors in buckets of rollout.update_weights_bucket_mb."""
        sizes = (await self._all("sizes", "list its weights", model))[0]
        return plan_buckets(sizes, self.config.rollout.update_weights_bucket_mb << 20)

    async def export_bucket(self, names: list[str], path: str) -> None:
        """Write these tensors of the actor to `path`."""
        await self._all("export_bucket", f"write weights to {path}", names, Path(path))

    # `DeviceWeightExporter`: not run without GPUs

    async def nccl_address(self) -> tuple[str, int]:
        """Where rank 0 waits for the engines."""
        return (await self._all("address", "name an address"))[0]

    async def open_nccl(self, host: str, port: int, world_size: int) -> None:
        """Rank 0 joins the engines' process group."""
        await self._all("open_nccl", "join the engines' process group", host, port, world_size)

    async def describe(self, names: list[str]) -> dict[str, Any]:
        """Names, dtypes and shapes of a bucket."""
        return (await self._all("describe", "describe a bucket", names))[0]

    async def send_nccl(self, names: list[str]) -> None:
        """Rank 0 broadcasts a bucket."""
        await self._all("send_nccl", "broadcast a bucket", names)

    async def share_ipc(self, names: list[str]) -> list[dict[str, Any]]:
        """Handles of a bucket from every rank."""
        return await self._all("share_ipc", "share a bucket", names)

    async def release_ipc(self) -> None:
        """The ranks let go of the bucket."""
        await self._all("release_ipc", "release a bucket")

    async def save(self, folder: Path) -> None:
        """`actor/` and `critic/` below `folder`, with what is needed to check that a resumed run fits."""
        models = ["actor", "critic"] if self.config.uses_critic else ["actor"]
        buckets = {model: await self.bucket_plan(model) for model in models}
        await self._all("save", f"save a checkpoint to {folder}", folder.absolute(), buckets)
        (folder / "trainer.json").write_text(json.dumps(self._shape()))

    async def load(self, folder: Path) -> None:
        """Continue from what `save` wrote under the same number of ranks and ZeRO stage."""
        saved = json.loads((folder / "trainer.json").read_text())
        if saved != self._shape():
            raise EngineError(
                f"{folder} was written with {saved}, this run has {self._shape()}: DeepSpeed resumes only with the "
                f"same. Keep those settings, or start a new run from the weights with "
                f"model.path={folder / 'actor' / 'huggingface'}."
            )
        await self._all("load", f"load the checkpoint {folder}", folder.absolute())

    def _shape(self) -> dict[str, Any]:
        return {
            "ranks": len(self.ranks),
            "actor.zero_stage": self.config.actor.zero_stage,
            "critic": self.config.uses_critic,
            "model.dtype": self.config.model.dtype,
        }

    # Calls -------------------------------------------------------------------------------------------------------

    async def drain(self) -> list[Span]:
        """Spans of all ranks since the last call."""
        return [span for spans in await self._all("drain", "hand over its events") for span in spans]

    async def _all(self, method: str, action: str, *arguments: Any) -> list[Any]:
        async with self._turn:
            calls = [getattr(rank, method).remote(*arguments) for rank in self.ranks]
            return await call_all(calls, "trainer", action, self.config.cluster.timeout_s)

    async def _each(
        self, method: str, action: str, *before: Any, batches: list[list[MicroBatch]], after: tuple = ()
    ) -> list[Any]:
        async with self._turn:
            calls = [
                getattr(rank, method).remote(*before, share, *after)
                for rank, share in zip(self.ranks, batches, strict=True)
            ]
            return await call_all(calls, "trainer", action, self.config.cluster.timeout_s)


def _fill(plan: list[list[list[int]]], rows: Sequence[Row]) -> list[list[MicroBatch]]:
    """The plan with its rows; an empty micro-batch repeats the shortest row at weight 0."""
    filler = MicroBatch((min(rows, key=lambda row: row.tokens),), weight=0.0)
    return [[MicroBatch(tuple(rows[i] for i in bin)) if bin else filler for bin in bins] for bins in plan]
