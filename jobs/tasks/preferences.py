"""Preference pairs for the remainder task, labelled by a noisy Bradley-Terry labeller with a length bias.

Its log-odds are `certainty` for the right answer plus `per_step` for each additional subtraction: a length bias as in
Singhal et al. (arXiv 2310.03716) that a policy can exploit in a reward model.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlfuse.tasks.remainder import DATA_SOURCE, Problem, compute_score, draw_problems, running_values, write_steps
from rlfuse.tasks.settings import Labeller


def answers(problem: Problem, rng: np.random.Generator) -> tuple[str, str]:
    """Draw two different answers, each correct or with one kind of error."""
    writers = (_right, _stopped_early, _slipped, _wrong_end, _repeated)
    while True:
        first, second = rng.choice(len(writers), 2, p=(0.35, 0.35, 0.1, 0.1, 0.1))
        pair = writers[first](problem, rng), writers[second](problem, rng)
        if pair[0] != pair[1]:
            return pair


def prefers_first(problem: Problem, first: str, second: str, labeller: Labeller, rng: np.random.Generator) -> bool:
    """Return whether the labeller prefers the first answer."""
    odds = labeller.certainty * (truth(problem, first) - truth(problem, second))
    odds += labeller.per_step * (first.count("=") - second.count("="))
    return rng.random() < 1 / (1 + math.exp(-odds))


def preference_row(problem: Problem, labeller: Labeller, rng: np.random.Generator) -> dict[str, Any]:
    """Return a row in TRL's conversational format, plus the true scores, which training does not use."""
    pair = answers(problem, rng)
    chosen, rejected = pair if prefers_first(problem, *pair, labeller, rng) else pair[::-1]
    return {
        "prompt": [{"role": "user", "content": problem.prompt}],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
        "true_scores": [truth(problem, chosen), truth(problem, rejected)],
    } | ({"dimension": labeller.dimension} if labeller.dimension else {})


def write_preferences(folder: Path, *labellers: Labeller) -> None:
    """Write `train.parquet` and `val.parquet`, labeller by labeller."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, held_out in (("train", False), ("val", True)):
        rows: list[dict[str, Any]] = []
        for labeller in labellers:
            rng = np.random.default_rng((labeller.seed, held_out, 2))
            problems = draw_problems(labeller.val if held_out else labeller.train, labeller.seed + 1, held_out)
            rows += [preference_row(problem, labeller, rng) for problem in problems]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")


def truth(problem: Problem, answer: str) -> float:
    """Return the score of an answer by the task's reward function."""
    return compute_score(DATA_SOURCE, answer, problem.answer)["score"]


def _right(problem: Problem, rng: np.random.Generator) -> str:
    return write_steps(running_values(problem.dividend, problem.divisor), problem.divisor)


def _stopped_early(problem: Problem, rng: np.random.Generator) -> str:
    values = running_values(problem.dividend, problem.divisor)
    return write_steps(values[: max(1, len(values) - int(rng.integers(1, 3)))], problem.divisor)


def _slipped(problem: Problem, rng: np.random.Generator) -> str:
    values = running_values(problem.dividend, problem.divisor)
    place, off = int(rng.integers(1, len(values))), int(rng.integers(1, problem.divisor))
    begun, value = values[:place], values[place] + off
    return write_steps([*begun, *range(value, -1, -problem.divisor)], problem.divisor)


def _wrong_end(problem: Problem, rng: np.random.Generator) -> str:
    steps, _, answer = _right(problem, rng).rpartition(" ")
    return f"{steps} {(int(answer) + int(rng.integers(1, problem.divisor))) % problem.divisor}"


def _repeated(problem: Problem, rng: np.random.Generator) -> str:
    values, divisor = running_values(problem.dividend, problem.divisor), problem.divisor
    steps = [f"{before} - {divisor} = {after}" for before, after in itertools.pairwise(values)]
    again = int(rng.integers(len(steps))) if steps else 0
    steps[again : again + 2] = [step for step in steps[again : again + 2] for _ in range(2)]
    return f"{' , '.join(steps[:26])} ; {values[-1]}"
