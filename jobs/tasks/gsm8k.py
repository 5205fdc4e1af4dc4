"""GSM8K as rows in verl's format: from the hub, from a local copy, or generated problems of the same form."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from operator import add, floordiv, mul, sub
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlfuse.data.rows import read_raw_rows
from rlfuse.errors import DataError, UserError

REPOSITORY = "openai/gsm8k"
SPLITS = ("train", "test")
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
"""Identical to verl's preprocessing script, so that results are comparable."""
PATIENCE_S = 10
GENERATED = {"train": 256, "test": 64}
TESTED_SHARE = 10
"""If a copy is a single file, every TESTED_SHARE-th row is a test row."""
SUFFIXES = (".parquet", ".jsonl", ".json")
_FINAL = re.compile(r"####\s*(-?[\d,]*\.?\d+)")
Pairs = Mapping[str, Sequence[tuple[str, str]]]


class HubUnreachable(UserError):
    """The hub does not respond, and there is no cached download."""


def write_rows(folder: Path, pairs: Pairs) -> None:
    """Write train.parquet and test.parquet into an existing folder."""
    for split in SPLITS:
        rows = [verl_row(question, answer, split, index) for index, (question, answer) in enumerate(pairs[split])]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")


def verl_row(question: str, answer: str, split: str, index: int) -> dict[str, Any]:
    """Return a problem in the format of verl's script."""
    return {
        "data_source": REPOSITORY,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": _FINAL.search(answer)[1].replace(",", "")},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def read_copy(source: Path) -> Pairs:
    """Read the rows of a clone of the hub's repository, or of one file. Raises DataError."""
    source = source.expanduser()
    if source.is_file():
        pairs = list(_pairs(source))
        if len(pairs) < 2:
            raise DataError(f"--from {source}: has {len(pairs)} rows; at least 2 are needed, for training and test.")
        return {"train": [pair for i, pair in enumerate(pairs) if i % TESTED_SHARE], "test": pairs[::TESTED_SHARE]}
    found = sorted(path for path in source.rglob("*") if path.suffix in SUFFIXES and "socratic" not in str(path))
    files = {split: [path for path in found if path.name.startswith(split)] for split in SPLITS}
    if not all(files.values()):
        seen = ", ".join(path.name for path in found[:8]) or (
            "none" if source.is_dir() else "the folder does not exist"
        )
        raise DataError(
            f"--from {source}: expected files named train* and test* ({', '.join(SUFFIXES)}), as in main/ of a clone "
            f"of {REPOSITORY}, or a single such file; found: {seen}."
        )
    return {split: [pair for path in paths for pair in _pairs(path)] for split, paths in files.items()}


def _pairs(file: Path) -> Iterator[tuple[str, str]]:
    for where, row in read_raw_rows(str(file)):
        question, answer = row.get("question"), row.get("answer")
        if not isinstance(question, str) or not isinstance(answer, str):
            raise DataError(
                f"{file}, {where}: has columns {', '.join(row)}; expected text columns question and answer. Rows in "
                f"verl's or TRL's format can be used directly: data.train_files=[{file}]."
            )
        if _FINAL.search(answer) is None:
            raise DataError(
                f"{file}, {where}, field answer: {answer[-60:]!r} does not end with a line such as `#### 42`."
            )
        yield question, answer


def download() -> Pairs:
    """Download the hub's rows, or read a cached download. Raises HubUnreachable."""
    from huggingface_hub import HfApi, hf_hub_download

    kept, reason = False, None
    try:
        HfApi().dataset_info(
            REPOSITORY, timeout=PATIENCE_S
        )  # fails faster than a download, which retries for half a minute
    except Exception as error:  # the client may raise errors of its network library
        kept, reason = True, error
    pairs = {}
    for split in SPLITS:
        name = f"main/{split}-00000-of-00001.parquet"
        try:
            file = hf_hub_download(REPOSITORY, name, repo_type="dataset", local_files_only=kept)
        except Exception as error:
            first = str(reason or error).strip().partition("\n")[0].partition(". ")[0]
            raise HubUnreachable(f"{REPOSITORY} can't be reached ({first})") from error
        pairs[split] = list(_pairs(Path(file)))
    return pairs


NAMES = ("Ada", "Boris", "Chen", "Dalia", "Emeka", "Farah", "Goran", "Hana")
KINDS = (
    (
        "{name} buys {a} pens at ${b} each and pays with $100. How many dollars does {name} get back?",
        {"a": range(2, 10), "b": range(2, 7)},
        (("The pens cost", "{a} * {b}"), ("{name} gets back", "100 - {0}")),
    ),
    (
        "{name} read {a} pages on Monday and half as many on Tuesday. How many pages did {name} read in all?",
        {"a": range(12, 80, 2)},
        (("On Tuesday it was", "{a} / 2"), ("In all it was", "{a} + {0}")),
    ),
    (
        "{name}'s hens lay {a} eggs a day. The family eats {b} of them and sells the rest at ${c} an egg. How many "
        "dollars does that make in a week?",
        {"a": range(9, 20), "b": range(1, 6), "c": range(2, 6)},
        (("Eggs sold each day:", "{a} - {b}"), ("Dollars a day:", "{0} * {c}"), ("Dollars a week:", "{1} * 7")),
    ),
    (
        "{name} has ${a}, saves ${b} a week for {c} weeks and then buys a book for ${d}. How many dollars are left?",
        {"a": range(10, 51), "b": range(5, 21), "c": range(3, 13), "d": range(8, 25)},
        (("Saved are", "{b} * {c}"), ("With the first ones it is", "{a} + {0}"), ("After the book it is", "{1} - {d}")),
    ),
)
"""Question, ranges of its numbers, and steps to the answer; `{0}` is the result of the first step."""
_OPERATIONS = {"+": add, "-": sub, "*": mul, "/": floordiv}


def generate_problems() -> Pairs:
    """Generate distinct problems of the same form; deterministic."""
    rng, pairs = np.random.default_rng(0), {}
    while len(pairs) < sum(GENERATED.values()):
        question, ranges, steps = KINDS[len(pairs) % len(KINDS)]
        known = {name: int(rng.choice(values)) for name, values in ranges.items()}
        known["name"] = NAMES[rng.integers(len(NAMES))]
        pairs[question.format(**known)] = _worked(steps, known)
    drawn = list(pairs.items())
    return {"train": drawn[: GENERATED["train"]], "test": drawn[GENERATED["train"] :]}


def _worked(steps: Sequence[tuple[str, str]], known: Mapping[str, Any]) -> str:
    values, lines = [], []
    for words, calculation in steps:
        formula = calculation.format(*values, **known)
        left, operation, right = formula.split()
        values.append(_OPERATIONS[operation](int(left), int(right)))
        lines.append(f"{words.format(**known)} {formula} = <<{formula.replace(' ', '')}={values[-1]}>>{values[-1]}.")
    return "\n".join([*lines, f"#### {values[-1]:,}"])
