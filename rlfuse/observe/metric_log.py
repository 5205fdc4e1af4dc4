"""Write the scalars of each step to `metrics.jsonl`, the terminal and the sinks, and check alerts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from rlfuse import clock
from rlfuse.algorithms.corrections import mismatch_bound
from rlfuse.config.schema import Config
from rlfuse.errors import EngineError
from rlfuse.events import Span
from rlfuse.fusion.board import Board
from rlfuse.fusion.selection import CARRY_OVER, EXACT, MISMATCHED, choice, label, labels_in, weakest
from rlfuse.observe import metrics as figures
from rlfuse.observe.alerts import Alert, Alerts, bound_in_steps
from rlfuse.observe.custom_metrics import HELD_OUT, CustomMetrics
from rlfuse.observe.drawing import Drawing
from rlfuse.observe.idle import account
from rlfuse.observe.journal import Journal, fault_metrics
from rlfuse.observe.loggers import Loggers
from rlfuse.observe.sample_log import SampleLog
from rlfuse.observe.tracking import StepFile, last_validation, read_metrics
from rlfuse.progress import is_due
from rlfuse.samples import Group, Sample
from rlfuse.step.agreement import Agreement


class MetricLog:
    """Scalars of a run that continues after the step `start`."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        total_steps: int,
        start: int,
        journal: Journal,
        samples: SampleLog,
        loggers: Loggers,
        drawing: Drawing,
        custom_metrics: CustomMetrics,
        label: str = EXACT,
    ):
        self.config, self.folder, self.total_steps = config, folder, total_steps
        self.journal, self.samples, self.loggers, self.drawing = journal, samples, loggers, drawing
        self._custom_metrics = custom_metrics
        self.facts: Mapping[str, Any] = {}
        self.epoch: Callable[[], int] = lambda: 0
        self._accounted = journal.began  # so that no time between steps is left out
        self._notes: dict[str, list[float]] = defaultdict(list)
        self._file = StepFile(folder / "metrics.jsonl", after=start or -1)
        rollout = config.rollout
        drawn = (rollout.top_p, rollout.top_k, config.fusion.data, rollout.min_p, rollout.quantization)
        self._bound = bound_in_steps(config.model.dtype, *drawn, config.algorithm.old_log_probs)
        self._disagreed = False
        self._alerts = Alerts(config.alerts, rollout.n, self._bound, config.actor.grad_clip)
        self._label, self._parts, self._validated = label, dict[str, None](), list[str]()
        self._recall(read_metrics(folder / "metrics.jsonl"))

    def _recall(self, rows: Sequence[Mapping[str, float]]) -> None:
        self._alerts.restore(row for row in rows if row["step"] > 0)
        for row in rows:
            self._continue(row)

    def add(self, values: Mapping[str, float]) -> None:
        """Add scalars to the current step. Several values of a name, for example one per mini-batch, are averaged."""
        for name, value in values.items():
            self._notes[name].append(value)

    def watch(self, board: Board) -> None:
        self.loggers.terminal.board = board

    def log_step(self, step: int, board: Board, spans: Sequence[Span]) -> None:
        self._log(step, self._scalars(step, board, spans))
        self.samples.log_step(step, board.needed_samples())
        if is_due(self.config.trainer.timeline_freq, step, self.total_steps):
            path = self.folder / "timelines" / f"step_{step}.png"
            events = (self.journal.path, *self.journal.last_step)
            caption = choice(asdict(self.config.fusion))
            self.draw(step, "timeline", path, "rlfuse.observe.step_picture:draw_step", *events, caption)
        self._notes.clear()

    def log(self, step: int, values: Mapping[str, float], spans: Sequence[Span]) -> None:
        tokens = sum(span.tokens for span in spans if span.kind == "forward")
        found = figures.time_metrics(spans, {"step": tokens}, self.config.slots) | figures.memory_metrics(spans)
        self._log(step, {**values, **found, **fault_metrics(self.journal.faults)})

    def log_validation(self, step: int, board: Board) -> None:
        """Log results of a validation, as part of the row of the step, or as row 0 before the first step."""
        answers = _samples(board.groups)
        values = figures.validation_metrics(board.groups, self._validated)
        values |= self._custom_metrics.of(answers, HELD_OUT)
        main = [name for name in values if name.startswith(("val-core", HELD_OUT))]
        self.loggers.say("validation  " + "  ".join(_with_coverage(name, values) for name in main))
        if step:
            self.add(values)
        else:
            self._write(0, values)
        self.samples.log_validation(step, answers)

    def _continue(self, values: Mapping[str, float]) -> None:
        """Update what depends on logged rows: the weakest label, reward parts, names of the last validation."""
        self._label = weakest([self._label, *labels_in(values)])
        self._parts |= dict.fromkeys(figures.logged_parts(values, "rewards/", "/mean"))
        self._validated = last_validation([values]) or self._validated

    def log_agreement(self, step: int, agreement: Agreement) -> None:
        """Report how far engines and trainer agree. Raises EngineError if they do not and on_mismatch is `stop`."""
        dtype, small = self.config.model.dtype, self.config.rollout.quantization
        bound = mismatch_bound(dtype, small)
        if not bound.is_exceeded_by(agreement.metrics):
            self.loggers.say(agreement.text)
            return
        made = f"model.dtype={dtype}" + (f" and rollout.quantization={small}" if small else "")
        text = (
            f"{agreement.text}. With {made}, rounding explains at most {bound.most:g} (mean {bound.mean:g}), so the "
            "engines do not compute the trained model. rlfuse/engines/FAMILIES.md lists the families that agree"
        )
        if self.config.rollout.on_mismatch == "stop":
            raise EngineError(f"{text}; to continue anyway with a labelled run, set rollout.on_mismatch=alert.")
        self._disagreed = True
        self.loggers.alert(step, Alert("engine and trainer disagree", text))

    def draw(self, step: int, name: str, path: Path, target: str, *arguments: Any) -> None:
        """Queue `target` ("module:function") to draw `path` from the arguments, and log the picture when it exists."""

        def log_picture() -> None:
            if path.exists():
                self.loggers.for_each_sink(lambda sink: sink.picture(step, name, path))

        self.drawing.submit(str(path), log_picture, target, path, *arguments)

    def label_so_far(self) -> str:
        return weakest([self._label, self.label(self._noted())])

    def _noted(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in self._notes.items()}

    def label(self, values: Mapping[str, float]) -> str:
        """Return the fusion label; `MISMATCHED` if engines and trainer disagree now or at startup."""
        if self._disagreed or self._bound.is_exceeded_by(values):
            return MISMATCHED
        rollout = self.config.rollout
        return label(self.config.fusion.data, rollout.quantization, rollout.draft)

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        self._write(step, values)
        if step:
            self.loggers.terminal.log(step, values)
        self.drawing.report_finished()
        for alert in self._alerts.check(values):
            self.loggers.alert(step, alert)

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        self._file.write(step, dict(values))
        self._continue(values)
        self.loggers.log(step, values)

    def _scalars(self, step: int, board: Board, spans: Sequence[Span]) -> dict[str, float]:
        data, slots, trained = self.config.data, self.config.slots, board.groups_to_train()
        width = self.config.rollout.tensor_model_parallel_size
        values: dict[str, float] = {"training/global_step": step, "training/epoch": self.epoch()}
        whole = board.needed_samples()
        carried = {id(group) for group in board.unneeded_groups()[0]} if self.config.fusion.data in CARRY_OVER else ()
        groups = [group for group in board.groups if id(group) not in carried]  # whether trained on or not
        values |= figures.sample_metrics(
            groups,
            trained,
            self.config.rollout.n,
            data.max_prompt_length,
            data.max_response_length,
            slots,
            partials=board.partials,
            logged=self._parts,
        )
        # Steps between the weights that generated a sample and those that are updated: 0 is on-policy.
        values["fusion/staleness"] = max(step - 1 - s.response.weight_version for s in whole)
        if self.config.algorithm.filter_groups.enable:
            values["train/num_gen_batches"] = board.batches
        generated = _samples(groups)
        has_rewards = "reward" in board.kinds
        scored = [s for s in generated if s.reward is not None or (s.response is not None and not has_rewards)]
        values |= self._custom_metrics.of(scored)
        values |= figures.failure_metrics(board.failures()) | figures.latency_metrics(spans)
        if has_rewards:
            of_all = sum(sample.reward is not None for sample in board.samples.values())  # of baselines, too
            values["reward/failure_rate"] = len(board.failures()) / of_all
        values |= figures.time_metrics(spans, figures.tokens_of(whole, generated, _samples(trained)), slots)
        values |= figures.fusion_metrics(spans, slots // width, width) | figures.memory_metrics(spans)
        values |= figures.garbage_metrics(spans)
        values |= self._account(spans)
        values |= figures.repetition(spans, board.samples) | figures.balance_metrics(spans)
        values |= figures.utilisation(spans, self.facts, board.samples, bool(self.config.rollout.quantization))
        if any(sample.prompt.visual for sample in whole):
            values |= figures.video_metrics(spans)
        values["perf/cpu_memory_used_gb"] = psutil.virtual_memory().used / 2**30
        values |= fault_metrics(self.journal.faults) | self._noted()
        return values | {f"fusion/{self.label(values)}": 1.0}

    def _account(self, spans: Sequence[Span]) -> dict[str, float]:
        start, self._accounted = self._accounted, clock.now()
        width = self.config.rollout.tensor_model_parallel_size
        return account(spans, start, self._accounted, self.config.slots, width).metrics()


def _samples(groups: Iterable[Group]) -> list[Sample]:
    return [sample for group in groups for sample in group.samples]


def _with_coverage(name: str, values: Mapping[str, float]) -> str:
    share = values.get(name.replace("val-core", "val-aux", 1).replace("/mean@", "/coverage@"), 1.0)
    return f"{name} {values[name]:.3f}" + (f" (coverage {share:.1%})" if share < 1 else "")
