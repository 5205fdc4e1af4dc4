"""Write the constraints files of jobs/install.sh: exact versions, and hashes of all packages but torch and torchvision.

    .venv/bin/python jobs/constraints/renew.py [CONSTRAINTS]    in a .venv for CPUs with which tests/run.sh has passed

Versions are those installed in .venv, with which the tests ran; `FREE` are resolved. CONSTRAINTS: a file of further
ones. Hashes are of sdists and of wheels for Linux on x86-64 and aarch64. Reads the metadata of the package index only.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
PYTHONS, PROCESSORS = ("3.11", "3.12"), ("x86_64", "aarch64")
UNHASHED = {"torch", "torchvision"}
"""Their builds differ: for CPUs from PyTorch's index or a folder, for CUDA from the ordinary index."""
OVERRIDES = {"cpu": ("torch==2.13.0", "torchvision==0.28.0", "triton==3.9.0"), "gpu": ()}
"""For CPUs the ordinary index's torch is resolved too, with CUDA libraries: jobs/install.sh falls back to it."""
FREE = {"cpu": {"torch", "triton", "rlfuse"}, "gpu": {"torch", "triton", "rlfuse", "apache-tvm-ffi"}}
"""Packages whose builds or versions differ from those in .venv."""
HEADER = (
    "# Written by jobs/constraints/renew.py for {extra}s and Python {python}; jobs/install.sh takes these versions."
)


def resolved(extra: str, python: str, processor: str, folder: Path) -> dict[str, tuple[str, set[str]]]:
    """Return name -> (version, hashes) of each package."""
    here = {re.sub(r"[-_.]+", "-", each.metadata["Name"].lower()): each.version for each in distributions()}
    kept = [f"{name}=={version}" for name, version in here.items() if name not in FREE[extra] and "vllm" not in name]
    constraints, overrides, out = folder / "constraints.txt", folder / "overrides.txt", folder / "pylock.toml"
    constraints.write_text("\n".join(kept))
    overrides.write_text("\n".join(OVERRIDES[extra]))
    uv = [Path(sys.executable).with_name("uv"), "pip", "compile", "pyproject.toml", "--quiet", "--upgrade"]
    where = ["--python-version", python, "--python-platform", f"{processor}-manylinux_2_40"]
    what = ["--extra", extra, "--extra", "dev", "--constraints", constraints, "--overrides", overrides]
    further = [word for file in sys.argv[1:] for word in ("--constraints", file)]
    command = [*uv, *where, *what, *further, "--format", "pylock.toml", "--output-file", out]
    subprocess.run(command, check=True, cwd=HERE.parents[1])
    found = {}
    for package in tomllib.loads(out.read_text())["packages"]:
        files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
        found[package["name"]] = package["version"], {file["hashes"]["sha256"] for file in files}
    return found


def write(extra: str, python: str) -> None:
    """Write one file, in which the processors' packages are joined."""
    versions, hashes = dict[str, str](), dict[str, set[str]]()
    for processor in PROCESSORS:
        with TemporaryDirectory() as folder:
            for name, (version, found) in resolved(extra, python, processor, Path(folder)).items():
                if versions.setdefault(name, version) != version:
                    raise SystemExit(f"{name}: {versions[name]}, but {version} on {processor}; add it to CONSTRAINTS")
                hashes.setdefault(name, set()).update(found)
    lines = [
        " ".join([f"{name}=={versions[name]}", *(f"--hash=sha256:{each}" for each in sorted(hashes[name]))])
        if name not in UNHASHED
        else f"{name}=={versions[name]}"
        for name in sorted(versions)
    ]
    header = HEADER.format(extra=extra.upper(), python=python)
    (HERE / f"{extra}-{python}.txt").write_text("\n".join([header, *lines, ""]))


if __name__ == "__main__":
    for extra in OVERRIDES:
        for python in PYTHONS:
            write(extra, python)
