"""Send messages, scalars, samples and pictures to the terminal and the sinks of trainer.logger: wandb, TensorBoard.

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
MAX_FAILURES = 32
"""Maximum failed rewards per call of a sink; the file in the run folder has all of them."""


class Sink(Protocol):
    """Destination of logs. Steps are passed in ascending order."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def samples(self, step: int, rows: Sequence[Row], name: str = SAMPLES) -> None:
        """Log samples with their rewards and reward parts. `name`: name of the table."""

    def picture(self, step: int, name: str, path: Path) -> None:
        """Log a PNG of the run folder."""

    def alert(self, step: int, alert: Alert) -> None:
        """Notify a person."""

    def reward_failures(self, step: int, rows: Sequence[Row]) -> None:
        """Log samples that newly have no reward, as rows of `tracking.failure_row`."""

    def failure(self, where: str, text: str) -> None:
        """Log the error that ended the run."""

    def close(self, exit_code: int) -> None: ...


def sinks(config: Config, resolved: dict[str, Any], folder: Path, resumed: bool) -> list[Sink]:
    """Return the sinks that trainer.logger names, except for the terminal."""
    found: list[Sink] = []
    if "wandb" in config.trainer.logger:
        found.append(Wandb(config, resolved, folder, resumed))
    if "tensorboard" in config.trainer.logger:
        found.append(TensorBoard(folder))
    return found


class Wandb:
    """A wandb run in the run folder, resumed under its own id when the job resumes.

    Everything except the final error is logged with the training step, which is the x axis of every chart. The step
    counter of wandb is not used, because it drops rows with a lower step, for example after a resume.
    """

    def __init__(self, config: Config, resolved: dict[str, Any], folder: Path, resumed: bool):
        import wandb  # takes half a second, and not every run needs it

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
                group=os.environ.get("WANDB_RUN_GROUP"),  # wandb reads it only once per process
                resume="allow" if mode == "online" else None,
                dir=folder,
                mode=mode,
                config=resolved,
                # x_disable_meta: metadata of the host includes the command line, which may contain secrets.
                settings=wandb.Settings(
                    silent=True, console="off", init_timeout=INIT_S, finish_timeout=120, x_disable_meta=True
                ),
            )
        except (wandb.Error, OSError) as error:
            if mode != "online":
                raise
            why = " ".join(str(error).split()).rstrip(".")
            remedy = "check the key (`wandb login --verify`) and the network, or set trainer.wandb_mode=offline"
            raise ConfigError([f"trainer.wandb_mode={mode}: wandb could not start a run ({why}); {remedy}"]) from error
        if resumed:  # wandb has the earlier values, which may have changed since
            self._run.config.update(resolved, allow_val_change=True)
        self._run.define_metric("*", step_metric=AXIS)
        if resumed and config.trainer.wandb_mode == "offline":  # it does not know the rows of the earlier folder
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
        """Send a wandb alert, by mail or Slack according to the user settings."""
        self._run.alert(title=alert.title, text=f"step {step}: {alert.text}", level=self._wandb.AlertLevel.WARN)

    def reward_failures(self, step: int, rows: Sequence[Row]) -> None:
        table = self._wandb.Table(
            columns=list(FAILURE_FIELDS), data=[[row[name] for name in FAILURE_FIELDS] for row in rows[:MAX_FAILURES]]
        )
        self.log(step, {"reward_failures": table})

    def failure(self, where: str, text: str) -> None:
        self._run.log({"errors": self._wandb.Table(columns=["where", "error"], data=[[where, text]])})

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


class TensorBoard:
    """TensorBoard event files. A resume starts a new file; TensorBoard shows the later of duplicate values."""

    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter  # needs the package tensorboard, which the checks require

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)

    def samples(self, step: int, rows: Sequence[Row], name: str = SAMPLES) -> None:
        """Log samples as text, in code blocks since TensorBoard renders Markdown."""
        for number, row in enumerate(rows):
            blocks = [f"{row['id']}, reward {row['reward']}", *(_block(row[text]) for text in ("prompt", "response"))]
            self._writer.add_text(f"{name}/{number}", "\n\n".join(blocks), step)

    def picture(self, step: int, name: str, path: Path) -> None:
        from PIL import Image

        self._writer.add_image(name, np.asarray(Image.open(path).convert("RGB")), step, dataformats="HWC")

    def alert(self, step: int, alert: Alert) -> None:
        self._writer.add_text("alerts", f"**{alert.title}** {alert.text}", step)

    def reward_failures(self, step: int, rows: Sequence[Row]) -> None:
        for row in rows[:MAX_FAILURES]:
            text = f"{row['function']}: {row['message']}\n{row['traceback']}"
            self._writer.add_text(f"reward_failures/{row['sample']}", _block(text), step)

    def failure(self, where: str, text: str) -> None:
        self._writer.add_text(f"errors/{where}", _block(text))

    def close(self, exit_code: int) -> None:
        self._writer.close()


def _block(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


class Loggers:
    """Terminal and sinks of a run that continues after step `start`. `recorder`: of the driver, for the live view."""

    def __init__(
        self, config: Config, resolved: dict[str, Any], folder: Path, total_steps: int, start: int, recorder: Recorder
    ):
        self._sinks = sinks(config, resolved, folder, start > 0)
        # Last, as its thread would not be stopped if a sink failed to start.
        self.terminal = Terminal(config, total_steps, start, recorder, folder)

    def say(self, text: str) -> None:
        self.terminal.say(hidden_text(text))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.for_each_sink(lambda sink: sink.log(step, dict(values)))

    def alert(self, step: int, alert: Alert) -> None:
        self.say(f"step {step}: {alert.title}: {alert.text}")
        self.for_each_sink(lambda sink: sink.alert(step, alert))

    def for_each_sink(self, call: Callable[[Sink], None]) -> None:
        """Apply `call` to every sink. A sink that fails (its process died, its disk is full) is disabled."""
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:
                self._sinks.remove(sink)
                name = type(sink).__name__
                self.say(f"{name} disabled after {type(error).__name__}: {error}; all data is in the run folder")

    def close(self, error: BaseException | None) -> None:
        if error is not None:
            text = hidden_text(f"{type(error).__name__}: {error}")
            self.for_each_sink(lambda sink: sink.failure("run", text))
        try:
            self.for_each_sink(lambda sink: sink.close(exit_code=int(error is not None)))
        finally:
            self.terminal.close()
