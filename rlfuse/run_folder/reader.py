"""Read the files of a finished or unfinished run; all except the configuration may be missing. Events are streamed."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from rlfuse.errors import RlfuseError, RunError
from rlfuse.events import Span, read_spans
from rlfuse.files import parse_non_finite, read_rows
from rlfuse.parsing import parse_json, parse_yaml

MAX_SLOTS = 1_000_000


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Files of one run."""

    path: Path
    config: dict[str, Any]

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def slots(self) -> int:
        return self.config["trainer"]["nnodes"] * self.config["trainer"]["n_gpus_per_node"]

    @property
    def width(self) -> int:
        return self.config["rollout"]["tensor_model_parallel_size"]

    def rows(self) -> list[dict[str, float]]:
        return list(self.iter_rows())

    def iter_rows(self) -> Iterator[dict[str, float]]:
        return map(parse_non_finite, read_rows(self.path / "metrics.jsonl"))

    def phases(self, steps: int) -> list[tuple[int, dict[str, Any]]]:
        """Return (first step, configuration) of each part of the run, as settings may change on resume."""
        changes = list(read_rows(self.path / "changes.jsonl"))
        starts = sorted({1, *(change["step"] + 1 for change in changes if change["step"] < steps)})
        return [(start, self._config_at(start, changes)) for start in starts]

    def _config_at(self, step: int, changes: Sequence[dict[str, Any]]) -> dict[str, Any]:
        config = deepcopy(self.config)
        for change in reversed(changes):
            if change["step"] >= step:
                *groups, leaf = change["key"].split(".")
                reduce(lambda inside, group: inside.setdefault(group, {}), groups, config)[leaf] = change["was"]
        return config

    def samples(self) -> Iterator[dict[str, Any]]:
        yield from read_rows(self.path / "samples.jsonl")

    def validation_rows(self) -> Iterator[dict[str, Any]]:
        yield from read_rows(self.path / "validation.jsonl")

    def summary(self) -> dict[str, Any]:
        path = self.path / "summary.json"
        try:
            return dict(parse_json(path.read_text())) if path.exists() else {}
        except (ValueError, TypeError) as error:
            raise RunError(f"{path}: {error}; remove the file; it is not needed to read the run") from error

    def spans(
        self, wanted: Callable[[str], bool] = lambda line: True, steps: Collection[int] | None = None
    ) -> Iterator[Span]:
        return read_spans(self.path / "events.jsonl", wanted, steps)

    def steps(self) -> dict[int, Span]:
        """Return the driver's span of each step; the last one of a step that was repeated after a resume."""
        found = (span for span in self.spans(lambda line: '"kind":"step"' in line) if span.where == "driver")
        return {span.step: span for span in found}


def check_files(folder: Path) -> None:
    """Raise RunError for files that are pipes or links to outside of the folder (sub-folders may be links)."""
    root = folder.resolve()
    for path in [*folder.glob("*"), *folder.glob("*/*.json*")]:
        if os.path.isdir(path) or not os.path.exists(path):
            continue
        if not os.path.isfile(path):
            raise RunError(f"{path} is a pipe or a device instead of a file. Remove it.")
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise RunError(f"{path} is a link to {path.resolve()}, outside of the run folder. Replace it by the file.")


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Convert the exceptions of reading damaged or forged files of a run folder to RunError."""
    try:
        yield
    except RlfuseError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise RunError(
            f"{folder}: its files can't be read ({type(error).__name__}: {error}, {Path(place.filename).name}:"
            f"{place.lineno}). They are damaged, or were written by another version of rlfuse; for the traceback "
            "set RLFUSE_TRACEBACK=1."
        ) from error


def open_run(path: Path) -> RunFolder:
    """Open a run folder. Raises RunError if it has no run, or if its configuration is invalid."""
    check_files(path)
    try:
        run = RunFolder(path, parse_yaml((path / "config.yaml").read_text()))
        if not 1 <= run.width <= run.slots <= MAX_SLOTS:  # used by every reader
            raise ValueError(f"{run.slots} slots, {run.width} for each engine")
    except OSError as error:
        near = sorted(child.parent.name for child in path.glob("*/config.yaml"))[:5] if path.is_dir() else []
        meant = f"; runs below it: {', '.join(near)}" if near else ""
        raise RunError(
            f"{path} is not a run folder ({error.strerror}: config.yaml); give the folder printed at the end of a run, "
            f"{{default_local_dir}}/{{project_name}}/{{experiment_name}}{meant}"
        ) from error
    except (ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        raise RunError(
            f"{path / 'config.yaml'}: {error!r}, so the file is incomplete or not of a run; copy it from a run with "
            "the same settings, or resume the run, which rewrites it"
        ) from error
    return run
