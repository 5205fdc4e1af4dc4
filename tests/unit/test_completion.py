"""Tab completion in real shells: TAB completes a line, and Enter runs a command that prints its arguments."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlfuse.cli import COMMANDS, main
from rlfuse.completion import ACTIONS, JOB_COMMANDS, PARSERS, SCRIPTS, _added_options, candidates
from rlfuse.config.documentation import by_name, groups

ROOT = Path(__file__).resolve().parents[2]
START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
LOAD = {
    "bash": 'eval "$(rlfuse completion bash)"',
    "zsh": 'autoload -U compinit && compinit -u -D && eval "$(rlfuse completion zsh)"',
    "fish": "rlfuse completion fish | source",
}
LINES = {
    "rlfuse rep": "report",
    "rlfuse train actor.optim.lr_s": "train actor.optim.lr_scheduler_type=",
    "rlfuse plan folder/my_job.yaml algorithm=da": "plan folder/my_job.yaml algorithm=dapo",
    "rlfuse train folder/my": "train folder/my_job.yaml",
    "rlfuse runs clean --y": "runs clean --yes",
    "rlfuse train data.val_files=fol": "train data.val_files=folder/",
}
"""A line before TAB -> the arguments of `rlfuse` after completion."""
COMMAND = """#!/bin/bash
[[ $1 == completion ]] && exec {python} -m rlfuse.cli "$@"
echo "called with:$*:"
"""


def wait_for(terminal, pattern, seconds=20):
    """Read from the terminal until the pattern occurs, and return the match."""
    text, until = "", time.monotonic() + seconds
    while time.monotonic() < until:
        if select.select([terminal], [], [], 0.1)[0]:
            text += os.read(terminal, 1 << 16).decode(errors="replace")
            if found := re.search(pattern, text):
                return found
    raise AssertionError(f"{pattern} is not in {text!r}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "shell",
    [
        pytest.param(name, marks=pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed"))
        for name in SCRIPTS
    ],
)
def test_tab_completes_command_lines(shell, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "my_job.yaml").touch()
    (tmp_path / "folder" / "my_notes.txt").touch()
    (tmp_path / "rlfuse").write_text(COMMAND.format(python=sys.executable))
    (tmp_path / "rlfuse").chmod(0o700)
    controller, terminal = pty.openpty()
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "TERM": "xterm"}
    process = subprocess.Popen(["setsid", "--ctty", *START[shell]], stdin=terminal, stdout=terminal, stderr=terminal,
                               cwd=tmp_path, env=environment)  # fmt: skip
    try:
        os.write(controller, f"{LOAD[shell]}; echo rea''dy\n".encode())
        wait_for(controller, r"ready\r?\n")
        for typed, expected in LINES.items():
            os.write(controller, f"{typed}\t".encode())
            wait_for(controller, re.escape(f"rlfuse {expected}".removeprefix(typed)))  # zsh may insert an early Enter
            os.write(controller, b"\n")
            assert wait_for(controller, r"called with:([^:]*):")[1] == expected
    finally:
        process.kill()
        process.wait()
        os.close(controller)
        os.close(terminal)


def completed(line):
    return [text for text, _ in candidates(line.split(" "))]


def test_all_keys_and_groups_are_completed_level_by_level():
    found, left = set(), [""]
    while left:
        inside = [text for text in completed(f"train {left.pop()}") if text.endswith(("=", "."))]
        found |= set(inside)
        left += [text for text in inside if text.endswith(".")]
    presets = {"algorithm=", "experiment=", "fusion="}
    assert found == {*(f"{name}=" for name in by_name()), *(f"{name}." for name in groups()), *presets}


@pytest.mark.parametrize(("line", "expected"), [
    ("", sorted([*COMMANDS, "--help", "--version"])),
    ("sub", ["submit"]),
    ("submit st", ["status", "stop"]),
    ("prepare gs", ["gsm8k"]),
    ("reward replay runs/rlfuse/mine reward.wei", ["reward.weights="]),
    ("train fusion=s", ["fusion=serial", "fusion=stream"]),
    ("train algorithm=ppo,gr", ["algorithm=ppo,grpo"]),
    ("train actor.kl_loss_type=k", [f"actor.kl_loss_type={name}" for name in ("k1", "k2", "k3", "kl")]),
    ("train actor.clip_ratio_low=", ["actor.clip_ratio_low=null"]),
    ("train trainer.logger=[console,w", ["trainer.logger=[console,wandb"]),
    ("train model.enable_gradient_checkpointing=",
     [f"model.enable_gradient_checkpointing={value}" for value in ("false", "true")]),
    ("reward replay reward.num_w", ["reward.num_workers="]),
    ("train --c", ["--cfg", "--config-dir", "--config-name"]),
    ("runs --", ["--help", "--json", "--sort", "--state"]),
    ("runs clean --", ["--help", "--yes"]),
    ("slots --", ["--help"]),
    ("slots drain 3 --u", ["--until-recovered"]),
    ("submit status --", ["--address", "--help", "--token-file"]),
    ("submit --", ["--address", "--detach", "--env", "--help", "--include", "--token-file", "--with-code"]),
    ("plan --search job.yaml --ke", ["--keep"]),
    ("plan --s", ["--search", "--settings"]),
    ("generate job.yaml --", [f"--{name}" for name in
                              ("config-dir", "config-name", "help", "out", "prompts", "run-code", "score")]),
    ("whatif --run", ["--run-code"]),
    ("doctor --no", ["--no-self-test"]),
    ("unknown -", []),
    ("train no.such.ke", []),
    ("train no.such.key=", []),
    ("unknown x", []),
])  # fmt: skip
def test_candidates(line, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert completed(line) == expected


def test_file_names_are_completed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("job.yaml", "reward.py", "rows.parquet", ".hidden.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "runs").mkdir()
    assert completed("train j") == ["job.yaml"]
    assert completed("report r") == ["reward.py", "rows.parquet", "runs/"]
    assert completed("train reward.functions=r") == ["reward.functions=reward.py", "reward.functions=runs/"]
    assert completed("train data.train_files=[~/rows") == ["data.train_files=[~/rows.parquet"]
    assert completed("train .") == [".hidden.yaml"]


def test_tables_name_existing_commands():
    assert {*ACTIONS, *JOB_COMMANDS} <= {*COMMANDS}
    assert {line.split()[0] for line in PARSERS} <= {*COMMANDS}
    assert all([*_added_options(*adds.split(":"))] for adds in PARSERS.values() if adds)


def test_options_have_descriptions():
    assert ("--yes", "remove the listed files") in candidates(["runs", "clean", "--"])
    assert all("%" not in about for command in COMMANDS for _, about in candidates([command, "--"]))


def test_an_unsupported_shell_is_an_error(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err


def test_completion_imports_no_large_library():
    code = """if True:
        import sys
        from rlfuse.cli import main
        assert main(["completion", "candidates", "train", "actor.optim.l"]) == 0
        print({"torch", "hydra", "numpy", "ray", "transformers"} & sys.modules.keys())"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()" and done.stdout.startswith("actor.optim.lr=\t")
