"""Read a user's YAML job file: `rlfuse train my_job.yaml rollout.n=4`.

It may have groups of keys, dotted keys, presets by name (`algorithm: grpo`) and Hydra's `defaults`. Problems are
reported with their line. Hydra merges the content last, as the only entry of the group `job_file`.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf
from omegaconf._utils import get_omega_conf_dumper
from omegaconf.errors import OmegaConfBaseException

from rlfuse.config.declare import as_typed
from rlfuse.config.documentation import by_name, groups
from rlfuse.config.input_files import lines_of
from rlfuse.config.keys import PRESET_GROUPS, as_list_entry, explain_form, explain_name, explain_type, rename
from rlfuse.config.other_frameworks import is_verl_name
from rlfuse.errors import ConfigError
from rlfuse.parsing import parse_yaml

NAME = "given"
SWEPT = "hydra.sweeper.params"
LARGEST_FILE = 1 << 20
MAX_SETTINGS = 2000
BASES = ("config", "schema", "_self_")
"""Entries of a Hydra defaults list that every job file has implicitly."""


@dataclass(frozen=True, slots=True)
class JobFile:
    """Content of a job file."""

    content: dict[str, Any]
    presets: dict[str, str]
    settings: dict[str, tuple[str, Any]]
    problems: list[str]
    notes: list[str]
    undecided: dict[str, str]
    """Key -> the error if nothing else decides it: its value is `???`, which Hydra would replace by the default."""

    @property
    def swept(self) -> dict[str, Any]:
        """Swept keys (hydra.sweeper.params) -> their values."""
        return self.content.get("hydra", {}).get("sweeper", {}).get("params") or {}

    def register(self, presets: list[dict[str, str]]) -> None:
        node = {"defaults": [*presets, "_self_"], **self.content}
        ConfigStore.instance().store(group="job_file", name=NAME, node=node, package="_global_")


def read(path: Path) -> JobFile:
    """Read a job file and check its names and types. Raises ConfigError if it can't be read as settings."""
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            text = file.read(LARGEST_FILE + 1)
        if len(text) > LARGEST_FILE:
            raise ConfigError([f"{path}: is longer than {LARGEST_FILE:,} characters; a job file has only settings"])
        content = OmegaConf.to_container(parse_yaml(text, OmegaConf.create) if text.strip() else OmegaConf.create({}))
    except FileNotFoundError:
        raise ConfigError([f"{path}: the job file does not exist; correct the path"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: can't be read ({error})"]) from error
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError([f"{path}: is not valid YAML: {' '.join(str(error).split())}"]) from error
    if not isinstance(content, dict):
        raise ConfigError([f"{path}: is a {type(content).__name__}; write keys, such as `rollout: {{n: 4}}`"])
    presets, problems = _presets(content, path)
    settings = settings_of(content)
    if len(settings) > MAX_SETTINGS:
        raise ConfigError([f"{path}: has {len(settings):,} settings, but at most {MAX_SETTINGS:,} are allowed"])
    lines = lines_of(text)
    renames = rename({name: as_typed(value) for name, value in settings})
    valid, undecided = {}, {}
    for name, value in settings:
        key, place = renames.names.get(name, name), f"{path}:{lines.get(name, 1)}"
        if value == MISSING and key in by_name():
            undecided[key] = f"{place}: {key}={MISSING}: {_reason(text, lines.get(name, 1))}"
            _remove(content, name)
            continue
        given = as_typed(value) if key in groups() and value != {} else None
        problem = renames.problems.get(name) or explain_name(key, given)
        problem = problem or explain_form(key, value) or explain_type(key, value)
        if problem is not None:
            problems.append(f"{place}: {problem}")
        if problem is not None or key != name:
            _remove(content, name)
        if problem is None:
            valid[key] = place, value
        if problem is None and key != name:
            content[key] = value
    if problems and any(is_verl_name(name, frozenset(by_name())) for name, _ in settings):
        problems[-1] += f" (`rlfuse translate {path}` converts a config file of verl to a job file)"
    notes = [f"{path}:{lines.get(name, 1)}: {line}" for name, line in renames.notes.items()]
    nested = _nested(content)
    if problem := _explain_hydra(nested.get("hydra", {})):
        problems.append(f"{path}:{lines.get('hydra', 1)}: {problem}")
        del nested["hydra"]
    if isinstance(nested.setdefault("trainer", {}), dict):
        nested["trainer"].setdefault("job_name", path.stem)
    return JobFile(nested, presets, valid, problems, notes, undecided)


def _reason(text: str, line: int) -> str:
    """Return why the setting on `line` is undecided: its comment, on the line or above it."""
    *above, given = text.splitlines()[:line]
    comments = list(itertools.takewhile(lambda each: each.lstrip().startswith("#"), reversed(above)))
    trailing = given.partition(MISSING)[2].strip()
    words = [trailing] if trailing.startswith("#") else reversed(comments)
    reason = " ".join(word.strip().lstrip("#").strip() for word in words)
    return f"is undecided ({reason}); write a value" if reason else "is undecided; write a value"


def _remove(content: dict[str, Any], name: str) -> None:
    for key, value in list(content.items()):
        if key == name:
            del content[key]
        elif isinstance(value, dict) and name.startswith(f"{key}."):
            _remove(value, name.removeprefix(f"{key}."))
            if not value:
                del content[key]


def _presets(content: dict[str, Any], path: Path) -> tuple[dict[str, str], list[str]]:
    presets, problems = {}, []
    defaults = content.pop("defaults", None) or []
    for entry in defaults if isinstance(defaults, list) else [defaults]:
        key, choice = next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else ("", None)
        group = re.sub(r"^(override|optional) ", "", str(key)).strip(" /")
        if group == "experiment" and choice is None:
            continue
        if re.fullmatch(r"[\w/.@-]+", group) and isinstance(choice, str | int):
            presets[group] = str(choice)
        elif entry not in BASES:
            problems.append(
                f"{path}: defaults entry `{entry}` is not `group: preset`; groups: {', '.join(PRESET_GROUPS)}"
            )
    for group in PRESET_GROUPS:
        if isinstance(content.get(group), str):
            presets[group] = content.pop(group)
    if content.get("experiment", "") is None:
        del content["experiment"]
    return presets, problems


def _explain_hydra(given: Any) -> str | None:
    sweeper = given.get("sweeper", {}) if isinstance(given, dict) else None
    params = (sweeper.get("params") or {}) if isinstance(sweeper, dict) else None
    example = "hydra: {sweeper: {params: {rollout.n: '2,4'}}}"
    return None if isinstance(params, dict) else f"hydra: must be Hydra settings, for example {example}"


def settings_of(content: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the full names and values of all settings; a dictionary that is the value of a key is one value."""
    found: list[tuple[str, Any]] = []
    for key, value in content.items():
        name = f"{prefix}{key}"
        if name.split(".")[0] == "hydra":
            continue
        if isinstance(value, dict) and value and name not in by_name():
            found += settings_of(value, name + ".")
        else:
            found.append((name, value))
    return found


def as_yaml(settings: Mapping[str, Any]) -> str:
    """Return settings as the text of a job file. Texts that OmegaConf would read as numbers, such as 1e-6, are
    quoted."""
    return yaml.dump(settings, Dumper=get_omega_conf_dumper(), sort_keys=False)


def _nested(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Unfold dotted names: {"actor.optim.lr": 1} -> {"actor": {"optim": {"lr": 1}}}."""
    nested: dict[str, Any] = {}
    for key, value in content.items():
        name = f"{prefix}.{key}".lstrip(".")
        *above, last = str(key).split(".")
        node = nested
        for part in above:
            node = node.setdefault(part, {})
        # Names below a key that is a dictionary are the user's and may have dots, such as data sources.
        group = isinstance(value, dict) and name not in by_name() and name != SWEPT
        value = _nested(value, name) if group else as_list_entry(name, value)
        if isinstance(value, dict) and isinstance(node.get(last), dict):
            node[last] |= value
        else:
            node[last] = value
    return nested
