"""Every fusion policy on real engines, side by side in one run, on the same samples.

    python tests/benchmarks/real_policies.py [--repeats 6] [--out FOLDER] [key=value ...]

Two slots, each bound to one core, used alternately by a vLLM engine and a DeepSpeed rank. The task is the quickstart's
with a longer tail (at temperature 1.2 some responses run up to the cap), trained by GRPO with a reference model. The
learning rate is 0 and samples carry their seeds, so that every policy gets the same weights and responses. Policies
predict lengths from an earlier draw of each prompt with other seeds, as in a second epoch. Orders alternate; medians
are reported. Then every step is simulated with the costs fitted to all of them. Writes `table.md`, `steps.json` and
`timeline.png` (of the repetition with the median gain of `adaptive`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rlfuse.config.compose import load
from rlfuse.costs.fit import fit
from rlfuse.events import Span
from rlfuse.fusion.decisions import Settings
from rlfuse.fusion.policies import POLICIES
from rlfuse.observe.metrics import fusion_metrics
from rlfuse.observe.step_picture import Timeline, draw
from rlfuse.run.build import run
from rlfuse.simulate.job_step import finished_lengths, workload_of
from rlfuse.simulate.online_tuning import fit_costs, tune_settings
from rlfuse.simulate.runner import simulate
from rlfuse.step.controller import Controller

EARLIER = 1000
"""Step whose samples train the length predictor; its seeds differ from all measured ones."""
JOB = (
    "experiment=quickstart",
    "algorithm=grpo",
    "rollout.n=4",
    "rollout.temperature=1.2",
    "rollout.kv_cache_memory_mb=256",
    "data.max_response_length=400",
    "data.train_batch_size=16",
    "actor.ppo_mini_batch_size=16",
    "actor.optim.lr=0",
    "trainer.val_before_train=false",
    "trainer.save_freq=0",
    "trainer.logger=[]",
)


class Benchmark:
    """Steps run on the job's controller, and their measurements."""

    def __init__(self, repeats: int):
        self.repeats = repeats
        self.steps: list[dict] = []
        self.spans: dict[tuple[int, str], list[Span]] = {}

    async def drive(self, controller: Controller, _: int) -> None:
        """Learn lengths and costs, then measure every policy on the batch of each repetition."""
        await controller.update_weights(0)
        tuning = controller.tuning
        taught: list[Span] = []
        for repeat in range(self.repeats):
            taught += await self._step(controller, "serial", repeat, EARLIER + repeat, learn=True)
        taught += await self._step(
            controller, "serial", 0, 2 * EARLIER, learn=True
        )  # the accuracy of length prediction
        for policy in POLICIES:
            taught += (last := await self._step(controller, policy, 0, 3 * EARLIER, learn=False))
        tuning.costs = fit_costs(taught, tuning.costs).costs
        config, engines = controller.config, len(controller.engines.rollout)
        settings = {policy: tune_settings(tuning, policy, engines, config, last) for policy in POLICIES}
        print(f"costs     {tuning.costs}")
        for policy, chosen in settings.items():
            admission = f"longest_first {chosen.longest_first}, max_sequences {chosen.max_sequences}"
            moving = f"threshold {chosen.threshold}, max_decode_slowdown {chosen.max_decode_slowdown}"
            print(f"{policy:<9} {moving}, {admission}")
        for repeat in range(self.repeats):
            order = list(POLICIES) if repeat % 2 == 0 else list(reversed(POLICIES))
            for policy in order:
                tuning.fixed = settings[policy]
                spans = await self._step(controller, policy, repeat, 1 + repeat, learn=False)
                self._keep(repeat, policy, spans)
                print(
                    f"repetition {repeat + 1}/{self.repeats}  {policy:<9} {self.steps[-1]['step_s']:.2f} s", flush=True
                )

        self._simulate(controller, settings)

    def _simulate(self, controller: Controller, settings: dict[str, Settings]) -> None:
        """Add the simulated time to every step, with costs fitted to all of them."""
        costs = fit([span for spans in self.spans.values() for span in spans], controller.tuning.costs).costs
        for step in self.steps:
            policy, spans = step["policy"], self.spans[step["repeat"], step["policy"]]
            lengths = finished_lengths(spans)
            workload = workload_of(controller.config, costs, 2, *lengths, history=controller.tuning.lengths.error)
            result = simulate(workload, policy, settings[policy]).result
            step |= {"simulated_s": result.step_s, "bound_s": result.oracle_s}

    async def _step(self, controller: Controller, policy: str, batch: int, number: int, learn: bool) -> list[Span]:
        """Run a step on the prompts of this batch with the seeds of this step; return its spans."""
        controller.policy, controller.groups.prompts.taken = POLICIES[policy], batch
        with controller.journal.recorder.span("step", step=number):
            board = await controller.learn(number)
            await controller.update_weights(number)
        if learn:
            controller.tuning.lengths.learn(board.response_lengths())
        return await controller.journal.collect(number)

    def _keep(self, repeat: int, policy: str, spans: list[Span]) -> None:
        driver = [span for span in spans if span.where == "driver"]
        step = next(span for span in driver if span.kind == "step")
        generated = max(span.end for span in driver if span.kind == "gen")
        scored = max(span.end for span in driver if span.kind in ("gen", "reward", "old_log_prob", "ref", "values"))
        metrics = fusion_metrics(spans, slots=2)
        self.spans[repeat, policy] = spans
        self.steps.append(
            {"repeat": repeat, "policy": policy, "step_s": step.seconds, "gen_s": generated - step.start}
            | {"gen_and_scoring_s": scored - step.start, "idle_share": metrics["fusion/idle_share"]}
            | {"moved": metrics["fusion/samples_moved"], "trained_early": metrics["fusion/samples_trained_in_tail"]}
        )

    def median(self, policy: str, name: str) -> float:
        """Return the median over repetitions."""
        return statistics.median(step[name] for step in self.steps if step["policy"] == policy)

    def ratio(self, policy: str, name: str) -> list[float]:
        """Return `serial` over the policy in each repetition, on the same samples."""
        mine = {step["repeat"]: step[name] for step in self.steps if step["policy"] == policy}
        return sorted(step[name] / mine[step["repeat"]] for step in self.steps if step["policy"] == "serial")

    def won(self, policy: str) -> float:
        """Return the policy's measured gain over `serial` as a fraction of that of the simulated bound."""
        serial, mine = ({s["repeat"]: s for s in self.steps if s["policy"] == name} for name in ("serial", policy))
        return statistics.median(
            (1 - mine[i]["step_s"] / serial[i]["step_s"]) / (1 - serial[i]["bound_s"] / serial[i]["simulated_s"])
            for i in serial
        )

    def table(self) -> str:
        """Return a table of medians, and of ratios to `serial` with their range."""
        head = "policy, step, simulated, x serial (range), of what can be won, generation, generation + scoring, "
        head += "x serial, idle, moved"
        lines = ["| " + head.replace(", ", " | ") + " |", "|" + "---|" * 10]
        for policy in POLICIES:
            steps, scored = self.ratio(policy, "step_s"), self.ratio(policy, "gen_and_scoring_s")
            lines.append(
                f"| {policy} | {self.median(policy, 'step_s'):.2f} s | {self.median(policy, 'simulated_s'):.2f} s | "
                f"{statistics.median(steps):.2f} "
                f"({steps[0]:.2f}-{steps[-1]:.2f}) | {self.won(policy):.0%} | {self.median(policy, 'gen_s'):.2f} s | "
                f"{self.median(policy, 'gen_and_scoring_s'):.2f} s | {statistics.median(scored):.2f} | "
                f"{self.median(policy, 'idle_share'):.0%} | {self.median(policy, 'moved'):.0f} |"
            )
        return "\n".join(lines)

    def timelines(self) -> list[Timeline]:
        """Return the timelines of the repetition with the median gain of `adaptive`."""
        steps = {(step["repeat"], step["policy"]): step["step_s"] for step in self.steps}
        repeats = sorted(range(self.repeats), key=lambda repeat: steps[repeat, "serial"] / steps[repeat, "adaptive"])
        repeat = repeats[len(repeats) // 2]
        drawn = []
        for policy in POLICIES:
            step = next(span for span in self.spans[repeat, policy] if span.kind == "step")
            note = f"{step.seconds:.2f} s"
            drawn.append(Timeline(policy, note, self.spans[repeat, policy], step.start, step.seconds))
        return drawn


def main() -> None:
    """Run the job; print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("runs/real_policies"))
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    subprocess.run([sys.executable, "-m", "rlfuse.cli", "prepare", "quickstart"], check=True)
    benchmark = Benchmark(arguments.repeats)
    with tempfile.TemporaryDirectory() as folder:
        overrides = [*JOB, f"trainer.default_local_dir={folder}", "trainer.experiment_name=benchmark"]
        run(load(overrides + arguments.overrides), benchmark.drive)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "table.md").write_text(benchmark.table() + "\n")
    (arguments.out / "steps.json").write_text(json.dumps(benchmark.steps, indent=1))
    draw(benchmark.timelines(), arguments.out / "timeline.png")
    print(benchmark.table())


if __name__ == "__main__":
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    main()
