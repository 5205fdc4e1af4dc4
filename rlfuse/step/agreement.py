"""Check that rollout engines compute the trainer's model, by comparing their log-probs of the same tokens.

Role: the controller runs it after the first weight push of a run. It detects, for example, an engine that loads weights
in a wrong layout or an attention that ignores a mask, which would otherwise only show as poor learning.
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
"""Samples per engine, all of one prompt, and maximum response tokens of each."""
PREFERRED_PROMPT_TOKENS = 2048
"""Preferred maximum of prompt tokens: long enough for sliding windows, and fast to prefill."""
MAX_TRIED_PROMPTS = 8
"""Maximum prompts tried until a clip can be read."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Result of the comparison of engines and trainer."""

    metrics: dict[str, float]
    """Mismatch metrics, as logged for each step (`algorithms.corrections`)."""
    text: str
    """Maximum and mean difference, and the token with the largest."""


def comparison_priority(prompt: Prompt) -> tuple[bool, bool, int]:
    """Return a sort key: prompts with clips, then the longest up to PREFERRED_PROMPT_TOKENS, then the shortest."""
    tokens = len(prompt.token_ids)
    return not prompt.visual, tokens > PREFERRED_PROMPT_TOKENS, tokens if tokens > PREFERRED_PROMPT_TOKENS else -tokens


async def compare(engines: Engines, group: Group, sampling: Sampling) -> Agreement | None:
    """Generate the group's samples on all engines, score them by the trainer, and return the devices to the engines.

    Samples of lost engines are left out. Returns None if all engines are lost.
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
            if isinstance(response, Response):  # no sample is evicted here
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
        f"log-probs of {len(engine)} tokens by rollout engines and trainer differ by at most {most:.2g} (mean "
        f"{mean:.2g}). The largest difference is at token {position} of a response to row {sample.prompt.index}: "
        f"{engine[worst]:.6g} by rollout/{sample.rollout_index % engines}, {trainer[worst]:.6g} by the trainer"
    )
    return Agreement(metrics, text)
