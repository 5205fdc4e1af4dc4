"""Fixed costs of a step: CPU time by process, the driver's by module, Ray calls by method.

    python tests/benchmarks/fixed_costs.py [--steps 6] [key=value ...]

The quickstart without validation and checkpoints, with learning rates of 0, so that all steps do the same work. Steps
without the profiler give CPU seconds and calls; the same number of later steps with it gives the profile of the
driver's thread. The first steps (warm-up, tuning of thresholds) are not counted. CPU seconds and counts are meaningful
on a busy machine, too; wall seconds are not.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray.actor

from rlfuse.config.compose import load
from rlfuse.engines.rollout.rollout_handle import RolloutHandle
from rlfuse.run.build import run
from rlfuse.step.controller import Controller

WARM_UP = 3
JOB = (
    "experiment=quickstart",
    "actor.optim.lr=0",
    "critic.optim.lr=0",
    "trainer.val_before_train=false",
    "trainer.test_freq=1000",
    "trainer.save_freq=0",
)
ROLES = ("RolloutWorker", "EngineCore", "TrainerRank", "RewardWorker", "raylet", "gcs_server")
"""Searched in this order in a process's title and command line."""
PARTS = {
    "Ray": r"/ray/|method 'ray\.|_raylet",
    "event loop": r"/asyncio/|/selectors\.py|select\.epoll|/concurrent/futures|_asyncio|/threading\.py|lock",
    "serialisation": r"pickle|msgpack|/json/|_json",
    "policy and board": r"/rlfuse/fusion/",
    "simulated steps": r"/rlfuse/simulate/",
    "engines' handles": r"/rlfuse/(engines|cluster)/",
    "rewards": r"/rlfuse/rewards/",
    "advantages": r"/rlfuse/algorithms/|/torch/|built-in method torch|of 'torch",
    "metrics and logs": r"/rlfuse/(observe|run_folder|events)|/wandb/|posix\.|_io\.",
    "the step itself": r"/rlfuse/",
}
"""Parts of the driver's thread: the first pattern that a function's file or built-in name matches."""


def role_of(process: psutil.Process) -> str:
    """Return the role of a process."""
    title = " ".join(process.cmdline()) or process.name()
    return next((role for role in ROLES if role in title), "others")


@dataclass
class Used:
    """CPU seconds by process, calls by method, and a timestamp."""

    cpu: Mapping[str, float] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    at: float = 0.0

    def since(self, before: Used) -> Used:
        cpu = {role: seconds - before.cpu.get(role, 0.0) for role, seconds in self.cpu.items()}
        return Used(cpu, self.calls - before.calls, self.at - before.at)


class Meter:
    """Measures at the start of each step; `each`: usage of steps without the profiler.

    `tunings`: CPU seconds of tuning after each step, some of which search policy settings.
    """

    def __init__(self, steps: int):
        self.steps, self.each, self.tunings = steps, list[Used](), list[float]()
        self.profile, self.calls = cProfile.Profile(), Counter[str]()
        self._last = Used()

    async def drive(self, controller: Controller, _: int) -> None:
        """Run all steps as `Controller.run` does."""
        draw, send, following = controller.groups.draw, ray.actor.ActorMethod._remote, RolloutHandle._next
        relearn = controller.tuning.relearn

        def learned(*arguments: Any) -> None:
            began = time.process_time()  # simulations run in a thread
            relearn(*arguments)
            self.tunings.append(time.process_time() - began)

        async def counted_next(handle: RolloutHandle, *arguments: Any) -> Any:
            found = await following(handle, *arguments)
            self.calls["RolloutWorker.generate, messages"] += 1
            return found

        def counted(method: Any, *arguments: Any, **options: Any) -> Any:
            actor = method._actor._ray_actor_creation_function_descriptor.class_name
            self.calls[f"{actor}.{method._method_name}"] += 1
            return send(method, *arguments, **options)

        async def drawn(step: int) -> Any:
            self.look(step)
            return await draw(step)

        controller.tuning.relearn = learned
        controller.groups.draw, ray.actor.ActorMethod._remote, RolloutHandle._next = drawn, counted, counted_next
        try:
            await controller.update_weights(0)
            await controller.train(0)
        finally:
            ray.actor.ActorMethod._remote, RolloutHandle._next = send, following
            self.profile.disable()

    def look(self, step: int) -> None:
        """Measure at the start of a step."""
        now, number = self._used(), step - 1 - WARM_UP
        if 1 <= number <= self.steps:
            self.each.append(now.since(self._last))
        if number == self.steps:
            self.profile.enable()
        self._last = self._used()

    def _used(self) -> Used:
        cpu: defaultdict[str, float] = defaultdict(float)
        cpu["driver"], cpu["driver, its thread"] = time.process_time(), time.thread_time()
        for process in psutil.Process().children(recursive=True):
            try:
                times = process.cpu_times()
                cpu[role_of(process)] += times.user + times.system
            except psutil.NoSuchProcess:
                continue
        return Used(dict(cpu), Counter(self.calls), time.monotonic())


# The report ----------------------------------------------------------------------------------------------------------


def tables(meter: Meter) -> str:
    """Return tables of medians per step."""
    step_s = statistics.median(used.at for used in meter.each)
    tunings = ", ".join(f"{each:.2f}" for each in meter.tunings)
    lines = [f"a step of {step_s:.2f} s; what it taught was worked out in {tunings} s of CPU, after each"]
    lines += ["", "| process | CPU ms |", "|---|---|"]
    lines += [f"| {role} | {1000 * each:.0f} |" for role, each in _medians([used.cpu for used in meter.each])]
    calls = _medians([used.calls for used in meter.each])
    lines += ["", f"| Ray call | {sum(each for _, each in calls):.0f} |", "|---|---|"]
    lines += [f"| {name} | {each:g} |" for name, each in calls]
    lines += ["", "| driver's thread, profiled | CPU ms | calls |", "|---|---|---|"]
    found = sorted(_by_part(meter).items(), key=lambda each: -each[1][0])
    lines += [f"| {part} | {1000 * seconds:.1f} | {calls:.0f} |" for part, (seconds, calls) in found]
    return "\n".join(lines)


def _medians(each: Sequence[Mapping[str, float]]) -> list[tuple[str, float]]:
    names = {name for one in each for name in one}
    medians = {name: statistics.median(one.get(name, 0) for one in each) for name in names}
    return sorted(((name, value) for name, value in medians.items() if value), key=lambda each: -each[1])


def _by_part(meter: Meter) -> dict[str, tuple[float, float]]:
    """Return part -> (seconds, calls) of a profiled step, without waiting."""
    found: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for (file, _, function), (_, calls, own, _, _) in pstats.Stats(meter.profile).stats.items():
        label = f"{file} {function}"
        if "poll" in function or "acquire" in function:  # waits
            continue
        part = next((name for name, pattern in PARTS.items() if re.search(pattern, label)), "others")
        found[part][0] += own / meter.steps
        found[part][1] += calls / meter.steps
    return {part: (seconds, calls) for part, (seconds, calls) in found.items()}


def main() -> None:
    """Run the job; print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6, help="with the profiler, and as many without it")
    parser.add_argument("--out", type=Path, help="the profile, for pstats")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    subprocess.run([sys.executable, "-m", "rlfuse.cli", "prepare", "quickstart"], check=True)
    meter = Meter(arguments.steps)
    with tempfile.TemporaryDirectory() as folder:
        steps = f"trainer.total_training_steps={WARM_UP + 2 * arguments.steps}"
        overrides = [*JOB, steps, f"trainer.default_local_dir={folder}", "trainer.experiment_name=benchmark"]
        run(load(overrides + arguments.overrides), meter.drive)
    print(tables(meter))
    if arguments.out:
        meter.profile.dump_stats(arguments.out)


if __name__ == "__main__":
    main()
