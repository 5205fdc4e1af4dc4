"""Log to wandb, offline unless trainer.wandb_mode=online.

wandb writes from a separate process, which buffers rows and ends with the signal that a scheduler sends to all
processes of a job (Ray Jobs, Slurm). The sink then starts another process. It logs the rows of `metrics.jsonl` that the
logs on disk lack, as it does when a run resumes.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from rlfuse.config.schema import Config
from rlfuse.errors import ConfigError
from rlfuse.files import write_atomically
from rlfuse.observe import wandb_log
from rlfuse.observe.alerts import Alert
from rlfuse.observe.sink import AXIS, MAX_FAILURES, SAMPLES, Row, as_text, part_columns
from rlfuse.observe.tracking import FAILURE_FIELDS, read_metrics

INIT_S = 60.0
FLUSH_S = 1.0
"""Interval for writing buffered rows to disk; 15 s is wandb's default."""
STAGING = "WANDB_DATA_DIR"
MAX_RESTARTS = 3
PROCESS, ENDED_S = "wandb-core", 10.0
COLUMNS = ("id", "prompt", "response", "ground_truth", "finish", "response_tokens", "reward")


class Wandb:
    """A wandb run in the run folder, continued under its id when the job resumes after step `start`.

    Everything except the final error is logged with the training step, which is the x axis of every chart. The step
    counter of wandb is not used, because it drops rows with a lower step, for example after a resume.
    """

    def __init__(self, config: Config, resolved: dict[str, Any], folder: Path, start: int):
        import wandb  # takes half a second, and not every run needs it
        from wandb.sdk.mailbox import HandleAbandonedError

        self._wandb, self._config, self._resolved, self._folder = wandb, config, resolved, folder
        self._process_ended = (ConnectionError, HandleAbandonedError)
        self._restarts = 0
        identity = folder / "wandb_id.txt"
        if not (start and identity.exists()):
            write_atomically(identity, secrets.token_hex(4))
        self._id = identity.read_text()
        self._open(until=start)

    def _open(self, until: float) -> None:
        """Start the run, or its next part, and log the rows up to step `until` that it lacks."""
        offline = self._config.trainer.wandb_mode == "offline"
        parts = wandb_log.log_files(self._folder, self._id)
        logged, last = wandb_log.logged_steps(parts)
        self._run = self._init()
        if until:  # wandb has the earlier settings, which may have changed since
            self._run.config.update(self._resolved, allow_val_change=True)
        self._run.define_metric("*", step_metric=AXIS)
        if parts and offline:  # it does not know the rows of the earlier parts, and would replace them
            self._run.log({}, step=max(last + 1, int(time.time())), commit=False)
        for row in read_metrics(self._folder / "metrics.jsonl") if until else ():
            if (step := row.pop("step")) <= until and step not in logged:
                self._run.log({AXIS: step, **row})

    def _init(self) -> Any:
        mode, trainer = self._config.trainer.wandb_mode, self._config.trainer
        try:
            return self._wandb.init(
                project=trainer.project_name,
                name=trainer.experiment_name,
                id=self._id,
                group=trainer.wandb_group or os.environ.get("WANDB_RUN_GROUP"),  # wandb reads it once per process
                tags=trainer.wandb_tags or None,
                resume="allow" if mode == "online" else None,
                dir=self._folder,
                mode=mode,
                config=self._resolved,
                # x_disable_meta: metadata of the host includes the command line, which may contain secrets.
                settings=self._wandb.Settings(
                    silent=True,
                    console="off",
                    init_timeout=INIT_S,
                    finish_timeout=120,
                    x_disable_meta=True,
                    x_transaction_log_flush_interval=FLUSH_S,
                ),
            )
        except (self._wandb.Error, OSError) as error:
            if mode != "online":
                raise
            why = " ".join(str(error).split()).rstrip(".")
            remedy = "check the key (`wandb login --verify`) and the network, or set trainer.wandb_mode=offline"
            raise ConfigError([f"trainer.wandb_mode={mode}: wandb could not start a run ({why}); {remedy}"]) from error

    def _restart(self) -> None:
        """Continue in a new process, with the rows that the ended one lost. Raises its error if that repeats."""
        self._restarts += 1
        if self._restarts > MAX_RESTARTS:
            raise
        with suppress(psutil.Error):  # it may write for a moment after its socket is closed
            ended = [each for each in psutil.Process().children() if each.name() == PROCESS]
            psutil.wait_procs(ended, timeout=ENDED_S)
        with suppress(SystemExit, *self._process_ended):
            self._wandb.teardown()
        self._open(until=math.inf)

    def _send(self, send: Callable[[], Any]) -> None:
        """Call `send`; if wandb's process has ended, restart it and call `send` again."""
        try:
            send()
        except self._process_ended:
            self._restart()
            send()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        try:
            self._run.log({AXIS: step, **metrics})
        except self._process_ended:
            self._restart()  # logs the row with the others that are missing

    def samples(self, step: int, rows: Sequence[Row], name: str = SAMPLES) -> None:
        parts = part_columns(rows, ("step", *COLUMNS, "clip"))
        sheets = ["clip"] if any(row["contact_sheet"] for row in rows) else []

        def cells(row: Row) -> list[Any]:
            shown = row | {"ground_truth": as_text(row["ground_truth"])}
            path = row["contact_sheet"] and self._folder / row["contact_sheet"]
            sheet = [self._wandb.Image(str(path)) if path else None] if sheets else []
            return [step, *(shown[name] for name in COLUMNS), *(row["parts"].get(part) for part in parts), *sheet]

        columns = ["step", *COLUMNS, *parts.values(), *sheets]
        self._log_table(name, columns, lambda: [cells(row) for row in rows], {AXIS: step})

    def picture(self, step: int, name: str, path: Path) -> None:
        self._send(lambda: self._run.log({AXIS: step, name: self._wandb.Image(str(path))}))

    def alert(self, step: int, alert: Alert) -> None:
        """Send a wandb alert, by mail or Slack according to the user settings."""
        text, level = f"step {step}: {alert.text}", self._wandb.AlertLevel.WARN
        self._send(lambda: self._run.alert(title=alert.title, text=text, level=level))

    def reward_failures(self, step: int, rows: Sequence[Row]) -> None:
        data = [[row[name] for name in FAILURE_FIELDS] for row in rows[:MAX_FAILURES]]
        self._log_table("reward_failures", FAILURE_FIELDS, lambda: data, {AXIS: step})

    def failure(self, where: str, text: str) -> None:
        self._log_table("errors", ["where", "error"], lambda: [[where, text]], {})

    def _log_table(self, name: str, columns: Sequence[str], data: Callable[[], list[list]], row: Row) -> None:
        """Log a table as part of `row`. `data` creates its rows: wandb binds pictures to the process that logs."""

        def send() -> None:
            with _staged_in(self._folder / "wandb"):
                self._run.log({**row, name: self._wandb.Table(columns=list(columns), data=data())})

        self._send(send)

    def close(self, exit_code: int) -> None:
        self._send(lambda: self._run.finish(exit_code=exit_code))


@contextmanager
def _staged_in(folder: Path) -> Iterator[None]:
    """Keep the pictures of tables in the run folder until they are uploaded: wandb would keep them in HOME."""
    if os.environ.get(STAGING):
        yield
        return
    os.environ[STAGING] = str(folder)  # not for longer, as wandb warns of changed variables when a run starts
    try:
        yield
    finally:
        del os.environ[STAGING]
