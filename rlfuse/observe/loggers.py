"""Send messages, scalars, samples and pictures to the terminal and the sinks of trainer.logger."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlfuse.config.schema import Config
from rlfuse.config.secrets import hidden_text
from rlfuse.events import Recorder
from rlfuse.observe.alerts import Alert
from rlfuse.observe.mlflow_sink import MLflow
from rlfuse.observe.sink import Sink
from rlfuse.observe.tensorboard_sink import TensorBoard
from rlfuse.observe.terminal import Terminal
from rlfuse.observe.wandb_sink import Wandb


def sinks(config: Config, resolved: dict[str, Any], folder: Path, start: int) -> list[Sink]:
    """Return the sinks that trainer.logger names, except for the terminal."""
    found: list[Sink] = []
    if "wandb" in config.trainer.logger:
        found.append(Wandb(config, resolved, folder, start))
    if "tensorboard" in config.trainer.logger:
        found.append(TensorBoard(folder))
    if "mlflow" in config.trainer.logger:
        found.append(MLflow(config, resolved, folder, start))
    return found


class Loggers:
    """Terminal and sinks of a run that continues after step `start`. `recorder`: of the driver, for the live view."""

    def __init__(
        self, config: Config, resolved: dict[str, Any], folder: Path, total_steps: int, start: int, recorder: Recorder
    ):
        self._sinks = sinks(config, resolved, folder, start)
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
