"""From several functions' outcomes for one sample to its reward.

Role: pure; called by the reward pool for every sample and by `table.score_table` in notebooks.
Invariants:
- the value is the weighted sum of what applies, in the order of the functions; parts hold the unweighted numbers;
- one failure fails the sample, whatever its weight, and a sample to which nothing applies fails too: there is no
  default number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rlfuse.rewards.items import Outcome, RewardError, Score
from rlfuse.samples import Reward, RewardFailure


def compose(names: Sequence[str], weights: Sequence[float], outcomes: Sequence[Outcome]) -> Reward | RewardFailure:
    """The reward of one sample: parts `{fn}` and `{fn}/{extra}`, notes as text."""
    failures = [outcome for outcome in outcomes if isinstance(outcome, RewardFailure)]
    if failures:
        return _first(failures)
    scores: list[Score] = list(outcomes)
    applied = [(weight, score.value) for weight, score in zip(weights, scores, strict=True) if score.value is not None]
    if not applied:
        return RewardFailure(
            ", ".join(names), "no reward function applies to this sample (each returned None): add one that does"
        )
    value = math.fsum(weight * part for weight, part in applied)
    parts: dict[str, float] = {}
    notes = []
    for name, score in zip(names, scores, strict=True):
        if score.value is not None:
            parts[name] = score.value
        parts.update({f"{name}/{extra}": number for extra, number in score.extras.items()})
        notes += [f"{name}/{key}: {note}" for key, note in score.notes.items()]
    if not math.isfinite(value):
        return RewardFailure(", ".join(names), f"the weighted sum of {parts} is {value}: lower reward.weights")
    return Reward(value, parts, "\n".join(notes) or None)


def check_weights(weights: Sequence[float], names: Sequence[str]) -> list[float]:
    """One finite weight for each part; none given means 1 each."""
    if not names:
        raise RewardError("reward: functions is empty and model_path is null; give at least one of them")
    if not weights:
        return [1.0] * len(names)
    if len(weights) != len(names):
        raise RewardError(
            f"reward.weights has {len(weights)} entries ({list(weights)}) for {len(names)} parts ({list(names)}); give "
            "one for each, the reward model's last, or leave it empty for 1 each"
        )
    for weight, name in zip(weights, names, strict=True):
        if not math.isfinite(weight):
            raise RewardError(f"reward.weights: the weight of {name} is {weight}; it has to be a finite number")
    return [float(weight) for weight in weights]


def _first(failures: list[RewardFailure]) -> RewardFailure:
    first, others = failures[0], [failure.function for failure in failures[1:]]
    return replace(first, message=f"{first.message} (also failed: {', '.join(others)})") if others else first
