"""A command of another framework, parsed from Hydra's settings (KEY=VALUE), flags (--name VALUE ...) or YAML. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlfuse.config.declare import as_typed
from rlfuse.errors import ConfigError
from rlfuse.tools.translate.shell import Word

SETTING = re.compile(r"\+{0,2}(\w[\w./@-]*)=(.*)", re.DOTALL)
FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
REDIRECTION = re.compile(r"[\d&]*[<>]+(?!\|)(&?)")
REFERENCE = re.compile(r"\$\{(\w[\w.]*)\}")
UNREAD = "is not a setting, and a file that it names is not read"
DELETED = "removes a setting of the framework, whose effect is not known"


@dataclass(slots=True)
class Command:
    """A parsed command. `program`: what it runs, such as `main_ppo` or `grpo`."""

    framework: str
    origin: str
    program: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    """Setting as written -> why its value is unknown."""
    unread: dict[str, str] = field(default_factory=dict)
    """Word that is not a setting -> why it is not read."""
    environment: dict[str, str] = field(default_factory=dict)
    processes: int | None = None
    """Number of training processes; None: one per GPU of the machine."""

    def value(self, name: str, default: Any) -> Any:
        """Return a setting or its default. Raises ConfigError if the default is text, or numbers, and it is not."""
        given = self.settings.get(name, default)
        count = len(default) if isinstance(default, list) and all(map(_is_number, default)) else 0
        is_list = isinstance(given, list) and len(given) == count and all(map(_is_number, given))
        if (_is_number(default) and not _is_number(given)) or (count and not is_list):
            valid = f"must be {count} numbers" if count else "must be a number"
            raise ConfigError([f"{self.origin}: {name}={as_typed(given)}: {valid}; correct the command"])
        if isinstance(default, str) and not isinstance(given, str | bool | None):
            raise ConfigError([f"{self.origin}: {name}={as_typed(given)}: must be text; correct the command"])
        return given

    def read_settings(self, words: Sequence[Word]) -> None:
        """Add the settings of Hydra's words."""
        for word in _without_redirections(words):
            found = SETTING.fullmatch(word.text)
            if found is None:
                self.unread[word.text] = _why_unread(word)
            elif word.unknown:
                self._add_unknown(f"{found[1]}={found[2]}", word)
            else:
                self.settings[found[1]] = _hydra_value(found[2])
        for name, value in list(self.settings.items()):
            self._resolve(name, value)

    def read_flags(self, words: Sequence[Word]) -> None:
        """Add flags: without a value true, `--no_name` false, several values a list."""
        given: dict[str, list[Word]] = {}
        values: list[Word] | None = None
        for word in _without_redirections(words):
            found = FLAG.fullmatch(word.text)
            if found is not None:
                values = given[found[1].replace("-", "_")] = [] if found[2] is None else [Word(found[2], word.unknown)]
            elif values is None:
                self.unread[word.text] = _why_unread(word)
            else:
                values.append(word)
        for name, each in given.items():
            if unknown := next((word for word in each if word.unknown), None):
                self._add_unknown(f"{name}={' '.join(word.text for word in each)}", unknown)
            elif not each and name.startswith("no_"):
                self.settings[name.removeprefix("no_")] = False
            else:
                found = [plain_value(word.text.rstrip(",")) for word in each] or [True]
                self.settings[name] = found[0] if len(found) == 1 else found

    def read_tree(self, content: DictConfig, prefix: str = "") -> None:
        """Add the leaves of a YAML file by their dotted names."""
        for key, raw in OmegaConf.to_container(content).items():
            name = f"{prefix}{key}"
            if name.partition(".")[0] in ("defaults", "hydra") or key == "_target_" or raw == MISSING:
                continue
            try:
                value = content[key]
                if isinstance(value, DictConfig) and value:
                    self.read_tree(value, f"{name}.")
                else:
                    self.settings[name] = OmegaConf.to_object(value) if OmegaConf.is_config(value) else value
            except OmegaConfBaseException:
                self.unknown[f"{name}={as_typed(raw)}"] = "the value of ${...} is not in the file"

    def _resolve(self, name: str, value: Any, depth: int = 8) -> None:
        """Replace references to other settings (`${name}`) in a value; without them the value is unknown."""
        found = REFERENCE.findall(value) if isinstance(value, str) else []
        if not found:
            self.settings[name] = value
        elif depth == 0 or not self.settings.keys() >= {*found}:
            del self.settings[name]
            self.unknown[f"{name}={value}"] = "the value of ${...} is not in the command"
        elif REFERENCE.fullmatch(value):
            self._resolve(name, self.settings[found[0]], depth - 1)
        else:
            self._resolve(name, REFERENCE.sub(lambda each: as_typed(self.settings[each[1]]), value), depth - 1)

    def _add_unknown(self, setting: str, word: Word) -> None:
        self.unknown[setting] = f"{', '.join(word.unknown)} is not set in the script"


def _why_unread(word: Word) -> str:
    return "is not set in the script" if word.unknown else DELETED if word.text.startswith("~") else UNREAD


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _without_redirections(words: Sequence[Word]) -> list[Word]:
    kept, before = [], ""
    for word in words:
        into = REDIRECTION.fullmatch(before)
        if (into is None or into[1]) and not REDIRECTION.match(word.text):  # a space may separate > and the file
            kept.append(word)
        before = word.text
    return kept


def _hydra_value(text: str) -> Any:
    try:
        override = OverridesParser.create().parse_override(f"key={text}")
        return text if override.is_sweep_override() else override.value()
    except (HydraException, ValueError, RecursionError):
        return text


def plain_value(text: str) -> Any:
    """Return the value of a flag: a number, true, false, null, a dictionary in JSON, or the text."""
    named = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in named:
        return named[text.lower()]
    if text.startswith("{"):
        with suppress(ValueError, RecursionError):
            return json.loads(text)
    if re.fullmatch(r"0\d+", text):  # a name such as 007
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
