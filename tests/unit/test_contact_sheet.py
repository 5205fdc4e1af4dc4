"""The picture of what the model saw: every frame in its place, and room for any text."""

import numpy as np
import pytest

from rlfuse.samples import Reward, RewardFailure
from rlfuse.video.contact_sheet import MARGIN, MOST_FRAMES, PANEL, Caption, contact_sheet
from rlfuse.video.plan import ClipFacts, FixedSampling, SeedSampling, plan_video

CAPTION = Caption("step 1 · 1/0/0", "How many?", "3", "4", Reward(0.5, {"acc": 0.0}))


def sheet_of(plan, caption=CAPTION):
    """A sheet of frames of one colour each, none of them white or grey."""
    shades = np.arange(plan.frames) * 251 % 256
    frames = np.zeros((plan.frames, plan.height, plan.width, 3), np.uint8)
    frames[..., 0], frames[..., 1] = 255, shades[:, None, None]
    return np.asarray(contact_sheet(frames, plan, caption)), shades


@pytest.mark.parametrize(
    ("clip", "sampling"),
    [
        (ClipFacts(1.0, 1.0, 480, 640), SeedSampling()),
        (ClipFacts(30.0, 24.0, 56, 56), SeedSampling(budget=64, levels=(4, 1))),
        (ClipFacts(60.0, 24.0, 1920, 1080), SeedSampling(levels=(16,), budget=2048)),
        (ClipFacts(900.0, 24.0, 90, 160), FixedSampling(200, 4)),
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


def test_a_plan_of_more_frames_shows_some_evenly():
    plan = plan_video(ClipFacts(4000.0, 24.0, 28, 28), SeedSampling(budget=2000, levels=(1,)))
    sheet, _ = sheet_of(plan)
    assert plan.frames == 2000 > MOST_FRAMES and sheet.shape[0] < 4000


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
def test_any_text_fits(answer, reward):
    plan = plan_video(ClipFacts(2.0, 24.0, 56, 56), SeedSampling())
    sheet, _ = sheet_of(plan, Caption("t" * 500, answer, answer, answer, reward))
    assert (sheet[:, -MARGIN:] == 255).all() and (sheet[-MARGIN:] == 255).all()
    assert (sheet[:, -MARGIN - PANEL : -MARGIN] != 255).any()


def test_frames_of_another_plan_are_refused():
    plan = plan_video(ClipFacts(3.0, 24.0, 56, 56), SeedSampling())
    with pytest.raises(ValueError, match=r"got uint8 \(2, 56, 56, 3\); valid is uint8 \(3, 56, 56, 3\)"):
        contact_sheet(np.zeros((2, 56, 56, 3), np.uint8), plan, CAPTION)
