"""Complete a job for planning, measure the token lengths of its data, and write the job file of a plan."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from rich.table import Table

from rlfuse.config.checks import value_of
from rlfuse.config.custom_functions import traits_of, with_values
from rlfuse.config.documentation import keys
from rlfuse.config.facts import Facts, missing_for_run, planning_facts
from rlfuse.config.prepared import command_for
from rlfuse.config.schema import Config
from rlfuse.config.trainer import TrainerConfig
from rlfuse.errors import EngineError, UserError, VideoError
from rlfuse.files import write_atomically
from rlfuse.progress import Console
from rlfuse.tools.planning.tables import table_of

PLACEHOLDERS = {"data.train_files": ["train.parquet"], "reward.functions": ["rlfuse.rewards.verifiers.exact:score"]}
"""Placeholders for required keys that a plan does not need; the user replaces them before a run."""


def with_placeholders(given: DictConfig) -> DictConfig:
    """Fill required keys that a plan does not need with PLACEHOLDERS, in place."""
    is_offline = given.trainer.task != TrainerConfig.task
    needs_reward = (
        not (is_offline or given.reward.model_path) and traits_of(given.algorithm.adv_estimator).needs_rewards
    )
    for key, value in PLACEHOLDERS.items():
        if not OmegaConf.select(given, key) and (needs_reward or key != "reward.functions"):
            OmegaConf.update(given, key, value)
    return given


def without_unresolvable_arguments(given: DictConfig) -> DictConfig:
    """Return a copy without reward function arguments that only the run's machine can resolve (secrets)."""
    job = deepcopy(given)
    for entry in job.reward.functions:
        if isinstance(entry, DictConfig) and isinstance(entry.get("kwargs"), DictConfig):
            for name in [name for name in entry.kwargs if not _resolves(entry.kwargs, name)]:
                with open_dict(entry.kwargs):
                    del entry.kwargs[name]
    return job


def _resolves(kwargs: DictConfig, name: str) -> bool:
    try:
        OmegaConf.resolve(OmegaConf.create({name: kwargs[name]}))
    except OmegaConfBaseException:
        return False
    return True


def facts_for_device(config: Config, device: str) -> Facts:
    """Return the facts that a plan uses: the device, and of a model only its config.json."""
    found = planning_facts(config)
    enough = "a plan only needs a folder with the model's config.json"
    wrong = {key: f"{why}; {enough}" for key, why in found.model_problems.items()}
    return replace(found, model_problems=wrong, cuda={"cuda": True, "cpu": False}.get(device))


def unset_keys(config: Config) -> list[str]:
    """Return the keys that still have placeholders."""
    return [key for key, value in PLACEHOLDERS.items() if value_of(config, key) == value]


def missing_inputs(config: Config) -> Iterator[str]:
    """Yield a line for unset keys and one for missing files that the run needs and the plan does not."""
    if keys_ := unset_keys(config):
        yield f"not set, required for the run: {', '.join(keys_)}"
    stand_ins = {str(each) for key in unset_keys(config) for each in PLACEHOLDERS[key]}
    if missing := [path for path in missing_for_run(config) if path not in stand_ins]:
        command = next(filter(None, map(command_for, missing)), None)
        yield f"not found here, required for the run: {', '.join(missing)}" + (f": `{command}`" if command else "")


def over_limit_options(config: Config, prompt_tokens: float | None, response_tokens: float | None) -> Iterator[str]:
    """Yield an error for each mean length option above the limit of the job."""
    for name, mean in (("prompt", prompt_tokens), ("response", response_tokens)):
        limit = getattr(config.data, f"max_{name}_length")
        if mean is not None and mean > limit:
            yield f"--{name}-tokens {mean:g}: exceeds data.max_{name}_length={limit}; raise the key or lower this"


def changed_settings(given: DictConfig, settings: Mapping[str, object]) -> list[tuple[str, object]]:
    """Return the settings that differ from the job."""
    return [(key, value) for key, value in settings.items() if OmegaConf.select(given, key) != value]


def write_job(path: Path, given: DictConfig, settings: Mapping[str, object], planned: Config, console: Console) -> None:
    """Write a job file with every key that differs from its default; references of the job are kept."""
    written, as_given = OmegaConf.create(), OmegaConf.to_container(given)  # unresolved
    for key in keys():
        if key.required or value_of(planned, key.name) != key.default:
            OmegaConf.update(
                written,
                key.name,
                settings.get(key.name, reduce(getitem, key.name.split("."), as_given)),
                force_add=True,
            )
    read = OmegaConf.to_object(without_unresolvable_arguments(OmegaConf.merge(OmegaConf.structured(Config), written)))
    for key in keys():  # replace references to keys that the plan changes
        if value_of(read, key.name) != value_of(planned, key.name):
            OmegaConf.update(written, key.name, value_of(planned, key.name), force_add=True)
    open_keys = ", ".join(unset_keys(planned))
    heading = "# Written by `rlfuse plan --search`.\n" + (
        f"# Placeholders to replace: {open_keys}.\n" if open_keys else ""
    )
    write_atomically(path, heading + OmegaConf.to_yaml(written))
    console.print(f"job file: {path}; `rlfuse plan {path}`, `rlfuse train {path}`", soft_wrap=True)
    if open_keys:
        console.print(f"  replace the placeholders in it: {open_keys}", soft_wrap=True)


NO_LIMIT = 1 << 31  # prompt tokens
PAIR_ROWS = "sequence (prompt with one answer)"
ROWS = {"rl": "prompt", "sft": "demonstration", "dpo": PAIR_ROWS, "reward_model": PAIR_ROWS}
"""trainer.task -> the unit that the length limits apply to."""


@dataclass(frozen=True, slots=True)
class DataLengths:
    """Token counts of all usable rows of data.train_files."""

    tokens: dict[str, list[int]]  # unit (rows, clips, images) -> tokens of each; rows come first
    report: str  # number of rows, and of unusable ones
    limit: int  # maximum tokens of a row
    is_dropped: bool  # True if longer rows are dropped
    truncation: str

    @property
    def rows(self) -> list[int]:
        return next(iter(self.tokens.values()))

    @property
    def mean(self) -> int:
        """Return the mean tokens of a row after dropping or truncation."""
        kept = [min(each, self.limit) for each in self.rows if each <= self.limit or not self.is_dropped]
        return round(fmean(kept or [self.limit]))

    def table(self) -> Table:
        table = table_of("Data: tokens", "unit", numbers=("mean", "maximum", "count"))
        for what, tokens in self.tokens.items():
            table.add_row(what, f"{fmean(tokens):,.1f}", f"{max(tokens):,}", f"{len(tokens):,}")
        return table

    def lines(self) -> Iterator[str]:
        """Yield the loading report, and how a run treats overlong rows."""
        yield self.report
        if longer := sum(each > self.limit for each in self.rows):
            stops = self.truncation == "error"
            does = f"data.truncation={self.truncation}: " + (
                "the run fails on the first" if stops else "they are truncated"
            )
            does = "data.filter_overlong_prompts=true: they are dropped" if self.is_dropped else does
            yield f"{longer:,} of {len(self.rows):,} rows exceed {self.limit:,} tokens ({does})"


def prompt_tokens(config: Config, lengths: DataLengths | str) -> int:
    """Return the mean prompt length to plan for: that of the data if known, else half the limit."""
    known = isinstance(lengths, DataLengths) and not config.trainer.is_offline
    return lengths.mean if known else -(-config.data.max_prompt_length // 2)


def read_lengths(config: Config) -> DataLengths | str:
    """Return the lengths of data.train_files, or the reason why they are unknown; "" if the files are not here."""
    files = [] if "data.train_files" in unset_keys(config) else config.data.train_files
    if not files or not all(Path(file).expanduser().exists() for file in files):
        return ""
    try:
        return {"rl": _prompts, "sft": _demonstrations}.get(config.trainer.task, _pairs)(config)
    except (UserError, EngineError, OSError, ValueError) as error:
        return " ".join(str(error).split())


def _prompts(config: Config) -> DataLengths:
    from transformers import AutoConfig  # seconds to import

    from rlfuse.data.clips import ClipReader
    from rlfuse.data.prompts import load_prompts
    from rlfuse.data.tokenizers import load_tokenizer
    from rlfuse.video.models.base import register_custom_family
    from rlfuse.video.video_model import VideoModel, supported_family

    register_custom_family(config.model.video_family)
    path, trusts, data = config.model.path, config.model.trust_remote_code, config.data
    tokenizer, is_folder = load_tokenizer(config.model), Path(path).expanduser().is_dir()
    if not is_folder and supported_family(AutoConfig.from_pretrained(path, trust_remote_code=trusts)):
        raise VideoError(
            f"model.path={path} is not on this machine", "Download the model to include its clips in the plan"
        )
    model = VideoModel.from_pretrained(path, trusts) if is_folder else None
    with TemporaryDirectory(prefix="rlfuse-plan-") as images:
        video, workers = with_values(config, {"video.max_failure_rate": 1.0}).video, len(os.sched_getaffinity(0))
        clips = ClipReader(model, video, tokenizer, workers, Path(images)) if model else None
        unlimited = with_values(config, {"data.max_prompt_length": NO_LIMIT}).data
        prompts, report = load_prompts(list(data.train_files), tokenizer, unlimited, clips)
    tokens = {ROWS["rl"]: [len(prompt.token_ids) for prompt in prompts]}
    for visual in (each for prompt in prompts for each in prompt.visual):
        tokens.setdefault("image" if visual.plan.is_image else "clip", []).append(visual.plan.tokens)
    return DataLengths(tokens, str(report), data.max_prompt_length, data.filter_overlong_prompts, data.truncation)


def _demonstrations(config: Config) -> DataLengths:
    from rlfuse.data.demonstrations import load_demonstrations
    from rlfuse.data.tokenizers import load_tokenizer

    data, unlimited = config.data, with_values(config, {"data.max_prompt_length": NO_LIMIT}).data
    found, report = load_demonstrations(list(data.train_files), load_tokenizer(config.model), unlimited)
    limit = data.max_prompt_length + data.max_response_length
    tokens = {ROWS["sft"]: [len(each.ids) for each in found]}
    return DataLengths(tokens, report, limit, data.filter_overlong_prompts, "error")


def _pairs(config: Config) -> DataLengths:
    from rlfuse.data.preferences import load_policy_preferences, load_preferences
    from rlfuse.data.tokenizers import load_tokenizer

    data, unlimited = config.data, with_values(config, {"data.max_prompt_length": NO_LIMIT}).data
    load = load_policy_preferences if config.trainer.task == "dpo" else load_preferences
    pairs, report = load(list(data.train_files), load_tokenizer(config.model), unlimited)
    sides = [side for pair in pairs for side in (pair.chosen_ids, pair.rejected_ids)]
    shared = [len(pair.shared_ids) for pair in pairs for _ in range(2)]
    tokens = {PAIR_ROWS: [first + len(rest) for first, rest in zip(shared, sides, strict=True)]}
    limit = data.max_prompt_length + data.max_response_length
    return DataLengths(tokens, report, limit, data.filter_overlong_prompts, "error")
