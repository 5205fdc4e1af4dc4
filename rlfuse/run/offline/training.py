"""Train one model on a fixed dataset (trainer.task other than rl) and save it.

task (examples) -> Ray, slots -> ranks -> steps, evaluation, checkpoints -> summary.json, learning_curve.png
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rlfuse.algorithms.learning_rate import lr_factor
from rlfuse.cluster import placement
from rlfuse.cluster.nodes import fail_on_lost_node
from rlfuse.config.schema import Config
from rlfuse.costs.model import Costs
from rlfuse.data.prompts import PromptSource
from rlfuse.data.tokenizers import load_tokenizer, save_tokenizer
from rlfuse.observe.offline_summary import summarise_offline
from rlfuse.observe.run_log import RunLog
from rlfuse.progress import is_due
from rlfuse.run import WORKER_IMPORTS
from rlfuse.run.checkpointing import Checkpointing
from rlfuse.run.job import Job, run_with_restarts, start_health_monitor, training_steps, worker_startup
from rlfuse.run.offline.demonstrations import SupervisedFineTuning
from rlfuse.run.offline.direct_preferences import DirectPreferenceOptimisation
from rlfuse.run.offline.reward_model import RewardModelling
from rlfuse.run.offline.task import OfflineTask
from rlfuse.step.protocols import Health

TASKS: dict[str, type[OfflineTask]] = {
    "sft": SupervisedFineTuning,
    "dpo": DirectPreferenceOptimisation,
    "reward_model": RewardModelling,
}
"""trainer.task -> its definition."""


def run(config: Config) -> Path:
    """Train and return the run folder. Raises ConfigError, DataError or EngineError."""
    return run_with_restarts(config, _attempt)


def _attempt(job: Job) -> Path:
    config, others = job.config, {"ref.path": job.config.ref.path} if job.config.uses_reference else {}
    task = TASKS[config.trainer.task](config, load_tokenizer(config.model, others))
    data = config.data
    source = PromptSource(task.examples, data.train_batch_size, data.shuffle, data.seed)
    log = job.begin(training_steps(config.trainer, source.steps_per_epoch))
    log.say(task.report)
    seconds = job.run_until_done(_run(job, task, source, log), log)
    summarise_offline(job.folder, config.trainer.task, seconds)
    return job.folder


async def _run(job: Job, task: OfflineTask, source: PromptSource, log: RunLog) -> None:
    with log.part("Ray"):
        slots = await placement.start(job.config, WORKER_IMPORTS, job.restart is not None)
    log.say(slots.summary)
    occupants = slots.occupants()
    with worker_startup(log), log.part(f"{slots.count} trainer rank{'s' * (slots.count > 1)}"):
        facts = await fail_on_lost_node(task.start(slots), occupants)
    trainer = task.trainer

    async def save(folder: Path, weights: bool) -> None:
        await (trainer.save(folder, wait=False) if weights else trainer.save_metadata(folder))
        save_tokenizer(task.tokenizer, folder / trainer.model / "huggingface")

    log.attach([trainer], facts, lambda: source.epoch)
    checkpointing = Checkpointing(
        log,
        job.config,
        start=job.state["step"],
        save=save,
        writer=trainer,
        state=lambda _: {"examples": source.state_dict()},
        first_bytes=facts["checkpoint_bytes"],
    )
    await checkpointing.write_trial()
    if job.checkpoint is not None:
        await trainer.load(job.checkpoint)
        source.load_state_dict(job.state["examples"])
        log.say(f"resumed from {job.checkpoint} after step {job.state['step']}")
    with closing(start_health_monitor(job.config, slots, log)) as health:
        training = Training(
            config=job.config, task=task, source=source, log=log, checkpointing=checkpointing, health=health
        )
        await fail_on_lost_node(checkpointing.settle_after(training.run(job.state["step"])), occupants)


@dataclass(kw_only=True)
class Training:
    """Training loop of an offline task: steps, evaluations and checkpoints."""

    config: Config
    task: OfflineTask
    source: PromptSource
    log: RunLog
    checkpointing: Checkpointing
    health: Health

    async def run(self, step: int) -> None:
        settings, total, stopping = self.config.trainer, self.log.total_steps, self.log.stopping
        held_out = bool(self.task.held_out)
        if step == 0 and held_out and settings.val_before_train:
            await self._end(0, await self.evaluate(0))
        while step < total:
            self.checkpointing.check_disk_space(step)
            step += 1
            stopping.step = step
            with self.log.journal.recorder.span("step", step=step):
                values = {"training/global_step": step, "training/epoch": self.source.epoch}
                factor = lr_factor(self.config.actor.optim, step, total)
                values |= await self.task.learn(self.source.next_batch(), factor)
                if self.config.ref.is_sync_due(step):
                    await self.task.trainer.sync_reference()
            if held_out and is_due(settings.test_freq, step, total) and not stopping.is_requested:
                values |= await self.evaluate(step)
            if self.checkpointing.is_due(step):
                await self._save(step)
            await self._end(step, values)
            if stopping.is_requested and step < total:
                await self.checkpointing.settle()
                if self.checkpointing.step != step:
                    await self._save(step)
                    await self.checkpointing.settle()
                raise stopping.stop_error(step)

    async def _save(self, step: int) -> None:
        self.checkpointing.remember(step)
        with self.log.journal.recorder.span("save_checkpoint", step=step, cause="step"):
            await self.checkpointing.write(step)

    async def _end(self, step: int, values: dict[str, float]) -> None:
        spans = await self.log.journal.collect(step)
        self.log.metrics.log(step, values | await self.health.check_step(step, spans, Costs()), spans)
        await self.checkpointing.publish_written()

    async def evaluate(self, step: int) -> dict[str, float]:
        """Return the validation metrics, and log them."""
        with self.log.journal.recorder.span("testing"):
            values = await self.task.evaluate(self.log, step)
        summary = "  ".join(f"{name.split('/', 2)[2]} {value:.3f}" for name, value in values.items())
        self.log.say(f"held out  {summary}")
        return values
