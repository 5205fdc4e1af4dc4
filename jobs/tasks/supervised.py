"""Supervised training of the bundled tasks' models on one core; restores random state and thread count."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import torch
from rich.progress import Progress, TextColumn

IGNORED = -100


def fit(
    parameters: Iterable[torch.nn.Parameter], loss_of_next: Callable[[], torch.Tensor], lr: float, steps: int
) -> Iterator[tuple[int, float]]:
    """AdamW with a short warm-up and a cosine; yields (steps done, loss) after every step."""
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
    """One core and a seeded generator inside; the caller's own afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def with_progress(losses: Iterable[tuple[int, float]], steps: int) -> list[float]:
    """Run the steps and show how far they are: a bar on a terminal, ten lines elsewhere. Returns the losses."""
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
