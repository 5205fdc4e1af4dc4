"""Step time against the share of groups without advantage, with and without skipping them.

    python tests/benchmarks/zero_advantage.py [--shares 0 0.3 0.6 0.9] [--repeats 5] [--policies serial adaptive]

Whole steps of the quickstart's task with Dr. GRPO and a model that saturates a core, on two slots: 32 prompts, 8
responses each, 2 mini-batches. A share of the groups, evenly spaced, gets equal rewards; the others get random ones.
For each share `actor.skip_zero_advantage=auto` and `false` alternate on the same samples, from the same weights. Prints
medians of seconds and of the ratio of each repetition, with its range, and the share that was skipped. *Difference* is
that of the weights after the step, relative to their norm. Requires a quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from slow_ranks import JOB, larger_policy, prepare, relative_difference, weights_of

from rlfuse.config.compose import load
from rlfuse.events import Span
from rlfuse.fusion.policies import POLICIES
from rlfuse.run.build import run
from rlfuse.samples import Prompt, Reward, Sample
from rlfuse.simulate.workload import skipped_prompts
from rlfuse.step.colocation import hand_over_all, to_ranks
from rlfuse.step.controller import Controller

CHANGES = ("algorithm=dr_grpo", "rollout.n=8", "actor.ppo_mini_batch_size=16", "actor.ppo_max_token_len_per_gpu=2048")


class RewardsByGroup:
    """Rewards of a step's prompts: equal in a share of the groups, random in the others."""

    share = 0.0

    def start_step(self, prompts: Sequence[Prompt]) -> None:
        """Choose the prompts with equal rewards; the order of scoring does not matter."""
        equal = skipped_prompts(len(prompts), self.share)
        self._equal = {prompt.index for prompt, chosen in zip(prompts, equal, strict=True) if chosen}

    async def score(self, samples: Sequence[Sample]) -> list[Reward]:
        return [Reward(1.0 if each.prompt.index in self._equal else each.seed % 1000 / 1000) for each in samples]

    async def drain(self, collect: bool = False) -> list[Span]:
        return []


@dataclass(frozen=True)
class Turn:
    """Measurements of one step."""

    seconds: float
    skipped: float
    weights: dict[str, torch.Tensor]


async def measure(controller: Controller, options: argparse.Namespace) -> None:
    """Print the lines of the table."""
    engines, tuning, saved = controller.engines, controller.tuning, Path(tempfile.mkdtemp(prefix="rlfuse-benchmark-"))
    rewards, upcoming = RewardsByGroup(), controller.groups.selection.upcoming
    controller.engines = replace(engines, reward=rewards)
    await controller.update_weights(0)
    for number in (1, 2):  # learns lengths and costs
        rewards.start_step(upcoming())
        with controller.journal.recorder.span("step", step=number):
            board = await controller.learn(number)
            await controller.update_weights(number)
        tuning.learn(board, await controller.journal.collect(number))
    await hand_over_all(to_ranks, engines.rollout, engines.trainer)
    await engines.trainer.save(saved)

    async def take(mode: str) -> Turn:
        await hand_over_all(to_ranks, engines.rollout, engines.trainer)
        await engines.trainer.load(saved)
        await controller.update_weights(2)
        controller.config.actor.skip_zero_advantage = mode
        controller.groups.prompts.taken = 2
        tuning.expect_skipped(rewards.share if mode == "auto" else 0.0)
        rewards.start_step(upcoming())
        await controller.journal.collect(3)
        began = time.perf_counter()
        with controller.journal.recorder.span("step", step=3):
            board = await controller.learn(3)
            await controller.update_weights(3)
        seconds = time.perf_counter() - began
        await controller.journal.collect(3)
        return Turn(seconds, board.skipped_share, await weights_of(engines.trainer))

    for policy in options.policies:
        controller.policy = POLICIES[policy]
        for rewards.share in options.shares:
            await take("auto")
            pairs = [(await take("false"), await take("auto")) for _ in range(options.repeats)]
            print(line(policy, rewards.share, pairs), flush=True)


def line(policy: str, share: float, pairs: Sequence[tuple[Turn, Turn]]) -> str:
    """Return a line of the table for (without skipping, with skipping) by repetition."""
    without, skipping = ([turn.seconds for turn in turns] for turns in zip(*pairs, strict=True))
    ratios = np.divide(without, skipping)
    difference = max(relative_difference(after.weights, before.weights) for before, after in pairs)
    skipped = pairs[0][1].skipped
    assert skipped > 0 or share == 0, "no sample was skipped"
    return (
        f"| {policy} | {share:.0%} | {skipped:.0%} | {statistics.median(without):.2f} | "
        f"{statistics.median(skipping):.2f} | {statistics.median(ratios):.2f} ({ratios.min():.2f} to "
        f"{ratios.max():.2f}) | {difference:.1g} |"
    )


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.3, 0.6, 0.9])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--policies", nargs="+", default=["serial", "adaptive"])
    options = parser.parse_args()
    prepare()
    print(
        "| policy | groups without advantage | skipped | all, s | skipping, s | ratio | difference |\n"
        + "|---" * 7
        + "|",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        where = (f"trainer.default_local_dir={folder}", "trainer.experiment_name=benchmark")
        job = load([*JOB, *CHANGES, f"model.path={larger_policy()}", *where])
        run(job, lambda controller, _: measure(controller, options))


if __name__ == "__main__":
    main()
