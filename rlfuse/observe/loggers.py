"""Pass messages, scalars and samples to the terminal and to the sinks of trainer.logger."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlfuse.config.schema import Config
from rlfuse.config.secrets import hidden_text
from rlfuse.events import Recorder
from rlfuse.observe.alerts import Alert
from rlfuse.observe.sinks import Sink, sinks
from rlfuse.observe.terminal import Terminal


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
        self.tell(lambda sink: sink.log(step, dict(values)))

    def alert(self, step: int, alert: Alert) -> None:
        self.say(f"step {step}: {alert.title}: {alert.text}")
        self.tell(lambda sink: sink.alert(step, alert))

    def tell(self, told: Callable[[Sink], None]) -> None:
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
            self.tell(lambda sink: sink.failure("run", text))
        try:
            self.tell(lambda sink: sink.close(exit_code=int(error is not None)))
        finally:
            self.terminal.close()
