"""Name the runs of a sweep (`--multirun`) by the settings that differ, and print the final table."""

from __future__ import annotations

import hashlib
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from omegaconf import DictConfig, OmegaConf

from rlfuse.errors import RunError
from rlfuse.progress import Console
from rlfuse.run_folder.reader import open_run

GROUP = "WANDB_RUN_GROUP"
"""wandb's variable for the group of the runs of a sweep, which is also in `status.json`."""
LONGEST_NAME, LONGEST_VALUE = 120, 32
COLUMNS = 240
"""Width of the table: a narrow terminal wraps only the last column, the folders."""


def swept_values(words: list[str], params: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the swept settings with their values. `params`: hydra.sweeper.params."""
    found = {}
    for word in [*words, *(f"{name}={value}" for name, value in params.items() if isinstance(value, str))]:
        override = OverridesParser.create().parse_override(word)
        if override.is_sweep_override() and override.key_or_group != "trainer.experiment_name":
            known = override.is_discrete_sweep() and not isinstance(override.value(), Glob)
            found[override.key_or_group] = [*override.sweep_string_iterator()] if known else []
    return found | {name: [] for name, value in params.items() if not isinstance(value, str)}


@dataclass(slots=True, eq=False)
class Trial:
    """One job of a sweep."""

    name: str
    settings: dict[str, str]
    folder: Path | None = None
    state: str = "failed"
    error: str = ""

    def numbers(self) -> dict[str, Any]:
        try:
            return open_run(self.folder).summary() if self.folder and self.state == "finished" else {}
        except RunError:
            return {}


@dataclass(slots=True)
class Sweep:
    """The jobs of one command line."""

    words: list[str]
    jobs: list[Trial] = field(default_factory=list)
    group_before: str | None = field(default_factory=lambda: os.environ.get(GROUP))

    def begin(self, stem: str, overrides: list[str], sweeper: DictConfig) -> Trial:
        os.environ.setdefault(GROUP, stem)
        swept = swept_values(self.words, OmegaConf.to_container(sweeper.get("params") or OmegaConf.create({})))
        parsed = [OverridesParser.create().parse_override(word) for word in overrides]
        values = {
            each.key_or_group: each.get_value_string()
            for each in parsed
            if each.key_or_group in swept and each.value() != f"${{{each.key_or_group}}}"  # re-merges a preset
        }
        self.jobs.append(Trial(sweep_name(stem, values, swept), values))
        return self.jobs[-1]

    def end(self, out: TextIO | None = None) -> None:
        if self.group_before is None:
            os.environ.pop(GROUP, None)
        if self.jobs:
            print_table(self.jobs, out or sys.stdout)


def sweep_name(stem: str, values: Mapping[str, str], swept: Mapping[str, list[str]]) -> str:
    """Return a unique folder name for a job of a sweep; jobs in one folder would resume each other's checkpoints."""
    short = {name: _short(name) for name in swept}
    parts = [stem]
    for name, value in values.items():
        is_unique = [*short.values()].count(short[name]) == 1
        parts.append(f"{_plain(short[name] if is_unique else name)}={_label(value, swept[name])}")
    full = "-".join(parts)
    return full if len(full) <= LONGEST_NAME else f"{full[: LONGEST_NAME - 9]}-{_digest(full)}"


def _short(name: str) -> str:
    group, _, below = name.partition(".")
    return f"{group}.{below.rpartition('.')[2]}" if below else name.rpartition("/")[2]


def _label(value: str, others: list[str]) -> str:
    plain = _plain(value)
    if any(_plain(other) == plain for other in others if other != value):
        plain = f"{plain}-{_digest(value)}"
    return plain if len(plain) <= LONGEST_VALUE else f"{plain[: LONGEST_VALUE - 9]}-{_digest(value)}"


def _plain(value: str) -> str:
    return re.sub(r"[^\w.+-]+", "_", value).strip("_")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def print_table(jobs: list[Trial], out: TextIO) -> None:
    """Print one line per job, best validation first; the errors of failed jobs; and the next command."""
    from rich.table import Table

    numbers = {job: job.numbers() for job in jobs}

    def rank(job: Trial) -> tuple[float, float]:
        found = numbers[job]
        values = [found.get(key) for key in RANKED]
        return tuple(math.inf if value is None or math.isnan(value) else -value for value in values)

    console = Console(file=out, width=COLUMNS, highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    names = list(dict.fromkeys(name for job in jobs for name in job.settings))
    for heading in ("job", *map(_short, names), "state", "reward", "held out", "s/step", "folder"):
        table.add_column(heading, overflow="fold", justify="right" if heading in ("held out", "s/step") else "left")
    for job in sorted(jobs, key=rank):
        found = numbers[job]
        reward = f"{_format(found.get('reward_first'))} -> {_format(found.get('reward_last'))}" if found else "-"
        settings = [job.settings.get(name, "-") for name in names]
        scores = (_format(found.get("val_after")), _format(found.get("median_step_s")))
        folder = _shown(job.folder) if job.folder and job.folder.exists() else "-"
        table.add_row(str(jobs.index(job)), *settings, job.state, reward, *scores, folder)
    print(file=out)
    console.print(table, soft_wrap=True)
    for job in jobs:
        if job.error:
            print(f"job {jobs.index(job)} {job.state}: {job.error}", file=out)
    begun = [job.folder for job in sorted(jobs, key=rank) if job.state != "refused" and job.folder]
    if runs := [_shown(folder) for folder in begun if folder.exists()]:
        print(f"compare  {shlex.join(['rlfuse', 'report', *dict.fromkeys(runs)])}", file=out)


RANKED = ("val_after", "reward_last")


def _format(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _shown(folder: Path) -> str:
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)
