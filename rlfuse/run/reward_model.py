"""Train a reward model on preference pairs (trainer.task=reward_model) and save it for reward.model_path.

pairs, tokenizer -> Ray, slots -> ranks -> steps, evaluation, checkpoints -> summary.json, calibration.png
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlfuse.algorithms.learning_rate import lr_factor
from rlfuse.algorithms.preferences import calibrate
from rlfuse.cluster import placement
from rlfuse.cluster.nodes import fail_on_lost_node
from rlfuse.config.reward_labels import head_labels
from rlfuse.config.rewards import MODEL_PART
from rlfuse.config.schema import Config
from rlfuse.costs.model import Costs
from rlfuse.data.preferences import Preference, dimension_labels, load_preferences
from rlfuse.data.prompts import PromptSource
from rlfuse.data.tokenizers import load_tokenizer, save_tokenizer
from rlfuse.engines.trainer.reward_model import RewardModelTrainer
from rlfuse.observe.reward_model_summary import PICTURE, summarise_reward_model
from rlfuse.observe.run_log import RunLog
from rlfuse.progress import is_due
from rlfuse.run import WORKER_IMPORTS
from rlfuse.run.checkpointing import Checkpointing
from rlfuse.run.job import Job, run_with_restarts, start_health_monitor, training_steps, worker_startup
from rlfuse.step.protocols import Health


def run(config: Config) -> Path:
    """Train a reward model and return the run folder. Raises ConfigError, DataError or EngineError."""
    return run_with_restarts(config, _attempt)


def _attempt(job: Job) -> Path:
    data, trainer, tokenizer = job.config.data, job.config.trainer, load_tokenizer(job.config.model)
    given = head_labels(job.config.model.path, job.config.model.trust_remote_code)
    pairs, report = load_preferences(data.train_files, tokenizer, data, given)
    labels = given or dimension_labels(pairs)
    held_out, more = load_preferences(data.val_files, tokenizer, data, labels) if data.val_files else ([], "")
    source = PromptSource(pairs, data.train_batch_size, data.shuffle, data.seed)
    total = training_steps(trainer, source.steps_per_epoch)
    log = job.begin(total)
    log.say(f"{report}\n{more}".strip())
    seconds = job.run_until_done(_run(job, tokenizer, source, held_out, log, labels), log)
    summarise_reward_model(job.folder, seconds)
    return job.folder


async def _run(
    job: Job,
    tokenizer: PreTrainedTokenizerBase,
    source: PromptSource,
    held_out: Sequence[Preference],
    log: RunLog,
    labels: Sequence[str],
) -> None:
    with log.part("Ray"):
        slots = await placement.start(job.config, WORKER_IMPORTS, job.restart is not None)
    log.say(slots.summary)
    occupants = slots.occupants()
    with worker_startup(log), log.part(f"{slots.count} trainer rank{'s' * (slots.count > 1)}"):
        ranks = RewardModelTrainer.start(job.config, slots, tokenizer.pad_token_id, labels)
        trainer, facts = await fail_on_lost_node(ranks, occupants)

    async def save(folder: Path, weights: bool) -> None:
        await (trainer.save if weights else trainer.save_metadata)(folder)
        save_tokenizer(tokenizer, folder / MODEL_PART / "huggingface")

    log.attach([trainer], facts, lambda: source.epoch)
    checkpointing = Checkpointing(
        log,
        job.config,
        start=job.state["step"],
        save=save,
        state=lambda _: {"pairs": source.state_dict()},
        parameters=facts["parameters"],
    )
    await checkpointing.write_trial()
    if job.checkpoint is not None:
        await trainer.load(job.checkpoint)
        source.load_state_dict(job.state["pairs"])
        log.say(f"resumed from {job.checkpoint} after step {job.state['step']}")
    with closing(start_health_monitor(job.config, slots, log)) as health:
        training = Training(
            config=job.config,
            trainer=trainer,
            source=source,
            held_out=held_out,
            log=log,
            checkpointing=checkpointing,
            health=health,
        )
        await fail_on_lost_node(training.run(job.state["step"]), occupants)


@dataclass(kw_only=True)
class Training:
    """Training loop of a reward model: steps, evaluations and checkpoints."""

    config: Config
    trainer: RewardModelTrainer
    source: PromptSource
    held_out: Sequence[Preference]
    log: RunLog
    checkpointing: Checkpointing
    health: Health

    async def run(self, step: int) -> None:
        settings, total, stopping = self.config.trainer, self.log.total_steps, self.log.stopping
        if step == 0 and self.held_out and settings.val_before_train:
            await self._end(0, await self.evaluate(0))
        while step < total:
            self.checkpointing.check_disk_space(step)
            step += 1
            stopping.step = step
            with self.log.journal.recorder.span("step", step=step):
                values = {"training/global_step": step, "training/epoch": self.source.epoch}
                factor = lr_factor(self.config.actor.optim, step, total)
                values |= await self.trainer.learn(self.source.next_batch(), factor)
            if self.held_out and is_due(settings.test_freq, step, total) and not stopping.is_requested:
                values |= await self.evaluate(step)
            if self.checkpointing.is_due(step):
                await self._save(step)
            await self._end(step, values)
            if stopping.is_requested and step < total:
                if self.checkpointing.step != step:
                    await self._save(step)
                    self.checkpointing.publish()
                raise stopping.stop_error(step)

    async def _save(self, step: int) -> None:
        self.checkpointing.remember(step)
        with self.log.journal.recorder.span("save_checkpoint", step=step, cause="step"):
            await self.checkpointing.write(step)

    async def _end(self, step: int, values: dict[str, float]) -> None:
        spans = await self.log.journal.collect(step)
        self.log.metrics.log(step, values | await self.health.check_step(step, spans, Costs()), spans)
        self.checkpointing.publish()

    async def evaluate(self, step: int) -> dict[str, float]:
        """Return held-out accuracy (overall and per dimension), calibration error, margin and loss; redraw the plot."""
        pairs, log = self.held_out, self.log
        with log.journal.recorder.span("testing"):
            scores = await self.trainer.scores(pairs)
        gaps = scores[:, 0].astype(float) - scores[:, 1]
        found = calibrate(gaps)
        log.metrics.draw(
            step, PICTURE, log.folder / PICTURE, "rlfuse.observe.reward_model_summary:draw_calibration", found, gaps
        )
        values = {f"val-core/{MODEL_PART}/acc": found.accuracy, f"val-aux/{MODEL_PART}/ece": found.ece}
        values |= {f"val-aux/{MODEL_PART}/loss": found.loss, f"val-aux/{MODEL_PART}/margin": float(gaps.mean())}
        for dimension in dict.fromkeys(pair.dimension for pair in pairs if pair.dimension):
            selected = gaps[[pair.dimension == dimension for pair in pairs]]
            values[f"val-aux/{MODEL_PART}/acc/{dimension}"] = calibrate(selected).accuracy
        summary = "  ".join(f"{name.split('/', 2)[2]} {value:.3f}" for name, value in values.items())
        log.say(f"held-out pairs  {summary}")
        return values
