"""Compose a checked `Config` from a command line with Hydra.

Precedence, lowest first: schema, presets of the job file, its settings, presets of the command line, its settings.
Every problem, including errors of Hydra and OmegaConf, becomes a `ConfigError`. No heavy imports, so that mistyped keys
are reported within a second.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from rlfuse.config import job_file
from rlfuse.config.checks import check, value_of
from rlfuse.config.declare import as_typed
from rlfuse.config.documentation import by_name
from rlfuse.config.facts import Facts, read_facts
from rlfuse.config.keys import (
    PRESET_GROUPS,
    REFERENCE,
    accepts_entry,
    explain_form,
    explain_name,
    explain_override,
    explain_type,
    explain_value,
    fits,
    is_free,
    parse_override,
    rename,
)
from rlfuse.config.options import as_custom_group, custom_groups, explain_choice, parse_command_line
from rlfuse.config.other_frameworks import is_verl_name
from rlfuse.config.presets import order_layers
from rlfuse.config.schema import Config
from rlfuse.config.secrets import remember
from rlfuse.errors import ConfigError
from rlfuse.user_folders import append_modules

CONF = (Path(__file__).resolve().parents[1] / "conf").resolve()
MAX_TEXT = 10_000_000
_REFERENCES = re.compile(r"\$\{(\.*)([\w.\[\]-]+)\}")

ConfigStore.instance().store(name="schema", node=Config)


@dataclass(frozen=True, slots=True)
class Command:
    """A parsed command line whose names are valid."""

    overrides: list[str]
    options: list[str]
    notes: list[str]

    def print_notes(self) -> None:
        for line in self.notes:
            print(line, file=sys.stderr)


def conf_folder() -> Path:
    """Return the folder of the presets. Raises ConfigError if it is missing."""
    if not (CONF / "config.yaml").is_file():
        remedy = "reinstall rlfuse, or in a checkout restore the link: ln -sfn ../conf rlfuse/conf"
        raise ConfigError([f"{CONF}: the presets are missing; {remedy}"])
    return CONF


def read_command(argv: list[str], with_modules: bool = True) -> Command:
    """Parse `argv` and check its names; a job file becomes Hydra's `job_file` group.

    `with_modules`: make modules next to the job file importable, after installed ones.
    """
    line = parse_command_line(argv)
    if line.completes:
        return Command(line.words, line.options, [])
    if len(line.files) > 1:
        given = " ".join(map(str, line.files))
        raise ConfigError([f"{given}: only one job file is allowed; put the other settings on the command line"])
    custom, folders = custom_groups(line.folder), [*filter(None, [line.folder]), CONF]
    valid, wrong, renamed = _check_words(line.words, custom)
    file = job_file.read(line.files[0]) if line.files else None
    if file and with_modules:
        append_modules(str(line.files[0].expanduser().absolute().parent))
    swept = [*file.swept] if file and "--multirun" in line.options else []
    layers = order_layers(valid, swept, file, custom, folders)
    decided = {parse_override(word).name for word in valid} | layers.decided
    undecided = [problem for key, problem in file.undecided.items() if key not in decided] if file else []
    problems = [*(file.problems if file else []), *wrong, *layers.problems, *undecided]
    extra = [f"hydra.searchpath=['file://{line.folder}']"] if line.folder else []
    if problems:
        single = order_layers([word for word in valid if not _sweeps(word)], (), file, custom, folders)
        raise ConfigError([*problems, *_further_problems(problems, [*extra, *single.overrides])])
    notes = [*(file.notes if file else []), *renamed, *layers.notes]
    overrides = [_open_sweep(word) for word in layers.overrides] if "--multirun" in line.options else layers.overrides
    return Command([*extra, *overrides], line.options, notes)


def _check_words(words: list[str], custom: frozenset[str]) -> tuple[list[str], list[str], list[str]]:
    presets = {word: preset for word in words if (preset := as_custom_group(word, custom)) is not None}
    settings = {word: parse_override(word) for word in words if word not in presets}
    renames = rename({each.name: each.value for each in settings.values() if each.sign != "~"})
    valid, wrong = [], []
    for word in words:
        if word in presets:
            valid.append(presets[word])
            continue
        name, value = settings[word].name, settings[word].value
        ours = f"{renames.names[name]}={value}" if name in renames.names else word
        ours = re.sub(
            r"=(~/[^'\"\[\]{},\s]*)$", r'="\1"', ours
        )  # the shell keeps `~`, which Hydra can't parse unquoted
        if problem := renames.problems.get(name) or explain_override(ours) or _explain_value(ours):
            wrong.append(problem)
        else:
            valid.append(_open_free(ours))
    if wrong and any(is_verl_name(each.name, frozenset(by_name())) for each in settings.values()):
        wrong[-1] += " (`rlfuse translate -- WORDS` converts a whole verl command to a job file)"
    return valid, wrong, list(renames.notes.values())


def _further_problems(problems: list[str], overrides: list[str]) -> list[str]:
    try:
        to_config(_compose(overrides))
    except ConfigError as error:
        names = {word for problem in problems for word in re.findall(r"[\w.]+", problem)} & by_name().keys()
        return [each for each in error.problems if not names & {*re.findall(r"[\w.]+", each.partition(": ")[0])}]
    return []


def _open_free(word: str) -> str:
    """Convert to Hydra's syntax: `++` before names in free dictionaries, brackets around a single list entry."""
    name, _, value = word.lstrip("+").partition("=")
    if accepts_entry(name) and not _sweeps(word):
        return f"{name}={_bracketed(value)}"
    if name in PRESET_GROUPS:
        return word.lstrip("+")
    free = is_free(name) or (name in by_name() and by_name()[name].free)
    return f"++{word.lstrip('+')}" if free else word


def _open_sweep(word: str) -> str:
    override = OverridesParser.create().parse_override(word)
    if not accepts_entry(override.key_or_group) or not override.is_choice_sweep():
        return word
    return f"{override.key_or_group}={','.join(map(_bracketed, override.sweep_string_iterator()))}"


def _bracketed(value: str) -> str:
    several = value.lstrip().startswith("[") or REFERENCE.fullmatch(value.strip()) or value.strip() in ("", "null")
    return value if several else f"[{value}]"


def _sweeps(word: str) -> bool:
    return OverridesParser.create().parse_override(word).is_sweep_override()


def compose_job(argv: list[str], with_modules: bool = True) -> DictConfig:
    """Return the job that `argv` describes, typed but not yet checked. `with_modules`: see `read_command`."""
    command = read_command(argv, with_modules)
    command.print_notes()
    return _compose(command.overrides)


def _compose(overrides: list[str]) -> DictConfig:
    running = GlobalHydra.instance().hydra  # of a program that is itself a Hydra application
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_folder()), version_base="1.3"):
            return compose("config", overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([explain_failure(error, overrides)]) from error
    finally:
        GlobalHydra.instance().hydra = running


def _check_references(job: DictConfig) -> None:
    """Raise ConfigError if nested references (`${key}`) expand to more than `MAX_TEXT` characters."""
    whole, known = OmegaConf.to_container(job), dict[str, int]()

    def size(value: Any, path: list[str]) -> int:
        if isinstance(value, dict | list):
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            return sum(size(each, [*path, str(key)]) for key, each in entries)
        found = _REFERENCES.findall(value) if isinstance(value, str) else []
        return len(str(value)) + sum(referred([*path[: -len(dots)], name] if dots else [name]) for dots, name in found)

    def referred(path: list[str]) -> int:
        parts = re.split(r"[.\[\]]+", ".".join(path).rstrip("]"))
        name, node = ".".join(parts), whole
        if name not in known:
            known[name] = 0  # OmegaConf rejects a reference to itself
            for part in parts:
                key = int(part) if isinstance(node, list) and part.isdecimal() else part
                held = range(len(node)) if isinstance(node, list) else node
                node = node[key] if isinstance(node, dict | list) and key in held else ""
            known[name] = size(node, parts)
        return known[name]

    if (characters := size(whole, [])) > MAX_TEXT:
        about = "more than 10^12" if characters > 10**12 else f"{characters:,}"
        raise ConfigError(
            [f"references (${{key}}) of the job expand to {about} characters, but at most {MAX_TEXT:,} are allowed"]
        )


def to_config(job: DictConfig, get_facts: Callable[[Config], Facts] = read_facts) -> Config:
    """Return the checked dataclasses; raise all problems together. `get_facts` reads disk, hub and devices."""
    try:
        _check_references(job)
        missing = OmegaConf.missing_keys(job)
        for name in missing & by_name().keys():  # reported together with all others
            key = by_name()[name]
            OmegaConf.update(job, name, ([] if key.type.startswith("list") else "") if key.required else key.default)
        config = OmegaConf.to_object(job) if missing <= by_name().keys() else None
    except RecursionError:
        raise ConfigError(["references (${key}) of the job are nested too deeply; write the values instead"]) from None
    except OmegaConfBaseException as error:
        raise ConfigError([explain_failure(error, [])]) from error
    if config is None:
        raise ConfigError([f"{name}=???: has no value; set one" for name in missing - by_name().keys()])
    if not isinstance(config, Config):
        raise ConfigError([f"the composed job is a {type(config).__name__}; conf/config.yaml must begin with `schema`"])
    remember(dataclasses.asdict(config))
    problems = [f"{name}=???: has no value; set one" for name in missing if not by_name()[name].required]
    problems += _wrong_types(config) or check(config, get_facts(config))
    if problems:
        raise ConfigError(problems)
    return config


def _wrong_types(config: Config) -> list[str]:
    """Return type errors that OmegaConf accepts: in lists, dictionaries and interpolations, and non-finite numbers."""
    found = []
    for name, key in by_name().items():
        value = value_of(config, name)
        if problem := explain_form(name, value):
            found.append(problem)
        elif not fits(value, key.type):
            found.append(explain_value(name, as_typed(value)))
    return found


def load(argv: list[str]) -> Config:
    """Compose, type and check a job: `load(["experiment=quickstart", "trainer.total_training_steps=2"])`."""
    return to_config(compose_job(argv))


def explain_failure(error: BaseException, overrides: list[str]) -> str:
    """Return one line that explains an error of Hydra or OmegaConf."""
    chain: list[str] = []
    grammar = False
    cause: BaseException | None = error
    while cause is not None and len(chain) < 8:
        chain.append(str(cause))
        grammar |= isinstance(cause, GrammarParseError)
        cause = cause.__cause__
    text = "\n".join(chain)
    missing = re.search(r"Could not find '([\w/]+)/([^'/]*)'", text)
    if missing:
        return explain_choice(missing[1], missing[2], re.findall(r"^\t(\S+)$", text, re.MULTILINE))
    sweep = re.search(r"Ambiguous value for argument '([^']+)'", text)
    if sweep:
        name, _, value = sweep[1].partition("=")
        many = is_free(name) or (name in by_name() and by_name()[name].type.startswith("list"))
        as_list = f"for a list write {name}=[{value}], " if many else ""
        return f"{sweep[1]}: several values; {as_list}add --multirun to run one job for each"
    where = re.search(r"full_key: ([\w.\[\]]+)", text)
    if grammar or where is None or where[1].startswith("hydra."):  # not about a key, or about Hydra's own settings
        first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
        guilty = next((word for word in overrides if grammar and "${" in word), None)
        return f"{guilty}: {first}; correct the expression in ${{...}}" if guilty else first
    name = re.sub(r"\[\d+\]", "", where[1])
    file = re.search(r"In '([^']+)'", text)
    prefix = f"conf file {file[1]}: " if file and not file[1].startswith(f"job_file/{job_file.NAME}") else ""
    if is_free(name):
        given = re.search(r"Value '([^']*)'", text)
        shown = f"{name}={given[1]}" if given else name
        return f"{prefix}{shown}: invalid value for this dictionary; see `rlfuse train --help`"
    if re.search(r"Interpolation|resolv", text):
        first = text.strip().splitlines()[0]
        return f"{prefix}{name}: {first}; correct the expression in ${{...}}, or write \\${{ for the characters"
    if name not in by_name():
        return prefix + (explain_name(name, None) or f"{name}: is a group of keys, not a value")
    value = re.search(r"Value '([^']*)'", text)
    return prefix + explain_value(name, value[1] if value else _given(name, overrides))


def _given(name: str, overrides: list[str]) -> str | None:
    given = [word.partition("=")[2] for word in overrides if word.lstrip("+").startswith(name + "=")]
    return given[-1] if given else None


def _explain_value(word: str) -> str | None:
    try:
        override = OverridesParser.create().parse_override(word)
        if override.is_sweep_override():
            return None
        name, value = parse_override(word).name, override.value()
        return explain_form(name, value) or explain_type(name, value)
    except RecursionError:
        return f"{word}: brackets are nested too deeply; no setting needs four levels"
    except (HydraException, ValueError):
        quoting = "close all brackets, and quote special characters, as in 'key=\"value\"'"
        return f"{word}: the value can't be parsed; {quoting}"
