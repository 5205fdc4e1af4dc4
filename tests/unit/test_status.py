"""The status file of a run: state, command, seconds, and invalid files."""

import os
import sys
import time
from dataclasses import asdict, replace

import pytest

from rlfuse.run_folder import status
from rlfuse.tools import listing


@pytest.fixture
def started_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["/x/python", "/x/bin/rlfuse", "train", "job.yaml", "a.b=c d"])
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    status.begin(tmp_path, "project/name", 12.0)
    return tmp_path


def test_a_run_begins_and_ends(started_run):
    before = status.read(started_run)
    assert (before.state, before.name, before.started) == ("running", "project/name", 12.0)
    assert before.command == "rlfuse train job.yaml 'a.b=c d'"
    assert before.pid == os.getpid() and before.ended is None
    status.end(started_run, "failed", "it broke")
    after = status.read(started_run)
    assert (after.state, status.state_now(started_run, after)) == ("failed", "failed")
    assert after.error == "it broke" and after.ended > 12
    assert asdict(replace(after, state="running", ended=None, error="")) == asdict(before)


def test_seconds_include_all_processes_of_a_run(tmp_path):
    now = time.time()
    status.begin(tmp_path, "p/n", now - 1000)
    status.end(tmp_path, "stopped")
    status._write(tmp_path, replace(status.read(tmp_path), ended=now - 900))
    status.begin(tmp_path, "p/n", now - 500)  # killed after writing these files
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    for name, age in ((status.FILE, 490), ("metrics.jsonl", 300)):
        os.utime(tmp_path / name, (now - age,) * 2)
    for _ in range(2):  # the second is a restart after a lost worker
        status.begin(tmp_path, "p/n", now - 40)
        assert listing.read(tmp_path).seconds == pytest.approx(100 + 200 + 40, abs=5)
    status.end(tmp_path, "finished")
    assert listing.read(tmp_path).seconds == pytest.approx(100 + 200 + 40, abs=5)


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["python3", "-m", "rlfuse.train", "x=1"], "python -m rlfuse.train x=1"),
        (["python3", "-m", "pytest"], ""),
        (["python3"], ""),
    ],
)
def test_the_command_is_saved_as_typed(tmp_path, monkeypatch, words, command):
    monkeypatch.setattr(sys, "orig_argv", words)
    status.begin(tmp_path, "p/n", 0.0)
    assert status.read(tmp_path).command == command


def test_secrets_are_not_saved(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "abcdefghijkl")
    monkeypatch.setattr(
        sys,
        "orig_argv",
        ["rlfuse", "train", "x=abcdefghijkl", "r=[{path: a.py:f, api_key: qwerty1}]", "my.token='qwerty2'", "n=2"],
    )
    status.begin(tmp_path, "p/n", 0.0)
    status.end(tmp_path, "failed", "no abcdefghijkl")
    text = (tmp_path / status.FILE).read_text()
    assert not any(secret in text for secret in ("abcdefghijkl", "qwerty1", "qwerty2")) and "n=2" in text


@pytest.mark.parametrize("text", ["", "{", "[]", '{"state": "running"}'])
def test_an_invalid_status_file_is_none(tmp_path, text):
    (tmp_path / status.FILE).write_text(text)
    assert status.read(tmp_path) is None


def test_a_folder_without_repository_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert status._commit() == ""
