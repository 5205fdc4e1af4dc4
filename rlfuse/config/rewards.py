"""Keys of the group `reward`, and parsing of reward.functions into `RewardEntry`s. Pure.

Training, evaluation and notebooks use `read_entries`, so all of them report the same problems.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlfuse.config.declare import RESOURCES, REWARD, ROUNDING, TOLERANCE, KeyGroup, key

MODEL_PART = "reward_model"
"""Path of the entry for reward.model_path, and the logged name of the model. Of a model with several labels, each has
an entry, `reward_model:LABEL`, and a name, `reward_model/LABEL`."""
JUDGE = "judge"
"""Path of an entry for a pairwise judge; its kwargs are those of `rlfuse.rewards.models.judge:Judge`."""


@dataclass
class RewardEntry:
    """An entry of reward.functions; a string is short for its `path`."""

    path: str = key(MISSING, REWARD)
    """`path/file.py:function`, `package.module:function`, the URL of a service (`http://...`), `judge`, `reward_model`,
    or `reward_model:LABEL` of a model with several labels."""
    name: str | None = key(None, REWARD)
    """Name used in logs; null: the name of the function."""
    weight: float | None = key(None, REWARD)
    """Weight in the summed reward; null: 1."""
    sources: list[str] = key([], REWARD)
    """data_source values that the function scores, with the wildcards `*` and `?`; empty: all."""
    gate: bool = key(False, REWARD)
    """Use the function as a gate, called before the others: if its value is not above 0, the reward is 0 and no other
    function is called. A gate is not added to the sum."""
    clip: list[float] | None = key(None, REWARD)
    """[low, high]: clip the values to this range; null: no clipping."""
    normalise: bool = key(False, REWARD)
    """Normalise the values by the mean and standard deviation of all earlier steps (in the first step, by its own)."""
    answer_only: bool | None = key(None, REWARD)
    """Score only the text after the reasoning (<think>...</think>), or an empty text if the reasoning does not end;
    null: true for models, judges and rlfuse's verifiers, otherwise false."""
    kwargs: dict[str, Any] = key({}, REWARD)
    """Additional keyword arguments of the function, or of the constructor of a judge, class or factory."""


@dataclass
class OverlongBuffer(KeyGroup):
    """Soft overlong penalty (DAPO) for responses near the length limit."""

    len: int = key(0, REWARD, at_least=0)
    """Length of the buffer before max_response_length in which the penalty grows, in tokens; 0 disables the penalty."""
    penalty_factor: float = key(1.0, REWARD, at_least=0)
    """Penalty at max_response_length."""


@dataclass
class RewardConfig(KeyGroup):
    """Reward functions, reward model and judges. The reward of a response is the weighted sum of all that apply to
    it."""

    functions: list[Any] = key([], REWARD, accepts_entry=True)
    """Reward functions: `path/file.py:function`, `package.module:function`, the URL of a service (http://...), or an
    entry with the keys below: {path: ..., weight: 0.5, sources: [math*]}. algorithm=distill needs none without
    data.val_files."""
    weights: list[float] = key([], REWARD)
    """Weights of the functions, in order and without gates (last, the weight of model_path if no entry names it);
    empty: the weights of the entries, or 1."""
    model_path: str | None = key(None, REWARD)
    """Sequence-classification reward model: Hugging Face folder or hub name. An entry of functions with the path
    `reward_model` sets its weight, sources, ...; `reward_model:LABEL` selects a label of a model with several. Video
    models score clips and images with model_backend=vllm."""
    model_head: str | None = key(None, REWARD, custom=True)
    """Custom pooling and head of the reward model: a torch.nn.Module, as `path/file.py:name`; null: the head of the
    checkpoint. Requires model_backend=hf."""
    model_head_kwargs: dict[str, Any] = key({}, REWARD)
    """Additional arguments of the head's constructor, by name."""
    model_backend: str = key("hf", ROUNDING, choices="hf (transformers) | vllm (vLLM pooling)")
    """Inference backend of the reward model; the scores are equal up to rounding."""
    model_dtype: str = key("float32", REWARD, choices="float32 | bfloat16 | float16")
    """Data type of the reward model's weights."""
    engine_kwargs: dict[str, Any] = key({}, RESOURCES)
    """Additional arguments of vLLM's EngineArgs for the reward model, by name (model_backend=vllm)."""
    device: str = key(
        "auto", RESOURCES, choices="auto (part of a slot's GPU if the slots have GPUs, else cpu) | cpu | cuda"
    )
    """Device of reward models and judges."""
    batch_items: int = key(32, RESOURCES, at_least=1)
    """Maximum batch size of a reward model or judge; samples of different calls are batched together."""
    batch_age_s: float = key(0.02, RESOURCES, unit="s", at_least=0)
    """Maximum time that an idle reward model or judge waits for more samples before it scores a batch."""
    num_workers: int = key(1, RESOURCES, at_least=1)
    """Number of processes that run reward functions."""
    timeout_s: float = key(30.0, RESOURCES, unit="s", above=0)
    """Timeout of one call of a reward function."""
    memory_mb: int | None = key(None, RESOURCES, unit="MiB", at_least=1)
    """Memory that a reward process may allocate after its functions are loaded; null: no limit."""
    max_failure_rate: float = key(0.1, TOLERANCE, at_least=0, at_most=1)
    """Maximum fraction of a step's samples whose reward failed; these are dropped, and above it the run stops."""
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
    """Return whether an entry's path is the URL of a service."""
    return isinstance(path, str) and path.startswith(("http://", "https://"))


def is_model(path: Any) -> bool:
    """Return whether an entry's path is the reward model, or one of its labels."""
    return isinstance(path, str) and path.partition(":")[0] == MODEL_PART


def names_code(path: Any) -> bool:
    """Return whether an entry's path names a function in a file or a module."""
    return not (is_model(path) or path == JUDGE or is_url(path))


def map_judge_paths(functions: Sequence[Any], place: Callable[[str], str | None]) -> list[Any]:
    """Return reward.functions with `place` applied to the model path of each judge."""

    def moved(given: Any) -> Any:
        kwargs = given.get("kwargs") if isinstance(given, dict) and given.get("path") == JUDGE else None
        if not isinstance(kwargs, dict) or not isinstance(kwargs.get("model"), str):
            return given
        return {**given, "kwargs": {**kwargs, "model": place(kwargs["model"])}}

    return [moved(given) for given in functions]


def read_entries(
    functions: Sequence[Given], weights: Sequence[float] = (), model_path: str | None = None, required: bool = True
) -> tuple[list[RewardEntry], list[str]]:
    """Return (entries with weights, problems). With problems, the entries are those that could be read.

    `required`: whether having no entry is a problem.
    """
    entries, problems = [], []
    for number, given in enumerate(functions):
        where = f"reward.functions[{number}]" if len(functions) > 1 else "reward.functions"
        entry, wrong = _read(given, where)
        problems += wrong
        if entry is not None:
            entries.append(entry)
            problems += [f"{where}{problem}" for problem in _judge(entry, model_path)]
    problems += _duplicates(entries)
    if model_path is not None and not any(is_model(entry.path) for entry in entries):
        entries.append(RewardEntry(MODEL_PART))
    if not functions and model_path is None:
        if required:
            problems.append(
                "reward.functions=[]: no reward; give at least one function, as "
                "reward.functions=[path/file.py:function], or reward.model_path"
            )
    elif not problems and all(entry.gate for entry in entries):
        problems.append("reward.functions: has only gates, which are not added to the reward; add another function")
    return (entries, problems) if problems else _weighted(entries, weights)


def _read(given: Given, where: str) -> tuple[RewardEntry | None, list[str]]:
    if isinstance(given, RewardEntry):
        return dataclasses.replace(given), []
    if not isinstance(given, dict):
        return RewardEntry(path=given), []  # an invalid path is rejected when it is loaded
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
    entry.path, entry.kwargs = "", {}
    kwargs = copy.deepcopy(given.get("kwargs", {}))  # already resolved; a template may have the characters ${
    return dataclasses.replace(OmegaConf.to_object(entry), path=given["path"], kwargs=kwargs), []


def _judge(entry: RewardEntry, model_path: str | None) -> list[str]:
    found = []
    if entry.weight is not None and not math.isfinite(entry.weight):
        found.append(f".weight={entry.weight}: must be a finite number")
    if entry.clip is not None and not (len(entry.clip) == 2 and -math.inf <= entry.clip[0] < entry.clip[1] <= math.inf):
        found.append(f".clip={entry.clip}: must be [low, high] with low below high")
    for name, value in (("weight", entry.weight), ("clip", entry.clip), ("normalise", entry.normalise or None)):
        if entry.gate and value is not None:
            found.append(f".{name}={value}: has no effect on a gate, which is not added to the reward; remove it")
    if is_model(entry.path) and model_path is None:
        found.append(f".path={entry.path}: there is no reward model; set reward.model_path to its folder or hub name")
    if entry.name and (is_model(entry.path) or entry.name.partition("/")[0] == MODEL_PART):
        found.append(
            f".name={entry.name}: the reward model is always named {MODEL_PART}, and nothing else is; remove it"
        )
    if entry.path == f"{MODEL_PART}:":
        found.append(f".path={entry.path}: names no label; write {MODEL_PART}:LABEL, or {MODEL_PART}")
    if entry.kwargs and (is_model(entry.path) or is_url(entry.path)):
        found.append(f".kwargs={entry.kwargs}: {entry.path} takes no arguments; remove it")
    if entry.path == JUDGE and not entry.kwargs.get("model"):
        found.append(f".kwargs={entry.kwargs}: a {JUDGE} needs a model; give kwargs: {{model: FOLDER_OR_HUB_NAME}}")
    if is_url(entry.path) and not _has_host(entry.path):
        found.append(f"={entry.path}: is not the URL of a service; write it as http://host:port/path")
    return found


def _has_host(url: str) -> bool:
    try:
        return bool(urlsplit(url).hostname) and urlsplit(url).port != 0
    except ValueError:
        return False


def _duplicates(entries: list[RewardEntry]) -> list[str]:
    names = [entry.name for entry in entries if entry.name]
    found = [f"reward.functions: two entries have the name {name}" for name in dict.fromkeys(names)
             if names.count(name) > 1]  # fmt: skip
    paths = [entry.path for entry in entries if is_model(entry.path)]
    return found + [f"reward.functions: {path} is listed twice; remove one" for path in dict.fromkeys(paths)
                    if paths.count(path) > 1]  # fmt: skip


def _weighted(entries: list[RewardEntry], weights: Sequence[float]) -> tuple[list[RewardEntry], list[str]]:
    summed = [entry for entry in entries if not entry.gate]
    if weights and len(weights) != len(summed):
        last = ", the last for the model" if entries and is_model(entries[-1].path) else ""
        of = f"one for each function that is not a gate{last}"
        return entries, [
            f"reward.weights={list(weights)}: has {len(weights)} entries but needs {len(summed)} ({of}), or none"
        ]
    if weights and any(entry.weight is not None for entry in summed):
        return entries, [f"reward.weights={list(weights)}: entries of reward.functions have weights too; remove one"]
    for entry, weight in zip(summed, weights or [None] * len(summed), strict=True):
        given = entry.weight if weight is None else weight
        if given is not None and not math.isfinite(given):
            return entries, [f"reward.weights={list(weights)}: {given} is not a finite number"]
        entry.weight = 1.0 if given is None else float(given)
    return entries, []
