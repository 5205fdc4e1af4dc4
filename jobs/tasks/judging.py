"""Train a small judge for the remainder task that reads `TEMPLATE` and answers `A` or `B`.

In a fraction `first` of its training pairs the better answer comes first, so it has a position bias when unsure.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from rlfuse.tasks.preferences import answers, truth
from rlfuse.tasks.remainder import draw_problem, draw_problems, verl_row
from rlfuse.tasks.settings import JudgeTraining, Rows, WarmStart
from rlfuse.tasks.vocabulary import build_tokenizer
from rlfuse.tasks.warm_start import build_model, demonstration, fit, one_thread_and_seed, with_progress

VERDICTS = (" A", " B")
TEMPLATE = "{prompt} {a} A {b} B ?"
"""Each label follows its answer, so that a small model can attend to the number right before it."""
REFERENCE = "reference"


def entry(model: str | Path) -> dict[str, Any]:
    """Return the judge as an entry of reward.functions."""
    kwargs = {"model": str(model), "template": TEMPLATE, "verdicts": list(VERDICTS), "reference": REFERENCE}
    return {"path": "judge", "kwargs": kwargs | {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_mb": 32}}


def compare_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return held-out rows with two answers, one of them right; `right` is 1.0 if it is `response`, not `reference`."""
    rng, rows = np.random.default_rng((seed, 3)), []
    while len(rows) < count:
        problem = draw_problem(rng, held_out=True)
        response, reference = answers(problem, rng)
        if (right := truth(problem, response)) != truth(problem, reference):
            rows.append(verl_row(problem, len(rows)) | {"response": response, REFERENCE: reference, "right": right})
    return rows


def write_rows(folder: Path, rows: Rows) -> None:
    """Write `train.parquet` and `val.parquet`: the task's rows with reference answers."""
    writer = WarmStart()
    for name, count, held_out in (("train", rows.train, False), ("val", rows.val, True)):
        rng = np.random.default_rng((rows.seed, held_out, 4))
        problems = draw_problems(count, rows.seed, held_out)
        table = [
            verl_row(problem, index) | {REFERENCE: demonstration(problem, rng, writer)}
            for index, problem in enumerate(problems)
        ]
        pq.write_table(pa.Table.from_pylist(table), folder / f"{name}.parquet")


def train_judge(folder: Path, settings: JudgeTraining) -> list[float]:
    """Train the judge and save it with its tokenizer to `folder`; return the loss of every step."""
    with one_thread_and_seed(settings.seed):
        tokenizer = build_tokenizer(("A", "B", "?"))
        sizes = WarmStart(hidden_size=settings.hidden_size, intermediate_size=settings.intermediate_size)
        model = build_model(sizes, tokenizer).train()
        verdicts = torch.tensor([tokenizer.convert_tokens_to_ids(verdict) for verdict in VERDICTS])
        following = _batches(settings, tokenizer)
        losses = fit(model.parameters(), lambda: _loss(model, verdicts, *next(following)), settings.lr, settings.steps)
        kept = with_progress(losses, settings.steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return kept


def _loss(
    model: Qwen2ForCausalLM, verdicts: torch.Tensor, ids: torch.Tensor, ends: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[torch.arange(len(ends)), ends]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden), verdicts[labels])


def _batches(
    settings: JudgeTraining, tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield (right-padded ids [rows, width], last index [rows], label [rows]) of similar lengths, endlessly."""
    rng = np.random.default_rng((settings.seed, 5))
    texts, labels = zip(*(_pair(settings, rng) for _ in range(settings.pairs)), strict=True)
    tokens = tokenizer(list(texts))["input_ids"]
    by_length = sorted(range(len(tokens)), key=lambda place: len(tokens[place]))
    cuts = [by_length[start : start + settings.batch] for start in range(0, len(tokens), settings.batch)]
    while True:
        for cut in rng.permutation(len(cuts)):
            rows = [torch.tensor(tokens[place]) for place in cuts[cut]]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
            ends = torch.tensor([len(row) - 1 for row in rows])
            yield ids, ends, torch.tensor([labels[place] for place in cuts[cut]])


def _pair(settings: JudgeTraining, rng: np.random.Generator) -> tuple[str, int]:
    """Return (judge prompt, label: 0 for A and 1 for B); ties are broken at random."""
    problem = draw_problem(rng, held_out=False)
    better, worse = answers(problem, rng)
    gap = truth(problem, better) - truth(problem, worse)
    if gap < 0 or (gap == 0 and rng.random() < 0.5):
        better, worse = worse, better
    label = int(rng.random() >= settings.first)
    a, b = (better, worse) if label == 0 else (worse, better)
    return f" {TEMPLATE.format(prompt=problem.prompt, a=a, b=b)}", label
