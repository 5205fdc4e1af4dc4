"""Consoles that can't show every character: commands print what they can, and go on."""

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console
from rich.table import Table

from rlfuse.errors import ConfigError
from rlfuse.progress import part
from rlfuse.train import OK, USER_ERROR, reported

ENCODINGS = ["ascii", "latin-1", "cp1252", "cp437", "iso8859-15", "koi8-r", "shift_jis", "gbk", "utf-16", "utf-8"]
ENCODINGS += ["ascii:strict", "latin-1:surrogateescape"]


def begin():
    with part("größe ✓ 中"):
        print("a → b … é ∞ 9·2 \udce9 кошка 🙂")
    table = Table("±")
    table.add_row("▁▂▃█")
    Console().print(table)
    with Console(force_terminal=True).status("waits"):
        print("x", file=sys.stderr)


def refuse():
    raise ConfigError(["data.train_files: `größe→中` does not exist"])


@pytest.mark.parametrize(("action", "status"), [(begin, OK), (refuse, USER_ERROR)])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_console_of_any_encoding_shows_what_it_can(encoding, action, status, monkeypatch):
    encoding, _, errors = encoding.partition(":")
    streams = [io.TextIOWrapper(io.BytesIO(), encoding, errors or "strict", write_through=True) for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    monkeypatch.setenv("PYTHONIOENCODING", "as it was")
    assert reported(action) == status
    shown = "".join(stream.buffer.getvalue().decode(encoding) for stream in streams)
    if status == USER_ERROR:
        assert "größe→中" in shown if encoding in ("utf-8", "utf-16") else "does not exist" in shown
    elif encoding == "ascii":
        assert "+ gr\\xf6\\xdfe + \\u4e2d" in shown and "a -> b ... \\xe9 inf 9-2 \\udce9" in shown and "_.-#" in shown
    else:
        assert "9·2" in shown or "9-2" in shown
    assert os.environ["PYTHONIOENCODING"] == ("as it was" if encoding == "utf-8" else "utf-8"), "of workers"


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C"},
        {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=str,
)
def test_a_job_file_is_read_as_utf8_under_any_locale(variables, tmp_path):
    (tmp_path / "job.yaml").write_text("rollout: {stop: [ö]}\ndata: {train_files: [größe]}\n", encoding="utf-8")
    words = [sys.executable, "-m", "rlfuse.train", "--cfg", "job", "job.yaml", "model.path=x", "reward.functions=[a:b]"]
    found = subprocess.run(words, cwd=tmp_path, env=os.environ | variables, capture_output=True)
    assert found.returncode == 0, found.stderr.decode()
    assert b"stop:" in found.stdout and b"Traceback" not in found.stderr
