"""Training a reward model: pairs in, a Hugging Face folder that `reward.model_path` takes out.

Role: `run` is what `rlfuse train` calls with trainer.task=reward_model (and notebooks, with `rlfuse.config.compose`'s
`load`). A classifier with a label for each dimension of the pairs starts from model.path, sees data.train_batch_size
pairs a step, and is evaluated on data.val_files: how often it is right, and how sure it was.

    pairs, tokenizer -> Ray, slots -> ranks -> steps, evaluation, checkpoints -> summary.json, calibration.png

Waits: for the ranks, each call at most cluster.timeout_s.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlfuse.algorithms.preferences import calibrate
from rlfuse.cluster import placement
from rlfuse.cluster.nodes import watched
from rlfuse.config.schema import Config
from rlfuse.data.preferences import Preference, labels_of, load_preferences
from rlfuse.data.prompts import PromptSource
from rlfuse.data.tokenizers import load_tokenizer
from rlfuse.engines.trainer.reward_model import MODEL, RewardModelTrainer
from rlfuse.observe.journal import Journal, due
from rlfuse.observe.pairs import PICTURE, summarise_pairs
from rlfuse.rewards.api.labels import head_labels
from rlfuse.run.job import Job
from rlfuse.run.restarts import recovered, starting


def run(config: Config) -> Path:
    """Train; returns the run folder. Raises ConfigError, DataError or EngineError with one message."""
    return recovered(config, _attempt)


def _attempt(job: Job) -> Path:
    data, trainer, tokenizer = job.config.data, job.config.trainer, load_tokenizer(job.config.model)
    given = head_labels(job.config.model.path, job.config.model.trust_remote_code)
    pairs, report = load_preferences(data.train_files, tokenizer, data, given)
    labels = given or labels_of(pairs)
    held_out, more = load_preferences(data.val_files, tokenizer, data, labels) if data.val_files else ([], "")
    source = PromptSource(pairs, data.train_batch_size, data.shuffle, data.seed)
    total = trainer.total_training_steps or trainer.total_epochs * source.steps_per_epoch
    journal = job.journal(total)
    journal.say(f"{report}\n{more}".strip())
    seconds = job.carry_out(_run(job, tokenizer, source, held_out, journal, labels), journal)
    summarise_pairs(job.folder, seconds)
    return job.folder


async def _run(
    job: Job,
    tokenizer: PreTrainedTokenizerBase,
    source: PromptSource,
    held_out: Sequence[Preference],
    journal: Journal,
    labels: Sequence[str],
) -> None:
    with journal.part("Ray"):
        slots = await placement.start(job.config, again=job.restart is not None)
    journal.say(slots.told)
    occupants = slots.occupants()
    with starting(journal), journal.part(f"{slots.count} trainer rank{'s' * (slots.count > 1)}"):
        padding = tokenizer.pad_token_id
        ranks = RewardModelTrainer.start(job.config, slots, journal.total_steps, padding, labels)
        trainer, facts = await watched(ranks, occupants)

    async def save(folder: Path) -> None:
        await trainer.save(folder)
        tokenizer.save_pretrained(folder / MODEL / "huggingface")

    journal.attach([trainer], save, lambda _: {"pairs": source.state_dict()}, facts)
    if job.checkpoint is not None:
        await trainer.load(job.checkpoint)
        source.load_state_dict(job.state["pairs"])
        journal.say(f"resumed from {job.checkpoint} after step {job.state['step']}")
    await watched(_steps(trainer, source, held_out, journal, job.state["step"]), occupants)


async def _steps(
    trainer: RewardModelTrainer, source: PromptSource, held_out: Sequence[Preference], journal: Journal, step: int
) -> None:
    """From the state after `step` to the last step. Stopped after a step in which it was told to."""
    settings, total = journal.config.trainer, journal.total_steps
    if step == 0 and held_out and settings.val_before_train:
        await journal.trained(0, await evaluate(trainer, held_out, journal, 0))
    while step < total:
        step += 1
        journal.begin(step)
        with journal.recorder.span("step", step=step):
            values = {"training/global_step": step, "training/epoch": source.epoch}
            values |= await trainer.learn(source.next_batch())
        if held_out and due(settings.test_freq, step, total) and not journal.leaving:
            values |= await evaluate(trainer, held_out, journal, step)
        if due(settings.save_freq, step, total):
            await journal.checkpoint(step)
        await journal.trained(step, values)
        await journal.leave_if_told(step, journal.checkpoint)


async def evaluate(
    trainer: RewardModelTrainer, pairs: Sequence[Preference], journal: Journal, step: int
) -> dict[str, float]:
    """Held-out accuracy, also of each dimension, calibration error, gap and loss; redraws the picture of them."""
    with journal.recorder.span("testing"):
        scores = await trainer.scores(pairs)
    gaps = scores[:, 0].astype(float) - scores[:, 1]
    found = calibrate(gaps)
    journal.draw(step, PICTURE, journal.folder / PICTURE, "rlfuse.observe.pairs:draw_calibration", found, gaps)
    values = {f"val-core/{MODEL}/acc": found.accuracy, f"val-aux/{MODEL}/ece": found.ece}
    values |= {f"val-aux/{MODEL}/loss": found.loss, f"val-aux/{MODEL}/margin": float(gaps.mean())}
    for dimension in dict.fromkeys(pair.dimension for pair in pairs if pair.dimension):
        own = gaps[[pair.dimension == dimension for pair in pairs]]
        values[f"val-aux/{MODEL}/acc/{dimension}"] = calibrate(own).accuracy
    journal.say(
        "held-out pairs  " + "  ".join(f"{name.split('/', 2)[2]} {value:.3f}" for name, value in values.items())
    )
    return values
