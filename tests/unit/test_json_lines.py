"""JSON-lines files: complete rows are read and appended to; no row is left half written."""

import json
import resource
import warnings
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlfuse import files
from rlfuse.application import run_command
from rlfuse.errors import FAILED, NotWritten, RunError
from rlfuse.files import RowFile, read_rows
from rlfuse.observe.tracking import StepFile

ROWS = [{"step": 1, "text": "é"}, {"step": 2, "text": "中文", "nan": None}, {"step": 3, "text": "é \u2028"}]
LINES = [json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS]


TAILS = st.one_of(
    st.integers(0, 60).map(lambda size: LINES[2].encode()[: min(size, len(LINES[2].encode()) - 1)]),  # also cuts é
    st.sampled_from([b"\0\0\0", b"12\n", b"\xff\n", b"{\n"]),
)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(whole=st.integers(0, 2), tail=TAILS)
def test_complete_rows_are_read_and_appended_to_after_any_file_end(tmp_path_factory, whole, tail):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    before = "".join(LINES[:whole]).encode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for keep in (None, lambda row: True):
            path.write_bytes(before + tail)
            assert list(read_rows(path)) == ROWS[:whole]
            with closing(RowFile(path, keep)) as file:
                file.append([{"step": 9}])
            assert list(read_rows(path)) == [*ROWS[:whole], {"step": 9}]
    words = f"{path}: skipping the last row (from byte {len(before)})"
    assert sum(words in str(each.message) for each in caught) == 4 * bool(tail)  # others may warn


@pytest.mark.parametrize("line", [b"\n", b"{\n", b"\0\0\n", b"[1]\n", b"\xc3\n", b'{"a":' + b"[" * 100_000 + b"\n"])
def test_invalid_row_before_the_last_is_reported_with_file_and_line(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(LINES[0].encode() + line + LINES[1].encode())
    for read in (lambda: list(read_rows(path)), lambda: StepFile(path, after=2)):
        with pytest.raises(RunError, match=rf"{path}, line 2: .*; remove that line"):
            read()
    assert path.read_bytes().endswith(LINES[1].encode()), "rows after the invalid one were removed"


def test_last_row_that_is_being_written_is_not_an_error(tmp_path, monkeypatch):
    path, decoded = tmp_path / "events.jsonl", files._decoded
    path.write_text(LINES[0] + LINES[1][:7])

    def slow(line, wanted):
        if not line.endswith(b"\n"):  # the incomplete last row
            with path.open("a") as writer:
                writer.write(LINES[1][7:] + LINES[2])
        return decoded(line, wanted)

    monkeypatch.setattr(files, "_decoded", slow)
    with pytest.warns(UserWarning, match="skipping the last row"):
        assert list(read_rows(path)) == ROWS[:1]
    assert list(read_rows(path)) == ROWS


@pytest.mark.parametrize("line", ['{"x": 1}\n', '{"step": "2"}\n'])
def test_row_without_a_step_is_reported_on_resume(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(LINES[0] + line + LINES[1])
    with pytest.raises(RunError, match=rf"{path}, the row at byte {len(LINES[0].encode())}: .*remove that line"):
        StepFile(path, after=2)


def test_rows_of_repeated_steps_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(LINES))
    with closing(StepFile(path, after=1)) as file:
        file.write(2, {"x": 1.0}, {"x": 2.0})
    assert list(read_rows(path)) == [ROWS[0], {"step": 2, "x": 1.0}, {"step": 2, "x": 2.0}]
    assert list(read_rows(tmp_path / "absent.jsonl")) == []


def test_full_disk_leaves_complete_rows_and_is_reported(tmp_path, capsys):
    """Simulate a full disk by a limit on the file size: the system writes what fits, then fails."""
    path = tmp_path / "samples.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(RowFile(path)) as file:
        file.append([{"text": "x" * (1 << 20)}])
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
        try:
            with pytest.raises(
                NotWritten, match=rf"{path}: 48 bytes could not be added .*{tmp_path} has .* MiB free"
            ) as caught:
                file.append([{"step": 2, "text": "more than twenty bytes here"}])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        file.append([{"step": 3}])
    assert [len(row) for row in read_rows(path)] == [1, 1]

    def fail():
        raise caught.value

    assert run_command(fail) == FAILED
    assert "Traceback" not in capsys.readouterr().err
