"""Compare a GRPO run of TRL with one of rlfuse: same model, data, group size, reward and cores.

    python tests/benchmarks/compare_trl.py outputs/compare_trl_cpu [--repeats 3] [--steps 12] [--sizes bundled]

Both start from the same weights, which know the remainder task's format and solve about a third of the problems, and
use the same settings; TRL's additional defaults (activation checkpointing, a reference model) are off. TRL generates
with transformers, as it does where its vLLM integration does not run, with one process on two threads and with two
processes; the faster counts. A model is saved after every second step, and all saved models answer the held-out prompts
greedily with the same function. The time until an accuracy of 0.8 is that of the steps before, without saving.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rlfuse.tasks.remainder import DATA_SOURCE, compute_score
from rlfuse.tasks.settings import WarmStart
from rlfuse.tasks.warm_start import warm_start

if TYPE_CHECKING:
    from trl import GRPOConfig

DATA = Path(".cache/rlfuse/remainder")
SIZES = {"bundled": WarmStart(), "ten times": WarmStart(hidden_size=256, layers=5, intermediate_size=768)}
PROMPTS, GROUP, LENGTH, RATE, SAVED_EVERY, GOOD = 16, 4, 160, 1e-4, 2, 0.8
OURS, TRL = "rlfuse", {"TRL, one process": 1, "TRL, two processes": 2}
STEPS = "step_seconds.json"


@dataclass(frozen=True)
class Run:
    """Durations and accuracy of one run."""

    steps: list[float]
    """Seconds of each step."""
    whole_s: float
    """Seconds from the start of the process to its end."""
    good_s: float | None
    """Seconds of steps until the held-out accuracy reached GOOD; None if it never did."""


def main() -> None:
    """Run the variants alternately and print the table; in TRL's process: train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train, arguments.folder, arguments.steps)
        return
    if not DATA.exists():
        subprocess.run([sys.executable, "-m", "rlfuse.cli", "prepare", "quickstart"], check=True)
    for size in arguments.sizes:
        model = arguments.folder.absolute() / "models" / size.replace(" ", "_")
        if not model.exists():
            warm_start(model, SIZES[size])
        runs: dict[str, list[Run]] = {name: [] for name in (OURS, *TRL)}
        for repeat in range(arguments.repeats):
            for name in list(runs)[:: 1 if repeat % 2 == 0 else -1]:
                folder = arguments.folder.absolute() / f"{size}_{name}_{repeat}".replace(" ", "_").replace(",", "")
                runs[name].append(measure(name, folder, model, arguments.steps))
                print(f"{size}, {name}: steps of {median(runs[name][-1].steps[1:]):.2f} s", flush=True)
        print(table(size, model, runs), flush=True)


def measure(name: str, folder: Path, model: Path, steps: int) -> Run:
    """Train in separate processes, then evaluate the saved models."""
    folder.mkdir(parents=True)
    if name == OURS:
        command, threads, saved = ours(folder, model, steps), 1, "rlfuse/run/global_step_{}/actor/huggingface"
    else:
        launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={TRL[name]}")
        command = (*launch, __file__, str(folder), "--train", str(model), "--steps", str(steps))
        threads, saved = 2 // TRL[name], "checkpoint-{}"
    whole = seconds_of(name, command, folder, {"OMP_NUM_THREADS": str(threads)})
    seconds = steps_of_ours(folder) if name == OURS else json.loads((folder / STEPS).read_text())
    good = (
        step for step in range(SAVED_EVERY, steps + 1, SAVED_EVERY) if accuracy(folder / saved.format(step)) >= GOOD
    )
    first = next(good, None)
    return Run(seconds, whole, sum(seconds[:first]) if first else None)


def seconds_of(name: str, command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> float:
    """Run a command, with its output in `folder`/log.txt."""
    start = time.monotonic()
    with (folder / "log.txt").open("w") as log:
        environment = {**os.environ, "WANDB_MODE": "offline"} | variables
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{name} ended with status {done.returncode}: see {log.name}")
    return time.monotonic() - start


def ours(folder: Path, model: Path, steps: int) -> tuple[str, ...]:
    words = ("algorithm=grpo", f"rollout.n={GROUP}", "rollout.temperature=1", f"data.train_batch_size={PROMPTS}")
    words += (f"model.path={model}", f"actor.ppo_mini_batch_size={PROMPTS}", f"actor.optim.lr={RATE}")
    words += ("actor.use_kl_loss=false", "algorithm.use_kl_in_reward=false", f"data.max_response_length={LENGTH}")
    words += ("trainer.val_before_train=false", "trainer.test_freq=1000", f"trainer.save_freq={SAVED_EVERY}")
    words += (
        "trainer.max_ckpt_to_keep=null",  # all saved models are evaluated afterwards
        f"trainer.default_local_dir={folder}",
        "trainer.experiment_name=run",
        f"trainer.total_training_steps={steps}",
    )
    return (sys.executable, "-m", "rlfuse.cli", "train", "experiment=quickstart", *words)


def steps_of_ours(folder: Path) -> list[float]:
    lines = (folder / "rlfuse" / "run" / "metrics.jsonl").read_text().splitlines()
    return [row["timing_s/step"] for row in map(json.loads, lines) if "timing_s/step" in row]


def train(model: Path, folder: Path, steps: int) -> None:
    """Run TRL's GRPO in this process and record the seconds of each step."""
    from trl import GRPOConfig

    def reward(completions: list, truth: list[str], **_: object) -> list[float]:
        answers = (completion[0]["content"] for completion in completions)
        return [score(answer, true) for answer, true in zip(answers, truth, strict=True)]

    settings = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=PROMPTS * GROUP // int(os.environ["WORLD_SIZE"]),
        num_generations=GROUP,
        max_completion_length=LENGTH,
        temperature=1.0,
        beta=0.0,
        learning_rate=RATE,
        weight_decay=0.01,
        lr_scheduler_type="constant",
        max_steps=steps,
        save_steps=SAVED_EVERY,
        save_only_model=True,
        report_to=[],
        seed=1,
    )
    rows = [{"prompt": row["prompt"], "truth": row["reward_model"]["ground_truth"]} for row in rows_of("train")]
    train_by_trl(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), model, settings, rows, reward)


def train_by_trl(
    policy: PreTrainedModel, model: Path, settings: GRPOConfig, rows: list[dict], reward: Callable[..., list[float]]
) -> None:
    """Train `policy`, with the tokenizer in `model`; write each step's seconds to STEPS in the output folder."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            self.start = time.monotonic()

        def on_step_end(self, *_: object, **__: object) -> None:
            seconds.append(time.monotonic() - self.start)

    trainer = GRPOTrainer(
        model=policy,
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
    )
    trainer.train()
    if trainer.is_world_process_zero():
        (Path(settings.output_dir) / STEPS).write_text(json.dumps(seconds))


def rows_of(part: str) -> list[dict]:
    return pq.read_table(DATA / f"{part}.parquet").to_pylist()


def accuracy(model: Path) -> float:
    """Return the accuracy of greedy answers to the held-out prompts."""
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    rows = rows_of("val")
    texts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    prompts = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = policy.generate(
        input_ids=prompts["input_ids"],
        attention_mask=prompts["attention_mask"],
        max_new_tokens=LENGTH,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    answers = tokenizer.batch_decode(tokens[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    truths = (row["reward_model"]["ground_truth"] for row in rows)
    return sum(map(score, answers, truths)) / len(rows)


def score(answer: str, truth: str) -> float:
    return compute_score(DATA_SOURCE, answer, truth)["score"]


def table(size: str, model: Path, runs: dict[str, list[Run]]) -> str:
    """Return medians over repetitions; a run's step time is the median without its first step."""
    weights = sum(each.numel() for each in AutoModelForCausalLM.from_pretrained(model).parameters())
    step = {name: median(median(run.steps[1:]) for run in each) for name, each in runs.items()}
    lines = [
        f"\n| {size}, {weights / 1e6:.1f} M parameters | step | x {OURS} | {len(runs[OURS][0].steps)} steps with start "
        f"and end | steps until held out {GOOD} |\n|---|---|---|---|---|"
    ]
    for name, each in runs.items():
        good = [run.good_s for run in each if run.good_s is not None]
        until = f"{median(good):.1f} s ({len(good)} of {len(each)} runs)" if good else "not reached"
        whole = median(run.whole_s for run in each)
        lines.append(f"| {name} | {step[name]:.2f} s | {step[name] / step[OURS]:.2f} | {whole:.0f} s | {until} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
