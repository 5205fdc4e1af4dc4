"""Lifecycle of a job: run folder, checkpoint to resume from, log, cleanup, and restarts after losing a worker.

Only `WorkerLost` is retried, and during startup only if a process died. There is no restart after an attempt without
progress. A planned node drain is not a failure. Rollout engines and reward workers are replaced without a restart.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlfuse import clock
from rlfuse.cluster import placement
from rlfuse.cluster.remote import is_death
from rlfuse.cluster.watchdog import watching
from rlfuse.config.job_file import as_yaml
from rlfuse.config.schema import Config
from rlfuse.config.secrets import hidden_text
from rlfuse.config.trainer import TrainerConfig
from rlfuse.errors import EngineError, NodeLeft, WorkerLost, first_error
from rlfuse.events import Span
from rlfuse.files import write_atomically
from rlfuse.fusion.selection import EXACT
from rlfuse.health.agent import agents
from rlfuse.health.monitor import Monitor
from rlfuse.observe.run_log import RunLog
from rlfuse.observe.tracking import read_metrics
from rlfuse.progress import timed
from rlfuse.run.resume import messages
from rlfuse.run.resume.acceptance import NothingToDo, RunRefused, accept
from rlfuse.run.resume.changes import Change, record, resolved
from rlfuse.run_folder import checkpoints, status
from rlfuse.run_folder.run_lock import RunLock
from rlfuse.step.protocols import NoHealth
from rlfuse.stopping import Stopped


@dataclass(frozen=True, slots=True)
class Job:
    """One attempt of a run: the checked configuration, its folder and its checkpoint."""

    config: Config
    folder: Path
    checkpoint: Path | None
    state: dict[str, Any]
    """Content of the checkpoint other than the models; always has `step`."""
    started: float
    faults: Counter[str] = field(default_factory=Counter)
    began: float = field(default_factory=clock.now)
    restart: Span | None = None
    """Span from the loss of a worker to this attempt; None in the first attempt."""
    resumed_after: int = 0
    """Step after which this process resumed the run, regardless of later restarts."""
    changes: tuple[Change, ...] = ()
    inputs: dict[str, str] = field(default_factory=dict)
    drained: set[int] = field(default_factory=set)
    """Slots that are drained, in this attempt and the following ones."""
    returning: set[int] = field(default_factory=set)
    """Drained slots that are restored once they are as fast as the others."""
    initial_checkpoints: dict[Path, int] = field(default_factory=dict)
    excluded_nodes: frozenset[str] = frozenset()
    lock: RunLock = field(default_factory=RunLock)
    """Lock of the run folder, held from the first attempt to the end of the run."""

    @property
    def label(self) -> str:
        return self.state.get("label", EXACT)

    def begin(self, total_steps: int) -> RunLog:
        """Open the run folder's log. Raises NothingToDo if no step is left, RunRefused if another process uses the
        folder."""
        step, state = self.state["step"], status.read(self.folder)
        if step > total_steps or (step == total_steps and state is not None and state.state == "finished"):
            raise NothingToDo(self.folder, messages.long_enough(self.config, step, total_steps))
        settings = resolved(self.config)
        self._lock_folder()
        name = f"{self.config.trainer.project_name}/{self.config.trainer.experiment_name}"
        status.begin(self.folder, name, self.started, total_steps, self.state.get("label", ""))
        record(self.folder, self.state["step"], self.changes, self.inputs)
        write_atomically(self.folder / "config.yaml", as_yaml(settings))
        log = RunLog(self.config, settings, self.folder, total_steps, self.state["step"], self.faults, self.label,
                     self.lock.check)  # fmt: skip
        if self.restart is not None:
            self.restart.end = clock.now()
            log.journal.recorder.add(self.restart)
        if abandoned := checkpoints.later(self.folder, self.state["step"]):
            names = ", ".join(path.name for path in abandoned)
            log.say(
                f"The run resumes after step {self.state['step']}, so its next checkpoint replaces {names} in "
                f"{self.folder}. "
                "To keep them, move them to another folder."
            )
        return log

    def _lock_folder(self) -> None:
        if self.lock.is_held:
            return self.lock.check()
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.lock.acquire(self.folder):
            raise RunRefused(messages.in_use(self.folder))
        if checkpoints.write_times(self.folder) != self.initial_checkpoints:
            self.lock.release()
            raise RunRefused(
                f"{self.folder}: another process has written checkpoints since this one started. Nothing was changed; "
                "rerun the command to resume from the newest."
            )

    def run_until_done(self, work: Coroutine[Any, Any, None], log: RunLog) -> float:
        """Run `work`, then clean up; return the seconds since the start. Raises Stopped after a signal."""
        error: BaseException | None = None
        try:
            with watching(self.folder, log.journal.recorder, log.say):
                asyncio.run(log.stopping.listen_during(work))
        except BaseException as caught:
            error = first_error(caught)
            if isinstance(error, WorkerLost):
                error.before_first_step = log.stopping.step is None
            raise error from error.__cause__
        finally:
            state, has_status = _state(error), (self.folder / status.FILE).exists()
            status.release_reserve(self.folder)
            kept = nullcontext() if error is None else suppress(OSError)  # the disk may be full; `error` is the cause
            with kept, ExitStack() as ending:  # runs all, last first, even if one is interrupted
                ending.callback(log.close, None if isinstance(error, NodeLeft) else error)
                ending.callback(placement.stop, self.folder / "logs" if state == "failed" and has_status else None)
            if (
                error is not None and has_status and not isinstance(error, WorkerLost)
            ):  # reported by `run_with_restarts`
                print(how_to_resume(self), flush=True)
                if state == "failed" and "\nlogs: " not in str(error) and (self.folder / "logs").is_dir():
                    print(f"logs: {self.folder / 'logs'}", flush=True)
        return clock.now() - self.began


@contextmanager
def record_final_status(job: Job) -> Iterator[None]:
    """Write the final status and release the lock after all attempts. Raises RunError if the folder was lost."""

    def end(error: BaseException | None = None) -> None:
        if job.lock.is_held:
            text = "" if error is None else str(error)
            status.end(job.folder, _state(error), text, job.started + clock.now() - job.began)

    try:
        yield
    except BaseException as error:
        job.lock.check()
        with suppress(OSError):
            end(error)
        raise
    else:
        end()
    finally:
        job.lock.release()


def _state(error: BaseException | None) -> str:
    if error is None:
        return "finished"
    planned = Stopped | NodeLeft | KeyboardInterrupt | asyncio.CancelledError
    return "stopped" if isinstance(error, planned) else "failed"


def open_job(config: Config) -> Job:
    """Return the accepted job, ready to begin. Raises the errors of `accept`."""
    accepted = accept(config)
    if accepted.message:
        print(accepted.message, flush=True)
    state = checkpoints.read_state(accepted.checkpoint) if accepted.checkpoint else {"step": 0}
    started = time.time()
    config = accepted.config
    more = {"resumed_after": state["step"], "changes": accepted.changes, "inputs": accepted.inputs}
    more["initial_checkpoints"] = checkpoints.write_times(config.run_folder)
    more["drained"] = set(config.cluster.drain)
    return Job(config, config.run_folder, accepted.checkpoint, state, started, **more)


def training_steps(trainer: TrainerConfig, steps_per_epoch: int) -> int:
    """Return the run's number of steps: by total_training_steps or total_epochs, whichever ends first."""
    limits = [trainer.total_training_steps, trainer.total_epochs and trainer.total_epochs * steps_per_epoch]
    return min((limit for limit in limits if limit is not None), default=steps_per_epoch)


def start_health_monitor(config: Config, slots: placement.Slots, log: RunLog) -> Monitor | NoHealth:
    """Start the health monitor, which the caller closes; a no-op one if alerts.slow_worker_s is null."""
    continuity = config.alerts.slow_worker_s
    if continuity is None:
        return NoHealth()
    width = config.rollout.tensor_model_parallel_size
    return Monitor(log.folder, agents(slots), continuity, width, log.loggers.alert, log.say)


def how_to_resume(job: Job) -> str:
    """Return a line that explains how to resume the run."""
    whole, auto = checkpoints.complete(job.folder), "trainer.resume_mode=auto"
    if not whole:
        return f"No checkpoint was written (trainer.save_freq); the logs are in {job.folder}"
    if job.config.trainer.resume_mode == "auto":
        return f"The last checkpoint is {whole[-1]}; rerun the same command to resume from it ({auto})"
    named = f"trainer.experiment_name={job.config.trainer.experiment_name}"
    return f"The last checkpoint is {whole[-1]}; rerun the same command with {named} {auto} to resume from it"


def run_with_restarts(config: Config, attempt: Callable[[Job], Path]) -> Path:
    """Run `attempt` until it succeeds, again after losing a worker; return its run folder."""
    try:
        job = open_job(config)
        with record_final_status(job):
            return _run_attempts(job, attempt)
    except NothingToDo as end:
        print(end, flush=True)
        return end.folder


def _run_attempts(job: Job, attempt: Callable[[Job], Path]) -> Path:
    reached: list[int | None] = []
    while True:
        try:
            return attempt(job)
        except NodeLeft as left:
            job = next_attempt(job, left)
            print(hidden_text(f"{left}\nThe run resumes {_from(job)} on other nodes."), flush=True)
        except WorkerLost as error:
            rows = read_metrics(job.folder / "metrics.jsonl")
            last = max((row["step"] for row in rows), default=0)
            reached.append(None if error.before_first_step else last)
            if why := no_restart_reason(reached, job.config.cluster.max_restarts):
                print(how_to_resume(job), flush=True)
                raise EngineError(f"{error}\n{why}") from error
            job = next_attempt(job, error)
            count = f"restart {len(reached)} of at most {job.config.cluster.max_restarts}"
            print(hidden_text(f"lost: {error}\nThe run resumes {_from(job)} ({count})."), flush=True)


def _from(job: Job) -> str:
    return f"from {job.checkpoint.name}" if job.checkpoint else "from its start"


@contextmanager
def worker_startup(log: RunLog) -> Iterator[None]:
    """Record the startup of workers. Timeouts and lack of memory would repeat, so only deaths stay `WorkerLost`."""
    with timed("all workers", log.say), log.journal.recorder.span("start", cause="run"):
        try:
            yield
        except WorkerLost as error:
            if is_death(error):
                raise
            raise EngineError(str(error)) from error


def no_restart_reason(reached: Sequence[int | None], limit: int) -> str | None:
    """Return why the run is not restarted, or None. `reached`: last completed step at each loss, None before the
    first."""
    made, steps = len(reached) - 1, [step for step in reached if step is not None]
    if made >= limit:
        return f"No restart: {made} of at most cluster.max_restarts={limit} restarts were made."
    if [*reached[-2:]] == [None, None]:
        return "No restart: a worker was lost before the first step twice in a row."
    if reached[-1] is not None and steps[-1] <= max(steps[:-1], default=-1):
        return f"No restart: the last of {made} restarts made no progress."
    return None


def next_attempt(job: Job, error: WorkerLost) -> Job:
    """Return the next attempt, from the newest checkpoint that this run wrote or else from the start of this run."""
    written = [
        path for path, at in checkpoints.write_times(job.folder).items() if job.initial_checkpoints.get(path) != at
    ]
    checkpoint = written[-1] if written else job.checkpoint
    state = checkpoints.read_state(checkpoint) if checkpoint else {"step": 0}
    left = error.nodes if isinstance(error, NodeLeft) else ()
    restart = Span("hand_over" if left else "restart", "driver", clock.now(), cause=str(error))
    where = {"restart": restart, "excluded_nodes": job.excluded_nodes.union(left)}
    return dataclasses.replace(job, checkpoint=checkpoint, state=state, changes=(), **where)
