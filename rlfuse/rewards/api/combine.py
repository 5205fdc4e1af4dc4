r"""Combine the outcomes of several reward functions into one reward per sample. Pure.

    gate -> gate -> ... -> all other functions for this data_source -> sum of weight * value
      \________\__ gate closed: the reward is 0 and no further function is called

A sample fails if any of its functions fails, whatever the weight, or if no function applies to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import zip_longest

from rlfuse.config.rewards import RewardEntry
from rlfuse.rewards.api.items import Item, Outcome, Score
from rlfuse.samples import Reward, RewardFailure

MAX_REWARD = 3.4e38
Outcomes = dict[str, Outcome]


def waves(entries: Sequence[RewardEntry]) -> list[list[RewardEntry]]:
    """Return the entries that are called at the same time: each gate alone, in order, then all other entries."""
    return [*([entry] for entry in entries if entry.gate), [entry for entry in entries if not entry.gate]]


def positions_to_score(entry: RewardEntry, items: Sequence[Item], known: Sequence[Outcomes]) -> list[int]:
    """Return the positions of the items that `entry` scores: its data sources, not failed or gated by earlier waves."""
    return [
        position
        for position, (item, outcomes) in enumerate(zip(items, known, strict=True))
        if covers(entry, item.data_source) and not any(_stops_scoring(outcome) for outcome in outcomes.values())
    ]


def _stops_scoring(outcome: Outcome) -> bool:
    return isinstance(outcome, RewardFailure) or (outcome.value is not None and outcome.value <= 0)


def covers(entry: RewardEntry, source: str) -> bool:
    """Return whether an entry scores samples of this data_source."""
    return not entry.sources or any(fnmatchcase(source, pattern) for pattern in entry.sources)


def uncovered_sources(entries: Sequence[RewardEntry], sources: Sequence[str]) -> list[str]:
    """Return the distinct data sources that only gates, or no entries at all, score."""
    scoring = [entry for entry in entries if not entry.gate]
    return [source for source in dict.fromkeys(sources) if not any(covers(entry, source) for entry in scoring)]


def compose(entries: Sequence[RewardEntry], source: str, outcomes: Mapping[str, Outcome]) -> Reward | RewardFailure:
    """Return the reward of one sample. Its parts are named `{function}` and `{function}/{extra}`; notes are text.

    Its `pred` is that of the first function that returns one.
    """
    found = {entry.name: outcomes[entry.name] for entry in entries if entry.name in outcomes}  # in entry order
    if failures := [outcome for outcome in found.values() if isinstance(outcome, RewardFailure)]:
        return _first(failures)
    scores: dict[str, Score] = dict(found)
    parts, text = _log(scores)
    pred = next((score.pred for score in scores.values() if score.pred is not None), None)
    scoring = [entry for entry in entries if not entry.gate and covers(entry, source)]
    gates = [entry.name for entry in entries if entry.gate and entry.name in scores]
    closed = next((name for name in gates if _stops_scoring(scores[name])), None)
    if closed is not None and scoring:
        return Reward(0.0, parts, text, dict.fromkeys((entry.name for entry in scoring), 0.0), closed, pred)
    applied = [entry for entry in scoring if scores[entry.name].value is not None]
    if not applied:
        return RewardFailure(", ".join(entry.name for entry in entries), _why_none(scoring, source))
    dimensions = {entry.name: _clipped(entry, scores[entry.name].value) for entry in applied}
    value = _sum(entry.weight * dimensions[entry.name] for entry in applied)
    if not abs(value) <= MAX_REWARD:
        why = f"the weighted sum of {dimensions} is {value:.4g}, outside float32: lower the weights, or set clip"
        return RewardFailure(", ".join(dimensions), why)
    return _with_token_rewards(Reward(value, parts, text, dimensions, pred=pred), applied, scores)


def _with_token_rewards(
    reward: Reward, applied: Sequence[RewardEntry], scores: Mapping[str, Score]
) -> Reward | RewardFailure:
    """Return the reward with the weighted sum of its functions' token rewards, if any of them has some."""
    given = [(entry, found) for entry in applied if (found := scores[entry.name].token_rewards) is not None]
    if bounded := next((entry for entry, _ in given if entry.clip is not None or entry.normalise), None):
        key = "normalise" if bounded.clip is None else "clip"
        why = f"returned token rewards, which {key} can't be applied to: remove {key} from the entry, or return `score`"
        return RewardFailure(bounded.name, why)
    if not given:
        return reward
    terms = [[entry.weight * value for value in found] for entry, found in given]
    totals = tuple(_sum(each) for each in zip_longest(*terms, fillvalue=0.0))
    if wrong := [each for each in totals if not abs(each) <= MAX_REWARD]:
        why = f"the weighted sum of the rewards of a token is {wrong[0]:.4g}, outside float32: lower the weights"
        return RewardFailure(", ".join(entry.name for entry, _ in given), why)
    return replace(reward, token_rewards=totals)


def _clipped(entry: RewardEntry, value: float) -> float:
    return value if entry.clip is None else min(max(value, entry.clip[0]), entry.clip[1])


def _sum(terms: Iterable[float]) -> float:
    try:
        return math.fsum(terms)
    except (OverflowError, ValueError):  # overflow, or both infinities
        return math.nan


def _log(scores: Mapping[str, Score]) -> tuple[dict[str, float], str | None]:
    parts: dict[str, float] = {}
    notes = []
    for name, score in scores.items():
        if score.value is not None:
            parts[name] = score.value
        parts.update({f"{name}/{extra}": number for extra, number in score.extras.items()})
        notes += [f"{name}/{key}: {note}" for key, note in score.notes.items()]
    return parts, "\n".join(notes) or None


def _why_none(scoring: Sequence[RewardEntry], source: str) -> str:
    if not scoring:
        return f"no reward function scores data_source {source!r}: add the source to an entry, or add an entry for it"
    return "every reward function returned None for this sample: add a function that scores it"


def _first(failures: list[RewardFailure]) -> RewardFailure:
    first, others = failures[0], [failure.function for failure in failures[1:]]
    return replace(first, message=f"{first.message} (also failed: {', '.join(others)})") if others else first
