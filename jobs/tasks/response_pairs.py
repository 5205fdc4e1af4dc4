"""Preference pairs of a policy's own responses: those to one prompt, the one with the higher reward is preferred.

Reads the file of `rlfuse generate --score` or `rlfuse eval`. A prompt is in the training or in the held-out rows.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlfuse.errors import DataError
from rlfuse.files import read_rows

PER_PROMPT = 8
"""Maximum number of pairs per prompt, drawn at random."""
HELD_OUT_EVERY = 10
"""Every tenth prompt is held out."""
SEED = 1


def write_pairs(folder: Path, responses: Path) -> None:
    """Write `train.parquet` and `val.parquet` with `prompt`, `chosen`, `rejected`. DataError without pairs."""
    rng = np.random.default_rng(SEED)
    splits: dict[str, list[dict[str, Any]]] = {"train": [], "val": []}
    for number, (prompt, rewards) in enumerate(_responses(responses)):
        pairs = [pair for pair in itertools.permutations(rewards, 2) if rewards[pair[0]] > rewards[pair[1]]]
        for chosen, rejected in rng.permutation(pairs)[:PER_PROMPT].tolist():
            row = {"prompt": prompt, "chosen": _turn(chosen), "rejected": _turn(rejected)}
            splits["train" if number % HELD_OUT_EVERY else "val"].append(row)
    if not all(splits.values()):
        raise DataError(
            f"{responses}: responses to {HELD_OUT_EVERY + 1} or more prompts need different rewards. Generate several "
            "responses per prompt (rollout.val_kwargs.n, temperature) and score them (--score)"
        )
    for name, rows in splits.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")


def _responses(path: Path) -> list[tuple[Any, dict[str, float]]]:
    """Return each prompt with the rewards of its different responses, in the order of the file."""
    if not path.is_file():
        raise DataError(f"--from {path}: no such file; `rlfuse generate --score --out {path.name}` writes one")
    found: dict[str, tuple[Any, dict[str, float]]] = {}
    for row in read_rows(path):
        prompt = row["columns"].get("prompt")
        if prompt is None:
            raise DataError(f"{path}: rows have no column `prompt`, but {', '.join(row['columns'])}; rename it")
        _, rewards = found.setdefault(row["prompt"], (prompt, {}))
        if row["reward"] is not None:
            rewards[row["response"]] = row["reward"]
    return list(found.values())


def _turn(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]
