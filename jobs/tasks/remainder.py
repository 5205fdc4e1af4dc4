"""The quickstart's task: remainders by repeated subtraction, with responses as long as the quotient.

`47 mod 6 =` is answered by `47 - 6 = 41 , 41 - 6 = 35 , ... , 11 - 6 = 5 ; 5`. Quotients are log-normal, so lengths
have a long tail. A hash of the numbers assigns a problem to training or validation, so the two never share one.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

DATA_SOURCE = "remainder"
LARGEST_NUMBER = 99
DIVISORS = range(2, 10)
QUOTIENTS = range(1, 26)
"""25 subtractions are 152 tokens: the longest solution fits into 160."""
MEDIAN_QUOTIENT, QUOTIENT_SIGMA = 4.0, 0.9
"""Parameters of the log-normal: solutions have 26 tokens at the median, 140 at the 99th percentile."""
HELD_OUT_SHARE = 5
"""One in HELD_OUT_SHARE problems belongs to validation."""

_STEP = r"[0-9]+ - [0-9]+ = [0-9]+"
_SCRATCHPAD = re.compile(rf"(?:{_STEP}(?: , {_STEP})* )?; [0-9]+")


@dataclass(frozen=True, slots=True)
class Problem:
    """`dividend mod divisor`."""

    dividend: int
    divisor: int

    @property
    def prompt(self) -> str:
        return f"{self.dividend} mod {self.divisor} ="

    @property
    def answer(self) -> int:
        return self.dividend % self.divisor

    @property
    def quotient(self) -> int:
        return self.dividend // self.divisor

    @property
    def held_out(self) -> bool:
        digest = hashlib.blake2b(f"{self.dividend}/{self.divisor}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little") % HELD_OUT_SHARE == 0


def solution(dividend: int, divisor: int) -> str:
    """Return the worked solution, without the end-of-sequence token."""
    return write_steps(running_values(dividend, divisor), divisor)


def running_values(dividend: int, divisor: int) -> list[int]:
    """Return the dividend and the value after each subtraction, ending with the remainder."""
    return list(range(dividend, -1, -divisor))


def write_steps(values: list[int], divisor: int) -> str:
    """Return the scratchpad of `values`, with the last value as the answer."""
    steps = [f"{before} - {divisor} = {after}" for before, after in itertools.pairwise(values)]
    return " ".join(filter(None, [" , ".join(steps), f"; {values[-1]}"]))


def draw_problem(rng: np.random.Generator, held_out: bool) -> Problem:
    """Draw a problem of the split: a log-normal quotient, then a divisor that keeps the dividend in range."""
    while True:
        quotient = round(float(rng.lognormal(np.log(MEDIAN_QUOTIENT), QUOTIENT_SIGMA)))
        if quotient not in QUOTIENTS:
            continue
        largest = min(DIVISORS[-1], (LARGEST_NUMBER + 1) // (quotient + 1))
        divisor = int(rng.integers(DIVISORS[0], largest + 1))
        problem = Problem(quotient * divisor + int(rng.integers(divisor)), divisor)
        if problem.held_out == held_out:
            return problem


def draw_problems(count: int, seed: int, held_out: bool) -> list[Problem]:
    """Draw `count` problems of one split independently; duplicates are possible."""
    rng = np.random.default_rng((seed, int(held_out)))
    return [draw_problem(rng, held_out) for _ in range(count)]


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """Score an answer (verl's signature): `score` and `acc` are 1.0 if the text after its only `;` is the right number.

    `format` is 1.0 if the whole text is a scratchpad; it is logged, not rewarded. Texts with a second `;` score 0.0, so
    that listing several answers is not rewarded.
    """
    expected = str(ground_truth)
    if not re.fullmatch(r"[0-9]+", expected):
        raise ValueError(
            f"ground_truth: got {ground_truth!r} in a row of {data_source!r}; expected a non-negative "
            "integer of the remainder task. Use another reward function for other data."
        )
    text = solution_str.strip()
    _, separator, answer = text.partition(";")
    right = float(bool(separator) and answer.strip() == expected)
    return {"score": right, "acc": right, "format": float(_SCRATCHPAD.fullmatch(text) is not None)}


def verl_row(problem: Problem, index: int) -> dict[str, Any]:
    """Return the problem as a row in verl's format."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": problem.prompt}],
        "ability": "arithmetic",
        "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {
            "split": "val" if problem.held_out else "train",
            "index": index,
            "dividend": problem.dividend,
            "divisor": problem.divisor,
        },
    }


def write_parquet(folder: Path, train_rows: int, val_rows: int, seed: int) -> tuple[Path, Path]:
    """Write `train.parquet` and `val.parquet` into an existing folder; return their paths."""
    files = folder / "train.parquet", folder / "val.parquet"
    for file, count, held_out in zip(files, (train_rows, val_rows), (False, True), strict=True):
        problems = draw_problems(count, seed, held_out)
        rows = [verl_row(problem, index) for index, problem in enumerate(problems)]
        pq.write_table(pa.Table.from_pylist(rows), file)
    return files


def demonstration_row(problem: Problem) -> dict[str, Any]:
    """Return the problem with its worked solution, in TRL's conversational format."""
    return {
        "prompt": [{"role": "user", "content": problem.prompt}],
        "completion": [{"role": "assistant", "content": solution(problem.dividend, problem.divisor)}],
    }


def write_demonstrations(folder: Path, train_rows: int, val_rows: int, seed: int) -> None:
    """Write `train.parquet` and `val.parquet` of demonstrations into an existing folder."""
    for name, count, held_out in (("train", train_rows, False), ("val", val_rows, True)):
        rows = [demonstration_row(problem) for problem in draw_problems(count, seed + 2, held_out)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
