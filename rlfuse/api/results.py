"""Results of the Python API, read from the files that commands write when an attribute is used."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlfuse.files import read_rows
from rlfuse.run_folder import checkpoints
from rlfuse.run_folder.reader import open_run

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Run(os.PathLike[str]):
    """A run. Functions that take the folder of a run also take this object."""

    folder: Path
    is_trusted: bool = field(default=False, repr=False, compare=False)
    """True if this program started it, so that code that its configuration names may be run."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))

    def __fspath__(self) -> str:
        return str(self.folder)

    __str__ = __fspath__

    @property
    def metrics(self) -> pd.DataFrame:
        """All scalars: a row per step (0 is the validation before step 1), a column per name."""
        from rlfuse.tools.dataframes import metrics  # imports pandas

        return metrics(self.folder)

    @property
    def samples(self) -> pd.DataFrame:
        """Logged samples (`trainer.log_samples` per step), a row each: prompt, response, reward, its parts, ..."""
        from rlfuse.tools.dataframes import samples

        return samples(self.folder)

    @property
    def summary(self) -> dict[str, Any]:
        """Content of summary.json; empty until the run has finished."""
        return open_run(self.folder).summary()

    @property
    def checkpoint(self) -> Path | None:
        """Folder of the newest checkpoint, `global_step_N`; None if there is none."""
        return next(iter(checkpoints.complete(self.folder)[::-1]), None)

    @property
    def model(self) -> Path | None:
        """Model of the newest checkpoint in Hugging Face format, for `from_pretrained`; None if there is none."""
        found = self.checkpoint and next(iter(sorted(self.checkpoint.glob("*/huggingface"))), None)
        return found or None


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model on held-out prompts, and its responses."""

    folder: Path

    @cached_property
    def report(self) -> dict[str, Any]:
        """Content of eval.json."""
        return json.loads((self.folder / "eval.json").read_text())

    @property
    def metrics(self) -> dict[str, float | None]:
        """Validation metrics, by the names that they have in training; None if no response has a value."""
        return self.report["metrics"]

    @property
    def scores(self) -> pd.DataFrame:
        """Statistics with a row per data source: score, stderr, reward, pass@k, prompts, samples, failed."""
        import pandas as pd

        names = ("score", "stderr", "reward", "prompts", "samples", "failed")
        rows = {
            source: {name: found[name] for name in names} | {f"pass@{k}": rate for k, rate in found["pass@k"].items()}
            for source, found in self.report["by_data_source"].items()
        }
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("data_source")

    @property
    def samples(self) -> pd.DataFrame:
        """All responses with their rewards, a row each, as `Run.samples`."""
        return read_responses(self.folder / "responses.jsonl")


def read_responses(file: Path) -> pd.DataFrame:
    """Return a file of responses as a table, as `Run.samples`, in the order of the prompts."""
    from rlfuse.tools.dataframes import sample_table

    rows = sorted(read_rows(file), key=lambda row: [int(part) for part in row["id"].split("/")])
    return sample_table({"step": int(row["id"].partition("/")[0]), **row} for row in rows)


@dataclass(frozen=True)
class Plan:
    """Predicted memory, placement and step time of a job; `print(plan)` shows the tables of `rlfuse plan`."""

    fits: bool
    text: str

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__
