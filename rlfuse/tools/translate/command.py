"""`rlfuse translate FILE | - | -- WORDS`: translate verl scripts, YAML or command lines into a job file.

Nothing is dropped silently: settings without a counterpart are listed in comments with the reason. Keys that the
command does not set get verl's default. Scripts are not executed.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlfuse.config.declare import as_typed
from rlfuse.config.documentation import by_name, groups
from rlfuse.config.keys import accepts_entry, explain_value, fits, is_free
from rlfuse.config.other_frameworks import counterpart
from rlfuse.errors import ConfigError
from rlfuse.parsing import parse_yaml
from rlfuse.tools.translate.conversions import CONVERSIONS, DEFAULTS
from rlfuse.tools.translate.shell import Script, Word

USAGE = """\
Convert a verl script, config file or command line to a job file on stdout:
  rlfuse translate run_qwen2-7b_grpo.sh > my_job.yaml      a script that calls verl.trainer.main_ppo (not executed)
  rlfuse translate ppo_trainer.yaml > my_job.yaml          a verl config file
  rlfuse translate -- python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo ...
  ... | rlfuse translate - > my_job.yaml                   a script or config file from stdin
Then check the comments in my_job.yaml and run: rlfuse plan my_job.yaml; rlfuse train my_job.yaml
"""
COLUMNS = 118
ENTRY = re.compile(r"(?:^|[./])main_\w+(?:\.py)?$")
SETTING = re.compile(r"\+{0,2}(\w[\w./@-]*)=(.*)", re.DOTALL)
REDIRECTION = re.compile(r"[\d&]*[<>]+(&?)")
GSM8K_REWARD, MATH_REWARD = "rlfuse.rewards.verifiers.numeric:score", "rlfuse.rewards.verifiers.math:score"


@dataclass(slots=True)
class VerlCommand:
    """Parsed verl command."""

    origin: str
    settings: dict[str, Any] = field(default_factory=dict)
    unparsed: dict[str, str] = field(default_factory=dict)

    def add(self, word: Word) -> None:
        found = SETTING.fullmatch(word.text)
        if found is None:
            if not REDIRECTION.match(word.text):
                self.unparsed[word.text] = "is not a setting (a config file that it names is not read)"
        elif word.unknown:
            variables = ", ".join(word.unknown)
            self.unparsed[f"{found[1]}={found[2]}"] = f"{variables} is not set in the script; write the value"
        else:
            self.settings[found[1]] = _value(found[2])


def _value(text: str) -> Any:
    try:
        override = OverridesParser.create().parse_override(f"key={text}")
        return text if override.is_sweep_override() else override.value()
    except (HydraException, ValueError, RecursionError):
        return text


def read(arguments: list[str]) -> VerlCommand:
    """Read the verl command from a file, stdin or words after `--`. Raises ConfigError if there is none."""
    if arguments[0] == "--":
        return _parse_words("words", [Word(text) for text in arguments[1:]])
    if len(arguments) > 1 or "=" in arguments[0]:
        raise ConfigError([f"{' '.join(arguments)}: pass one file, or put the words of a command line after --"])
    name = arguments[0]
    try:
        text = sys.stdin.read() if name == "-" else Path(os.path.expanduser(name)).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError([f"{name}: the file does not exist; correct the path"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{name}: can't be read ({error})"]) from error
    origin = "stdin" if name == "-" else Path(name).name
    if name.endswith((".yaml", ".yml")):
        return _parse_yaml(origin, text)
    found = [words for words in Script().commands(text) if any(ENTRY.search(word.text) for word in words)]
    if len(found) == 1:
        return _parse_words(origin, found[0])
    if name == "-" and not found:
        return _parse_yaml(origin, text)
    problem = f"it has {len(found)} commands that start verl" if found else "it has no command that starts verl"
    raise ConfigError(
        [f"{name}: {problem} (verl.trainer.main_ppo KEY=VALUE ...); put the words of one command after --"]
    )


def _parse_words(origin: str, words: list[Word]) -> VerlCommand:
    start = next((at for at, word in enumerate(words) if ENTRY.search(word.text)), -1)
    command = VerlCommand(origin)
    before = ""
    for word in words[start + 1 :]:
        into = REDIRECTION.fullmatch(before)
        if into is None or into[1]:  # a space may separate > and the file
            command.add(word)
        before = word.text
    if not command.settings:
        raise ConfigError([f"{origin}: no settings found; write them as KEY=VALUE, as for verl.trainer.main_ppo"])
    return command


def _parse_yaml(origin: str, text: str) -> VerlCommand:
    try:
        content = parse_yaml(text, OmegaConf.create)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError([f"{origin}: it is not valid YAML: {' '.join(str(error).split())[:300]}"]) from error
    if not isinstance(content, DictConfig):
        raise ConfigError([f"{origin}: it has no keys; a verl config has data, actor_rollout_ref and trainer"])
    command = VerlCommand(origin)
    if "defaults" in content:
        command.unparsed["defaults"] = (
            "the listed files are not read; add the settings in which they differ from verl's defaults"
        )
    _take_leaves(command, content)
    return command


def _take_leaves(command: VerlCommand, content: DictConfig, prefix: str = "") -> None:
    for key, raw in OmegaConf.to_container(content).items():
        name = f"{prefix}{key}"
        if name.partition(".")[0] in ("defaults", "hydra") or key == "_target_" or raw == "???":
            continue
        try:
            value = content[key]
            if isinstance(value, DictConfig) and value:
                _take_leaves(command, value, f"{name}.")
            else:
                command.settings[name] = OmegaConf.to_object(value) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException:
            command.unparsed[f"{name}={as_typed(raw)}"] = "the value of ${...} is not in the file; write the value"


@dataclass(slots=True)
class Translation:
    """Content of the translated job file."""

    settings: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    to_decide: list[tuple[str, str]] = field(default_factory=list)
    no_counterpart: dict[str, list[str]] = field(default_factory=dict)

    def set(self, key: str, value: Any, in_verl: str, comment: str) -> None:
        """Set a key, or report a conflict with an earlier setting. `in_verl`: the setting as written for verl."""
        value = [value] if accepts_entry(key) and isinstance(value, str) else value
        known = by_name().get(key)
        if known is not None and value is None and not known.type.endswith("| None"):
            return  # null in verl: the value comes from another key
        if known is not None and (problem := _problem(key, value)):
            self.to_decide.append((in_verl, problem))
        elif key in self.settings and self.settings[key] != value:
            before = f"{key} is already {as_typed(self.settings[key])}"
            self.to_decide.append((in_verl, f"{before}, set by {self.comments.get(key) or key}"))
        else:
            self.settings[key] = value
            self.comments.setdefault(key, comment)


def _problem(key: str, value: Any) -> str | None:
    known = by_name()[key]
    if not fits(value, known.type):
        return explain_value(key, as_typed(value))
    if known.choices and not {*(value if isinstance(value, list) else [value])} <= {*known.names}:
        return f"{key} must be one of {', '.join(known.names)}"
    return None if value is None or known.in_range(value) else f"{key} must be {known.range}"


def translate(command: VerlCommand) -> Translation:
    """Translate a verl command to the equivalent job."""
    job, given, later = Translation(), command.settings, []
    for name, value in given.items():
        in_verl = f"{name}={as_typed(value)}"
        if name in CONVERSIONS:
            outcome = CONVERSIONS[name](value, given)
            if isinstance(outcome, str):
                job.to_decide += [(in_verl, outcome)] if outcome else []
                continue
            for key, converted in outcome.items():
                job.set(key, converted, in_verl, "" if (key, converted) == (name, value) else in_verl)
        elif name in by_name() or is_free(name):
            job.set(name, value, in_verl, "")
        else:
            later.append((name, value, in_verl))
    for name, value, in_verl in later:
        _translate_other(job, name, value, in_verl)
    job.to_decide += command.unparsed.items()
    _fill_in(job, given, {_key(setting.partition("=")[0]) for setting in command.unparsed})
    return job


def _translate_other(job: Translation, name: str, value: Any, in_verl: str) -> None:
    found = counterpart(name, frozenset(by_name()))
    if found is None or found.origin != "verl":
        job.no_counterpart.setdefault("no equivalent in rlfuse", []).append(in_verl)
    elif not found.keys:
        job.no_counterpart.setdefault(found.note, []).append(in_verl)
    elif found.is_same:
        written = found.values.get(as_typed(value))
        ours = value if written is None else yaml.safe_load(written)
        job.set(found.keys[0], ours, in_verl, in_verl if written else name)
    elif value not in (None, False, {}, []) and job.settings.get(found.keys[0], _default(found.keys[0])) != value:
        job.to_decide.append((in_verl, f"{found.keys[0]} in rlfuse: {found.note}"))


def _default(key: str) -> Any:
    return by_name()[key].default if key in by_name() else None


def _key(name: str) -> str:
    found = None if name in by_name() else counterpart(name, frozenset(by_name()))
    return found.keys[0] if found is not None and found.keys else name


def _fill_in(job: Translation, given: dict[str, Any], unknown: set[str]) -> None:
    """Add verl's defaults for keys that the command does not set. `unknown`: keys whose values are unknown."""
    for key, value in DEFAULTS.items():
        if key not in job.settings and key not in unknown:
            job.set(key, value, "", "verl's default")
    if "reward.functions" not in job.settings and "reward.model_path" not in job.settings:
        guess = GSM8K_REWARD if "gsm8k" in str(given.get("data.train_files")) else MATH_REWARD
        comment = "verl chooses by data_source; set a custom one as [path/file.py:compute_score]"
        job.set("reward.functions", [guess], "", comment)


def as_text(job: Translation, origin: str) -> str:
    """Return the text of the job file."""
    lines = [f"# From {origin} by `rlfuse translate`. Comments after a line show the verl setting if it differs."]
    order = {name: number for number, name in enumerate(by_name())}
    for group in (name for name in groups() if "." not in name):
        keys = sorted((key for key in job.settings if key.startswith(f"{group}.")), key=lambda key: order.get(key, 999))
        lines += [f"{group}:"] * bool(keys)
        for key in keys:
            line = f"  {key.removeprefix(f'{group}.')}: {_yaml(job.settings[key])}"
            comment = job.comments.get(key, "")
            commented = f"{line}  # {comment}"
            lines += [commented] if comment and len(commented) <= COLUMNS else [*_wrapped(comment, "  # "), line]
    if job.to_decide:
        lines += ["", "# To decide manually:"]
        lines += [line for in_verl, why in job.to_decide for line in _wrapped(f"{in_verl}: {why}", "#   ", "#     ")]
    if job.no_counterpart:
        lines += ["", "# Without a counterpart:"]
        for why, settings in job.no_counterpart.items():
            lines += _wrapped(f"{', '.join(settings)}: {why}", "#   ", "#     ")
    return "\n".join(lines) + "\n"


def _wrapped(text: str, first: str, others: str | None = None) -> list[str]:
    wrapped = {"width": COLUMNS, "break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(" ".join(text.split()), initial_indent=first, subsequent_indent=others or first, **wrapped)


def _yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...").strip()


def main(argv: list[str]) -> None:
    """Run the command: print the job file."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return
    command = read(argv)
    print(as_text(translate(command), command.origin), end="")
