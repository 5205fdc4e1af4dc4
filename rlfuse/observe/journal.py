"""The run's memory: what happened becomes events, metrics, tables and checkpoints in the run folder.

Role: the controller tells it what it learned (`note`, `validated`, `failures`), and at the end of a step `finish`
drains every engine's spans, works the scalars out and hands them to the sinks. Waits only for engines to hand over
spans and, in `checkpoint`, to write their state.

    run folder: config.yaml  changes.jsonl (of settings, on resume)  inputs.jsonl (digests of rewards and models)
                metrics.jsonl  samples.jsonl  validation.jsonl  events.jsonl
                reward_failures.jsonl (where rewards failed)
                summary.json  reward_curve.png  timelines/  contact_sheets/ (of clips)  wandb/  tensorboard/
                global_step_N/
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil

from rlfuse.algorithms.corrections import BOUNDS
from rlfuse.cluster.stopping import NAMES, Stopped, Stopping
from rlfuse.config.schema import Config
from rlfuse.config.secrets import hidden, hidden_text
from rlfuse.engines.agreement import Agreement
from rlfuse.errors import EngineError, NotSaved, NotWritten, RewardError
from rlfuse.events import EventLog, Recorder, Span
from rlfuse.fusion.board import Board
from rlfuse.fusion.selection import MISMATCHED, label
from rlfuse.observe import metrics as figures
from rlfuse.observe.alerts import Alert, Alerts, bound_in_steps
from rlfuse.observe.drawing import Drawing
from rlfuse.observe.faults import count_faults, fault_metrics
from rlfuse.observe.idle import account
from rlfuse.observe.own_metrics import HELD_OUT, OwnMetrics
from rlfuse.observe.sheets import light, sheets_of
from rlfuse.observe.sinks import VALIDATION, sinks
from rlfuse.observe.terminal import Terminal
from rlfuse.observe.tracking import StepFile, failure_row, read_metrics, sample_row, write_failures
from rlfuse.progress import timed
from rlfuse.protocols import Recorded
from rlfuse.run_folder import checkpoints
from rlfuse.samples import Sample

DRAWN_S = 60.0
"""For pictures that are not drawn yet when a run ends."""


def due(every: int, step: int, total: int) -> bool:
    """Whether something that happens every so many steps (0: never; negative: at the end) is due."""
    return every != 0 and (step == total or (every > 0 and step % every == 0))


class Journal:
    """Usable from the first line of a run; `attach` gives it the engines once they stand."""

    def __init__(
        self,
        config: Config,
        resolved: dict[str, Any],
        folder: Path,
        total_steps: int,
        start: int,
        faults: Counter[str] | None = None,
    ):
        """`start`: the step it goes on after; `faults`: of the run's earlier attempts, counted on."""
        self.config, self.folder, self.total_steps = config, folder, total_steps
        self.recorder = Recorder("driver")
        self.facts: dict[str, Any] = {}
        self.faults = Counter() if faults is None else faults
        self._own_metrics = OwnMetrics(config, self.say)
        self._accounted = time.time()
        self._engines: Sequence[Recorded] = ()
        self._state: Callable[[], dict[str, Any]] = dict
        self._notes: dict[str, list[float]] = defaultdict(list)
        self._failed: set[tuple[str, str]] = set()  # of the present board, what is written already
        self._events = EventLog(folder / "events.jsonl")
        self._metrics = StepFile(folder / "metrics.jsonl", after=start or -1)
        self._samples = StepFile(folder / "samples.jsonl", after=start)
        self._validation = StepFile(folder / "validation.jsonl", after=start or -1)
        self._sinks = sinks(config, resolved, folder, start > 0)
        rollout = config.rollout
        drawn = (rollout.top_p, rollout.top_k, config.fusion.data, rollout.min_p)
        self._bound = bound_in_steps(config.model.dtype, *drawn)
        self._disagreed = False
        self._alerts = Alerts(config.alerts, rollout.n, self._bound)
        self._alerts.recall(row for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 0)
        self._drawing = Drawing(self.say)
        self.stopping = Stopping(config.trainer.preemption_grace_s, self.say)
        self._saved, self._written = start, start
        """The last step that runs resume from, and the last whose checkpoint is whole."""
        # Last: it draws and has a thread, which nobody would end if another part could not be made.
        self._terminal = Terminal(config, total_steps, start, self.recorder, folder)

    def attach(
        self,
        engines: Sequence[Recorded],
        save: Callable[[Path], Awaitable[None]],
        state: Callable[[int], dict[str, Any]],
        facts: dict[str, Any],
    ) -> None:
        """The engines whose spans to collect, what writes a checkpoint's models, and the rest of its state by step."""
        self._engines, self._save, self._state, self.facts = engines, save, state, facts

    def begin(self, step: int) -> None:
        """The step that is under way from now on: who tells the run to stop has it saved."""
        self.stopping.step = step

    def note(self, values: dict[str, float]) -> None:
        """Scalars of the present step; several of a name are averaged (one per mini-batch)."""
        for name, value in values.items():
            self._notes[name].append(value)

    def say(self, text: str) -> None:
        """A line for the person at the terminal."""
        self._terminal.say(hidden_text(text))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Around what starts: shown while it does, and ticked off with its seconds."""
        with timed(name, self.say), self.recorder.span("start", cause=name):
            yield

    def watch(self, board: Board) -> None:
        """What is being worked on from now on, for those who look on."""
        self._terminal.board = board

    def failures(self, step: int, board: Board) -> None:
        """Show what newly failed to be scored, and keep it; above reward.max_failure_rate the run stops."""
        failed = board.failures()
        rows = hidden([failure_row(s, f) for s, f in failed if (board.purpose, s.id) not in self._failed])
        if not rows:
            return
        self._failed = {(board.purpose, s.id) for s, _ in failed}
        write_failures(self.folder / "reward_failures.jsonl", rows)
        sample, failure = failed[0]
        raised = failure.traceback.endswith(failure.message)  # and need not be said before
        what = f"{failure.function}{'' if raised else f': {failure.message}'}\n{failure.traceback}"
        detail = (
            f"{len(failed)} of {len(board.samples)} samples have no reward and are left out; the first is {sample.id}: "
            f"{what}"
        ).rstrip()
        self._to_sinks("reward_failures", step, rows)
        if len(failed) > self.config.reward.max_failure_rate * len(board.samples):
            raise RewardError(
                f"{detail}\nThat is more than reward.max_failure_rate={self.config.reward.max_failure_rate}, so the "
                "run stops. Mend the function, or raise the rate if these samples may be left out."
            )
        self.say(detail)

    def validated(self, step: int, board: Board) -> None:
        """Results on the held-out prompts: kept for the step's row, or a row of their own before the first step."""
        answers = [sample for group in board.groups for sample in group.samples]
        values = figures.validation_metrics(board.groups) | self._own_metrics.of(answers, HELD_OUT)
        shown = {name: value for name, value in values.items() if name.startswith(("val-core", HELD_OUT))}
        self.say("validation  " + "  ".join(f"{name} {value:.3f}" for name, value in shown.items()))
        if step:
            self.note(values)
        else:
            self._log(0, values)
        rows = [sample_row(sample) for sample in answers[: self.config.trainer.log_val_generations]]
        self._validation.write(step, *rows)
        if rows:
            self._to_sinks("samples", step, rows, VALIDATION)

    def compared(self, step: int, agreement: Agreement) -> None:
        """Engines and trainer scored the same tokens. Raises EngineError if they disagree, unless told to go on."""
        dtype = self.config.model.dtype
        bound = BOUNDS[dtype]
        if not bound.broken_by(agreement.metrics):
            self.say(agreement.text)
            return
        text = (
            f"{agreement.text}. With model.dtype={dtype} at most {bound.most:g} ({bound.mean:g} in the mean) is "
            "rounding: the engines don't compute the model that is trained. rlfuse/engines/FAMILIES.md says which "
            "families agree"
        )
        if self.config.rollout.on_mismatch == "stop":
            raise EngineError(f"{text}; rollout.on_mismatch=alert goes on all the same, and the run is then labelled.")
        self._disagreed = True
        self._call(step, Alert("engine and trainer disagree", text))

    async def checkpoint(self, step: int) -> None:
        """Write one, whole or not at all; it counts once the step is closed, so that no row of it is missing.

        Where that fails for want of room the run goes on and a person is called. NotSaved where no later one can make
        up for it: after the last step, or when told to leave.
        """
        with self.recorder.span("save_checkpoint", step=step, cause="step"):
            try:
                await checkpoints.write(self.folder, step, self._state(step), self._save)
            except NotSaved as error:
                if step == self.total_steps or self.leaving:
                    raise
                self._call(step, Alert("no checkpoint", f"{error} The run goes on, and tries again at the next one."))
            else:
                self._written = step

    def _publish(self) -> None:
        """No row may be lost of a step that runs resume after, so rows are on the disk first."""
        if self._written != self._saved:
            for file in (self._events, self._metrics, self._samples, self._validation):
                file.sync()
            checkpoints.publish(self.folder, self._written, self.config.trainer.max_ckpt_to_keep)
            self._saved = self._written

    @property
    def leaving(self) -> bool:
        """Ctrl-C or SIGTERM has come: the step under way is the last."""
        return self.stopping.asked

    async def leave_if_told(self, step: int, checkpoint: Callable[[int], Awaitable[None]]) -> None:
        """After a step: Stopped if the run was told to, with a `checkpoint` of that step; not after the last one."""
        if not self.leaving or step == self.total_steps:
            return
        if self._saved != step:
            await checkpoint(step)
            self._publish()
        by = self.stopping.by
        raise Stopped(f"{NAMES[by]}: the run left after step {step}, which is saved.", by)

    async def finish(self, step: int, board: Board) -> list[Span]:
        """Close the step: its events to the log, its scalars and samples to the sinks. Returns the events."""
        before = self._events.size
        spans = await self.collect(step)
        events = (self._events.path, before, self._events.size)
        values = self._scalars(step, board, spans)
        self._log(step, values)
        self._terminal.log(step, values)
        self._show(step, board.whole()[: self.config.trainer.log_samples])
        self._publish()
        if due(self.config.trainer.timeline_freq, step, self.total_steps):
            path = self.folder / "timelines" / f"step_{step}.png"
            self.draw(step, "timeline", path, "rlfuse.simulate.picture:draw_step", *events, self.config.fusion.policy)
        self._drawing.tell()
        for alert in self._alerts.check(values):
            self._call(step, alert)
        self._notes.clear()
        return spans

    def _call(self, step: int, alert: Alert) -> None:
        """For a person, at the terminal and wherever the curves are."""
        self.say(f"step {step}: {alert.title}: {alert.text}")
        self._to_sinks("alert", step, alert)

    def _to_sinks(self, call: str, *arguments: Any) -> None:
        """Tell every sink; one that fails (its process ended, its disk is full) is left out from then on."""
        for sink in list(self._sinks):
            try:
                getattr(sink, call)(*arguments)
            except Exception as error:
                self._sinks.remove(sink)
                name = type(sink).__name__
                self.say(f"{name} takes nothing more, the run folder has all: {type(error).__name__}: {error}")

    async def trained(self, step: int, values: dict[str, float]) -> None:
        """Close a step that has no samples: its events and these scalars."""
        spans = await self.collect(step)
        tokens = sum(span.tokens for span in spans if span.kind == "forward")
        values = values | figures.time_metrics(spans, {"step": tokens}, self.config.slots)
        values |= figures.memory_metrics(spans) | fault_metrics(self.faults)
        self._log(step, values)
        self._publish()
        if step:
            self._terminal.log(step, values)
        self._drawing.tell()
        for alert in self._alerts.check(values):
            self._call(step, alert)

    def _show(self, step: int, samples: Sequence[Sample]) -> None:
        """Keep these samples, and tell the sinks of them: with the contact sheets of those that saw a clip."""
        sheets = sheets_of(samples, self.config.video.log_clips)
        rows = [sample_row(sample, sheets.get(sample.id)) for sample in samples]
        self._samples.write(step, *rows)

        def tell() -> None:
            drawn = {name for name in sheets.values() if (self.folder / name).exists()}
            shown = [row | {"contact_sheet": name if (name := row["contact_sheet"]) in drawn else None} for row in rows]
            if shown:
                self._to_sinks("samples", step, shown)

        if not sheets:
            return tell()
        those, limit = [light(s) for s in samples if s.id in sheets], self.config.video.decode_timeout_s
        arguments = (self.folder, step, those, sheets, limit)
        self._drawing.ask(f"contact sheets of step {step}", tell, "rlfuse.observe.sheets:draw_sheets", *arguments)

    def draw(self, step: int, name: str, path: Path, target: str, *arguments: Any) -> None:
        """Have `target` ("module:function") draw `path` from the arguments; the sinks are told once it is there."""

        def tell() -> None:
            if path.exists():
                self._to_sinks("picture", step, name, path)

        self._drawing.ask(str(path), tell, target, path, *arguments)

    def _log(self, step: int, values: dict[str, float]) -> None:
        self._metrics.write(step, values)
        self._to_sinks("log", step, values)

    async def collect(self, step: int) -> list[Span]:
        """All spans since the last call, of every process, written to the log."""
        spans = self.recorder.drain()
        for drained in await asyncio.gather(*(engine.drain() for engine in self._engines)):
            spans += drained
        for span in spans:
            span.step = step if span.step < 0 else span.step
        self.faults.update(count_faults(spans))
        self._events.write(sorted(spans, key=lambda span: span.start))
        return spans

    def _scalars(self, step: int, board: Board, spans: Sequence[Span]) -> dict[str, float]:
        data, slots, kept = self.config.data, self.config.slots, board.kept()
        width = self.config.rollout.tensor_model_parallel_size
        values: dict[str, float] = {
            "training/global_step": step,
            "training/epoch": self._state(step)["prompts"]["epoch"],
        }
        if kept:
            values |= figures.sample_metrics(
                kept, self.config.rollout.n, data.max_prompt_length, data.max_response_length, slots
            )
        whole = board.whole()
        responses = sum(len(sample.response.token_ids) for sample in whole)
        tokens = dict.fromkeys(figures.TIMED, sum(sample.tokens for sample in whole))
        # Steps between the weights that wrote a sample and those that learn from it: 0 is on-policy.
        values["fusion/staleness"] = max(step - 1 - s.response.weight_version for s in whole)
        values["response/aborted_ratio"] = 1 - len(whole) / len(board.samples)
        if self.config.algorithm.filter_groups.max_num_gen_batches:
            values["train/num_gen_batches"] = board.batches
        values |= self._own_metrics.of(whole)
        values |= figures.failure_metrics(board.failures()) | figures.latency_metrics(spans)
        values["reward/failure_rate"] = len(board.failures()) / len(board.samples)
        values |= figures.time_metrics(spans, tokens | {"gen": responses}, slots)
        values |= figures.fusion_metrics(spans, slots // width, width) | figures.memory_metrics(spans)
        values |= self._account(spans)
        values |= figures.repetition(spans, board.samples)
        values |= figures.utilisation(spans, self.facts, slots, tokens["step"], self.config.actor.ppo_epochs)
        if any(sample.prompt.video is not None for sample in whole):
            values |= figures.video_metrics(spans)
        values["perf/cpu_memory_used_gb"] = psutil.virtual_memory().used / 2**30
        values |= fault_metrics(self.faults) | {name: sum(v) / len(v) for name, v in self._notes.items()}
        return values | {f"fusion/{self.label(values)}": 1.0}

    def label(self, values: Mapping[str, float]) -> str:
        """What fusion changes; `MISMATCHED` where this step, or the first weights, show engines with another model."""
        if self._disagreed or self._bound.broken_by(values):
            return MISMATCHED
        return label(self.config.fusion.data, self.config.fusion.tail_speculation)

    def _account(self, spans: Sequence[Span]) -> dict[str, float]:
        """busy/* and idle/* since the last row: start-up, validation and checkpoints are in the row that follows."""
        start, self._accounted = self._accounted, time.time()
        width = self.config.rollout.tensor_model_parallel_size
        return account(spans, start, self._accounted, self.config.slots, width).metrics()

    def close(self, error: BaseException | None = None) -> None:
        """Close every file and sink; an error is told to each sink before."""
        left = self.recorder.drain()
        self.faults.update(count_faults(left))
        with ExitStack() as closing:  # all of them, whichever fails
            for sink in self._sinks:
                closing.callback(sink.close, exit_code=int(error is not None))
            for file in (self._terminal, self._samples, self._validation, self._metrics, self._events):
                if file is not None:
                    closing.callback(file.close)
            closing.callback(self._drawing.close, DRAWN_S)
            with suppress(NotWritten) if error is not None else nullcontext():  # it may be what the error is about
                self._events.write(left)
            if error is not None:
                self._to_sinks("failure", "run", hidden_text(f"{type(error).__name__}: {error}"))
