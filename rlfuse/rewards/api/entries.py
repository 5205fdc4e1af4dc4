"""Load the rewards of a run: entries with distinct names and weights, and the function behind each entry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlfuse.config.rewards import MODEL_PART, Given, RewardEntry, is_model, read_entries
from rlfuse.errors import RewardError
from rlfuse.rewards.api import interrupts
from rlfuse.rewards.api.functions import load_function
from rlfuse.rewards.api.shapes import RewardFunction

CLASSIFIER = "rlfuse.rewards.models.classifier:Classifier"


def load_entries(
    functions: Sequence[Given | RewardFunction],
    weights: Sequence[float] = (),
    model_path: str | None = None,
    required: bool = True,
    **model: Any,
) -> tuple[list[RewardEntry], dict[str, RewardFunction]]:
    """Return (entries in order, functions by entry name). Raises one RewardError that lists all problems.

    `required`: whether having no entry is a problem.
    """
    entries, found = read_entries(functions, weights, model_path, required)
    if found:
        raise RewardError("\n".join(found))
    loaded: list[RewardFunction] = []
    problems: list[RewardError] = []
    for entry in entries:
        try:
            with interrupts.watch_interrupts():
                loaded.append(_load(entry, model_path, model))
        except RewardError as error:
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise RewardError("\n\n".join(str(problem) for problem in problems))
    named = [
        replace(entry, name=name, answer_only=function.answer_only if entry.answer_only is None else entry.answer_only)
        for entry, function, name in zip(entries, loaded, _names(entries, loaded), strict=True)
    ]
    return named, {
        entry.name: replace(function, name=entry.name, answer_only=entry.answer_only)
        for entry, function in zip(named, loaded, strict=True)
    }


def _load(entry: RewardEntry, model_path: str | None, model: dict[str, Any]) -> RewardFunction:
    if not is_model(entry.path):
        return load_function(entry.path, entry.kwargs)
    label = entry.path.removeprefix(MODEL_PART).removeprefix(":")
    return load_function(CLASSIFIER, {"path": model_path, "label": label, **model})


def _names(entries: Sequence[RewardEntry], functions: Sequence[RewardFunction]) -> list[str]:
    """Return distinct names: duplicates are prefixed with file or module (`math.compute_score`), then numbered."""
    plain = [
        entry.name or (entry.path.replace(":", "/", 1) if is_model(entry.path) else function.name)
        for entry, function in zip(entries, functions, strict=True)
    ]
    count, taken = Counter([MODEL_PART, *plain]), {MODEL_PART, *(entry.name for entry in entries if entry.name)}
    names: list[str] = []
    for entry, function, name in zip(entries, functions, plain, strict=True):
        if not entry.name and not is_model(entry.path):
            longer = base = f"{_origin(function)}.{name}" if count[name] > 1 else name
            number = 1
            while longer in taken:
                number += 1
                longer = f"{base}_{number}"
            taken.add(longer)
            name = longer
        names.append(name)
    return names


def _origin(function: RewardFunction) -> str:
    if isinstance(function.source, str):
        place = function.source.rpartition(":")[0]
        return Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
    return getattr(function.call, "__module__", "notebook").rpartition(".")[2]
