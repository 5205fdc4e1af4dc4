"""What the person at the terminal sees of a run.

Role: told by the journal. Nothing is computed here.
"""

from __future__ import annotations

import math

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Terminal:
    """A progress bar with reward, KL, lengths, tokens per second and time left; one line a step where there is none."""

    def __init__(self, total: int, start: int):
        self.console = Console()
        columns = ("reward {task.fields[reward]}", "kl {task.fields[kl]}", "length {task.fields[length]}")
        self._bar = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            *(TextColumn(column) for column in (*columns, "{task.fields[speed]} tokens/s")),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        unknown = dict.fromkeys(("reward", "kl", "length", "speed"), "-")
        self._task = self._bar.add_task("train", total=total, completed=start, **unknown)
        self._total = total
        self._bar.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        fields = {
            "reward": _figure(metrics.get("critic/score/mean"), ".3f"),
            "kl": _figure(metrics.get("critic/kl", metrics.get("actor/kl_loss", metrics.get("actor/ppo_kl"))), ".4f"),
            "length": _figure(metrics.get("response_length/mean"), ".0f")
            + "/"
            + _figure(metrics.get("response_length/max"), ".0f"),
            "speed": _figure(metrics.get("perf/throughput"), ".0f"),
        }
        self._bar.update(self._task, completed=step, **fields)
        if not self.console.is_terminal:
            seconds = _figure(metrics.get("perf/time_per_step"), ".1f")
            line = "  ".join(f"{name} {value}" for name, value in fields.items())
            print(f"step {step}/{self._total}  {line}  {seconds} s", flush=True)

    def say(self, text: str) -> None:
        """A line above the bar."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None or math.isnan(value) else format(value, form)
