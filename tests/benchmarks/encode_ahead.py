"""Steps of a job with clips, with and without `video.encode_ahead`, alternating within one run.

    python tests/benchmarks/encode_ahead.py [--repeats 5] [key=value ...]

Two slots on two cores, GRPO on real clips of 10 to 30 s at 4 frames per second, a random VideoLLaMA3 with a heavy
tower. Without it, clips are decoded ahead, as by default. The learning rate is 0, and the caches hold the clips of only
two steps, so that every step encodes the same number of clips. Each variant has one uncounted step, which uses up clips
of the other variant, and two counted ones; the order alternates. Prints medians, and ratios within each repetition.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from rlfuse.config.compose import load
from rlfuse.run.build import run
from rlfuse.step.controller import Controller
from rlfuse.tasks.clips import SIGNS, WORDS, Clips, Kind, write_task
from rlfuse.tasks.small_video_models import SmallModel, byte_tokenizer, write_small_video_llama3

WAYS = {"decoded ahead": False, "encoded ahead": True}
COUNTED = 2
KINDS = ("step", "encode_clips", "encode")
"""Kinds of the reported spans."""
CLIPS = Clips(train=24, val=2, kinds=(Kind.ORDER,), shortest_s=10, longest_s=30)
MODEL = SmallModel(heads=4, layers=2, tower_heads=16, tower_layers=8)
JOB = (
    "algorithm=grpo",
    "model.dtype=float32",
    "rollout.n=4",
    "rollout.kv_cache_memory_mb=256",
    "data.train_batch_size=4",
    "actor.ppo_mini_batch_size=4",
    "data.max_prompt_length=2560",
    "data.max_response_length=64",
    "actor.ppo_max_token_len_per_gpu=4096",
    "actor.optim.lr=0",
    "reward.functions=[rlfuse.tasks.clips:compute_score]",
    "video.sampling=seed_vl",
    "video.levels=[4]",
    "video.max_tokens=480",
    *(f"video.fps_{task}=4" for task in ("general", "detail", "motion")),
    "video.cache_mb=1",
    "trainer.n_gpus_per_node=2",
    "trainer.total_training_steps=10000",
    "trainer.val_before_train=false",
    "trainer.test_freq=1000",
    "trainer.save_freq=0",
    "trainer.logger=[]",
    "cluster.device=cpu",
)


@dataclass
class Benchmark:
    """Steps run on the job's controller, and their measurements."""

    repeats: int
    steps: list[dict] = field(default_factory=list)
    number: int = 0

    async def drive(self, controller: Controller, _: int) -> None:
        """Run a warm-up step, then alternate the variants."""
        await controller.update_weights(0)
        await self._step(controller)
        for turn in range(self.repeats):
            for way in list(WAYS) if turn % 2 == 0 else reversed(WAYS):
                controller.engines.clips.ahead = WAYS[way]
                await self._step(controller)
                for _ in range(COUNTED):
                    self.steps.append({"turn": turn, "way": way} | await self._step(controller))
                print(f"turn {turn + 1}/{self.repeats}  {way}  {self.median('step', way, turn):.2f} s", flush=True)

    async def _step(self, controller: Controller) -> dict[str, float]:
        """Run a step; return the seconds of its spans by kind."""
        self.number += 1
        with controller.journal.recorder.span("step", step=self.number):
            await controller.learn(self.number)
            await controller.update_weights(self.number)
        spans = await controller.journal.collect(self.number)
        return {kind: sum(s.seconds for s in spans if s.kind == kind) for kind in KINDS}

    def median(self, name: str, way: str, turn: int | None = None) -> float:
        """Return the median over all turns, or in one of them."""
        return statistics.median(s[name] for s in self.steps if s["way"] == way and turn in (None, s["turn"]))

    def table(self) -> str:
        """Return a table of medians, and of the median and range of the ratios of turns."""
        lines = [
            "| clips of the next step | step | of it waiting for clips | encoding, all ranks |",
            "|---|---|---|---|",
        ]
        for way in WAYS:
            lines.append(" | ".join([f"| {way}", *(f"{self.median(kind, way):.2f} s" for kind in KINDS)]) + " |")
        without, ahead = ([self.median("step", way, turn) for turn in range(self.repeats)] for way in WAYS)
        ratios = sorted(a / b for a, b in zip(without, ahead, strict=True))
        return "\n".join([*lines, "", f"x {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"])


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    benchmark = Benchmark(arguments.repeats)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train, val = write_task(folder, CLIPS)
        model = write_small_video_llama3(folder / "model", MODEL, byte_tokenizer([*WORDS, *SIGNS]))
        files = [f"data.train_files=[{train}]", f"data.val_files=[{val}]", f"model.path={model}"]
        place = [f"trainer.default_local_dir={folder}/runs", "trainer.experiment_name=benchmark"]
        run(load([*JOB, *files, *place, *arguments.overrides]), benchmark.drive)
    print(benchmark.table())


if __name__ == "__main__":
    main()
