"""Log samples to `samples.jsonl`, `validation.jsonl`, the tables of the sinks, and contact sheets (PNG files)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path

from rlfuse.config.schema import Config
from rlfuse.errors import VideoError
from rlfuse.observe.drawing import Drawing
from rlfuse.observe.loggers import Loggers
from rlfuse.observe.sink import VALIDATION
from rlfuse.observe.tracking import StepFile, sample_row, write_step
from rlfuse.progress import is_due
from rlfuse.samples import Sample, prompt_id
from rlfuse.video.contact_sheet import Answer, Caption, contact_sheet, shown_frames
from rlfuse.video.decode_pool import Clip, DecodePool


class SampleLog:
    """Logged samples of a run that continues after the step `start`."""

    def __init__(self, config: Config, folder: Path, start: int, loggers: Loggers, drawing: Drawing, total_steps: int):
        self._total_steps = total_steps
        self._config, self._folder, self._loggers, self._drawing = config, folder, loggers, drawing
        self._training = StepFile(folder / "samples.jsonl", after=start)
        self._validation = StepFile(folder / "validation.jsonl", after=start or -1)

    def log_validation(self, step: int, samples: Sequence[Sample]) -> None:
        if (where := self._config.trainer.validation_data_dir) is not None:
            write_step(Path(where).expanduser(), step, samples)
        rows = [sample_row(sample) for sample in samples[: self._config.trainer.log_val_generations]]
        self._validation.write(step, *rows)
        if rows:
            self._loggers.for_each_sink(lambda sink: sink.samples(step, rows, VALIDATION))

    def log_step(self, step: int, samples: Sequence[Sample]) -> None:
        if (where := self._config.trainer.rollout_data_dir) is not None:
            write_step(Path(where).expanduser(), step, samples)
        samples, video = samples[: self._config.trainer.log_samples], self._config.video
        sheets = sheets_of(samples, video.log_clips)
        rows = [sample_row(sample, sheets.get(sample.id)) for sample in samples]
        self._training.write(step, *rows)

        def log_table() -> None:
            drawn = {name for name in sheets.values() if (self._folder / name).exists()}
            table = [row | {"contact_sheet": name if (name := row["contact_sheet"]) in drawn else None} for row in rows]
            if table and is_due(self._config.trainer.log_samples_freq, step, self._total_steps):
                self._loggers.for_each_sink(lambda sink: sink.samples(step, table))

        if not sheets:
            return log_table()
        shown = [light(sample) for sample in samples if sample.id in sheets]
        arguments = (self._folder, step, shown, sheets, video.decode_timeout_s)
        self._drawing.submit(
            f"contact sheets of step {step}", log_table, "rlfuse.observe.sample_log:draw_sheets", *arguments
        )

    def sync(self) -> None:
        self._training.sync()
        self._validation.sync()

    def close(self) -> None:
        try:
            self._training.close()
        finally:
            self._validation.close()


FOLDER = "contact_sheets"


@cache
def _pool(timeout_s: float) -> DecodePool:
    return DecodePool(timeout_s=timeout_s)


def sheets_of(samples: Sequence[Sample], most: int | None) -> dict[str, str]:
    """Return sample id -> path of the sheet of its prompt in the run folder, for the first `most` clips (None: all)."""
    shown = [sample for sample in samples if sample.prompt.visual and sample.response is not None]
    prompts = list(dict.fromkeys(prompt_id(sample.id) for sample in shown))[:most]
    paths = {prompt: f"{FOLDER}/{prompt.replace('/', '-')}.png" for prompt in prompts}
    return {sample.id: paths[name] for sample in shown if (name := prompt_id(sample.id)) in paths}


def light(sample: Sample) -> Sample:
    """Return the sample without tensors, columns and video sources, to be sent to another process."""
    visual = tuple(replace(each, source=None) for each in sample.prompt.visual)
    return replace(sample, tensors={}, prompt=replace(sample.prompt, columns={}, visual=visual))


def draw_sheets(folder: Path, step: int, samples: Sequence[Sample], sheets: dict[str, str], timeout_s: float) -> None:
    """Draw the contact sheets of these samples into the run folder."""
    (folder / FOLDER).mkdir(exist_ok=True)
    families = [list(family) for _, family in groupby(samples, lambda sample: sample.prompt.index)]
    decoded = _pool(timeout_s).stream([clip for family in families for clip in _clips(family[0])])
    for family in families:
        shown = [(next(decoded), each.plan) for each in family[0].prompt.visual]
        if not any(isinstance(frames, VideoError) for frames, _ in shown):
            contact_sheet(shown, _caption(step, family)).save(folder / sheets[family[0].id])


def _clips(sample: Sample) -> list[Clip]:
    visual = sample.prompt.visual
    clips = []
    for each, shown in zip(visual, shown_frames([each.plan for each in visual]), strict=True):
        times, single = tuple(each.plan.times[index] for index in shown), replace(each.plan.geometry, temporal_patch=1)
        clips.append(Clip(each.path, replace(each.plan, times=times, geometry=single)))
    return clips


def _caption(step: int, family: Sequence[Sample]) -> Caption:
    prompt, truth = family[0].prompt, family[0].prompt.ground_truth
    answers = tuple(Answer(sample.response.text, sample.reward) for sample in family)
    return Caption(f"step {step} · prompt {prompt.index}", prompt.text, answers, "" if truth is None else str(truth))
