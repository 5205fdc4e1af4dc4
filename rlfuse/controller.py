"""The algorithm: one RLHF step as the controller runs it, on real engines and simulated ones alike.

Role: `run` takes the job from its first step to its last. It speaks to engines only through protocols, and asks the
fusion policy what to start whenever something finished; the serial order is just one such policy.

    prompts -> Board -- snapshot --> policy -- decisions --> generate | score | train   (one task each)
                 ^                                                  |
                 +----------- finished, scored, trained ------------+   each wakes the loop

Waits: for any task to report; a failing task cancels the others and ends the step with its own error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rlfuse.algorithms.experience import Experience
from rlfuse.config.schema import Config
from rlfuse.data.prompts import PromptSource
from rlfuse.engines.protocols import Engines, Sampling
from rlfuse.engines.scoring import score
from rlfuse.fusion.board import Board
from rlfuse.fusion.decisions import Decision, Generate, Policy, Score, Train
from rlfuse.observe.journal import Journal
from rlfuse.samples import Group, Prompt, make_groups


class Controller:
    """Runs the steps of one job; `journal` keeps what happened, checkpoints included."""

    def __init__(
        self,
        config: Config,
        engines: Engines,
        policy: Policy,
        experience: Experience,
        prompts: PromptSource,
        held_out: Sequence[Prompt],
        journal: Journal,
        total_steps: int,
    ):
        self.config, self.engines, self.policy, self.experience = config, engines, policy, experience
        self.prompts, self.held_out, self.journal, self.total_steps = prompts, held_out, journal, total_steps
        self.recorder = journal.recorder
        rollout, longest = config.rollout, config.data.max_response_length
        self.sampling = Sampling(rollout.temperature, rollout.top_p, rollout.top_k, longest)
        self.validation = Sampling(rollout.val_kwargs.temperature, 1.0, -1, longest)

    async def run(self, step: int) -> None:
        """From the state after `step` (0: the start) to the last step."""
        await self.sync(step)
        if step == 0 and self.config.trainer.val_before_train:
            await self.validate(step)
        while step < self.total_steps:
            step += 1
            with self.recorder.span("step", step=step):
                board = await self.learn(step)
                await self.sync(step)
            if self.due(self.config.trainer.test_freq, step):
                await self.validate(step)
            if self.due(self.config.trainer.save_freq, step):
                await self.journal.checkpoint(step)
            await self.journal.finish(step, board)

    async def learn(self, step: int) -> Board:
        """Generate, score and train on one batch of prompts, in the order the policy decides."""
        actor, slots = self.config.actor, len(self.engines.rollout)
        board = Board(self.groups(step), slots, self.experience.kinds, actor.ppo_epochs, actor.ppo_mini_batch_size)
        await self.carry_out(board, step, self.sampling)
        return board

    async def validate(self, step: int) -> None:
        """Generate and score the held-out prompts; nothing is trained."""
        if self.held_out:
            groups = make_groups(self.held_out, self.config.rollout.val_kwargs.n, self.config.data.seed, step)
            board = Board(groups, len(self.engines.rollout), ("reward",), passes=0, purpose="testing")
            with self.recorder.span("testing", step=step):
                await self.carry_out(board, step, self.validation)
            self.journal.validated(step, board)

    async def carry_out(self, board: Board, step: int, sampling: Sampling) -> None:
        """Ask the policy, start what it decides, wait until something changed; until the board is done."""
        changed = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            while not board.done:
                changed.clear()
                for decision in (decisions := self.policy(board.snapshot())):
                    board.start(decision)
                    tasks.create_task(self.effect(decision, board, step, sampling, changed))
                if not decisions and board.idle:
                    raise RuntimeError(f"fusion.policy={self.config.fusion.policy} decided nothing and nothing runs")
                await changed.wait()

    async def effect(self, decision: Decision, board: Board, step: int, sampling: Sampling, changed: asyncio.Event):
        """Carry out one decision and write what came of it on the board."""
        if isinstance(decision, Generate):
            samples = [sample for group in decision.groups for sample in board.groups[group].samples]
            with self.recorder.span("gen", step=step, cause=board.purpose, attributes={"slot": decision.slot}):
                async for sample_id, response in self.engines.rollout[decision.slot].generate(samples, sampling):
                    board.finished(sample_id, response)
                    changed.set()
        elif isinstance(decision, Score):
            with self.recorder.span(decision.kind, step=step, cause=board.purpose, samples=decision.samples):
                await score(self.engines, decision.kind, [board.samples[name] for name in decision.samples])
            board.scored(decision)
            if board.all_scored:
                self.settle(board, step)
        else:
            await self.train(decision, board, step)
            board.trained()
        changed.set()

    def settle(self, board: Board, step: int) -> None:
        """All is scored: stop if too many rewards failed; with dynamic sampling, replace groups without spread."""
        self.journal.failures(board)
        limit, size = self.config.algorithm.filter_groups.max_num_gen_batches, self.config.data.train_batch_size
        if limit and step and board.passes:
            board.keep(self.experience.with_spread(board.groups), at_most=size)
            if len(board.kept()) < size and board.batches < limit:
                board.extend(group for group in self.groups(step) if group.samples[0].id not in board.samples)

    async def train(self, decision: Train, board: Board, step: int) -> None:
        """One optimizer step of critic and actor; the first of a step estimates advantages before."""
        trainer, note = self.engines.trainer, self.journal.note
        if decision.mini_batch == 0:
            with self.recorder.span("adv", step=step, cause="scored"):
                note(self.experience.prepare(board.kept()))
        samples = board.mini_batch(decision.mini_batch)
        if self.config.uses_critic:
            with self.recorder.span("update_critic", step=step, cause="scored"):
                note(await trainer.update_critic([sample.row("values", "returns") for sample in samples]))
        if step > self.config.trainer.critic_warmup:
            with self.recorder.span("update_actor", step=step, cause="scored"):
                note(await trainer.update_actor([s.row(*self.experience.actor_tensors) for s in samples]))

    async def sync(self, step: int) -> None:
        """What the engines generate from now on carries version `step`."""
        with self.recorder.span("update_weights", step=step, cause="optimizer"):
            await self.engines.weights.push(version=step)

    def groups(self, step: int) -> list[Group]:
        """The next batch of prompts as unfinished, seeded samples."""
        with self.recorder.span("data", step=step, cause="step"):
            return make_groups(self.prompts.next_batch(), self.config.rollout.n, self.config.data.seed, step)

    def due(self, every: int, step: int) -> bool:
        """Whether something that happens every so many steps (0: never; negative: at the end) is due."""
        return every != 0 and (step == self.total_steps or (every > 0 and step % every == 0))
