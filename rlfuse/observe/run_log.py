"""All logs of a run, opened, synced and closed together.

run folder: config.yaml  changes.jsonl (of settings, on resume)  inputs.jsonl (digests of rewards and models)
            events.jsonl (Journal)  metrics.jsonl (MetricLog)  samples.jsonl  validation.jsonl (SampleLog)
            reward_failures.jsonl (FailureBudget, where rewards failed)  drafts.bin (ResponseStore)
            summary.json  reward_curve.png or learning_curve.png  timelines/  contact_sheets/ (of clips)
            wandb/  tensorboard/  global_step_N/
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from rlfuse.config.schema import Config
from rlfuse.errors import NotWritten
from rlfuse.fusion.selection import EXACT
from rlfuse.observe.custom_metrics import CustomMetrics
from rlfuse.observe.drawing import Drawing
from rlfuse.observe.failures import FailureBudget
from rlfuse.observe.journal import Journal
from rlfuse.observe.loggers import Loggers
from rlfuse.observe.metric_log import MetricLog
from rlfuse.observe.sample_log import SampleLog
from rlfuse.progress import timed
from rlfuse.protocols import Recorded
from rlfuse.run_folder import response_store
from rlfuse.run_folder.response_store import ResponseStore
from rlfuse.stopping import Stopping

DRAWN_S = 60.0


class RunLog:
    """Logs of a run that continues after the step `start`; `attach` adds the engines once they exist."""

    def __init__(
        self,
        config: Config,
        resolved: dict[str, Any],
        folder: Path,
        total_steps: int,
        start: int,
        faults: Counter[str] | None = None,
        label: str = EXACT,
        check_folder: Callable[[], None] = lambda: None,
    ):
        """Open the logs. `resolved`: configuration to log; `faults`, `label`: of earlier attempts and steps."""
        custom_metrics = CustomMetrics(config, self.say)  # first, so that a file that can't be executed removes no rows
        self.folder, self.total_steps = folder, total_steps
        faults = Counter() if faults is None else faults
        self.journal = Journal(folder, faults, config.trainer.gc_freq, check_folder)
        self.loggers = Loggers(config, resolved, folder, total_steps, start, self.journal.recorder)
        try:
            self._make_parts(config, start, custom_metrics, label)
        except BaseException as error:  # damaged file, full disk: stop the threads and processes
            self.loggers.close(error)
            raise

    def _make_parts(self, config: Config, start: int, custom_metrics: CustomMetrics, label: str) -> None:
        folder, total_steps = self.folder, self.total_steps
        self.drawing = Drawing(self.say)
        self.samples = SampleLog(config, folder, start, self.loggers, self.drawing, total_steps)
        self.metrics = MetricLog(
            config,
            folder,
            total_steps,
            start,
            journal=self.journal,
            samples=self.samples,
            loggers=self.loggers,
            drawing=self.drawing,
            custom_metrics=custom_metrics,
            label=label,
        )
        self.failures = FailureBudget(
            config.reward.max_failure_rate, folder, self.loggers, config.trainer.log_samples_freq
        )
        self.responses = _responses(config, folder, self.say)
        self.stopping = Stopping(config.trainer.preemption_grace_s, self.say)

    def attach(self, engines: Sequence[Recorded], facts: Mapping[str, Any], epoch: Callable[[], int]) -> None:
        """Add the engines whose spans are collected, facts about them, and the epoch counter."""
        self.metrics.facts, self.metrics.epoch = facts, epoch
        self.journal.attach(engines)

    def say(self, text: str) -> None:
        self.loggers.say(text)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        with timed(name, self.say), self.journal.recorder.span("start", cause=name):
            yield

    def sync(self) -> None:
        for part in (self.journal, self.metrics, self.samples):
            part.sync()

    def close(self, error: BaseException | None = None) -> None:
        """Close all parts even if one fails, and log the error that ended the run."""
        with ExitStack() as closing:  # in reverse order
            closing.callback(self.loggers.close, error)
            for part in (self.samples, self.metrics, *filter(None, [self.responses])):
                closing.callback(part.close)
            closing.callback(self.drawing.close, DRAWN_S)
            with suppress(NotWritten) if error is not None else nullcontext():  # the error may be the same one
                self.journal.close()


def _responses(config: Config, folder: Path, say: Callable[[str], None]) -> ResponseStore | None:
    """Return the store of responses that serve as drafts; None if the run stores none."""
    limit = config.rollout.draft_store_mb * response_store.MIB
    return None if config.trainer.is_offline or not limit else ResponseStore(folder / response_store.FILE, limit, say)
