"""Data files with byte order marks, and CSV files."""

import pytest

from rlfuse.data.rows import read_rows

BOM = b"\xef\xbb\xbf"
LIST, LINE, CELLS = b'[{"prompt": "1 2"}]', b'{"prompt": "1 2"}', b"prompt\n1 2"
MARKED_FILES = {
    "list.json": LIST,
    "object.json": LINE,
    "lines.jsonl": LINE + b"\n" + LINE + b"\n",
    "lines.ndjson": LINE,
    "crlf.jsonl": LINE + b"\r\n",
    "blank.jsonl": b"\n\n" + LINE,
    "indented.json": b"  \n" + LIST,
    "cells.csv": CELLS,
    "quoted.csv": b'"prompt","answer"\n"1 2","3"\n',
    "crlf.csv": b"prompt,answer\r\n1 2,3\r\n",
    "blank.csv": CELLS + b"\n\n1 2\n",
}


@pytest.mark.parametrize("name", MARKED_FILES)
def test_a_byte_order_mark_is_skipped(tmp_path, name):
    for file, content in ((tmp_path / "plain" / name, b""), (tmp_path / "marked" / name, BOM)):
        file.parent.mkdir()
        file.write_bytes(content + MARKED_FILES[name])
    plain, marked = (read_rows(str(tmp_path / folder / name), "prompt") for folder in ("plain", "marked"))
    assert plain == marked and plain[0].columns["prompt"] == "1 2" and plain[0].messages[0]["content"] == "1 2"


def test_cells_of_a_csv_file_are_strings(tmp_path):
    (tmp_path / "a.csv").write_bytes('prompt,answer,level\r\n"1, ""2""\n\u2028 3",007,\r\n'.encode())
    [row] = read_rows(str(tmp_path / "a.csv"), "prompt")
    assert row.columns == {"prompt": '1, "2"\n\u2028 3', "answer": "007", "level": None} and row.ground_truth == "007"
