"""The translated job: settings, keys that the user must decide, and settings without effect on training. Pure.

A key is left open (`???`) wherever rlfuse would train something else than the command; `rlfuse train` refuses it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING

from rlfuse.config.declare import ROUNDING, SCHEDULING, Effect, Key, as_typed
from rlfuse.config.documentation import by_name, groups
from rlfuse.config.keys import accepts_entry, explain_value, fits, is_free
from rlfuse.tools.translate.arguments import Command
from rlfuse.tools.translate.undecided import UNDECIDED, Undecided

COLUMNS = 118
WANDB_MODES = {"offline": "offline", "dryrun": "offline", "disabled": "disabled"}
"""WANDB_MODE -> trainer.wandb_mode; all others upload."""


def affects_training(key: str) -> bool:
    """Return whether a key changes what is trained, by the effect of a change on resume."""
    resume = by_name()[key].resume
    return resume.effect is not Effect.IMMEDIATE and resume not in (ROUNDING, SCHEDULING)


@dataclass(frozen=True, slots=True)
class Open:
    """In place of a value: the user must decide it."""

    why: str


@dataclass(slots=True)
class Translation:
    """Content of the translated job file."""

    framework: str
    settings: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    undecided: dict[str, list[str]] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> settings that the job does not need."""

    def set(self, key: str, value: Any, given: str, comment: str = "") -> None:
        """Set a key, or leave it open if the value is invalid or in conflict. `given`: the setting as written."""
        if isinstance(value, Open):
            return self.leave_open(key, f"{given}: {value.why}")
        if key not in by_name():
            return self._set_free(key, value, given, comment)
        value = [value] if accepts_entry(key) and isinstance(value, str) else value
        known = by_name()[key]
        if value is None and not known.optional:
            return  # null: the value comes from another key
        value = float(value) if known.type.startswith("float") and type(value) is int else value
        value = str(value) if known.type.startswith("str") and type(value) in (int, float) else value
        problem = self._problem(known, value)
        if problem is None and key in self.settings and self.settings[key] != value:
            problem = f"{as_typed(self.settings[key])} by {self.comments[key] or key}; rlfuse has one setting for both"
        if problem is None:
            self.settings[key] = value
            self.comments.setdefault(key, comment)
        elif not affects_training(key):
            self.note(f"{key}: {problem}", given)
        else:
            self.leave_open(key, f"{given}: {problem}")

    def _set_free(self, key: str, value: Any, given: str, comment: str) -> None:
        if is_free(key):
            self.settings[key], self.comments[key] = value, comment
        else:
            self.leave_open("trainer.task", f"{given}: rlfuse has no {key}")

    def _problem(self, key: Key, value: Any) -> str | None:
        if not fits(value, key.type):
            return explain_value(key.name, as_typed(value))
        if key.choices:
            missing = [each for each in (value if isinstance(value, list) else [value]) if not key.accepts(each)]
            why = [row.why for each in missing for row in _rows(self.framework, key.name) if each in row.values]
            text = f"{', '.join(map(as_typed, missing))} is not in rlfuse, which has {', '.join(key.names)}"
            return None if not missing or value is None else "; ".join([text, *why])
        return None if value is None or key.in_range(value) else f"must be {key.limits}"

    def leave_open(self, key: str, why: str) -> None:
        """Write `???` for a key, with the reason."""
        if why not in self.undecided.setdefault(key, []):
            self.undecided[key].append(why)

    def leave_unknown(self, key: str, setting: str, why: str) -> None:
        """Leave a key open whose value is not in the command, or list it if it does not change what is trained."""
        if affects_training(key) or key in ("trainer.nnodes", "trainer.n_gpus_per_node"):
            self.leave_open(key, f"{setting}: {why}")
        else:
            self.note(why, setting)

    def note(self, why: str, given: str) -> None:
        """List a setting that the job does not need."""
        self.notes.setdefault(why, []).append(given)

    def has_row(self, name: str, exactly: bool = False) -> bool:
        """Return whether UNDECIDED has a row for a setting, or, unless `exactly`, for a group that it is in."""
        return any(row.key and (row.name == name or not exactly) for row in _rows(self.framework, name))

    def decide(self, name: str, value: Any) -> None:
        """Leave a key open for a setting without a counterpart, or list it if its value has no effect."""
        row = next((row for row in _rows(self.framework, name) if row.key and row.applies(value)), None)
        if row is not None:
            self.leave_open(row.key, f"{name}={as_typed(value)}: {row.why}")
        else:
            self.note("as in rlfuse", f"{name}={as_typed(value)}")

    def set_files(self, key: str, name: str, dataset: str, note: str = "", listed: str = "them") -> None:
        """Set the files of a dataset, or leave the key open for one of the Hugging Face hub, with the command to
        download it. `note`: restriction of the rows, for which no file exists; `listed`: which of its files to
        list."""
        given = f"{name}={dataset}"
        if dataset.startswith(("/", "./", "../", "~", "$")):
            if note:
                return self.leave_open(key, f"{given}{note}: rlfuse reads whole files; write these rows to a file")
            return self.set(key, [dataset], given, given)
        self.leave_open(
            key,
            f"{given}{note}: rlfuse reads files; run `hf download {dataset} --repo-type dataset "
            f"--local-dir data/{Path(dataset).name}` and list {listed}",
        )

    def report_rest(
        self, command: Command, read: Collection[str], keys: Mapping[str, tuple[str, ...]], ignored: re.Pattern[str]
    ) -> None:
        """Report the flags that were not `read`, and those of unknown value (`keys`: flag -> the keys that it sets).

        `ignored`: flags that do not change what is trained.
        """
        for name, value in command.settings.items():
            if name in read:
                continue
            if self.has_row(name):
                self.decide(name, value)
            elif ignored.match(name) or value in (None, False, [], {}):
                self.note("no effect on what is trained", f"{name}={as_typed(value)}")
            else:
                self.leave_open("trainer.task", f"{name}={as_typed(value)}: rlfuse has no such setting")
        for setting, why in command.unknown.items():
            name = setting.partition("=")[0]
            if name not in keys and ignored.match(name):
                self.note(why, setting)
                continue
            for key in keys.get(name, ("trainer.task",)):
                self.leave_unknown(key, setting, why)
        for word, why in command.unread.items():
            self.leave_open("trainer.task", f"{word}: {why}")

    def set_wandb_mode(self, environment: Mapping[str, str]) -> None:
        """Set what wandb does with the run by default, or by WANDB_MODE."""
        mode = environment.get("WANDB_MODE")
        comment = "wandb's default" if mode is None else f"WANDB_MODE={mode}"
        self.set("trainer.wandb_mode", WANDB_MODES.get(mode or "", "online"), comment, comment)

    def as_text(self, origin: str) -> str:
        """Return the text of the job file."""
        lines = [f"# From {origin} by `rlfuse translate`. Comments show the {self.framework} setting if it differs."]
        if self.undecided:
            lines += [f"# Decide each {MISSING} below: rlfuse train refuses it."]
        order = {name: number for number, name in enumerate(by_name())}
        given = self.settings | dict.fromkeys(self.undecided)
        for group in (name for name in groups() if "." not in name):
            keys = sorted((key for key in given if key.startswith(f"{group}.")), key=lambda key: order.get(key, 999))
            lines += [f"{group}:"] * bool(keys)
            for key in keys:
                value = MISSING if key in self.undecided else _yaml(self.settings[key])
                line, comment = f"  {key.removeprefix(f'{group}.')}: {value}", self._comment(key)
                commented = f"{line}  # {comment}"
                lines += [commented] if comment and len(commented) <= COLUMNS else [*_wrapped(comment, "  # "), line]
        if self.notes:
            lines += ["", "# Without a counterpart:"]
            for why, settings in self.notes.items():
                lines += _wrapped(f"{', '.join(settings)}: {why}", "#   ", "#     ")
        return "\n".join(lines) + "\n"

    def _comment(self, key: str) -> str:
        if key not in self.undecided:
            return self.comments.get(key, "")
        without = f"; without it: {_yaml(self.settings[key])}" if key in self.settings else ""
        return "; ".join(self.undecided[key]) + without


def _rows(framework: str, name: str) -> list[Undecided]:
    return [row for row in UNDECIDED[framework] if name == row.name or name.startswith(f"{row.name}.")]


def _wrapped(text: str, first: str, others: str | None = None) -> list[str]:
    wrapped = {"width": COLUMNS, "break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(" ".join(text.split()), initial_indent=first, subsequent_indent=others or first, **wrapped)


def _yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...").strip()
