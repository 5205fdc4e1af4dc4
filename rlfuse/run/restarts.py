"""Restart a run from its last checkpoint after losing a worker that the step needs.

Only `WorkerLost` is retried, and during startup only the death of a process. An attempt that made no progress is the
last one. A node that left as planned is no failure. Rollout engines and reward workers are replaced without a restart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlfuse import clock
from rlfuse.cluster.remote import is_death
from rlfuse.config.schema import Config
from rlfuse.config.secrets import hidden_text
from rlfuse.errors import EngineError, NodeLeft, WorkerLost
from rlfuse.events import Span
from rlfuse.observe.run_log import RunLog
from rlfuse.observe.tracking import read_metrics
from rlfuse.progress import timed
from rlfuse.run.acceptance import NothingToDo
from rlfuse.run.job import Job, how_to_resume, noting_the_end, open_job
from rlfuse.run_folder import checkpoints


def recovered(config: Config, attempt: Callable[[Job], Path]) -> Path:
    """Return what `attempt` returns, repeated when a worker was lost."""
    try:
        job = open_job(config)
        with noting_the_end(job):
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
            job = again(job, left)
            print(hidden_text(f"{left}\nThe run goes on {_from(job)} on other nodes; nothing failed."), flush=True)
        except WorkerLost as error:
            rows = read_metrics(job.folder / "metrics.jsonl")
            last = max((row["step"] for row in rows), default=0)
            reached.append(None if error.before_first_step else last)
            if why := futile(reached, job.config.cluster.max_restarts):
                print(how_to_resume(job), flush=True)
                raise EngineError(f"{error}\n{why}") from error
            job = again(job, error)
            count = f"restart {len(reached)} of at most {job.config.cluster.max_restarts}"
            print(hidden_text(f"lost: {error}\nThe run goes on {_from(job)} ({count})."), flush=True)


def _from(job: Job) -> str:
    return f"from {job.checkpoint.name}" if job.checkpoint else "from its beginning"


@contextmanager
def starting(log: RunLog) -> Iterator[None]:
    """The start of workers: one that is late or out of memory here would be so again, one that was killed need not."""
    with timed("all workers", log.say), log.journal.recorder.span("start", cause="run"):
        try:
            yield
        except WorkerLost as error:
            if is_death(error):
                raise
            raise EngineError(str(error)) from error


def futile(reached: Sequence[int | None], limit: int) -> str | None:
    """Return why no other attempt is made. `reached`: the last step done at each loss, None before any."""
    made, steps = len(reached) - 1, [step for step in reached if step is not None]
    if made >= limit:
        return f"No restart: {made} of at most cluster.max_restarts={limit} were made."
    if [*reached[-2:]] == [None, None]:
        return "No restart: two starts in a row lost a worker before their first step."
    if reached[-1] is not None and steps[-1] <= max(steps[:-1], default=-1):
        return f"No restart: the last of {made} completed no step that was not completed before it."
    return None


def again(job: Job, error: WorkerLost) -> Job:
    """The next attempt: from the newest checkpoint that this run wrote, else from where it began."""
    written = [path for path, at in checkpoints.written(job.folder).items() if job.found.get(path) != at]
    checkpoint = written[-1] if written else job.checkpoint
    state = checkpoints.read_state(checkpoint) if checkpoint else {"step": 0}
    left = error.nodes if isinstance(error, NodeLeft) else ()
    restart = Span("hand_over" if left else "restart", "driver", clock.now(), cause=str(error))
    where = {"restart": restart, "without": job.without.union(left)}
    return dataclasses.replace(job, checkpoint=checkpoint, state=state, changes=(), **where)
