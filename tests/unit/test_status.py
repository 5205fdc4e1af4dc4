"""What a run says of itself, and what is said of one that could not."""

import os
import sys
import time
from dataclasses import asdict, replace

import pytest

from rlfuse.run_folder import status
from rlfuse.tools import listing


@pytest.fixture
def begun(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["/x/python", "/x/bin/rlfuse", "train", "job.yaml", "a.b=c d"])
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    status.begin(tmp_path, "project/name", 12.0)
    return tmp_path


def test_a_run_begins_and_ends(begun):
    before = status.read(begun)
    assert (before.state, before.name, before.started) == ("running", "project/name", 12.0)
    assert before.command == "rlfuse train job.yaml 'a.b=c d'"
    assert before.pid == os.getpid() and before.ended is None
    status.end(begun, "failed", "it broke")
    after = status.read(begun)
    assert (after.state, status.state_now(begun, after)) == ("failed", "failed")
    assert after.error == "it broke" and after.ended > 12
    assert asdict(replace(after, state="running", ended=None, error="")) == asdict(before)


def test_seconds_are_of_all_processes_of_a_run(tmp_path):
    now = time.time()
    status.begin(tmp_path, "p/n", now - 1000)
    status.end(tmp_path, "stopped")
    status._write(tmp_path, replace(status.read(tmp_path), ended=now - 900))
    status.begin(tmp_path, "p/n", now - 500)  # and was killed when it had written this
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    for name, age in ((status.FILE, 490), ("metrics.jsonl", 300)):
        os.utime(tmp_path / name, (now - age,) * 2)
    for _ in range(2):  # the second is another attempt, after a worker was lost
        status.begin(tmp_path, "p/n", now - 40)
        assert listing.read(tmp_path).seconds == pytest.approx(100 + 200 + 40, abs=5)
    status.end(tmp_path, "finished")
    assert listing.read(tmp_path).seconds == pytest.approx(100 + 200 + 40, abs=5)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["python3", "-m", "rlfuse.train", "x=1"], "python -m rlfuse.train x=1"),
        (["python3", "-m", "pytest"], ""),
        (["python3"], ""),
    ],
)
def test_the_command_is_as_it_was_typed(tmp_path, monkeypatch, words, told):
    monkeypatch.setattr(sys, "orig_argv", words)
    status.begin(tmp_path, "p/n", 0.0)
    assert status.read(tmp_path).command == told


def test_secrets_are_not_kept(tmp_path, monkeypatch):
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
def test_what_is_no_status_is_none(tmp_path, text):
    (tmp_path / status.FILE).write_text(text)
    assert status.read(tmp_path) is None


def test_the_commit_is_the_working_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert status._commit() == ""
