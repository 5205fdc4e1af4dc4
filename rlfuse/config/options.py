"""Separate Hydra's options from settings and the job file, in any order; find custom preset groups."""

from __future__ import annotations

import itertools
import os
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hydra._internal.utils import get_args_parser

from rlfuse.config.declare import did_you_mean
from rlfuse.config.documentation import groups
from rlfuse.config.keys import PRESET_GROUPS, parse_override
from rlfuse.errors import ConfigError

INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
PLUGINS = {
    "hydra/launcher": ("joblib", "ray", "ray_aws", "rq", "submitit_local", "submitit_slurm"),
    "hydra/sweeper": ("ax", "nevergrad", "optuna"),
}
"""Hydra group -> choices that need a plugin package: hydra-ray-launcher has `ray` and `ray_aws`."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A command line split into settings, job files and options, not yet checked."""

    words: list[str]
    files: list[Path]
    options: list[str]
    folder: Path | None
    completes: bool


def parse_command_line(argv: list[str]) -> CommandLine:
    """Split a command line into settings, job files and options."""
    parser = get_args_parser()
    parser.error = _refuse
    parsed = parser.parse_intermixed_args(_with_choice(argv))
    words = [] if parsed.shell_completion else [word for word in parsed.overrides if _names_file(word)]
    files = [Path(word) for word in words]
    if parsed.config_path is not None:
        raise ConfigError([f"--config-path {parsed.config_path}: is not supported; give your folder with --config-dir"])
    if parsed.config_name not in (None, "config"):
        files.append(Path(parsed.config_dir or ".") / f"{parsed.config_name.removesuffix('.yaml')}.yaml")
    settings = [word for word in parsed.overrides if word not in words]
    return CommandLine(settings, files, _spelled(parsed), _folder(parsed.config_dir), parsed.shell_completion)


def _refuse(message: str) -> NoReturn:
    raise ConfigError([f"{message}; use Hydra's options (--multirun, --cfg job, --info) and settings KEY=VALUE"])


def _names_file(word: str) -> bool:
    return word.endswith((".yaml", ".yml")) and (
        "=" not in word or Path(word).is_file()
    )  # names of sweep folders may have `=`


def _with_choice(argv: list[str]) -> list[str]:
    """Replace `--info` by `--info=all` before a setting or file, which argparse would read as its choice."""
    words = list(argv)
    for at, (word, following) in enumerate(itertools.pairwise(argv)):
        if word in ("--info", "-i") and following not in INFO and not following.startswith("-"):
            words[at] = "--info=all"
    return words


def _spelled(parsed: Namespace) -> list[str]:
    given = {name: value for name, value in vars(parsed).items() if value not in (None, False)}
    modes = [f"--{name}" for name in ("run", "multirun", "cfg", "info") if name in given]
    if len(modes) > 1:
        raise ConfigError([f"{' '.join(modes)}: can't be combined; use one of them"])
    if parsed.resolve and not parsed.cfg:
        raise ConfigError(["--resolve: needs --cfg; write --cfg job --resolve"])
    flags = {name.replace("_", "-"): value for name, value in given.items()}
    kept = flags.keys() - {"overrides", "config-dir", "config-name", "config-path"}
    return [f"--{name}" if flags[name] is True else f"--{name}={flags[name]}" for name in flags if name in kept]


def _folder(name: str | None) -> Path | None:
    if name is None:
        return None
    folder = Path(os.path.expanduser(name)).resolve()
    if not folder.is_dir():
        raise ConfigError([f"--config-dir {name}: the folder does not exist; correct the path"])
    return folder


def custom_groups(folder: Path | None) -> frozenset[str]:
    """Return the preset groups of the folder, for example `lengths` for lengths/long.yaml."""
    if folder is None:
        return frozenset()
    found = {path.parent.relative_to(folder).as_posix() for path in folder.glob("*/**/*.yaml")}
    return frozenset(group for group in found if group.partition("/")[0] not in (*PRESET_GROUPS, "hydra"))


def as_custom_group(word: str, custom: frozenset[str]) -> str | None:
    """Return `lengths=long` in Hydra's syntax; None unless it selects a preset of a custom group."""
    override = parse_override(word)
    group, _, package = override.name.partition("@")
    if group not in custom or override.value is None or override.sign == "~":
        return None
    package = package or ("" if group in groups() else "_global_")
    return f"+{group}@{package}={override.value}" if package else f"+{group}={override.value}"


def explain_choice(group: str, choice: str, choices: list[str]) -> str:
    """Return one line about a preset that does not exist. `choices`: the existing presets."""
    absent, kind = [name for name in PLUGINS.get(group, ()) if name not in choices], group.rpartition("/")[2]
    packages = {name: f"hydra-{name.partition('_')[0]}-{kind}" for name in absent}
    if choice in packages:
        return f"{group}={choice}: needs a package that is not installed; pip install {packages[choice]}"
    near = did_you_mean(choice, [*choices, *packages]) or "; use one of these"
    more = "".join(f", {name} (pip install {package})" for name, package in packages.items())
    kind = "plugin" if group in PLUGINS else "preset"
    return f"{group}={choice}: {kind} not found; {kind}s: {', '.join(choices)}{more}{near}"
