"""The long-video question task: scenes, clip files, questions, rows and the reward."""

import math
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfuse.tasks import clips
from rlfuse.tasks.clips import COLOURS, FPS, Clips, Kind, ask, compute_score, draw_scene, write_task
from rlfuse.video.decoding import decode, probe
from rlfuse.video.plan import ClipMetadata, FixedSampling, SeedSampling, plan_video

SMALL = Clips(train=3, val=2, shortest_s=10.0, longest_s=40.0, max_events=6)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return (folder, training rows, validation rows)."""
    folder = tmp_path_factory.mktemp("task")
    return folder, *(pq.read_table(file).to_pylist() for file in write_task(folder, SMALL))


def colours(pixels):
    """Return the colour shown in each frame of uint8 [frames, height, width, 3]; None for a blank frame."""
    spread = pixels.reshape(len(pixels), -1, 3).astype(float)
    places = np.abs(spread - 128).sum(axis=2).argmax(axis=1)
    vivid = spread[np.arange(len(spread)), places]
    known = {None: clips.GROUND, **COLOURS}
    return [min(known, key=lambda name: np.abs(np.array(known[name]) - pixel).sum()) for pixel in vivid]


def runs(shown):
    """Return colours in order of appearance, each event once."""
    return [now for before, now in zip([None, *shown[:-1]], shown, strict=True) if now and now != before]


@pytest.mark.slow
@given(st.integers(0, 2**32), st.floats(10, 600), st.sampled_from(["general", "detail", "motion"]))
def test_every_event_and_pause_is_sampled_by_the_supported_plans(seed, longest, task):
    scene = draw_scene(np.random.default_rng(seed), 10.0, longest)
    facts = ClipMetadata(scene.duration_s, FPS, 56, 56)
    for sampling in (SeedSampling(), SeedSampling(budget=20, levels=(1,)), FixedSampling(20, 1)):
        plan = plan_video(facts, sampling, task)
        shown = [
            next((event.colour for event in scene.events if event.start_s <= time < event.end_s), None)
            for time in plan.times
        ]
        assert runs(shown) == [event.colour for event in scene.events]


@pytest.mark.slow
def test_answers_are_balanced():
    answers = {kind: Counter() for kind in Kind}
    for seed in range(1500):
        rng = np.random.default_rng(seed)
        scene = draw_scene(rng, 10.0, 600.0)
        assert 10.0 <= scene.duration_s <= 600.0 and 3 <= len(scene.events) <= 6
        for kind in Kind:
            answers[kind][ask(scene, kind, rng).answer] += 1
    for kind in (Kind.COUNT, Kind.ORDER, Kind.PLACE):
        assert len(answers[kind]) == 4 and max(answers[kind].values()) < 0.3 * 1500
    assert max(answers[Kind.LOCATE].values()) < 0.05 * 1500


@pytest.mark.slow
def test_answers_match_the_content_of_the_clips(written):
    folder, train, val = written
    for row in train + val:
        path = str(folder / row["videos"][0]["video"])
        facts = probe(path)
        assert facts.duration_s == pytest.approx(row["extra_info"]["duration_s"]) and facts.fps == FPS
        plan = plan_video(facts, SeedSampling(levels=(1,)), row["extra_info"]["task"])
        shown = colours(decode(path, plan))
        seen = runs(shown)
        assert len(seen) == row["extra_info"]["events"]
        truth, words = row["reward_model"]["ground_truth"], row["prompt"][0]["content"].split()
        if row["data_source"] == "clips_count":
            assert words[:3] == ["<video>", "how", "many"] and seen.count(words[3]) == int(truth)
        elif row["data_source"] == "clips_order":
            assert truth == {"first": seen[0], "last": seen[-1]}[words[3]]
        else:
            start, end = map(float, truth.split(" to "))
            times = [time for time, colour in zip(plan.times, shown, strict=True) if colour == words[3]]
            assert start <= times[0] < start + 1 / plan.fps
            assert any(time < end <= time + 1 / plan.fps + 1e-6 for time in times)


def test_rows_have_the_format_of_verl_and_splits_are_disjoint(written):
    folder, train, val = written
    assert (len(train), len(val)) == (9, 6)
    assert {row["data_source"] for row in train} == {"clips_count", "clips_order", "clips_locate"}
    assert [row["extra_info"]["index"] for row in train] == list(range(9))
    files = [{row["videos"][0]["video"] for row in rows} for rows in (train, val)]
    contents = [{(folder / file).read_bytes() for file in part} for part in files]
    assert (len(contents[0]), len(contents[1])) == (3, 2) and not contents[0] & contents[1]
    spelled = {sign for sign in (*clips.WORDS, *clips.SIGNS)}
    for row in train + val:
        text = f"{row['prompt'][0]['content'].removeprefix('<video> ')} {row['reward_model']['ground_truth']}"
        for piece in sorted(spelled, key=len, reverse=True):
            text = text.replace(piece, "")
        assert not text.strip()


@pytest.mark.slow
def test_the_same_settings_give_the_same_task(written, tmp_path):
    _, train, val = written
    again = [pq.read_table(file).to_pylist() for file in write_task(tmp_path, SMALL)]
    assert again == [train, val]
    (tmp_path / "other").mkdir()
    other = write_task(tmp_path / "other", Clips(train=3, val=2, shortest_s=10.0, longest_s=40.0, max_events=6, seed=2))
    assert pq.read_table(other[0]).to_pylist() != train


@pytest.mark.parametrize(
    ("source", "answer", "truth", "expected"),
    [
        ("clips_count", "2", "2", (1.0, 1.0, 1.0)),
        ("clips_count", " 2\n", "2", (1.0, 1.0, 1.0)),
        ("clips_count", "3", "2", (0.0, 0.0, 1.0)),
        ("clips_count", "2 3", "2", (0.0, 0.0, 0.0)),
        ("clips_order", "red", "red", (1.0, 1.0, 1.0)),
        ("clips_order", "red blue", "red", (0.0, 0.0, 0.0)),
        ("clips_order", "", "red", (0.0, 0.0, 0.0)),
        ("clips_order_blind", "red", "red", (1.0, 1.0, 1.0)),
        ("clips_order", "<think> blue </think> red", "red", (1.0, 1.0, 1.0)),
        ("clips_order", "<think> red </think> blue", "red", (0.0, 0.0, 1.0)),
        ("clips_order", "<think> red", "red", (0.0, 0.0, 0.0)),
        ("clips_order", "red <think> blue </think>", "red", (0.0, 0.0, 0.0)),
        ("clips_count_blind", "<think></think>2", "2", (1.0, 1.0, 1.0)),
        ("clips_locate", "2.0 to 6.0", "2.0 to 6.0", (1.0, 1.0, 1.0)),
        ("clips_locate", "4 to 8", "2.0 to 6.0", (1 / 3, 0.0, 1.0)),
        ("clips_locate", "3.0 to 6.0", "2.0 to 6.0", (0.75, 1.0, 1.0)),
        ("clips_locate", "7.0 to 9.0", "2.0 to 6.0", (0.0, 0.0, 1.0)),
        ("clips_locate", "6.0 to 2.0", "2.0 to 6.0", (0.0, 0.0, 0.0)),
        ("clips_locate", "soon", "2.0 to 6.0", (0.0, 0.0, 0.0)),
        ("images_place", "red", "red", (1.0, 1.0, 1.0)),
        ("images_place_blind", "red", "blue", (0.0, 0.0, 1.0)),
    ],
)
def test_reward(source, answer, truth, expected):
    scores = compute_score(source, answer, truth)
    assert (scores["score"], scores["acc"], scores["format"]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("source", "truth"),
    [("clips_count", "7"), ("clips_order", "pink"), ("gsm8k", "2"), ("_blind", "2"), ("clips_locate", "later")],
)
def test_rows_of_other_tasks_are_refused(source, truth):
    with pytest.raises(ValueError, match="ground_truth: got"):
        compute_score(source, "2", truth)


@pytest.mark.parametrize(
    "bad",
    [
        {"train": 0},
        {"kinds": ()},
        {"kinds": (Kind.ORDER, Kind.PLACE)},
        {"shortest_s": 5.0},
        {"longest_s": math.inf},
        {"max_events": 7},
    ],
)
def test_settings_are_checked(bad):
    with pytest.raises(ValueError, match="Clips: got"):
        Clips(**bad)
