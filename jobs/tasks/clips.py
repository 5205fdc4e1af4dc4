"""Questions about generated clips and images with coloured squares: counting, order and time of events.

`how many red ?` -> `2`, `which is last ?` -> `blue`, `when is red first ?` -> `3.2 to 5.0`. A scene is a function of
seed, split and number, so training and validation share no clip. One frame per second, or `FRAMES_NEEDED` evenly spaced
frames, show every event. Answers are drawn uniformly from four, so guessing is right a quarter of the time. Paths in
rows are relative to the parquet file's folder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from rlfuse.rewards.reasoning_tags import answer_after_reasoning, answer_only
from rlfuse.rewards.verifiers import interval
from rlfuse.video.plan import TaskKind

COLOURS = {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (40, 60, 220), "yellow": (230, 210, 40)}
GROUND = (128, 128, 128)
COUNTS = range(4)
EVENTS = range(3, 7)
EVENT_SHARE = (0.45, 0.6)
"""An event's fraction of its part of the clip; all parts have the same length."""
MARGIN = 0.15
"""Minimum fraction of the part before and after the event."""
PART_S = 10 / 3
"""Shortest part in seconds: events and pauses between events then last at least a second."""
FRAMES_NEEDED = 20
"""The shortest pause, 2 x MARGIN of one of six parts, is a twentieth of the clip."""
FPS = 5
SIDE, SQUARE = 56, 32
WORDS = ("how many", "which is", "when is", "first", "last", "?", *COLOURS, "to")
SIGNS = ("[", " second]", ".", *"0123456789")
"""With the words, the vocabulary of prompts, timestamps and answers."""
ENDS, SIDES = {"first": 0, "last": -1}, {"top": 0, "bottom": -1}
"""Names of event indices in questions, for clips and for images."""
THINK, THOUGHT = "<think>", "</think>"
BLIND = "_blind"
FOUND_IOU = 0.5
_ENCODER = {"preset": "ultrafast", "tune": "zerolatency"}
"""Takes half the time of x264's defaults; files stay small, since frames repeat."""


class Kind(StrEnum):
    """Kind of question."""

    COUNT = "count"
    ORDER = "order"
    LOCATE = "locate"
    PLACE = "place"

    @property
    def is_image(self) -> bool:
        return self is Kind.PLACE

    @property
    def folder(self) -> str:
        return "images" if self.is_image else "clips"

    @property
    def data_source(self) -> str:
        """One source per kind, so that each has its own validation metrics."""
        return f"{self.folder}_{self}"

    @property
    def ends(self) -> dict[str, int]:
        return SIDES if self.is_image else ENDS

    @property
    def task(self) -> TaskKind:
        return {Kind.COUNT: TaskKind.MOTION, Kind.ORDER: TaskKind.GENERAL, Kind.LOCATE: TaskKind.DETAIL}[self]


@dataclass(frozen=True, slots=True)
class Clips:
    """Settings of the generated clips."""

    train: int = 64
    val: int = 16
    kinds: tuple[Kind, ...] = (Kind.COUNT, Kind.ORDER, Kind.LOCATE)
    shortest_s: float = 10.0
    longest_s: float = 600.0
    max_events: int = 3
    """Per clip; with three, the fraction of a colour's frames determines its count."""
    distinct_ends: bool = False
    """True if the first and last colour of a clip always differ, so that confusing them is always wrong."""
    seed: int = 1

    def __post_init__(self) -> None:
        if min(self.train, self.val) < 1 or not self.kinds:
            raise ValueError(
                f"Clips: got train={self.train}, val={self.val}, kinds={self.kinds}; each needs at least one"
            )
        if len({kind.is_image for kind in self.kinds}) > 1:
            raise ValueError(
                f"Clips: got kinds={self.kinds}; {Kind.PLACE} (images) can't be combined with the kinds of clips"
            )
        if self.max_events not in EVENTS:
            raise ValueError(f"Clips: got max_events={self.max_events}; valid are {EVENTS[0]} to {EVENTS[-1]}")
        if not EVENTS[0] * PART_S <= self.shortest_s <= self.longest_s < math.inf:
            raise ValueError(
                f"Clips: got shortest_s={self.shortest_s}, longest_s={self.longest_s}; they must be in order and at "
                f"least {EVENTS[0] * PART_S:g}, the length of {EVENTS[0]} events"
            )


@dataclass(frozen=True, slots=True)
class Event:
    """Square that is visible from `start_s` to `end_s`."""

    colour: str
    start_s: float
    end_s: float
    corner: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Scene:
    """Events of a clip, in order."""

    duration_s: float
    events: tuple[Event, ...]
    counted_colour: str

    def count(self, colour: str) -> int:
        return sum(event.colour == colour for event in self.events)


@dataclass(frozen=True, slots=True)
class Question:
    """Question about one clip."""

    kind: Kind
    text: str
    answer: str


def draw_scene(rng: np.random.Generator, shortest_s: float, longest_s: float, max_events: int = EVENTS[-1]) -> Scene:
    """Draw a scene with a log-uniform length, in which the target colour occurs 0 to 3 times with equal probability."""
    frames = round(math.exp(rng.uniform(math.log(shortest_s), math.log(longest_s))) * FPS)
    most = min(max_events, int(frames / FPS / PART_S + 1e-6))
    count = int(rng.integers(EVENTS[0], most + 1))
    counted_colour, *others = rng.permutation(list(COLOURS)).tolist()
    times = int(rng.choice(COUNTS))
    colours = rng.permutation([counted_colour] * times + rng.choice(others, count - times).tolist())
    part = frames / count
    events = []
    for place, colour in enumerate(colours.tolist()):
        share = rng.uniform(*EVENT_SHARE)
        start = math.ceil((place + rng.uniform(MARGIN, 1 - MARGIN - share)) * part)
        end = start + math.floor(share * part)
        corner = tuple(rng.integers(0, SIDE - SQUARE + 1, 2).tolist())
        events.append(Event(colour, start / FPS, end / FPS, corner))
    return Scene(frames / FPS, tuple(events), counted_colour)


def ask(scene: Scene, kind: Kind, rng: np.random.Generator) -> Question:
    """Draw a question of this kind."""
    if kind is Kind.COUNT:
        return Question(kind, f"how many {scene.counted_colour} ?", str(scene.count(scene.counted_colour)))
    if kind in (Kind.ORDER, Kind.PLACE):
        return ask_end(scene, kind, list(kind.ends)[rng.integers(2)])
    colour = scene.events[rng.integers(len(scene.events))].colour
    event = next(event for event in scene.events if event.colour == colour)
    return Question(kind, f"when is {colour} first ?", f"{event.start_s:.1f} to {event.end_s:.1f}")


def ask_end(scene: Scene, kind: Kind, end: str) -> Question:
    """Ask for the colour at an end, for instance `first`."""
    return Question(kind, f"which is {end} ?", scene.events[kind.ends[end]].colour)


def write_image(scene: Scene, path: Path) -> None:
    """Write an image with all events, from top to bottom."""
    Image.fromarray(np.concatenate([_pixels(event) for event in scene.events])).save(path)


def write_clip(scene: Scene, path: Path) -> None:
    """Write the scene as mp4 with H.264, or with MPEG-4 if PyAV has no H.264 encoder."""
    pictures = [_picture(None)] * round(scene.duration_s * FPS)
    for event in scene.events:
        first, last = round(event.start_s * FPS), round(event.end_s * FPS)
        pictures[first:last] = [_picture(event)] * (last - first)
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=FPS, options=_ENCODER if codec == "libx264" else {})
        stream.width = stream.height = SIDE
        stream.pix_fmt, stream.codec_context.gop_size = "yuv420p", 10 * FPS
        stream.codec_context.thread_count = 1
        for number, picture in enumerate(pictures):
            picture.pts, picture.time_base = number, Fraction(1, FPS)
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))


@answer_only
def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score an answer (verl's signature): 1.0 for the right number or colour; for intervals, the IoU with the event.

    `acc` is 1.0 for right answers and an IoU of at least 0.5. `format` is 1.0 if the text has the form of an answer.
    Reasoning before the answer is ignored. Data sources of blanked clips end in `_blind`.
    """
    text, truth = answer_after_reasoning(solution_str), str(ground_truth)
    data_source = data_source.removesuffix(BLIND)
    if data_source == Kind.LOCATE.data_source:
        return interval.score(data_source, text, truth, threshold=FOUND_IOU, whole=True)
    answers = {kind.data_source: list(COLOURS) for kind in (Kind.ORDER, Kind.PLACE)}
    answers[Kind.COUNT.data_source] = [str(count) for count in COUNTS]
    if truth not in answers.get(data_source, ()):
        raise ValueError(
            f"data_source and ground_truth: got {data_source!r}, {ground_truth!r}; only rows of this task are "
            "supported. Use another reward function for other data."
        )
    right = float(text == truth)
    return {"score": right, "acc": right, "format": float(text in answers[data_source])}


def verl_row(question: Question, scene: Scene, file: str, split: str, index: int) -> dict[str, Any]:
    """Return the question as a row in verl's format; for clips, `extra_info.task` sets the sampling."""
    kind, shows = question.kind, "image" if question.kind.is_image else "video"
    of_clip = {} if kind.is_image else {"task": str(kind.task), "duration_s": scene.duration_s}
    return {
        "data_source": kind.data_source,
        "prompt": [{"role": "user", "content": f"<{shows}> {question.text}"}],
        f"{shows}s": [{shows: file}],
        "ability": shows,
        "reward_model": {"style": "rule", "ground_truth": question.answer},
        "extra_info": {"split": split, "index": index, **of_clip, "events": len(scene.events)},
    }


def draw_clips(settings: Clips, split: str) -> Iterator[tuple[str, Scene, tuple[Question, ...]]]:
    """Yield (relative file, scene, questions) of each clip or image of the split."""
    kind = settings.kinds[0]
    for number in range(settings.val if split == "val" else settings.train):
        rng = np.random.default_rng((settings.seed, split == "val", number))
        scene = None
        while scene is None or (settings.distinct_ends and scene.events[0].colour == scene.events[-1].colour):
            scene = draw_scene(rng, settings.shortest_s, settings.longest_s, settings.max_events)
        file = f"{kind.folder}/{split}_{number:05}.{'png' if kind.is_image else 'mp4'}"
        yield file, scene, tuple(ask(scene, kind, rng) for kind in settings.kinds)


def write_task(folder: Path, settings: Clips | None = None) -> tuple[Path, Path]:
    """Write `clips/*.mp4` or `images/*.png`, `train.parquet` and `val.parquet`; return the parquet files.

    The folder must exist.
    """
    settings = settings or Clips()
    (folder / settings.kinds[0].folder).mkdir()
    files = []
    for split in ("train", "val"):
        rows: list[dict[str, Any]] = []
        for file, scene, questions in draw_clips(settings, split):
            _write(scene, folder / file)
            rows += [verl_row(question, scene, file, split, len(rows) + n) for n, question in enumerate(questions)]
        files.append(folder / f"{split}.parquet")
        pq.write_table(pa.Table.from_pylist(rows), files[-1])
    return files[0], files[1]


def write_blind(folder: Path, settings: Clips | None = None) -> Path:
    """Write `val_blind.parquet`: the questions of `val` about blank clips or images of the same length and size.

    The accuracy on these rows is the baseline of a model that sees nothing.
    """
    rows: list[dict[str, Any]] = []
    for file, scene, questions in draw_clips(settings or Clips(), "val"):
        blank = str((path := PurePosixPath(file)).with_stem(path.stem + BLIND))
        _write(replace(scene, events=tuple(replace(event, colour="") for event in scene.events)), folder / blank)
        for question in questions:
            row = verl_row(question, scene, blank, "val", len(rows))
            rows.append(row | {"data_source": row["data_source"] + BLIND})
    pq.write_table(pa.Table.from_pylist(rows), written := folder / "val_blind.parquet")
    return written


def _write(scene: Scene, path: Path) -> None:
    (write_image if path.suffix == ".png" else write_clip)(scene, path)


def _picture(event: Event | None) -> av.VideoFrame:
    return av.VideoFrame.from_ndarray(_pixels(event), "rgb24").reformat(format="yuv420p")


def _pixels(event: Event | None) -> np.ndarray:
    pixels = np.full((SIDE, SIDE, 3), GROUND, dtype=np.uint8)
    if event and event.colour:
        down, across = event.corner
        pixels[down : down + SQUARE, across : across + SQUARE] = COLOURS[event.colour]
    return pixels
