"""Run one RL job from configuration to summary: load data, start engines, run the controller, clean up.

data, tokenizer -> Ray, slots -> trainer ranks, towers | rollout engines | reward workers
      ^                       -> checkpoint, if there is one -> Controller.run -> summary.json
      +---- recovery: a worker is lost that the step can't do without ----+
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlfuse.cluster import placement
from rlfuse.cluster.nodes import watched
from rlfuse.config.schema import Config
from rlfuse.data.prompts import PromptSource, load_prompts
from rlfuse.data.tokenizers import load_tokenizer
from rlfuse.engines.rollout.engine_actor import engine_actor
from rlfuse.engines.trainer.families import untrainable
from rlfuse.engines.trainer.trainer_group import TrainerGroup
from rlfuse.engines.vllm.support import unserved_judges
from rlfuse.engines.weights.staging import stagings
from rlfuse.engines.weights.sync import WeightPush
from rlfuse.engines.weights.tower_push import TowerPush
from rlfuse.errors import ConfigError, DataError, Mistakes
from rlfuse.fusion.own_policies import load_policy
from rlfuse.fusion.selection import drawn_at_most
from rlfuse.observe.own_metrics import OwnMetrics
from rlfuse.observe.run_log import RunLog
from rlfuse.observe.summary import summarise
from rlfuse.progress import part
from rlfuse.protocols import Engines, NoClips
from rlfuse.run import WORKER_IMPORTS, inference
from rlfuse.run.inference import VideoParts
from rlfuse.run.job import Job, looked_after, recovered, starting, training_steps
from rlfuse.run.slot_desk import SlotDesk
from rlfuse.run.starting import SharedDevices, Start, end_all, start_parts, within
from rlfuse.run.wiring import Loaded, wired
from rlfuse.samples import Prompt
from rlfuse.step.controller import Controller
from rlfuse.video.video_model import VideoModel

RunController = Callable[[Controller, int], Awaitable[None]]


def run(config: Config, run_controller: RunController = Controller.run) -> Path:
    """Run the job and return its folder. Raises ConfigError, DataError, RewardError or EngineError."""
    return recovered(config, lambda job: _attempt(job, run_controller))


def _attempt(job: Job, run_controller: RunController) -> Path:
    config, trainer = job.config, job.config.trainer
    mistakes = Mistakes()
    with mistakes.noted():
        load_policy(config.fusion.policy)
    with mistakes.noted():
        OwnMetrics(config, print)  # executes their files, which the run's log then finds executed
    with mistakes.noted():
        reward = inference.reward_pool(config)
    with mistakes.noted(), part("data", quiet="console" not in trainer.logger):
        video_model = inference.video_model_of(config)
        if problems := [
            *untrainable(config),
            *engine_actor(config.rollout.name).unserved(config),
            *unserved_judges(config),
        ]:
            raise ConfigError(problems)
        others = {"critic.path": config.critic.path} if config.uses_critic else {}
        others |= {"ref.path": config.ref.path} if config.uses_reference else {}
        tokenizer = load_tokenizer(config.model, others)
        prompts, held_out, report = _load_data(config, tokenizer, video_model)
    mistakes.tell()
    reward.check_prompts([*prompts.prompts, *held_out], config.reward.max_failure_rate)
    total = training_steps(trainer, prompts.steps_per_epoch)
    log = job.begin(total)
    log.say(report)
    loaded = Loaded(
        config=config if video_model is None else inference.with_served_models(config, job.folder),
        tokenizer=tokenizer,
        reward=reward,
        prompts=prompts,
        held_out=held_out,
        video_model=video_model,
        total_steps=total,
    )
    seconds = job.carry_out(_run(loaded, job, log, run_controller), log)
    summarise(job.folder, config, seconds, job.faults, job.resumed_after, job.label)
    return job.folder


async def _run(loaded: Loaded, job: Job, log: RunLog, run_controller: RunController) -> None:
    with log.part("Ray"):
        slots = await placement.start(loaded.config, WORKER_IMPORTS, job.restart is not None, job.without)
    log.say(slots.told)
    config = inference.with_transfer(loaded.config, slots.device)
    rollouts = inference.rollout_handles(config, slots, log.journal.recorder, log.say)
    video = inference.video_parts(config, loaded.video_model, slots, log.say) if loaded.video_model else None
    health = looked_after(config, slots, log)
    try:
        start_trainer, shared = _trainer_start(config, slots, video, log), SharedDevices(config, log.say)
        occupants = slots.occupants(config.rollout.tensor_model_parallel_size)
        with starting(log):
            nodes = stagings(rollouts, slots, config.cluster.timeout_s)
            folder = log.folder.absolute()
            await asyncio.gather(*(each.need(folder, "trainer.default_local_dir") for each in nodes))
            gpu = slots.device == "cuda"
            started = await watched(
                start_parts(
                    slots.device,
                    trainer=partial(shared.start, start_trainer) if gpu else lambda _: start_trainer(),
                    engines=inference.engine_starts(rollouts, config, slots, log.part, lambda: shared.rollout),
                    towers=[within(log.part("encoder ranks"), video.clips.start)] if video else [],
                    rewards=[within(log.part("rewards"), loaded.reward.start, slots)],
                    part=log.part,
                ),
                occupants,
            )
        weights = WeightPush(
            started.trainer,
            rollouts,
            config.rollout.update_weights_bucket_mb,
            config.rollout.weight_transfer,
            stagings=nodes,
            tower=_tower_push(config, started.trainer, video, log),
        )
        controller = await wired(
            dataclasses.replace(loaded, config=config),
            job,
            log,
            engines=Engines(rollouts, loaded.reward, started.trainer, weights, video.clips if video else NoClips()),
            costs=inference.starting_costs(config, started.engine_facts, slots),
            facts=started.trainer_facts,
            health=health,
        )
        desk = SlotDesk(log, slots, controller.draining, config.rollout.tensor_model_parallel_size)
        await desk.attended(watched(run_controller(controller, job.state["step"]), occupants))
    finally:
        health.close()
        encoders = [video.clips.close()] if video else []
        await end_all([loaded.reward.close(), *(handle.stop() for handle in rollouts), *encoders])


def _trainer_start(config: Config, slots: placement.Slots, video: VideoParts | None, log: RunLog) -> Start:
    name = f"{slots.count} trainer rank{'s' * (slots.count > 1)}"
    if config.training.pipeline_parallel_size > 1:
        from rlfuse.engines.pipeline.pipeline_trainer import PipelineTrainer  # loads Numba: 3 % of the imports

        return within(log.part(name), PipelineTrainer.start, config, slots, slots.cores)
    tower = video.towers if video else None
    return within(log.part(name), TrainerGroup.start, config, slots, slots.cores, tower)


def _tower_push(config: Config, trainer: TrainerGroup, video: VideoParts | None, log: RunLog) -> TowerPush | None:
    if video is None or config.video.freeze_tower:
        return None
    return TowerPush(trainer, video.clips.encoder, log.folder)


def _load_data(
    config: Config, tokenizer: PreTrainedTokenizerBase, model: VideoModel | None
) -> tuple[PromptSource, list[Prompt], str]:
    data = config.data
    clips = inference.clip_reader(config, tokenizer, model)
    rows, report = load_prompts(list(data.train_files), tokenizer, data, clips)
    lines = [str(report)]
    held_out: list[Prompt] = []
    if data.val_files:
        held_out, report = load_prompts(list(data.val_files), tokenizer, data, clips)
        lines.append(str(report))
    source = PromptSource(rows, data.train_batch_size, data.shuffle, data.seed)
    check_enough(config, source)
    return source, held_out, "\n".join(lines)


def check_enough(config: Config, source: PromptSource) -> None:
    """DataError where a step draws more different prompts than an epoch has."""
    fusion, batch = config.fusion, config.data.train_batch_size
    drawn, there = drawn_at_most(fusion.data, fusion.excess, batch), source.steps_per_epoch * batch
    if drawn > there:
        lower = "data.train_batch_size" if fusion.data == "one_step_off" else "data.train_batch_size or fusion.excess"
        raise DataError(
            f"fusion.data={fusion.data} draws {drawn} different prompts a step (data.train_batch_size={batch}, "
            f"fusion.excess={fusion.excess:g}), and an epoch of data.train_files has {there} in whole batches. "
            f"Add data, lower {lower}, or set fusion.data=exact."
        )
