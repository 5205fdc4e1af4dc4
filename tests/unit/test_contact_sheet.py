"""Contact sheets of the frames that the model was given: order of frames, and layout of any text."""

import numpy as np
import pytest
from clip_files import plan_of, steady, write_video
from PIL import Image

from rlfuse.observe.sample_log import draw_sheets, light, sheets_of
from rlfuse.samples import Prompt, Response, Reward, RewardFailure, Sample, Visual
from rlfuse.video.contact_sheet import (
    MARGIN,
    MAX_ANSWERS,
    MOST_FRAMES,
    PANEL,
    Answer,
    Caption,
    contact_sheet,
    shown_frames,
)
from rlfuse.video.images import ImageMetadata, plan_image
from rlfuse.video.plan import ClipMetadata, FixedSampling, Geometry, SeedSampling, plan_video
from rlfuse.video.processor_sampling import PixelBounds

RED = (255, 0, 0)
IMAGE = plan_image(ImageMetadata(56, 84), PixelBounds(min_pixels=28**2, max_pixels=56 * 84), Geometry(temporal_patch=2))
CAPTION = Caption("step 1 · prompt 0", "How many?", (Answer("3", Reward(0.5, {"acc": 0.0})),), "4")


def sheet_of(plan, caption=CAPTION):
    """Return (sheet, shade of each frame) of single-colour frames, none of them white or grey."""
    shades = np.array(shown_frames([plan])[0]) * 251 % 256
    frames = np.zeros((len(shades), plan.height, plan.width, 3), np.uint8)
    frames[..., 0], frames[..., 1] = 255, shades[:, None, None]
    return np.asarray(contact_sheet([(frames, plan)], caption)), shades


@pytest.mark.parametrize(
    ("clip", "sampling"),
    [
        (ClipMetadata(1.0, 1.0, 480, 640), SeedSampling()),
        (ClipMetadata(30.0, 24.0, 56, 56), SeedSampling(budget=64, levels=(4, 1))),
        (ClipMetadata(60.0, 24.0, 1920, 1080), SeedSampling(levels=(16,), budget=2048)),
        (ClipMetadata(900.0, 24.0, 90, 160), FixedSampling(200, 4)),
    ],
)
def test_every_frame_is_shown_once_in_order(clip, sampling):
    plan = plan_video(clip, sampling)
    sheet, shades = sheet_of(plan)
    grid = sheet[MARGIN:-MARGIN, MARGIN : -2 * MARGIN - PANEL]
    red = (grid[..., 0] == 255) & (grid[..., 2] == 0)
    starts = red & ~np.roll(red, 1, axis=0) & ~np.roll(red, 1, axis=1)
    found = [int(grid[row, column, 1]) for row, column in np.argwhere(starts)]
    assert found == shades.tolist()


@pytest.mark.slow
def test_long_plans_show_evenly_spaced_frames():
    plan = plan_video(ClipMetadata(4000.0, 24.0, 28, 28), SeedSampling(budget=2000, levels=(1,)))
    sheet, shades = sheet_of(plan)
    assert plan.frames == 2000 and len(shades) == MOST_FRAMES and sheet.shape[0] < 4000


def test_shown_frames_of_several_plans():
    few, many = (plan_of([i / 2 for i in range(count)]) for count in (2, 1278))
    assert shown_frames([few, IMAGE]) == [[0, 1], [0]]
    shown = shown_frames([few, IMAGE, many])
    assert [len(each) for each in shown] == [1, 1, MOST_FRAMES - 2] and shown[2][-1] == 1277
    assert shown_frames([IMAGE] * 700)[-1] == [0] == shown_frames([IMAGE] * 700)[1], "at least one frame of each"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("", None),
        ("x" * 5000, Reward(-1234567.0, {f"part{i}": i / 7 for i in range(40)})),
        ("word " * 3000, RewardFailure("judge", "late " * 200)),
        ("line\n" * 300, Reward(0.0)),
        ("日本 é ∑", Reward(1e-9)),
    ],
    ids=["empty", "no spaces", "long", "many lines", "scripts"],
)
def test_any_text_fits_on_the_sheet(answer, reward):
    plan = plan_video(ClipMetadata(2.0, 24.0, 56, 56), SeedSampling())
    sheet, _ = sheet_of(plan, Caption("t" * 500, answer, (Answer(answer, reward),) * 5, answer))
    assert (sheet[:, -MARGIN:] == 255).all() and (sheet[-MARGIN:] == 255).all()
    assert (sheet[:, -MARGIN - PANEL : -MARGIN] != 255).any()


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1, 7, MAX_ANSWERS, 500])
def test_all_answers_are_shown_below_the_frames(count):
    plan = plan_video(ClipMetadata(2.0, 24.0, 56, 56), SeedSampling())
    answers = tuple(Answer(f"answer {number}", Reward(float(number % 2))) for number in range(count))
    sheet, _ = sheet_of(plan, Caption("step 1 · prompt 0", "How many?", answers))
    rewards = [(np.abs(sheet.astype(int) - colour).max(axis=2) < 8).any() for colour in ((194, 56, 90), (31, 138, 76))]
    assert rewards == [count > 0, count > 1] and sheet.shape[0] < 8000, "low rewards are red, high ones green"


@pytest.mark.slow
def test_logged_samples_have_a_sheet_unless_a_clip_or_image_is_missing(tmp_path):
    plan = plan_of([0.0, 0.5])
    present, missing = write_video(tmp_path / "here.mp4", steady(10), size=(28, 224)), str(tmp_path / "gone.mp4")
    Image.new("RGB", (84, 56), RED).save(tmp_path / "here.png")
    at = np.arange(2, dtype=np.int32)
    clip = Visual(at, None, present, plan)
    videos = (
        (clip, Visual(at, None, str(tmp_path / "here.png"), IMAGE)),
        (),
        (Visual(at, None, missing, plan),),
        (clip, Visual(at, None, str(tmp_path / "gone.png"), IMAGE)),
    )
    response = Response(np.zeros(1, np.int32), np.zeros(1, np.float32), "stop", 0, "three")
    samples = [
        Sample(Prompt(number, np.zeros(3, np.int32), "how many?", (), "x", 3, visual=video), 7, sibling, 0, response)
        for number, video in enumerate(videos)
        for sibling in range(2)
    ]
    sheets = sheets_of(samples, None)
    assert sheets.keys() == {f"7/{shown}/{sibling}" for shown in (0, 2, 3) for sibling in range(2)}
    assert sheets_of(samples, 1).keys() == {"7/0/0", "7/0/1"}
    assert sheets["7/0/0"] == sheets["7/0/1"], "one sheet per prompt"
    assert sheets_of(samples, 0) == {}
    draw_sheets(tmp_path, 7, [light(sample) for sample in samples if sample.id in sheets], sheets, 20.0)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*.png")} == {sheets["7/0/0"]}
    red = (np.asarray(Image.open(tmp_path / sheets["7/0/0"])) == RED).all(axis=2)
    starts = red & ~np.roll(red, 1, axis=0) & ~np.roll(red, 1, axis=1)
    assert starts.sum() == 1, "an image is shown once for any temporal patch size"
