"""Pass messages, scalars, samples and pictures to the terminal and to the sinks of trainer.logger: wandb, TensorBoard.

wandb is offline unless trainer.wandb_mode=online.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlfuse.config.schema import Config
from rlfuse.config.secrets import hidden_text
from rlfuse.errors import ConfigError
from rlfuse.events import Recorder
from rlfuse.files import write_atomically
from rlfuse.observe.alerts import Alert
from rlfuse.observe.terminal import Terminal
from rlfuse.observe.tracking import FAILURE_FIELDS

Row = dict[str, Any]
AXIS = "training/global_step"
SAMPLES, VALIDATION = "samples", "val/generations"
INIT_S = 60.0
SHOWN = 32
"""Failed rewards that a sink is told of at a time; the run folder's file has all."""


class Sink(Protocol):
    """Takes what a run tells; steps ascend."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def samples(self, step: int, rows: Sequence[Row], name: str = SAMPLES) -> None:
        """Show what samples were, and what their reward was made of; `name`: of the table."""

    def picture(self, step: int, name: str, path: Path) -> None:
        """Show a PNG of the run folder."""

    def alert(self, step: int, alert: Alert) -> None:
        """Call a person."""

    def reward_failures(self, step: int, rows: Sequence[Row]) -> None:
        """Tell of samples that newly have no reward, as `tracking.failure_row` makes them."""

    def failure(self, where: str, text: str) -> None:
        """Tell what went wrong, where the curves are."""

    def close(self, exit_code: int) -> None: ...


def sinks(config: Config, resolved: dict[str, Any], folder: Path, resumed: bool) -> list[Sink]:
    """Those that trainer.logger names; the terminal is apart."""
    found: list[Sink] = []
    if "wandb" in config.trainer.logger:
        found.append(Wandb(config, resolved, folder, resumed))
    if "tensorboard" in config.trainer.logger:
        found.append(TensorBoard(folder))
    return found


class Wandb:
    """A wandb run in the run folder, resumed under its own id when the job resumes.

    All that is logged, but for what ended the run, has the training step with it, and it is the axis of every chart.
    wandb's own counter of calls is left alone: it drops what is logged under a number that it has passed, as after a
    resume or a call without one.
    """

    def __init__(self, config: Config, resolved: dict[str, Any], folder: Path, resumed: bool):
        import wandb  # half a second, and not everyone logs to it

        identity = folder / "wandb_id.txt"
        if not (resumed and identity.exists()):
            write_atomically(identity, secrets.token_hex(4))
        self._wandb, self._folder = wandb, folder
        mode = config.trainer.wandb_mode
        try:
            self._run = wandb.init(
                project=config.trainer.project_name,
                name=config.trainer.experiment_name,
                id=identity.read_text(),
                group=os.environ.get("WANDB_RUN_GROUP"),  # wandb itself reads it once per process
                resume="allow" if mode == "online" else None,
                dir=folder,
                mode=mode,
                config=resolved,
                # Without what it notes of the host by itself: the command line among it, which may hold secrets.
                settings=wandb.Settings(
                    silent=True, console="off", init_timeout=INIT_S, finish_timeout=120, x_disable_meta=True
                ),
            )
        except (wandb.Error, OSError) as error:
            if mode != "online":
                raise
            why = " ".join(str(error).split()).rstrip(".")
            remedy = "check the key (`wandb login --verify`) and the network, or set trainer.wandb_mode=offline"
            raise ConfigError([f"trainer.wandb_mode={mode}: wandb did not start a run ({why}); {remedy}"]) from error
        if resumed:  # wandb takes those of before, which may have been changed since
            self._run.config.update(resolved, allow_val_change=True)
        self._run.define_metric("*", step_metric=AXIS)
        if resumed and config.trainer.wandb_mode == "offline":  # knows nothing of the rows in the folder before
            self._run.log({}, step=int(time.time()), commit=False)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({AXIS: step, **metrics})

    def samples(self, step: int, rows: Sequence[Row], name: str = SAMPLES) -> None:
        parts = sorted({name for row in rows for name in row["parts"]})
        shown = ("id", "prompt", "response", "finish", "response_tokens", "reward")
        sheets = ["clip"] if any(row["contact_sheet"] for row in rows) else []
        table = self._wandb.Table(columns=["step", *shown, *parts, *sheets])
        for row in rows:
            sheet = self._wandb.Image(str(self._folder / row["contact_sheet"])) if row["contact_sheet"] else None
            values = [row[column] for column in shown] + [row["parts"].get(part) for part in parts]
            table.add_data(step, *values, *([sheet] if sheets else []))
        self.log(step, {name: table})

    def picture(self, step: int, name: str, path: Path) -> None:
        self.log(step, {name: self._wandb.Image(str(path))})

    def alert(self, step: int, alert: Alert) -> None:
        """wandb sends it by mail or Slack, as its user settings say."""
        self._run.alert(title=alert.title, text=f"step {step}: {alert.text}", level=self._wandb.AlertLevel.WARN)

    def reward_failures(self, step: int, rows: Sequence[Row]) -> None:
        table = self._wandb.Table(
            columns=list(FAILURE_FIELDS), data=[[row[name] for name in FAILURE_FIELDS] for row in rows[:SHOWN]]
        )
        self.log(step, {"reward_failures": table})

    def failure(self, where: str, text: str) -> None:
        self._run.log({"errors": self._wandb.Table(columns=["where", "error"], data=[[where, text]])})

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


class TensorBoard:
    """Event files; on resume a new one begins, and TensorBoard shows the later of what both have."""

    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter  # needs the package tensorboard, as the checks say

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)

    def samples(self, step: int, rows: Sequence[Row], name: str = SAMPLES) -> None:
        """Write text; TensorBoard reads Markdown, so texts stand in blocks that it leaves alone."""
        for number, row in enumerate(rows):
            blocks = [f"{row['id']}, reward {row['reward']}", *(_block(row[text]) for text in ("prompt", "response"))]
            self._writer.add_text(f"{name}/{number}", "\n\n".join(blocks), step)

    def picture(self, step: int, name: str, path: Path) -> None:
        from PIL import Image

        self._writer.add_image(name, np.asarray(Image.open(path).convert("RGB")), step, dataformats="HWC")

    def alert(self, step: int, alert: Alert) -> None:
        self._writer.add_text("alerts", f"**{alert.title}** {alert.text}", step)

    def reward_failures(self, step: int, rows: Sequence[Row]) -> None:
        for row in rows[:SHOWN]:
            text = f"{row['function']}: {row['message']}\n{row['traceback']}"
            self._writer.add_text(f"reward_failures/{row['sample']}", _block(text), step)

    def failure(self, where: str, text: str) -> None:
        self._writer.add_text(f"errors/{where}", _block(text))

    def close(self, exit_code: int) -> None:
        self._writer.close()


def _block(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


class Loggers:
    """Of a run that goes on after the step `start`; `recorder`: the driver's, for the live view."""

    def __init__(
        self, config: Config, resolved: dict[str, Any], folder: Path, total_steps: int, start: int, recorder: Recorder
    ):
        self._sinks = sinks(config, resolved, folder, start > 0)
        # Last: it draws and has a thread, which nobody would end if a sink could not be made.
        self.terminal = Terminal(config, total_steps, start, recorder, folder)

    def say(self, text: str) -> None:
        self.terminal.say(hidden_text(text))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.for_each_sink(lambda sink: sink.log(step, dict(values)))

    def alert(self, step: int, alert: Alert) -> None:
        self.say(f"step {step}: {alert.title}: {alert.text}")
        self.for_each_sink(lambda sink: sink.alert(step, alert))

    def for_each_sink(self, told: Callable[[Sink], None]) -> None:
        """Tell every sink; one that fails (its process ended, its disk is full) is left out from then on."""
        for sink in list(self._sinks):
            try:
                told(sink)
            except Exception as error:
                self._sinks.remove(sink)
                name = type(sink).__name__
                self.say(f"{name} takes nothing more, the run folder has all: {type(error).__name__}: {error}")

    def close(self, error: BaseException | None) -> None:
        if error is not None:
            text = hidden_text(f"{type(error).__name__}: {error}")
            self.for_each_sink(lambda sink: sink.failure("run", text))
        try:
            self.for_each_sink(lambda sink: sink.close(exit_code=int(error is not None)))
        finally:
            self.terminal.close()
