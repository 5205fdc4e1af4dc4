"""Generation with earlier responses as drafts, next to generation without, on the same engines, weights and samples.

    python tests/benchmarks/history_drafts.py [--layers 2 --width 128] [--repeats 3] [--out FILE] [key=value ...]

A quickstart of two epochs with rollout.draft=history. Before each step of the second epoch its samples are generated
without drafts, with the responses of the first epoch, and with their own, as after a crash; every four steps the
held-out prompts are answered without drafts, with the responses of four steps before, as `rlfuse eval` does with
neighbouring checkpoints, and with their own. A response's own tokens are the best possible drafts, so these rows are
limits of the others. Orders alternate; medians are reported. CPU time is that of all processes, which varies less on a
busy machine. Tokens must be identical. Another `--layers` or `--width` trains a starting policy of that size first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import psutil

from rlfuse.config import sampling
from rlfuse.config.compose import load
from rlfuse.fusion.board import Board
from rlfuse.fusion.policies import stream
from rlfuse.protocols import Sampling
from rlfuse.run.build import run
from rlfuse.run_folder.response_store import StoredResponse
from rlfuse.samples import Group
from rlfuse.step.controller import Controller
from rlfuse.step.drafts import attach
from rlfuse.step.executor import Executor, StepContext

JOB = (
    "experiment=quickstart",
    "rollout.draft=history",
    "rollout.val_kwargs={n: 4, temperature: 0.7}",
    "trainer.val_before_train=false",
    "trainer.test_freq=0",
    "trainer.save_freq=0",
    "trainer.logger=[]",
)
STEPS_BETWEEN = 4
"""Steps between consecutive checkpoints."""
EPOCH, REPEATED = "second epoch", "repeated step"
NEIGHBOURS, SAME = f"eval of a checkpoint {STEPS_BETWEEN} steps later", "eval of the same checkpoint"


@dataclass
class Measured:
    """Pairs of generations of the same samples: (without, with drafts)."""

    seconds: list[tuple[float, float]] = field(default_factory=list)
    cpu_seconds: list[tuple[float, float]] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)
    """Mean over engines."""
    tokens: int = 0
    accepted: int = 0
    drafted: int = 0
    identical: int = 0
    responses: int = 0


def ratios(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Return the gains in ascending order."""
    return sorted(plain / drafted for plain, drafted in pairs)


class Benchmark:
    """Steps run on the job's controller, and their measurements."""

    def __init__(self, repeats: int):
        self.repeats, self.found = repeats, defaultdict[str, Measured](Measured)
        self._neighbour = Responses()

    async def drive(self, controller: Controller, _: int) -> None:
        """Train two epochs, and measure between steps."""
        await controller.update_weights(0)
        config, source = controller.config, controller.groups.prompts
        for step in range(1, controller.total_steps + 1):
            if source.epoch:
                groups = controller.groups.training_groups(source.upcoming(), step)
                drawn = sampling.training(config)
                first = await self._measure(controller, EPOCH, step, groups, drawn)
                await self._measure(controller, REPEATED, step, with_drafts(groups, first), drawn)
            await controller.learn(step)
            await controller.update_weights(step)
            if step % STEPS_BETWEEN == 0:
                groups = with_drafts(await controller.groups.validation_groups(step), self._neighbour)
                drawn = sampling.validation(config)
                found = await self._measure(controller, NEIGHBOURS, step, groups, drawn, counts=bool(self._neighbour))
                if self._neighbour:
                    await self._measure(controller, SAME, step, with_drafts(groups, found), drawn)
                self._neighbour = found
            print(f"step {step} of {controller.total_steps}", flush=True)

    async def _measure(
        self,
        controller: Controller,
        name: str,
        step: int,
        groups: Sequence[Group],
        drawn: Sampling,
        counts: bool = True,
    ) -> Responses:
        """Generate alternately; return the responses."""
        responses = Responses()
        for repeat in range(self.repeats if counts else 1):
            costs = {}
            for drafts in (False, True) if (repeat + step) % 2 else (True, False):
                fresh = without_responses(groups, drafts)
                await controller.journal.collect(step)
                used = cpu_seconds()
                seconds = await generate(controller, fresh, step, drawn)
                used = cpu_seconds() - used
                spans = [span for span in await controller.journal.collect(step) if span.kind == "decode"]
                engines = len({span.where for span in spans})
                costs[drafts] = seconds, used, sum(span.attributes["steps"] for span in spans) / engines
                found = Responses({s.draft_key: s.response.token_ids for group in fresh for s in group.generated})
                if drafts and counts:
                    measured = self.found[name]
                    measured.accepted += sum(span.attributes.get("accepted", 0) for span in spans)
                    measured.drafted += sum(span.attributes.get("drafted", 0) for span in spans)
                    measured.tokens += sum(map(len, found.values()))
                for each, tokens in found.items():
                    if each in responses and counts:
                        self.found[name].identical += np.array_equal(responses[each], tokens)
                        self.found[name].responses += 1
                responses |= found
            if counts:
                measured = self.found[name]
                for pairs, pair in zip(
                    (measured.seconds, measured.cpu_seconds, measured.steps),
                    zip(costs[False], costs[True], strict=True),
                    strict=True,
                ):
                    pairs.append(pair)
        return responses

    def table(self) -> str:
        """Return a table of medians, and of the range of the gain."""
        head = ("", "without", "with drafts", "faster", "range", "CPU time", "engine steps", "accepted of drafts",
                "of tokens", "identical")  # fmt: skip
        lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        for name, each in self.found.items():
            plain, drafted = (statistics.median(times) for times in zip(*each.seconds, strict=True))
            steps = " / ".join(f"{statistics.mean(counts):.0f}" for counts in zip(*each.steps, strict=True))
            gains, cpu_gain = ratios(each.seconds), statistics.median(ratios(each.cpu_seconds))
            lines.append(
                f"| {name} | {plain:.2f} s | {drafted:.2f} s | {statistics.median(gains):.2f}x | {gains[0]:.2f} to "
                f"{gains[-1]:.2f} | {cpu_gain:.2f}x | {steps} | {each.accepted / max(1, each.drafted):.0%} | "
                f"{each.accepted / each.tokens:.0%} | {each.identical:,} of {each.responses:,} responses |"
            )
        return "\n".join(lines)


class Responses(dict[int, np.ndarray]):
    """Responses by `Sample.draft_key`."""

    def find(self, key: int) -> StoredResponse | None:
        return StoredResponse(0, self[key]) if key in self else None


def without_responses(groups: Sequence[Group], keep_drafts: bool) -> list[Group]:
    """Return copies of the groups without responses."""
    return [
        replace(
            group,
            samples=[
                replace(s, drafts=s.drafts if keep_drafts else (), response=None, tensors={}) for s in group.samples
            ],
        )
        for group in groups
    ]


def with_drafts(groups: Sequence[Group], responses: Responses) -> list[Group]:
    """Return copies of the groups whose drafts are these responses."""
    copies = without_responses(groups, keep_drafts=False)
    attach(responses, copies)
    return copies


def cpu_seconds() -> float:
    """Return the CPU time of this process and all its descendants."""
    total, driver = 0.0, psutil.Process()
    for process in (driver, *driver.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


async def generate(controller: Controller, groups: Sequence[Group], step: int, drawn: Sampling) -> float:
    """Generate as an evaluation does; return the seconds."""
    board = Board(groups, await controller.draining.slot_table(), (), purpose="testing", now=time.monotonic())
    context = StepContext(step=step, sampling=drawn)
    began = time.perf_counter()
    await Executor(board, controller.engines, stream, context, controller.journal.recorder).run()
    return time.perf_counter() - began


def starting_policy(folder: Path, layers: int, width: int) -> Path:
    """Train a starting policy of this size; return its folder."""
    from rlfuse.tasks.settings import WarmStart
    from rlfuse.tasks.warm_start import warm_start

    warm_start(folder, WarmStart(hidden_size=width, layers=layers, intermediate_size=3 * width, steps=300))
    return folder


def main() -> None:
    """Run the job; print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("runs/history_drafts.json"))
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    subprocess.run([sys.executable, "-m", "rlfuse.cli", "prepare", "quickstart"], check=True)
    benchmark, folder = Benchmark(arguments.repeats), Path(tempfile.mkdtemp())
    overrides = [*JOB, f"trainer.default_local_dir={folder}", "trainer.experiment_name=benchmark"]
    try:
        if (arguments.layers, arguments.width) != (2, 128):
            overrides.append(f"model.path={starting_policy(folder / 'model', arguments.layers, arguments.width)}")
        run(load(overrides + arguments.overrides), benchmark.drive)
    finally:
        shutil.rmtree(folder)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({name: vars(each) for name, each in benchmark.found.items()}, indent=1))
    print(benchmark.table())


if __name__ == "__main__":
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    main()
