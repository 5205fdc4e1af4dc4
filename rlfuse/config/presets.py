"""Order the presets of a job file and of a command line by precedence.

Within each of the two: experiment < algorithm, fusion, custom presets < settings. All presets of a group set the same
keys (except rollout.n). Presets that disagree on a key are an error unless a setting decides it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlfuse.config import job_file
from rlfuse.config.declare import as_typed
from rlfuse.config.job_file import JobFile, settings_of
from rlfuse.config.keys import PRESET_GROUPS, parse_override
from rlfuse.config.options import as_custom_group
from rlfuse.errors import ConfigError
from rlfuse.parsing import TooManyAliases, parse_yaml

EXPERIMENT = "experiment"
NAMING = ("algorithm.adv_estimator", "fusion.policy", "fusion.data")
"""Keys that identify a preset: a sweep over presets varies them."""

Presets = Mapping[str, list[str]]
"""Group -> preset names: several in a sweep, none if the swept values are not known yet."""
Settings = Mapping[str, tuple[str, Any]]
"""Key -> (place where it is set, value)."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The overrides of a job in the order of precedence."""

    overrides: list[str]
    problems: list[str]
    notes: list[str]
    decided: frozenset[str]
    """Keys that the presets of the command line set."""


def order_layers(
    words: list[str], swept: Collection[str], file: JobFile | None, custom: frozenset[str], folders: list[Path]
) -> Layers:
    """Order the presets of command line and job file. `swept`: the keys and groups that the job file sweeps over."""
    typed = {group: [] for group in swept if group in PRESET_GROUPS} | _selected(words, custom)
    given = {parse_override(word).name for word in words}
    settings = file.settings if file else {}
    below = {group: [name] for group, name in file.presets.items() if group not in typed} if file else {}
    for group, names in (*typed.items(), *below.items()):
        for name in names:
            contents(group, name, folders)
    problems = [*_conflicts(typed, given, folders), *_conflicts(below, given | settings.keys(), folders)]
    problems += _fixed_in_sweep(typed, given, folders)
    notes = [*_overridden(settings, typed, given, folders)]
    decided = frozenset(key for group in typed for name in typed[group] for key in contents(group, name, folders))
    layer, kept = (typed, given) if EXPERIMENT in typed else ({**below, **typed}, given | settings.keys())
    notes += _overridden(_settings_of_experiment(layer, folders), _without_experiment(layer), kept, folders)
    if file is None:
        return Layers(_ordered(words, typed, has_file=False), problems, notes, decided)
    problems += [each for name in typed.get(EXPERIMENT, []) for each in _low_overrides(name, folders)]
    inside = [group for group in below if group in (*custom, "algorithm", "fusion")]
    params = file.swept
    for group in [group for group in PRESET_GROUPS if group in swept]:
        values = params.pop(group)
        name = f"+{group}@_global_" if group == EXPERIMENT else group
        params[name] = ",".join(map(str, values)) if isinstance(values, list) else values
    file.register([_entry(group, below[group][0], custom) for group in inside])
    first = [f"{group}={below[group][0]}" for group in below if group not in inside]
    overrides = [*first, f"job_file={job_file.NAME}", *_ordered(words, typed, has_file=True)]
    return Layers(overrides, problems, notes, decided)


def _ordered(words: list[str], groups: Collection[str], has_file: bool) -> list[str]:
    experiments = [word for word in words if parse_override(word).name == EXPERIMENT]
    last = [word for word in experiments[-1:] if word != f"{EXPERIMENT}=null"]  # null only removes that of the job file
    above = [f"+{EXPERIMENT}@_global_={parse_override(word).value}" for word in last] if has_file else last
    again = [f"+{group}@_global_=${{{group}}}" for group in ("algorithm", "fusion") if group in groups]
    return [*above, *again, *(word for word in words if word not in experiments)]


def _low_overrides(name: str, folders: list[Path]) -> Iterator[str]:
    """Report groups that an experiment overrides, which Hydra merges below the job file."""
    for entry in _read(EXPERIMENT, name, folders)[0]:
        if not isinstance(entry, dict):
            group, _, nested = str(entry).rpartition("/")
            yield from _low_overrides(nested, folders) if group.strip("/") in ("", EXPERIMENT) else ()
            continue
        [(key, choice)] = entry.items()
        group = str(key).removeprefix("override ").strip(" /")
        if group != key and group in PRESET_GROUPS:
            remedy = f"write /{group}/{choice} instead of `override /{group}: {choice}` in its defaults"
            yield f"{EXPERIMENT}={name}: overrides `{group}` below the job file; {remedy}"


def _selected(words: list[str], custom: Collection[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for word in words:
        group = parse_override(word).name.partition("@")[0]
        override = OverridesParser.create().parse_override(word)
        if (group not in PRESET_GROUPS and group not in custom) or isinstance(override.value(), dict):
            continue
        if not override.is_sweep_override():
            found[group] = [as_typed(override.value())]
        else:
            is_known = override.is_discrete_sweep() and not isinstance(override.value(), Glob)
            found[group] = [*override.sweep_string_iterator()] if is_known else []
    return found


def _without_experiment(presets: Presets) -> dict[str, list[str]]:
    return {group: names for group, names in presets.items() if group != EXPERIMENT}


def _entry(group: str, name: str, custom: frozenset[str]) -> dict[str, str]:
    word = as_custom_group(f"{group}={name}", custom) or f"{group}@_global_={name}"
    return {f"/{parse_override(word).name}": name}


def _conflicts(presets: Presets, given: Collection[str], folders: list[Path]) -> Iterator[str]:
    for (group, names), (other, others) in itertools.combinations(_without_experiment(presets).items(), 2):
        for name, another in itertools.product(names, others):
            first, second = contents(group, name, folders), contents(other, another, folders)
            for key in first:
                mine, theirs = as_typed(first[key]), as_typed(second.get(key, first[key]))
                if mine != theirs and key not in given:
                    both = f"{group}={name} sets {mine}, {other}={another} sets {theirs}"
                    yield f"{key}: {both}; set {key}={mine} or {key}={theirs}"


def _fixed_in_sweep(presets: Presets, given: Collection[str], folders: list[Path]) -> Iterator[str]:
    for group, names in presets.items():
        for key in [key for key in NAMING if key in given]:
            if len({contents(group, name, folders).get(key) for name in names}) > 1:
                yield f"{key}: is set for all jobs, but {group}={','.join(names)} varies it; remove one of them"


def _overridden(settings: Settings, presets: Presets, kept: Collection[str], folders: list[Path]) -> Iterator[str]:
    found = [(group, name, contents(group, name, folders)) for group, names in presets.items() for name in names]
    decided = {key for group, _, values in found if group != EXPERIMENT for key in values}
    for group, name, values in found:
        hidden = {*kept, *(decided if group == EXPERIMENT else ())}
        for key in [key for key in settings if key in values and key not in hidden]:
            place, value = settings[key]
            if as_typed(value) != as_typed(values[key]):
                yield f"{place}: {key}={as_typed(value)} is overridden: {group}={name} sets {as_typed(values[key])}"


def _settings_of_experiment(presets: Presets, folders: list[Path]) -> Settings:
    names = presets.get(EXPERIMENT, [])
    place = f"{EXPERIMENT}={names[0]}" if len(names) == 1 else ""
    return {key: (place, value) for key, value in _read(EXPERIMENT, names[0], folders)[1].items()} if place else {}


def contents(group: str, name: str, folders: list[Path], within: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the keys that a preset sets, with values, including those of its defaults list.

    Raises ConfigError if presets include each other. `within`: the presets that include this one.
    """
    if (here := f"{group}/{name}") in within:
        cycle = " -> ".join((*within[within.index(here) :], here))
        raise ConfigError([f"{cycle}: presets include each other in their defaults; remove one of these entries"])
    defaults, settings = _read(group, name, folders)
    found: dict[str, Any] = {}
    for entry in defaults:
        if isinstance(entry, dict):  # /algorithm: grpo
            [(above, choice)] = entry.items()
            above = str(above).removeprefix("override ")
        else:  # /algorithm/grpo
            above, _, choice = str(entry).rpartition("/")
        if choice != "_self_":
            found |= contents(above.strip("/ ").partition("@")[0] or group, str(choice), folders, (*within, here))
    return found | settings


def _read(group: str, name: str, folders: list[Path]) -> tuple[list[Any], dict[str, Any]]:
    files = [path for folder in folders if (path := folder / group / f"{name}.yaml").is_file()]
    try:
        text = files[0].read_text(encoding="utf-8") if files else ""
        content = OmegaConf.to_container(parse_yaml(text, OmegaConf.create))
    except TooManyAliases as error:  # Hydra would take minutes to read it
        raise ConfigError([f"{files[0]}: {error}"]) from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException):
        return [], {}
    if not isinstance(content, dict):
        return [], {}
    defaults = content.pop("defaults", [])
    header = re.search(r"^#\s*@package\s+(\S+)", text, re.MULTILINE)
    package = header[1] if header else group
    return defaults, dict(settings_of(content, "" if package == "_global_" else f"{package}."))
