"""Package a job for a cluster: one YAML file and the files of custom functions, never data or models.

Custom files keep their relative paths; modules in the working folder or next to the job file are sent to the package's
root, whole packages included. Paths of data, models and the run folder become absolute. `Package.notes` lists
what is sent and what the cluster must provide.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlfuse.cluster.worker_environment import SUBMITTED
from rlfuse.config.custom_functions import map_functions, map_model_paths, with_values
from rlfuse.config.facts import is_hub_name, reward_file
from rlfuse.config.job_file import as_yaml
from rlfuse.config.rewards import names_code
from rlfuse.config.schema import Config
from rlfuse.config.secrets import by_name
from rlfuse.errors import ConfigError
from rlfuse.user_folders import module_folders

MAX_BYTES = 50 << 20
CODE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Package:
    """Folder that is ready to be sent."""

    folder: Path
    experiment: str
    notes: tuple[str, ...]


def pack(config: Config, folder: Path, here: Path, include: Sequence[Path] = (), with_code: bool = False) -> Package:
    """Write the files of the job into `folder`. ConfigError for missing files and packages that are too large."""
    problems: list[str] = []
    shared: list[str] = []
    root, folder = folder, folder / SUBMITTED
    folder.mkdir(parents=True, exist_ok=True)
    functions = [_entry(given, folder, here, problems) for given in config.reward.functions]
    sent = map_functions(config, lambda key, function: _function(key, function, folder, here, problems))
    for path in include:
        _include(path, folder, here, problems)
    if with_code:
        shutil.copytree(CODE, root / CODE.name, ignore=shutil.ignore_patterns("__pycache__"))
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    if size > MAX_BYTES:
        problems.append(
            f"--include: {size >> 20} MiB in total, at most {MAX_BYTES >> 20}; put large files on shared storage"
        )
    if problems:
        raise ConfigError(problems)
    sent = with_values(sent, {"reward.functions": functions, "cluster.ray_address": "auto"})
    sent = _with_absolute_paths(sent, here, shared)
    (folder / "job.yaml").write_text(job := as_yaml(by_name(dataclasses.asdict(sent))))
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    notes = [f"sending {size / 1024:,.0f} KiB and the job: {', '.join(files)}{' and rlfuse' if with_code else ''}"]
    if shared:
        notes.append(f"must exist on every node: {', '.join(dict.fromkeys(shared))}")
    if named := sorted(set(re.findall(r"\$\{oc\.env:(\w+)\}", job))):
        notes.append(f"environment variables that are not sent: {', '.join(named)}; add --env {' --env '.join(named)}")
    trainer = config.trainer
    return Package(root, f"{trainer.project_name}/{trainer.experiment_name}", tuple(notes))


def _entry(given: Any, folder: Path, here: Path, problems: list[str]) -> Any:
    path = given.get("path") if isinstance(given, dict) else given
    if not isinstance(path, str) or not names_code(path):
        return given
    found = _function("reward.functions", path, folder, here, problems)
    return {**given, "path": found} if isinstance(given, dict) else found


def _function(key: str, function: str, folder: Path, here: Path, problems: list[str]) -> str:
    file = reward_file(function)
    if file is None:
        _module(function, folder)
        return function
    path = here / Path(file).expanduser()
    if not path.is_file():
        if Path(file).is_absolute():
            return function  # a file of the cluster
        problems.append(f"{key}: the file `{file}` does not exist; correct the path")
        return function
    inside = path.is_relative_to(here) and ".." not in path.parts
    target = path.relative_to(here) if inside else Path("rewards") / path.name
    if not inside and (folder / target).exists() and (folder / target).read_bytes() != path.read_bytes():
        problems.append(f"{key}: two files have the name {path.name}; rename one")
    (folder / target).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, folder / target)
    return f"{target}:{function.rpartition(':')[2]}"


def _module(function: str, folder: Path) -> None:
    """Copy the module of `package.module:name` with its package, unless it is installed."""
    top = function.partition(":")[0].partition(".")[0]
    found = find_spec(top) if top.isidentifier() else None
    if found is None:
        return  # a module of the cluster
    source = Path(next(iter(found.submodule_search_locations or [found.origin or top])))
    if str(source.parent) not in module_folders or top in packages_distributions():
        return
    if source.is_dir():
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, folder / source.name, dirs_exist_ok=True, ignore=ignore)
    else:
        shutil.copyfile(source, folder / source.name)


def _include(path: Path, folder: Path, here: Path, problems: list[str]) -> None:
    source = (here / path).absolute()
    if not source.exists():
        problems.append(f"--include {path}: does not exist; correct the path")
    elif not source.is_relative_to(here) or ".." in path.parts or source == here:
        problems.append(f"--include {path}: must be below {here}, the working folder that the package reproduces")
    elif source.is_dir():
        ignore = shutil.ignore_patterns("__pycache__", ".git", ".venv")
        shutil.copytree(source, folder / source.relative_to(here), dirs_exist_ok=True, ignore=ignore)
    else:
        (folder / source.relative_to(here)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / source.relative_to(here))


def _with_absolute_paths(config: Config, here: Path, shared: list[str]) -> Config:
    def absolute(path: str) -> str:
        shared.append(str(here / Path(path).expanduser()))
        return shared[-1]

    def model(path: str | None) -> str | None:
        return absolute(path) if path and (not is_hub_name(path) or (here / path).exists()) else path

    data, trainer = config.data, config.trainer
    files = {"data.train_files": data.train_files, "data.val_files": data.val_files}
    config = with_values(config, {key: [absolute(path) for path in paths] for key, paths in files.items()})
    config = map_model_paths(config, model)
    resume = trainer.resume_mode
    optional = {
        "data.media_root": data.media_root,
        "video.disk_cache": config.video.disk_cache,
        "trainer.rollout_data_dir": trainer.rollout_data_dir,
        "trainer.validation_data_dir": trainer.validation_data_dir,
    }
    others = {
        **{key: path and absolute(path) for key, path in optional.items()},
        "trainer.default_local_dir": absolute(trainer.default_local_dir),
        "trainer.resume_mode": resume if resume in ("auto", "disable") else absolute(resume),
    }
    return with_values(config, others)
