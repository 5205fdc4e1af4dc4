"""Load tokenised prompts, and draw batches in an order that depends only on seed and epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlfuse.config.schema import DataConfig
from rlfuse.data.clips import ClipReader
from rlfuse.data.messages import map_texts
from rlfuse.data.rows import DataRow, read_rows
from rlfuse.data.templates import apply_template, check_template, tokenize_prompt, with_bos
from rlfuse.errors import DataError, VideoError
from rlfuse.samples import Group, Prompt, Visual
from rlfuse.video.prompt import unescape_markers

SHOWN = 10


@dataclass(slots=True)
class LoadReport:
    """Counts of kept, dropped and unusable rows of the data files."""

    files: list[str]
    kept: int = 0
    dropped: int = 0
    truncated: int = 0
    limit: int = 0
    clips: int = 0
    images: int = 0
    unusable: list[str] = field(default_factory=list)

    def check(self, max_failure_rate: float) -> None:
        """Raise DataError if no row was kept, or if too many rows have unusable clips or images."""
        files, bad, rows = ", ".join(self.files), len(self.unusable), self.kept + self.dropped + len(self.unusable)
        if bad > max_failure_rate * rows:
            share = f"more than video.max_failure_rate={max_failure_rate}"
            problem = f"{files}: {bad} of {rows} rows have clips or images that can't be used, {share}"
        elif not self.kept:
            longer = f"{self.dropped} are longer than data.max_prompt_length={self.limit}, raise it"
            why = [f"{bad} have clips or images that can't be used"] * bool(bad) + [longer] * bool(self.dropped)
            problem = f"{files}: none of {rows} rows is usable: {'; '.join(why)}"
        else:
            return
        raise DataError("\n".join([problem + (":" if bad else "."), *self._shown()]))

    def _shown(self) -> list[str]:
        more = [f"  and {len(self.unusable) - SHOWN} more"] if len(self.unusable) > SHOWN else []
        return [*(f"  {line}" for line in self.unusable[:SHOWN]), *more]

    def __str__(self) -> str:
        counts = {"clips": self.clips, "images": self.images}
        notes = [f"{count} with {shown}" for shown, count in counts.items() if count]
        notes += [f"{self.dropped} dropped (over {self.limit} tokens)"] if self.dropped else []
        notes += [f"{self.truncated} truncated to {self.limit} tokens"] if self.truncated else []
        notes += [f"{len(self.unusable)} skipped for unusable clips or images:"] if self.unusable else []
        first = f"data  {self.kept} prompts from {', '.join(self.files)}" + "".join(f", {note}" for note in notes)
        return "\n".join([first, *self._shown()])


def load_prompts(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, data: DataConfig, clips: ClipReader | None = None
) -> tuple[list[Prompt], LoadReport]:
    """Read, template, tokenise and truncate rows. Rows with unusable clips are skipped.

    Raises DataError with file, row and field, or if more than `video.max_failure_rate` of the rows are unusable.
    """
    check_template(tokenizer, data)
    prompts: list[Prompt] = []
    report = LoadReport([str(file) for file in files], limit=data.max_prompt_length)
    for file in files:
        rows = read_rows(file, data.prompt_key, data.prompt_is_chat, data.media_root)
        if clips is not None:
            clips.probe_media(rows)
        for number, row in enumerate(rows):
            where = f"{file}, row {number}"
            try:
                text, ids, visual, spans = _assembled(row, tokenizer, data, where, clips)
            except VideoError as error:
                report.unusable.append(f"{where}: {error}")
                continue
            if not len(ids):
                raise DataError(f"{where}, field {data.prompt_key}: {text!r:.60} has no tokens. Remove the row.")
            if len(ids) > data.max_prompt_length:
                if data.filter_overlong_prompts:
                    report.dropped += 1
                    continue
                ids, visual = _fit(ids, visual, spans, data, where)
                report.truncated += 1
            index, source, messages = len(prompts), row.data_source, map_texts(unescape_markers, list(row.messages))
            columns = _columns(row, visual)
            prompts.append(Prompt(index, ids, text, tuple(messages), source, row.ground_truth, columns, tuple(visual)))
    report.kept = len(prompts)
    modalities = Counter(modality for prompt in prompts for modality in {each.plan.modality for each in prompt.visual})
    report.clips, report.images = modalities["video"], modalities["image"]
    report.check(clips.max_failure_rate if clips else 1.0)
    return prompts, report


def _assembled(
    row: DataRow, tokenizer: PreTrainedTokenizerBase, data: DataConfig, where: str, clips: ClipReader | None
) -> tuple[str, np.ndarray, list[Visual], list[tuple[int, int]]]:
    """Return text, ids, clips and images with positions, and their token spans; VideoError if one is unusable."""
    if clips is None and row.modalities:
        columns = " and ".join(f"{modality}s" for modality in sorted(row.modalities))
        why = f"model.path is a text-only model, which does not support {columns}"
        raise DataError(f"{where}, field {columns}: {why}. Remove the row, or use a vision-language model.")
    marked = apply_template(row, tokenizer, data, where)
    text, is_templated = unescape_markers(marked), row.is_chat and tokenizer.chat_template is not None
    if clips is not None:
        return text, *clips.assemble(row, marked if is_templated else with_bos(marked, tokenizer))
    ids = tokenize_prompt(text, tokenizer, is_templated)
    return text, np.asarray(ids, dtype=np.int32), [], []


def _columns(row: DataRow, visual: Sequence[Visual]) -> dict[str, Any]:
    columns = dict(row.columns)
    for kind, media in (("image", row.images), ("video", row.videos)):
        if not media:
            continue
        paths, single = [each.path for each in visual if each.plan.modality == kind], columns.get(kind)
        if kind == "image" or not columns.get("videos") or any(each.has_bytes for each in media):
            columns[f"{kind}s"] = paths
        if isinstance(single, dict | bytes | list):
            columns[kind] = paths if kind == "image" and isinstance(single, list) else paths[0]
    return columns


def _fit(
    ids: np.ndarray, visual: Sequence[Visual], spans: Sequence[tuple[int, int]], data: DataConfig, where: str
) -> tuple[np.ndarray, list[Visual]]:
    """Truncate the prompt by data.truncation; DataError if a clip or image (`spans`) would be cut."""
    limit, way, shown = data.max_prompt_length, data.truncation, sum(len(each.positions) for each in visual)
    head = {"left": 0, "right": limit, "middle": limit // 2}.get(way, limit)
    tail = len(ids) - (limit - head)
    intact = all(end <= head or first >= tail for first, end in spans)
    if way == "error" or not intact:
        never = f", and data.truncation={way} would cut through a clip or an image"
        fewer = f", use fewer or smaller frames (keys of video; {shown} of the tokens are visual)"
        truncated = ", or truncate them with data.truncation=left|right|middle"
        raise DataError(
            f"{where}: the prompt has {len(ids)} tokens, data.max_prompt_length is {limit}{never * (way != 'error')}. "
            f"Raise it{fewer * bool(shown)}, drop such rows with data.filter_overlong_prompts=true{truncated * intact}."
        )
    moved = [
        replace(each, positions=each.positions - (tail - head if first >= tail else 0))
        for each, (first, _) in zip(visual, spans, strict=True)
    ]
    return np.concatenate([ids[:head], ids[tail:]]), moved


class PromptSource:
    """Batches of prompts over epochs; an incomplete last batch of an epoch is dropped."""

    def __init__(self, prompts: Sequence[Prompt], batch_size: int, shuffle: bool, seed: int):
        if len(prompts) < batch_size:
            raise DataError(
                f"data.train_batch_size={batch_size} is more than the {len(prompts)} prompts of data.train_files. "
                "Lower it or add data."
            )
        self.prompts, self.batch_size, self.shuffle, self.seed = prompts, batch_size, shuffle, seed
        self.taken = 0

    @property
    def steps_per_epoch(self) -> int:
        return len(self.prompts) // self.batch_size

    @property
    def epoch(self) -> int:
        return self.taken // self.steps_per_epoch

    def next_batch(self) -> list[Prompt]:
        batch = self.upcoming()
        self.taken += 1
        return batch

    def upcoming(self) -> list[Prompt]:
        position = self.taken % self.steps_per_epoch
        order = np.arange(len(self.prompts))
        if self.shuffle:
            order = np.random.default_rng((self.seed, self.epoch)).permutation(len(self.prompts))
        return [self.prompts[i] for i in order[position * self.batch_size : (position + 1) * self.batch_size]]

    def update(self, groups: Sequence[Group]) -> None:
        """Receive the finished samples of a step; the built-in order does not depend on them."""

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]
