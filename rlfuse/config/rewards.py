"""Keys of the group `reward`, and the entries of reward.functions parsed into `RewardEntry`. Pure.

Training, evaluation and notebooks use `read_entries`, so all of them report the same problems.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlfuse.config.declare import RESOURCES, REWARD, ROUNDING, TOLERANCE, key

MODEL_PART = "reward_model"
"""The path of the entry that stands for reward.model_path, and the model's name among the parts. Of a model with
several labels each is an entry, `reward_model:LABEL`, and a part, `reward_model/LABEL`."""
JUDGE = "judge"
"""The path of an entry that is a pairwise judge; its kwargs are those of `rlfuse.rewards.models.judge:Judge`."""


@dataclass
class RewardEntry:
    """An entry of reward.functions in full; a bare string is its `path`."""

    path: str = key(MISSING, REWARD)
    """`path/file.py:function`, `package.module:function`, `http://...` of a service, `judge`, or `reward_model`: of a
    model with several labels one of them, `reward_model:LABEL`."""
    name: str | None = key(None, REWARD)
    """Name under which it is logged; null: the function's name."""
    weight: float | None = key(None, REWARD)
    """Its weight in the sum; null: 1."""
    sources: list[str] = key([], REWARD)
    """The data_source values that it scores, with `*` and `?` as wildcards; empty: all."""
    gate: bool = key(False, REWARD)
    """Called before all others: where its value is not above 0, the reward is 0 and no later function is called. It
    adds nothing to the sum."""
    clip: list[float] | None = key(None, REWARD)
    """[low, high]: its values are clipped to this range."""
    normalise: bool = key(False, REWARD)
    """Train on (value - mean) / deviation, both over all values of earlier steps (of the first step: over its own)."""
    answer_only: bool | None = key(None, REWARD)
    """Score only the text after the thought (<think>...</think>), and nothing if the thought has no end; null: true for
    models, judges and rlfuse's verifiers, else false."""
    kwargs: dict[str, Any] = key({}, REWARD)
    """Further arguments of the function; of a judge, a class or a factory, those of its constructor."""


@dataclass
class OverlongBuffer:
    """DAPO's soft penalty for responses near the length limit."""

    len: int = key(0, REWARD, at_least=0)
    """Tokens before max_response_length where the penalty begins; 0 turns it off."""
    penalty_factor: float = key(1.0, REWARD, at_least=0)
    """Penalty at the limit."""


@dataclass
class RewardConfig:
    """What scores a response. Everything that applies to it is summed with its weight."""

    functions: list[Any] = key([], REWARD, accepts_entry=True)
    """`path/file.py:function`, `package.module:function`, the URL of a service (http://...), or an entry with the keys
    below: {path: ..., weight: 0.5, sources: [math*]}."""
    weights: list[float] = key([], REWARD)
    """One weight for each function that is no gate (and last for model_path, if no entry names it); empty: 1 each, or
    those of the entries."""
    model_path: str | None = key(None, REWARD)
    """Sequence-classification reward model: Hugging Face folder or hub name; a video model with such a head sees clips
    and images (model_backend=vllm). The path `reward_model` in functions gives it a weight, sources, ...; without such
    an entry it comes last. Functions name the labels that count if it has several, `reward_model:LABEL`."""
    model_backend: str = key("hf", ROUNDING, choices="hf (transformers) | vllm (its pooling)")
    """Backend of the model, with the same scores up to rounding."""
    model_dtype: str = key("float32", REWARD, choices="float32 | bfloat16 | float16")
    """Type of its weights."""
    engine_kwargs: dict[str, Any] = key({}, RESOURCES)
    """Further arguments of vLLM's EngineArgs for it, by name (model_backend=vllm)."""
    device: str = key("auto", RESOURCES, choices="auto (a share of a slot's GPU, where there are GPUs) | cpu | cuda")
    """Where models and judges run."""
    batch_items: int = key(32, RESOURCES, at_least=1)
    """Largest number of samples that a model or judge scores at once; samples of different calls are batched."""
    batch_age_s: float = key(0.02, RESOURCES, unit="s", at_least=0)
    """Longest time that an idle model waits for more samples."""
    num_workers: int = key(1, RESOURCES, at_least=1)
    """Processes that run reward functions."""
    timeout_s: float = key(30.0, RESOURCES, unit="s", above=0)
    """Longest time that one call of a reward function may take."""
    memory_mb: int | None = key(None, RESOURCES, unit="MiB", at_least=1)
    """Memory that a process may allocate beyond what it has when its functions are loaded; null: no limit."""
    max_failure_rate: float = key(0.1, TOLERANCE, at_least=0, at_most=1)
    """Failed samples are dropped; above this share of a step's samples the run stops."""
    overlong_buffer: OverlongBuffer = field(default_factory=OverlongBuffer)


KEYS = tuple(field.name for field in dataclasses.fields(RewardEntry))
NEEDS = {
    "name": "a text",
    "weight": "a number",
    "sources": "a list of data_source values",
    "clip": "a list of two numbers, [low, high]",
    "kwargs": "a dictionary of arguments",
}

Given = str | dict[str, Any] | Callable[..., Any] | RewardEntry


def is_url(path: Any) -> bool:
    """Whether an entry's path is that of a service."""
    return isinstance(path, str) and path.startswith(("http://", "https://"))


def is_model(path: Any) -> bool:
    """Whether an entry's path is the reward model, or one of its labels."""
    return isinstance(path, str) and path.partition(":")[0] == MODEL_PART


def names_code(path: Any) -> bool:
    """Whether an entry's path is that of a function in a file or a module."""
    return not (is_model(path) or path == JUDGE or is_url(path))


def map_judge_paths(functions: Sequence[Any], place: Callable[[str], str | None]) -> list[Any]:
    """reward.functions with `place` of each judge's model in place of it."""

    def moved(given: Any) -> Any:
        kwargs = given.get("kwargs") if isinstance(given, dict) and given.get("path") == JUDGE else None
        if not isinstance(kwargs, dict) or not isinstance(kwargs.get("model"), str):
            return given
        return {**given, "kwargs": {**kwargs, "model": place(kwargs["model"])}}

    return [moved(given) for given in functions]


def read_entries(
    functions: Sequence[Given], weights: Sequence[float] = (), model_path: str | None = None
) -> tuple[list[RewardEntry], list[str]]:
    """(entries with weights, problems); the entries of a list with problems are those that could be read."""
    entries, problems = [], []
    for number, given in enumerate(functions):
        where = f"reward.functions[{number}]" if len(functions) > 1 else "reward.functions"
        entry, wrong = _read(given, where)
        problems += wrong
        if entry is not None:
            entries.append(entry)
            problems += [f"{where}{problem}" for problem in _judge(entry, model_path)]
    problems += _together(entries)
    if model_path is not None and not any(is_model(entry.path) for entry in entries):
        entries.append(RewardEntry(MODEL_PART))
    if not functions and model_path is None:
        problems.append(
            "reward.functions=[]: nothing scores the responses; give at least one function, as "
            "reward.functions=[path/file.py:function], or reward.model_path"
        )
    elif not problems and all(entry.gate for entry in entries):
        problems.append("reward.functions: has gates only, which add nothing to the reward; add a function to score by")
    return (entries, problems) if problems else _weighted(entries, weights)


def _read(given: Given, where: str) -> tuple[RewardEntry | None, list[str]]:
    if isinstance(given, RewardEntry):
        return dataclasses.replace(given), []
    if not isinstance(given, dict):
        return RewardEntry(path=given), []  # what is no path either is refused when it is loaded
    problems, entry = [], OmegaConf.structured(RewardEntry)
    for name, value in given.items():
        if name not in KEYS:
            near = difflib.get_close_matches(str(name), KEYS, n=1)
            meant = f"did you mean {near[0]}?" if near else f"keys: {', '.join(KEYS)}"
            problems.append(f"{where}.{name}: unknown key of an entry; {meant}")
        elif name != "path":
            try:
                OmegaConf.update(entry, name, value)
            except (OmegaConfBaseException, ValueError):
                problems.append(f"{where}.{name}={value}: needs {NEEDS.get(name, 'true or false')}")
    if "path" not in given:
        problems.append(f"{where}: an entry needs a path: path/to/file.py:function, a URL, {JUDGE} or {MODEL_PART}")
    if problems:
        return None, problems
    entry.path = ""
    return dataclasses.replace(OmegaConf.to_object(entry), path=given["path"]), []


def _judge(entry: RewardEntry, model_path: str | None) -> list[str]:
    found = []
    if entry.weight is not None and not math.isfinite(entry.weight):
        found.append(f".weight={entry.weight}: must be a finite number")
    if entry.clip is not None and not (len(entry.clip) == 2 and -math.inf <= entry.clip[0] < entry.clip[1] <= math.inf):
        found.append(f".clip={entry.clip}: must be [low, high] with low below high")
    for name, value in (("weight", entry.weight), ("clip", entry.clip), ("normalise", entry.normalise or None)):
        if entry.gate and value is not None:
            found.append(f".{name}={value}: has no effect on a gate, which adds nothing to the reward; leave it out")
    if is_model(entry.path) and model_path is None:
        found.append(f".path={entry.path}: there is no model; give its folder or hub name as reward.model_path")
    if entry.name and (is_model(entry.path) or entry.name.partition("/")[0] == MODEL_PART):
        found.append(f".name={entry.name}: only the model is called {MODEL_PART}, and nothing else; leave it out")
    if entry.path == f"{MODEL_PART}:":
        found.append(f".path={entry.path}: names no label; write {MODEL_PART}:LABEL, or {MODEL_PART}")
    if entry.kwargs and (is_model(entry.path) or is_url(entry.path)):
        found.append(f".kwargs={entry.kwargs}: only functions take arguments, {entry.path} does not; leave it out")
    if entry.path == JUDGE and not entry.kwargs.get("model"):
        found.append(f".kwargs={entry.kwargs}: a {JUDGE} needs its model; give kwargs: {{model: FOLDER_OR_HUB_NAME}}")
    if is_url(entry.path) and not _has_host(entry.path):
        found.append(f"={entry.path}: is no URL of a service; write it as http://host:port/path")
    return found


def _has_host(url: str) -> bool:
    try:
        return bool(urlsplit(url).hostname) and urlsplit(url).port != 0
    except ValueError:
        return False


def _together(entries: list[RewardEntry]) -> list[str]:
    names = [entry.name for entry in entries if entry.name]
    found = [f"reward.functions: two entries have the name {name}" for name in dict.fromkeys(names)
             if names.count(name) > 1]  # fmt: skip
    asked = [entry.path for entry in entries if is_model(entry.path)]
    return found + [f"reward.functions: {path} stands there twice; there is one model" for path in dict.fromkeys(asked)
                    if asked.count(path) > 1]  # fmt: skip


def _weighted(entries: list[RewardEntry], weights: Sequence[float]) -> tuple[list[RewardEntry], list[str]]:
    summed = [entry for entry in entries if not entry.gate]
    if weights and len(weights) != len(summed):
        last = ", the last for the model" if entries and is_model(entries[-1].path) else ""
        of = f"one for each function that is no gate{last}"
        return entries, [
            f"reward.weights={list(weights)}: has {len(weights)} entries, must have {len(summed)} ({of}); or be empty"
        ]
    if weights and any(entry.weight is not None for entry in summed):
        return entries, [f"reward.weights={list(weights)}: entries of reward.functions have weights too; give one"]
    for entry, weight in zip(summed, weights or [None] * len(summed), strict=True):
        given = entry.weight if weight is None else weight
        if given is not None and not math.isfinite(given):
            return entries, [f"reward.weights={list(weights)}: {given} is no finite number"]
        entry.weight = 1.0 if given is None else float(given)
    return entries, []
