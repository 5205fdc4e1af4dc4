"""Log to MLflow: the server of MLFLOW_TRACKING_URI, else a database next to the run folders."""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlfuse.config.schema import Config
from rlfuse.errors import ConfigError
from rlfuse.files import write_atomically
from rlfuse.observe.alerts import Alert
from rlfuse.observe.sink import MAX_FAILURES, SAMPLES, Row, as_text, part_columns
from rlfuse.observe.tracking import FAILURE_FIELDS

MAX_METRICS, MAX_PARAMETERS, MAX_CHARS, MAX_NAME = 1000, 100, 5000, 250
"""MLflow's limits for a request, for the text of a parameter or tag, and for names."""
LIMITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
"""Seconds and repetitions of a request, for which a step waits: by default a lost server would cost minutes."""
ERROR = "error"
"""Tag of a failed run, until it resumes."""
COLUMNS = ("id", "prompt", "response", "ground_truth", "reward")


class MLflow:
    """An MLflow run, continued under its id when the job resumes after step `start`.

    The experiment is trainer.project_name, the parameters are the settings at the start of the run. Samples, pictures
    and failed rewards are artifacts.
    """

    def __init__(self, config: Config, resolved: dict[str, Any], folder: Path, start: int):
        for variable, value in LIMITS.items():
            os.environ.setdefault(variable, value)
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException

        for name in ("mlflow", "alembic"):  # progress of creating the database
            logging.getLogger(name).setLevel(logging.WARNING)
        self._metric, store = Metric, Path(config.trainer.default_local_dir).absolute() / "mlflow"
        place = os.environ.get("MLFLOW_TRACKING_URI")
        identity = folder / "mlflow_id.txt"
        try:
            if not place:
                store.mkdir(parents=True, exist_ok=True)
            self._client = MlflowClient(tracking_uri=place or f"sqlite:///{store / 'mlflow.db'}")
            if start and identity.exists():
                self._id = identity.read_text()
                self._client.update_run(self._id, status="RUNNING")
                if ERROR in self._client.get_run(self._id).data.tags:
                    self._client.delete_tag(self._id, ERROR)
                return
            experiment = self._experiment(
                config.trainer.project_name, None if place else (store / "artifacts").as_uri()
            )
            self._id = self._client.create_run(experiment, run_name=config.trainer.experiment_name).info.run_id
            settings = [Param(name, str(value)[:MAX_CHARS]) for name, value in _leaves(resolved)]
            for first in range(0, len(settings), MAX_PARAMETERS):
                self._client.log_batch(self._id, params=settings[first : first + MAX_PARAMETERS])
        except MlflowException as error:
            why = " ".join(str(error).split()).rstrip(".")
            remedy = "check MLFLOW_TRACKING_URI and its server, or remove mlflow"
            raise ConfigError([f"trainer.logger: mlflow could not start a run ({why}); {remedy}"]) from error
        write_atomically(identity, self._id)

    def _experiment(self, name: str, artifacts: str | None) -> str:
        found = self._client.get_experiment_by_name(name)
        return found.experiment_id if found else self._client.create_experiment(name, artifact_location=artifacts)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        now = int(1000 * time.time())
        found = [
            self._metric(metric_name(name), float(value), now, step)
            for name, value in metrics.items()
            if math.isfinite(value)
        ]
        for first in range(0, len(found), MAX_METRICS):
            self._client.log_batch(self._id, metrics=found[first : first + MAX_METRICS])

    def samples(self, step: int, rows: Sequence[Row], name: str = SAMPLES) -> None:
        parts = part_columns(rows, COLUMNS)
        shown = [
            row
            | {parts[part]: value for part, value in row["parts"].items()}
            | {"ground_truth": as_text(row["ground_truth"])}
            for row in rows
        ]
        self._table(step, name, [*COLUMNS, *parts.values()], shown)

    def picture(self, step: int, name: str, path: Path) -> None:
        self._client.log_artifact(self._id, str(path), artifact_path=name)

    def alert(self, step: int, alert: Alert) -> None:
        self._client.set_tag(self._id, metric_name(f"alert/{alert.title}"), f"step {step}: {alert.text}"[:MAX_CHARS])

    def reward_failures(self, step: int, rows: Sequence[Row]) -> None:
        self._table(step, "reward_failures", FAILURE_FIELDS, rows[:MAX_FAILURES])

    def failure(self, where: str, text: str) -> None:
        self._client.set_tag(self._id, ERROR, f"{where}: {text}"[:MAX_CHARS])

    def close(self, exit_code: int) -> None:
        self._client.set_terminated(self._id, "FAILED" if exit_code else "FINISHED")

    def _table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        table = {"columns": list(columns), "data": [[row.get(column) for column in columns] for row in rows]}
        self._client.log_dict(self._id, table, f"{name}/step_{step}.json")


def metric_name(name: str) -> str:
    """Return a name that MLflow accepts for a metric, parameter or tag; "@" becomes "_at_" as in verl.

    It must also be a path without empty, `.` and `..` parts.
    """
    parts = re.sub(r"[^\w\-. /]", "_", name.replace("@", "_at_")).split("/")
    return "/".join(f"{part}_" if part in ("", ".", "..") else part for part in parts)[:MAX_NAME]


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield metric_name(f"{prefix}{name}"), value
