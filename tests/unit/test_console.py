"""Terminal output in any encoding, control characters in user text, and closed terminals."""

import errno
import io
import os
import pty
import re
import subprocess
import sys
import warnings
from contextlib import suppress
from unittest.mock import Mock

import pandas as pd
import pytest
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rlfuse.application import OK, USER_ERROR, run_command
from rlfuse.config.custom_errors import headline, user_traceback
from rlfuse.console import plain, prepare_streams
from rlfuse.errors import ConfigError, RewardError
from rlfuse.observe.live import Stage, View, render
from rlfuse.progress import Console, part, print_line
from rlfuse.tools import listing
from rlfuse.tools.evaluation.comparison import compare
from rlfuse.tools.evaluation.replay import show

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
def test_output_is_printed_in_any_console_encoding(encoding, action, status, monkeypatch):
    encoding, _, errors = encoding.partition(":")
    streams = [io.TextIOWrapper(io.BytesIO(), encoding, errors or "strict", write_through=True) for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    monkeypatch.setenv("PYTHONIOENCODING", "as it was")
    assert run_command(action) == status
    shown = "".join(stream.buffer.getvalue().decode(encoding) for stream in streams)
    if status == USER_ERROR:
        assert "größe→中" in shown if encoding in ("utf-8", "utf-16") else "does not exist" in shown
    elif encoding == "ascii":
        assert "+ gr\\xf6\\xdfe + \\u4e2d" in shown and "a -> b ... \\xe9 inf 9-2 \\udce9" in shown and "_.-#" in shown
    else:
        assert "9·2" in shown or "9-2" in shown
    assert os.environ["PYTHONIOENCODING"] == ("as it was" if encoding == "utf-8" else "utf-8"), "for worker processes"


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


HOSTILE = [
    "\x1b]0;title\x07", "\x1b]52;c;cm0gLXJmIH4=\x07", "\x1b[2J\x1b[H", "\x1b[31mred\x1b[0m", "\x1b[1A\x1b[2Kwell",
    "\x1bP+q544e\x1b\\", "\x1b_G\x1b\\", "\x1b]8;;http://evil.example\x07here\x1b]8;;\x07", "\x1bc", "\x1b[6n",
    "\x1b#8", "\x1b", "\x9b2J", "\x9d0;title\x9c", "\x90q\x9c", "reward 0.1\rreward 0.9", "secret\b\b\b\b\b\bpublic",
    "\x07" * 20, "\x0e\x0f\x00", "\x7f\x0b\x0c", "\u202egpj.exe\u202c", "\u2066a\u2069", "[/]", "[bold]",
    "[link=http://e.x]y[/link]",
]  # fmt: skip
"""Control sequences in names, messages, prompts and responses."""
VIEW = (1, 2, 3.0, None)


def table(text):
    shown = Table(text)
    shown.add_row(Text(text))
    Console(force_terminal=True).print(shown)


def live(text):
    view = View(text, *VIEW, text, [Stage(text, 1, 2)], [(f"a{text}", 1)], 1, [1.0], {text: text}, [(text, 1.0)])
    with Live(console=Console(force_terminal=True), auto_refresh=False) as drawn:
        drawn.update(render(view), refresh=True)
        print(text)
        print(text, file=sys.stderr)


def replay(text):
    rows = pd.DataFrame({"reward": [0.0, 1.0], "prompt": text, "response": text, "id": text, "data_source": text})
    rows = rows.assign(step=1, group=text, finish="stop", columns=[{}, {}])
    after = pd.DataFrame({"reward": [1.0, float("nan")], "failure": [None, text]})
    show(compare(rows, after), after, 2)


def runs(text):
    listing._print([listing.Run(text, text, text, text, 1, 2, 0.5, 0.5, text, sweep=text, error=text)])


def refused(text):
    raise RewardError(text)


def defect(text):
    raise ZeroDivisionError(text)


def function(text):
    try:
        raise ValueError(f"can't score {text}")
    except ValueError as error:
        assert "\x1b" not in headline(error) + user_traceback(error)
        print(headline(error), user_traceback(error), file=sys.stderr)


def line(text):
    print_line(Console(force_terminal=True), text)
    warnings.warn(text, stacklevel=1)
    sys.stdout.writelines([text, "\n"])


@pytest.mark.parametrize("text", HOSTILE, ids=repr)
@pytest.mark.parametrize("action", [print, table, live, replay, runs, refused, defect, function, line])
def test_control_sequences_in_user_text_do_not_reach_the_terminal(action, text, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: print(message, file=sys.stderr))
    run_command(lambda: action(text))
    shown = "".join(stream.buffer.getvalue().decode() for stream in streams)
    without_styles = re.sub(r"\r?\x1b\[(?:[\d;]*m|1A|2K|\?25[lh])", "", shown)  # styles and cursor moves of Rich
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", without_styles)
    if without_styles == shown:  # Rich printed no styles, so the text is complete
        assert re.sub(r"\W", "", plain(text)) in re.sub(r"\W", "", shown)
    assert "evil.example\x07" not in shown and "\x1b[2J" not in shown


def test_styles_and_progress_bars_still_work(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    prepare_streams()
    prepare_streams()
    Console(force_terminal=True).print("[bold]x[/]")
    sys.stdout.write("\r 50%")
    print("a\tb\r\nc", "中 é 🙂")
    assert stream.getvalue() == "\x1b[1mx\x1b[0m\n\r 50%a\tb\n\nc 中 é 🙂\n"


def test_a_closed_terminal_raises_no_error(monkeypatch):
    outer, inner = pty.openpty()
    terminal = os.fdopen(inner, "w")
    monkeypatch.setattr(sys, "stdout", terminal)
    prepare_streams()
    console = Console(force_terminal=True)
    os.close(outer)
    with pytest.raises(OSError, match="Input/output"):
        os.write(inner, b"closed")
    print("a line", flush=True)
    with part("a part"), Live("a view", console=console):
        console.print("a line above it")
    sys.stdout.flush()
    with suppress(OSError):
        terminal.close()  # closing flushes it
    file = io.StringIO()
    file.flush = Mock(side_effect=OSError(errno.EIO, "of a disk"))
    monkeypatch.setattr(sys, "stdout", file)
    prepare_streams()
    with pytest.raises(OSError, match="of a disk"):
        print("a line", flush=True)
