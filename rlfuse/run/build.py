"""One job from configuration to summary: loads data, starts engines, runs the controller, always cleans up.

Role: called by `rlfuse.train` with a checked configuration (and by notebooks). What can fail without Ray fails before
Ray starts. Waits for everything to start, then for the controller; on any end, Ctrl-C included, it stops every process
it started and says how to go on.

    data, tokenizer -> Ray, slots -> trainer ranks, towers | rollout engines | reward workers
          ^                       -> checkpoint, if there is one -> Controller.run -> summary.json
          +---- recovery: a worker is lost that the step can't do without ----+

On CPU hosts all start side by side. On GPUs one after the other: vLLM takes a share of the device, refuses where less
is free and fails where somebody gives memory back meanwhile, so ranks have loaded and left before an engine starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlfuse.algorithms.experience import Experience
from rlfuse.cluster import placement
from rlfuse.cluster.nodes import watched
from rlfuse.config.schema import Config
from rlfuse.data.prompts import PromptSource, load_prompts
from rlfuse.data.tokenizers import load_tokenizer
from rlfuse.engines.pipeline.pipeline_trainer import PipelineTrainer
from rlfuse.engines.rollout.vllm_support import unserved
from rlfuse.engines.trainer.families import untrainable
from rlfuse.engines.trainer.trainer_group import TrainerGroup
from rlfuse.engines.weights.staging import stagings
from rlfuse.engines.weights.sync import WeightPush
from rlfuse.engines.weights.tower_push import TowerPush
from rlfuse.errors import ConfigError, Mistakes
from rlfuse.fusion.costs import Costs
from rlfuse.fusion.decisions import Settings
from rlfuse.fusion.lengths import Lengths
from rlfuse.fusion.own_policies import find, found
from rlfuse.fusion.registry import traits_of
from rlfuse.fusion.selection import Selection
from rlfuse.fusion.tuning import Tuning
from rlfuse.observe.journal import Journal
from rlfuse.observe.summary import summarise
from rlfuse.progress import part
from rlfuse.protocols import Engines
from rlfuse.rewards.workers.pool import RewardPool
from rlfuse.run.inference import (
    clip_reader,
    reward_pool,
    rollout_handles,
    start_engine,
    starting_costs,
    step_clips,
    tower_settings,
    video_model_of,
    with_served_models,
    with_transfer,
)
from rlfuse.run.job import Job
from rlfuse.run.restarts import recovered, starting
from rlfuse.samples import Prompt
from rlfuse.simulate.learning import Learning
from rlfuse.step.controller import Controller
from rlfuse.video.video_model import VideoModel

TOKEN_BYTES = 8
"""A finished sample holds its token and the engine's log-prob of it."""

Drive = Callable[[Controller, int], Awaitable[None]]


def run(config: Config, drive: Drive = Controller.run) -> Path:
    """Run the job; returns its folder. Raises ConfigError, DataError, RewardError or EngineError with one message.

    `drive`: what to do with the controller once everything stands, from a step on; benchmarks have their own.
    """
    return recovered(config, lambda job: _attempt(job, drive))


def _attempt(job: Job, drive: Drive) -> Path:
    config, trainer = job.config, job.config.trainer
    mistakes = Mistakes()
    with mistakes.noted():
        find(config.fusion.policy)
    with mistakes.noted():
        reward = reward_pool(config)
    with mistakes.noted(), part("data", quiet="console" not in trainer.logger):
        video_model = video_model_of(config)
        if problems := [*untrainable(config), *unserved(config)]:
            raise ConfigError(problems)
        tokenizer = load_tokenizer(config.model)
        prompts, held_out, report = _load_data(config, tokenizer, video_model)
    mistakes.tell()
    reward.check_prompts([*prompts.prompts, *held_out], config.reward.max_failure_rate)
    total = trainer.total_training_steps or trainer.total_epochs * prompts.steps_per_epoch
    journal = job.journal(total)
    journal.say(report)
    if video_model is not None:
        config = with_served_models(config, job.folder)
    work = _run(_Work(config, tokenizer, reward, prompts, held_out, video_model, total), job, journal, drive)
    summarise(job.folder, config, job.carry_out(work, journal), job.faults, job.resumed_after)
    return job.folder


@dataclass(frozen=True, slots=True)
class _Work:
    """What a job works on, loaded and checked."""

    config: Config
    """With the paths of what engines and trainers load."""
    tokenizer: PreTrainedTokenizerBase
    reward: RewardPool
    prompts: PromptSource
    held_out: Sequence[Prompt]
    video_model: VideoModel | None
    total: int
    """Steps."""


Start = Callable[[], Awaitable[Any]]
"""Begins to start something."""


def _shown(journal: Journal, name: str, start: Start) -> Start:
    """`start`, with the person told that it is under way, and how long it took."""

    async def shown() -> Any:
        with journal.part(name):
            return await start()

    return shown


async def start_parts(
    device: str, ranks: Start, towers: Start | None, engines: Sequence[Start], rewards: Start
) -> tuple[Any, list[Any]]:
    """What `ranks` and `engines` return, all started, and all else with them; see the top of this file for the order.

    On GPUs the engines have the devices when this returns, and no rank is on one.
    """
    beside = [towers] if towers else []
    if device == "cpu":
        ready, *others = await _together(*(start() for start in (ranks, *engines, rewards, *beside)))
        return ready, others[: len(engines)]
    ready, *_ = await _together(*(start() for start in (ranks, *beside)))
    trainer, _ = ready
    await _together(*(trainer.leave_device(slot) for slot in range(len(engines))))
    facts = await _together(*(start() for start in engines))
    await rewards()  # models share what engines leave
    return ready, facts


async def _run(work: _Work, job: Job, journal: Journal, drive: Drive) -> None:
    with journal.part("Ray"):
        reward, slots = work.reward, await placement.start(work.config, again=job.restart is not None)
    journal.say(slots.told)
    config = with_transfer(work.config, slots.device)
    rollouts = rollout_handles(config, slots, journal.recorder, journal.say)
    towers = tower_settings(config, work.video_model, slots.device) if work.video_model else None
    clips = step_clips(config, towers, slots, journal.say) if towers else None
    trained = [] if config.video.freeze_tower else [towers]
    try:
        occupants = slots.occupants(config.rollout.tensor_model_parallel_size)
        with starting(journal):
            nodes = stagings(rollouts, slots, config.cluster.timeout_s)
            await _together(*(each.need(journal.folder.absolute(), "trainer.default_local_dir") for each in nodes))
            ranks = partial(trainer_of(config).start, config, slots, updates(job, work.total), slots.cores, *trained)
            starts = [partial(start_engine, handle, config, slots, index) for index, handle in enumerate(rollouts)]
            parts = start_parts(
                slots.device,
                _shown(journal, f"{slots.count} trainer rank{'s' * (slots.count > 1)}", ranks),
                clips and _shown(journal, "encoder ranks", clips.start),
                [_shown(journal, f"engine {i} of {len(starts)}", start) for i, start in enumerate(starts, 1)],
                _shown(journal, "rewards", partial(reward.start, slots)),
            )
            (trainer, facts), engine_facts = await watched(parts, occupants)
        rollout, tower = config.rollout, TowerPush(trainer, clips.encoder, journal.folder) if trained else None
        weights = WeightPush(trainer, rollouts, rollout.update_weights_bucket_mb, rollout.weight_transfer, nodes, tower)
        engines = Engines(rollouts, reward, trainer, weights, clips)
        costs = starting_costs(config, engine_facts, slots)
        controller = await _controller(work, job, engines, costs, journal, facts)
        await watched(drive(controller, job.state["step"]), occupants)
    finally:
        await _quietly(reward.close(), *(handle.stop() for handle in rollouts), *([clips.close()] if clips else []))


async def _controller(
    work: _Work, job: Job, engines: Engines, costs: Costs, journal: Journal, facts: dict[str, Any]
) -> Controller:
    """On engines that stand, where the checkpoint left off if there is one; the journal can write the next."""
    config, prompts, trainer = work.config, work.prompts, engines.trainer
    fusion, data = config.fusion, config.data
    experience = Experience(config, work.reward.entries)
    selection = Selection(fusion.data, fusion.excess, data.train_batch_size, prompts)
    lengths, learning = Lengths(data.max_response_length), Learning(config, len(engines.rollout))
    tuning = Tuning(costs, lengths, _settings(config, trainer), learning)
    kept = {"prompts": prompts, "kl": experience.kl, "selection": selection, "lengths": lengths}
    kept["rewards"] = experience.normaliser
    if job.checkpoint is not None:
        for name, part in kept.items():
            part.load_state_dict(job.state[name])
    policy = found(fusion.policy)
    if traits_of(policy).trains_early and (why := experience.why_late()):
        journal.say(why)

    async def save(folder: Path) -> None:
        await trainer.save(folder)
        work.tokenizer.save_pretrained(folder / "actor" / "huggingface")
        if work.video_model is not None:
            await asyncio.to_thread(work.video_model.complete, folder / "actor" / "huggingface")

    def state(step: int) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in kept.items()} | {"updates": updates(job, step)}

    recorded = [*engines.rollout, trainer, engines.reward, *([engines.clips] if engines.clips else [])]
    journal.attach(recorded, save, state, facts)
    controller = Controller(
        config, engines, policy, experience, prompts, work.held_out, journal, selection, tuning, work.total
    )
    if job.checkpoint is not None:
        await controller.load(job.checkpoint)
        journal.say(f"resumed from {job.checkpoint} after step {job.state['step']}")
    return controller


def updates(job: Job, step: int) -> int:
    """Optimizer steps until the end of this step; of the last one that is the length of the learning-rate schedule.

    Before the checkpoint a batch may have had another number of them, so it tells how many there were.
    """
    config, before = job.config, job.state["step"]
    passes = config.actor.ppo_epochs * -(-config.data.train_batch_size // config.actor.ppo_mini_batch_size)
    return job.state.get("updates", before * passes) + (step - before) * passes


def trainer_of(config: Config) -> type[TrainerGroup] | type[PipelineTrainer]:
    """Whole models on every rank, or stages of them."""
    return PipelineTrainer if config.training.pipeline_parallel_size > 1 else TrainerGroup


def _settings(config: Config, trainer: TrainerGroup | PipelineTrainer) -> Settings:
    """What the configuration decides for policies."""
    fusion, unlimited = config.fusion, Settings()
    credit = unlimited.credit_tokens if fusion.credit_mb is None else int(fusion.credit_mb * 2**20 / TOKEN_BYTES)
    return Settings(
        credit_samples=fusion.credit_samples or unlimited.credit_samples,
        credit_tokens=max(1, credit),
        lockstep=trainer.lockstep,
        lockstep_backward=trainer.lockstep_backward,
        pipelined=config.training.pipeline_parallel_size > 1,
    )


def _load_data(
    config: Config, tokenizer: PreTrainedTokenizerBase, model: VideoModel | None
) -> tuple[PromptSource, list[Prompt], str]:
    data = config.data
    clips = clip_reader(config, tokenizer, model)
    rows, report = load_prompts(list(data.train_files), tokenizer, data, clips)
    lines = [str(report)]
    held_out: list[Prompt] = []
    if data.val_files:
        held_out, report = load_prompts(list(data.val_files), tokenizer, data, clips)
        lines.append(str(report))
    return PromptSource(rows, data.train_batch_size, data.shuffle, data.seed), held_out, "\n".join(lines)


async def _together(*starts: Any) -> list[Any]:
    """All results; the first failure ends the wait at once, the others are dropped."""
    return await asyncio.gather(*starts)


async def _quietly(*ends: Any) -> None:
    """Give every worker a moment to end by itself; those that can't are killed with the cluster."""
    await asyncio.gather(*(asyncio.wait_for(end, 10) for end in ends), return_exceptions=True)
