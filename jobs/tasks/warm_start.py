"""Train the quickstart's starting policy on imperfect demonstrations, in seconds on one core.

Demonstrations often stop one subtraction early, so the policy knows format and arithmetic but solves about a third of
the problems, with the right token among its two likeliest. Weights are a function of `WarmStart` and `VERSION`.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress, TextColumn
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rlfuse.tasks.remainder import LARGEST_NUMBER, Problem, draw_problem, write_steps
from rlfuse.tasks.settings import WarmStart
from rlfuse.tasks.vocabulary import build_tokenizer

IGNORED = -100


def fit(
    parameters: Iterable[torch.nn.Parameter], loss_of_next: Callable[[], torch.Tensor], lr: float, steps: int
) -> Iterator[tuple[int, float]]:
    """Train with AdamW, a short warm-up and cosine decay; yield (steps done, loss) after every step."""
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), fused=True)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=max(1, steps // 20))
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for done in range(1, steps + 1):
        loss = loss_of_next()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        warm_up.step()
        cosine.step()
        yield done, loss.item()


@contextlib.contextmanager
def one_thread_and_seed(seed: int) -> Iterator[None]:
    """Use one core and a seeded random generator in the context; restore both afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def with_progress(losses: Iterable[tuple[int, float]], steps: int) -> list[float]:
    """Run the steps with a progress bar (ten lines without a terminal); return the losses."""
    started, kept = time.monotonic(), []
    columns = (*Progress.get_default_columns(), TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, disable=not sys.stdout.isatty()) as progress:
        bar = progress.add_task("warm start", total=steps, loss=float("nan"))
        for done, loss in losses:
            kept.append(loss)
            recent = sum(kept[-20:]) / len(kept[-20:])
            progress.update(bar, completed=done, loss=recent)
            if progress.disable and done % max(1, steps // 10) == 0:
                seconds = time.monotonic() - started
                print(f"warm start  {done}/{steps} steps  loss {recent:.3f}  {seconds:.0f} s", flush=True)
    return kept


def demonstration(problem: Problem, rng: np.random.Generator, settings: WarmStart) -> str:
    """Write a demonstration that may stop early; a little less than half are right."""
    values, value = [problem.dividend], problem.dividend
    large = problem.divisor >= settings.large_divisor
    stop_early = rng.random() < (settings.stop_early_large if large else settings.stop_early_small)
    while value >= problem.divisor * (2 if stop_early else 1):
        value -= problem.divisor
        values.append(value)
    return write_steps(values, problem.divisor)


def build_model(settings: WarmStart, tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Build the untrained model from torch's current random state."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.hidden_size // 32,
        num_key_value_heads=settings.hidden_size // 64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    numbers = torch.tensor(tokenizer.convert_tokens_to_ids([f" {n}" for n in range(LARGEST_NUMBER + 1)]))
    with torch.no_grad():
        model.get_input_embeddings().weight[numbers] += number_waves(settings.hidden_size)
        # Layers after the first are initialised to the identity, which halves the number of steps.
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def number_waves(width: int) -> torch.Tensor:
    """Return sines and cosines of every number, [numbers, width], at periods from about 2 to twice the largest number.

    Added to the random embeddings, they encode the order of numbers, which a pretrained model knows. Without them
    learning the subtraction table takes over a minute; 16 waves are faster than 8 or 64.
    """
    periods = torch.logspace(np.log10(2.2), np.log10(2.0 * LARGEST_NUMBER), waves := 16)
    angles = 2 * torch.pi * torch.arange(LARGEST_NUMBER + 1)[:, None] / periods
    features = torch.cat([angles.sin(), angles.cos()], dim=1) * (0.4 / waves**0.5)  # rows of length 0.4
    return torch.nn.functional.pad(features, (0, width - 2 * waves))


def batches(settings: WarmStart, tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (token ids, labels) of similar lengths, endlessly, padded to at most `tokens_per_batch` positions."""
    rng = np.random.default_rng(settings.seed)
    while True:
        problems = [draw_problem(rng, held_out=False) for _ in range(2048)]
        prompts = tokenizer([f" {problem.prompt}" for problem in problems])["input_ids"]
        answers = tokenizer([f" {demonstration(problem, rng, settings)}" for problem in problems])["input_ids"]
        rows = sorted(zip(prompts, answers, strict=True), key=lambda row: len(row[0]) + len(row[1]))
        packed, batch = [], []
        for row in rows:
            if batch and (len(row[0]) + len(row[1]) + 1) * (len(batch) + 1) > settings.tokens_per_batch:
                packed.append(batch)
                batch = []
            batch.append(row)
        packed.append(batch)
        for place in rng.permutation(len(packed)):
            yield pad(packed[place], tokenizer)


def pad(
    rows: list[tuple[list[int], list[int]]], tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return right-padded ids and labels; prompts and padding have no loss."""
    width = max(len(prompt) + len(answer) + 1 for prompt, answer in rows)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), IGNORED)
    for place, (prompt, answer) in enumerate(rows):
        whole = torch.tensor([*prompt, *answer, tokenizer.eos_token_id])
        ids[place, : len(whole)] = whole
        labels[place, len(prompt) : len(whole)] = whole[len(prompt) :]
    return ids, labels


def train(
    settings: WarmStart, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[int, float]]:
    """Run supervised training; yield (steps done, loss) after every step."""
    model.train()
    rows = batches(settings, tokenizer)

    def loss_of_next() -> torch.Tensor:
        ids, labels = next(rows)
        # No attention mask: padding is on the right, which causal attention ignores.
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)

    return fit(model.parameters(), loss_of_next, settings.lr, settings.steps)


def warm_start(folder: Path, settings: WarmStart) -> list[float]:
    """Train the model and save it with its tokenizer to `folder`; return the loss of every step."""
    with one_thread_and_seed(settings.seed):
        tokenizer = build_tokenizer()
        model = build_model(settings, tokenizer)
        losses = with_progress(train(settings, model, tokenizer), settings.steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return losses
