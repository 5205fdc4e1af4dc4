"""The algorithm: one RLHF step as the controller runs it, on real engines and simulated ones alike.

Role: `run` takes the job from its first step to its last: prompts become a board of samples, an `Executor` generates,
scores and trains on them in the order the fusion policy decides, and the new weights go to the engines. Which samples,
which mini-batches and which numbers is settled here; when each piece of work runs is not. All calls that it waits for
are bounded by the engines' own limits.

    prompts -> groups -> Board -> Executor (policy, engines) -> weights to the engines -> checkpoint, metrics
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rlfuse.algorithms.learning_rate import lr_factors
from rlfuse.config import sampling
from rlfuse.config.schema import Config
from rlfuse.errors import RlfuseError
from rlfuse.fusion.board import Board
from rlfuse.fusion.decisions import Policy
from rlfuse.fusion.selection import EXACT
from rlfuse.fusion.tuning import Tuning
from rlfuse.progress import is_due, timed
from rlfuse.protocols import Engines, Sampling
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
    """Runs the steps of one job; every part is handed in, and does one thing."""

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
    """Of the latest board."""

    async def run(self, step: int) -> None:
        """From the state after `step` (0: the start) to the last step. Stopped after a step in which it was told to."""
        with timed("first weights to the engines", self.say):
            await self.update_weights(step)
        await self.compare_first_weights(step)
        if step == 0 and self.config.trainer.val_before_train:
            await self.validate(step)
        await self.train(step)

    async def compare_first_weights(self, step: int) -> None:
        """Do the engines compute the model that is trained? EngineError where they don't agree, or metrics take note.

        Engines have the devices; `step`: the version of the weights.
        """
        rollout, longest = self.config.rollout, self.config.data.max_response_length
        drawn = Sampling(rollout.temperature, 1.0, -1, min(MAX_COMPARED_TOKENS, longest))
        with self.groups.recorder.span("testing", step=step, cause="weights"):
            while (group := await self.groups.comparison_group(step)) is not None:
                if (agreement := await compare(self.engines, group, drawn)) is not None:
                    self.metrics.log_agreement(step, agreement)
                    break
                await self.engines.weights.push(version=step)  # all engines were lost: others take their places
        await self.engines.clips.release("testing")

    async def train(self, step: int) -> None:
        """The steps after this one; the engines have its weights."""
        total = self.total_steps
        while step < total:
            self.checkpoints.check_disk_space(step)
            step += 1
            self.stopping.step = step
            with self.journal.recorder.span("step", step=step):
                board = await self.learn(step)
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
            self.checkpoints.publish()
            if ended:
                raise ended
            self.tuning.learn(board, spans)
            if step < total and not self.stopping.is_requested:
                await self.replan(step, saved)
            if step < total and self.stopping.is_requested:
                await self.stop_after(step)

    async def learn(self, step: int) -> Board:
        """Generate, score and train on one batch of prompts, in the order the policy decides."""
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
            settings=self.tuning.settings(sum(len(group.samples) for group in draw.groups)),
            lengths=self.tuning.lengths,
            draw=draw,
            deferred=experience.deferred,
            fused_into_first_update=experience.fused_into_first_update,
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
        self.groups.selection.return_unused(*board.unneeded_groups())
        self.metrics.add(self.groups.selection.metrics())
        self.metrics.add(await self.engines.clips.release("training"))
        return board

    async def _save_at_end(self, step: int) -> None:
        """Rewards end the run: save the last complete step. The run ends with their error, even if this fails."""
        if self.checkpoints.step < step:
            try:
                await self.save(step, required=True)
            except RlfuseError as error:
                self.say(str(error))

    async def _validated(self, step: int) -> Exception | None:
        """Validate if that is due; with what rewards ended it, once this step is saved."""
        try:
            if is_due(self.config.trainer.test_freq, step, self.total_steps) and self.stopping.by is None:
                await self.validate(step)
        except Exception as error:
            if error is not self.executor.reward_error:
                raise
            return error
        return None

    async def validate(self, step: int) -> None:
        """Generate and score the held-out prompts; nothing is trained."""
        if groups := await self.groups.validation_groups(step):
            self._prefetch(step, "testing")
            board = Board(groups, await self.draining.slot_table(), ("reward",), purpose="testing", now=self.clock())
            with self.journal.recorder.span("testing", step=step):
                await self.execute(board, step, sampling.validation(self.config), self.advantages.complete)
            self.metrics.log_validation(step, board)
        await self.engines.clips.release("testing")

    def _prefetch(self, step: int, beside: str) -> None:
        """The clips of what comes next: of the validation behind this step, where that shows any, else of a step."""
        held_out, clips = self.groups.held_out, self.engines.clips
        validates = beside == "training" and is_due(self.config.trainer.test_freq, step, self.total_steps)
        if validates and any(prompt.visual for prompt in held_out):
            clips.prefetch(held_out, beside)
        elif step < self.total_steps:
            clips.prefetch(self.groups.selection.upcoming(), beside)

    async def execute(self, board: Board, step: int, drawn: Sampling, scored: Callable[[Board, int], object]) -> None:
        """Carry the board out; `scored` is called whenever samples gained scores."""
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
        )
        self.executor = Executor(board, self.engines, self.policy, context, self.journal.recorder, self.clock)
        await self.executor.run()

    def _push_follows(self, board: Board) -> bool:
        """Whether a push follows the board's samples: none are added to it, nor left over for the next step."""
        more = self.config.algorithm.filter_groups.enable or self.config.fusion.data != EXACT
        return bool(board.mini_batches) and not more

    async def update_weights(self, step: int) -> None:
        """What the engines generate from now on carries version `step`; they have the devices."""
        with self.journal.recorder.span("update_weights", step=step, cause="optimizer"):
            await self.engines.weights.push(version=step)

    async def save(self, step: int, required: bool = False) -> None:
        """Write a checkpoint from the devices, which the ranks keep. NotSaved if it is `required` or the last."""
        await hand_over_all(to_ranks, self.engines.rollout, self.engines.trainer)
        with self.journal.recorder.span("save_checkpoint", step=step, cause="step"):
            await self.checkpoints.write(step, required)

    async def replan(self, step: int, saved: bool) -> None:
        """Work goes by how slow slots are, layers too where the step is saved; then the engines have the devices."""
        await self.engines.trainer.replan(self.tuning.rates.current, self.checkpoints.folder(step))
        if saved:
            await hand_over_all(to_engine, self.engines.rollout, self.engines.trainer)

    async def stop_after(self, step: int) -> None:
        """Raise Stopped; the step is saved. Where it could not be, a job that was to go on elsewhere stays."""
        if self.checkpoints.step != step:
            await self.save(step)
            self.checkpoints.publish()
        if self.checkpoints.step != step and self.stopping.by is None:
            self.say(f"step {step} could not be saved, so no node leaves: make room, then ask again")
            self.stopping.relocation = None
            return await hand_over_all(to_engine, self.engines.rollout, self.engines.trainer)
        raise self.stopping.stop_error(step)
