"""The controller's `Trainer` where ranks hold stages: chooses the schedule, the group carries it out.

Role: `rlfuse.run.build` starts one when `training.pipeline_parallel_size` is above 1. Actor and critic stand on the
same devices in opposite directions; data parallelism is over blocks of that many devices. What the schedule trains on
and what it scores beside that, in the bubbles, is the fusion policy's to say.

    controller --rows of all models---> PipelineTrainer --counts--> Planner (search, in a thread)
                                            | schedule, rows            ^
                                            v                           | measured durations
                                        PipelineGroup -> ranks ---------+

Waits: for the search (seconds, and only when it is due) and for the group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlfuse.cluster.placement import Slots
from rlfuse.cluster.remote import all_of, call
from rlfuse.config.schema import Config
from rlfuse.engines.pipeline.group import PipelineGroup
from rlfuse.engines.pipeline.layout import Pipelines
from rlfuse.engines.trainer.micro_batches import micro_batches
from rlfuse.events import Recorder, Span
from rlfuse.fusion.schedules.planning import Planner
from rlfuse.fusion.schedules.search import warm_up
from rlfuse.samples import Row

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


class PipelineTrainer(PipelineGroup):
    """All passes and gradients need all ranks together."""

    lockstep = lockstep_backward = True

    @classmethod
    async def start(
        cls, config: Config, slots: Slots, optimizer_steps: int, cores: Sequence[int] | None = None
    ) -> tuple[PipelineTrainer, dict[str, Any]]:
        """One rank on every slot, stages loaded; and facts to log. Otherwise as `TrainerGroup.start`."""
        stages, training = config.training.pipeline_parallel_size, config.training
        planner = Planner(stages, config.fusion.training, training.split_backward, training.activation_memory)
        layout = [Pipelines(name, stages, direction=planner.direction(name)) for name in _models(config)]
        compiling = asyncio.to_thread(warm_up if config.fusion.training == "fused" else int)
        (trainer, facts), _ = await asyncio.gather(
            super().start(config, slots, layout, optimizer_steps, cores), compiling
        )
        trainer.planner, trainer.recorder = planner, Recorder("trainer")
        sizes = [
            tensor for rank in (await trainer._all("sizes", "list its weights", "actor"))[:stages] for tensor in rank
        ]
        parameters = sum(size for _, _, size in sizes) // ITEM_BYTES[config.model.dtype]
        return trainer, facts | {"parameters": parameters}

    async def log_probs(self, model: str, rows: Sequence[Row], slot: int | None = None) -> list[np.ndarray]:
        """float32 [T] per row, in order. ValueError for a single slot."""
        return await super().log_probs(model, _of_all(rows, slot))

    async def values(self, rows: Sequence[Row], slot: int | None = None) -> list[np.ndarray]:
        """float32 [T] per row, in order. ValueError for a single slot."""
        return await super().values(_of_all(rows, slot))

    async def train(
        self, rows: Mapping[str, Sequence[Row]], scored: Mapping[str, Sequence[Row]]
    ) -> tuple[dict[str, float], dict[str, list[np.ndarray]]]:
        """Add the gradients of all models' `rows` and score the rows of `scored` in one schedule.

        Its makespans in seconds, and float32 [T] per scored row of each model.
        """
        counts, passes = (
            {model: self._micro_batches(model, each) for model, each in of.items()} for of in (rows, scored)
        )
        plan = await asyncio.to_thread(self.planner.plan, counts, passes)
        attributes = {"micro_batches": counts, "scored": passes}
        with self.recorder.span("schedule", cause="scored", attributes=attributes) as span:
            done = await self.run(plan.rows, rows, scored, plan.times)
            for each in (each for row in done.timed for each in row):
                self.planner.learn(plan.timed_as(each.operation), each.end - each.start)
            made = {"actual": done.makespan}
            if plan.times:
                made |= {"planned": plan.seconds, "serial": plan.serial_s}
            span.attributes |= made
        return {f"fusion/train_makespan_{name}": seconds for name, seconds in made.items()}, done.scores

    def _micro_batches(self, model: str, rows: Sequence[Row]) -> int:
        """Of each pipeline: as the token budget wants, and enough to fill it where there are rows for that."""
        actor, copies = self.config.actor, self.copies(model)
        budget, most = actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu
        least = micro_batches([row.tokens for row in rows], copies, budget, most, lockstep=True)
        return max(len(least[0]), min(2 * self.layout[model].depth, -(-len(rows) // copies)))

    async def take_device(self, slot: int) -> None:
        """The slot's ranks get their stages onto the device."""
        await self._switch(slot, "trainer")

    async def leave_device(self, slot: int) -> None:
        """The slot's ranks move their stages to host memory."""
        await self._switch(slot, "rollout")

    async def _switch(self, slot: int, role: str) -> None:
        width, limit = self.config.rollout.tensor_model_parallel_size, self.config.cluster.timeout_s
        ranks = range(slot * width, (slot + 1) * width)  # beside other slots', too: nobody waits for a peer
        action = "take its device" if role == "trainer" else "leave its device"
        await all_of([call(self.ranks[i].switch.remote(role), f"trainer/{i}", action, limit) for i in ranks])

    async def drain(self) -> list[Span]:
        """Spans of the schedules and of all ranks since the last call."""
        return self.recorder.drain() + await super().drain()


def _models(config: Config) -> list[str]:
    wanted = {"actor": True, "critic": config.uses_critic, "ref": config.uses_reference}
    return [name for name, used in wanted.items() if used]


def _of_all(rows: Sequence[Row], slot: int | None) -> Sequence[Row]:
    if slot is not None:
        raise ValueError(
            f"Stages pass on what they compute, slot {slot} alone has only some of them: ask without a slot."
        )
    return rows
