"""The RLHF training loop, on real and on simulated engines.

Role: `run` executes all steps of a job. Prompts become a board of samples; an `Executor` generates, scores and trains
on them in the order that the fusion policy decides; the new weights are pushed to the engines. The controller
determines samples, mini-batches and results; the policy only decides when and where work runs. All calls are bounded by
the engines' own limits.

    prompts -> groups -> Board -> Executor (policy, engines) -> weights to the engines -> checkpoint, metrics
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from rlfuse.algorithms.learning_rate import lr_factors
from rlfuse.algorithms.zero_advantage import SKIPPED_SHARE
from rlfuse.config import sampling
from rlfuse.config.schema import Config
from rlfuse.errors import RlfuseError
from rlfuse.fusion.board import Board
from rlfuse.fusion.decisions import Policy
from rlfuse.fusion.selection import EXACT
from rlfuse.fusion.tuning import Tuning
from rlfuse.progress import is_due, timed
from rlfuse.protocols import Engines, Sampling, WholeModels
from rlfuse.step.advantages import Advantages
from rlfuse.step.agreement import MAX_COMPARED_TOKENS, compare
from rlfuse.step.colocation import hand_over_all, to_engine, to_ranks
from rlfuse.step.draining import Draining
from rlfuse.step.executor import Executor, StepContext
from rlfuse.step.groups import GroupSource
from rlfuse.step.protocols import Checkpoints, Health, Journal, Metrics, NoHealth
from rlfuse.stopping import Stopping


@dataclass(kw_only=True)
class Controller:
    """Training loop of one job, composed of parts with one responsibility each."""

    config: Config
    engines: Engines
    policy: Policy
    groups: GroupSource
    advantages: Advantages
    tuning: Tuning
    draining: Draining
    journal: Journal
    metrics: Metrics
    checkpoints: Checkpoints
    stopping: Stopping
    total_steps: int
    health: Health = field(default_factory=NoHealth)
    say: Callable[[str], None] = print
    clock: Callable[[], float] = time.monotonic
    executor: Executor = field(init=False)
    """Executor of the latest board."""

    async def run(self, step: int) -> None:
        """Run all steps after `step` (0: none is done). Raises Stopped after a step in which a stop was requested."""
        with timed("first weights to the engines", self.say):
            await self.update_weights(step)
        await self.compare_first_weights(step)
        if step == 0 and self.config.trainer.val_before_train:
            await self.validate(step)
        await self.checkpoints.settle_after(self.train(step))

    async def compare_first_weights(self, step: int) -> None:
        """Check that the engines compute the trainer's model; `MetricLog.log_agreement` reports a mismatch.

        Engines must have the devices; `step` is the version of the weights.
        """
        rollout, longest = self.config.rollout, self.config.data.max_response_length
        drawn = Sampling(rollout.temperature, 1.0, -1, min(MAX_COMPARED_TOKENS, longest))
        with self.groups.recorder.span("testing", step=step, cause="weights"):
            while (group := await self.groups.comparison_group(step)) is not None:
                if (agreement := await compare(self.engines, group, drawn)) is not None:
                    self.metrics.log_agreement(step, agreement)
                    break
                await self.engines.weights.push(version=step)  # all engines were lost: restart them
        await self.engines.clips.release("testing")

    async def train(self, step: int) -> None:
        """Run the steps after `step`, whose weights the engines already have."""
        total = self.total_steps
        while step < total:
            self.checkpoints.check_disk_space(step)
            step += 1
            self.stopping.step = step
            with self.journal.recorder.span("step", step=step):
                board = await self.learn(step)
                await self.sync_reference(step)
                await self.update_weights(step)
            self.checkpoints.remember(step)
            ended, saved = await self._validated(step), False
            if ended:
                await self._save_at_end(step)
            elif saved := self.checkpoints.is_due(step):
                await self.save(step)
            spans = await self.journal.collect(step)
            self.metrics.add(await self.health.check_step(step, spans, self.tuning.costs))
            self.metrics.log_step(step, board, spans)
            self.groups.drafts.report(step)
            await self.checkpoints.publish_written()
            if ended:
                raise ended
            self.tuning.learn(board, spans)
            if step < total and not self.stopping.is_requested:
                await self.replan(step, saved)
            if step < total and self.stopping.is_requested:
                await self.stop_after(step)

    async def learn(self, step: int) -> Board:
        """Generate, score and train on one batch of prompts, in the order that the policy decides."""
        draw, experience = await self.groups.draw(step), self.advantages.experience
        self._prefetch(step, "training")
        actor, trained = self.config.actor, ["actor"] if step >= self.config.trainer.critic_warmup else []
        board = Board(
            draw.groups,
            await self.draining.slot_table(),
            experience.kinds,
            ["critic", *trained] if self.config.uses_critic else trained,
            actor.ppo_epochs,
            actor.ppo_mini_batch_size,
            settings=self.tuning.settings(sum(len(group.generated) for group in draw.groups)),
            lengths=self.tuning.lengths,
            draw=draw,
            deferred=experience.deferred,
            loss_only=experience.loss_only,
            fused_into_first_update=experience.fused_into_first_update,
            skipped_share=self.tuning.skipped_share,
            now=self.clock(),
        )
        try:
            await self.execute(board, step, sampling.training(self.config), self.advantages.scored)
        except Exception as error:
            if error is self.executor.reward_error and not self.executor.has_updated:
                self.engines.trainer.discard_gradients()
                await self._save_at_end(step - 1)
                self.checkpoints.publish()
            raise
        if kept := board.groups_to_train():
            self.metrics.add(experience.mismatch(kept))
            if "actor" in trained:
                self.metrics.add({SKIPPED_SHARE: board.skipped_share})
            self.groups.prompts.update(kept)
        self.groups.selection.return_unused(*board.unneeded_groups())
        self.metrics.add(self.groups.selection.metrics())
        self.metrics.add(await self.engines.clips.release("training"))
        return board

    async def _save_at_end(self, step: int) -> None:
        """Save the last complete step after a reward error. The run ends with that error even if saving fails."""
        await self.checkpoints.settle()
        if self.checkpoints.step < step:
            try:
                await self.save(step, required=True)
            except RlfuseError as error:
                self.say(str(error))

    async def _validated(self, step: int) -> Exception | None:
        """Validate if due. Return a reward error instead of raising it, so that the step can be saved first."""
        try:
            if is_due(self.config.trainer.test_freq, step, self.total_steps) and self.stopping.by is None:
                await self.validate(step)
        except Exception as error:
            if error is not self.executor.reward_error:
                raise
            return error
        return None

    async def validate(self, step: int) -> None:
        """Generate and score the held-out prompts, without training."""
        if groups := await self.groups.validation_groups(step):
            self._prefetch(step, "testing")
            board = Board(groups, await self.draining.slot_table(), ("reward",), purpose="testing", now=self.clock())
            with self.journal.recorder.span("testing", step=step):
                await self.execute(board, step, sampling.validation(self.config), self.advantages.complete)
            self.metrics.log_validation(step, board)
        await self.engines.clips.release("testing")

    def _prefetch(self, step: int, purpose: str) -> None:
        """Prefetch the clips needed next: by the validation after this step if it has clips, else by the next step."""
        held_out, clips = self.groups.held_out, self.engines.clips
        validates = purpose == "training" and is_due(self.config.trainer.test_freq, step, self.total_steps)
        if validates and any(prompt.visual for prompt in held_out):
            clips.prefetch(held_out, purpose)
        elif step < self.total_steps:
            clips.prefetch(self.groups.selection.upcoming(), purpose)

    async def execute(self, board: Board, step: int, drawn: Sampling, scored: Callable[[Board, int], object]) -> None:
        """Execute the board. `scored` is called after each scoring."""
        self.metrics.watch(board)
        context = StepContext(
            step=step,
            sampling=drawn,
            row_tensors={"actor": self.advantages.experience.actor_tensors, "critic": ("values", "returns")},
            fused_into_first_update=self.advantages.experience.fused_into_first_update,
            lr_factors=lr_factors(self.config, step, self.total_steps),
            on_scored=lambda: scored(board, step),
            can_discard=self._push_follows(board),
            note=self.metrics.add,
            on_finished=self.groups.drafts.record,
        )
        self.executor = Executor(board, self.engines, self.policy, context, self.journal.recorder, self.clock)
        await self.executor.run()

    def _push_follows(self, board: Board) -> bool:
        """Return whether a weight push follows the board's samples: none are added later or left for the next step."""
        more = self.config.algorithm.filter_groups.enable or self.config.fusion.data != EXACT
        return bool(board.mini_batches) and not more

    async def update_weights(self, step: int) -> None:
        """Push the weights of version `step` to the engines, which then have the devices."""
        with self.journal.recorder.span("update_weights", step=step, cause="optimizer"):
            await self.engines.weights.push(version=step)

    async def sync_reference(self, step: int) -> None:
        """Mix the actor's new weights into the reference policy if that is due after this step."""
        if self.config.ref.is_sync_due(step):
            await hand_over_all(to_ranks, self.engines.rollout, self.engines.trainer)
            with self.journal.recorder.span("update_weights", step=step, cause="ref"):
                await cast(WholeModels, self.engines.trainer).sync_reference()

    async def save(self, step: int, required: bool = False) -> None:
        """Write a checkpoint; the ranks keep the devices. NotSaved if it fails and is `required` or the last."""
        await hand_over_all(to_ranks, self.engines.rollout, self.engines.trainer)
        with self.journal.recorder.span("save_checkpoint", step=step, cause="step"):
            await self.checkpoints.write(step, required)

    async def replan(self, step: int, saved: bool) -> None:
        """Rebalance work by slot speed, and layers too if the step is saved; return the devices to the engines."""
        await self.engines.trainer.replan(self.tuning.rates.current, self.checkpoints.folder(step))
        if saved:
            await hand_over_all(to_engine, self.engines.rollout, self.engines.trainer)

    async def stop_after(self, step: int) -> None:
        """Save the step and raise Stopped. If saving fails, a node drain is cancelled instead."""
        await self.checkpoints.settle()
        if self.checkpoints.step != step:
            await self.save(step)
            await self.checkpoints.settle()
        if self.checkpoints.step != step and self.stopping.by is None:
            self.say(f"Checkpoint of step {step} failed; node drain cancelled. Free disk space and retry.")
            self.stopping.relocation = None
            return await hand_over_all(to_engine, self.engines.rollout, self.engines.trainer)
        raise self.stopping.stop_error(step)
