"""Event logs of long runs: rows are rotated into compressed parts, and every span is read exactly once."""

import errno
import gzip
import os
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path

import pytest

from rlfuse import events
from rlfuse.errors import RunError
from rlfuse.events import EventLog, Span, read_events, read_spans


class Killed(BaseException):
    """Raised in place of a kill of the process."""


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    """Rotate after nine steps."""
    monkeypatch.setattr(events, "PART_BYTES", 5000)


def spans_of(step):
    return [Span("decode", f"rollout/{slot}", step + slot / 10, step + 0.5, step) for slot in range(5)]


def write(path, steps):
    with closing(EventLog(path)) as log:
        for step in steps:
            log.rotate()
            log.write(spans_of(step))


def expected(steps):
    return [span for step in steps for span in spans_of(step)]


def test_parts_are_small_and_named_after_their_steps(tmp_path):
    path = tmp_path / "events.jsonl"
    write(path, range(1, 31))
    write(path, range(21, 61))  # a resume from step 20
    assert read_events(path) == expected([*range(1, 31), *range(21, 61)])
    parts = sorted((tmp_path / "events").iterdir())
    assert [part.name for part in parts][:2] == ["00001-steps-1-9.jsonl.gz", "00002-steps-10-18.jsonl.gz"]
    assert all(part.stat().st_size < 1000 for part in parts) and path.stat().st_size < 6000
    assert [int(part.name[:5]) for part in parts] == list(range(1, len(parts) + 1))


def test_only_parts_of_the_requested_steps_are_read(tmp_path, monkeypatch):
    path, opened, plain = tmp_path / "events.jsonl", [], gzip.open
    write(path, range(1, 31))
    monkeypatch.setattr(gzip, "open", lambda file, *more: (opened.append(file.name), plain(file, *more))[1])
    assert list(read_spans(path, lambda line: '"step":10,' in line, steps=[10, 40])) == spans_of(10)
    assert opened == ["00002-steps-10-18.jsonl.gz"]


@pytest.mark.parametrize("read", range(0, 100, 9))
def test_a_reader_follows_rows_that_are_rotated_during_the_read(tmp_path, read):
    path = tmp_path / "events.jsonl"
    write(path, range(1, 13))
    reader = read_spans(path)
    found = list(islice(reader, read))
    write(path, range(13, 31))
    found += reader
    known = expected(range(1, 31))
    assert found == known[: len(found)] and len(found) >= 12 * 5, "spans are read twice or missing"


@pytest.mark.parametrize("step", ["rename", "open", "replace", "unlink"])
@pytest.mark.parametrize("error", [Killed(), OSError(errno.ENOSPC, "No space left on device")])
def test_no_span_is_lost_after_a_kill_or_on_a_full_disk(tmp_path, monkeypatch, step, error):
    path = tmp_path / "events.jsonl"
    write(path, range(1, 10))

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(*{"open": (events.gzip, "open"), "unlink": (Path, "unlink")}.get(step, (Path, step)), fail)
        with suppress(Killed):
            write(path, [10])
    wrote = not isinstance(error, Killed)
    assert read_events(path) == expected(range(1, 11 if wrote else 10))
    write(path, range(20, 41))
    assert read_events(path) == expected([*range(1, 11 if wrote else 10), *range(20, 41)])
    assert not list((tmp_path / "events").glob("*.jsonl")), "leftover files are compressed later"


@pytest.mark.parametrize("damage", [lambda whole: whole[:-20], lambda whole: b"x" + whole, lambda whole: whole[:40]])
def test_a_damaged_part_is_reported_by_name(tmp_path, damage):
    path = tmp_path / "events.jsonl"
    write(path, range(1, 13))
    part = tmp_path / "events" / "00001-steps-1-9.jsonl.gz"
    part.write_bytes(damage(part.read_bytes()))
    with pytest.raises(RunError, match=f"{part.name} is damaged .*remove it"):
        read_events(path)
    os.remove(part)
    assert read_events(path) == expected(range(10, 13))
