"""What the person at the terminal sees of a run: a live view, or where nobody looks on (a file, CI) one line a step.

Role: told by the journal. Rich draws the view once a second from a thread of its own; lines that are said, and what
libraries print, stand above it.
"""

from __future__ import annotations

import math
import os
import time

from rich.console import Console, RenderableType
from rich.live import Live

from rlfuse.config.schema import Config
from rlfuse.fusion.board import Board
from rlfuse.observe.events import Recorder
from rlfuse.observe.live import View, look, render


class Terminal:
    """`recorder`: the driver's; `board`: what is being worked on, once there is something."""

    def __init__(self, config: Config, total: int, start: int, recorder: Recorder, console: Console | None = None):
        self.console = console or Console()
        self.board: Board | None = None
        self._name, self._total, self._step, self._recorder = config.trainer.experiment_name, total, start, recorder
        self._since = self._step_ended = time.monotonic()
        self._seconds: list[float] = []
        self._rewards: list[float] = []
        self._fields: dict[str, str] = {}
        watched = self.console.is_terminal and "CI" not in os.environ
        self._live = Live(get_renderable=self.render, console=self.console, refresh_per_second=1) if watched else None
        if self._live:
            self._live.start()

    def view(self) -> View:
        """Everything as it is now."""
        phase, stages, slots, in_flight = look(self.board, list(self._recorder.open.values()))
        now, left = time.monotonic(), None
        if self._seconds:
            rest = (self._total - self._step) * sum(self._seconds) / len(self._seconds)
            left = max(0.0, rest - (now - self._step_ended))
        more = (phase, stages, slots, in_flight, self._rewards, self._fields)
        return View(self._name, self._step, self._total, now - self._since, left, *more)

    def render(self) -> RenderableType:
        """For the live display."""
        return render(self.view())

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """A step has ended."""
        now = time.monotonic()
        if self._rewards or self._seconds:  # the first one's time holds the start
            self._seconds = [*self._seconds[-19:], now - self._step_ended]
        elif "perf/time_per_step" in metrics:
            self._seconds = [metrics["perf/time_per_step"]]
        self._step, self._step_ended = step, now
        if math.isfinite(reward := metrics.get("critic/score/mean", metrics.get("reward_model/acc", math.nan))):
            self._rewards.append(reward)
        self._fields = _pair_fields(metrics) if "reward_model/loss" in metrics else _sample_fields(metrics)
        if not self._live:
            seconds = _figure(metrics.get("perf/time_per_step"), ".1f")
            line = "  ".join(f"{name} {value}" for name, value in self._fields.items())
            print(f"step {step}/{self._total}  {line}  {seconds} s", flush=True)

    def say(self, text: str) -> None:
        """A line above the view."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """The last view stays."""
        if self._live:
            self._live.stop()


def _sample_fields(metrics: dict[str, float]) -> dict[str, str]:
    longest = _figure(metrics.get("response_length/max"), ".0f")
    return {
        "reward": _figure(metrics.get("critic/score/mean"), ".3f"),
        "kl": _figure(metrics.get("critic/kl", metrics.get("actor/kl_loss", metrics.get("actor/ppo_kl"))), ".4f"),
        "length": _figure(metrics.get("response_length/mean"), ".0f") + "/" + longest,
        "speed": _figure(metrics.get("perf/throughput"), ".0f"),
    }


def _pair_fields(metrics: dict[str, float]) -> dict[str, str]:
    """Of a reward model that learns."""
    names = ("loss", "acc", "margin", "grad_norm")
    return {name: _figure(metrics.get(f"reward_model/{name}"), ".3f") for name in names}


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None or math.isnan(value) else format(value, form)
