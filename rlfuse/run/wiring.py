"""Build the controller of a job from started engines and load its checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlfuse.algorithms.experience import Experience
from rlfuse.config.model_files import copy_files
from rlfuse.config.schema import Config
from rlfuse.costs.model import Costs
from rlfuse.costs.rates import Rates
from rlfuse.data.prompts import PromptSource
from rlfuse.data.tokenizers import save_tokenizer
from rlfuse.fusion.decisions import Policy, Settings, traits_of
from rlfuse.fusion.lengths import Lengths
from rlfuse.fusion.own_policies import loaded_policy
from rlfuse.fusion.selection import EXACT, Selection
from rlfuse.fusion.tuning import Tuning
from rlfuse.observe.run_log import RunLog
from rlfuse.protocols import Engines, Trainer
from rlfuse.rewards.workers.pool import RewardPool
from rlfuse.run.checkpointing import Checkpointing
from rlfuse.run.job import Job
from rlfuse.samples import Prompt
from rlfuse.simulate.learning import Learning
from rlfuse.step.advantages import Advantages
from rlfuse.step.colocation import all_to, to_ranks
from rlfuse.step.controller import Controller
from rlfuse.step.draining import Draining
from rlfuse.step.groups import GroupSource
from rlfuse.step.protocols import Health
from rlfuse.video.video_model import VideoModel

SHOWN = 10
TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a job works on, loaded and checked before anything starts."""

    config: Config
    tokenizer: PreTrainedTokenizerBase
    reward: RewardPool
    prompts: PromptSource
    held_out: Sequence[Prompt]
    video_model: VideoModel | None
    total_steps: int


async def wired(
    loaded: Loaded, job: Job, log: RunLog, *, engines: Engines, costs: Costs, facts: Mapping[str, Any], health: Health
) -> Controller:
    """`costs`: what policies go by until the run has measured its own; `facts`: of the trainer, to be logged."""
    config, prompts, recorder = loaded.config, loaded.prompts, log.journal.recorder
    experience, lengths = Experience(config, loaded.reward.entries), Lengths(config.data.max_response_length)
    selection = Selection(config.fusion.data, config.fusion.excess, config.data.train_batch_size, prompts)
    kept = dict(prompts=prompts, kl=experience.kl, selection=selection, lengths=lengths, rewards=experience.normaliser)
    _restore(kept, job, selection, log.say)

    def state(_: int) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in kept.items()} | {"label": log.metrics.label_so_far()}

    tuning = _tuning(config, job, engines, costs, lengths, log.say)
    log.attach([*engines.recorded, draining := Draining(engines, tuning, log.say)], facts, lambda: prompts.epoch)
    groups = GroupSource(
        config=config,
        engines=engines,
        prompts=prompts,
        selection=selection,
        recorder=recorder,
        held_out=loaded.held_out,
        say=log.say,
    )
    controller = Controller(
        config=config,
        engines=engines,
        policy=_policy(config, experience, log),
        groups=groups,
        advantages=Advantages(
            experience=experience, groups=groups, metrics=log.metrics, failures=log.failures, recorder=recorder
        ),
        tuning=tuning,
        draining=draining,
        journal=log.journal,
        metrics=log.metrics,
        checkpoints=_checkpointing(loaded, job, log, engines.trainer, state, facts),
        stopping=log.stopping,
        total_steps=loaded.total_steps,
        health=health,
        say=log.say,
    )
    with log.part("trial checkpoint"):
        await controller.checkpoints.rehearse()
    if job.checkpoint is not None:
        with log.part("loading the checkpoint"):
            await all_to(to_ranks, engines.rollout, engines.trainer)  # the push that follows gives engines the devices
            await engines.trainer.load(job.checkpoint)
        log.say(f"resumed from {job.checkpoint} after step {job.state['step']}")
    return controller


def _restore(kept: Mapping[str, Any], job: Job, selection: Selection, say: Callable[[str], None]) -> None:
    if job.checkpoint is None:
        return
    for name, part in kept.items():
        part.load_state_dict(job.state[name])
    if selection.data == EXACT and (rows := selection.set_aside):
        first = ", ".join(map(str, rows[:SHOWN])) + (", ..." if len(rows) > SHOWN else "")
        say(
            f"{len(rows)} prompts that were set aside before the checkpoint are skipped until the next epoch, because "
            f"fusion.data=exact draws new prompts only (rows {first} of data.train_files). Resume with "
            "fusion.data=over_sampling or tail_batching to draw them."
        )


def _tuning(
    config: Config, job: Job, engines: Engines, costs: Costs, lengths: Lengths, say: Callable[[str], None]
) -> Tuning:
    slots = len(engines.rollout)
    rates = Rates(slots, job.drained, job.returning, measured=not config.trainer.deterministic)
    return Tuning(costs, lengths, _settings(config, engines.trainer), rates, Learning(config, slots, say))


def _checkpointing(
    loaded: Loaded,
    job: Job,
    log: RunLog,
    trainer: Trainer,
    state: Callable[[int], dict[str, Any]],
    facts: Mapping[str, Any],
) -> Checkpointing:
    model = loaded.video_model

    async def save(folder: Path, weights: bool) -> None:
        await (trainer.save if weights else trainer.describe)(folder)
        save_tokenizer(loaded.tokenizer, folder / "actor" / "huggingface")
        if model is not None and weights:
            await asyncio.to_thread(model.complete, folder / "actor" / "huggingface")
        elif model is not None:
            copy_files(model.folder, folder)

    return Checkpointing(
        log,
        loaded.config,
        start=job.state["step"],
        save=save,
        state=state,
        parameters=sum(map(sum, facts["parameters"].values())),
    )


def _policy(config: Config, experience: Experience, log: RunLog) -> Policy:
    policy = loaded_policy(config.fusion.policy)
    if traits_of(policy).trains_early and (why := experience.why_late()):
        log.say(why)
    return policy


def _settings(config: Config, trainer: Trainer) -> Settings:
    fusion, unlimited = config.fusion, Settings()
    credit = unlimited.credit_tokens if fusion.credit_mb is None else int(fusion.credit_mb * 2**20 / TOKEN_BYTES)
    return Settings(
        credit_samples=fusion.credit_samples or unlimited.credit_samples,
        credit_tokens=max(1, credit),
        lockstep=trainer.lockstep,
        lockstep_backward=trainer.lockstep_backward,
        pipelined=trainer.pipelined,
        prefill_share=0.5 if config.rollout.disaggregate == "on" else 0.0,  # until costs are measured
    )
