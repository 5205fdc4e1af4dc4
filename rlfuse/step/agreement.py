"""Whether rollout engines compute the model that the trainer trains: the same tokens, scored by both.

Role: the controller asks once the first weights of a run are out, before anything is learned. An engine that loads
weights in a layout its kernels don't read, or an attention that leaves out what the model needs, shows here and not as
a policy that learns badly.
Waits: for a few tokens of every engine and one pass of the trainer, bounded by their own limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from rlfuse.algorithms.corrections import LOG_PROBS_DIFF_MAX, LOG_PROBS_DIFF_MEAN, mismatch_metrics
from rlfuse.errors import EngineLost
from rlfuse.protocols import Engines, RolloutEngine, Sampling
from rlfuse.samples import Group, Prompt, Response, Sample
from rlfuse.step.colocation import hand_over_all, to_engine, to_ranks

SAMPLES_PER_ENGINE, MAX_COMPARED_TOKENS = 4, 32
"""Of one prompt for each engine, and of a response at most: the check costs next to nothing."""
PREFERRED_PROMPT_TOKENS = 2048
"""Tokens of a prompt that is preferred: windows slide within it, and one engine reads it in no time."""
MAX_TRIED_PROMPTS = 8
"""Prompts whose clips are looked at until one can be read."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """What both make of the same tokens."""

    metrics: dict[str, float]
    """As of a step's mismatch (`corrections`)."""
    text: str
    """How far they are apart, and where most."""


def comparison_priority(prompt: Prompt) -> tuple[bool, bool, int]:
    """Sorts prompts by how much they tell: with a clip, then long ones, then those above `PREFERRED_PROMPT_TOKENS`, shortest first."""
    tokens = len(prompt.token_ids)
    return not prompt.visual, tokens > PREFERRED_PROMPT_TOKENS, tokens if tokens > PREFERRED_PROMPT_TOKENS else -tokens


async def compare(engines: Engines, group: Group, sampling: Sampling) -> Agreement | None:
    """The group's samples are drawn by all engines and scored by the trainer; the engines have the devices again.

    What an engine that is lost was to draw is left out; None where all are.
    """
    count = len(engines.rollout)
    shares = [group.samples[number::count] for number in range(count)]
    await asyncio.gather(*(_draw(each, share, sampling) for each, share in zip(engines.rollout, shares, strict=True)))
    await hand_over_all(to_ranks, engines.rollout, engines.trainer)
    drawn = [sample for sample in group.samples if sample.response is not None]
    scored = (await engines.trainer.score(("actor",), [each.row() for each in drawn]))["actor"].arrays if drawn else []
    await hand_over_all(to_engine, engines.rollout, engines.trainer)
    return _agreement(drawn, scored, count) if drawn else None


async def _draw(engine: RolloutEngine, samples: Sequence[Sample], sampling: Sampling) -> None:
    by_id = {sample.id: sample for sample in samples}
    with suppress(EngineLost):
        async for name, response in engine.generate(samples, sampling):
            if isinstance(response, Response):  # nothing is evicted meanwhile
                by_id[name].response = response


def _agreement(samples: Sequence[Sample], scored: Sequence[np.ndarray], engines: int) -> Agreement:
    engine, trainer = (
        np.concatenate([sample.require_response().log_probs for sample in samples]),
        np.concatenate(scored),
    )
    metrics = mismatch_metrics(engine, trainer)
    worst = int(np.nan_to_num(np.abs(engine - trainer), nan=np.inf).argmax())
    starts = np.cumsum([0, *(len(each) for each in scored)])
    number = int(np.searchsorted(starts, worst, side="right")) - 1
    sample, position = samples[number], worst - starts[number]
    most, mean = metrics[LOG_PROBS_DIFF_MAX], metrics[LOG_PROBS_DIFF_MEAN]
    text = (
        f"log-probs of {len(engine)} tokens by rollout engines and trainer are at most {most:.2g} apart, {mean:.2g} in "
        f"the mean; most at token {position} of a response to row {sample.prompt.index}: {engine[worst]:.6g} by "
        f"rollout/{sample.rollout_index % engines}, {trainer[worst]:.6g} by the trainer"
    )
    return Agreement(metrics, text)
