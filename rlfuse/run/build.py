"""Run one RL job from configuration to summary: load data, start engines, run the controller, clean up.

data, tokenizer -> Ray, slots -> trainer ranks, towers | rollout engines | reward workers
      ^                       -> checkpoint, if there is one -> Controller.run -> summary.json
      +---- restart: after the loss of a worker that the step needs ------+
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlfuse.algorithms.experience import Experience
from rlfuse.algorithms.zero_advantage import SKIPPED_SHARE, skip_note
from rlfuse.cluster import placement
from rlfuse.cluster.nodes import fail_on_lost_node
from rlfuse.config.model_files import copy_files
from rlfuse.config.schema import Config
from rlfuse.costs.model import Costs
from rlfuse.costs.rates import Rates
from rlfuse.data.prompts import PromptSource, load_prompts
from rlfuse.data.sampler import SamplerSource
from rlfuse.data.tokenizers import load_tokenizer, save_tokenizer
from rlfuse.engines.rollout.engine_actor import engine_actor
from rlfuse.engines.trainer.families import training_problems
from rlfuse.engines.trainer.trainer_group import TrainerGroup
from rlfuse.engines.vllm.support import unsupported_judge_reasons
from rlfuse.engines.weights.staging import stagings
from rlfuse.engines.weights.sync import WeightPush
from rlfuse.engines.weights.tower_push import TowerPush
from rlfuse.errors import ConfigError, DataError, ErrorCollector
from rlfuse.fusion.custom_policies import load_policy, loaded_policy
from rlfuse.fusion.decisions import Policy, Settings, traits_of
from rlfuse.fusion.lengths import Lengths
from rlfuse.fusion.selection import EXACT, Selection, drawn_at_most
from rlfuse.fusion.tuning import Tuning
from rlfuse.observe.custom_metrics import CustomMetrics, finished
from rlfuse.observe.run_log import RunLog
from rlfuse.observe.summary import summarise
from rlfuse.observe.tracking import read_metrics
from rlfuse.progress import part
from rlfuse.protocols import Engines, NoClips, Trainer
from rlfuse.rewards.workers.pool import RewardPool
from rlfuse.run import WORKER_IMPORTS, inference
from rlfuse.run.checkpointing import Checkpointing
from rlfuse.run.drafting import run_drafts, run_engines
from rlfuse.run.inference import VideoParts
from rlfuse.run.job import Job, run_with_restarts, start_health_monitor, training_steps, worker_startup
from rlfuse.run.slot_requests import SlotRequests
from rlfuse.run.starting import Facts, SharedDevices, Start, end_all, start_parts, with_progress
from rlfuse.run.trial_calls import call_custom_functions
from rlfuse.samples import Prompt
from rlfuse.simulate.online_tuning import OnlineTuning
from rlfuse.step.advantages import Advantages
from rlfuse.step.colocation import hand_over_all, to_ranks
from rlfuse.step.controller import Controller
from rlfuse.step.draining import Draining
from rlfuse.step.groups import GroupSource
from rlfuse.step.protocols import Health
from rlfuse.video.video_model import VideoModel

RunController = Callable[[Controller, int], Awaitable[None]]
MAX_ROWS_SHOWN = 10
TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInputs:
    """Inputs of a job, loaded and checked before any process starts."""

    config: Config
    tokenizer: PreTrainedTokenizerBase
    reward: RewardPool
    prompts: PromptSource
    held_out: Sequence[Prompt]
    video_model: VideoModel | None
    total_steps: int


def run(config: Config, run_controller: RunController = Controller.run) -> Path:
    """Run the job and return its folder. Raises ConfigError, DataError, RewardError or EngineError."""
    return run_with_restarts(config, lambda job: _attempt(job, run_controller))


def _attempt(job: Job, run_controller: RunController) -> Path:
    config, trainer = job.config, job.config.trainer
    errors = ErrorCollector()
    with errors.collect():
        load_policy(config.fusion.policy, kwargs=config.fusion.policy_kwargs)
    with errors.collect():
        CustomMetrics(config, print)  # executes their files; the log reuses the modules
    with errors.collect():
        reward = inference.reward_pool(config)
    with errors.collect(), part("data", quiet="console" not in trainer.logger):
        video_model = inference.video_model_of(config)
        if problems := [
            *training_problems(config),
            *engine_actor(config.rollout.name).unsupported_reasons(config),
            *unsupported_judge_reasons(config),
        ]:
            raise ConfigError(problems)
        others = {"critic.path": config.critic.path} if config.uses_critic else {}
        others |= {"ref.path": config.ref.path} if config.uses_reference else {}
        tokenizer = load_tokenizer(config.model, others)
        prompts, held_out, report = _load_data(config, tokenizer, video_model)
    errors.raise_all()
    reward.check_prompts([*prompts.prompts, *held_out], config.reward.max_failure_rate)
    call_custom_functions(config, reward.entries, prompts.prompts)
    total = training_steps(trainer, prompts.steps_per_epoch)
    log = job.begin(total)
    log.say(report)
    inputs = JobInputs(
        config=config if video_model is None else inference.with_served_models(config, job.folder),
        tokenizer=tokenizer,
        reward=reward,
        prompts=prompts,
        held_out=held_out,
        video_model=video_model,
        total_steps=total,
    )
    seconds = job.run_until_done(_run(inputs, job, log, run_controller), log)
    summarise(job.folder, config, seconds, job.faults, job.resumed_after, job.label)
    return job.folder


async def _run(inputs: JobInputs, job: Job, log: RunLog, run_controller: RunController) -> None:
    with log.part("Ray"):
        slots = await placement.start(inputs.config, WORKER_IMPORTS, job.restart is not None, job.excluded_nodes)
    log.say(slots.summary)
    config = inference.with_transfer(inputs.config, slots.device)
    rollouts = inference.rollout_handles(config, slots, log.journal.recorder, log.say)
    video = inference.video_parts(config, inputs.video_model, slots, log.say) if inputs.video_model else None
    health, served = start_health_monitor(config, slots, log), run_engines(config, job.state["step"], log)
    try:
        start_trainer, shared = _trainer_start(config, slots, video, log), SharedDevices(served, log.say)
        occupants = slots.occupants(config.rollout.tensor_model_parallel_size)
        with worker_startup(log):
            nodes = stagings(rollouts, slots, config.cluster.timeout_s)
            folder = log.folder.absolute()
            await asyncio.gather(*(each.need(folder, "trainer.default_local_dir") for each in nodes))
            gpu = slots.device == "cuda"
            started = await fail_on_lost_node(
                start_parts(
                    slots.device,
                    trainer=partial(shared.start, start_trainer) if gpu else lambda _: start_trainer(),
                    engines=inference.engine_starts(rollouts, served, slots, log.part, lambda: shared.rollout),
                    towers=[with_progress(log.part("encoder ranks"), video.clips.start)] if video else [],
                    rewards=[with_progress(log.part("rewards"), inputs.reward.start, slots)],
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
        controller = await build_controller(
            replace(inputs, config=config),
            job,
            log,
            engines=Engines(rollouts, inputs.reward, started.trainer, weights, video.clips if video else NoClips()),
            costs=inference.starting_costs(config, started.engine_facts, slots),
            facts=started.trainer_facts,
            health=health,
        )
        requests = SlotRequests(log, slots, controller.draining, config.rollout.tensor_model_parallel_size)
        await requests.serve(fail_on_lost_node(run_controller(controller, job.state["step"]), occupants))
    finally:
        health.close()
        encoders = [video.clips.close()] if video else []
        await end_all([inputs.reward.close(), *(handle.stop() for handle in rollouts), *encoders])


def _trainer_start(config: Config, slots: placement.Slots, video: VideoParts | None, log: RunLog) -> Start:
    name = f"{slots.count} trainer rank{'s' * (slots.count > 1)}"
    if config.training.pipeline_parallel_size > 1:
        from rlfuse.engines.pipeline.pipeline_trainer import PipelineTrainer  # loads Numba: 3 % of the imports

        return with_progress(log.part(name), PipelineTrainer.start, config, slots, slots.cores)
    tower = video.towers if video else None
    return with_progress(log.part(name), TrainerGroup.start, config, slots, slots.cores, tower)


def _tower_push(config: Config, trainer: TrainerGroup, video: VideoParts | None, log: RunLog) -> TowerPush | None:
    if video is None or config.video.freeze_vision_tower:
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
    if data.sampler is None:
        source = PromptSource(rows, data.train_batch_size, data.shuffle, data.seed)
    else:
        source = SamplerSource(rows, data, partial(finished, prompt_key=data.prompt_key))
    check_enough(config, source)
    return source, held_out, "\n".join(lines)


def check_enough(config: Config, source: PromptSource) -> None:
    """Raise DataError if a step draws more distinct prompts than an epoch has."""
    fusion, batch = config.fusion, config.data.train_batch_size
    drawn, available = drawn_at_most(fusion.data, fusion.excess, batch), source.steps_per_epoch * batch
    if drawn > available:
        lower = "data.train_batch_size" if fusion.data == "one_step_off" else "data.train_batch_size or fusion.excess"
        raise DataError(
            f"fusion.data={fusion.data} draws {drawn} distinct prompts per step (data.train_batch_size={batch}, "
            f"fusion.excess={fusion.excess:g}), but an epoch of data.train_files has {available} in whole batches. "
            f"Add data, lower {lower}, or set fusion.data=exact."
        )


async def build_controller(
    inputs: JobInputs, job: Job, log: RunLog, *, engines: Engines, costs: Costs, facts: Facts, health: Health
) -> Controller:
    """Build the controller and load the checkpoint. `costs`: estimates until the run has measurements."""
    config, prompts, recorder = inputs.config, inputs.prompts, log.journal.recorder
    experience, lengths = Experience(config, inputs.reward.entries), Lengths(config.data.max_response_length)
    selection = Selection(config.fusion.data, config.fusion.excess, config.data.train_batch_size, prompts)
    stateful = dict(
        prompts=prompts, kl=experience.kl, selection=selection, lengths=lengths, rewards=experience.normaliser
    )
    _restore(stateful, job, selection, log.say)
    if note := skip_note(config):
        log.say(note)

    def state(_: int) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in stateful.items()} | {"label": log.metrics.label_so_far()}

    tuning = _tuning(config, job, engines, costs, lengths, log.say)
    log.attach([*engines.recorded, draining := Draining(engines, tuning, log.say)], facts, lambda: prompts.epoch)
    sources = dict(prompts=prompts, selection=selection, held_out=inputs.held_out)
    drafts = run_drafts(config, job.state["step"], log)
    groups = GroupSource(config=config, engines=engines, recorder=recorder, say=log.say, drafts=drafts, **sources)
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
        checkpoints=_checkpointing(inputs, job, log, engines.trainer, state, facts),
        stopping=log.stopping,
        total_steps=inputs.total_steps,
        health=health,
        say=log.say,
    )
    with log.part("trial checkpoint"):
        await controller.checkpoints.write_trial()
    if job.checkpoint is not None:
        with log.part("loading the checkpoint"):
            await hand_over_all(to_ranks, engines.rollout, engines.trainer)  # the weight push moves the engines back
            await engines.trainer.load(job.checkpoint)
        log.say(f"resumed from {job.checkpoint} after step {job.state['step']}")
    return controller


def _restore(stateful: Mapping[str, Any], job: Job, selection: Selection, say: Callable[[str], None]) -> None:
    if job.checkpoint is None:
        return
    for name, each in stateful.items():
        each.load_state_dict(job.state[name])
    if selection.data == EXACT and (rows := selection.set_aside):
        first = ", ".join(map(str, rows[:MAX_ROWS_SHOWN])) + (", ..." if len(rows) > MAX_ROWS_SHOWN else "")
        say(
            f"{len(rows)} prompts that were deferred before the checkpoint are skipped until the next epoch, because "
            f"fusion.data=exact draws only new prompts (rows {first} of data.train_files). Resume with "
            "fusion.data=over_sampling or tail_batching to draw them."
        )


def _tuning(
    config: Config, job: Job, engines: Engines, costs: Costs, lengths: Lengths, say: Callable[[str], None]
) -> Tuning:
    slots = len(engines.rollout)
    rates = Rates(slots, job.drained, job.returning, measured=not config.trainer.deterministic)
    tuning = Tuning(costs, lengths, _settings(config, engines.trainer), rates, OnlineTuning(config, slots, say))
    for row in read_metrics(job.folder / "metrics.jsonl"):  # of the steps before the checkpoint
        if SKIPPED_SHARE in row:
            tuning.expect_skipped(row[SKIPPED_SHARE])
    return tuning


def _checkpointing(
    inputs: JobInputs, job: Job, log: RunLog, trainer: Trainer, state: Callable[[int], dict[str, Any]], facts: Facts
) -> Checkpointing:
    model = inputs.video_model

    async def save(folder: Path, weights: bool) -> None:
        await (trainer.save(folder, wait=False) if weights else trainer.save_metadata(folder))
        save_tokenizer(inputs.tokenizer, folder / "actor" / "huggingface")
        if model is not None and not weights:
            copy_files(model.folder, folder)

    async def complete(folder: Path) -> None:
        if model is not None:
            await asyncio.to_thread(model.complete, folder / "actor" / "huggingface")

    return Checkpointing(
        log,
        inputs.config,
        start=job.state["step"],
        save=save,
        writer=trainer,
        state=state,
        first_bytes=facts["checkpoint_bytes"],
        complete=complete,
    )


def _policy(config: Config, experience: Experience, log: RunLog) -> Policy:
    policy = loaded_policy(config.fusion.policy)
    if traits_of(policy).trains_early and (why := experience.overlap_blocker()):
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
