"""An installed wheel in an empty folder outside the checkout: every kind of command, and a training job."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlfuse.observe.tracking import read_metrics

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("rlfuse", "conf", "jobs/tasks", "pyproject.toml", "README.md", "LICENSE")
RECORDER = """\
import os, sys
from importlib.machinery import PathFinder

class Recorder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "rlfuse":
            with open(os.path.join({folder!r}, str(os.getpid())), "w") as file:
                file.write(PathFinder.find_spec(name).origin)

sys.meta_path.insert(0, Recorder)
"""
"""Records where each process of the environment imports rlfuse from."""
REWARD = """\
import rlfuse

def installed(data_source, solution_str, ground_truth, extra_info=None):
    return float(rlfuse.__file__ == ground_truth)
"""
JOB = """\
algorithm: grpo
model: {{path: {model}, dtype: float32}}
data:
  train_files: [rows.jsonl]
  max_prompt_length: 16
  max_response_length: 16
  train_batch_size: 4
actor: {{ppo_mini_batch_size: 4, ppo_max_token_len_per_gpu: 128}}
rollout: {{n: 2, kv_cache_memory_mb: 32}}
reward: {{functions: [reward.py:installed]}}
trainer: {{n_gpus_per_node: 1, total_training_steps: 2, experiment_name: from_a_wheel, logger: [console]}}
cluster: {{timeout_s: 200}}
"""


def run(*command, status=0, timeout=240, **more):
    """Run a command; return its output."""
    done = subprocess.run(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, **more
    )
    assert done.returncode == status, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy, because setuptools writes files next to the sources."""
    sources, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        copy = shutil.copyfile if (ROOT / name).is_file() else shutil.copytree
        more = {} if copy is shutil.copyfile else {"symlinks": True, "ignore": shutil.ignore_patterns("__pycache__")}
        copy(ROOT / name, sources / name, **more)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel")
    run(*pip, "--no-deps", "--no-index", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", out, sources)
    [built] = out.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Create an environment with the wheel and the packages of this one, but without the checkout."""
    folder, records = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("records")
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    here = Path(sysconfig.get_path("purelib"))
    starts = [path.read_text().strip() for path in sorted(here.glob("*.pth")) if "__editable__" not in path.name]
    (site / "packages.pth").write_text("\n".join(["import recorder", str(here), *starts]) + "\n")
    (site / "recorder.py").write_text(RECORDER.format(folder=str(records)))
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PATH": f"{folder}/bin{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120"}
    return SimpleNamespace(
        python=python, package=site / "rlfuse", records=records, more={"env": environment},
        command=folder / "bin" / "rlfuse",
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(installed, tiny_model, tmp_path_factory):
    """Write a user's folder with a job, its data and its reward; commands run in it."""
    folder = tmp_path_factory.mktemp("user")
    installed.more["cwd"] = folder
    origin = str(installed.package / "__init__.py")
    rows = [{"prompt": f"w{3 + i} w{50 + i}", "answer": origin, "data_source": "words"} for i in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    (folder / "job.yaml").write_text(JOB.format(model=tiny_model))
    return folder


def test_the_wheel_has_all_files_of_the_package_with_presets_and_tasks(wheel):
    files = [path for path in (ROOT / "rlfuse").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    wanted = {path.relative_to(ROOT).as_posix() for path in files if path.suffix != ".md"}
    wanted |= {f"rlfuse/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "conf").rglob("*.yaml")}
    wanted |= {f"rlfuse/tasks/{path.name}" for path in (ROOT / "jobs" / "tasks").glob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        [about] = [name.partition("/")[0] for name in names if name.endswith("/METADATA")]
        metadata = message_from_bytes(archive.read(f"{about}/METADATA"))
        assert archive.read(f"{about}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert {name for name in names if not name.startswith(f"{about}/")} == wanted
    assert "rlfuse/conf/config.yaml" in wanted and "rlfuse/tools/report/page.html" in wanted
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")


def test_the_environment_does_not_see_the_checkout(installed, folder):
    code = "import rlfuse, sys; print(rlfuse.__file__, *sys.path, *sys.meta_path, sep='\\n')"
    first, *rest = run(installed.python, "-c", code, **installed.more).splitlines()
    assert first == str(installed.package / "__init__.py")
    assert str(ROOT) not in rest and not [line for line in rest if "editable" in line.lower()]


def test_commands_work_in_any_folder(installed, folder):
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert run(installed.command, "--version", **installed.more).startswith(f"rlfuse {version}\ntorch ")
    assert "actor.optim.lr: float = 1e-06" in run(installed.command, "train", "--help", "lr", **installed.more)
    assert "algorithm=cispo|clip_cov|dapo" in run(installed.command, "train", "--help", **installed.more)
    composed = run(installed.command, "train", "job.yaml", "--cfg", "job", **installed.more)
    assert "adv_estimator: grpo" in composed and "policy: adaptive" in composed
    assert run(installed.command, "plan", "job.yaml", **installed.more).endswith("fits\n")
    (folder / "copy.jsonl").write_text('{"question": "1 + 1?", "answer": "It is\\n#### 2"}\n' * 4)
    output = run(installed.command, "prepare", "gsm8k", "--from", "copy.jsonl", **installed.more)
    assert (folder / "data" / "gsm8k" / "train.parquet").is_file() and "jobs/" not in output
    assert "jobs/" not in run(installed.command, "prepare", **installed.more)
    tasks = [f"rlfuse.tasks.{path.stem}" for path in sorted((ROOT / "jobs" / "tasks").glob("[a-z]*.py"))]
    code = f"from importlib import import_module as of\nfor name in {tasks}: print(of(name).__file__)"
    places = [Path(line) for line in run(installed.python, "-c", code, **installed.more).splitlines()]
    assert [path.parent for path in places] == [installed.package / "tasks"] * len(tasks)


def test_the_doctor_reports_the_tested_versions(installed, folder):
    done = subprocess.run(
        [installed.command, "doctor", "--no-self-test"], capture_output=True, text=True, timeout=240, **installed.more
    )
    assert done.returncode in (0, 1) and done.stderr == "", "1 if this machine can't run jobs"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    words = [line.split() for line in done.stdout.splitlines()]
    states = {line[1]: line[0] for line in words if line and line[0] in ("ok", "warning", "problem")}
    assert all(states[name] == "ok" for name in ("python", "torch", "ray", "deepspeed", "transformers"))
    assert len(states) > len(project["dependencies"]) and "No module named" not in done.stdout


def test_all_processes_of_a_job_import_the_installed_package(installed, folder):
    for record in installed.records.iterdir():
        record.unlink()
    run(installed.command, "train", "job.yaml", timeout=240, **installed.more)
    steps = [row for row in read_metrics(folder / "runs/rlfuse/from_a_wheel/metrics.jsonl") if row["step"] > 0]
    assert [row["critic/score/mean"] for row in steps] == [1.0, 1.0], (
        "reward workers depend on the location of the package"
    )
    origins = [record.read_text() for record in installed.records.iterdir()]
    assert len(origins) > 1 and set(origins) == {str(installed.package / "__init__.py")}, "driver and fork server"
