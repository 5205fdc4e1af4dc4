"""Score items in the current process, without cluster and time limit, with the loading and composition of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlfuse.config.rewards import Given
from rlfuse.rewards.api import interrupts
from rlfuse.rewards.api.combine import Outcomes, compose, positions_to_score, waves
from rlfuse.rewards.api.entries import load_entries
from rlfuse.rewards.api.items import Item
from rlfuse.rewards.api.shapes import RewardFunction
from rlfuse.samples import Reward, RewardFailure


def score_items(
    functions: Given | RewardFunction | Sequence[Given | RewardFunction],
    items: Sequence[Item],
    weights: Sequence[float] = (),
    model_path: str | None = None,
    trust_remote_code: bool = False,
) -> list[Reward | RewardFailure]:
    """Return one result per item. `functions`, `weights` and `model_path` are those of the `reward` config."""
    several = functions if isinstance(functions, list | tuple) else [functions]
    entries, loaded = load_entries(several, weights, model_path, trust_remote_code=trust_remote_code)
    for function in loaded.values():
        if function.start is not None:
            function.start()
    known: list[Outcomes] = [{} for _ in items]
    for wave in waves(entries):
        calls = [(entry, positions_to_score(entry, items, known)) for entry in wave]
        for entry, positions in calls:
            with interrupts.watch_interrupts():
                outcomes = loaded[entry.name].score([items[position] for position in positions])
            for position, outcome in zip(positions, outcomes, strict=True):
                known[position][entry.name] = outcome
    return [compose(entries, item.data_source, outcomes) for item, outcomes in zip(items, known, strict=True)]


def as_columns(reward: Reward | RewardFailure, prefix: str) -> dict[str, Any]:
    """Return a result as columns of a table; columns of parts start with `prefix`."""
    if isinstance(reward, RewardFailure):
        failure = f"{reward.function}: {reward.message}"
        return {"reward": None, "gate": None, "failure": failure, "note": None, "traceback": reward.traceback}
    parts = {f"{prefix}{name}": value for name, value in reward.parts.items()}
    return {"reward": reward.value, **parts, "gate": reward.gate, "note": reward.text, "failure": None, "traceback": ""}
