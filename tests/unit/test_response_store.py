"""The file of earlier responses: kills, corruption, full disks, and selection of drafts."""

import os
from dataclasses import replace

import numpy as np
import pytest

from rlfuse.run_folder import response_store
from rlfuse.run_folder.response_store import FILE, HEADER_BYTES, MAGIC, ResponseStore, StoredResponses
from rlfuse.samples import VALIDATION, Prompt, Response, make_groups
from rlfuse.step.drafts import OTHER_RESPONSES, Drafts, attach
from rlfuse.tools.evaluation.neighbours import attach_nearest, stores
from rlfuse.tools.evaluation.source import Source


def tokens(number: int, count: int = 10) -> np.ndarray:
    return np.arange(number, number + count, dtype=np.int32)


def found(stored: StoredResponses, *keys: int) -> list[tuple[int, int] | None]:
    """Return the step and first token of each response; check its other tokens."""
    responses = [stored.find(key) for key in keys]
    for each in filter(None, responses):
        assert each.token_ids.tolist() == tokens(each.token_ids[0]).tolist()
    return [each and (each.step, int(each.token_ids[0])) for each in responses]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / FILE


@pytest.fixture
def store(path):
    with_three = ResponseStore(path, 1 << 20)
    for key in (1, 2, 3):
        with_three.add(step=4, key=key, token_ids=tokens(100 * key))
    yield with_three
    with_three.close()


def test_the_last_response_of_each_key_is_found_before_and_after_reopening(store, path):
    store.add(step=6, key=2, token_ids=tokens(250))
    expected = [(4, 100), (6, 250), (4, 300), None]
    assert found(store, 1, 2, 3, 9) == expected and store.step_of(2) == 6 and store.step_of(9) is None
    reopened = ResponseStore(path, 1 << 20)
    reopened.add(step=7, key=9, token_ids=tokens(900))
    for stored in (reopened, StoredResponses(path)):
        assert found(stored, 1, 2, 3, 9) == [*expected[:3], (7, 900)]
        assert stored.last_step == 7 and stored.count == 4
        stored.close()


RECORD = HEADER_BYTES + 40


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda content: content[:-1], [(4, 100), (4, 200), None]),
        (lambda content: content[: -RECORD + 3], [(4, 100), (4, 200), None]),
        (lambda content: content + content[-RECORD:-5], [(4, 100), (4, 200), (4, 300)]),
        (lambda content: content + bytes(100), [(4, 100), (4, 200), (4, 300)]),
        (lambda content: content[: len(MAGIC) + RECORD + 30] + b"?" + content[len(MAGIC) + RECORD + 31 :],
         [(4, 100), None, None]),
        (lambda content: content[: len(MAGIC) + 12] + b"\xff" * 4 + content[len(MAGIC) + 16 :], [None] * 3),
        (lambda content: b"another format" + content, [None] * 3),
        (lambda content: MAGIC[:3], [None] * 3),
        (lambda content: b"", [None] * 3),
    ],
    ids=["killed", "killed in a header", "half a record", "zeros", "a flipped byte", "a length", "a format", "a start",
         "empty"],
)  # fmt: skip
def test_a_damaged_file_is_read_up_to_the_damage_and_continued_there(store, path, damage, expected):
    store.close()
    path.write_bytes(damage(path.read_bytes()))
    unfinished = path.with_name(f".{FILE}.12.part")
    unfinished.touch()
    reader = StoredResponses(path)
    assert found(reader, 1, 2, 3) == expected
    reader.close()
    reopened = ResponseStore(path, 1 << 20)
    reopened.add(step=5, key=8, token_ids=tokens(800))
    reopened.close()
    assert not unfinished.exists()
    reader = StoredResponses(path)
    assert found(reader, 1, 2, 3, 8) == [*expected, (5, 800)]
    reader.close()


def test_a_file_truncated_during_reading_has_the_responses_before_the_cut(store, path, monkeypatch):
    size = path.stat().st_size
    store.close()
    os.truncate(path, size - 3)
    monkeypatch.setattr(response_store.os, "fstat", lambda _: os.stat_result([0] * 6 + [size] + [0] * 3))
    reader = StoredResponses(path)
    assert found(reader, 1, 2, 3) == [(4, 100), (4, 200), None]
    reader.close()


def test_the_oldest_responses_are_dropped_at_the_limit(path):
    limit = len(MAGIC) + 20 * RECORD
    store = ResponseStore(path, limit)
    for number in range(70):
        store.add(step=number, key=number % 50, token_ids=tokens(number))
        assert path.stat().st_size <= limit and store.find(number % 50).step == number
    newest = [store.find(key) for key in range(20)]
    assert all(each is not None for each in newest[-14:]) and store.find(30) is None and store.dropped > 0
    store.add(step=99, key=99, token_ids=tokens(0, 1000))  # larger than the limit
    assert store.find(99) is None
    store.close()
    assert [each.name for each in path.parent.iterdir()] == [FILE]


def test_a_response_to_the_same_key_replaces_the_earlier_one(path):
    limit = len(MAGIC) + 20 * RECORD
    store = ResponseStore(path, limit)
    for epoch in range(9):
        for key in range(10):
            store.add(step=epoch, key=key, token_ids=tokens(key))
        assert [store.find(key).step for key in range(10)] == [epoch] * 10
    assert store.dropped == 0
    store.close()


def test_a_full_disk_at_startup_does_not_end_the_run(path, monkeypatch):
    messages = []
    monkeypatch.setattr(response_store.ResponseStore, "_write", lambda self, content: os.write(-1, content))
    store = ResponseStore(path, 1 << 20, messages.append)
    store.add(step=1, key=1, token_ids=tokens(1))
    assert len(messages) == 1 and "could not be written" in messages[0] and not path.exists() and store.find(1) is None


@pytest.mark.parametrize("fails", ["write", "rewrite"])
def test_a_store_that_cannot_be_written_is_removed_and_the_run_continues(path, monkeypatch, fails):
    messages = []
    store = ResponseStore(path, len(MAGIC) + 4 * RECORD, messages.append)
    store.add(step=1, key=1, token_ids=tokens(1))
    if fails == "write":
        store._file = type("Full", (), {"write": lambda self, record: len(record) // 2, "close": lambda self: None})()
    else:
        monkeypatch.setattr(response_store, "atomic_write", lambda path: (_ for _ in ()).throw(OSError("no space")))
    for key in range(2, 9):
        store.add(step=1, key=key, token_ids=tokens(key))
    assert len(messages) == 1 and f"{path} could not be written" in messages[0] and not path.exists()
    assert store.find(1) is None
    store.close()


# Drafts --------------------------------------------------------------------------------------------------------------


def prompts(count: int) -> list[Prompt]:
    return [Prompt(index, np.array([1, 2, 3]), "p", (), "s", None) for index in range(count)]


def with_responses(groups, first: int = 0):
    for group in groups:
        for sample in group.samples:
            sample.response = Response(tokens(first + sample.rollout_index), np.zeros(10, np.float32), "stop", 0, "")
            yield sample


@pytest.mark.parametrize(
    ("first", "line"),
    [(0, "step 3 was repeated: all 4 stored responses are identical"), (5, "4 of 4 stored responses differ")],
)
def test_a_repeated_step_drafts_its_stored_responses_and_compares_them(store, first, line):
    messages = []
    for sample in with_responses(make_groups(prompts(2), 2, 7, 3)):
        Drafts(store=store).record(sample)
    drafts = Drafts(store=store, are_wanted=True, repeated_until=3, say=messages.append)
    groups = make_groups(prompts(3), 2, 7, 3)
    drafts.attach(groups)
    assert [[len(s.drafts) for s in g.samples] for g in groups] == [[2] * 2, [2] * 2, [0] * 2]
    assert [each.tolist() for each in groups[0].samples[1].drafts] == [tokens(1).tolist(), tokens(0).tolist()]
    for sample in with_responses(groups, first):
        drafts.record(sample)
    assert all(not sample.drafts for group in groups for sample in group.samples)
    drafts.report(3)
    drafts.report(4)
    assert len(messages) == 1 and line in messages[0]
    for later in (Drafts(store=store, are_wanted=True), Drafts(store=store), Drafts()):
        groups = make_groups(prompts(2), 2, 7, 4)
        later.attach(groups)
        assert not any(sample.drafts for group in groups for sample in group.samples), "other seeds"


@pytest.mark.parametrize("missing", [(), (1,), (0, 2), (0, 1, 2, 3)], ids=str)
def test_drafts_are_the_own_stored_response_and_the_next_ones_to_the_prompt(store, missing):
    [group] = make_groups(prompts(1), 4, 7, 1)
    for sample in with_responses([group]):
        if sample.rollout_index not in missing:
            store.add(1, sample.draft_key, sample.response.token_ids)
    attach(store, [group])
    for sample in group.samples:
        index = sample.rollout_index
        others = [other % 4 for other in range(index + 1, index + 4) if other % 4 not in missing][:OTHER_RESPONSES]
        expected = [] if index in missing else [tokens(each).tolist() for each in (index, *others)]
        assert [each.tolist() for each in sample.drafts] == expected


@pytest.mark.parametrize(("limit_mb", "lines"), [(256, 1), (0, 0)], ids=["over epochs", "of repeated steps"])
def test_a_store_that_is_too_small_for_an_epoch_is_reported_once(path, limit_mb, lines):
    messages, store = [], ResponseStore(path, len(MAGIC) + 4 * RECORD)
    drafts = Drafts(store=store, are_wanted=True, epoch_limit_mb=limit_mb, say=messages.append)
    drafts.report(1)
    assert not messages
    for sample in with_responses(make_groups(prompts(4), 2, 7, 1)):
        drafts.record(sample)
    for step in (1, 2):
        drafts.report(step)
    assert len(messages) == lines and all("rollout.draft_store_mb=256 is reached" in line for line in messages)
    store.close()


def test_an_evaluation_uses_drafts_of_the_nearest_step(tmp_path):
    run = tmp_path / "run"
    for name, step in (("eval/global_step_2", 2), ("eval/global_step_8", 8), ("eval/mine", 5)):
        stored = ResponseStore(run / name / FILE, 1 << 20)
        for sample in with_responses(make_groups(prompts(2), 2, 7, step, scope=VALIDATION), first=step):
            stored.add(step, sample.draft_key + (name == "eval/mine"), sample.response.token_ids)  # mine: other prompts
        stored.close()
    folder = run / "eval" / "global_step_6"
    paths = stores(Source("m", 6, run), folder)
    assert len(paths) == 3
    groups = make_groups(prompts(2), 2, 7, 6, scope=VALIDATION)
    assert attach_nearest(groups, 6, paths) == run / "eval" / "global_step_8" / FILE
    assert [sample.drafts[0][0] for group in groups for sample in group.samples] == [8, 9, 8, 9]
    interrupted = ResponseStore(run / "eval/interrupted" / FILE, 1 << 20)  # has one response
    interrupted.add(6, groups[0].samples[0].draft_key, tokens(70))
    interrupted.close()
    removed = run / "eval/removed" / FILE
    assert attach_nearest(groups, 6, [*paths, interrupted.path, removed]) == interrupted.path
    assert [sample.drafts[0][0] for group in groups for sample in group.samples] == [70, 9, 8, 9]
    ResponseStore(run / FILE, 1 << 20).close()
    assert (run / FILE) in stores(Source("m", 6, run), folder), "the run's own validations"
    others = [replace(group.samples[0], seed=1, drafts=()) for group in groups]
    assert attach_nearest([replace(groups[0], samples=others)], 6, paths) is None
    assert attach_nearest(groups, 6, []) is None and os.listdir(run / "eval" / "mine") == [FILE]
