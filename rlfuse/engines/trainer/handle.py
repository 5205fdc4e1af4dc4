"""All trainer ranks as one: the driver's side of training, scoring by the policy, critic and reference.

Role: implements the controller's `Trainer` and the weight sync's `WeightExporter` over `TrainerRank` actors. Decides
(purely, in `degrees`) which row goes to which ranks and micro-batch, and puts the answers back in the order of the
rows. A long row is cut over several ranks where that is needed or sooner done. A rollout slot spans
`rollout.tensor_model_parallel_size` ranks.

    controller --rows--> TrainerGroup --micro-batches--> rank 0 .. rank N-1   (collectives among the ranks)

Invariants: calls on single slots run side by side; a call of all ranks runs alone, because collectives need the same
order on every rank. The rows of a step are those that were accumulated since the last one.
Waits: for other calls' turns and for ranks, each call at most cluster.timeout_s.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from rlfuse.algorithms.losses import loss_count
from rlfuse.algorithms.objectives import means
from rlfuse.cluster import cuda
from rlfuse.cluster.placement import Slots
from rlfuse.cluster.remote import all_of, call
from rlfuse.config.schema import Config
from rlfuse.engines.trainer.deepspeed_ops import load_everywhere
from rlfuse.engines.trainer.degrees import Costs, Share, Unit, alone, legal, plan, together
from rlfuse.engines.trainer.determinism import environment
from rlfuse.engines.weights.sync import plan_buckets
from rlfuse.errors import EngineError, NotSaved
from rlfuse.events import Span
from rlfuse.samples import MicroBatch, Row

if TYPE_CHECKING:  # imports DeepSpeed
    from rlfuse.engines.trainer.vision_tower import TowerSettings

KEEPING = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""Bytes; up to these glibc keeps what a rank frees. By default it hands a micro-batch's activations back to the system
and takes them anew; the page faults are 5 % of a split backward's time."""


class TrainerGroup:
    """Every method sends its call to the ranks concerned and waits for all of them, at most cluster.timeout_s."""

    def __init__(self, config: Config, ranks: Sequence[ray.actor.ActorHandle]):
        self.config, self.ranks = config, list(ranks)
        self.costs, self.shares_prompts = Costs(), False
        self._turns = _Turns()
        self._accumulated: dict[str, list[int]] = {model: [] for model in self.models}  # response tokens of each row

    @classmethod
    async def start(
        cls,
        config: Config,
        slots: Slots,
        optimizer_steps: int,
        cores: Sequence[int] | None = None,
        tower: TowerSettings | None = None,
    ) -> tuple[TrainerGroup, dict[str, Any]]:
        """One rank on every slot, models loaded; and facts to log.

        `optimizer_steps`: length of the schedule; `cores`: the CPU core that each rank's process is bound to; `tower`:
        what video.freeze_tower=false trains, not read otherwise.
        """
        from rlfuse.engines.trainer.rank import TrainerRank  # imports DeepSpeed: only when ranks are started

        if config.video.freeze_tower:
            tower = None
        elif tower is None:
            raise ValueError(
                "video.freeze_tower=false: there is no tower to train. Give a video model, or set it to true."
            )
        group = cls(config, await start_ranks(TrainerRank, config, slots, cores))
        facts = (await group._all("setup", "load its models", optimizer_steps, tower))[0]
        group.shares_prompts = facts.pop("shares_prompts")
        group.costs = (await group._all("measure", "time passes"))[0]
        return group, facts

    @property
    def models(self) -> tuple[str, ...]:
        """What is trained."""
        return ("actor", "critic") if self.config.uses_critic else ("actor",)

    @property
    def lockstep(self) -> bool:
        """Whether passes need all ranks together: ZeRO 3 gathers weights from them, and rows may be cut over them."""
        return self.config.actor.zero_stage == 3 or self._largest > 1

    @property
    def lockstep_backward(self) -> bool:
        """Whether gradients do: ZeRO 2 and 3 reduce them in every backward, and rows may be cut."""
        return self.config.actor.zero_stage >= 2 or self._largest > 1

    @property
    def _largest(self) -> int:
        return self.config.training.ulysses_sequence_parallel_size

    async def log_probs(self, model: str, rows: Sequence[Row], slot: int | None = None) -> list[np.ndarray]:
        """float32 [T] per row, in order. ValueError for a single slot under ZeRO 3, or with a row that must be cut."""
        return await self._score("log_probs", f"compute log-probs of the {model}", rows, slot, model)

    async def values(self, rows: Sequence[Row], slot: int | None = None) -> list[np.ndarray]:
        """float32 [T] per row, in order. ValueError as `log_probs`."""
        return await self._score("values", "compute values", rows, slot)

    async def accumulate(self, model: str, rows: Sequence[Row], slot: int | None = None) -> None:
        """Add the rows' gradient of the summed loss. ValueError for one slot under ZeRO 2 and 3, or as `log_probs`."""
        shares = self._plan(rows, slot, least_stage=2)
        self._accumulated[model] += [len(row.response_ids) for row in rows]  # a step from now on waits for them
        await self._send("accumulate", f"accumulate gradients of the {model}", slot, shares, rows, model)

    async def step(self, model: str, lengths: Sequence[int]) -> dict[str, float]:
        """One optimizer step; the mini-batch's mean diagnostics, `lr` and `grad_norm` as `model/name`.

        ValueError unless `lengths` are the response tokens of the rows accumulated since the last step, in any order.
        """
        check_step(model, lengths, self._accumulated[model])
        self._accumulated[model] = []
        count = loss_count(lengths, self.config.actor.loss_agg_mode, self.config.data.max_response_length)
        shares = await self._all("step", f"update the {model}", model, count)
        return step_metrics(model, shares, count, lengths)

    async def take_device(self, slot: int) -> None:
        """The slot's ranks get their models onto the device."""
        await self._call("switch", "take its device", slot, lambda rank: ("trainer",))

    async def leave_device(self, slot: int) -> None:
        """The slot's ranks move their models to host memory; until `take_device` nothing may be asked of them."""
        await self._call("switch", "leave its device", slot, lambda rank: ("rollout",))

    async def _score(
        self, method: str, action: str, rows: Sequence[Row], slot: int | None, *arguments: Any
    ) -> list[np.ndarray]:
        shares = self._plan(rows, slot, least_stage=3)
        answers = await self._send(method, action, slot, shares, rows, *arguments)
        results: list[Any] = [None] * len(rows)
        for mine, parts in zip(shares, answers, strict=True):
            for share, arrays in zip(mine, parts, strict=True):
                # A filler's answer has no index; of ranks with slices of the same rows one answers.
                for index, array in zip(share.rows, arrays, strict=False):
                    results[index] = array
        return results

    def _plan(self, rows: Sequence[Row], slot: int | None, least_stage: int) -> list[list[Share]]:
        """By rank; `least_stage`: of ZeRO, from which on all ranks run as many micro-batches of this pass."""
        actor, lockstep = self.config.actor, self.config.actor.zero_stage >= least_stage
        budget, most = actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu
        if lockstep and slot is not None:
            raise ValueError(
                f"actor.zero_stage={actor.zero_stage} needs all ranks in this pass, slot {slot} alone would wait for "
                "them for ever: ask without a slot, or lower the stage."
            )
        longest = max(row.tokens for row in rows)
        if self._largest > 1 and slot is not None and longest > budget:
            raise ValueError(
                f"A row of {longest} tokens must be cut over ranks (actor.ppo_max_token_len_per_gpu={budget}), slot "
                f"{slot} alone can't: ask without a slot."
            )
        ranks, degrees = len(self._ranks(slot)), self._degrees(slot)
        units = self._units(rows, budget * degrees[-1], ranks)
        costs = self.costs.trained() if least_stage == 2 else self.costs
        return plan(units, ranks, budget, degrees, costs, most, lockstep)

    def _units(self, rows: Sequence[Row], capacity: int, ranks: int) -> list[Unit]:
        """Rows that stay together; `capacity`: tokens of a micro-batch at most."""
        most = self.config.actor.ppo_micro_batch_size_per_gpu
        return together(rows, capacity, ranks, most) if self.shares_prompts else alone(rows)

    def _degrees(self, slot: int | None) -> Sequence[int]:
        return legal(self._largest) if slot is None else (1,)

    # Weights and checkpoints -------------------------------------------------------------------------------------

    async def bucket_plan(self, model: str = "actor") -> list[list[str]]:
        """The model's tensors in buckets of rollout.update_weights_bucket_mb."""
        sizes = (await self._all("sizes", "list its weights", model))[0]
        return plan_buckets(sizes, self.config.rollout.update_weights_bucket_mb << 20)

    async def export_bucket(self, names: list[str], path: str) -> None:
        """Write these tensors of the actor to `path`."""
        await self._all("export_bucket", f"write weights to {path}", names, Path(path))

    def writer(self, names: list[str]) -> int:
        """The rank that writes them."""
        return 0

    async def save_tower(self, path: Path) -> int:
        """Write the trained tower for the encoder ranks' `update_tower`, which also takes the updates returned.

        Rows after this must bring embeddings of that tower. `path`: a folder that the encoder ranks can read.
        """
        return (await self._all("save_tower", f"write its tower to {path}", Path(path).absolute()))[0]

    # `DeviceWeightExporter`: not run without GPUs

    async def share_ipc(self, names: list[str]) -> list[dict[str, Any]]:
        """Handles of a bucket from every rank."""
        return await self._all("share_ipc", "share a bucket", names)

    async def release_ipc(self) -> None:
        """The ranks let go of the bucket."""
        await self._all("release_ipc", "release a bucket")

    async def save(self, folder: Path) -> None:
        """A folder for each model below `folder`, with what is needed to check that a resumed run fits.

        NotSaved where a file could not be written.
        """
        check_settled(self._accumulated, "saved")
        buckets = {model: await self.bucket_plan(model) for model in self.models}
        check_written(await self._all("save", f"save a checkpoint to {folder}", folder.absolute(), buckets))
        (folder / "trainer.json").write_text(json.dumps(self._shape()))

    async def load(self, folder: Path) -> None:
        """Continue from what `save` wrote under the same number of ranks and ZeRO stage, or 1 and 2."""
        check_settled(self._accumulated, "loaded")
        saved = json.loads((folder / "trainer.json").read_text())
        if _layout(saved) != _layout(self._shape()):
            raise EngineError(
                f"{folder} was written with {saved}, this run has {self._shape()}: DeepSpeed resumes only with the "
                f"same. Keep those settings, or start a new run from the weights with "
                f"model.path={folder / self.models[0] / 'huggingface'}."
            )
        await self._all("load", f"load the checkpoint {folder}", folder.absolute())

    def _shape(self) -> dict[str, Any]:
        return {
            "ranks": len(self.ranks),
            "actor.zero_stage": self.config.actor.zero_stage,
            "critic": self.config.uses_critic,
            "model.dtype": self.config.model.dtype,
            "video.freeze_tower": self.config.video.freeze_tower,
        }

    # Calls -------------------------------------------------------------------------------------------------------

    async def drain(self) -> list[Span]:
        """Spans of all ranks since the last call."""
        return [span for spans in await self._all("drain", "hand over its events") for span in spans]

    def _ranks(self, slot: int | None) -> range:
        width = self.config.rollout.tensor_model_parallel_size
        return range(len(self.ranks)) if slot is None else range(slot * width, (slot + 1) * width)

    async def _send(
        self, method: str, action: str, slot: int | None, shares: list[list[Share]], rows: Sequence[Row], *first: Any
    ) -> list[Any]:
        """A call with micro-batches of `rows`; the ranks' answers."""
        batches = dict(zip(self._ranks(slot), fill(shares, rows), strict=True))
        return await self._call(method, action, slot, lambda rank: (*first, batches[rank]))

    async def _all(self, method: str, action: str, *arguments: Any) -> list[Any]:
        return await self._call(method, action, None, lambda rank: arguments)

    async def _call(
        self, method: str, action: str, slot: int | None, arguments: Callable[[int], tuple[Any, ...]]
    ) -> list[Any]:
        limit = self.config.cluster.timeout_s
        async with self._turns.alone() if slot is None else self._turns.shared():
            calls = [
                call(getattr(self.ranks[rank], method).remote(*arguments(rank)), f"trainer/{rank}", action, limit)
                for rank in self._ranks(slot)
            ]
            return await all_of(calls)


def _layout(shape: Mapping[str, Any]) -> dict[str, Any]:
    """How optimizer state is kept: under ZeRO 2 as under 1."""
    return {**shape, "actor.zero_stage": {2: 1}.get(shape["actor.zero_stage"], shape["actor.zero_stage"])}


class _Turns:
    """Many shared turns at a time, or one alone; whoever waits to be alone keeps later ones out."""

    def __init__(self) -> None:
        self._gate, self._none_shared, self._shared = asyncio.Lock(), asyncio.Event(), 0
        self._none_shared.set()

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        async with self._gate:
            self._shared += 1
            self._none_shared.clear()
        try:
            yield
        finally:
            self._shared -= 1
            if not self._shared:
                self._none_shared.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._gate:
            await self._none_shared.wait()
            yield


async def start_ranks(
    kind: type, config: Config, slots: Slots, cores: Sequence[int] | None
) -> list[ray.actor.ActorHandle]:
    """One actor of this kind of rank on every slot; they have met one another."""
    remote, bound, limit = ray.remote(kind), cores or [None] * slots.count, config.cluster.timeout_s
    chosen = KEEPING if slots.device == "cpu" else cuda.environment(cuda.rank_settings(config, slots.threads))
    variables = environment(config, slots.device) | chosen
    options = [slots.options(rank, cuda.SHARE, variables) for rank in range(slots.count)]
    ranks = [
        remote.options(**options[rank]).remote(config, rank, slots.count, slots.device, core)
        for rank, core in zip(range(slots.count), bound, strict=True)
    ]
    await load_everywhere(ranks, limit)
    host, port = await call(ranks[0].meeting_place.remote(), "trainer/0", "start", limit)
    meetings = [
        call(rank.join.remote(host, port), f"trainer/{i}", "join the other ranks", limit)
        for i, rank in enumerate(ranks)
    ]
    await all_of(meetings)
    return ranks


def check_step(model: str, lengths: Sequence[int], accumulated: Sequence[int]) -> None:
    """ValueError unless a step over rows of these response lengths is one over what was accumulated."""
    if not accumulated:
        raise ValueError(f"Nothing was accumulated for the {model} since its last step: accumulate rows first.")
    if sorted(lengths) != sorted(accumulated):
        raise ValueError(
            f"A step of the {model} over {len(lengths)} rows ({sum(lengths)} response tokens), but since its last "
            f"one {len(accumulated)} ({sum(accumulated)}) were accumulated: accumulate every row of it once."
        )


def step_metrics(
    model: str, shares: Sequence[tuple[dict[str, float], dict[str, float]]], count: float, lengths: Sequence[int]
) -> dict[str, float]:
    """Mean diagnostics of a step as `model/name`, from each rank's sums and what is the same on all ranks."""
    names = {name: None for sums, _ in shares for name in sums}
    totals = {name: sum(sums.get(name, 0.0) for sums, _ in shares) for name in names}
    facts = shares[0][1]
    return {f"{model}/{name}": value for name, value in (means(totals, count, sum(lengths)) | facts).items()}


def check_settled(accumulated: Mapping[str, Sequence[int]], done: str) -> None:
    """ValueError while a model holds gradients, which checkpoints do not have."""
    for model, lengths in accumulated.items():
        if lengths:
            raise ValueError(
                f"No checkpoint can be {done} now: the {model} holds gradients of {len(lengths)} rows, which "
                "checkpoints do not have. Step first."
            )


def check_written(problems: Sequence[str | None]) -> None:
    """NotSaved if a rank could not write; `problems`: of each rank."""
    if told := [f"trainer/{rank}: {problem}" for rank, problem in enumerate(problems) if problem]:
        raise NotSaved(told[0])


def fill(shares: Sequence[Sequence[Share]], rows: Sequence[Row]) -> list[list[MicroBatch]]:
    """The shares with their rows; one without repeats the shortest row at weight 0."""
    filler = MicroBatch((min(rows, key=lambda row: row.tokens),), weight=0.0)
    return [
        [
            MicroBatch(tuple(rows[i] for i in share.rows), degree=share.degree) if share.rows else filler
            for share in mine
        ]
        for mine in shares
    ]
