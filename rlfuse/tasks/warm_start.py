"""A small language model that has learned the remainder task from imperfect demonstrations, in seconds on one core.

Role: the starting policy of the quickstart, in place of a downloaded one. A Qwen2-architecture model is trained by a
short supervised run on demonstrations of mixed quality, as real fine-tuning data are: a subtraction slips by one now
and then, and where the divisor is large the writer often stops one subtraction early. So the policy knows the format
and all the arithmetic, is right less than half of the time, and the right token is always among its likeliest two:
what reinforcement learning has to do is to prefer it.
Invariants:
- the folder is keyed by a hash of its settings and `VERSION`; it appears complete or not at all (built under another
  name and renamed), and a second call returns it without training;
- the process's random state and thread count are as before after the call;
- demonstrations come from training problems only, never from held-out ones.
Caller: `prepare`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rlfuse.tasks.remainder import LARGEST_NUMBER, Problem, draw_problem, running_values, write_steps
from rlfuse.tasks.vocabulary import build_tokenizer

VERSION = "1"
"""Change it when the code below, and so the model, changes: cached folders of another version are not used."""
IGNORED = -100
"""Label of positions that carry no loss (PyTorch's default)."""


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Everything that decides the weights; the cache key is made of it."""

    seed: int = 1
    hidden_size: int = 128
    layers: int = 2
    intermediate_size: int = 384
    """Heads are 4 of 32: vLLM's attention on CPUs takes head sizes of 32, 64 and up."""
    steps: int = 400
    tokens_per_batch: int = 2048
    lr: float = 3e-3
    slip: float = 0.015
    """Share of demonstrated subtractions that are wrong by one."""
    stop_early_small: float = 0.3
    """Share of demonstrations that stop one subtraction early, divisors below `large_divisor`."""
    stop_early_large: float = 0.6
    """The same from `large_divisor` on: more often than not, so greedy decoding is wrong there as well."""
    large_divisor: int = 8


def demonstration(problem: Problem, rng: np.random.Generator, settings: WarmStart) -> str:
    """One demonstration with this writer's faults; right with probability of about one half."""
    values, value = [problem.dividend], problem.dividend
    large = problem.divisor >= settings.large_divisor
    stop_early = rng.random() < (settings.stop_early_large if large else settings.stop_early_small)
    while value >= problem.divisor * (2 if stop_early else 1):
        value -= problem.divisor
        if rng.random() < settings.slip:
            value = max(0, value + int(rng.choice((-1, 1))))
        values.append(value)
    return write_steps(values, problem.divisor)


def build_model(settings: WarmStart, tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """The untrained model, from torch's current random state."""
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
    numbers = torch.tensor(tokenizer.convert_tokens_to_ids(list(map(str, range(LARGEST_NUMBER + 1)))))
    with torch.no_grad():
        if _os.environ.get("ZI","0")!="0":
            for l in model.model.layers[(1 if _os.environ["ZI"]=="2" else 0):]: l.self_attn.o_proj.weight.zero_(); l.mlp.down_proj.weight.zero_()
        model.get_input_embeddings().weight[numbers] += number_waves(settings.hidden_size)
    return model


def number_waves(width: int) -> torch.Tensor:
    """[numbers, width] sines and cosines of each number at periods from 3 to twice the largest number.

    Added to the random embeddings, they tell the model how numbers are ordered, which a pretrained model knows: without
    them the subtraction table alone takes over a minute to learn.
    """
    waves = int(_os.environ.get("NW","16"))
    periods = torch.logspace(np.log10(float(_os.environ.get("P0","3"))), np.log10(2.0 * LARGEST_NUMBER), waves)
    angles = 2 * torch.pi * torch.arange(LARGEST_NUMBER + 1)[:, None] / periods
    out = torch.zeros(LARGEST_NUMBER + 1, width)
    out[:, : 2 * waves] = AMP * (width / 2 / waves) ** 0.5 * torch.cat([angles.sin(), angles.cos()], dim=1)
    return out
import os as _os
AMP=float(_os.environ.get("AMP","0.05"))


def batches(settings: WarmStart, tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (token ids, labels) of similar lengths, padded to at most `tokens_per_batch` positions."""
    rng = np.random.default_rng(settings.seed)
    while True:
        problems = [draw_problem(rng, held_out=False) for _ in range(2048)]
        prompts = tokenizer([problem.prompt for problem in problems])["input_ids"]
        answers = tokenizer([demonstration(problem, rng, settings) for problem in problems])["input_ids"]
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
    """Right-padded ids and labels; prompts and padding carry no loss."""
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
    """The supervised run; yields (steps done, loss) after every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, float(_os.environ.get("B2","0.98"))), weight_decay=0.01, fused=True)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=max(1, settings.steps // 20))
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    model.train()
    for done, (ids, labels) in zip(range(1, settings.steps + 1), batches(settings, tokenizer), strict=False):
        # No attention mask: padding is on the right, where causal attention never looks from a token with a loss.
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        warm_up.step()
        cosine.step()
        yield done, loss.item()
