"""Contact sheets of logged samples as PNG files, drawn in the process of `drawing`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path

from rlfuse.errors import VideoError
from rlfuse.samples import Sample, prompt_of
from rlfuse.video.contact_sheet import Answer, Caption, contact_sheet, shown_frames
from rlfuse.video.decode_pool import Clip, DecodePool

FOLDER = "contact_sheets"


@cache
def _pool(timeout_s: float) -> DecodePool:
    return DecodePool(timeout_s=timeout_s)


def sheets_of(samples: Sequence[Sample], most: int | None) -> dict[str, str]:
    """Sample id -> where in the run folder the sheet of its prompt will be, for the first `most` clips (None: all)."""
    shown = [sample for sample in samples if sample.prompt.visual and sample.response is not None]
    prompts = list(dict.fromkeys(prompt_of(sample.id) for sample in shown))[:most]
    paths = {prompt: f"{FOLDER}/{prompt.replace('/', '-')}.png" for prompt in prompts}
    return {sample.id: paths[name] for sample in shown if (name := prompt_of(sample.id)) in paths}


def light(sample: Sample) -> Sample:
    """All of it that a sheet shows, for another process."""
    visual = tuple(replace(each, source=None) for each in sample.prompt.visual)
    return replace(sample, tensors={}, prompt=replace(sample.prompt, columns={}, visual=visual))


def draw_sheets(folder: Path, step: int, samples: Sequence[Sample], sheets: dict[str, str], timeout_s: float) -> None:
    """Write the `sheets` of these samples of a run folder."""
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
