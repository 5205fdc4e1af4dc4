"""Read the token lengths of the rows that a job trains on: prompts, clips and images."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from rich.table import Table

from rlfuse.config.own_functions import replaced
from rlfuse.config.schema import Config
from rlfuse.errors import EngineError, UserError, VideoError
from rlfuse.planning.planned_job import unset
from rlfuse.planning.tables import table_of

NO_LIMIT = 1 << 31  # tokens of a prompt
ROWS = {"rl": "prompt", "reward_model": "sequence (prompt with one answer)"}
"""By trainer.task, what is as long as a limit allows."""


@dataclass(frozen=True, slots=True)
class DataLengths:
    """Tokens of all rows of data.train_files that can be used."""

    tokens: dict[str, list[int]]  # by what they are of: rows, clips, images; the rows come first
    report: str  # how many rows there are and which can't be used
    limit: int  # longest that a row may be
    is_dropped: bool  # whether longer rows are left out
    truncation: str

    @property
    def rows(self) -> list[int]:
        return next(iter(self.tokens.values()))

    @property
    def mean(self) -> int:
        """Tokens of a row as a run has it, at least 1."""
        kept = [min(each, self.limit) for each in self.rows if each <= self.limit or not self.is_dropped]
        return round(fmean(kept or [self.limit]))

    def table(self) -> Table:
        table = table_of("Data: tokens", "per", numbers=("mean", "maximum", "number"))
        for what, tokens in self.tokens.items():
            table.add_row(what, f"{fmean(tokens):,.1f}", f"{max(tokens):,}", f"{len(tokens):,}")
        return table

    def lines(self) -> Iterator[str]:
        """Yield what became of the rows, and what a run does with those that are too long."""
        yield self.report
        if longer := sum(each > self.limit for each in self.rows):
            stops = self.truncation == "error"
            does = f"data.truncation={self.truncation}: " + ("the run stops at the first" if stops else "they are cut")
            does = "data.filter_overlong_prompts=true: they are dropped" if self.is_dropped else does
            yield f"{longer:,} of {len(self.rows):,} rows are longer than {self.limit:,} tokens ({does})"


def prompt_tokens(config: Config, lengths: DataLengths | str) -> int:
    """Return the mean to plan for: that of the data, or half the limit where it is unknown."""
    known = isinstance(lengths, DataLengths) and config.trainer.task == "rl"
    return lengths.mean if known else -(-config.data.max_prompt_length // 2)


def read_lengths(config: Config) -> DataLengths | str:
    """Return the lengths of data.train_files, or why they are unknown: nothing where the job has none, or not here."""
    files = [] if "data.train_files" in unset(config) else config.data.train_files
    if not files or not all(Path(file).expanduser().exists() for file in files):
        return ""
    try:
        return _pairs(config) if config.trainer.task == "reward_model" else _prompts(config)
    except (UserError, EngineError, OSError, ValueError) as error:
        return " ".join(str(error).split())


def _prompts(config: Config) -> DataLengths:
    from transformers import AutoConfig  # seconds to import

    from rlfuse.data.clips import ClipReader
    from rlfuse.data.prompts import load_prompts
    from rlfuse.data.tokenizers import load_tokenizer
    from rlfuse.video.models.base import bring_along
    from rlfuse.video.video_model import VideoModel, usable_family

    bring_along(config.model.video_family)
    path, trusts, data = config.model.path, config.model.trust_remote_code, config.data
    tokenizer, is_folder = load_tokenizer(config.model), Path(path).expanduser().is_dir()
    if not is_folder and usable_family(AutoConfig.from_pretrained(path, trust_remote_code=trusts)):
        raise VideoError(f"model.path={path} is not on this machine", "Download the model to plan with its clips")
    model = VideoModel.at(path, trusts) if is_folder else None
    with TemporaryDirectory(prefix="rlfuse-plan-") as images:
        video, workers = replaced(config, {"video.max_failure_rate": 1.0}).video, len(os.sched_getaffinity(0))
        clips = ClipReader(model, video, tokenizer, workers, Path(images)) if model else None
        unlimited = replaced(config, {"data.max_prompt_length": NO_LIMIT}).data
        prompts, report = load_prompts(list(data.train_files), tokenizer, unlimited, clips)
    tokens = {ROWS["rl"]: [len(prompt.token_ids) for prompt in prompts]}
    for visual in (each for prompt in prompts for each in prompt.visual):
        tokens.setdefault("image" if visual.plan.still else "clip", []).append(visual.plan.tokens)
    return DataLengths(tokens, str(report), data.max_prompt_length, data.filter_overlong_prompts, data.truncation)


def _pairs(config: Config) -> DataLengths:
    from rlfuse.data.preferences import load_preferences
    from rlfuse.data.tokenizers import load_tokenizer

    data, unlimited = config.data, replaced(config, {"data.max_prompt_length": NO_LIMIT}).data
    pairs, report = load_preferences(list(data.train_files), load_tokenizer(config.model), unlimited)
    sides = [side for pair in pairs for side in (pair.chosen_ids, pair.rejected_ids)]
    shared = [len(pair.shared_ids) for pair in pairs for _ in range(2)]
    tokens = {ROWS["reward_model"]: [first + len(rest) for first, rest in zip(shared, sides, strict=True)]}
    limit = data.max_prompt_length + data.max_response_length
    return DataLengths(tokens, report, limit, data.filter_overlong_prompts, "error")
