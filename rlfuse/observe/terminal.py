"""Show a run in the terminal: a line per step, and a live view if the output is a terminal.

Without a terminal, a status line is printed after `SILENT_S` without output. The view is also written to `live.json`
for `rlfuse watch`.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from rich.console import RenderableType
from rich.live import Live

from rlfuse.config.schema import Config
from rlfuse.events import Recorder
from rlfuse.fusion.board import Board
from rlfuse.observe.alerts import REFERENCE_KL
from rlfuse.observe.custom_metrics import TRAINING
from rlfuse.observe.live import BETWEEN, SHOWN_STEPS, View, figure, log_line, read_board, render, starting_parts
from rlfuse.observe.offline_metrics import task_of
from rlfuse.progress import SILENT_S, Console, is_live_terminal, print_line

FILE = "live.json"
REFRESH_S = 1.0
KL_LABELS = {
    "actor/teacher_kl": "kl to teacher",
    **dict.fromkeys(REFERENCE_KL, "kl to ref"),
    "actor/ppo_kl": "kl of update",
}
"""Metric -> its label; the first that a step has is shown."""
MAX_CPU_SHARE = 0.002
"""Maximum share of a core for the view, so a large step is refreshed less often."""


class Terminal:
    """Terminal output of a run. `recorder`: of the driver; `board`: current work, None before the first step."""

    def __init__(
        self, config: Config, total: int, start: int, recorder: Recorder, folder: Path, console: Console | None = None
    ):
        self.console = console or Console(quiet="console" not in config.trainer.logger)
        self.board: Board | None = None
        self._name, self._total, self._step, self._recorder = folder.name, total, start, recorder
        self._since = self._step_ended = self._spoke = time.monotonic()
        self._seconds: list[float] = []
        self._rewards: list[float] = []
        self._fields: dict[str, str] = {}
        self._held_out: dict[str, str] = {}
        self._file, self._closed = folder / FILE, threading.Event()
        drawn = not self.console.quiet and is_live_terminal(self.console)
        self._live = Live(get_renderable=self.render, console=self.console, refresh_per_second=1) if drawn else None
        if self._live:
            self._live.start()
        self._refresher = threading.Thread(target=self._refresh, daemon=True, name="live view")
        self._refresher.start()

    def view(self) -> View:
        spans = list(self._recorder.open.values())
        phase, stages, slots, in_flight = read_board(self.board, spans)
        if phase == BETWEEN:
            phase = (
                "stopping engines and closing logs"
                if self._step >= self._total
                else "starting"
                if self.board is None
                else phase
            )
        now, left = time.monotonic(), None
        if self._seconds:
            rest = (self._total - self._step) * sum(self._seconds) / len(self._seconds)
            left = max(0.0, rest - (now - self._step_ended))
        more = (phase, stages, slots, in_flight, self._rewards, self._fields | self._held_out, starting_parts(spans))
        return View(self._name, self._step, self._total, now - self._since, left, *more)

    def render(self) -> RenderableType:
        return render(self.view())

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.monotonic()
        if self._rewards or self._seconds:  # the time of the first step includes startup
            self._seconds = [*self._seconds[-19:], now - self._step_ended]
        elif "perf/time_per_step" in metrics:
            self._seconds = [metrics["perf/time_per_step"]]
        self._step, self._step_ended = step, now
        offline = task_of(metrics)
        if math.isfinite(reward := metrics.get(offline.score if offline else "critic/score/mean", math.nan)):
            self._rewards = [*self._rewards[1 - SHOWN_STEPS :], float(reward)]
        self._fields = fields(metrics)
        if held_out := _held_out(metrics):
            self._held_out = {"held out": f"{held_out} (step {step})"}
        self.say(step_line(step, self._total, metrics))

    def say(self, text: str) -> None:
        self._spoke = time.monotonic()
        print_line(self.console, text)

    def close(self) -> None:
        self._closed.set()
        self._refresher.join()
        if self._live:
            self._live.stop()
        self._publish()

    def _refresh(self) -> None:
        pause = REFRESH_S
        while not self._closed.wait(pause):
            began = time.thread_time()
            self._publish()
            if self._live is None and time.monotonic() - self._spoke > SILENT_S:
                self.say(log_line(self.view()))
            pause = max(REFRESH_S, (time.thread_time() - began) / MAX_CPU_SHARE)

    def _publish(self) -> None:
        aside = self._file.with_name(f".{self._file.name}.part")
        with suppress(OSError):
            aside.write_text(json.dumps({"at": time.time(), "view": asdict(self.view())}))
            os.replace(aside, self._file)


def step_line(step: int, total: int, metrics: Mapping[str, float]) -> str:
    """Return the line that is printed for a finished step."""
    shown = fields(metrics) | ({"held out": text} if (text := _held_out(metrics)) else {})
    line = "  ".join(f"{name} {value}" for name, value in shown.items())
    return f"step {step}/{total}  {line}  {figure(metrics.get('perf/time_per_step'), '.1f')} s"


def fields(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the displayed values of a step, with units."""
    if offline := task_of(metrics):
        return {offline.short(name): figure(metrics.get(name)) for name in offline.fields()}
    length, longest = (figure(metrics.get(f"response_length/{name}"), ".0f") for name in ("mean", "max"))
    found = {"reward": figure(metrics.get("critic/score/mean"))}
    if (kl := next((name for name in KL_LABELS if name in metrics), None)) is not None:
        found[KL_LABELS[kl]] = figure(metrics[kl], "z.4f")
    if "actor/entropy" in metrics:
        found["entropy"] = figure(metrics["actor/entropy"])
    found["length"] = f"{length} tokens (max {longest})"
    custom = {name: value for name, value in metrics.items() if name.startswith(f"{TRAINING}/")}
    found |= {name.partition("/")[2]: figure(value, ".4g") for name, value in custom.items()}
    found["speed"] = f"{figure(metrics.get('perf/throughput'), ',.0f')} tokens/s per slot"
    return found


def _held_out(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{value:.3f}" for name, value in metrics.items() if name.startswith("val-core/"))
