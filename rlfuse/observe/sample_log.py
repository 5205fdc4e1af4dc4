"""Write samples for people: `samples.jsonl`, `validation.jsonl`, tables of the sinks, contact sheets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlfuse.config.schema import Config
from rlfuse.observe.drawing import Drawing
from rlfuse.observe.loggers import Loggers
from rlfuse.observe.sheets import light, sheets_of
from rlfuse.observe.sinks import VALIDATION
from rlfuse.observe.tracking import StepFile, sample_row
from rlfuse.progress import due
from rlfuse.samples import Sample


class SampleLog:
    """Of a run that goes on after the step `start`."""

    def __init__(self, config: Config, folder: Path, start: int, loggers: Loggers, drawing: Drawing, total_steps: int):
        self._total_steps = total_steps
        self._config, self._folder, self._loggers, self._drawing = config, folder, loggers, drawing
        self._training = StepFile(folder / "samples.jsonl", after=start)
        self._validation = StepFile(folder / "validation.jsonl", after=start or -1)

    def log_validation(self, step: int, samples: Sequence[Sample]) -> None:
        rows = [sample_row(sample) for sample in samples[: self._config.trainer.log_val_generations]]
        self._validation.write(step, *rows)
        if rows:
            self._loggers.tell(lambda sink: sink.samples(step, rows, VALIDATION))

    def log_step(self, step: int, samples: Sequence[Sample]) -> None:
        samples, video = samples[: self._config.trainer.log_samples], self._config.video
        sheets = sheets_of(samples, video.log_clips)
        rows = [sample_row(sample, sheets.get(sample.id)) for sample in samples]
        self._training.write(step, *rows)

        def tell() -> None:
            drawn = {name for name in sheets.values() if (self._folder / name).exists()}
            table = [row | {"contact_sheet": name if (name := row["contact_sheet"]) in drawn else None} for row in rows]
            if table and due(self._config.trainer.log_samples_freq, step, self._total_steps):
                self._loggers.tell(lambda sink: sink.samples(step, table))

        if not sheets:
            return tell()
        those = [light(sample) for sample in samples if sample.id in sheets]
        arguments = (self._folder, step, those, sheets, video.decode_timeout_s)
        self._drawing.ask(f"contact sheets of step {step}", tell, "rlfuse.observe.sheets:draw_sheets", *arguments)

    def sync(self) -> None:
        self._training.sync()
        self._validation.sync()

    def close(self) -> None:
        try:
            self._training.close()
        finally:
            self._validation.close()
