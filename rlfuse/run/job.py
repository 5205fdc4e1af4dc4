"""Wrap every job: run folder, checkpoint to resume from, log, cleanup, and restarts after a loss.

Only `WorkerLost` is retried, and during startup only the death of a process. An attempt that made no progress is the
last one. A node that left as planned is no failure. Rollout engines and reward workers are replaced without a restart.
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

import yaml

from rlfuse import clock
from rlfuse.cluster import placement
from rlfuse.cluster.remote import is_death
from rlfuse.cluster.watchdog import watching
from rlfuse.config.schema import Config, TrainerConfig
from rlfuse.config.secrets import hidden_text
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
    """A checked configuration and where it runs."""

    config: Config
    folder: Path
    checkpoint: Path | None
    state: dict[str, Any]
    """What that checkpoint holds beside the models; `step` always."""
    started: float
    faults: Counter[str] = field(default_factory=Counter)
    began: float = field(default_factory=clock.now)
    restart: Span | None = None
    """From the loss of a worker to this attempt, if it is not the first."""
    resumed_after: int = 0
    """The step at which this process went on, whatever it lost since."""
    changes: tuple[Change, ...] = ()
    inputs: dict[str, str] = field(default_factory=dict)
    drained: set[int] = field(default_factory=set)
    """Slots that get no work now, in this attempt and those that follow."""
    returning: set[int] = field(default_factory=set)
    """Of these, those that work again once they are as fast as the others."""
    found: dict[Path, int] = field(default_factory=dict)
    without: frozenset[str] = frozenset()
    lock: RunLock = field(default_factory=RunLock)
    """On the folder, from the first attempt's start to the end of the run."""

    @property
    def label(self) -> str:
        return self.state.get("label", EXACT)

    def begin(self, total_steps: int) -> RunLog:
        """Open the run folder's log. NothingToDo if no step is left; RunRefused if another process began it."""
        step, state = self.state["step"], status.read(self.folder)
        if step > total_steps or (step == total_steps and state is not None and state.state == "finished"):
            raise NothingToDo(self.folder, messages.long_enough(self.config, step, total_steps))
        settings = resolved(self.config)
        self._lock_folder()
        name = f"{self.config.trainer.project_name}/{self.config.trainer.experiment_name}"
        status.begin(self.folder, name, self.started, total_steps, self.state.get("label", ""))
        record(self.folder, self.state["step"], self.changes, self.inputs)
        write_atomically(self.folder / "config.yaml", yaml.safe_dump(settings, sort_keys=False))
        log = RunLog(self.config, settings, self.folder, total_steps, self.state["step"], self.faults, self.label,
                     self.lock.check)  # fmt: skip
        if self.restart is not None:
            self.restart.end = clock.now()
            log.journal.recorder.add(self.restart)
        if abandoned := checkpoints.later(self.folder, self.state["step"]):
            names, go = ", ".join(path.name for path in abandoned), "goes" if len(abandoned) == 1 else "go"
            log.say(
                f"{names} in {self.folder} {go} once a checkpoint is whole: the run goes on after step "
                f"{self.state['step']}. Move what you want to keep to another folder."
            )
        return log

    def _lock_folder(self) -> None:
        if self.lock.is_held:
            return self.lock.check()
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.lock.acquire(self.folder):
            raise RunRefused(messages.in_use(self.folder))
        if checkpoints.written(self.folder) != self.found:
            self.lock.release()
            raise RunRefused(
                f"{self.folder}: another process has written checkpoints since this one started. Nothing was touched; "
                "run the command again to go on from the newest."
            )

    def run_until_done(self, work: Coroutine[Any, Any, None], log: RunLog) -> float:
        """Run `work`, then clean up; return seconds since the start. Stopped on a signal."""
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
            ended, is_there = _state(error), (self.folder / status.FILE).exists()
            status.release_reserve(self.folder)
            kept = nullcontext() if error is None else suppress(OSError)  # a full disk; `error` is what matters
            with kept, ExitStack() as ending:  # all of them, the last first, also where a person interrupts one
                ending.callback(log.close, None if isinstance(error, NodeLeft) else error)
                ending.callback(placement.stop, self.folder / "logs" if ended == "failed" and is_there else None)
            if (
                error is not None and is_there and not isinstance(error, WorkerLost)
            ):  # then `run_with_restarts` says how
                print(how_to_resume(self), flush=True)
                if ended == "failed" and "\nlogs: " not in str(error) and (self.folder / "logs").is_dir():
                    print(f"logs: {self.folder / 'logs'}", flush=True)
        return clock.now() - self.began


@contextmanager
def record_final_status(job: Job) -> Iterator[None]:
    """Write the final status and release the lock after all attempts. RunError if the folder was lost."""

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
    """Return the accepted job, ready to begin; raises what `accept` raises."""
    accepted = accept(config)
    if accepted.message:
        print(accepted.message, flush=True)
    state = checkpoints.read_state(accepted.checkpoint) if accepted.checkpoint else {"step": 0}
    started = time.time()
    config = accepted.config
    more = {"resumed_after": state["step"], "changes": accepted.changes, "inputs": accepted.inputs}
    more["found"] = checkpoints.written(config.run_folder)
    more["drained"] = set(config.cluster.drain)
    return Job(config, config.run_folder, accepted.checkpoint, state, started, **more)


def training_steps(trainer: TrainerConfig, steps_per_epoch: int) -> int:
    """Return the run's number of steps: by total_training_steps or total_epochs, whichever ends first."""
    limits = [trainer.total_training_steps, trainer.total_epochs and trainer.total_epochs * steps_per_epoch]
    return min((limit for limit in limits if limit is not None), default=steps_per_epoch)


def start_health_monitor(config: Config, slots: placement.Slots, log: RunLog) -> Monitor | NoHealth:
    """To be closed; nobody, where alerts.slow_worker_s is null."""
    continuity = config.alerts.slow_worker_s
    if continuity is None:
        return NoHealth()
    width = config.rollout.tensor_model_parallel_size
    return Monitor(log.folder, agents(slots), continuity, width, log.loggers.alert, log.say)


def how_to_resume(job: Job) -> str:
    """What the person at the terminal can do next."""
    whole, auto = checkpoints.complete(job.folder), "trainer.resume_mode=auto"
    if not whole:
        return f"No checkpoint was written (trainer.save_freq); what was logged is in {job.folder}"
    if job.config.trainer.resume_mode == "auto":
        return f"The last checkpoint is {whole[-1]}; the same command goes on from there ({auto})"
    named = f"trainer.experiment_name={job.config.trainer.experiment_name}"
    return f"The last checkpoint is {whole[-1]}; the same command with {named} {auto} goes on from there"


def run_with_restarts(config: Config, attempt: Callable[[Job], Path]) -> Path:
    """Return what `attempt` returns, repeated when a worker was lost."""
    try:
        job = open_job(config)
        with record_final_status(job):
            return _recovered(job, attempt)
    except NothingToDo as end:
        print(end, flush=True)
        return end.folder


def _recovered(job: Job, attempt: Callable[[Job], Path]) -> Path:
    reached: list[int | None] = []
    while True:
        try:
            return attempt(job)
        except NodeLeft as left:
            job = next_attempt(job, left)
            print(hidden_text(f"{left}\nThe run goes on {_from(job)} on other nodes; nothing failed."), flush=True)
        except WorkerLost as error:
            rows = read_metrics(job.folder / "metrics.jsonl")
            last = max((row["step"] for row in rows), default=0)
            reached.append(None if error.before_first_step else last)
            if why := no_restart_reason(reached, job.config.cluster.max_restarts):
                print(how_to_resume(job), flush=True)
                raise EngineError(f"{error}\n{why}") from error
            job = next_attempt(job, error)
            count = f"restart {len(reached)} of at most {job.config.cluster.max_restarts}"
            print(hidden_text(f"lost: {error}\nThe run goes on {_from(job)} ({count})."), flush=True)


def _from(job: Job) -> str:
    return f"from {job.checkpoint.name}" if job.checkpoint else "from its beginning"


@contextmanager
def worker_startup(log: RunLog) -> Iterator[None]:
    """The start of workers: one that is late or out of memory here would be so again, one that was killed need not."""
    with timed("all workers", log.say), log.journal.recorder.span("start", cause="run"):
        try:
            yield
        except WorkerLost as error:
            if is_death(error):
                raise
            raise EngineError(str(error)) from error


def no_restart_reason(reached: Sequence[int | None], limit: int) -> str | None:
    """Return why no other attempt is made. `reached`: the last step done at each loss, None before any."""
    made, steps = len(reached) - 1, [step for step in reached if step is not None]
    if made >= limit:
        return f"No restart: {made} of at most cluster.max_restarts={limit} were made."
    if [*reached[-2:]] == [None, None]:
        return "No restart: two starts in a row lost a worker before their first step."
    if reached[-1] is not None and steps[-1] <= max(steps[:-1], default=-1):
        return f"No restart: the last of {made} completed no step that was not completed before it."
    return None


def next_attempt(job: Job, error: WorkerLost) -> Job:
    """The next attempt: from the newest checkpoint that this run wrote, else from where it began."""
    written = [path for path, at in checkpoints.written(job.folder).items() if job.found.get(path) != at]
    checkpoint = written[-1] if written else job.checkpoint
    state = checkpoints.read_state(checkpoint) if checkpoint else {"step": 0}
    left = error.nodes if isinstance(error, NodeLeft) else ()
    restart = Span("hand_over" if left else "restart", "driver", clock.now(), cause=str(error))
    where = {"restart": restart, "without": job.without.union(left)}
    return dataclasses.replace(job, checkpoint=checkpoint, state=state, changes=(), **where)
