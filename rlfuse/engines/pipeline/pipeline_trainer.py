"""The controller's `Trainer` with pipeline parallelism: plans schedules, which the group runs.

Actor and critic share devices in opposite directions. A `Planner` searches the schedule in a thread, from measured
durations; passes that the fusion policy chose fill its bubbles. Slow ranks get fewer rows or, at a checkpoint, fewer
layers (`slow_devices`). Stages are split by modelled costs at first, and by measured ones from a checkpoint on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig

from rlfuse.cluster.placement import Slots
from rlfuse.config.schema import Config
from rlfuse.engines.pipeline.layout import pipelines_of
from rlfuse.engines.pipeline.loading import EMBEDDING, HEAD
from rlfuse.engines.pipeline.partition import measured_costs
from rlfuse.engines.pipeline.pipeline_group import PipelineGroup
from rlfuse.engines.pipeline.slow_devices import device_costs, operation_slowdowns
from rlfuse.engines.trainer.cost_measurement import matmul_parameters
from rlfuse.engines.trainer.rank_group import OnRanksJoined
from rlfuse.engines.trainer.state_files import BYTES_PER_PARAMETER
from rlfuse.fusion.schedules.planning import planner_of
from rlfuse.fusion.schedules.search import warm_up
from rlfuse.samples import Row

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


class PipelineTrainer(PipelineGroup):
    """Trainer with pipeline stages; all passes and gradients need all ranks."""

    lockstep = lockstep_backward = pipelined = True
    saves_in_background = False  # because ranks reload the files to move layers

    @classmethod
    async def start(
        cls, config: Config, slots: Slots, cores: Sequence[int] | None = None, met: OnRanksJoined | None = None
    ) -> tuple[PipelineTrainer, dict[str, Any]]:
        """Start one rank per slot and load the stages; return the trainer and facts to log. See
        `TrainerGroup.start`."""
        uses = {"actor": True, "critic": config.uses_critic, "ref": config.uses_reference}
        layout = [pipelines_of(config, name) for name in uses if uses[name]]
        compiling = asyncio.to_thread(warm_up if config.fusion.training == "fused" else int)
        (trainer, facts), _ = await asyncio.gather(super().start(config, slots, layout, cores, met), compiling)
        trainer.planner = planner_of(config)
        facts |= {"parameters": {model: await trainer._multiplied(model) for model in trainer.models}}
        return trainer, facts | {"checkpoint_bytes": await trainer._checkpoint_bytes()}

    async def _checkpoint_bytes(self) -> int:
        """Return the size of a checkpoint: of the states and of the exported models."""
        sizes = [size for model in self.models for rank in await self._sizes(model) for _, _, size in rank]
        return sum(sizes) + sum(sizes) // ITEM_BYTES[self.config.model.dtype] * BYTES_PER_PARAMETER

    async def _multiplied(self, model: str) -> tuple[int, int]:
        """Return `measuring.matmul_parameters` of a model that is split into stages."""
        path = self.config.critic.path if model == "critic" else None
        text = AutoConfig.from_pretrained(
            path or self.config.model.path, trust_remote_code=self.config.model.trust_remote_code
        ).get_text_config()
        sizes = {name: size for rank in await self._sizes(model) for _, name, size in rank}
        numbers = {name: size // ITEM_BYTES[self.config.model.dtype] for name, size in sizes.items()}
        head = HEAD if HEAD in numbers else EMBEDDING  # tied: one tensor
        return matmul_parameters(numbers, [EMBEDDING], head if model == "actor" else None, text)

    async def train(
        self, rows: Mapping[str, Sequence[Row]], scored: Mapping[str, Sequence[Row]]
    ) -> tuple[dict[str, float], dict[str, list[np.ndarray]], list[np.ndarray]]:
        """Add the gradients of all models' `rows` and score the rows of `scored` in one schedule.

        Returns makespans in seconds, scores (model -> float32 [T] per scored row), and the actor's old log-probs
        (float32 [T] per row) if its rows had none.
        """
        counts, passes = (
            {model: self._micro_batches(model, each) for model, each in of.items()} for of in (rows, scored)
        )
        plan = await asyncio.to_thread(self.planner.plan, counts, passes)
        attributes = {"micro_batches": counts, "scored": passes}
        with self.recorder.span("schedule", cause="scored", attributes=attributes) as span:
            done = await self.run(plan.rows, rows, scored, plan.times)
            for pace, row in zip(self._slowdowns, done.timed, strict=True):
                for each in row:
                    self.planner.learn(plan.planned_operation(each.operation), (each.end - each.start) / pace)
            made = {"actual": done.makespan}
            if plan.times:
                made |= {"planned": plan.seconds, "serial": plan.serial_s}
            span.attributes |= made
        return (
            {f"fusion/train_makespan_{name}": seconds for name, seconds in made.items()},
            done.scores,
            done.old_log_probs,
        )

    async def replan(self, rates: Sequence[float], saved: Path | None = None) -> None:
        """Adapt rows and schedules to these rates of slots and, if the state is `saved`, the layers of stages.

        The layers also follow the measured durations of stages.
        """
        await super().replan(rates, saved)
        if saved is not None:
            self._learn_costs()
            if await self.move_layers(saved):
                self.planner.forget(range(self.block))
        operation_slowdowns = self._slowdowns
        self.planner.replan([max(operation_slowdowns[device :: self.block]) for device in range(self.block)])

    def _learn_costs(self) -> None:
        """Update the costs of layers and heads of models whose stages were all measured; not needed with shared
        heads."""
        for model, pipelines in self.layout.items():
            if pipelines.depth > 1 and not pipelines.vocabulary and (seconds := self.planner.stage_seconds(model)):
                measured = measured_costs(pipelines.layers, seconds, self.costs[model])
                self.costs = {**self.costs, model: measured}
        self.work = device_costs(tuple(self.layout.values()), self.costs)

    @property
    def _slowdowns(self) -> list[float]:
        """Measured over expected duration of the operations of each device."""
        return operation_slowdowns(self.device_rates, self._rates_of("actor"))
