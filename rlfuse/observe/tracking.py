"""Write rows of `metrics.jsonl`, `samples.jsonl` and the files of trainer.rollout_data_dir."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from rlfuse.files import RowFile, json_safe, parse_non_finite, read_rows, write_atomically
from rlfuse.observe.sink import part_columns
from rlfuse.samples import Prompt, Response, Reward, RewardFailure, Sample


class StepFile(RowFile):
    """File of JSON lines with a step each. A resume removes steps after the checkpoint, as they run again."""

    def __init__(self, path: Path, after: int):
        super().__init__(path, keep=lambda row: row["step"] <= after)

    def write(self, step: int, *rows: dict[str, Any]) -> None:
        self.append({"step": step, **json_safe(row)} for row in rows)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of `metrics.jsonl`, oldest first; empty if there is no file."""
    return [parse_non_finite(row) for row in read_rows(path)]


def last_validation(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the metric names of the last validation, which are those of all validations of the run."""
    validated = [row for row in rows if any(name.startswith("val-core/") for name in row)]
    return [name for name in validated[-1] if name.startswith("val-")] if validated else []


FAILURE_FIELDS = ("sample", "data_source", "function", "message", "traceback", "prompt", "response")
MAX_TEXT_CHARS = 20_000


def failure_row(sample: Sample, failure: RewardFailure) -> dict[str, str]:
    """Return a failed reward as a row: sample, function, message and traceback."""
    texts = (failure.function, failure.message, failure.traceback, sample.prompt.text, sample.response.text)
    values = (sample.id, sample.prompt.data_source, *(text[:MAX_TEXT_CHARS] for text in texts))
    return dict(zip(FAILURE_FIELDS, values, strict=True))


def write_failures(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """Append failures to `reward_failures.jsonl`."""
    with closing(RowFile(path)) as file:
        file.append(rows)


def sample_row(sample: Sample, contact_sheet: str | None = None) -> dict[str, Any]:
    """Return a finished sample as a row of `samples.jsonl` and of the wandb table.

    `contact_sheet`: path in the run folder of the picture of its clips. `token_rewards`: [token index, value] of those
    that are not 0. `columns` is the unchanged row of the data, so
    that another reward can score the sample later.
    """
    prompt, response, reward = sample.prompt, sample.response, sample.reward
    scored = isinstance(reward, Reward)
    return {
        "id": sample.id,
        "data_source": prompt.data_source,
        "prompt": prompt.text,
        "response": response.text,
        "finish": response.finish_reason,
        "prompt_tokens": len(prompt.token_ids),
        "response_tokens": response.length,
        "reward": reward.value if scored else None,
        "parts": reward.parts if scored else {},
        "pred": reward.pred if scored else None,
        "token_rewards": _nonzero(reward.token_rewards) if scored else None,
        "note": reward.text if scored else f"{reward.function}: {reward.message}" if reward else None,
        "ground_truth": prompt.ground_truth,
        "columns": prompt.columns,
        "contact_sheet": contact_sheet,
    }


def verl_row(step: int, sample: Sample) -> dict[str, Any]:
    """Return a finished sample as a row of trainer.rollout_data_dir and trainer.validation_data_dir, as verl names it.

    Reward parts follow under the names of `part_columns`.
    """
    prompt, reward = sample.prompt, sample.reward
    score, parts = (reward.value, reward.parts) if isinstance(reward, Reward) else (None, {})
    row = {
        "input": prompt.text,
        "output": sample.response.text,
        "gts": prompt.ground_truth,
        "score": score,
        "step": step,
    }
    return row | {column: parts[part] for part, column in part_columns([{"parts": parts}], [*row]).items()}


def write_step(folder: Path, step: int, samples: Sequence[Sample]) -> None:
    """Write the samples of a step to {step}.jsonl in `folder`, which a resumed run replaces."""
    rows = (json.dumps(json_safe(verl_row(step, sample)), default=str) for sample in samples)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{step}.jsonl", "".join(f"{row}\n" for row in rows))


def _nonzero(token_rewards: Sequence[float] | None) -> list[list[float]] | None:
    return token_rewards and [[index, value] for index, value in enumerate(token_rewards) if value]


def sample_of_row(row: dict[str, Any], prompt_key: str = "prompt") -> Sample:
    """Return the sample of a row of `samples.jsonl`, without tokens and reward; enough for reward functions.

    `prompt_key`: `data.prompt_key` of the run.
    """
    step, index, sibling = map(int, row["id"].split("/"))
    columns, nothing = row.get("columns") or {}, np.empty(0, np.int32)
    given = columns.get(prompt_key) or row["prompt"]
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    prompt = Prompt(index, nothing, row["prompt"], tuple(messages), row["data_source"], row["ground_truth"], columns)
    response = Response(nothing, np.empty(0, np.float32), row["finish"], step - 1, row["response"])
    return Sample(prompt, step, sibling, 0, response)
